"""LAMB on a GPU: three launches of Triton update all tensors of a group. `lamb_` in lamb.py has the formulas.

A tensor is cut into chunks, and a program of a launch works on one:

    moments    read x, g, m, v; write m, v and the chunk's sums of the squares of x and u
    ratios     add up the sums of each tensor, in the order of its chunks; write its trust ratio
    apply      read x, m, v; compute u again; write x

No two programs write to the same place, so a repetition gives the same bits, and so do all ranks. To keep u would move
as many bytes as to compute it twice. No product is fused with a sum, so m and v have the bits of the specification.

A table on the device has a row for each tensor. The host sends it before each step, as a gradient may have moved.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from largebatch.native.copies import to_device

CHUNK = 4096  # elements; a large model gets ten times as many chunks as a GPU has programs at a time
BLOCK = 1024  # elements that a program has in its registers
EXACT = {"num_warps": 4, "enable_fp_fusion": False}

# The columns of the table, int64: four addresses, the length, the first chunk, and 1 if all addresses suit loads and
# stores of 16 bytes.
COLUMNS = tl.constexpr(7)
X, G, M, V = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SIZE, FIRST, ALIGNED = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)

# The numbers, float64: those of lamb.Scalars.
LR, BETA1, NEW1, BETA2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NEW2, ROOT, EPS, DECAY = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
NORM_MIN, NORM_MAX, RATIO_MAX, ADAPT = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)
KEEP = tl.constexpr(12)
LARGEST = tl.constexpr(1e30)  # ratio, as in lamb.py


# -- kernels -----------------------------------------------------------------------------------------------------------


@triton.jit
def _row(table, owners, chunk, chunk_size: tl.constexpr):
    """Return the table's row of a chunk's tensor, the chunk's first element, and its length, in 64 bits."""
    row = table + tl.load(owners + chunk) * COLUMNS
    start = (chunk - tl.load(row + FIRST)) * chunk_size
    return row, start, tl.minimum(tl.load(row + SIZE) - start, chunk_size)


@triton.jit
def _whole(row, length, chunk_size: tl.constexpr):
    return (tl.load(row + ALIGNED) != 0) & (length == chunk_size)


@triton.jit
def _places(row, column: tl.constexpr, start, dtype: tl.constexpr, masked: tl.constexpr):
    places = tl.load(row + column).to(tl.pointer_type(dtype)) + start
    if not masked:
        places = tl.multiple_of(places, 16)
    return places


@triton.jit
def _update(x, m, v, numbers, dtype: tl.constexpr):
    """Return u. Division and root are rounded as IEEE 754 has it, as torch's are."""
    root, eps = tl.load(numbers + ROOT).to(dtype), tl.load(numbers + EPS).to(dtype)
    decay = tl.load(numbers + DECAY).to(dtype)
    if dtype == tl.float32:
        return tl.div_rn(m, root * tl.sqrt_rn(v) + eps) + decay * x
    else:
        return m / (root * tl.sqrt(v) + eps) + decay * x


@triton.jit
def _moments(
    row, start, length, numbers, factor, finite, dtype: tl.constexpr, masked: tl.constexpr, chunk_size: tl.constexpr,
    block_size: tl.constexpr
):  # fmt: skip
    """Write m and v of a chunk, unless the gradient is not finite. Return the sums of the squares of x and u."""
    xs, gs = _places(row, X, start, dtype, masked), _places(row, G, start, dtype, masked)
    ms, vs = _places(row, M, start, dtype, masked), _places(row, V, start, dtype, masked)
    beta1, new1 = tl.load(numbers + BETA1).to(dtype), tl.load(numbers + NEW1).to(dtype)
    beta2, new2 = tl.load(numbers + BETA2).to(dtype), tl.load(numbers + NEW2).to(dtype)
    x_squares, u_squares = tl.zeros([block_size], tl.float64), tl.zeros([block_size], tl.float64)
    for block in range(0, chunk_size, block_size):
        at = block + tl.arange(0, block_size)
        inside = at < length if masked else None
        x, g = tl.load(xs + at, mask=inside), tl.load(gs + at, mask=inside) * factor
        m, v = tl.load(ms + at, mask=inside), tl.load(vs + at, mask=inside)
        m = tl.where(finite, beta1 * m + new1 * g, m)
        v = tl.where(finite, beta2 * v + new2 * g * g, v)
        tl.store(ms + at, m, mask=inside)
        tl.store(vs + at, v, mask=inside)
        u = _update(x, m, v, numbers, dtype)
        if masked:  # behind the end of the tensor is other memory
            x, u = tl.where(inside, x, 0.0), tl.where(inside, u, 0.0)
        x_squares += (x * x).to(tl.float64)
        u_squares += (u * u).to(tl.float64)
    return tl.sum(x_squares, 0), tl.sum(u_squares, 0)


@triton.jit
def moments(
    table, owners, numbers, factor, finite, squares, dtype: tl.constexpr, chunk_size: tl.constexpr,
    block_size: tl.constexpr
):  # fmt: skip
    chunk = tl.program_id(0)
    row, start, length = _row(table, owners, chunk, chunk_size)
    scale, go = tl.load(factor), tl.load(finite) != 0
    if _whole(row, length, chunk_size):
        x, u = _moments(row, start, length, numbers, scale, go, dtype, False, chunk_size, block_size)
    else:
        x, u = _moments(row, start, length, numbers, scale, go, dtype, True, chunk_size, block_size)
    tl.store(squares + 2 * chunk, x)
    tl.store(squares + 2 * chunk + 1, u)


