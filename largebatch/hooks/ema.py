"""An exponential moving average of the weights, with a half-life in images.

After each applied step

    average = average + (1 - 0.5 ^ (images of the step / half-life in images)) (weights - average)

The usual option is a decay per step, but its memory changes with the batch size: 300 epochs at a batch of 32K are
11,730 steps, and after these the common decay of 0.9999 leaves 31 % of the initial random weights in the average.
Therefore the option is a duration, and a half-life that is too long for the run is an error.
"""

import copy
import itertools
import math

import torch
from torch import Tensor, nn

from largebatch.engine import Hook, StepOutput, Trainer

REMAINDER = 0.01  # largest allowed share of the initial weights in the average at the end of a run


class Ema(Hook):
    """Keeps the average, `model`, on every rank, and evaluates it whenever the weights are evaluated.

    It must come before the hooks that save the average and write down its numbers, ema_top1 and ema_loss. A step costs
    one pass over the weights and the average. It needs no communication: equal weights give equal averages.
    """

    def __init__(self, model: nn.Module, *, half_life_images: int) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.half_life_images = half_life_images

    def before_fit(self, trainer: Trainer) -> None:
        """Start from the current weights, unless a checkpoint restored an average."""
        if trainer.state.step == 0:
            lerp_(self.model, trainer.model, 1.0)

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """Move the average towards the weights. Skipped steps do not count."""
        if output.applied:
            lerp_(self.model, trainer.model, share(output.images, half_life_images=self.half_life_images))

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Evaluate the average, and add its numbers for the hooks that follow."""
        own = trainer.evaluate(self.model)
        metrics.update(ema_top1=own["top1"], ema_loss=own["loss"])


def share(images: int, *, half_life_images: int) -> float:
    """Return the share of the new weights in the average after a step of `images` images."""
    return -math.expm1(-math.log(2) * images / half_life_images)  # 1 - 0.5^..., exact also if it is small


@torch.no_grad()
def lerp_(average: nn.Module, model: nn.Module, weight: float) -> None:
    """Move parameters and floating-point buffers by `weight` of the way to those of the model; copy other buffers."""
    pairs = list(zip(_tensors(average), _tensors(model), strict=True))
    floating = [pair for pair in pairs if pair[0].is_floating_point()]
    torch._foreach_lerp_([mine for mine, _ in floating], [theirs for _, theirs in floating], weight)
    for mine, theirs in pairs:
        if not mine.is_floating_point():
            mine.copy_(theirs)


def _tensors(model: nn.Module) -> list[Tensor]:
    """Return each parameter and buffer once. A state_dict would list a tensor that has two names twice."""
    return list(itertools.chain(model.parameters(), model.buffers()))


def check_half_life(half_life_images: int, *, run_images: int, epoch_images: int) -> None:
    """Raise ValueError if the initial weights would be more than `REMAINDER` of the average at the end of the run."""
    remainder = 0.5 ** (run_images / half_life_images)
    if remainder > REMAINDER:
        longest = math.floor(run_images / math.log2(1 / REMAINDER))
        raise ValueError(
            f"--optim.ema_half_life is {half_life_images / epoch_images:.4g} epochs: at the end of the run, after "
            f"{run_images / epoch_images:.4g} epochs, the initial weights would still be {100 * remainder:.3g} % of "
            f"the average, expected at most {100 * REMAINDER:g} %; the longest that fits is {longest} images "
            f"({longest / epoch_images:.4g} epochs)."
        )
