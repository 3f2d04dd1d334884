"""VOLO's outlook attention in Triton: one launch forward, two backward, no copy of neighbourhoods, no map of weights.

`OutlookAttention` in volo.py is the specification. A window is the 3 × 3 pixels around every second pixel, and its nine
places are numbered row by row. With P[q, k], the softmax over k of scale · logits[q, k] in each window and head:

    out[the pixel at q]      =  sum of P[q, k] · values[the pixel at k]     over the windows that see it, and over k
    d values[the pixel at k] =  sum of P[q, k] · d out[the pixel at q]      over the windows that see it, and over q
    d P[q, k]                =  d out[the pixel at q] · values[the pixel at k]

A program works on some rows, and a row is one head of one window. `mix` computes the first two lines: a row writes the
window's middle, the pixel right of it, the one below and the one between these two, and reads each window that sees
them. `differentiate` turns the third line into the gradient of the logits. No two rows write to the same place and none
adds to a number of another, so a repetition gives the same bits. The softmax is computed again in the backward pass, in
float32 as in the forward pass, and in float64 for inputs of float64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # numbers of a tensor that a program has in its registers: rows times the width of a head


# -- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _rows(rows, windows_high, windows_wide, heads: tl.constexpr, tile: tl.constexpr):
    """Return a program's rows, whether each is there, and its image, head, and row and column of windows."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    window = row // heads
    image = window // (windows_high * windows_wide)
    i = window // windows_wide % windows_high
    return row.to(tl.int64), row < rows, image.to(tl.int64), row % heads, i, window % windows_wide


@triton.jit
def _pixels(
    tensor, image, head, y, x, there, height, width, heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr
):
    """Return addresses of a pixel for each row, (rows, padded), and the mask of those inside of the image."""
    lanes = tl.arange(0, padded)[None, :]
    inside = there & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    start = ((image * height + y) * width + x) * (heads * dim) + head * dim
    return tensor + start[:, None] + lanes, inside[:, None] & (lanes < dim)


@triton.jit
def _largest(logits, row, place, there, scale: tl.constexpr, dtype: tl.constexpr):
    """Return the largest of scale · logits in row `place` of each window; one that is no number does not count."""
    largest = tl.full(row.shape, float("-inf"), dtype)
    for k in tl.static_range(9):
        logit = tl.load(logits + 81 * row + 9 * place + k, mask=there, other=0.0).to(dtype) * scale
        largest = tl.maximum(largest, logit)
    return largest


