"""The picture: held-out accuracy, and steps to the target, against the batch, with the spread of the seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from largebatch.files import atomic_file
from largebatch.reproduce.contenders import CONTENDERS
from largebatch.reproduce.experiment import Experiment
from largebatch.reproduce.table import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#7a7a7a", "#2463a6", "#b07aa1", "#c8442f", "#e09f3e", "#3b8f5c")
MARKERS = "svD^oP"
APART = 1.045  # factor between the places of two optimizers at one batch, so that their bars stand side by side


def draw(path: Path, experiment: Experiment, found: Sequence[Cell]) -> None:
    with atomic_file(path) as file:
        figure(experiment, found).savefig(file, format="png")


def figure(experiment: Experiment, found: Sequence[Cell]) -> "Figure":
    from matplotlib.figure import Figure  # takes half a second to import

    drawn = Figure(figsize=(9.6, 4.4), dpi=100, layout="constrained")
    left, right = drawn.subplots(1, 2)
    for number, name in enumerate(experiment.optimizers):
        shift = APART ** (number - (len(experiment.optimizers) - 1) / 2)
        _draw_optimizer(left, right, [cell for cell in found if cell.optimizer == name], number, shift)
    _draw_ideal(right, experiment, found)
    steps = {cell.batch: cell.steps for cell in found}
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks([*experiment.batches], [f"{batch:,}\n{steps[batch]:,} steps" for batch in experiment.batches])
        axes.tick_params(axis="x", which="minor", bottom=False)
        axes.set_xlabel("images per step, and steps of the run")
        axes.grid(color="#e6e6e6", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    _error_scale(left)
    left.set_ylabel(f"held-out accuracy after {experiment.epochs} epochs (%)")
    left.legend(frameon=False, fontsize=9, loc="lower left")
    right.set_ylabel(f"steps to {experiment.target:g} %")
    if any(cell.steps_to_target for cell in found):
        _log_scale(right)
    drawn.suptitle(
        f"{experiment.model} on {experiment.name}: mean and standard deviation of {experiment.seeds} seeds, each "
        f"learning rate the best of {experiment.rates}",
        fontsize=10.5,
    )
    return drawn


def _draw_optimizer(left: Any, right: Any, mine: Sequence[Cell], number: int, shift: float) -> None:
    """Draw the lines of an optimizer, with its name as their gid."""
    style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
    style |= {"label": CONTENDERS[mine[0].optimizer].label, "linewidth": 1.4}
    means, spreads = [cell.mean for cell in mine], [cell.spread for cell in mine]
    line, _, (bars,) = left.errorbar([cell.batch * shift for cell in mine], means, yerr=spreads, capsize=2, **style)
    reached = [cell for cell in mine if cell.steps_to_target is not None]
    steps = [cell.steps_to_target for cell in reached]
    (other,) = right.plot([cell.batch * shift for cell in reached], steps, **style)
    for artist in (line, bars, other):
        artist.set_gid(mine[0].optimizer)


def _draw_ideal(axes: Any, experiment: Experiment, found: Sequence[Cell]) -> None:
    """Draw a line from the best at the smallest batch, on which twice the batch needs half the steps."""
    smallest, largest = min(experiment.batches), max(experiment.batches)
    reached = [cell.steps_to_target for cell in found if cell.batch == smallest and cell.steps_to_target]
    if not reached:
        return
    steps = [min(reached), min(reached) * smallest / largest]
    axes.plot([smallest, largest], steps, "--", color="#aaaaaa", linewidth=1, zorder=0)
    axes.legend(axes.lines[-1:], ["twice the batch, half the steps"], frameon=False, fontsize=9)


def _error_scale(axes: Any) -> None:
    """Space accuracies by the logarithm of the error: 94 and 97 % lie as far apart as 97 and 98.5 %."""
    import numpy as np

    least = 0.5  # of the error in percent that is told from none
    axes.set_yscale(
        "function",
        functions=(
            lambda accuracy: -np.log(np.maximum(100 + least - accuracy, least / 2)),
            lambda place: 100 + least - np.exp(-place),
        ),
    )
    ticks = [0, 20, 40, 60, 70, 80, 85, 90, 94, 96, 97, 98, 99, 100]
    low, high = axes.get_ylim()
    axes.set_ylim(low, high := min(high, 100 + least / 4))
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda steps, _: f"{steps:,.0f}"))
