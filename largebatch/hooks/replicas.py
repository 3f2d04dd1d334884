"""Checks that the data ranks still hold the same weights: a flipped bit on one of them is seen before it is saved.

Every rank starts from rank 0's weights and applies the same reduced gradient with the same arithmetic, so the copies
are equal to the last bit. A fault of a memory or a processor makes one differ, and nothing else would show it: the
gradients of that rank stay plausible, and the reduction spreads them. So now and then the ranks compare a sum of the
bits of each tensor. On hosts with different processors the copies may differ by rounding: set --run.check_replicas "".
"""

import hashlib
import socket
from collections import Counter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.comm import Communicator, Stopped
from largebatch.engine import Hook, Trainer

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element: its bits


class ReplicaCheck(Hook):
    """Compares weights, buffers and optimizer state over the data ranks; runs before the hook that saves them.

    A check reads each tensor once and sends a few bytes. All ranks raise Stopped if one differs.
    """

    def __init__(self, *, interval_images: int, with_optimizer: bool) -> None:
        """with_optimizer: False where each data rank holds another part of the optimizer's state (ZeRO)."""
        self.interval_images = interval_images
        self.with_optimizer = with_optimizer

    def after_step(self, trainer: Trainer) -> None:
        """Compare, if the step just done passed a multiple of `interval_images`, or was the last of the run."""
        if trainer.due(self.interval_images):
            optimizer = trainer.optimizer if self.with_optimizer else None
            check_replicas(trainer.comm, trainer.model, optimizer, place=f"step {trainer.state.step}")


def check_replicas(comm: Communicator, model: nn.Module, optimizer: Optimizer | None, *, place: str) -> None:
    """Compare over the data ranks that hold the same part of the model. All ranks raise Stopped if one differs.

    The message names the ranks that differ from most others, and the first tensor that does. place: where the run is.
    """
    tensors = named_tensors(model, optimizer)
    sums = torch.stack([bit_sum(tensor) for tensor in tensors.values()]).cpu()
    mine = (comm.model_rank, socket.gethostname(), hashlib.blake2b(sums.numpy().tobytes()).hexdigest())
    everyone = comm.allgather_object(mine, name="replicas/digest")
    if not any(differing(everyone)):
        return
    rows = comm.allgather_object(sums, name="replicas/sums")  # only now: they are long
    names = comm.allgather_object(list(tensors), name="replicas/names")
    raise Stopped("; ".join(describe(everyone, rows, names)) + f": found after {place}. {REMEDY}")


REMEDY = (
    "A memory or a processor of such a host computes wrongly, or its processor is of another kind. Leave the host out "
    "and give the same command again: the run goes on from its newest checkpoint. On different processors set "
    "--run.check_replicas \"\"."
)


def named_tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Parameters and buffers by name, and the optimizer's tensors as parameter/key, in the same order on all ranks."""
    tensors = dict(model.state_dict(keep_vars=True))
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter, {})
            tensors.update({f"{name}/{key}": value for key, value in state.items() if torch.is_tensor(value)})
    return tensors


def bit_sum(tensor: Tensor) -> Tensor:
    """Sum of the elements' bits as integers, 0-d int64 modulo 2^64: each single flipped bit changes it."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def differing(everyone: list[tuple[int, str, str]]) -> list[bool]:
    """For each rank, whether its digest differs from that of most ranks with the same part of the model.

    Of two equally frequent digests the one of the lowest rank counts.
    """
    digests = {part: Counter(d for p, _, d in everyone if p == part) for part, _, _ in everyone}
    return [digests[part].most_common(1)[0][0] != digest for part, _, digest in everyone]


def describe(everyone: list[tuple[int, str, str]], rows: list[Tensor], names: list[list[str]]) -> list[str]:
    """One clause per rank that differs, with the first tensor in which it does."""
    bad = differing(everyone)
    clauses = []
    for rank, (part, host, _) in enumerate(everyone):
        if bad[rank]:
            good = next(r for r, (p, _, _) in enumerate(everyone) if p == part and not bad[r])
            first = int((rows[rank] != rows[good]).nonzero()[0])
            alone = sum(p == part for p, _, _ in everyone) == 2
            clauses.append(
                f"rank {rank} ({host}) and rank {good} hold other values of {names[rank][first]}, and only two ranks "
                "hold it, so that either may be wrong" if alone else
                f"rank {rank} ({host}) holds other values of {names[rank][first]} than most ranks"
            )
    return clauses
