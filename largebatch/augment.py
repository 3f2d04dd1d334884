"""Augmentation of one numbered micro-batch, on its device: soft targets, a teacher's among them, mixup and MixToken.

The arithmetic is pure functions that are told the draw; `Augment` only draws. What it draws depends on the
generator alone, and the generator on (seed, step, number of the micro-batch): another number of ranks changes
which process computes a micro-batch, never what comes out. Draws are made on the CPU, so they are the same
for a GPU.
"""

import hashlib
import math
import struct
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from largebatch.data.token_labels import TokenLabels
from largebatch.data.token_labels import targets as token_targets

TEACHERS_SHARE = {"none": (1.0, 1.0), "published": (0.5, 0.9), "intended": (0.9, 0.5)}  # if right, if wrong
MixBox = tuple[int, int, int, int]  # first row and column, last row and column plus one, in output cells


class Augmented(NamedTuple):
    """A micro-batch as the objective gets it."""

    images: Tensor
    """(B, 3, H, W)"""
    targets: Tensor
    """float32 (B, K), each row the probabilities of the K classes"""
    token_targets: Tensor | None = None
    """float32 (B, N, K), the same for each of N output cells, row by row, or zeros where nothing is known of a cell"""
    mix_box: MixBox | None = None
    """the output cells that image i of the batch is to take from image B - 1 - i; the targets are not mixed yet"""


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


def draw_mix_box(grid: int, *, generator: torch.Generator) -> MixBox:
    """MixToken's box among grid x grid output cells, from a CPU generator; it may be empty.

    As published: lambda ~ Beta(1, 1), sides of sqrt(1 - lambda) of the grid's, a random cell as the centre, and cut
    off at the border (https://arxiv.org/abs/2104.10858).
    """
    lam = float(torch.rand((), generator=generator, dtype=torch.float64))
    half = int(grid * math.sqrt(1.0 - lam)) // 2
    row, column = torch.randint(grid, (2,), generator=generator).tolist()
    first, last = (max(row - half, 0), max(column - half, 0)), (min(row + half, grid), min(column + half, grid))
    return (*first, *last)


def smooth(targets: Tensor, smoothing: float) -> Tensor:
    """Probabilities (..., K) with a share `smoothing` of them spread evenly, in place; rows of zeros stay zero.

    They add up to 1. The published code keeps 1 - smoothing + smoothing / K of the teacher's, so that its targets add
    up to 1 + smoothing / K.
    """
    even = targets.sum(dim=-1, keepdim=True) * (smoothing / targets.shape[-1])
    return targets.mul_(1.0 - smoothing).add_(even)


def with_ground_truth(teacher: Tensor, own: Tensor, labels: Tensor, *, rule: str) -> Tensor:
    """r teacher + (1 - r) own: the class targets (B, K) of a teacher and of the labels int64 (B,), by `TEACHERS_SHARE`.

    r depends on whether the teacher's first class is the label. published: 0.5 if it is, 0.9 if not; intended, which is
    what the published code says that it does: the wrong teacher gets less, 0.9 if right, 0.5 if not.
    """
    right, wrong = TEACHERS_SHARE[rule]
    share = torch.where(teacher.argmax(dim=1, keepdim=True) == labels[:, None], right, wrong)
    return torch.lerp(own, teacher, share.to(teacher.dtype))


class Augment:
    """Labels -> soft targets, then mixup: what the 32K recipe does (alpha 0.2, no smoothing).

    mixup_alpha: parameter of the Beta distribution, 0 for no mixup; label_smoothing: in [0, 1).

    Where token labels come with the images, the targets are a teacher's: that of the image what it saw over the whole
    crop (as in ReLabel), with the label's by the rule `ground_truth` (`with_ground_truth`), or the label's alone where
    it saw nothing of the crop. grid: output cells along each side for which there are token targets, 0: none.
    mix_token: draw a box among them (`draw_mix_box`).
    """

    def __init__(
        self,
        num_classes: int,
        *,
        mixup_alpha: float = 0.0,
        label_smoothing: float = 0.0,
        grid: int = 0,
        ground_truth: Literal["none", "published", "intended"] = "none",
        mix_token: bool = False,
    ) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}, expected 1 or more")
        if not 0.0 <= mixup_alpha < float("inf"):
            raise ValueError(f"mixup_alpha is {mixup_alpha}, expected a number from 0 (no mixup) up")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 up to, not including, 1")
        self.num_classes = num_classes
        self.mixup_alpha = mixup_alpha
        self.label_smoothing = label_smoothing
        assert grid or not mix_token
        self.grid = grid
        self.ground_truth = ground_truth
        self.mix_token = mix_token

    def __call__(
        self, images: Tensor, labels: Tensor, generator: torch.Generator, token_labels: TokenLabels | None = None
    ) -> Augmented:
        """Images (B, 3, H, W), labels int64 (B,) and token labels on one device; the generator is a CPU one."""
        batch = Augmented(images, one_hot(labels, self.num_classes, smoothing=self.label_smoothing))
        if token_labels is not None:
            batch = self._taught(batch, labels, token_labels)
        if self.mix_token:
            return batch._replace(mix_box=draw_mix_box(self.grid, generator=generator))
        if self.mixup_alpha == 0.0:
            return batch
        lam, partners = draw_mixup(len(images), self.mixup_alpha, generator=generator)
        partners = partners.to(images.device)
        tokens = None if batch.token_targets is None else _blend(batch.token_targets, lam, partners)
        return Augmented(*mixup(images, batch.targets, lam=lam, partners=partners), tokens)

    def _taught(self, batch: Augmented, labels: Tensor, token_labels: TokenLabels) -> Augmented:
        """The batch with the targets of a teacher."""
        grids = [1, self.grid] if self.grid else [1]
        taught, seen = token_targets(token_labels, num_classes=self.num_classes, grids=grids)
        taught = smooth(taught, self.label_smoothing)
        own = with_ground_truth(taught[:, 0], batch.targets, labels, rule=self.ground_truth)
        targets = torch.where(seen[:, :1], own, batch.targets)
        return Augmented(batch.images, targets, taught[:, 1:] if self.grid else None)


def _blend(tensor: Tensor, lam: float, partners: Tensor) -> Tensor:
    return tensor[partners].mul_(1.0 - lam).add_(tensor, alpha=lam)  # one temporary; the input is left alone
