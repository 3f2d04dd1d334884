"""An augmentation of your own, whose draws ranks, workers and a resume do not change.

    horovodrun -np 2 python examples/own_augmentation.py runs/own_augmentation
"""

import random
import sys

import digits
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import largebatch
import zoo


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images (3, 32, 32), moved, with noise and another contrast, and labels.

    Steps seeds torch, numpy.random and random for each sample and epoch. A library with a generator of its own takes
    that seed from torch.initial_seed().
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.dataset[index]
        image = image.roll((random.randint(-3, 3), random.randint(-3, 3)), (1, 2))
        image = image * float(np.random.uniform(0.8, 1.2))
        own = np.random.default_rng(torch.initial_seed())
        return image + 0.1 * torch.randn(image.shape) + float(own.normal(scale=0.05)), label


with largebatch.session() as comm:
    torch.manual_seed(0)
    train, held_out = digits.load(img_size=32)
    device = comm.device()
    model = zoo.create_model("vit_nano32", img_size=32, num_classes=10).to(device)
    data = Augmented(train)
    steps = largebatch.Steps(comm, data, global_batch_size=96, micro_batch_size=24, epochs=2, num_workers=1)
    optimizer = comm.wrap(largebatch.Lamb.paper(model, lr=1e-2), model, passes=steps.passes)
    steps.checkpoint(sys.argv[1], model, optimizer, every=5)
    for micro_batches in steps:
        for images, labels, weight in micro_batches:
            images, labels = images.to(device), labels.to(device)
            # Mixup: draws of a micro-batch are as repeatable as those of a sample.
            share, partners = float(np.random.default_rng(torch.initial_seed()).beta(0.2, 0.2)), images.flip(0)
            logits = model(torch.lerp(partners, images, share))
            loss = share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels.flip(0))
            (weight * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    if comm.rank == 0:
        print(digits.top1(model, held_out))
