"""The gradient noise scale: the batch beyond which more images per step hardly save steps (arXiv:1812.06162).

G is the gradient of the loss over all images, and Sigma the covariance of the gradient of one image. The mean gradient
of b images, G_b, has E |G_b|^2 = |G|^2 + tr(Sigma) / b. So a micro-batch of b images and the global batch of B give
estimates without bias (appendix A.1 there):

    |G|^2     = (B |G_B|^2 - b |G_b|^2) / (B - b)
    tr(Sigma) = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)

and the noise scale tr(Sigma) / |G|^2. At that batch a run needs about twice the fewest possible steps, and twice the
fewest possible images. A quotient of noisy estimates has a bias, so each is averaged over rows first.

|G_b|^2 is the mean over the ranks' first micro-batches. Only steps that write a row are measured, which costs one read
of the gradient, and no message of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from largebatch.augment import Augmented
from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.files.run_folder import Row
from largebatch.optim import gradient_norm
from largebatch.report.tables import NOISE

HORIZON = 30  # rows; the mean of the first rows, then a moving average that gives a new row this part of the weight


def estimates(small_square: float, large_square: float, *, small: int, large: int) -> tuple[float, float]:
    """Return |G|^2 and tr(Sigma) by the squared norms for `small` and `large` images; they may be negative."""
    signal = (large * large_square - small * small_square) / (large - small)
    noise = (small_square - large_square) / (1 / small - 1 / large)
    return signal, noise


@dataclass
class Averages:
    """Moving averages of both estimates over rows, and the number of rows; saved as TrainState.noise."""

    signal: float = 0.0
    noise: float = 0.0
    count: int = 0

    @property
    def scale(self) -> float:
        """The noise scale; nan while |G|^2 cannot be told from noise."""
        return self.noise / self.signal if self.signal > 0 <= self.noise else math.nan

    def add(self, signal: float, noise: float) -> Row:
        self.count += 1
        weight = 1 / min(self.count, HORIZON)
        self.signal += weight * (signal - self.signal)
        self.noise += weight * (noise - self.noise)
        return dict(zip(NOISE, (self.signal, self.noise, self.scale)))


class NoiseScale(Hook):
    """Measures the first micro-batch in each step that `Log` writes a row about; needs whole models.

    `Log` sums `measured` over the ranks, and gives the sum to `row`.
    """

    def __init__(self, *, every_images: int, after_row: Callable[[Trainer, Averages], None] | None = None) -> None:
        """every_images: those of Log. after_row: all ranks call it with the averages after a measured row."""
        self.every_images, self.after_row = every_images, after_row
        self.scale: Tensor | None = None  # loss scale of the step that is measured; None: the step is not
        self.square: Tensor | None = None  # 0-d, of the gradient after the first pass
        self.waits = False  # the first pass runs

    def at_first_batch(self, trainer: Trainer, batch: Augmented) -> None:
        """Arrange to measure the first pass, unless the step is short or a single micro-batch."""
        plan, step = trainer.plan, trainer.state.step
        full = plan.window_images(step) == plan.batch_size(step) > plan.micro_batch_size
        if not full or not trainer.due(self.every_images, ahead=True):
            return
        self.scale = trainer.scaler.scale(torch.ones((), device=trainer.device))
        # A single pass begins to reduce its gradients in place before it ends.
        if plan.passes_in_step(step, trainer.comm.data_size) == 1:
            trainer.optimizer.sending.measure_norm()
        else:
            self.waits = True

    def at_point(self, trainer: Trainer) -> None:
        if self.waits:
            self.square, self.waits = gradient_norm(trainer.optimizer).double().square(), False

    def measured(self, trainer: Trainer) -> Tensor:
        """Return |G_b|^2 of this rank in the step just done and 1, or zeros if it has none; (2,), float64."""
        square = trainer.optimizer.sending.square if self.square is None else self.square
        found, scale = torch.zeros(2, dtype=torch.float64), self.scale
        if square is not None and scale is not None:
            # The loss of a micro-batch was a sum, times this weight and the loss scale.
            plan = trainer.plan
            weight = trainer.comm.data_size * plan.micro_batch_size / plan.batch_size(trainer.state.step - 1)
            found = torch.stack([square / (weight * scale.double()).square(), torch.ones_like(square)]).cpu()
        self.square = self.scale = None
        return found

    def row(self, trainer: Trainer, output: StepOutput, total: Tensor) -> Row:
        """Return the columns NOISE; nan if the step was short or skipped. total: the ranks' sum of `measured`."""
        square, count = total.tolist()
        if not count or not output.applied:
            return dict.fromkeys(NOISE, math.nan)
        small, large = trainer.plan.micro_batch_size, output.images
        averages = Averages(*trainer.state.noise or ())
        row = averages.add(*estimates(square / count, float(output.grad_norm) ** 2, small=small, large=large))
        trainer.state.noise = averages.signal, averages.noise, averages.count
        if self.after_row:
            self.after_row(trainer, averages)
        return row
