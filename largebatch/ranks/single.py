"""The only rank of a run, which needs neither Horovod nor MPI nor a launcher."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.config.horovod import HorovodConfig
from largebatch.config.parallel import WHOLE, Shape
from largebatch.launch.cores import cores_of_process
from largebatch.ranks.ranks import Among, Ranks
from largebatch.ranks.reduction import Reduced, mixed
from largebatch.ranks.sending import Unchanged


class Single(Ranks):
    """Takes the same calls as several ranks; each collective returns what it is given."""

    def __init__(
        self, *, deterministic: bool = False, horovod: HorovodConfig | None = None, shape: Shape = WHOLE
    ) -> None:
        """ValueError for a model that ranks share, and for settings that would be wrong on several ranks."""
        if horovod:
            horovod.apply(os.environ, deterministic=deterministic, on_gpus=torch.cuda.is_available())
        shape.data_size(1)
        super().__init__(hang_limit_s=horovod.hang_limit_s if horovod else 0.0)
        self.cores = cores_of_process()
        self._introduce()
        self.is_open = True

    def start_allreduce(self, tensor: Tensor, *, name: str, among: Among = "all", largest: bool = False) -> Tensor:
        return tensor.detach().clone()

    def finish(self, handle: Tensor, *, pause_s: float | None = None) -> Tensor:
        return handle

    def broadcast_object(self, value: Any, *, name: str) -> Any:
        return value

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        return [value]

    def allgather(self, tensor: Tensor, *, sizes: Sequence[int], name: str) -> Tensor:
        return tensor

    def broadcast_tensors(self, tensors: dict[str, Tensor], *, name: str) -> None:
        pass

    def _mixed(self, optimizer: Optimizer, model: nn.Module, passes: int, sending: Unchanged) -> Reduced:
        return mixed(Reduced, optimizer)
