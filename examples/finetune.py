"""Fine-tune a model in a loop of your own: the head first, then everything. The task: is a digit odd?

    horovodrun -np 2 python examples/finetune.py                                        # from random weights
    horovodrun -np 2 python examples/finetune.py --model vit_b32 --weights WEIGHTS      # from those of the quick start

WEIGHTS is runs/quickstart/checkpoints/00000057/model.safetensors, or any file that fits the model, of any image size
and any classes. The result is in finetuned.safetensors.
"""

import argparse

import digits
import torch
import torch.nn.functional as F

import largebatch
import zoo

EPOCHS, HEAD_EPOCHS, BATCH, PASSES = 3, 1, 96, 2  # ranks share a batch, and each adds up its part in two passes

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="vit_nano32", help="a model of the zoo")
parser.add_argument("--weights", help="a file of weights to start from")
options = parser.parse_args()
train, held_out = digits.load()
images, labels = train.tensors

with largebatch.session() as comm:
    device = comm.device()
    model = zoo.create_model(options.model, img_size=64, num_classes=2, weights=options.weights).to(device)
    head = model.get_classifier().parameters()
    optimizer = comm.wrap(largebatch.Lamb.paper(model, lr=1e-2, weight_decay=0.02), model, passes=PASSES)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer.freeze(trained)
    optimizer.unfreeze(head)
    for epoch in range(EPOCHS):
        if epoch == HEAD_EPOCHS:
            optimizer.unfreeze(trained)
        model.train()
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))  # the same on all ranks
        for batch in order.split(BATCH):
            for samples, weight in comm.micro_batches(batch, passes=PASSES):
                loss = F.cross_entropy(model(images[samples].to(device)), labels[samples].to(device) % 2)
                (weight * loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        # Each rank counts a part of the held-out digits.
        mine = [column[comm.rank :: comm.size] for column in held_out.tensors]
        right = comm.allreduce(digits.count_right(model, mine[0], mine[1] % 2), name="right")
        if comm.rank == 0:
            print(f"epoch {epoch + 1}: {100 * right / len(held_out):.1f} % of {len(held_out)} held-out digits")
    if comm.rank == 0:
        zoo.save_weights(model, "finetuned.safetensors")
