"""Losses of your own: several labels for an image, and weights of the classes.

    horovodrun -np 2 python examples/own_loss.py runs/own_loss

A digit has three labels: is it odd, is it a prime, is it above six? And one class of four, of which some are rare.
"""

import sys

import digits
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import largebatch
import zoo


def multi_label(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean binary cross entropy of logits (B, K) and targets (B, K), float, each from 0 to 1."""
    return F.binary_cross_entropy_with_logits(logits, targets)


def weighted(logits: Tensor, labels: Tensor, class_weights: Tensor) -> Tensor:
    """Return the mean of the weighted cross entropies of logits (B, K) and labels (B,).

    Not `F.cross_entropy(logits, labels, class_weights)`: that divides by the weights of a micro-batch, so its parts do
    not add up to the loss of the batch. This divides by the number of its images.
    """
    return F.cross_entropy(logits, labels, class_weights, reduction="none").mean()


with largebatch.session() as comm:
    torch.manual_seed(0)
    train, _ = digits.load(img_size=32)
    images, digit = train.tensors
    targets = torch.stack([digit % 2 == 1, torch.isin(digit, torch.tensor([2, 3, 5, 7])), digit > 6], 1).float()
    classes = digit.clamp(max=3)
    device = comm.device()
    class_weights = (len(classes) / (4 * classes.bincount())).to(device)  # their mean over the images is 1
    model = zoo.create_model("vit_nano32", img_size=32, num_classes=3 + 4).to(device)
    data = TensorDataset(images, targets, classes)
    steps = largebatch.Steps(comm, data, global_batch_size=96, micro_batch_size=24, epochs=2)
    optimizer = comm.wrap(largebatch.Lamb.paper(model, lr=1e-2), model, passes=steps.passes)
    steps.checkpoint(sys.argv[1], model, optimizer, every=5)
    for micro_batches in steps:
        for images, targets, classes, weight in micro_batches:
            logits = model(images.to(device))
            loss = multi_label(logits[:, :3], targets.to(device))
            loss = loss + weighted(logits[:, 3:], classes.to(device), class_weights)
            (weight * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
