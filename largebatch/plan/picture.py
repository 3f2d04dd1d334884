"""A picture of a plan: hours and cost over the number of GPUs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from largebatch.config import TrainConfig
from largebatch.files import atomic_file
from largebatch.plan.planning import Plan, fitted, scaled
from largebatch.plan.run import HOUR, run_of
from largebatch.plan.step import step_of

COLOURS = {"compute": "#2463a6", "exposed": "#c8442f", "optimizer": "#7a9a3a", "input": "#8a5fb0", "rest": "#999999"}


@dataclass(frozen=True)
class Point:
    gpus: int
    shares: dict[str, float]
    """hours by part"""

    @property
    def hours(self) -> float:
        return sum(self.shares.values())


def over_gpus(config: TrainConfig, plan: Plan, *, num_images: int, most: int = 10_000) -> Iterator[Point]:
    """Yield the run at 1 to `most` GPUs, as many as can share the global batch."""
    numbers = sorted({round(10 ** (power / 8)) for power in range(8 * math.ceil(math.log10(most)) + 1)})
    for gpus in numbers:
        cluster = replace(plan.cluster, ranks=gpus)
        try:
            at, _, _ = fitted(config, gpus)
        except ValueError:  # no whole replica, or fewer images than GPUs
            continue
        counted = scaled(plan.counted, at.data.micro_batch_size)
        step = step_of(at, counted, cluster, plan.speed)
        run = run_of(at, counted, cluster, step, plan.speed, num_images=num_images)
        share = run.training / step.seconds / HOUR
        rest = (run.seconds - run.training) / HOUR
        parts = {"compute": step.compute, "exposed": step.exposed, "optimizer": step.optimizer, "input": step.input}
        yield Point(gpus, {**{name: seconds * share for name, seconds in parts.items()}, "rest": rest})


def bend(points: Sequence[Point]) -> tuple[Point, str] | None:
    """Return the first point whose GPU-hours are twice the lowest, and the part that grew most; None if there is none.

    The lowest number of GPU-hours is that of the most efficient point.
    """
    best = min(points, key=lambda point: point.gpus * point.hours)
    for point in points:
        if point.gpus > best.gpus and point.gpus * point.hours > 2 * best.gpus * best.hours:
            grown = {name: point.gpus * hours - best.gpus * best.shares[name] for name, hours in point.shares.items()}
            return point, max(grown, key=lambda name: grown[name])
    return None


def draw_scaling(path: Path, points: Sequence[Point], *, title: str, price: float | None) -> None:
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=(11, 4.8), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    gpus = [point.gpus for point in points]
    bottom = [0.0] * len(points)
    for name, colour in COLOURS.items():
        top = [low + 100 * point.shares[name] / point.hours for low, point in zip(bottom, points)]
        right.fill_between(gpus, bottom, top, color=colour, alpha=0.75, linewidth=0, label=PARTS[name])
        bottom = top
    left.plot(gpus, [point.hours for point in points], color="#c8442f", label="hours")
    first = points[0]
    left.plot(gpus, [first.hours * first.gpus / n for n in gpus], "--", color="#888888", label="hours, perfect scaling")
    label = f"cost, at {price:g} per GPU-hour" if price else "GPU-hours"
    left.plot(gpus, [point.hours * point.gpus * (price or 1.0) for point in points], color="#2463a6", label=label)
    found = bend(points)
    if found:
        point, why = found
        for axes in (left, right):
            axes.axvline(point.gpus, color="#555555", linestyle=(0, (1, 3)))
        note = f"from {point.gpus:,} GPUs on twice the GPU-hours, {REASONS[why]}"
        figure.text(0.5, 0.92, note, ha="center", fontsize=9)
    left.set(yscale="log", ylabel=f"hours, {'cost' if price else 'GPU-hours'}")
    left.grid(color="#dddddd", linewidth=0.6)
    left.set_axisbelow(True)
    right.set(ylabel="% of the run", ylim=(0, 100))
    for axes in (left, right):
        axes.set(xscale="log", xlabel="GPUs", xlim=(gpus[0], gpus[-1]))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    left.yaxis.set_major_formatter("{x:,.5g}")
    figure.suptitle(title + "\n", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        figure.savefig(file, format="png")


PARTS = {
    "compute": "passes",
    "exposed": "reduction that they do not hide",
    "optimizer": "optimizer",
    "input": "wait for images",
    "rest": "start, evaluations, checkpoints",
}
REASONS = {
    "compute": "by passes that are too small to fill a GPU",
    "exposed": "by the reduction",
    "optimizer": "by the optimizer, which does not shrink",
    "input": "by the wait for images",
    "rest": "by evaluations, checkpoints and the start",
}
