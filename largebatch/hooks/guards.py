"""Warns of skipped steps, says where each began, and gives the run up after too many in a row."""

import logging
import math

import torch

from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.hooks.origin import Where, find_origin
from largebatch.ranks import Stopped

logger = logging.getLogger(__name__)


class Guards(Hook):
    def __init__(self, *, max_skipped_steps: int = 25, where: Where = str) -> None:
        self.max_skipped_steps = max_skipped_steps
        self.where = where

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """Tell the skipped steps 1, 2, 4, 8, ... of a row; raise comm.Stopped on every rank after too many."""
        count, step = trainer.state.in_a_row, trainer.state.step
        stops = count >= self.max_skipped_steps
        if output.applied or not stops and count.bit_count() > 1:
            return
        cause, advice = self.explain(trainer, output)
        row = f", the {count} steps from {step - count + 1} on" if count > 1 else ""
        if trainer.comm.rank == 0:
            norm = float(output.grad_norm)
            logger.warning("step %d skipped%s: the norm of its gradient is %s; %s", step, row, norm, cause)
        if stops:
            raise Stopped(
                f"Training stopped at step {step}: {count} steps in a row had a gradient that is not finite, "
                f"and {cause}; {advice}."
            )

    def explain(self, trainer: Trainer, output: StepOutput) -> tuple[str, str]:
        """Return why the gradient is not finite, in the model or in the cast to fp16, and the advice. A collective."""
        if math.isfinite(float(output.grad_norm)):  # that of the second gradient is not
            return "that at the weights which Look-LayerSAM has moved is not finite", "lower --optim.sam_rho"
        advice = "lower --optim.lr, or use --run.precision bf16 or fp32"
        peak = trainer.optimizer.sending.peak
        mine = bool(torch.isfinite(output.loss_sum)), None if peak is None else float(peak)
        finite, peaks = zip(*trainer.comm.allgather_object(mine, name="guards/finite"))
        if all(finite) and all(peak is not None and math.isfinite(peak) for peak in peaks):
            return self.explain_sum(trainer, max(peaks), advice)
        lost = [str(rank) for rank, is_finite in enumerate(finite) if not is_finite]
        sent = [str(rank) for rank, peak in enumerate(peaks) if peak is not None and not math.isfinite(peak)]
        cause = f"the loss is not finite on rank {', '.join(lost)}" if lost else "the loss is finite on every rank"
        if sent and not lost:
            cause += f", the gradient is not on rank {', '.join(sent)}"
        if self.worth_a_step(trainer):
            found = False
            if trainer.comm.model_size == 1:  # else a micro-batch is computed by several ranks together
                origin, found = find_origin(trainer, trainer.state.step - 1, self.where)
                cause = f"{cause}; {origin}"
            if not found:  # the next time, name the rank
                trainer.optimizer.sending.measures = True
        return cause, advice

    def explain_sum(self, trainer: Trainer, peak: float, advice: str) -> tuple[str, str]:
        """Explain a sum that is not finite, although each rank's gradient is, at most `peak`."""
        if trainer.optimizer.sending.dtype != torch.float16:
            return f"the gradient of each rank was finite, at most {peak:.3g}, but their sum is not", advice
        scale = f"loss scale now {trainer.scaler.get_scale():g}" if trainer.scaler.is_enabled() else "no loss scale"
        return (
            f"the gradient of each rank was finite, at most {peak:.3g}, but overflowed in fp16 on the wire "
            f"({scale}), which --run.compression none avoids",
            "set that option",
        )

    def worth_a_step(self, trainer: Trainer) -> bool:
        """Return whether to compute the step again: the first of each row and the last.

        With a loss scale only the last: the scale grows until gradients overflow, so single skipped steps are normal.
        """
        count = trainer.state.in_a_row
        return count == 1 and not trainer.scaler.is_enabled() or count >= self.max_skipped_steps
