"""Find the places at which the host waits for a GPU, without one: the device "meta" computes nothing.

Like a GPU that is far behind, it has no result that the host could read. So each read of the host is a wait, and is
noted with its place; so is each copy from the host, which on a GPU is a wait unless the memory is page-locked.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[1]
# Operations whose result, or its shape, the host has to know.
READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
         "bincount", "repeat_interleave"}  # fmt: skip


class Waits(TorchDispatchMode):
    """Note the places, as "file: function", in which the host reads from the device or copies to it.

    A number that is read is 1, so that the work goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: set[str] = set()
        self.copies: set[str] = set()
        self.lists = _Lists(self.copies)

    def __enter__(self) -> "Waits":
        self.lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.lists.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(tensor.is_meta for tensor in tensors)
        here = any(not tensor.is_meta and (tensor.ndim or name == "copy_") for tensor in tensors)
        target = kwargs.get("device") if name == "_to_copy" else None
        if there and (name in READS or str(target) == "cpu"):
            self.reads.add(place())
            return 1 if name == "_local_scalar_dense" else torch.ones_like(tensors[0], device="cpu")
        if there and here:  # a 0-d tensor of the host is an argument of the kernel
            self.copies.add(place())
        elif tensors and not there and str(target) == "meta":
            self.copies.add(place())
        return func(*args, **kwargs)


class _Lists(TorchFunctionMode):
    """Note the places that make a tensor on the device from numbers of the host: torch does not dispatch these."""

    def __init__(self, copies: set[str]) -> None:
        super().__init__()
        self.copies = copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.__name__
        if name in ("tensor", "new_tensor", "as_tensor", "asarray") and result.is_meta:
            self.copies.add(place())
        if name in ("__getitem__", "__setitem__") and args[0].is_meta:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(index, (list, np.ndarray)) for index in indices):
                self.copies.add(place())
        return result


def place() -> str:
    """Return the file and the function of ours that called the present operation."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in ("largebatch", "zoo"):
            return f"{file.relative_to(ROOT)}: {frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return "elsewhere"
