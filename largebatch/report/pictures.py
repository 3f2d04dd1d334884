"""The panels of a report as PNG files, for slides and papers."""

from collections.abc import Sequence
from pathlib import Path

from largebatch.files import atomic_file
from largebatch.report.panels import Panel

STYLES = ("-", "--", ":", "-")


def write_pictures(folder: Path, panels: Sequence[Panel]) -> list[Path]:
    """Write report_KEY.png for each panel; return the files."""
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
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.set_xlabel("epoch")
        axes.grid(color="#e6e6e6", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        if any(line.label for line in panel.lines):
            axes.legend(frameon=False, fontsize=8)
        files.append(folder / f"report_{panel.key}.png")
        with atomic_file(files[-1]) as file:
            figure.savefig(file, format="png")
    return files
