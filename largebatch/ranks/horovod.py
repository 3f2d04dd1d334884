"""Horovod's side of the ranks: waiting for its collectives, and its DistributedOptimizer under ours.

Horovod's own blocking calls busy-wait: they starve the loader, Horovod's own thread, and the rank that everyone waits
for. The functions here poll and sleep.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.ranks.fp16 import Fp16
from largebatch.ranks.mistakes import Mistake
from largebatch.ranks.reduction import Reduced
from largebatch.ranks.sending import Unchanged

MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 200e-6  # between two polls; each pause is twice the one before


class _Horovod:
    """Horovod's module for torch, imported when it is first used: a process can do without it."""

    def __getattr__(self, name: str) -> Any:
        import horovod.torch

        return getattr(horovod.torch, name)


hvd: Any = _Horovod()


def wait(handle: int) -> None:
    """Sleep until a collective is done."""
    pause_s = MIN_PAUSE_S
    while not hvd.poll(handle):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def finish(handle: int) -> Any:
    """Wait for a collective and return its result."""
    wait(handle)
    return hvd.synchronize(handle)


class ReducedByHorovod(Reduced):
    """Mixed in before Horovod's DistributedOptimizer, which sends the buckets."""

    # Horovod's: its handle, and the gradients into which `decompress` writes
    _grouped_allreduce_grad_async: Callable[[Sequence[nn.Parameter]], tuple[int, Sequence[Tensor]]]

    def _send(self, bucket: Sequence[nn.Parameter]) -> Any:
        return self._grouped_allreduce_grad_async(bucket)

    def _receive(self, sent: Any) -> None:
        handle, gradients = sent
        for received, gradient in zip(finish(handle), gradients):
            self.sending.decompress(received, gradient)


def distribute(
    optimizer: Optimizer, model: nn.Module, *, passes: int, sending: Unchanged, data_set: Any
) -> ReducedByHorovod:
    """Return Horovod's optimizer for this one, with our methods; Horovod calls its class with the param groups alone.

    It averages over `data_set`.
    """
    name = type(optimizer).__name__
    with _without_gradients(model):  # Horovod's own hooks could not be removed again
        try:
            distributed: Any = hvd.DistributedOptimizer(
                optimizer,
                named_parameters=model.named_parameters(),
                backward_passes_per_step=passes,
                compression=sending,
                op=hvd.Sum if isinstance(sending, Fp16) else hvd.Average,  # Fp16 divides before it casts
                process_set=data_set,
            )
        except TypeError as error:
            raise Mistake(
                f"{name} cannot be wrapped: Horovod makes it anew as {name}(param_groups), and that fails ({error}). "
                "Give its other arguments defaults; the groups hold their values."
            ) from error
    distributed.__class__ = type(name, (ReducedByHorovod, type(distributed)), {})
    reduced: ReducedByHorovod = distributed
    return reduced


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Freeze all parameters for the time of a block."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
