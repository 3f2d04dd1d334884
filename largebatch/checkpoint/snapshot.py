"""A copy in host memory of all that a checkpoint holds, so that training goes on while the copy is written.

The buffers are kept for the next snapshot, because a copy into new memory takes several times as long. For tensors on a
GPU they are pinned: the thread that writes waits for the copy, the step does not.
"""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.bit_sums import bit_sums
from largebatch.engine import TrainState
from zoo import named_weights
from zoo.hub import AVERAGE, WEIGHTS

STATE = "state.pt"


class HostMemory:
    """Buffers in host memory. The next `copy` of the same structure overwrites the last one."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def copy(self, value: Any, *place: Any) -> Any:
        """Copy nested dictionaries, lists and tuples of tensors and plain values. place: where `value` was found.

        A copy from a GPU is complete when the current stream has done its present work.
        """
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), place)
        if isinstance(value, Mapping):
            return {key: self.copy(inner, *place, key) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.copy(inner, *place, index) for index, inner in enumerate(value))
        return value

    def _copy_tensor(self, tensor: Tensor, place: tuple[Any, ...]) -> Tensor:
        key = (*place, tensor.shape, tensor.dtype, tensor.is_cuda)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda:  # nothing takes its memory before it is copied
            tensor.record_stream(torch.cuda.current_stream())
        return self._buffers[key].copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint, which training does not change."""

    step: int
    weights: dict[str, dict[str, Tensor]]  # by the name of their file: the model's, and their average if there is one
    state: dict[str, Any]  # what is written into state.pt
    copied: torch.cuda.Event | None = None  # until then the GPU is still copying
    description: str = ""  # what is written into config.json; "": there is none
    sums: dict[str, Tensor] = field(default_factory=dict)  # by the name of the file: of the tensors that were copied

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    def num_bytes(self) -> int:
        return num_bytes([self.weights, self.state])


def take_snapshot(
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    state: TrainState,
    config_text: str,
    average: nn.Module | None = None,
    memory: HostMemory | None = None,
    description: str = "",
    beside: bool = False,
) -> Snapshot:
    """Return a snapshot, copied into `memory`; without it, one of the tensors in training, which must not change.

    beside: a GPU computes while it copies. So it must change no tensor before its work has waited for `copied`.
    """
    weights = {WEIGHTS: named_weights(model)} | ({} if average is None else {AVERAGE: named_weights(average)})
    content = {
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "state": asdict(state),
        "config": config_text,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }
    files: dict[str, dict[str, Any]] = {**weights, STATE: content}
    copied, sums = None, {name: sums_of(inside) for name, inside in files.items()}
    if memory is not None:
        on_gpu = any(tensor.is_cuda for tensor in _tensors([weights, content]))
        stream = torch.cuda.current_stream() if on_gpu else None
        if stream and beside:
            memory.stream.wait_stream(stream)
            stream = memory.stream
        with torch.cuda.stream(stream):
            weights, content, sums = memory.copy((weights, content, sums))
        copied = stream.record_event() if stream else None
    return Snapshot(state.step, weights, content, copied, description, sums)


def sums_of(content: Mapping[str, Any]) -> Tensor:
    return bit_sums(_tensors([content[name] for name in sorted(content)]))


def num_bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in inner for tensor in _tensors(item)]
