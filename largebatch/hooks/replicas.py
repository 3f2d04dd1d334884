"""Checks that the data ranks still hold the same weights: a flipped bit on one of them is seen before it is saved.

After a fault of a memory or a processor one copy differs, and nothing else shows it. So now and then, and before each
checkpoint, the ranks compare a sum of the bits of each tensor. On different processors the copies may differ by
rounding: set --run.check_replicas "".
"""

from largebatch.engine import Hook, Trainer
from largebatch.ranks.replicas import check_replicas, named_tensors


class ReplicaCheck(Hook):
    """Compares every `interval_images`, and before each save; all ranks raise Stopped if one differs."""

    def __init__(self, *, interval_images: int, with_optimizer: bool) -> None:
        """with_optimizer: False where each data rank holds another part of the optimizer's state (ZeRO)."""
        self.interval_images = interval_images
        self.with_optimizer = with_optimizer
        self.checked_step = -1

    def after_step(self, trainer: Trainer) -> None:
        if trainer.due(self.interval_images):
            self.check(trainer)

    def check(self, trainer: Trainer) -> None:
        if trainer.comm.data_size == 1 or trainer.state.step == self.checked_step:
            return
        self.checked_step = trainer.state.step
        tensors = named_tensors(trainer.model, trainer.optimizer if self.with_optimizer else None, trainer.average)
        check_replicas(trainer.comm, tensors, place=f"step {trainer.state.step}", remedy=REMEDY)


REMEDY = (
    "A memory or a processor of such a host computes wrongly, or its processor is of another kind. Leave the host out "
    "and give the same command again: the run goes on from its newest checkpoint. On different processors set "
    "--run.check_replicas \"\"."
)
