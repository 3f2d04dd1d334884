"""The part of each parameter that a rank has: cut it for a mesh, assemble it again, count it once.

A layer that cuts its parameters has an attribute `cuts`, a dict from their names to `Cut`. Any other parameter is whole
on every rank of its pipeline stage. Parameters are plain tensors under the names of the serial model, so a plain
checkpoint can be cut for any mesh.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from largebatch.parallel import collectives
from largebatch.parallel.mesh import Axis, Mesh, block


@dataclass(frozen=True)
class Cut:
    """The cut of one parameter.

    dims: dimension -> the axes along which it is cut, the coarsest first.
    pieces: number of blocks stacked along dimension 0 (3: q, k and v); each of them is cut by itself.
    partial: axes along which each rank computes only a summand of the gradient of its part.
    flat: for a convolution that is computed as a matrix, the shape that dimension 1 stands for, such as (3, 16, 16).
    """

    dims: Mapping[int, tuple[str, ...]]
    pieces: int = 1
    partial: tuple[str, ...] = ()
    flat: tuple[int, ...] = ()

    def axes(self) -> set[str]:
        return {axis for axes in self.dims.values() for axis in axes}

    def slice_(self, whole: Tensor, sizes: Mapping[str, int], place: Mapping[str, int]) -> Tensor:
        """View the part of a whole parameter that the rank at `place` holds; dimension 0 becomes (pieces, length)."""
        whole = whole.view(len(whole), -1) if self.flat else whole
        view = whole.unflatten(0, (self.pieces, -1)) if whole.ndim else whole
        for dim, axes in self.dims.items():
            index, number = block(dict(sizes), dict(place), axes)
            length, rest = divmod(view.shape[dim + 1], number)
            if rest:
                raise ValueError(f"a parameter of shape {tuple(whole.shape)} cannot be cut into {number} along {dim}")
            view = view.narrow(dim + 1, index * length, length)
        return view


UNCUT = Cut({})


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """The cut of every parameter of the model by its name, without those of other ranks' pipeline stages."""
    found = {name: UNCUT for name, _ in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, cut in getattr(module, "cuts", {}).items():
            key = f"{prefix}.{name}" if prefix else name
            if key in found:
                found[key] = cut
    return found


def local(whole: Tensor, cut: Cut, mesh: Mesh) -> Tensor:
    """Copy this rank's part out of a whole tensor; a view would keep the whole in memory."""
    if not whole.ndim:
        return whole.clone()
    part = cut.slice_(whole.contiguous(), mesh.shape.sizes, mesh.place)
    return part.clone(memory_format=torch.contiguous_format).flatten(0, 1)


def replicas(cut: Cut, mesh: Mesh) -> int:
    """Number of ranks of this pipeline stage that hold the same part."""
    sizes = mesh.shape.sizes
    return mesh.shape.size // sizes["pipeline"] // math.prod(sizes[axis] for axis in cut.axes())


@torch.no_grad()
def sum_partial_gradients(model: nn.Module, cuts: Mapping[str, Cut], mesh: Mesh) -> None:
    """Complete the gradients of which each rank of an axis has a summand, many in one message."""
    for name in mesh.shape.sizes:
        axis = mesh.axis(name)
        grads = [
            parameter.grad
            for key, parameter in model.named_parameters()
            if parameter.grad is not None and name in cuts[key].partial
        ]
        for bucket in _buckets(grads) if axis.size > 1 else ():
            _sum(bucket, axis)


def _sum(bucket: list[Tensor], axis: Axis) -> None:
    total = torch.cat([tensor.flatten() for tensor in bucket])
    collectives.all_reduce_(total, axis)
    for tensor, own in zip(bucket, total.split([tensor.numel() for tensor in bucket])):
        tensor.copy_(own.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors, in order, into messages of at most `BUCKET_BYTES`, or of one larger tensor."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(other.nbytes for other in bucket) + tensor.nbytes > collectives.BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
