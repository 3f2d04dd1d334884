"""Finds a rank that computes wrongly: now and then all data ranks compute the gradient of one and the same micro-batch.

The reduction spreads a wrong gradient to all ranks, so their weights stay equal, and `replicas` sees nothing. But ranks
with the same weights compute the same gradient of the same images, to the last bit. On different processors it may
differ by rounding: leave --run.recompute out.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from largebatch.augment import Augmented, seed_draws, seed_for
from largebatch.engine import Hook, Trainer
from largebatch.precision import autocast
from largebatch.ranks import Ranks, Stopped
from largebatch.ranks.replicas import Difference, differences


class RecomputeCheck(Hook):
    """Needs whole models. A check takes one forward and backward pass; all ranks raise Stopped if one differs."""

    def __init__(self, *, interval_images: int) -> None:
        self.interval_images = interval_images
        self.due = True  # at the first step, too

    def at_first_batch(self, trainer: Trainer, batch: Augmented) -> None:
        """Check, if it is time and each rank has a whole micro-batch in this step."""
        plan, ranks = trainer.plan, trainer.comm.data_size
        full = plan.window_images(trainer.state.step) >= ranks * plan.micro_batch_size
        if self.due and full and ranks > 1:
            check_gradient(trainer, batch)
            self.due = False

    def after_step(self, trainer: Trainer) -> None:
        self.due |= trainer.due(self.interval_images)


def check_gradient(trainer: Trainer, batch: Augmented) -> None:
    """Compare the gradient of rank 0's `batch` over all ranks; a collective.

    If it differs, all ranks compute again. A rank whose two results differ is named alone, the only clue if there are
    two ranks.
    """
    comm, place = trainer.comm, f"before step {trainer.state.step + 1}"
    batch = of_rank_0(comm, batch)
    first = gradients(trainer, batch)
    found = differences(comm, first)
    if not found:
        return
    second = gradients(trainer, batch)
    changed = [name for name, gradient in first.items() if not torch.equal(gradient, second[name])]
    clauses = describe(found, comm.allgather_object(changed, name="recompute/changed"))
    raise Stopped("; ".join(clauses) + f": found {place}. {REMEDY}")


REMEDY = (
    "A processor or a memory of such a host computes wrongly, or its processor is of another kind. Leave the host out "
    "and give the same command again: the run goes on from its newest checkpoint, or from an older one if the fault is "
    "older. On different processors leave --run.recompute out."
)


def of_rank_0(comm: Ranks, batch: Augmented) -> Augmented:
    """Return a copy of rank 0's micro-batch; `batch` gives the shapes. A collective."""
    box = comm.broadcast_object(batch.mix_box, name="recompute/box")
    tensors = {name: value.contiguous().clone() for name, value in batch._asdict().items() if isinstance(value, Tensor)}
    comm.broadcast_tensors(tensors, name="recompute/batch")
    return batch._replace(mix_box=box, **tensors)


def gradients(trainer: Trainer, batch: Augmented) -> dict[str, Tensor]:
    """Return the gradients of a micro-batch by name, with rank 0's draws for the step; nothing else changes."""
    names, parameters = zip(*((n, p) for n, p in trainer.model.named_parameters() if p.requires_grad))
    number = trainer.plan.micro_batches(trainer.state.step, 0, trainer.comm.data_size)[0].number
    with undone(trainer):
        seed_draws(seed_for(trainer.seed, trainer.state.step, number, purpose="model"), trainer.device)
        with autocast(trainer.device, trainer.precision):
            loss = trainer.objective(trainer.model, batch)
        # Not `backward`, which would add to the gradients and start Horovod's reduction.
        found = torch.autograd.grad(trainer.scaler.scale(loss), parameters, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, found) if gradient is not None}


@contextmanager
def undone(trainer: Trainer) -> Iterator[None]:
    """Restore the model's buffers and the random state at the end of the block."""
    device, buffers = trainer.device, [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        trainer.replica.statistics.drop_step()


def describe(found: list[Difference], changed: list[list[str]]) -> list[str]:
    """Return a clause for each rank that computes wrongly. changed: by rank, the gradients that did not repeat."""
    unsteady = [rank for rank, names in enumerate(changed) if names]
    if unsteady:
        hosts = {one.rank: f" ({one.host})" for one in found}
        return [
            f"rank {rank}{hosts.get(rank, '')} computes another gradient of {changed[rank][0]} each time"
            for rank in unsteady
        ]
    return [
        f"rank {one.rank} ({one.host}) and rank {one.good} compute other gradients of {one.tensor} from the same "
        "images, and there are only two ranks, so that either may be wrong" if one.alone else
        f"rank {one.rank} ({one.host}) computes another gradient of {one.tensor} than most ranks from the same images"
        for one in found
    ]  # fmt: skip
