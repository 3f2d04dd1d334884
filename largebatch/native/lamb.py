"""LAMB's update and the norm of its gradients on CPUs, by lamb.cpp (benchmark/NOTES.md: it beats torch.compile)."""

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largebatch.native.compile import can_load, load_library

SOURCE = Path(__file__).with_name("lamb.cpp")
# It resolves to the libgomp that torch has loaded. Threads of our own would compete with torch's, which go on spinning
# for milliseconds after their work.
FLAGS = ("-fopenmp",)

DTYPES = (torch.float32, torch.float64)

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # x, g, m, v of one parameter, contiguous, of one dtype
Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # the same and u, scratch memory that is at least as long


class _Tensor(ctypes.Structure):
    """The struct Tensor of lamb.cpp."""

    _fields_ = [*((name, ctypes.c_void_p) for name in "xgmvu"), ("size", ctypes.c_int64)]


class _Tensors(ctypes.Structure):
    """The struct Tensors of lamb.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("rows", "order")]
    _fields_ += [("count", ctypes.c_int64), ("threads", ctypes.c_int)]


def available() -> bool:
    return can_load("LAMB", SOURCE, *FLAGS)


def lamb_native_(tensors: Sequence[Tensors], scalars: Sequence[float], factor: float) -> list[Tensor]:
    """Update tensors of one dtype, with torch's number of threads; return the trust ratios."""
    example, longest = tensors[0][0], max(four[0].numel() for four in tensors)
    num_threads = min(torch.get_num_threads(), len(tensors))
    scratch = _address(_scratch(example, num_threads * longest))
    ratios = example.new_empty(len(tensors))
    numbers = _numbers(example.dtype, scalars, factor)
    _call("lamb", tensors, num_threads, *numbers, scratch, ctypes.c_int64(longest), _address(ratios))
    return list(ratios.unbind())


def moments_native_(rows: Sequence[Row], scalars: Sequence[float], factor: float) -> Tensor:
    """Write m, v and u of each row in place; return the sums of the squares of x and of u, (2, len(rows))."""
    squares = torch.empty(len(rows), 2, dtype=torch.float64, device="cpu")
    numbers = _numbers(rows[0][0].dtype, scalars, factor)
    _call("moments", rows, torch.get_num_threads(), *numbers, _address(squares))
    return squares.T.contiguous()


def norm_native(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients, 0-d, in their dtype, added up in double precision."""
    whole = [as_kernels_read(g, gradients[0].dtype) for g in gradients]
    squares = torch.empty(len(whole), dtype=torch.float64, device="cpu")
    _call("squares", [(g, g) for g in whole], torch.get_num_threads(), _address(squares))  # it reads g alone
    return squares.sum().sqrt().to(whole[0].dtype)


def as_kernels_read(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient in this dtype and contiguous: itself, or a copy."""
    return (g if g.dtype is dtype else g.to(dtype)).contiguous().resolve_neg()  # torch keeps some signs aside


def same_kind(row: Tensors) -> Tensors:
    """Return x, g, m and v as kernels read them; ValueError if that takes more than a copy of the gradient."""
    x, g, m, v = row
    row = x, as_kernels_read(g, x.dtype), m, v
    check_row(row, x.dtype, x.device)
    return row


def check_row(row: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for tensors of a row that kernels, which get addresses alone, would read or write wrongly.

    Each step calls it, because a program can exchange data, storage and state between any two.
    """
    shape, size = row[0].shape, row[0].numel()
    for t in row:
        if (
            dtype in DTYPES
            and t.dtype is dtype
            and t.device == device
            and t.shape == shape
            and t.layout is torch.strided
            and t.is_contiguous()
            and not t.is_neg()
            and (t.data_ptr() or not size or t.is_meta)
            and (t.storage_offset() + size) * t.itemsize <= t.untyped_storage().nbytes()
        ):
            continue
        raise ValueError(
            "Lamb needs a parameter, its gradient and its moments contiguous, in float32 or float64, of one type, "
            f"shape and device, got {_kind(t)} for a parameter of {_kind(row[0])}; use autocast for half precision "
            "and channels_last for inputs only"
        )


def _kind(t: Tensor) -> str:
    if t.layout is not torch.strided:
        return f"{t.dtype} and layout {t.layout}"
    size = t.untyped_storage().nbytes()
    return f"{t.dtype}, shape {tuple(t.shape)} and strides {t.stride()} in {size} bytes on {t.device}"


def _call(name: str, rows: Sequence[tuple[Tensor, ...]], num_threads: int, *arguments: Any) -> None:
    """Call a function of lamb.cpp for rows that begin as `Row` does."""
    dtype, device = rows[0][0].dtype, torch.device("cpu")
    for row in rows:
        check_row(row, dtype, device)
    single = dtype == torch.float32
    function = getattr(load_library(SOURCE, *FLAGS), f"{name}_float{32 if single else 64}")
    sizes = [row[0].numel() for row in rows]
    order = (ctypes.c_int64 * len(rows))(*sorted(range(len(rows)), key=lambda k: -sizes[k]))
    table = (_Tensor * len(rows))(*(_Tensor(*(t.data_ptr() for t in row), size=size) for row, size in zip(rows, sizes)))
    tensors = _Tensors(ctypes.addressof(table), ctypes.addressof(order), len(rows), num_threads)
    function(ctypes.byref(tensors), *arguments)


_kept = threading.local()


def _scratch(example: Tensor, size: int) -> Tensor:
    """Return memory of a tensor's dtype, kept for the next step: new memory costs a page fault for each 4 KiB."""
    memory = getattr(_kept, "memory", None)
    if memory is None or memory.dtype != example.dtype or memory.numel() < size:
        _kept.memory = memory = example.new_empty(size)
    return memory


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _numbers(dtype: torch.dtype, scalars: Sequence[float], factor: float) -> tuple[Any, ctypes.c_double]:
    kind = ctypes.c_float if dtype == torch.float32 else ctypes.c_double
    return (kind * len(scalars))(*scalars), ctypes.c_double(factor)
