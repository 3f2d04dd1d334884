"""The search for a learning rate: the range test of arXiv:1506.01186 (section 3.3), at the run's global batch.

The rate grows from LOWEST to HIGHEST by a constant factor; the loss falls, and rises when the rate is too high. All
ranks see the same loss, so they stop at the same step.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from largebatch import hooks
from largebatch.assembly import Images, build_trainer, images_of, peak_lr
from largebatch.config import NEVER, ScheduleConfig, TrainConfig
from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.files.table import write_table
from largebatch.ranks import Ranks, StoppedEarly
from largebatch.ranks.signals import Signals
from largebatch.report.draw import write_picture
from largebatch.report.panels import COLOURS, Line, Panel

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOWEST, HIGHEST, STEPS = 1e-5, 10.0, 200
DECAY = 0.9  # of the moving average by which the search ends
WIDTH = 0.25  # decades of the rate over which the suggestion smooths the loss
LEAST_FALL = 0.02  # of the smoothed loss, without which nothing is suggested
TABLE, PICTURE = "find_lr.csv", "find_lr.png"


def rate(step: float) -> float:
    return LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1))


def smoothed(losses: Sequence[float], decay: float = DECAY) -> list[float]:
    """Return the moving average of the losses, without its bias to 0."""
    found, average = [], 0.0
    for number, loss in enumerate(losses, 1):
        average = decay * average + (1 - decay) * loss
        found.append(average / (1 - decay**number))
    return found


def has_diverged(losses: Sequence[float]) -> bool:
    """Return whether the loss is not finite, or the smoothed loss is above its first and twice its lowest value."""
    if not math.isfinite(losses[-1]):
        return True
    curve = smoothed(losses)
    return curve[-1] > max(curve[0], 2 * min(curve))


def fit_lines(rates: Sequence[float], losses: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Fit a line to the losses around each rate; return its height and its slope per decade, both (len(rates),).

    Unlike a moving average, these weights have no delay.
    """
    x, y = np.log10(np.asarray(rates)), np.minimum(losses, 2 * losses[0])  # the last losses may be huge
    weights = np.exp(-0.5 * ((x[:, None] - x) / WIDTH) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    height, offsets = weights @ y, x - (weights @ x)[:, None]
    return height, (weights * offsets * (y - height[:, None])).sum(axis=1) / (weights * offsets**2).sum(axis=1)


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the geometric mean of the rates of the steepest fall, low for a run, and of the lowest loss, high for one.

    None: the loss hardly falls.
    """
    if len(rates) < 2:
        return None
    height, slope = fit_lines(rates, losses)
    lowest = int(height.argmin())
    if height[lowest] > (1 - LEAST_FALL) * height[0]:
        return None
    return math.sqrt(rates[int(slope[: lowest + 1].argmin())] * rates[lowest])


class Losses(Hook):
    """Keeps the loss of each step, and ends the run if it diverges."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.diverged = False

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        total = trainer.comm.allreduce(output.loss_sum.double().cpu(), name="search/loss")
        self.losses.append(float(total) / trainer.comm.size)
        self.diverged = self.has_diverged()
        if self.diverged:
            trainer.stop_reason = "the loss diverged"

    def has_diverged(self) -> bool:
        return not math.isfinite(self.losses[-1])


class Search(Losses):
    def has_diverged(self) -> bool:
        return has_diverged(self.losses)

    def points(self) -> tuple[list[float], list[float]]:
        """Return the rate of each update, and the finite loss after it, which the next step computes."""
        pairs = [(rate(step), loss) for step, loss in enumerate(self.losses[1:]) if math.isfinite(loss)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def train(trainer: Trainer, losses: Losses) -> None:
    """Train to the end of the plan, without the run's other hooks; StoppedEarly on all ranks if a signal came."""
    told = hooks.Log([hooks.Progress()], every_images=trainer.plan.batch_size(trainer.state.step))
    trainer.hooks = [*(hook for hook in trainer.hooks if isinstance(hook, hooks.StopEarly)), losses, told]
    trainer.stop_reason = ""
    reason = trainer.fit()
    if reason and not losses.diverged:
        raise StoppedEarly(f"the search stopped, because {reason}; the same command begins it anew (exit code 75).")


def find_lr(
    config: TrainConfig, comm: Ranks, signals: Signals | None, *, device: "torch.device", images: Images
) -> None:
    """Search, and write the suggestion, the table and the picture; StoppedEarly on all ranks if a signal came."""
    searched, images = ramped(config, len(images.train)), Images(images.train, None)
    trainer = build_trainer(searched, comm, signals, device=device, images=images)
    search = Search()
    trainer.learning_rate = lambda plan, step: rate(step)
    train(trainer, search)
    with comm.together("writing the search"):
        if comm.rank == 0:
            tell(config, *search.points())


def ramped(config: TrainConfig, num_samples: int) -> TrainConfig:
    """Return the config of the search: STEPS steps without evaluations, averages or checks."""
    half_life = config.optim.second_moment_half_life
    if half_life:  # of the run's images, not of the search's
        run_images = images_of(config, "run.duration", num_samples)
        half_life = f"{images_of(config, 'optim.second_moment_half_life', num_samples, run_images)} images"
    config = unwatched(config)
    preset = "decoupled" if config.optim.preset == "corrected" else config.optim.preset  # the same at a run's peak
    return replace(
        config,
        optim=replace(config.optim, lr=1.0, preset=preset, ema_half_life="", second_moment_half_life=half_life),
        schedule=ScheduleConfig(name="constant"),
        run=replace(config.run, duration=f"{STEPS} steps"),
        checkpoint=replace(config.checkpoint, best="none"),
    )


def unwatched(config: TrainConfig) -> TrainConfig:
    """Return the config without evaluations and checks."""
    return replace(config, run=replace(config.run, eval_every=NEVER, check_replicas="", recompute=""))


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[float]]) -> None:
    write_table(path, columns, (dict(zip(columns, (f"{number:.9g}" for number in row))) for row in rows))


