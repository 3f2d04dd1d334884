"""LAMB's update for CPUs: lamb.cpp, compiled once for a kind of processor and kept.

C++ rather than torch.compile, which took 10 s of each rank's start (3 s with a warm cache, 12 s where two ranks compile
at once) for a slower loop; this takes a quarter of a second, once. The library is called through ctypes, so
nothing of torch or Python is compiled against.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("lamb.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # x, g, m, v of one parameter, flat, of one dtype


class _Tensor(ctypes.Structure):
    """Tensor of lamb.cpp."""

    _fields_ = [*((name, ctypes.c_void_p) for name in "xgmv"), ("size", ctypes.c_int64)]


@functools.cache
def available() -> bool:
    """Whether the library is there or could be made; if not, a warning has said why."""
    try:
        library()
    except (OSError, subprocess.CalledProcessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning("LAMB could not be compiled: %s", output[0] if output else error)
        return False
    return True


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled source, from the cache if it is there. OSError or CalledProcessError if it cannot be made."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "largebatch" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return ctypes.CDLL(str(_built(folder)))
    except OSError:  # no home to write to
        with tempfile.TemporaryDirectory() as own:  # once loaded, its file is not needed
            return ctypes.CDLL(str(_built(Path(own))))


def _built(folder: Path) -> Path:
    """The library in `folder`; the first of several processes makes it, and it appears complete or not at all."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    made_of = [SOURCE.read_text(), *compiler, *FLAGS, platform.machine(), _processor()]
    path = folder / f"lamb-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    with open(folder / ".lock", "w") as lock, tempfile.TemporaryDirectory(dir=folder) as aside:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = Path(aside) / path.name
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            os.replace(unfinished, path)
    return path


def _processor() -> str:
    """What -march=native depends on: nodes of different kinds may share a home folder."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    kinds = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "".join(sorted({line for line in lines if line.startswith(kinds)}))


def lamb_native_(tensors: Sequence[Tensors], scalars: Sequence[float], factor: float) -> list[Tensor]:
    """One update of tensors of one dtype, float32 or float64, by as many threads as torch uses; their trust ratios."""
    example = tensors[0][0]
    kind = ctypes.c_float if example.dtype == torch.float32 else ctypes.c_double
    update = library().lamb_float32 if example.dtype == torch.float32 else library().lamb_float64
    numbers = (kind * len(scalars))(*scalars)
    shares = _shares([four[0].numel() for four in tensors], torch.get_num_threads())
    scratch = example.new_empty(len(shares), max(four[0].numel() for four in tensors))
    ratios = [example.new_empty(len(share)) for share in shares]

    def work(number: int) -> None:
        chosen = [tensors[k] for k in shares[number]]
        rows = [_Tensor(*(t.data_ptr() for t in four), four[0].numel()) for four in chosen]
        table = (_Tensor * len(rows))(*rows)
        memory = ctypes.c_void_p(scratch[number].data_ptr())
        results = ctypes.c_void_p(ratios[number].data_ptr())
        update(table, ctypes.c_int64(len(rows)), memory, numbers, ctypes.c_double(factor), results)

    list(_pool(len(shares)).map(work, range(len(shares))))
    by_tensor = {k: ratio for share, part in zip(shares, ratios) for k, ratio in zip(share, part.unbind())}
    return [by_tensor[k] for k in range(len(tensors))]


def _shares(sizes: Sequence[int], num_threads: int) -> list[list[int]]:
    """Which tensors each thread updates: the largest first, each to the thread with the least so far."""
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
