"""Input: from files to normalised tensors on the device.

The read side finds the images, reads their bytes and decodes them:

    records         TFRecord files and tf.train.Example, without TensorFlow
    label_maps      the feature of a record that holds a teacher's label map
    index           where the bytes of every image lie, its size and its label
    index_file      saves, loads and checks an index
    scan            builds an index from TFRecords or image files
    archives        reads the original tar files of ImageNet and the files of CIFAR-10
    shards          writes images as TFRecords, each shard complete or not at all
    sources         turns the value of --data into an index
    whole           tells if shards are missing, empty or doubled or have lost records, and which classes are empty
    quarantine      finds images that cannot be decoded and leaves them out
    imagenet_real   the ReaL labels of ImageNet's validation set
    reader          reads the encoded bytes with many threads, into memory that is used again
    stream          reads ahead, runs a DALI pipeline and finishes its images
    decoder         tells if DALI can decode an image
    dali            the loaders for training and evaluation

The draw side decides what is done to which image. Its functions are pure, so every rank and every resume agree:

    order           the order of the samples, their crops, flips and filters
    randaugment     the operations of RandAugment and AutoAugment and their strength
    randaugment_ops applies these operations, with Pillow or with torch
    pixels          cuts, resizes and normalises an image on a CPU
    token_labels    cuts a label map as its image was cut
"""
