"""Warns of skipped steps, and gives the run up after too many in a row."""

import logging
import math

import torch

from largebatch.comm import Stopped
from largebatch.engine import Hook, StepOutput, Trainer

logger = logging.getLogger(__name__)


class Guards(Hook):
    """Warns of each skipped step and ends the run after `max_skipped_steps` in a row."""

    def __init__(self, *, max_skipped_steps: int) -> None:
        self.max_skipped_steps = max_skipped_steps
        self.in_a_row = 0

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """Raises comm.Stopped on every rank: `applied` is the same on all ranks, so all count alike."""
        self.in_a_row = 0 if output.applied else self.in_a_row + 1
        if output.applied:
            return
        cause, advice = self.explain(trainer, output)
        norm, step = float(output.grad_norm), trainer.state.step
        if trainer.comm.rank == 0:
            logger.warning("step %d skipped: the norm of its gradient is %s; %s", step, norm, cause)
        if self.in_a_row >= self.max_skipped_steps:
            raise Stopped(
                f"Training stopped at step {step}: {self.in_a_row} steps in a row had a gradient that is not finite "
                f"(--run.max_skipped_steps), and {cause}; {advice}."
            )

    def explain(self, trainer: Trainer, output: StepOutput) -> tuple[str, str]:
        """Returns why the gradient is not finite and the option to change. A collective.

        Either the model itself gave a gradient that is not finite, or the cast to fp16 for the allreduce did.
        """
        advice = "lower --optim.lr, or use --run.precision bf16 or fp32"
        mine = bool(torch.isfinite(output.loss_sum)), trainer.comm.peak_sent(trainer.optimizer)
        finite, peaks = zip(*trainer.comm.allgather_object(mine, name="guards/finite"))
        ranks = ", ".join(str(rank) for rank, is_finite in enumerate(finite) if not is_finite)
        if ranks:
            return f"the loss is not finite on rank {ranks}", advice
        if not all(peak is not None and math.isfinite(peak) for peak in peaks):
            return "the loss is finite on every rank", advice
        scale = f"loss scale now {trainer.scaler.get_scale():g}" if trainer.scaler.is_enabled() else "no loss scale"
        return (
            f"the gradient of each rank was finite, at most {max(peaks):.3g}, but overflowed in fp16 on the wire "
            f"({scale}), which --run.compression none avoids",
            "set that option",
        )
