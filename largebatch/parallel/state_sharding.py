"""The optimizer's view of the mesh: how each rank's squared norms are weighted, and which slice each data rank updates.

ZeRO stage 1: imagine all parameters of a rank joined into one long vector, which is cut into one piece per data rank,
perhaps inside a tensor. Each data rank keeps the optimizer's state of its own piece, updates this piece and receives
the others (`Sharding.gather`).

The long vector is never built, because Horovod, checkpoints and compiled models expect each parameter in memory of its
own. So every parameter is copied in memory once per step.
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
    parameter: Tensor
    first: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.first

    def of(self, tensor: Tensor) -> Tensor:
        """View the same range of a contiguous tensor of the parameter's shape, 1-D."""
        return tensor.detach().view(-1)[self.first : self.end]


class Sharding:
    """The map from this rank's parameters to those of the whole model; all ranks of a replica construct it together.

    Args:
        parameters: this rank's parameters, by their names in the whole model.
        cuts: how each parameter is cut, see `cuts.cuts_of`.
        zero: each data rank keeps the state of one piece only, and updates this piece.
        offload: keep this state in host memory, and update it there.

    Attributes:
        numbers: the index of each parameter among those of the whole model, the same on all ranks of the replica.
        count: number of parameters of the whole model.
        share: the weight of a parameter's squares on this rank, 1 / number of ranks that hold the same part.
        home: the device that holds the optimizer's state and computes the update.
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
        """The range of a parameter that this rank updates; under ZeRO it may be empty."""
        if p not in self.numbers:
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is not among those that Sharding was given")
        return self._own.get(p, Piece(p, 0, 0))

    def numbers_of(self, parameters: Iterable[Tensor]) -> Tensor:
        return torch.tensor([self.numbers[p] for p in parameters])

    def gather(self, parameters: Iterable[Tensor]) -> None:
        if self.data.size == 1 or not self.zero:
            return
        moved = set(parameters)
        runs = [[piece for piece in pieces if piece.parameter in moved] for pieces in self.pieces]
        longest = max(sum(piece.length for piece in run) for run in runs)
        of_rank = collectives.BUCKET_BYTES // next(iter(self.numbers)).element_size() // self.data.size
        for first in range(0, longest, step := max(1, of_rank)):
            self._gather(runs, first, min(first + step, longest))

    def _gather(self, runs: list[list[Piece]], first: int, end: int) -> None:
        bucket = next(iter(self.numbers)).new_zeros(end - first)
        for at, mine in _window(runs[self.data.index], first, end):
            bucket[at : at + mine.numel()] = mine
        rows = collectives.all_gather(bucket, self.data).view(self.data.size, -1)
        for index, (run, row) in enumerate(zip(runs, rows)):
            for at, theirs in _window(run, first, end) if index != self.data.index else ():
                theirs.copy_(row[at : at + theirs.numel()])

    def whole(self, p: Tensor, own: Tensor) -> Tensor:
        """Assemble, on all data ranks, a tensor of p's shape from each rank's values for its piece of p."""
        whole = own.new_empty(p.numel())
        for index, pieces in enumerate(self.pieces):
            for piece in (piece for piece in pieces if piece.parameter is p):
                mine = index == self.data.index or not self.zero
                part = own.view(-1) if mine else own.new_empty(piece.length)
                piece.of(whole).copy_(collectives.broadcast(part, self.data, index) if self.zero else part)
        return whole.view(p.shape)


def state_bytes(optimizer: Optimizer) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _between(parameters: Iterable[Tensor], first: int, end: int) -> Iterator[Piece]:
    at = 0
    for p in parameters:
        piece = Piece(p, max(first - at, 0), min(end - at, p.numel()))
        if piece.first < piece.end:
            yield piece
        at += p.numel()


def _window(run: list[Piece], first: int, end: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (position in the window, view of a parameter) for the elements `first` to `end` of a run."""
    starts = accumulate((piece.length for piece in run), initial=0)
    for start, piece in zip(starts, run):
        low, high = max(first, start), min(end, start + piece.length)
        if low < high:
            shift = piece.first - start
            yield low - first, Piece(piece.parameter, low + shift, high + shift).of(piece.parameter)
