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
    figure, (left, right) = _figure(2, (11, 4.8))
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
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    left.yaxis.set_major_formatter("{x:,.5g}")
    figure.suptitle(title + "\n", fontsize=10)
    _save(figure, path)


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


def draw_timelines(path: Path, timelines: Sequence[Timeline], *, title: str) -> None:
    """Write a PNG: what the slowest rank and the links do in a step, for each number of ranks."""
    figure, panels = _figure(len(timelines), (10, 1.5 + 1.5 * len(timelines)), rows=True)
    longest = max(timeline.seconds for timeline in timelines)
    for axes, timeline in zip(panels, timelines):
        for row, name, spans in _bars(timeline):
            widths = [(1e3 * begins, 1e3 * (ends - begins)) for begins, ends in spans]
            axes.broken_barh(widths, (row - 0.3, 0.6), color=BARS[name], linewidth=0, label=name)
        axes.set_yticks([0, 1], ["slowest rank", "links"])
        axes.invert_yaxis()
        axes.set_xlim(0, 1010 * longest)
        note = f"{timeline.ranks:,} ranks: {1e3 * timeline.seconds:.1f} ms"
        note += f", of these {1e3 * timeline.straggling:.1f} ms because one rank is slower"
        axes.set_title(f"{note}, {1e3 * timeline.exposed:.1f} ms reduction", loc="left", fontsize=9)
    panels[-1].set_xlabel("ms")
    named = dict(zip(*reversed(panels[0].get_legend_handles_labels())))  # each name once
    figure.legend(named.values(), named, frameon=False, fontsize=8, ncols=5, loc="outside lower center")
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


BARS = {
    "forward, and all passes before the last": "#9dbbd9",
    "last backward pass": "#2463a6",
    "longer, because this rank is slower": "#8a5fb0",
    "reduction": "#c8442f",
    "optimizer": "#7a9a3a",
}


def _bars(timeline: Timeline) -> list[tuple[int, str, list[tuple[float, float]]]]:
    """Return row, name and times of each kind of work."""
    before, backward, slower, reduction, optimizer = BARS
    return [
        (0, before, [(0.0, timeline.backward)]),
        (0, backward, [(timeline.backward, timeline.alone)]),
        (0, slower, [(timeline.alone, timeline.slowest)]),
        (0, reduction, [(timeline.slowest, timeline.reduced)]),
        (1, reduction, [(message.begins, message.ends) for message in timeline.messages]),
        (0, optimizer, [(timeline.reduced, timeline.seconds)]),
    ]


def _figure(panels: int, size: tuple[float, float], *, rows: bool = False) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(panels if rows else 1, 1 if rows else panels, squeeze=False).flatten()
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        figure.savefig(file, format="png")
