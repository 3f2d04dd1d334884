"""The weights of linear layers in bfloat16, which a LAMB step writes beside those in float32 and the next passes read.

Without copies, autocast rounds every weight again in each pass. A copy of numbers that the weight no longer has would
be an error that nobody sees. Therefore:

- Copies are read in the passes of a step alone (`reading`): not in an evaluation, nor by a copy of the model.
- Each pass begins by rounding all weights anew but those whose mark is as noted: version, address, whether they are
  trained. This rounding notes them, and a LAMB step that found a copy valid and wrote it with its weight. Nothing else
  does. torch counts the version up whenever it changes a tensor in place. Our own code that changes one past torch
  counts it up itself: LAMB, and Horovod's broadcasts.
- Notes last from one pass to another inside `over_steps` alone, and only if all code in it is ours: a hook of a user
  may change a weight past torch, as `.data` does. They are dropped when an older state was loaded.

A copy is made as autocast makes it, by `to`, and later changes in place. Its gradient goes on to the weight in each
pass, because torch keeps nothing for the gradient of `to` that a backward pass would free. An autograd.Function in each
layer would cost the host more than autocast's rounding does.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Mark = tuple[int, int, bool]  # version, address, and whether the weight is trained


class WeightCopies:
    """The copies of some layers' weights, those of `zoo.linear.read_copies`; without layers it does nothing."""

    def __init__(self, layers: Sequence[nn.Module] = ()) -> None:
        self._layers = layers
        for layer in layers:
            setattr(layer, "copies", self)
        self._copies: dict[Tensor, Tensor] = {}
        self._made: dict[Tensor, tuple[int, bool]] = {}  # the mark when the copy was made, without the version
        self._noted: dict[Tensor, Mark] = {}  # the mark of each weight when it had its copy
        self._keeps = False  # whether notes last from pass to pass
        self._reads = False  # whether a pass is under way

    def __reduce__(self) -> tuple[type["WeightCopies"], tuple[()]]:
        """A copy of a model, in memory or in a file, has no copies."""
        return WeightCopies, ()

    @contextmanager
    def over_steps(self, *, keep: bool = True) -> Iterator[None]:
        """In the block, rely on the notes of earlier passes and steps. So all that runs in it follows the rules.

        keep: whether that is so; if not, each pass rounds all weights anew, as outside of the block.
        """
        self.forget()
        self._keeps = keep
        try:
            yield
        finally:
            self._keeps = False

    def forget(self) -> None:
        """Let the next pass round all weights anew."""
        self._noted.clear()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let the layers read copies for the time of a pass, forward and backward."""
        if not self._keeps:
            self.forget()
        self._renew()
        self._reads = True
        try:
            yield
        finally:
            self._reads = False

    def of(self, weight: Tensor) -> Tensor | None:
        """Return the copy of a layer's weight for a pass that is under way, if it is valid."""
        return self.valid(weight) if self._reads else None

    def valid(self, weight: Tensor) -> Tensor | None:
        """Return the copy of a weight if it is that of its present numbers."""
        return self._copies[weight] if self._noted.get(weight) == _mark(weight) else None

    def note(self, weights: Iterable[Tensor]) -> None:
        """Note that the copies of these weights are those of their present numbers."""
        self._noted.update((weight, _mark(weight)) for weight in weights)

    def _renew(self) -> None:
        """Round the weights anew that changed since they were noted; those of float64 have no copy.

        A weight in other memory, or frozen since, gets another copy, with a gradient that leads to what it is now.
        """
        weights: list[Any] = [layer.weight for layer in self._layers]
        changed: list[Tensor] = []
        for weight in weights:
            mark = _mark(weight)
            if weight.dtype != torch.float32 or self._noted.get(weight) == mark:
                continue
            if self._made.get(weight) == mark[1:]:
                changed.append(weight)
            else:
                with torch.enable_grad():
                    self._copies[weight], self._made[weight] = weight.to(torch.bfloat16), mark[1:]
            self._noted[weight] = mark
        if changed:
            with torch.no_grad():
                torch._foreach_copy_([self._copies[weight] for weight in changed], changed)


def _mark(weight: Tensor) -> Mark:
    return weight._version, weight.data_ptr(), weight.requires_grad