@triton.jit
def _given(
    logits, sums, pixels, row, here, image, head, i, j, height, width, windows_high, windows_wide, scale: tl.constexpr,
    heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr, dtype: tl.constexpr,
    place: tl.constexpr, transposed: tl.constexpr
):  # fmt: skip
    """Return what a window gives to the pixel at one of its places: (rows, padded).

    The window is the row's own, or below it if the place is in the first row, or right of it if in the first column.
    """
    i += place // 3 == 0
    j += place % 3 == 0
    there = here & (i < windows_high) & (j < windows_wide)
    row += ((place // 3 == 0) * windows_wide + (place % 3 == 0)) * heads
    total, sum_of_powers = tl.zeros([tile, padded], dtype), tl.zeros([tile], dtype)
    if not transposed:
        largest = _largest(logits, row, place, there, scale, dtype)
    for other in range(9):
        if transposed:
            number = 9 * other + place
            largest = tl.load(sums + 18 * row + 2 * other, mask=there, other=0.0)
        else:
            number = 9 * place + other
        logit = tl.load(logits + 81 * row + number, mask=there, other=0.0).to(dtype) * scale
        weight = tl.exp(logit - largest)
        if transposed:
            weight *= tl.load(sums + 18 * row + 2 * other + 1, mask=there, other=0.0)
        else:
            sum_of_powers += weight
        y, x = 2 * i - 1 + other // 3, 2 * j - 1 + other % 3
        places, inside = _pixels(pixels, image, head, y, x, there, height, width, heads, dim, padded)
        total += weight[:, None] * tl.load(places, mask=inside, other=0.0).to(dtype)
    if not transposed:
        total *= (1.0 / sum_of_powers)[:, None]
    return total


@triton.jit
def mix(
    logits, sums, pixels, out, rows, height, width, windows_high, windows_wide, scale: tl.constexpr,
    heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr, dtype: tl.constexpr,
    transposed: tl.constexpr
):  # fmt: skip
    """Write four pixels for each row: P times the pixels of each window that sees them, or Pᵀ if `transposed`.

    sums: for `transposed`, those that `differentiate` wrote.
    """
    row, here, image, head, i, j = _rows(rows, windows_high, windows_wide, heads, tile)
    for own in tl.static_range(4):
        total = tl.zeros([tile, padded], dtype)
        for place in tl.static_range(9):
            if own // 2 == (place // 3 != 1) and own % 2 == (place % 3 != 1):
                total += _given(
                    logits, sums, pixels, row, here, image, head, i, j, height, width, windows_high, windows_wide,
                    scale, heads, dim, padded, tile, dtype, place, transposed
                )  # fmt: skip
        places, inside = _pixels(
            out, image, head, 2 * i + own // 2, 2 * j + own % 2, here, height, width, heads, dim, padded
        )
        tl.store(places, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def differentiate(
    logits, values, grad, d_logits, sums, rows, height, width, windows_high, windows_wide, scale: tl.constexpr,
    heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Write the gradient of each row's logits, and the largest logit and 1 / the sum of each of its softmaxes."""
    row, here, image, head, i, j = _rows(rows, windows_high, windows_wide, heads, tile)
    column = tl.arange(0, 16)[None, :]
    for q in tl.static_range(9):
        largest = _largest(logits, row, q, here, scale, dtype)
        places = (81 * row + 9 * q)[:, None] + column
        logit = tl.load(logits + places, mask=here[:, None] & (column < 9), other=0.0).to(dtype) * scale
        powers = tl.where(column < 9, tl.exp(logit - largest[:, None]), 0.0)
        inverse = 1.0 / tl.sum(powers, 1)
        tl.store(sums + 18 * row + 2 * q, largest, mask=here)
        tl.store(sums + 18 * row + 2 * q + 1, inverse, mask=here)
        y, x = 2 * i - 1 + q // 3, 2 * j - 1 + q % 3
        pixels, inside = _pixels(grad, image, head, y, x, here, height, width, heads, dim, padded)
        g = tl.load(pixels, mask=inside, other=0.0).to(dtype)
        d_p = tl.zeros([tile, 16], dtype)
        for k in range(9):
            y, x = 2 * i - 1 + k // 3, 2 * j - 1 + k % 3
            pixels, inside = _pixels(values, image, head, y, x, here, height, width, heads, dim, padded)
            product = tl.sum(g * tl.load(pixels, mask=inside, other=0.0).to(dtype), 1)
            d_p = tl.where(column == k, product[:, None], d_p)
        p = powers * inverse[:, None]
        d = scale * p * (d_p - tl.sum(p * d_p, 1)[:, None])
        tl.store(d_logits + places, d.to(d_logits.dtype.element_ty), mask=here[:, None] & (column < 9))


# -- the host ------------------------------------------------------------------------------------------------------


def outlook(logits: Tensor, values: Tensor, scale: float) -> Tensor:
    """Mix values (B, H, W, C) by the softmax of scale · logits (B, h, w, heads · 81), with h and w half of H and W.

    Half of an odd number is rounded up. Both are float32, float64, or half precision, on a GPU. Sums are in float32, or
    float64. ValueError for shapes that do not fit, or another device.
    """
    return torch.ops.zoo.outlook(logits, values, scale)


@torch.library.custom_op("zoo::outlook", mutates_args=())
def _forward(logits: Tensor, values: Tensor, scale: float) -> Tensor:
    logits, values = logits.contiguous(), values.contiguous()
    grid, shape, options = _sizes(logits, values, scale)
    out = torch.empty_like(values)
    with torch.cuda.device_of(values):
        mix[grid](logits, logits, values, out, *shape, **options, transposed=False)
    return out


@torch.library.custom_op("zoo::outlook_gradient", mutates_args=())
def _gradient(grad: Tensor, logits: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and values."""
    logits, values, grad = logits.contiguous(), values.contiguous(), grad.contiguous()
    grid, shape, options = _sizes(logits, values, scale)
    d_logits, d_values = torch.empty_like(logits), torch.empty_like(values)
    exact = torch.float64 if options["dtype"] == tl.float64 else torch.float32
    sums = logits.new_empty(shape[0], 9, 2, dtype=exact)
    with torch.cuda.device_of(values):
        differentiate[grid](logits, values, grad, d_logits, sums, *shape, **options)
        mix[grid](logits, sums, grad, d_values, *shape, **options, transposed=True)
    return d_logits, d_values


@_forward.register_fake
def _(logits: Tensor, values: Tensor, scale: float) -> Tensor:
    return values.new_empty(values.shape)


@_gradient.register_fake
def _(grad: Tensor, logits: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), values.new_empty(values.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    logits, values, ctx.scale = inputs
    ctx.save_for_backward(logits, values)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *torch.ops.zoo.outlook_gradient(grad, *ctx.saved_tensors, ctx.scale), None


_forward.register_autograd(_backward, setup_context=_keep)


def _sizes(logits: Tensor, values: Tensor, scale: float) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
    """Return the grid of a launch, the sizes that the kernels take, and their constants."""
    batch, height, width, channels = values.shape
    high, wide, heads = -(-height // 2), -(-width // 2), logits.shape[-1] // 81
    if logits.shape != (batch, high, wide, 81 * heads) or not heads or channels % heads:
        raise ValueError(
            f"outlook got logits of shape {tuple(logits.shape)} and values of shape {tuple(values.shape)}: expected "
            f"({batch}, {high}, {wide}, heads · 81), with a number of heads that divides {channels}."
        )
    if not (values.is_cuda or triton.knobs.runtime.interpret) or values.device != logits.device:
        raise ValueError(f"outlook got logits on {logits.device} and values on {values.device}: expected one GPU.")
    dim, rows = channels // heads, batch * high * wide * heads
    padded = triton.next_power_of_2(dim)
    tile = max(TILE // padded, 1)
    dtype = tl.float64 if torch.float64 in (logits.dtype, values.dtype) else tl.float32
    options = dict(scale=scale, heads=heads, dim=dim, padded=padded, tile=tile, dtype=dtype)
    return (triton.cdiv(rows, tile),), (rows, height, width, high, wide), options
