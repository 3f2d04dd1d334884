"""The only rank of a run, which trains by the trainer's own step without Horovod."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.config import Shape
from largebatch.launch.cores import cores_of_process, share_of_cores
from largebatch.ranks import Communicator, Stopped
from largebatch.ranks.reduction import Reduced, keep
from largebatch.ranks.sending import Unchanged
from largebatch.ranks.watchdog import Watchdog


class Solo(Communicator):
    """The only rank of a run: each collective returns what it is given. Horovod need not be installed."""

    def __init__(self) -> None:
        self.rank = self.data_rank = self.model_rank = self.local_rank = 0
        self.size = self.data_size = self.model_size = self.local_size = 1
        self.stall_limit_s = 0.0
        self._watchdog = Watchdog(0, 0, lambda mark: None)
        self._closing = []
        self.cores = cores_of_process()
        self.num_cores = share_of_cores(self.cores, [self.cores])
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, int(self.num_cores)))

    def device(self, kind: str = "auto") -> torch.device:
        """Return the GPU, if there is one and `kind` does not say otherwise, else the CPU."""
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--run.device is cuda, and {socket.gethostname()} has no GPU that torch can use.")
        return torch.device("cpu" if kind == "cpu" or not torch.cuda.is_available() else "cuda:0")

    def allreduce(self, tensor: Tensor, *, name: str, among_data_ranks: bool = False) -> Tensor:
        """Return a copy."""
        return tensor.clone()

    def broadcast_object(self, value: Any, *, name: str) -> Any:
        """Return the value."""
        return value

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        """Return the value as that of the only rank."""
        return [value]

    def broadcast_tensors(self, tensors: dict[str, Tensor], *, name: str) -> None:
        """Do nothing: there is nobody else."""

    def wrap(self, optimizer: Optimizer, model: nn.Module, *, passes: int = 1, **_: Any) -> Reduced:
        """Return the optimizer with the methods of a wrapped one."""
        reduced = keep(optimizer)
        reduced.take_over(optimizer, model, self, passes=passes, sending=Unchanged(), watch=False)
        return reduced


@contextmanager
def alone(shape: Shape) -> Iterator[Solo]:
    """Start the only rank of a run, as `comm.session` starts several; ValueError for a model that ranks share."""
    shape.data_size(1)
    try:
        yield Solo()
    except Stopped as error:
        sys.stderr.write(f"largebatch: {error}\n")
        sys.exit(error.exit_code)
