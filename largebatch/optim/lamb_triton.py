"""LAMB on a GPU in three launches of Triton for all tensors of a run, whatever their number, groups and steps.

`lamb_` in lamb.py is the specification; the formulas are there. A tensor is cut into chunks, and a program of a launch
works on one chunk:

    moments    read x, g, m, v; write m, v and the chunk's sums of the squares of x and u
    ratios     add up the sums of each tensor, in the order of its chunks; write its trust ratio
    apply      read x, m, v; compute u again; write x, and x in bfloat16 if the tensor has such a copy

No two programs write to the same place and none adds to a number of another, so a repetition gives the same bits. u is
computed twice, because to keep it would move as many bytes and take memory. Triton's own code fuses no product with a
sum here (`enable_fp_fusion`), so that m and v are those of the specification to the bit.

A table on the device has a row for each tensor, which the host sends before each step: a gradient may have moved.
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
from largebatch.native.lamb import as_kernels_read, check_row

CHUNK = 4096  # elements; a large model gets ten times as many chunks as a GPU has programs at a time
BLOCK = 1024  # elements that a program has in its registers
EXACT = {"num_warps": 4, "enable_fp_fusion": False}

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # x, g, m, v of one parameter, contiguous
Copies = Sequence[Tensor | None]  # for each parameter its copy in bfloat16, if it has one
Part = tuple[Sequence[Tensors], Sequence[float]]  # parameters, and the Scalars of their step

# The columns of the table, int64: four addresses, the length, the first chunk, the row of the numbers, 1 if all
# addresses suit loads and stores of whole chunks, and the address of the copy, 0 if there is none.
COLUMNS = tl.constexpr(9)
X, G, M, V = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SIZE, FIRST, NUMBERS, ALIGNED = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
COPY = tl.constexpr(8)

# The columns of the numbers, float64: those of lamb.Scalars.
SCALARS = tl.constexpr(12)
LR, BETA1, NEW1, BETA2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NEW2, ROOT, EPS, DECAY = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
NORM_MIN, NORM_MAX, RATIO_MAX, ADAPT = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)


# -- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _row(table, owners, chunk, chunk_size: tl.constexpr):
    """Return the table's row of a chunk's tensor, the chunk's first element, and its length. All in 64 bits."""
    row = table + tl.load(owners + chunk) * COLUMNS
    start = (chunk - tl.load(row + FIRST)) * chunk_size
    return row, start, tl.minimum(tl.load(row + SIZE) - start, chunk_size)


@triton.jit
def _whole(row, length, chunk_size: tl.constexpr):
    """Tell whether a chunk can be read four numbers at a time and without a mask."""
    return (tl.load(row + ALIGNED) != 0) & (length == chunk_size)


@triton.jit
def _places(row, column: tl.constexpr, start, dtype: tl.constexpr, masked: tl.constexpr, aligned: tl.constexpr = 16):
    """Return the address of element `start` of one of the tensors of a row; in whole chunks a multiple of `aligned`."""
    places = tl.load(row + column).to(tl.pointer_type(dtype)) + start
    if not masked:
        places = tl.multiple_of(places, aligned)
    return places


@triton.jit
def _numbers_of_u(numbers, dtype: tl.constexpr):
    """Return the numbers of `_update`."""
    root, eps, decay = tl.load(numbers + ROOT), tl.load(numbers + EPS), tl.load(numbers + DECAY)
    return root.to(dtype), eps.to(dtype), decay.to(dtype)


@triton.jit
def _update(x, m, v, root, eps, decay):
    """Return u. Division and root are rounded as IEEE 754 has it, as torch's are."""
    if x.dtype == tl.float32:
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
    root, eps, decay = _numbers_of_u(numbers, dtype)
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
        u = _update(x, m, v, root, eps, decay)
        if masked:  # beyond the end are no numbers
            x, u = tl.where(inside, x, 0.0), tl.where(inside, u, 0.0)
        x_squares += (x * x).to(tl.float64)
        u_squares += (u * u).to(tl.float64)
    return tl.sum(x_squares, 0), tl.sum(u_squares, 0)


