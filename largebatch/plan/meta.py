"""Operations on torch's meta device, where tensors have shapes and no numbers, in less time than torch takes.

torch finds the shapes of most outputs in Python. A pass of a large model has ten thousand operations, and most of them
are called again with inputs of the same shapes: in the next block, and in the next pass.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")

Shapes = list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
SHAPES: dict[Any, Shapes] = {}
"""sizes, strides and types of the outputs of operations that were called, by all that these depend on"""
VIEWS: set[Any] = set()
"""operations whose outputs are no new tensors"""


def call(func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> Any:
    """Call an operation, or make the outputs that it had before with equal inputs.

    inputs: the tensors in its arguments. Views, and all calls that write into a tensor, are torch's.
    """
    if not inputs or func in VIEWS or func._schema.is_mutable or any(tensor.device != META for tensor in inputs):
        return func(*args, **kwargs)
    if func is torch.ops.aten.addmm.default:  # the slowest, whose rows differ in each block with stochastic depth
        return torch.empty(args[1].shape[0], args[2].shape[1], dtype=args[1].dtype, device=META)
    key = func, _signature(args), _signature(tuple(kwargs.items()))
    if known := SHAPES.get(key):
        made = [torch.empty_strided(size, stride, dtype=dtype, device=META) for size, stride, dtype in known]
        return made[0] if len(made) == 1 else tuple(made)
    out = func(*args, **kwargs)
    shapes = _shapes(out, {tensor.untyped_storage()._cdata for tensor in inputs})
    if shapes:
        SHAPES[key] = shapes
    else:
        VIEWS.add(func)
    return out


def _shapes(out: Any, read: set[int]) -> Shapes | None:
    """Return the shapes of new tensors; None if an output is anything else, such as a view of an input."""
    outputs = out if isinstance(out, tuple) else (out,)
    new = [one for one in outputs if isinstance(one, Tensor) and one.untyped_storage()._cdata not in read]
    filled = all(one.numel() * one.element_size() == one.untyped_storage().nbytes() for one in new)
    if len(new) < len(outputs) or not filled:
        return None
    return [(one.shape, one.stride(), one.dtype) for one in new]


def _signature(tree: Any) -> Any:
    """Return all that the outputs of an operation depend on, as a key. 1, 1.0 and True make outputs of other types."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, (list, tuple)):
        return tuple(map(_signature, tree))
    return type(tree), tree


class Uninitialised(TorchDispatchMode):
    """Leaves out operations that write into a tensor, which would be most of the time in which a model is built."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and isinstance(args[0], Tensor) and args[0].device == META:
            return args[0]
        return func(*args, **(kwargs or {}))


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from tensors_in(branch)
