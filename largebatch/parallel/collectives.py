"""What moves along an axis, forward and backward: five functions of (tensor, axis).

Each is one of two kinds. Where the ranks of the axis hold the same tensor (replicated), its gradient is replicated too;
where each holds a part, or a summand of its own, so is its gradient. The loss is replicated, and every rank starts its
backward pass from it with 1. From this follows what backward must be:

    function    forward                              backward
    copy        replicated -> the same, used apart   sum over the axis
    reduce      summands   -> sum, replicated        as it is
    total       summands   -> sum, used apart        sum over the axis
    gather      parts      -> whole, replicated      this rank's part
    split       replicated -> this rank's part       whole, gathered

The plain ones (`all_reduce`, `all_max`, `all_gather`, `reduce_scatter`, `broadcast`, `reduce_to`), without a gradient,
are for the backward passes of layers that write their own, and for optimizers, as is `gather_objects`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.parallel.mesh import Axis

# Many small tensors travel as one message of at most this many bytes. Gathered parameters count on all ranks together.
BUCKET_BYTES = 2**26

# -- plain --------------------------------------------------------------------------------------------------------


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, as a new tensor."""
    if axis.size == 1:
        return tensor
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def all_max(tensor: Tensor, axis: Axis) -> Tensor:
    """Largest over the axis, element by element, as a new tensor."""
    if axis.size == 1:
        return tensor
    largest = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
    return largest


def all_gather(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """The parts of all ranks of the axis, one after another along `dim`."""
    if axis.size == 1:
        return tensor
    first = tensor.movedim(dim, 0).contiguous()
    whole = first.new_empty(axis.size * first.shape[0], *first.shape[1:])
    dist.all_gather_single(whole, first, group=axis.group)
    return whole.movedim(0, dim)


def reduce_scatter(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's part, along `dim`, of the sum over the axis."""
    if axis.size == 1:
        return tensor
    first = tensor.movedim(dim, 0).contiguous()
    own = first.new_empty(first.shape[0] // axis.size, *first.shape[1:])
    dist.reduce_scatter_single(own, first, group=axis.group)
    return own.movedim(0, dim)


def broadcast(tensor: Tensor, axis: Axis, source: int) -> Tensor:
    """The tensor of the rank at place `source` of the axis; all give one of the same shape."""
    if axis.size == 1:
        return tensor
    out = tensor.contiguous() if axis.index == source else tensor.new_empty(tensor.shape)
    dist.broadcast(out, group_src=source, group=axis.group)
    return out


def reduce_to(tensor: Tensor, axis: Axis, target: int) -> Tensor:
    """Sum over the axis, on the rank at place `target`; elsewhere of no use. Overwrites `tensor`."""
    if axis.size > 1:
        dist.reduce(tensor, group_dst=target, group=axis.group)
    return tensor


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """The picklable, small values of all ranks of the axis."""
    values: list[Any] = [value] * axis.size
    if axis.size > 1:
        dist.all_gather_object(values, value, group=axis.group)
    return values


def own_part(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """A view of this rank's part along `dim`."""
    length = tensor.shape[dim] // axis.size
    return tensor.narrow(dim, axis.index * length, length)


# -- with a gradient ----------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.axis), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return own_part(grad, ctx.axis, ctx.dim).contiguous(), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return own_part(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


def copy(x: Tensor, axis: Axis) -> Tensor:
    """x, which the ranks of the axis go on to use each for its own part."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, which all its ranks go on to use alike."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def total(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, which its ranks go on to use each for its own part."""
    return x if axis.size == 1 else _Total.apply(x, axis)


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The whole of which each rank of the axis has a part along `dim`; all go on to use it alike."""
    return x if axis.size == 1 else _Gather.apply(x, axis, dim)


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim` of what all ranks of the axis have alike."""
    return x if axis.size == 1 else _Split.apply(x, axis, dim)
