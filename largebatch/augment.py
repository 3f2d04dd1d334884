"""Augmentation of a micro-batch on its device: random erasing, soft targets, mixup, cutmix and MixToken.

Pure functions take the draw as an argument. `Augment` draws on the CPU, from a generator that depends on (seed, step,
number of the micro-batch) alone; so neither the number of ranks nor the device changes a result.
"""

import hashlib
import math
import struct
from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from largebatch.data.token_labels import TokenLabels
from largebatch.data.token_labels import targets as token_targets
from largebatch.native.copies import to_device
from zoo.model import MixBox

TEACHERS_SHARE = {"none": (1.0, 1.0), "published": (0.5, 0.9), "intended": (0.9, 0.5)}  # if right, if wrong


class Augmented(NamedTuple):
    """A micro-batch in the form that an objective takes."""

    images: Tensor
    """(B, 3, H, W)"""
    targets: Tensor
    """float32 (B, K), each row the probabilities of the K classes"""
    token_targets: Tensor | None = None
    """float32 (B, N, K), the same for each of N output cells, or zeros for a cell of which nothing is known"""
    mix_box: MixBox | None = None
    """the output cells that image i of the batch is to take from image B - 1 - i; the targets are not mixed yet"""


def seed_for(seed: int, step: int, number: int, *, purpose: str = "augment") -> int:
    """Return the seed, in [0, 2**63), of a micro-batch's draws for a purpose (at most 16 bytes).

    A sum would repeat: seed 1 at step 0 would be seed 0 at step 1.
    """
    place = struct.pack("<qqq", seed, step, number)
    digest = hashlib.blake2b(place, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_draws(seed: int, device: torch.device) -> None:
    """Seed a model's draws on the host and its device alone; `torch.manual_seed` seeds all devices."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def one_hot(labels: Tensor, num_classes: int, *, smoothing: float = 0.0) -> Tensor:
    """Turn labels int64 (B,) into probabilities float32 (B, K), smoothed as in https://arxiv.org/abs/1512.00567."""
    even = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), even, dtype=torch.float32, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1.0 - smoothing + even)


def mixup(images: Tensor, targets: Tensor, *, lam: float, partners: Tensor) -> tuple[Tensor, Tensor]:
    """Mix images (B, 3, H, W) and targets (B, K): lam of each sample i and 1 - lam of sample partners[i], int64 (B,).

    Cross entropy is linear in its target, so this equals the published form (https://arxiv.org/abs/1710.09412).
    """
    return _blend(images, lam, partners), _blend(targets, lam, partners)


def draw_mixup(num_images: int, alpha: float, *, generator: torch.Generator) -> tuple[float, Tensor]:
    """Draw lambda ~ Beta(alpha, alpha), and a permutation as partners, from a CPU generator."""
    partners = torch.randperm(num_images, generator=generator)
    # torch's Beta takes no generator, but numpy's does, so one draw of our generator seeds it.
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return float(np.random.default_rng(seed).beta(alpha, alpha)), partners


class Box(NamedTuple):
    """Rows top <= y < bottom, columns left <= x < right."""

    top: int
    bottom: int
    left: int
    right: int


def cutmix(images: Tensor, targets: Tensor, *, box: Box, partners: Tensor) -> tuple[Tensor, Tensor]:
    """Paste the box of sample partners[i], int64 (B,), into each sample i; targets mix as the areas do.

    Images (B, 3, H, W), targets (B, K) (https://arxiv.org/abs/1905.04899).
    """
    mixed, inside = images.clone(), (..., slice(box.top, box.bottom), slice(box.left, box.right))
    mixed[inside] = images[inside][partners]
    share = (box.bottom - box.top) * (box.right - box.left) / (images.shape[-2] * images.shape[-1])
    return mixed, _blend(targets, 1.0 - share, partners)


