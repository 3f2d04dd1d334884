"""Layers whose matrices are cut over the tensor axes of a mesh: 1D, 2D, 2.5D and 3D.

A `Layout` says how activations (B, ..., C) are cut. Each mode has two: the outer one of the residual stream, and the
inner one between the two linear layers of a pair (qkv and proj, fc1 and fc2). So linear layers go inwards or outwards:

    mode    outer: batch; features    inner: batch; features    a linear layer, of x (B, C) and w (C', C)
    1d      -; -                      -; tensor                 inwards w is cut by rows; outwards by columns, and
                                                                products are summed (inwards in backward)
    2d      row; column               row; column               SUMMA: a block of x and one of w in flight at a time
    2.5d    depth, row; column        depth, row; column        the same in each square; gradients of w summed later
    3d      x, y; z                   x, z; y                   x gathered over y, w over x, the product summed and
                                                                cut over z; outwards y and z change places

No rank ever holds a whole matrix: the backward pass fetches its parts again. Each rank has only a summand of the
gradients of biases and of other parameters that the rows of the batch share; `Cut.partial` marks them, and they are
summed once per step.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largebatch.config.parallel import Shape
from largebatch.parallel import collectives
from largebatch.parallel.cuts import Cut, local
from largebatch.parallel.mesh import Axis, Mesh, block


@dataclass(frozen=True)
class Layout:
    """The axes along which an activation is cut in its first and in its last dimension, the coarsest first."""

    batch: tuple[str, ...]
    features: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.batch + self.features


def layouts(shape: Shape) -> tuple[Layout, Layout]:
    if "tensor" in shape.sizes:
        return Layout((), ()), Layout((), ("tensor",))
    if "z" in shape.sizes:
        return Layout(("x", "y"), ("z",)), Layout(("x", "z"), ("y",))
    square = Layout(("depth", "row") if "depth" in shape.sizes else ("row",), ("column",))
    return square, square


def num_blocks(shape: Shape, axes: tuple[str, ...]) -> int:
    """Number of blocks of a dimension that is cut along these axes."""
    return block(shape.sizes, dict.fromkeys(shape.sizes, 0), axes)[1]


def check_divisible(shape: Shape, what: str, value: int, number: int, option: str = "") -> None:
    if value % number:
        raise ValueError(
            f"The model has {value} {what}, and {shape} cuts them into {number} equal parts, which is impossible: "
            f"change {option}--parallel.tensor.size or mode."
        )


def own_block(x: Tensor, mesh: Mesh, axes: tuple[str, ...], dim: int) -> Tensor:
    """View this rank's block, along `dim`, of a tensor that is the same on all ranks."""
    index, number = mesh.block(axes)
    length = x.shape[dim] // number
    return x.narrow(dim, index * length, length)


def whole(x: Tensor, mesh: Mesh, layout: Layout) -> Tensor:
    """Assemble an activation of this layout on every rank, with a gradient."""
    for dim, axes in ((-1, layout.features), (0, layout.batch)):
        for name in reversed(axes):
            x = collectives.gather(x, mesh.axis(name), dim)
    return x


# -- linear ---------------------------------------------------------------------------------------------------------


