"""LAMB's update and the norm of its gradients on CPUs: calls lamb.cpp.

It is C++ because torch.compile took 10 s of each rank's start (3 s with a warm cache, 12 s if two ranks compile at
once) and made a slower loop; compiling lamb.cpp takes a quarter of a second, once.
"""

import ctypes
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largebatch.native.compile import can_load, load_library

SOURCE = Path(__file__).with_name("lamb.cpp")

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # x, g, m, v of one parameter, contiguous, of one dtype
Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # the same and u, scratch memory that is at least as long


class _Tensor(ctypes.Structure):
    """The struct Tensor of lamb.cpp."""

    _fields_ = [*((name, ctypes.c_void_p) for name in "xgmvu"), ("size", ctypes.c_int64)]


def available() -> bool:
    """Return whether lamb.cpp can be used here; if not, a warning tells why."""
    return can_load("LAMB", SOURCE)


def lamb_native_(tensors: Sequence[Tensors], scalars: Sequence[float], factor: float) -> list[Tensor]:
    """Update tensors of one dtype, float32 or float64, with as many threads as torch uses; return the trust ratios."""
    example = tensors[0][0]
    shares = _shares([four[0].numel() for four in tensors], torch.get_num_threads())
    scratch = example.new_empty(len(shares), max(four[0].numel() for four in tensors))
    rows = [[(*tensors[k], u) for k in share] for share, u in zip(shares, scratch)]
    ratios = [example.new_empty(len(share)) for share in shares]
    _call("lamb", rows, ratios, *_numbers(example.dtype, scalars, factor))
    by_tensor = {k: ratio for share, part in zip(shares, ratios) for k, ratio in zip(share, part.unbind())}
    return [by_tensor[k] for k in range(len(tensors))]


def moments_native_(rows: Sequence[Row], scalars: Sequence[float], factor: float) -> Tensor:
    """Compute the first half of the update: write m, v and u of each row in place.

    Return the sums of the squares of x and of u, (2, len(rows)).
    """
    shares = _shares([row[0].numel() for row in rows], torch.get_num_threads())
    found = [torch.empty(len(share), 2, dtype=torch.float64) for share in shares]
    numbers = _numbers(rows[0][0].dtype, scalars, factor)
    _call("moments", [[rows[k] for k in share] for share in shares], found, *numbers)
    squares = torch.empty(2, len(rows), dtype=torch.float64)
    for share, part in zip(shares, found):
        squares[:, share] = part.T
    return squares


def norm_native(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients, which are of one dtype, float32 or float64: 0-d, of that dtype.

    It is added up in double precision, a tensor at a time; torch's `get_total_norm` takes one thread for all of them.
    """
    shares = _shares([g.numel() for g in gradients], torch.get_num_threads())
    found = [torch.empty(len(share), dtype=torch.float64) for share in shares]
    whole = [g.contiguous() for g in gradients]
    _call("squares", [[(whole[k],) * 5 for k in share] for share in shares], found)  # of a row it reads g alone
    squares = torch.empty(len(gradients), dtype=torch.float64)
    for share, part in zip(shares, found):
        squares[share] = part
    return squares.sum().sqrt().to(gradients[0].dtype)


def _call(name: str, shares: list[list[Row]], results: list[Tensor], *numbers: Any) -> None:
    """Call a function of lamb.cpp for each share of the rows, in a thread of its own; it fills the share's results."""
    single = shares[0][0][0].dtype == torch.float32
    function = getattr(load_library(SOURCE), f"{name}_float{32 if single else 64}")

    def work(rows: list[Row], result: Tensor) -> None:
        table = (_Tensor * len(rows))(*(_Tensor(*(t.data_ptr() for t in row), row[0].numel()) for row in rows))
        function(table, ctypes.c_int64(len(rows)), *numbers, ctypes.c_void_p(result.data_ptr()))

    list(_pool(len(shares)).map(work, shares, results))


def _numbers(dtype: torch.dtype, scalars: Sequence[float], factor: float) -> tuple[Any, ctypes.c_double]:
    """Return the scalars as an array of this dtype, and the factor."""
    kind = ctypes.c_float if dtype == torch.float32 else ctypes.c_double
    return (kind * len(scalars))(*scalars), ctypes.c_double(factor)


def _shares(sizes: Sequence[int], num_threads: int) -> list[list[int]]:
    """Return the tensors that each thread updates: the largest first, each to the thread with the least so far."""
    shares: list[list[int]] = [[] for _ in range(min(num_threads, len(sizes)))]
    loads = [0] * len(shares)
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        lightest = loads.index(min(loads))
        shares[lightest].append(k)
        loads[lightest] += sizes[k] + 1
    return shares


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="largebatch-lamb")
