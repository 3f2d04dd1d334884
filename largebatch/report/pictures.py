"""The panels of a report as PNG files, for slides and papers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from largebatch.files import atomic_file
from largebatch.hooks.ratio_map import draw_map
from largebatch.report.panels import Panel, Run, has_map

STYLES = ("-", "--", ":", "-")


def write_pictures(folder: Path, runs: Sequence[Run], panels: Sequence[Panel]) -> list[Path]:
    """Write report_KEY.png for each panel, and report_layers.png for a single run that has ratios; return the files."""
    from matplotlib.figure import Figure  # takes half a second to import

    files = []
    for panel in panels:
        figure = Figure(figsize=(6.4, 3.8), dpi=150, layout="constrained")
        axes = figure.subplots()
        for line in panel.lines:
            xs, ys = zip(*line.points)
            width, alpha = (1.0, 0.45) if line.style == 3 else (1.8, 1.0)
            style = STYLES[line.style]
            axes.plot(xs, ys, style, color=line.colour, label=line.label, linewidth=width, alpha=alpha)
        for epoch, colour, _ in panel.marks:
            axes.axvline(epoch, color=colour, linestyle=(0, (1, 3)), linewidth=1.0)
        if panel.log:
            axes.set_yscale("log")
        elif axes.get_ylim()[1] < panel.least:
            axes.set_ylim(0, panel.least)
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.set_xlabel("epoch")
        axes.grid(color="#e6e6e6", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        if any(line.label for line in panel.lines):
            axes.legend(frameon=False, fontsize=8)
        files.append(_save(figure, folder / f"report_{panel.key}.png"))
    if len(runs) == 1 and has_map(runs[0]):
        figure = Figure(figsize=(9.0, 5.0), dpi=150, layout="constrained")
        axes = figure.subplots()
        draw_map(axes, runs[0].layers)
        axes.set_xlabel("epoch")
        files.append(_save(figure, folder / "report_layers.png"))
    return files


def _save(figure: Any, path: Path) -> Path:
    with atomic_file(path) as file:
        figure.savefig(file, format="png")
    return path
