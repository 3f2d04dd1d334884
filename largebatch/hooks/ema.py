"""An exponential average of the weights, with a memory that is counted in images.

After each applied step

    average = average + (1 - 0.5 ^ (images of the step / half-life in images)) (weights - average)

A decay per step, as is usual, means another memory at another batch: 300 epochs at 32K are 11,730 steps, in which the
customary 0.9999 leaves 31 % of the random weights of the beginning in the average. So what is given is a duration,
and one that is too long for its run is refused.
"""

import copy
import itertools
import math

import torch
from torch import Tensor, nn

from largebatch.engine import Hook, StepOutput, Trainer

REMAINDER = 0.01  # largest share of the initial weights in the average at the end of a run


class Ema(Hook):
    """Keeps the average, `model`, on every rank, and evaluates it whenever the weights themselves are.

    It comes before the hooks that save it and write its numbers down, ema_top1 and ema_loss. A step costs one pass over
    weights and average and no communication: equal weights make equal averages.
    """

    def __init__(self, model: nn.Module, *, half_life_images: int) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.half_life_images = half_life_images

    def before_fit(self, trainer: Trainer) -> None:
        """The average begins with the weights; one that was resumed is there already."""
        if trainer.state.step == 0:
            lerp_(self.model, trainer.model, 1.0)

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """A step that moved nothing is none."""
        if output.applied:
            lerp_(self.model, trainer.model, share(output.images, half_life_images=self.half_life_images))

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Adds its own numbers for the hooks that follow."""
        own = trainer.evaluate(self.model)
        metrics.update(ema_top1=own["top1"], ema_loss=own["loss"])


def share(images: int, *, half_life_images: int) -> float:
    """The part of the new weights in the average after a step of so many images."""
    return -math.expm1(-math.log(2) * images / half_life_images)  # 1 - 0.5^..., exact where it is small


@torch.no_grad()
def lerp_(average: nn.Module, model: nn.Module, weight: float) -> None:
    """Move parameters and floating-point buffers by this part of the way to the model's; copy other buffers."""
    pairs = list(zip(_tensors(average), _tensors(model), strict=True))
    floating = [pair for pair in pairs if pair[0].is_floating_point()]
    torch._foreach_lerp_([mine for mine, _ in floating], [theirs for _, theirs in floating], weight)
    for mine, theirs in pairs:
        if not mine.is_floating_point():
            mine.copy_(theirs)


def _tensors(model: nn.Module) -> list[Tensor]:
    """Each once, also where two names share one, as in a state_dict they would not be."""
    return list(itertools.chain(model.parameters(), model.buffers()))


def check_half_life(half_life_images: int, *, run_images: int, epoch_images: int) -> None:
    """ValueError if at the end of the run more than `REMAINDER` of the average would still be the initial weights."""
    remainder = 0.5 ** (run_images / half_life_images)
    if remainder > REMAINDER:
        longest = math.floor(run_images / math.log2(1 / REMAINDER))
        raise ValueError(
            f"--optim.ema_half_life is {half_life_images / epoch_images:.4g} epochs: at the end of the run, after "
            f"{run_images / epoch_images:.4g} epochs, the initial weights would still be {100 * remainder:.3g} % of "
            f"the average, expected at most {100 * REMAINDER:g} %; the longest that fits is {longest} images "
            f"({longest / epoch_images:.4g} epochs)."
        )
