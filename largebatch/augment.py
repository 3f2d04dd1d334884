"""Augmentation of one numbered micro-batch, on its device: soft targets and mixup.

The arithmetic is pure functions that are told the draw; `Augment` only draws. What it draws depends on the
generator alone, and the generator on (seed, step, number of the micro-batch): another number of ranks changes
which process computes a micro-batch, never what comes out. Draws are made on the CPU, so they are the same
for a GPU.
"""

import hashlib
import struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Augmented(NamedTuple):
    """A micro-batch as the objective gets it."""

    images: Tensor
    """(B, 3, H, W)"""
    targets: Tensor
    """float32 (B, K), each row the probabilities of the K classes"""


def seed_for(seed: int, step: int, number: int, *, purpose: str = "augment") -> int:
    """The seed, in [0, 2**63), of what is drawn for one micro-batch: a hash of the run's seed and its place.

    A hash, not a sum: neighbouring places share nothing, and seed 1 at step 0 is not seed 0 at step 1.
    purpose: a name of at most 16 bytes for what is drawn, so that augmentation and dropout are independent.
    """
    place = struct.pack("<qqq", seed, step, number)
    digest = hashlib.blake2b(place, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") >> 1


def one_hot(labels: Tensor, num_classes: int, *, smoothing: float = 0.0) -> Tensor:
    """Labels int64 (B,) -> probabilities float32 (B, K): `smoothing` is spread evenly over all K classes.

    The true class so gets 1 - smoothing + smoothing / K (https://arxiv.org/abs/1512.00567).
    """
    even = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), even, dtype=torch.float32, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1.0 - smoothing + even)


def mixup(images: Tensor, targets: Tensor, *, lam: float, partners: Tensor) -> tuple[Tensor, Tensor]:
    """Mix each sample i with sample partners[i]: lam of the first and 1 - lam of the second.

    Images (B, 3, H, W), targets (B, K), partners int64 (B,) with values in [0, B). As cross entropy is linear
    in its target, its value here is lam * CE(label) + (1 - lam) * CE(partner's label), the form in which
    mixup is published (https://arxiv.org/abs/1710.09412).
    """
    return _blend(images, lam, partners), _blend(targets, lam, partners)


def draw_mixup(num_images: int, alpha: float, *, generator: torch.Generator) -> tuple[float, Tensor]:
    """One lambda ~ Beta(alpha, alpha) and one random permutation as partners, from a CPU generator."""
    partners = torch.randperm(num_images, generator=generator)
    # torch's Beta takes no generator, numpy's does: one draw of ours seeds it
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return float(np.random.default_rng(seed).beta(alpha, alpha)), partners


class Augment:
    """Labels -> soft targets, then mixup: what the 32K recipe does (alpha 0.2, no smoothing).

    mixup_alpha: parameter of the Beta distribution, 0 for no mixup; label_smoothing: in [0, 1).
    """

    def __init__(self, num_classes: int, *, mixup_alpha: float = 0.0, label_smoothing: float = 0.0) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}, expected 1 or more")
        if not 0.0 <= mixup_alpha < float("inf"):
            raise ValueError(f"mixup_alpha is {mixup_alpha}, expected a number from 0 (no mixup) up")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 up to, not including, 1")
        self.num_classes = num_classes
        self.mixup_alpha = mixup_alpha
        self.label_smoothing = label_smoothing

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Augmented:
        """Images (B, 3, H, W) and labels int64 (B,) on one device; the generator is a CPU one."""
        targets = one_hot(labels, self.num_classes, smoothing=self.label_smoothing)
        if self.mixup_alpha == 0.0:
            return Augmented(images, targets)
        lam, partners = draw_mixup(len(images), self.mixup_alpha, generator=generator)
        return Augmented(*mixup(images, targets, lam=lam, partners=partners.to(images.device)))


def _blend(tensor: Tensor, lam: float, partners: Tensor) -> Tensor:
    return tensor[partners].mul_(1.0 - lam).add_(tensor, alpha=lam)  # one temporary; the input is left alone
