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
STEP = 1.045  # factor between the places of two optimizers at one batch, so that their bars stand side by side


def draw(path: Path, experiment: Experiment, found: Sequence[Cell]) -> None:
    """Write the picture as PNG."""
    with atomic_file(path) as file:
        figure(experiment, found).savefig(file, format="png")


def figure(experiment: Experiment, found: Sequence[Cell]) -> "Figure":
    """Draw the figures of the table."""
    from matplotlib.figure import Figure  # takes half a second to import

    drawn = Figure(figsize=(9.6, 4.2), dpi=100, layout="constrained")
    left, right = drawn.subplots(1, 2)
    for number, name in enumerate(experiment.optimizers):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        style |= {"label": CONTENDERS[name].label, "linewidth": 1.4}
        shift = STEP ** (number - (len(experiment.optimizers) - 1) / 2)
        mine = [cell for cell in found if cell.optimizer == name]
        places = [cell.batch * shift for cell in mine]
        means, spreads = [cell.mean for cell in mine], [cell.spread for cell in mine]
        line, _, (bars,) = left.errorbar(places, means, yerr=spreads, capsize=2, **style)
        reached = [cell for cell in mine if cell.steps_to_target is not None]
        (other,) = right.plot(
            [cell.batch * shift for cell in reached], [cell.steps_to_target for cell in reached], **style
        )
        for artist in (line, bars, other):
            artist.set_gid(name)
    _ideal(right, experiment, found)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks([*experiment.batches], [f"{batch:,}" for batch in experiment.batches])
        axes.minorticks_off()
        axes.set_xlabel("batch (images per step)")
        axes.grid(color="#e6e6e6", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel(f"held-out accuracy after {experiment.epochs} epochs (%)")
    left.legend(frameon=False)
    if any(cell.steps_to_target for cell in found):
        right.set_yscale("log")
    right.set_ylabel(f"steps to {experiment.target:g} %")
    drawn.suptitle(
        f"{experiment.model} on {experiment.name}, {experiment.seeds} seeds, "
        f"each learning rate from {experiment.rates} trials",
        fontsize=11,
    )
    return drawn


def _ideal(axes: Any, experiment: Experiment, found: Sequence[Cell]) -> None:
    """Draw the line on which twice the batch needs half the steps, from the best optimizer at the smallest batch."""
    smallest = min(experiment.batches)
    steps = [cell.steps_to_target for cell in found if cell.batch == smallest and cell.steps_to_target]
    if not steps:
        return
    batches = [min(experiment.batches), max(experiment.batches)]
    axes.plot(
        batches, [min(steps) * smallest / batch for batch in batches], "--", color="#aaaaaa", linewidth=1, zorder=0
    )
    axes.annotate(
        "twice the batch, half the steps", (batches[1], min(steps) * smallest / batches[1]), ha="right", va="bottom",
        fontsize=8, color="#888888", xytext=(0, 6), textcoords="offset points",
    )  # fmt: skip
