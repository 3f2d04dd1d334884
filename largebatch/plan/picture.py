"""Pictures of a plan: hours and cost over the number of GPUs, and the timeline of a simulated step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from largebatch.files import atomic_file
from largebatch.plan.simulate import Timeline

COLOURS = {"compute": "#2463a6", "exposed": "#c8442f", "optimizer": "#7a9a3a", "input": "#8a5fb0", "rest": "#999999"}


@dataclass(frozen=True)
class Point:
    """A run at one number of GPUs."""

    gpus: int
    shares: dict[str, float]
    """hours by part"""

    @property
    def hours(self) -> float:
        """The whole run."""
        return sum(self.shares.values())


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
    """Write a PNG: hours by part, and GPU-hours or cost, over the number of GPUs."""
    figure, (left, right) = _figure(2, (11, 4.6))
    gpus = [point.gpus for point in points]
    bottom = [0.0] * len(points)
    for name, colour in COLOURS.items():
        top = [low + 100 * point.shares[name] / point.hours for low, point in zip(bottom, points)]
        right.fill_between(gpus, bottom, top, color=colour, alpha=0.75, linewidth=0, label=name)
        bottom = top
    left.plot(gpus, [point.hours for point in points], color="#c8442f", label="hours")
    first = points[0]
    left.plot(gpus, [first.hours * first.gpus / n for n in gpus], "--", color="#888888", label="hours, perfect scaling")
    cost = price or 1.0
    label = "cost" if price else "GPU-hours"
    left.plot(gpus, [point.hours * point.gpus * cost for point in points], color="#2463a6", label=label)
    found = bend(points)
    if found:
        point, why = found
        for axes in (left, right):
            axes.axvline(point.gpus, color="#555555", linestyle=(0, (1, 3)))
        note = f"from {point.gpus} GPUs on twice the GPU-hours, {REASONS[why]}"
        left.set_title(note, loc="left", fontsize=8)
    left.set(xscale="log", yscale="log", xlabel="GPUs")
    right.set(xscale="log", xlabel="GPUs", ylabel="% of the run", ylim=(0, 100), xlim=(gpus[0], gpus[-1]))
    left.legend(frameon=False, fontsize=8, loc="lower left")
    right.legend(frameon=False, fontsize=8, loc="lower left")
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


REASONS = {
    "compute": "by passes that are too small to fill a GPU",
    "exposed": "by the reduction",
    "optimizer": "by the optimizer, which does not shrink",
    "input": "by the wait for images",
    "rest": "by evaluations, checkpoints and the start",
}


def draw_timelines(path: Path, timelines: Sequence[Timeline], *, title: str) -> None:
    """Write a PNG: what the slowest rank and the links do in a step, for each number of ranks."""
    figure, panels = _figure(len(timelines), (10, 1.3 + 1.5 * len(timelines)), rows=True)
    longest = max(timeline.seconds for timeline in timelines)
    for axes, timeline in zip(panels, timelines):
        for row, (begins, ends, name) in _bars(timeline):
            axes.barh(row, 1e3 * (ends - begins), left=1e3 * begins, height=0.6, color=COLOURS[name], alpha=0.8)
        axes.set_yticks([0, 1], ["ranks", "links"])
        axes.invert_yaxis()
        axes.set_xlim(0, 1030 * longest)
        note = f"{timeline.ranks} ranks: {1e3 * timeline.seconds:.1f} ms"
        note += f", {1e3 * timeline.straggling:.1f} ms for the slowest, {1e3 * timeline.exposed:.1f} ms reduction"
        axes.set_title(note, loc="left", fontsize=9)
    panels[-1].set_xlabel("ms; blue: passes, purple: wait for the slowest rank, red: reduction, green: optimizer")
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def _bars(timeline: Timeline) -> list[tuple[int, tuple[float, float, str]]]:
    bars = [(0, (0.0, timeline.alone, "compute")), (0, (timeline.alone, timeline.slowest, "input"))]
    bars.append((0, (timeline.slowest, timeline.reduced, "exposed")))
    bars.append((0, (timeline.reduced, timeline.seconds, "optimizer")))
    return bars + [(1, (message.begins, message.ends, "exposed")) for message in timeline.messages]


def _figure(panels: int, size: tuple[float, float], *, rows: bool = False) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(panels if rows else 1, 1 if rows else panels, squeeze=False).flatten()
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def _save(figure: Any, path: Path) -> None:
    with atomic_file(path) as file:
        figure.savefig(file, format="png")
