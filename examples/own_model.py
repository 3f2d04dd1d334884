"""A model of your own, with LAMB, checkpoints and an exact resume, on any number of ranks.

    horovodrun -np 2 python examples/own_model.py runs/own_model

The same command goes on where it was stopped, also with another -np.
"""

import sys

import digits
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import largebatch


class Net(nn.Module):
    """Images (B, 3, 16, 16) -> logits (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.GELU(), nn.Flatten(), nn.Dropout(0.1))
        self.norm = nn.LayerNorm(512)
        self.head = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.features(images)))
        return logits


with largebatch.session() as comm:
    torch.manual_seed(0)
    train, held_out = digits.load(img_size=16)
    device = comm.device()
    model = Net().to(device)
    steps = largebatch.Steps(comm, train, global_batch_size=96, micro_batch_size=24, epochs=3)
    optimizer = comm.wrap(largebatch.Lamb.paper(model, lr=1e-2), model, passes=steps.passes)
    steps.checkpoint(sys.argv[1], model, optimizer, every=5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps.num_steps, steps.step - 1)
    for micro_batches in steps:
        for images, labels, weight in micro_batches:
            (weight * F.cross_entropy(model(images.to(device)), labels.to(device))).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if comm.rank == 0:
        print(digits.top1(model, held_out))
