"""The picture of the experiment at 32,768: results, searches, the noise scale, and the course of the runs."""

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from largebatch.files import atomic_file
from largebatch.reproduce.fashion import CARRIED, OPTIMIZERS
from largebatch.reproduce.hypotheses import Found, half_width, label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"adamw": "#2463a6", "lamb": "#c8442f", "muon": "#3b8f5c"}
APART = 1.06  # factor between the places of two optimizers at one batch, so that their bars stand side by side
# ImageNet at 32,768: McCandlish et al. (arXiv:1812.06162) give tens of thousands of images as its useful batch.
IMAGENET = 32_768 / 100_000, 32_768 / 10_000


def draw(path: Path, found: Found) -> None:
    with atomic_file(path) as file:
        figure(found).savefig(file, format="png")


def figure(found: Found) -> "Figure":
    from matplotlib.figure import Figure  # takes half a second to import

    drawn = Figure(figsize=(10.5, 8), dpi=100, layout="constrained")
    (results, rates), (scale, course) = drawn.subplots(2, 2)
    _draw_results(results, found)
    _draw_rates(rates, found)
    _draw_scale(scale, found)
    _draw_course(course, found)
    for axes in (results, rates, scale, course):
        axes.grid(color="#e6e6e6", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    drawn.suptitle(f"Fashion-MNIST, {found.length} epochs: mean and 95 % t-interval of the seeds", fontsize=10.5)
    return drawn


def _draw_results(axes: Any, found: Found) -> None:
    """Draw a line through the carried rates, and a marker for each rate that was found at its batch."""
    small = found.study.smallest
    for number, name in enumerate(OPTIMIZERS):
        shift, style = APART ** (number - 1), {"color": COLOURS[name], "capsize": 2}
        tuned = [("tuned", found.study.largest)]
        star = style | {"marker": "*", "markersize": 10, "linestyle": "", "label": label(name)}
        _bars(axes, found, name, tuned, shift**1.8 * 1.25, **star)
        if name in CARRIED:
            line = [("tuned", small), *(("carried", batch) for batch in found.study.batches[1:])]
            _bars(axes, found, name, line, shift, **style, marker="o", markersize=4, linewidth=1.4)
            longer = [("longer", found.study.largest)]
            _bars(axes, found, name, longer, shift**1.8 * 1.25, **style, marker="^", markersize=6, linestyle="")
    axes.set_xscale("log")
    batches = found.study.batches
    steps = {batch: math.ceil(found.length * found.study.epoch / batch) for batch in batches}
    axes.set_xticks(batches, [f"{batch:,}\n{steps[batch]:,} steps" for batch in batches])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(
        f"line: rate found at {small}, carried by √batch\n★ rate found at {found.study.largest:,}; "
        f"▲ the same with {found.study.longer} times the steps",
        fontsize=9,
    )
    axes.legend(frameon=False, fontsize=9, loc="lower left")


def _bars(axes: Any, found: Found, name: str, cells: list[tuple[str, int]], shift: float, **style: Any) -> None:
    values = [found.accuracies(purpose, name, batch) for purpose, batch in cells]
    places, means = [batch * shift for _, batch in cells], [*map(statistics.fmean, values)]
    axes.errorbar(places, means, yerr=[*map(half_width, values)], **style)


def _draw_rates(axes: Any, found: Found) -> None:
    for name, batch, epochs, points in found.searches():
        style, text = "*--" if batch == found.study.largest else "o-", f"{label(name)}, {batch:,}, {epochs} epochs"
        axes.plot(*zip(*points), style, color=COLOURS[name], linewidth=1.2, label=text)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("accuracy of the search (%)")
    axes.set_title("the searches", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def _draw_scale(axes: Any, found: Found) -> None:
    """Draw accuracy against the batch in noise scales, each run with its own, measured in its last quarter."""
    missing = 0
    for name in CARRIED:
        cells = [("tuned", found.study.smallest), *(("carried", batch) for batch in found.study.batches[1:])]
        runs = [run for purpose, batch in cells for run in found.runs[purpose, name, batch]]
        points = [(run.batch / found.results[run].noise_scales[-1], found.results[run].accuracy) for run in runs]
        finite = [point for point in points if not math.isnan(point[0])]
        missing += len(points) - len(finite)
        if finite:
            axes.plot(*zip(*finite), "o", color=COLOURS[name], markersize=4, alpha=0.8)
    axes.axvspan(*IMAGENET, color="#f0e6c8", zorder=0, label="ImageNet at 32,768")
    axes.set_xscale("log")
    axes.set_xlabel("batch ÷ noise scale at the end of the run")
    axes.set_ylabel("test accuracy (%)")
    without = f", without {missing} runs that have no noise scale" if missing else ""
    axes.set_title(f"carried rates{without}", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="lower left")


def _draw_course(axes: Any, found: Found) -> None:
    """Draw the accuracy during the first seed's runs, with the usual warm-up and with one over half of the run."""
    for name in CARRIED:
        for purpose, style in (("tuned", "-"), ("half warm-up", "--")):
            run, *_ = found.runs[purpose, name, found.study.largest]
            result = found.results[run]
            warmup = "warm-up over half of it" if purpose != "tuned" else "usual warm-up"
            axes.plot(result.steps, result.accuracies, style, color=COLOURS[name], label=f"{label(name)}, {warmup}")
    axes.set_xlabel(f"steps of {found.study.largest:,} images")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title("the course of a run", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
