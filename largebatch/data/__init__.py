"""Input: from files to normalised tensors on the device.

The read side finds the images, reads their bytes and decodes them. The draw side (order, randaugment, pixels,
token_labels) decides what is done to which image: its functions are pure, so every rank and every resume agree.
"""
