"""Checks that the data ranks still hold the same weights: a flipped bit on one of them is seen before it is saved.

Every rank starts from rank 0's weights and applies the same reduced gradient with the same arithmetic, so the copies
are equal to the last bit. A fault of a memory or a processor makes one differ, and nothing else would show it: the
gradients of that rank stay plausible, and the reduction spreads them. So now and then, and before each checkpoint, the
ranks compare a sum of the bits of each tensor. On hosts with different processors the copies may differ by rounding:
set --run.check_replicas "".
"""

import hashlib
import socket
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.comm import Communicator, Stopped
from largebatch.engine import Hook, Trainer

WORD = 8  # bytes that are added as one: without a conversion, a sum takes no longer than reading


class ReplicaCheck(Hook):
    """Compares weights, their average and the optimizer's state over the data ranks, every `interval_images`.

    The hook that saves calls `check`, too, so that a bad state never takes the place of a good checkpoint. A check
    reads each tensor once and sends a few bytes. All ranks raise Stopped if one differs.
    """

    def __init__(self, *, interval_images: int, with_optimizer: bool) -> None:
        """with_optimizer: False where each data rank holds another part of the optimizer's state (ZeRO)."""
        self.interval_images = interval_images
        self.with_optimizer = with_optimizer
        self.checked_step = -1

    def after_step(self, trainer: Trainer) -> None:
        """Compare, if the step just done passed a multiple of `interval_images`, or was the last of the run."""
        if trainer.due(self.interval_images):
            self.check(trainer)

    def check(self, trainer: Trainer) -> None:
        """Compare, unless this was done after this step already."""
        if trainer.comm.data_size == 1 or trainer.state.step == self.checked_step:
            return
        self.checked_step = trainer.state.step
        tensors = named_tensors(trainer.model, trainer.optimizer if self.with_optimizer else None, trainer.average)
        check_replicas(trainer.comm, tensors, place=f"step {trainer.state.step}")


def check_replicas(comm: Communicator, tensors: dict[str, Tensor], *, place: str) -> None:
    """Compare over the data ranks that hold the same part of the model. All ranks raise Stopped if one differs.

    The message names the ranks that differ from most others, and the first tensor that does. place: where the run is.
    """
    if found := differences(comm, tensors):
        clauses = [
            f"rank {one.rank} ({one.host}) and rank {one.good} hold other values of {one.tensor}, and only two ranks "
            "hold it, so that either may be wrong" if one.alone else
            f"rank {one.rank} ({one.host}) holds other values of {one.tensor} than most ranks"
            for one in found
        ]  # fmt: skip
        raise Stopped("; ".join(clauses) + f": found after {place}. {REMEDY}")


REMEDY = (
    "A memory or a processor of such a host computes wrongly, or its processor is of another kind. Leave the host out "
    "and give the same command again: the run goes on from its newest checkpoint. On different processors set "
    "--run.check_replicas \"\"."
)


def named_tensors(
    model: nn.Module, optimizer: Optimizer | None = None, average: nn.Module | None = None
) -> dict[str, Tensor]:
    """Return parameters and buffers by name, in the same order on all ranks.

    The optimizer's tensors are called parameter/key, and those of the average have a word before their name.
    """
    tensors = dict(model.state_dict(keep_vars=True))
    if average is not None:
        tensors.update({f"the average of {name}": value for name, value in average.state_dict(keep_vars=True).items()})
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter, {})
            tensors.update({f"{name}/{key}": value for key, value in state.items() if torch.is_tensor(value)})
    return tensors


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bytes, eight as one integer, 0-d int64 modulo 2^64; a flipped bit changes it."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()  # a view as words begins at a whole word
    whole = len(flat) - len(flat) % WORD
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)


@dataclass(frozen=True)
class Difference:
    """A rank whose bits are not those of most ranks with the same part of the model."""

    rank: int
    host: str
    tensor: str  # the first one that differs
    good: int  # a rank that is as most are
    alone: bool  # only these two ranks have the part, so the wrong one may be either


def differences(comm: Communicator, tensors: dict[str, Tensor]) -> list[Difference]:
    """Compare tensors of the same names over the data ranks; return one entry for each rank that differs.

    A collective; its result is the same on all ranks.
    """
    sums = torch.stack([bit_sum(tensor) for tensor in tensors.values()]).cpu()
    mine = (comm.model_rank, socket.gethostname(), hashlib.blake2b(sums.numpy().tobytes()).hexdigest())
    everyone = comm.allgather_object(mine, name="replicas/digest")
    bad = differing(everyone)
    if not any(bad):
        return []
    rows = comm.allgather_object(sums, name="replicas/sums")  # only now: they are long
    names = comm.allgather_object(list(tensors), name="replicas/names")
    found = []
    for rank, (part, host, _) in enumerate(everyone):
        if bad[rank]:
            same = [other for other, (its_part, _, _) in enumerate(everyone) if its_part == part]
            good = next(other for other in same if not bad[other])
            first = int((rows[rank] != rows[good]).nonzero()[0])
            found.append(Difference(rank, host, names[rank][first], good, alone=len(same) == 2))
    return found


def differing(everyone: list[tuple[int, str, str]]) -> list[bool]:
    """Return, for each rank, whether its digest differs from that of most ranks with the same part of the model.

    Of two equally frequent digests the one of the lowest rank counts.
    """
    digests = {part: Counter(d for p, _, d in everyone if p == part) for part, _, _ in everyone}
    return [digests[part].most_common(1)[0][0] != digest for part, _, digest in everyone]
