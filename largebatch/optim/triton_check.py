"""A Triton kernel of three lines: whether it runs shows whether Triton can compile for a GPU here.

It is a file of its own because Triton is imported with it, and reads the kernel's source from it.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def add_one(numbers, SIZE: tl.constexpr):
    places = numbers + tl.arange(0, SIZE)
    tl.store(places, tl.load(places) + 1)


def check() -> None:
    """Compile the kernel and run it. If that fails, raise Triton's error: it needs a C compiler and Python.h."""
    numbers = torch.zeros(16, device="cuda")
    add_one[(1,)](numbers, SIZE=16)
    if numbers.sum().item() != 16:
        raise RuntimeError("a kernel that Triton compiled gives wrong results")