def draw_cutmix(
    num_images: int, alpha: float, size: tuple[int, int], *, generator: torch.Generator
) -> tuple[Box, Tensor]:
    """Draw lambda and partners as for mixup, and a box of the share 1 - lambda of `size` (H, W), then clipped to it.

    Its sides are even, as in the paper's code and the timm of DeiT's runs.
    """
    lam, partners = draw_mixup(num_images, alpha, generator=generator)
    edges: list[int] = []
    for side in size:
        half, centre = int(side * math.sqrt(1.0 - lam)) // 2, int(torch.randint(side, (), generator=generator))
        edges += [max(0, centre - half), min(side, centre + half)]
    return Box(*edges), partners


ERASED_AREA, ERASED_ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)  # ranges, of https://arxiv.org/abs/1708.04896 and timm
ATTEMPTS = 10


def draw_boxes(num_images: int, size: tuple[int, int], prob: float, *, generator: torch.Generator) -> Tensor:
    """Draw boxes to erase, int64 (num_images, 4): top, bottom, left, right; empty with probability 1 - prob.

    The area is uniform, the aspect ratio log-uniform; the first of ten attempts that fits into the image counts. size:
    (H, W). The generator is a CPU one.
    """
    u = torch.rand(num_images, 1 + 4 * ATTEMPTS, dtype=torch.float64, generator=generator).numpy()
    area, aspect, down, along = u[:, 1:].reshape(num_images, 4, ATTEMPTS).swapaxes(0, 1)
    area = size[0] * size[1] * (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * area)
    low, high = np.log(ERASED_ASPECT)
    aspect = np.exp(low + (high - low) * aspect)
    heights, widths = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (heights < size[0]) & (widths < size[1])
    chosen = np.arange(num_images), fits.argmax(axis=1)
    height, width = heights[chosen], widths[chosen]
    top = np.floor(down[chosen] * (size[0] - height + 1))
    left = np.floor(along[chosen] * (size[1] - width + 1))
    boxes = np.stack([top, top + height, left, left + width], axis=-1).astype(np.int64)
    boxes[(u[:, 0] >= prob) | ~fits.any(axis=1)] = 0
    return torch.from_numpy(boxes)


def erase(images: Tensor, *, boxes: Tensor, noise: Tensor) -> Tensor:
    """Fill the boxes of `draw_boxes` in images (B, 3, H, W) with noise, a number per erased value in memory order."""
    erased = torch.nonzero(boxes[:, 1] > boxes[:, 0])[:, 0]
    edges, samples, fill = to_device(boxes[erased, :, None], erased, noise, device=images.device)
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    in_rows = (rows >= edges[:, 0]) & (rows < edges[:, 1])
    in_columns = (columns >= edges[:, 2]) & (columns < edges[:, 3])
    inside = (in_rows[:, :, None] & in_columns[:, None, :])[:, None].expand(-1, images.shape[1], -1, -1)
    return images.index_copy(0, samples, images[samples].masked_scatter(inside, fill.to(images.dtype)))


def draw_noise(boxes: Tensor, num_channels: int, *, generator: torch.Generator) -> Tensor:
    pixels = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
    return torch.randn(num_channels * int(pixels.sum()), generator=generator)


def draw_mix_box(grid: int, *, generator: torch.Generator) -> MixBox:
    """Draw MixToken's box, perhaps empty, among grid x grid output cells, from a CPU generator.

    As published (https://arxiv.org/abs/2104.10858): lambda ~ Beta(1, 1), sides of sqrt(1 - lambda), clipped.
    """
    lam = float(torch.rand((), generator=generator, dtype=torch.float64))
    half = int(grid * math.sqrt(1.0 - lam)) // 2
    row, column = torch.randint(grid, (2,), generator=generator).tolist()
    first, last = (max(row - half, 0), max(column - half, 0)), (min(row + half, grid), min(column + half, grid))
    return (*first, *last)


def smooth(targets: Tensor, smoothing: float) -> Tensor:
    """Smooth probabilities (..., K) in place; a sum stays 1 or 0, while the published code has 1 + smoothing / K."""
    even = targets.sum(dim=-1, keepdim=True) * (smoothing / targets.shape[-1])
    return targets.mul_(1.0 - smoothing).add_(even)