class _Summa(torch.autograd.Function):
    """x (rows i, columns k of blocks) times w (out j, in k) at ranks (i, j); w's in-blocks lie along the row axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row: Axis, column: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.row, ctx.column = row, column
        y = x.new_zeros(x.shape[:-1].numel(), len(weight))
        for k in range(row.size):
            y.addmm_(_rows(collectives.broadcast(x, column, k)), collectives.broadcast(weight, row, k).t())
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        row, column, dy = ctx.row, ctx.column, _rows(grad)
        dx = dw = None
        for k in range(row.size):
            if ctx.needs_input_grad[0]:
                summand = dy @ collectives.broadcast(weight, row, k)
                total = collectives.reduce_to(summand, column, k)
                dx = total.view(x.shape) if column.index == k else dx
            summand = dy.t() @ _rows(collectives.broadcast(x, column, k))
            total = collectives.reduce_to(summand, row, k)
            dw = total if row.index == k else dw
        return dx, dw, None, None


class _Cube(torch.autograd.Function):
    """x gathered over `source`, w over `along`; the product summed over `target`, and cut along it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, source: Axis, along: Axis, target: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.source, ctx.along, ctx.target = source, along, target
        y = collectives.all_gather(x, source) @ collectives.all_gather(weight, along, 1).t()
        return collectives.reduce_scatter(y, target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy, dx = collectives.all_gather(grad, ctx.target), None
        if ctx.needs_input_grad[0]:
            dx = collectives.reduce_scatter(dy @ collectives.all_gather(weight, ctx.along, 1), ctx.source)
        dw = _rows(dy).t() @ _rows(collectives.all_gather(x, ctx.source))
        return dx, collectives.reduce_scatter(dw, ctx.along, 1), None, None, None


class Linear(nn.Module):
    """A linear layer from the outer layout to the inner one, or back."""

    def __init__(self, serial: nn.Linear | nn.Conv2d, mesh: Mesh, *, inwards: bool, pieces: int = 1) -> None:
        """Take this rank's part of `serial`. Its outputs are `pieces` blocks, each of which is cut by itself.

        The weight of a convolution becomes a matrix, and the layer then expects patches.
        """
        super().__init__()
        outer, inner = layouts(mesh.shape)
        source, self.layout = (outer, inner) if inwards else (inner, outer)
        self.mesh, self.inwards = mesh, inwards
        flat = tuple(serial.weight.shape[1:]) if isinstance(serial, nn.Conv2d) else ()
        self.cuts = {"weight": self._weight_cut(source, pieces, flat)}
        self.weight = nn.Parameter(local(serial.weight.detach(), self.cuts["weight"], mesh))
        self.bias = None
        if serial.bias is not None:
            self.cuts["bias"] = Cut({0: self.layout.features}, pieces=pieces, partial=self.layout.batch)
            self.bias = nn.Parameter(local(serial.bias.detach(), self.cuts["bias"], mesh))

    def _weight_cut(self, source: Layout, pieces: int, flat: tuple[int, ...]) -> Cut:
        sizes, columns = self.mesh.shape.sizes, source.features  # in mode 1d
        partial = ("depth",) if "depth" in sizes else ()
        if "z" in sizes:
            columns = source.features + ("x",)
        elif "row" in sizes:
            columns = ("row",)
        return Cut({0: self.layout.features, 1: columns}, pieces=pieces, partial=partial, flat=flat)

    def forward(self, x: Tensor) -> Tensor:
        y = self._product(_autocast(x), _autocast(self.weight))
        return y if self.bias is None else y + _autocast(self.bias)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        sizes, axis = self.mesh.shape.sizes, self.mesh.axis
        if "tensor" in sizes and self.inwards:
            return F.linear(collectives.copy(x, axis("tensor")), weight)
        if "tensor" in sizes:
            return collectives.reduce(F.linear(x, weight), axis("tensor"))
        if "z" in sizes:
            source, target = ("y", "z") if self.inwards else ("z", "y")
            return _Cube.apply(x, weight, axis(source), axis("x"), axis(target))
        return _Summa.apply(x, weight, axis("row"), axis("column"))

    def extra_repr(self) -> str:
        return f"part={tuple(self.weight.shape)}, {'inwards' if self.inwards else 'outwards'}"


class Head(Linear):
    """The linear layer of the classes: the loss uses this rank's part of the logits, everyone else the whole."""

    def own_logits(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return whole(self.own_logits(x), self.mesh, self.layout)


def _autocast(x: Tensor) -> Tensor:
    """Cast x to the type of autocast, which does not do it in functions with a backward of their own."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


# -- norm -----------------------------------------------------------------------------------------------------------


class _LayerNorm(torch.autograd.Function):
    """Layer norm over features that are cut along one axis into equal parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, axis: Axis, eps: float) -> Tensor:
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        means, variances = collectives.all_gather(torch.stack((mean, var))[None], axis).unbind(1)
        mean = means.mean(0)
        rstd = (variances.mean(0) + means.var(0, correction=0) + eps).rsqrt()
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.axis = axis
        return ((x - mean) * rstd).mul_(weight).add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, mean, rstd, weight = ctx.saved_tensors
        normal, scaled = (x - mean) * rstd, grad * weight
        means = torch.stack((scaled.mean(-1, keepdim=True), (scaled * normal).mean(-1, keepdim=True)))
        shift, slope = collectives.all_reduce(means, ctx.axis) / ctx.axis.size
        dx = (scaled - shift - normal * slope) * rstd
        return dx, _rows(grad * normal).sum(0), _rows(grad).sum(0), None, None


class LayerNorm(nn.Module):
    """Layer norm over cut features; ranks exchange the means and variances of their parts."""

    def __init__(self, serial: nn.LayerNorm, mesh: Mesh, layout: Layout) -> None:
        super().__init__()
        (name,) = layout.features
        self.axis, self.eps = mesh.axis(name), serial.eps
        cut = Cut({0: layout.features}, partial=layout.batch)
        self.cuts = {"weight": cut, "bias": cut}
        self.weight = nn.Parameter(local(serial.weight.detach(), cut, mesh))
        self.bias = nn.Parameter(local(serial.bias.detach(), cut, mesh))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return _LayerNorm.apply(x, self.weight, self.bias, self.axis, self.eps)


# -- dropout --------------------------------------------------------------------------------------------------------


class Dropout(nn.Module):
    """Dropout of an activation cut along `axes`: each block has its own mask, which all ranks of the block share.

    All ranks draw the seeds of all blocks from the default generator, so its state stays the same on all ranks, and
    activation checkpointing, which restores it, gets the same masks again.
    """

    def __init__(self, rate: float, mesh: Mesh, axes: tuple[str, ...]) -> None:
        super().__init__()
        self.rate, self.mesh, self.axes = rate, mesh, axes

    def forward(self, x: Tensor) -> Tensor:
        return x * self._kept(x, x.shape) if self.training else x

    def _kept(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Draw a mask: 1 / (1 - rate) for elements that are kept, 0 for the others."""
        index, number = self.mesh.block(self.axes)
        seed = torch.randint(2**62, (number,))[index].item()
        generator = torch.Generator(x.device).manual_seed(int(seed))
        return x.new_empty(shape).bernoulli_(1 - self.rate, generator=generator).div_(1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, axes={self.axes}"


class DropPath(Dropout):
    """Stochastic depth of a batch cut along `axes`: all parts of a sample are kept, or all are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self._kept(x, (len(x),) + (1,) * (x.ndim - 1)) if self.training else x
