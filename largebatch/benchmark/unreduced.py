"""A rank that trains by the trainer's own step, and keeps its gradients to itself."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.ranks import Communicator
from largebatch.ranks.reduction import Reduced


class Unreduced:
    """A rank whose gradients stay its own. In all other respects it is `comm`; the models of the ranks drift apart."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allreduce(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return a copy: in a step, batch norm's statistics are reduced."""
        return tensor.clone()

    def wrap(self, optimizer: Optimizer, model: nn.Module, **options: Any) -> Reduced:
        """Return a wrapped optimizer that sends nothing."""
        reduced = self._comm.wrap(optimizer, model, **options)
        reduced.sends = False
        return reduced
