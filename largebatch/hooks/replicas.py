"""Checks that the data ranks still hold the same weights: a flipped bit on one of them is seen before it is saved.

Every rank starts from rank 0's weights and applies the same reduced gradient with the same arithmetic, so the copies
are equal to the last bit. A fault of a memory or a processor makes one differ, and nothing else would show it: the
gradients of that rank stay plausible, and the reduction spreads them. So now and then, and before each checkpoint, the
ranks compare a sum of the bits of each tensor. On hosts with different processors the copies may differ by rounding:
set --run.check_replicas "".
"""

from largebatch.engine import Hook, Trainer
from largebatch.ranks.replicas import check_replicas, named_tensors


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
        check_replicas(trainer.comm, tensors, place=f"step {trainer.state.step}", remedy=REMEDY)


REMEDY = (
    "A memory or a processor of such a host computes wrongly, or its processor is of another kind. Leave the host out "
    "and give the same command again: the run goes on from its newest checkpoint. On different processors set "
    "--run.check_replicas \"\"."
)
