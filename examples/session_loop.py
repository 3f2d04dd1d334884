"""The loop of plain_loop.py on any number of ranks, with LAMB and gradient accumulation: seven other lines.

    horovodrun -np 2 python examples/session_loop.py

BATCH is the batch of all ranks together. Any number of ranks and passes gives the same gradients up to rounding, also
for the last batch of an epoch, which is shorter. Also without the seeds, all ranks have the same model and the same
order of images.
"""

import digits
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import largebatch
import zoo

EPOCHS, BATCH = 3, 48

with largebatch.session() as comm:
    torch.manual_seed(0)
    train, held_out = digits.load()
    order = torch.Generator().manual_seed(0)
    device = comm.device()
    model = zoo.create_model("vit_nano32", img_size=64, num_classes=10).to(device)
    optimizer = comm.wrap(largebatch.Lamb.paper(model, lr=4e-2), model, passes=2)
    for epoch in range(EPOCHS):
        for images, labels in DataLoader(train, batch_size=BATCH, shuffle=True, generator=order):
            for images, labels, weight in comm.micro_batches(images, labels, passes=2):
                loss = F.cross_entropy(model(images.to(device)), labels.to(device)) * weight
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if comm.rank == 0:
            print(f"epoch {epoch + 1}: {digits.top1(model, held_out)}")