def with_ground_truth(teacher: Tensor, own: Tensor, labels: Tensor, *, rule: str) -> Tensor:
    """Mix class targets (B, K) of the teacher and of the labels int64 (B,) by `TEACHERS_SHARE`.

    The published code gives a wrong teacher more weight, though its text says less ("intended").
    """
    right, wrong = TEACHERS_SHARE[rule]
    share = torch.where(teacher.argmax(dim=1, keepdim=True) == labels[:, None], right, wrong)
    return torch.lerp(own, teacher, share.to(teacher.dtype))


@dataclass
class Augment:
    """Erasing, labels -> soft targets, then mixup, cutmix or MixToken.

    mixup_alpha, cutmix_alpha: 0: none; with both, each is as likely. A teacher's token labels give the target of the
    whole crop (as in ReLabel), mixed with the label by `ground_truth`; if it saw nothing of the crop, the label
    counts. grid: output cells along each side with token targets; 0: none. mix_token replaces mixup and cutmix.
    """

    num_classes: int
    _: KW_ONLY
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    label_smoothing: float = 0.0
    erase_prob: float = 0.0
    grid: int = 0
    ground_truth: Literal["none", "published", "intended"] = "none"
    mix_token: bool = False

    def __post_init__(self) -> None:
        if self.num_classes < 1:
            raise ValueError(f"num_classes is {self.num_classes}, expected 1 or more")
        for name in ("mixup_alpha", "cutmix_alpha"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number from 0 (none) up")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, expected 0 up to, not including, 1")
        if not 0.0 <= self.erase_prob <= 1.0:
            raise ValueError(f"erase_prob is {self.erase_prob}, expected a probability, 0 to 1")
        assert self.grid or not self.mix_token

    def __call__(
        self, images: Tensor, labels: Tensor, generator: torch.Generator, token_labels: TokenLabels | None = None
    ) -> Augmented:
        """Augment images (B, 3, H, W) with labels int64 (B,), on one device; the generator is a CPU one."""
        targets, taught = one_hot(labels, self.num_classes, smoothing=self.label_smoothing), None
        if token_labels is not None:
            targets, taught = self._taught(targets, labels, token_labels)
        size = images.shape[-2], images.shape[-1]
        if self.erase_prob:
            boxes = draw_boxes(len(images), size, self.erase_prob, generator=generator)
            images = erase(images, boxes=boxes, noise=draw_noise(boxes, images.shape[1], generator=generator))
        if self.mix_token:
            return Augmented(images, targets, taught, draw_mix_box(self.grid, generator=generator))
        if self._cuts(generator):
            assert taught is None, "cells of the box would have targets of another image"
            box, partners = draw_cutmix(len(images), self.cutmix_alpha, size, generator=generator)
            (partners,) = to_device(partners, device=images.device)
            return Augmented(*cutmix(images, targets, box=box, partners=partners))
        if self.mixup_alpha:
            lam, partners = draw_mixup(len(images), self.mixup_alpha, generator=generator)
            (partners,) = to_device(partners, device=images.device)
            taught = None if taught is None else _blend(taught, lam, partners)
            return Augmented(*mixup(images, targets, lam=lam, partners=partners), taught)
        return Augmented(images, targets, taught)

    def _taught(self, own: Tensor, labels: Tensor, token_labels: TokenLabels) -> tuple[Tensor, Tensor | None]:
        """Return the class targets (B, K) and the token targets (B, N, K), or None without a grid."""
        grids = [1, self.grid] if self.grid else [1]
        taught, seen = token_targets(token_labels, num_classes=self.num_classes, grids=grids)
        taught = smooth(taught, self.label_smoothing)
        shared = with_ground_truth(taught[:, 0], own, labels, rule=self.ground_truth)
        return torch.where(seen[:, :1], shared, own), taught[:, 1:] if self.grid else None

    def _cuts(self, generator: torch.Generator) -> bool:
        if self.mixup_alpha and self.cutmix_alpha:
            return float(torch.rand((), generator=generator)) < 0.5
        return self.cutmix_alpha > 0


def _blend(tensor: Tensor, lam: float, partners: Tensor) -> Tensor:
    return tensor[partners].mul_(1.0 - lam).add_(tensor, alpha=lam)  # one temporary; the input is left alone
