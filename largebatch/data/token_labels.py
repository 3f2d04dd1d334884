"""Token labels: a teacher's predictions for the cells of an image, cut to the part that the network sees.

A label map (`label_maps`) covers the image's centre square. `place` composes crop, flip and warp of each sample to one
affine function from the network's input to the map. `targets` multiplies the map with the weight of each of its cells
in each cell of the output. For a crop inside the map and without a warp these weights are ROI-align's as published
(torchvision's, aligned=False on coordinates shifted by half a cell, adaptive sampling), except that crops of less than
one cell are not enlarged.

The published code treats the map as one of the full image, and swaps the axes of the crop after the flip. Here points
outside of the centre square, or empty after a warp, do not count; an output cell without other points has no target, a
row of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from largebatch.data.order import Draws

CELL = 16  # pixels of the network's input per cell of its output, in each direction


class TokenLabels(NamedTuple):
    """The maps of a batch and the placement of its images in them."""

    ids: Tensor
    """int32 (B, k, h, w), classes"""
    scores: Tensor
    """float16 (B, k, h, w), the teacher's logits of these classes"""
    placement: Tensor
    """float64 (B, 2, 3): from points of the network's input to points of the map, see `place`"""
    warp: Tensor | None = None
    """float64 (B, S, 2, 3): from points of the network's input to their places before the last of S warps, before the
    last two, ..., before all of them, which is a place in the crop; None if nothing was warped"""


# -- on the host -------------------------------------------------------------------------------------------------------


def place(draws: Draws, *, width: np.ndarray, height: np.ndarray, warp: np.ndarray | None = None) -> np.ndarray:
    """Return maps (n, 2, 3) float64 from points of the network's input to points of the map, both in the unit square.

    x goes right, y down. `width` and `height` are those of the stored images in pixels; `warp` comes from `warps`. The
    order is warps, flip, crop, and the step from the image to its centre square.
    """
    w, h, flip = draws.width, draws.height, draws.flip
    placement = np.zeros((len(w), 2, 3))
    side = np.minimum(width, height)
    x, y = draws.x - (width - side) / 2, draws.y - (height - side) / 2
    placement[:, 0, 0], placement[:, 0, 2] = np.where(flip, -w, w) / side, np.where(flip, x + w, x) / side
    placement[:, 1, 1], placement[:, 1, 2] = h / side, y / side
    return placement if warp is None else compose(placement, warp[:, -1])


def warps(steps: np.ndarray) -> np.ndarray:
    """Return `TokenLabels.warp` for operations (n, S, 2, 3), in the order in which they are applied to the image.

    All are needed: content that one operation moves out of the image does not come back with the next.
    """
    composed = [steps[:, -1]]
    for number in range(steps.shape[1] - 2, -1, -1):
        composed.append(compose(steps[:, number], composed[-1]))
    return np.stack(composed, axis=1)


def compose(outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Compose affine functions (n, 2, 3); `inner` is applied first."""
    composed = outer[:, :, :2] @ inner
    composed[:, :, 2] += outer[:, :, 2]
    return composed


# -- on the device -----------------------------------------------------------------------------------------------------


def targets(labels: TokenLabels, *, num_classes: int, grids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the teacher's probabilities on grids of g x g cells over the network's input, for each g of `grids`.

    They are float32 (B, N, num_classes), where N counts the cells of all grids, row by row; and bool (B, N): True if
    the teacher saw any part of the cell, else the row is zero. As published, classes that are not among the k kept in a
    cell have the score 0, and softmax comes last.
    """
    parts = [cell_weights(labels, grid=grid) for grid in grids]
    weights, seen = (torch.cat(part, dim=1) for part in zip(*parts))
    ids, scores = labels.ids.flatten(2).transpose(1, 2), labels.scores.flatten(2).transpose(1, 2)
    maps = torch.zeros(*ids.shape[:2], num_classes, device=ids.device)
    maps.scatter_(2, ids.long(), scores.float())
    probabilities = torch.bmm(weights, maps).softmax(dim=2)
    return probabilities.mul_(seen[:, :, None]), seen


def cell_weights(labels: TokenLabels, *, grid: int) -> tuple[Tensor, Tensor]:
    """Return the weights float32 (B, grid², h * w) of the map's cells in the output cells, and flags bool (B, grid²).

    The weights of an output cell add up to 1 if its flag is set, and to 0 otherwise. Each is sampled at as many points
    as ROI-align takes, about one for each cell of the map that it covers.
    """
    height, width = labels.ids.shape[2:]
    most = math.ceil(max(height, width) / grid)
    points, counted = _points(labels.placement, grid=grid, most=most, size=(width, height))
    x, y = _apply(labels.placement, points)
    counted = counted & _inside(x, y)
    if labels.warp is not None:
        for before in labels.warp.unbind(dim=1):
            counted = counted & _inside(*_apply(before, points))
    number = counted.sum(dim=2)
    in_rows = _interpolation(y, height) * (counted / number.clamp(min=1)[:, :, None])[..., None]
    weights = in_rows.flatten(0, 1).transpose(1, 2) @ _interpolation(x, width).flatten(0, 1)
    return weights.view(len(x), grid * grid, height * width), number > 0


def _points(placement: Tensor, *, grid: int, most: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return points of the input in each output cell, float64 (B, grid², P, 2), and which of them count, bool (B, 1,
    P).

    Along each axis there are as many points as cells of the map in an output cell, rounded up, and at most `most`. P is
    most² for every sample, so that nobody waits for the device.
    """
    across, down = placement[:, :, :2].abs().unbind(dim=1)
    number = (torch.maximum(across * size[0], down * size[1]) / grid).ceil().clamp(1, most)[:, :, None]  # (B, 2, 1)
    steps = torch.arange(most, device=placement.device)
    counted = steps < number
    places = (torch.arange(grid, device=placement.device)[:, None] + ((steps + 0.5) / number)[:, :, None]) / grid
    u, v = places[:, 0, None, :, None, :], places[:, 1, :, None, :, None]  # (B, rows, columns, in rows, in columns)
    shape = (len(placement), grid, grid, most, most)
    points = torch.stack([u.expand(shape), v.expand(shape)], dim=-1).view(len(placement), grid * grid, -1, 2)
    both = counted[:, 1, None, :, None] & counted[:, 0, None, None, :]
    return points, both.view(len(placement), 1, -1)


def _apply(affine: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and y (B, N, P) of points (B, N, P, 2) after affine maps (B, 2, 3)."""
    moved = points.flatten(1, 2) @ affine[:, :, :2].transpose(1, 2) + affine[:, None, :, 2]
    x, y = moved.view(points.shape).unbind(dim=-1)
    return x, y


def _inside(x: Tensor, y: Tensor) -> Tensor:
    return (x >= 0) & (x <= 1) & (y >= 0) & (y <= 1)


def _interpolation(x: Tensor, size: int) -> Tensor:
    """Return the weights float32 (..., size) of `size` cells at points of [0, 1]."""
    at = (x * size - 0.5).clamp(0, size - 1)
    return (1 - (at[..., None] - torch.arange(size, device=x.device)).abs()).clamp(min=0).float()
