"""Communication along an axis: five functions of (tensor, axis) with a gradient, and plain ones without.

The gradient of a tensor is distributed as the tensor is: replicated, or a part or a summand of it on each rank. The
loss is replicated, and every rank starts its backward pass with 1. This determines each backward function:

    function    forward                              backward
    copy        replicated -> the same, used apart   sum over the axis
    reduce      summands   -> sum, replicated        unchanged
    total       summands   -> sum, used apart        sum over the axis
    gather      parts      -> whole, replicated      this rank's part
    split       replicated -> this rank's part       whole, gathered
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
    return _reduced(tensor, axis, dist.ReduceOp.SUM)


def all_max(tensor: Tensor, axis: Axis) -> Tensor:
    return _reduced(tensor, axis, dist.ReduceOp.MAX)


def _reduced(tensor: Tensor, axis: Axis, op: Any) -> Tensor:
    if axis.size == 1:
        return tensor
    found = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, op=op, group=axis.group)
    return found


def all_reduce_(tensor: Tensor, axis: Axis) -> None:
    """Sum a contiguous tensor over the axis, in place."""
    if axis.size > 1:
        dist.all_reduce(tensor, group=axis.group)


def all_gather(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    if axis.size == 1:
        return tensor
    first = tensor.movedim(dim, 0).contiguous()
    whole = first.new_empty(axis.size * first.shape[0], *first.shape[1:])
    dist.all_gather_single(whole, first, group=axis.group)
    return whole.movedim(0, dim)


def reduce_scatter(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum over the axis, and return this rank's part along `dim`."""
    if axis.size == 1:
        return tensor
    first = tensor.movedim(dim, 0).contiguous()
    own = first.new_empty(first.shape[0] // axis.size, *first.shape[1:])
    dist.reduce_scatter_single(own, first, group=axis.group)
    return own.movedim(0, dim)


def broadcast(tensor: Tensor, axis: Axis, source: int) -> Tensor:
    """Return the tensor of the rank at place `source`; all ranks pass tensors of the same shape."""
    if axis.size == 1:
        return tensor
    out = tensor.contiguous() if axis.index == source else tensor.new_empty(tensor.shape)
    dist.broadcast(out, group_src=source, group=axis.group)
    return out


def reduce_to(tensor: Tensor, axis: Axis, target: int) -> Tensor:
    """Sum over the axis into `tensor` on the rank at place `target`; elsewhere `tensor` becomes undefined."""
    if axis.size > 1:
        dist.reduce(tensor, group_dst=target, group=axis.group)
    return tensor


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return the values of all ranks of the axis, picklable and small."""
    values: list[Any] = [value] * axis.size
    if axis.size > 1:
        dist.all_gather_object(values, value, group=axis.group)
    return values


def own_part(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
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
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def total(x: Tensor, axis: Axis) -> Tensor:
    return copy(reduce(x, axis), axis)


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x if axis.size == 1 else _Gather.apply(x, axis, dim)


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x if axis.size == 1 else _Split.apply(x, axis, dim)