@triton.jit
def moments(
    table, owners, numbers, factor, finite, squares, dtype: tl.constexpr, chunk_size: tl.constexpr,
    block_size: tl.constexpr
):  # fmt: skip
    """Update m and v of a chunk, and write its two sums of squares."""
    chunk = tl.program_id(0).to(tl.int64)
    row, start, length = _row(table, owners, chunk, chunk_size)
    numbers += tl.load(row + NUMBERS) * SCALARS
    scale, go = tl.load(factor), tl.load(finite) != 0
    if _whole(row, length, chunk_size):
        x, u = _moments(row, start, length, numbers, scale, go, dtype, False, chunk_size, block_size)
    else:
        x, u = _moments(row, start, length, numbers, scale, go, dtype, True, chunk_size, block_size)
    tl.store(squares + 2 * chunk, x)
    tl.store(squares + 2 * chunk + 1, u)


@triton.jit
def ratios(table, numbers, squares, results, chunk_size: tl.constexpr, block_size: tl.constexpr):
    """Write the trust ratio of a tensor, from the sums of its chunks."""
    tensor = tl.program_id(0).to(tl.int64)
    row = table + tensor * COLUMNS
    numbers += tl.load(row + NUMBERS) * SCALARS
    count = tl.cdiv(tl.load(row + SIZE), chunk_size)
    squares += 2 * tl.load(row + FIRST)
    lanes = tl.arange(0, block_size)
    x_squares, u_squares = tl.zeros([block_size], tl.float64), tl.zeros([block_size], tl.float64)
    for chunk in range(0, count, block_size):
        inside = chunk + lanes < count
        x_squares += tl.load(squares + 2 * (chunk + lanes), mask=inside, other=0.0)
        u_squares += tl.load(squares + 2 * (chunk + lanes) + 1, mask=inside, other=0.0)
    x_norm, u_norm = tl.sqrt(tl.sum(x_squares, 0)), tl.sqrt(tl.sum(u_squares, 0))
    phi = tl.minimum(tl.maximum(x_norm, tl.load(numbers + NORM_MIN)), tl.load(numbers + NORM_MAX))
    infinity = float("inf")
    usable = (x_norm > 0) & (u_norm > 0) & (x_norm < infinity) & (u_norm < infinity) & (tl.load(numbers + ADAPT) > 0)
    ratio = tl.minimum(phi / tl.where(usable, u_norm, 1.0), tl.load(numbers + RATIO_MAX))
    tl.store(results + tensor, tl.where(usable, ratio, 1.0).to(results.dtype.element_ty))


@triton.jit
def _bfloat16(x):
    """Return the bits of float32 in bfloat16, rounded as torch's: to the nearest, to the even one if two are as near.

    A conversion by Triton would do the same on a GPU, but its interpreter cuts bits off.
    """
    bits = x.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16)


@triton.jit
def _apply(
    row, start, length, numbers, ratio, dtype: tl.constexpr, masked: tl.constexpr, chunk_size: tl.constexpr,
    block_size: tl.constexpr
):  # fmt: skip
    xs = _places(row, X, start, dtype, masked)
    ms, vs = _places(row, M, start, dtype, masked), _places(row, V, start, dtype, masked)
    rate = tl.load(numbers + LR).to(dtype) * ratio
    root, eps, decay = _numbers_of_u(numbers, dtype)
    copied = tl.load(row + COPY) != 0
    copies = _places(row, COPY, start, tl.uint16, masked, 8)  # stores of 8 bytes: four numbers, as in those of x
    for block in range(0, chunk_size, block_size):
        at = block + tl.arange(0, block_size)
        inside = at < length if masked else None
        x, m, v = tl.load(xs + at, mask=inside), tl.load(ms + at, mask=inside), tl.load(vs + at, mask=inside)
        x -= rate * _update(x, m, v, root, eps, decay)
        tl.store(xs + at, x, mask=inside)
        if dtype == tl.float32:
            if copied:
                tl.store(copies + at, _bfloat16(x), mask=inside)


