"""What an optimizer must know of the mesh: whose squares count how often, and which piece each data rank updates.

ZeRO stage 1: all parameters of a rank, one after another, make a line of numbers that is cut into as many pieces as
there are data ranks, equal but for one element, inside of tensors where it comes so. Each data rank keeps the
optimizer's state of its piece alone, updates that, and gets the other pieces from the others (`Sharding.gather`).

The line exists nowhere: parameters stay the tensors that they are, with memory of their own, as Horovod, checkpoints
and compiled models know them. They are gathered through a buffer of `collectives.BUCKET_BYTES` instead, at the price of
copying them in memory once.

Measured for volo_d1 (26.6 million parameters, 102 MiB in float32) on the CPUs of one host, as what a rank's peak of
resident memory after three steps lies above that of parameters and gradients: without ZeRO 359 MiB, of which 203 MiB
are state and u most of the rest; on four data ranks 231 to 291 MiB, of which 51 MiB are state, and the bucket and
what gloo copies of it much of the rest. `state_bytes` says the first of it in any run.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.parallel import collectives
from largebatch.parallel.cuts import Cut, replicas
from largebatch.parallel.mesh import Mesh


class Piece(NamedTuple):
    """Some elements, one after another, of a parameter."""

    parameter: Tensor
    first: int
    end: int

    @property
    def length(self) -> int:
        """Elements."""
        return self.end - self.first

    def of(self, tensor: Tensor) -> Tensor:
        """The view of these elements of a contiguous tensor of the parameter's shape, 1-D."""
        return tensor.detach().view(-1)[self.first : self.end]


class Sharding:
    """Which parameters this rank has of which, to be set as an optimizer's `sharding`. A collective of the replica.

    Args:
        parameters: those of this rank, by their names in the whole model.
        cuts: how each of them is cut, see `cuts.cuts_of`.
        zero: each data rank keeps the state of one piece and updates that.
        offload: in host memory, on the host.

    Attributes:
        numbers: each parameter's among all those of the whole model, the same on all its ranks.
        count: of them.
        share: of each parameter's squares that this rank counts: one part of those that hold the same.
        home: the device where the optimizer's state is, and computes.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        cuts: Mapping[str, Cut],
        mesh: Mesh,
        *,
        zero: bool = False,
        offload: bool = False,
    ) -> None:
        if offload and not zero:
            raise ValueError("--parallel.offload keeps the state of ZeRO on the host: set --parallel.zero 1 as well.")
        if zero and len({(p.device, p.dtype) for p in parameters.values()}) > 1:
            raise ValueError("--parallel.zero 1 expects parameters of one type on one device: set --parallel.zero 0.")
        names = collectives.gather_objects(list(parameters), mesh.axis("model"))
        number_of = {name: number for number, name in enumerate(dict.fromkeys(chain(*names)))}
        self.count = len(number_of)
        self.numbers = {p: number_of[name] for name, p in parameters.items()}
        self.share = {p: 1 / replicas(cuts[name], mesh) for name, p in parameters.items()}
        self.zero, self.offload = zero, offload
        self.data, self.model = mesh.axis("data"), mesh.axis("model")
        self.counted = mesh.axis("job") if zero else self.model
        device = next(iter(parameters.values())).device
        self.home = torch.device("cpu") if offload else device
        lengths = [p.numel() for p in parameters.values()]
        size = self.data.size if zero else 1
        bounds = [sum(lengths) * index // size for index in range(size + 1)]
        self.pieces = [list(_between(parameters.values(), *pair)) for pair in zip(bounds, bounds[1:])]
        self._own = {piece.parameter: piece for piece in self.pieces[self.data.index if zero else 0]}

    def own(self, p: Tensor) -> Piece:
        """What this rank updates of one of its parameters: all, some or, under ZeRO, none of it."""
        if p not in self.numbers:
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is not among those that Sharding was given")
        return self._own.get(p, Piece(p, 0, 0))

    def gather(self, parameters: Iterable[Tensor]) -> None:
        """Complete these parameters by the pieces that other data ranks have updated."""
        if self.data.size == 1 or not self.zero:
            return
        moved = set(parameters)
        runs = [[piece for piece in pieces if piece.parameter in moved] for pieces in self.pieces]
        longest = max(sum(piece.length for piece in run) for run in runs)
        for first in range(0, longest, step := self._step()):
            self._gather(runs, first, min(first + step, longest))

    def _step(self) -> int:
        """Elements of each data rank in a bucket."""
        example = next(iter(self.numbers))
        return max(1, collectives.BUCKET_BYTES // example.element_size() // self.data.size)

    def _gather(self, runs: list[list[Piece]], first: int, end: int) -> None:
        bucket = next(iter(self.numbers)).new_zeros(end - first)
        for at, mine in _window(runs[self.data.index], first, end):
            bucket[at : at + mine.numel()] = mine
        rows = collectives.all_gather(bucket, self.data).view(self.data.size, -1)
        for index, (run, row) in enumerate(zip(runs, rows)):
            for at, theirs in _window(run, first, end) if index != self.data.index else ():
                theirs.copy_(row[at : at + theirs.numel()])

    def whole(self, p: Tensor, own: Tensor) -> Tensor:
        """A tensor of p's shape from what each data rank has for its piece of p: on all of them."""
        whole = own.new_empty(p.numel())
        for index, pieces in enumerate(self.pieces):
            for piece in (piece for piece in pieces if piece.parameter is p):
                mine = index == self.data.index or not self.zero
                part = own.view(-1) if mine else own.new_empty(piece.length)
                piece.of(whole).copy_(collectives.broadcast(part, self.data, index) if self.zero else part)
        return whole.view(p.shape)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the optimizer's state on this rank."""
    tensors = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _between(parameters: Iterable[Tensor], first: int, end: int) -> Iterator[Piece]:
    """The pieces of parameters between two places of the line that they make."""
    at = 0
    for p in parameters:
        piece = Piece(p, max(first - at, 0), min(end - at, p.numel()))
        if piece.first < piece.end:
            yield piece
        at += p.numel()


def _window(run: list[Piece], first: int, end: int) -> Iterator[tuple[int, Tensor]]:
    """(place in the window, view of a parameter) of what lies between two places of a run of pieces."""
    starts = accumulate((piece.length for piece in run), initial=0)
    for start, piece in zip(starts, run):
        low, high = max(first, start), min(end, start + piece.length)
        if low < high:
            shift = piece.first - start
            yield low - first, Piece(piece.parameter, low + shift, high + shift).of(piece.parameter)
