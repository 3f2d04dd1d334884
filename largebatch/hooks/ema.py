"""Averages of the weights: an exponential moving one, with a half-life in images, and that of Schedule-Free AdamW.

After each applied step the moving average is

    average = average + (1 - 0.5 ^ (images of the step / half-life in images)) (weights - average)

The memory of the usual decay per step changes with the batch size: 300 epochs at a batch of 32K are 11,730 steps, after
which a decay of 0.9999 leaves 31 % of the initial random weights in the average. So the option is a duration, and a
half-life that is too long for the run is an error.
"""

import copy
import itertools
import math

import torch
from torch import Tensor, nn

from largebatch.engine import Hook, StepOutput, Trainer

REMAINDER = 0.01  # largest allowed share of the initial weights in the average at the end of a run


class Average(Hook):
    """Keeps an average, `model`, on every rank, and evaluates it whenever the weights are evaluated.

    It comes before the hooks that save the average and write its numbers. It needs no communication: equal weights give
    equal averages.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)

    def before_fit(self, trainer: Trainer) -> None:
        if trainer.state.step == 0:  # else a checkpoint has restored the average
            lerp_(self.model, trainer.model, 1.0)

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        own = trainer.evaluate(self.model)
        metrics.update(ema_top1=own["top1"], ema_loss=own["loss"])


class Ema(Average):
    def __init__(self, model: nn.Module, *, half_life_images: int) -> None:
        super().__init__(model)
        self.half_life_images = half_life_images

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        if output.applied:
            lerp_(self.model, trainer.model, share(output.images, half_life_images=self.half_life_images))


class ScheduleFree(Average):
    """The average x of Schedule-Free AdamW: training is at y = beta1 x + (1 - beta1) z, the optimizer keeps z."""

    @torch.no_grad()
    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        if not output.applied:
            return
        lerp_(self.model, trainer.model, 1.0)
        average = dict(zip(trainer.model.parameters(), self.model.parameters(), strict=True))
        for group in trainer.optimizer.param_groups:
            states = {average[p]: state for p in group["params"] if (state := trainer.optimizer.state.get(p))}
            if states:  # else all are frozen
                torch._foreach_lerp_([*states], [state["z"] for state in states.values()], 1 - 1 / group["betas"][0])


def share(images: int, *, half_life_images: int) -> float:
    """Return the weight of a step of `images` images in the average."""
    return -math.expm1(-math.log(2) * images / half_life_images)  # 1 - 0.5^..., exact also if it is small


@torch.no_grad()
def lerp_(average: nn.Module, model: nn.Module, weight: float) -> None:
    """Move parameters and floating-point buffers by `weight` of the way to the model's; copy other buffers."""
    pairs = list(zip(_tensors(average), _tensors(model), strict=True))
    floating = [pair for pair in pairs if pair[0].is_floating_point()]
    torch._foreach_lerp_([mine for mine, _ in floating], [theirs for _, theirs in floating], weight)
    for mine, theirs in pairs:
        if not mine.is_floating_point():
            mine.copy_(theirs)


def _tensors(model: nn.Module) -> list[Tensor]:
    """Return each parameter and buffer once; a state_dict lists a tensor with two names twice."""
    return list(itertools.chain(model.parameters(), model.buffers()))


def check_half_life(half_life_images: int, *, run_images: int, epoch_images: int) -> None:
    """Raise ValueError if the initial weights would be more than `REMAINDER` of the final average."""
    remainder = 0.5 ** (run_images / half_life_images)
    if remainder > REMAINDER:
        longest = math.floor(run_images / math.log2(1 / REMAINDER))
        raise ValueError(
            f"--optim.ema_half_life is {half_life_images / epoch_images:.4g} epochs: at the end of the run, after "
            f"{run_images / epoch_images:.4g} epochs, the initial weights would still be {100 * remainder:.3g} % of "
            f"the average, expected at most {100 * REMAINDER:g} %; the longest that fits is {longest} images "
            f"({longest / epoch_images:.4g} epochs)."
        )