@triton.jit
def apply(
    table, owners, numbers, finite, ratio, dtype: tl.constexpr, chunk_size: tl.constexpr, block_size: tl.constexpr
):
    """Update x of a chunk and its copy, unless the gradient is not finite."""
    chunk = tl.program_id(0).to(tl.int64)
    row, start, length = _row(table, owners, chunk, chunk_size)
    numbers += tl.load(row + NUMBERS) * SCALARS
    own = tl.load(ratio + tl.load(owners + chunk))
    if tl.load(finite) != 0:
        if _whole(row, length, chunk_size):
            _apply(row, start, length, numbers, own, dtype, False, chunk_size, block_size)
        else:
            _apply(row, start, length, numbers, own, dtype, True, chunk_size, block_size)


# -- the host ------------------------------------------------------------------------------------------------------


def lamb_fused_(
    parts: Sequence[Part], factor: Tensor, finite: Tensor | None = None, copies: Copies | None = None
) -> list[Tensor]:
    """Update all tensors of all parts, of the factor's device and dtype. Returns their trust ratios.

    finite: 0-d; if it is False, x, m and v stay as they are.
    copies: for each tensor, in the order of the parts, its copy in bfloat16, which gets the new x, or None. If finite
    is False, they stay as they are.
    """
    device = factor.device
    if not (factor.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"Lamb's impl is triton, and the parameters are on {device}: choose compile, or use a GPU.")
    tensors = [_checked(four, factor) for part, _ in parts for four in part]
    copies = [None] * len(tensors) if copies is None else copies
    for four, copy in zip(tensors, copies, strict=True):
        _check_copy(copy, four[0])
    sizes = tuple(four[0].numel() for four in tensors)
    owners = chunk_owners(sizes, device)
    rows = [number for number, (part, _) in enumerate(parts) for _ in part]
    table, numbers = to_device(
        torch.frombuffer(_table(tensors, copies, sizes, rows), dtype=torch.int64),
        torch.tensor([scalars for _, scalars in parts], dtype=torch.float64),
        device=device,
    )
    finite = torch.ones((), dtype=torch.bool, device=device) if finite is None else finite
    results, squares = factor.new_empty(len(sizes)), factor.new_empty(len(owners), 2, dtype=torch.float64)
    launch(table, owners, numbers, factor, finite.view(torch.uint8), squares, results)
    return list(results.unbind())


def launch(
    table: Tensor, owners: Tensor, numbers: Tensor, factor: Tensor, finite: Tensor, squares: Tensor, results: Tensor
) -> None:
    """Launch the three kernels on the present stream of the factor's device."""
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
    """Return the tensor that each chunk belongs to, by number; int64, on the device."""
    counts = torch.tensor([-(-size // CHUNK) for size in sizes])
    (owners,) = to_device(torch.repeat_interleave(torch.arange(len(sizes)), counts), device=device)
    return owners


def _checked(four: Tensors, factor: Tensor) -> Tensors:
    """Return the tensors of a parameter, its gradient in its dtype. Kernels see addresses only, so check the rest."""
    x, g, m, v = four
    four = x, as_kernels_read(g, x.dtype), m, v
    check_row(four, factor.dtype, factor.device)
    return four


def _check_copy(copy: Tensor | None, x: Tensor) -> None:
    """Raise ValueError for a copy that a kernel could not write, or would write beyond."""
    if copy is None:
        return
    found = copy.dtype, copy.device, copy.shape, copy.is_contiguous(), x.dtype
    if found != (torch.bfloat16, x.device, x.shape, True, torch.float32):
        raise ValueError(
            f"LAMB in Triton got a copy in {copy.dtype} of shape {tuple(copy.shape)} and strides {copy.stride()} on "
            f"{copy.device} for a weight in {x.dtype}, expected one in torch.bfloat16 of shape {tuple(x.shape)} on "
            f"{x.device}, contiguous, and a weight in torch.float32."
        )


def _table(tensors: Sequence[Tensors], copies: Copies, sizes: Sequence[int], rows: Sequence[int]) -> array:
    """Return the rows of the table, one after the other."""
    first = accumulate((-(-size // CHUNK) for size in sizes), initial=0)
    table = array("q")
    for four, copy, size, start, row in zip(tensors, copies, sizes, first, rows):
        addresses, place = [tensor.data_ptr() for tensor in four], 0 if copy is None else copy.data_ptr()
        aligned = not (any(address % 16 for address in addresses) or place % 8)
        table.extend((*addresses, size, start, row, aligned, place))
    return table