@triton.jit
def ratios(table, numbers, squares, results, chunk_size: tl.constexpr, block_size: tl.constexpr):
    tensor = tl.program_id(0)
    row = table + tensor * COLUMNS
    count = tl.cdiv(tl.load(row + SIZE), chunk_size)
    squares += 2 * tl.load(row + FIRST)
    lanes = tl.arange(0, block_size)
    x_squares, u_squares = tl.zeros([block_size], tl.float64), tl.zeros([block_size], tl.float64)
    for chunk in range(0, count, block_size):
        inside = chunk + lanes < count
        x_squares += tl.load(squares + 2 * (chunk + lanes), mask=inside, other=0.0)
        u_squares += tl.load(squares + 2 * (chunk + lanes) + 1, mask=inside, other=0.0)
    x_norm, u_norm = tl.load(numbers + KEEP) * tl.sqrt(tl.sum(x_squares, 0)), tl.sqrt(tl.sum(u_squares, 0))
    phi = tl.minimum(tl.maximum(x_norm, tl.load(numbers + NORM_MIN)), tl.load(numbers + NORM_MAX))
    infinity = float("inf")
    usable = (x_norm > 0) & (u_norm > 0) & (x_norm < infinity) & (u_norm < infinity) & (tl.load(numbers + ADAPT) > 0)
    ratio = tl.minimum(phi / tl.where(usable, u_norm, 1.0), tl.load(numbers + RATIO_MAX))
    usable = usable & (ratio <= LARGEST)
    tl.store(results + tensor, tl.where(usable, ratio, 1.0).to(results.dtype.element_ty))


@triton.jit
def _apply(
    row, start, length, numbers, ratio, dtype: tl.constexpr, masked: tl.constexpr, chunk_size: tl.constexpr,
    block_size: tl.constexpr
):  # fmt: skip
    xs = _places(row, X, start, dtype, masked)
    ms, vs = _places(row, M, start, dtype, masked), _places(row, V, start, dtype, masked)
    rate, keep = tl.load(numbers + LR).to(dtype) * ratio, tl.load(numbers + KEEP).to(dtype)
    for block in range(0, chunk_size, block_size):
        at = block + tl.arange(0, block_size)
        inside = at < length if masked else None
        x, m, v = tl.load(xs + at, mask=inside), tl.load(ms + at, mask=inside), tl.load(vs + at, mask=inside)
        tl.store(xs + at, keep * x - rate * _update(x, m, v, numbers, dtype), mask=inside)


@triton.jit
def apply(
    table, owners, numbers, finite, ratio, dtype: tl.constexpr, chunk_size: tl.constexpr, block_size: tl.constexpr
):
    chunk = tl.program_id(0)
    row, start, length = _row(table, owners, chunk, chunk_size)
    own = tl.load(ratio + tl.load(owners + chunk))
    if tl.load(finite) != 0:
        if _whole(row, length, chunk_size):
            _apply(row, start, length, numbers, own, dtype, False, chunk_size, block_size)
        else:
            _apply(row, start, length, numbers, own, dtype, True, chunk_size, block_size)


# -- the host ----------------------------------------------------------------------------------------------------------


def lamb_triton_(
    tensors: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    scalars: Sequence[float],
    factor: Tensor,
    finite: Tensor | None = None,
) -> list[Tensor]:
    """Update tensors x, g, m, v of the factor's device and dtype, as `same_kind` returns them; return the trust ratios.

    finite: see `lamb_`.
    """
    device, sizes = factor.device, tuple(x.numel() for x, *_ in tensors)
    owners = chunk_owners(sizes, device)
    table, numbers = to_device(
        torch.frombuffer(_table(tensors, sizes), dtype=torch.int64),
        torch.tensor(scalars, dtype=torch.float64),
        device=device,
    )
    finite = torch.ones((), dtype=torch.bool, device=device) if finite is None else finite
    results, squares = factor.new_empty(len(sizes)), factor.new_empty(len(owners), 2, dtype=torch.float64)
    launch(table, owners, numbers, factor, finite.view(torch.uint8), squares, results)
    return list(results.unbind())


def launch(
    table: Tensor, owners: Tensor, numbers: Tensor, factor: Tensor, finite: Tensor, squares: Tensor, results: Tensor
) -> None:
    dtype = tl.float32 if factor.dtype == torch.float32 else tl.float64
    chunks, sizes = (len(owners),), dict(chunk_size=CHUNK, block_size=BLOCK)
    with torch.cuda.device_of(factor):
        if len(owners):
            moments[chunks](table, owners, numbers, factor, finite, squares, dtype=dtype, **sizes, **EXACT)
        ratios[(len(results),)](table, numbers, squares, results, **sizes, **EXACT)
        if len(owners):
            apply[chunks](table, owners, numbers, finite, results, dtype=dtype, **sizes, **EXACT)


@lru_cache(maxsize=8)
def chunk_owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the number of the tensor that each chunk belongs to, int64."""
    counts = torch.tensor([-(-size // CHUNK) for size in sizes])
    (owners,) = to_device(torch.repeat_interleave(torch.arange(len(sizes)), counts), device=device)
    return owners


def _table(tensors: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> array:
    first = accumulate((-(-size // CHUNK) for size in sizes), initial=0)
    table = array("q")
    for four, size, start in zip(tensors, sizes, first):
        addresses = [tensor.data_ptr() for tensor in four]
        table.extend((*addresses, size, start, not any(address % 16 for address in addresses)))
    return table