def tell(config: TrainConfig, rates: Sequence[float], losses: Sequence[float]) -> None:
    folder, found = Path(config.folder), suggest(rates, losses)
    curve = fit_lines(rates, losses)[0] if len(rates) > 1 else losses
    write_rows(folder / TABLE, ["lr", "loss", "smoothed"], zip(rates, losses, curve))
    draw(folder / PICTURE, rates, losses, curve, found, title=f"{config.model.name}, {batch_and_optimizer(config)}")
    place = f"{folder / TABLE} and {PICTURE} have the curve"
    if found is None:
        logger.info("no learning rate can be suggested: the loss never fell; %s.", place)
        return
    # With schedule.scaling, optim.lr is the rate of another batch.
    option = found * config.optim.lr / peak_lr(config)
    logger.info("%s: the suggestion is --optim.lr %.2g; %s.", batch_and_optimizer(config), option, place)


def batch_and_optimizer(config: TrainConfig) -> str:
    return f"{config.optim.name} at a global batch of {config.data.global_batch_size}"


def draw(
    path: Path, rates: Sequence[float], losses: Sequence[float], curve: Any, found: float | None, *, title: str
) -> None:
    highest = 1.5 * losses[0] if losses else 0.0  # the last losses may be huge
    lines = [
        Line(label, COLOURS[0], [(x, y) for x, y in zip(rates, ys) if y <= highest], thin=bool(thin))
        for label, ys, thin in (("single steps", losses, 1), ("smoothed", curve, 0))
        if losses
    ]
    marks = [] if found is None else [(found, COLOURS[1])]
    suggestion = "" if found is None else f"; suggestion (dotted): {found:.2g}"
    title = f"loss after the step, {title}{suggestion}"
    write_picture(path, Panel("find_lr", title, lines, marks=marks, across="learning rate"))
