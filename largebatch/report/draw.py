"""Draws panels: RUN/curves.png while a run goes on, the SVG in the page of a report, and its pictures.

The functions import matplotlib, because only rank 0 draws.
"""

import html
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from largebatch.files import atomic_file
from largebatch.files.run_folder import Row, RunFolder
from largebatch.report.panels import LIVE, MAP, Panel, Run, by_kind, panels, tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Inches of the picture, of a row of panels, and of the margins with numbers and titles.
WIDTH, HEIGHT = 10.5, 3.3
LEFT, RIGHT, TOP, BOTTOM, BETWEEN_COLUMNS, BETWEEN_ROWS = 0.75, 0.2, 0.8, 0.55, 0.75, 0.65
LETTER = 0.0081  # inches of a letter in the name of a kind, for each point of its size
LONGEST = 26  # letters of such a name
DASHES = ("-", "--", ":")
THIN = 0.45  # opacity of thin lines
GRID, TEXT = "#e6e6e6", "#808080"
IN_A_PAGE = {GRID: "var(--line)", "#000001": "var(--soft)"}  # a light and a dark page have their own colours


def draw_curves(folder: Path, *, title: str) -> None:
    """Draw RUN/curves.png: the curves of a run and, from the second evaluation on, all trust ratios."""
    from matplotlib.figure import Figure

    run = Run(RunFolder(folder), title)
    drawn = panels([run], LIVE)
    rows = _layout([panel.key for panel in drawn], with_map=bool(run.layers))
    figure = Figure(figsize=(WIDTH, HEIGHT * len(rows)), dpi=120)
    places = _add_axes(figure, rows)
    for panel in drawn:
        draw_panel(places[panel.key], panel)
    if MAP in places:
        draw_map(places[MAP], run.layers)
    for name in rows[-1]:
        places[name].set_xlabel("epoch")
    heading = title + (f"\n{_result(run.epochs[-1])}" if run.epochs else "")
    figure.suptitle(heading, y=1 - 0.08 / figure.get_figheight(), va="top", fontsize=12)
    _save(figure, run.folder.curves)


def write_pictures(folder: Path, runs: Sequence[Run], drawn: Sequence[Panel]) -> list[Path]:
    """Write report_KEY.png for each panel, and report_layers.png for a single run with ratios; return the files."""
    files = [write_picture(folder / f"report_{panel.key}.png", panel) for panel in drawn]
    if len(runs) == 1 and runs[0].layers:
        figure, axes = _alone()
        draw_map(axes, runs[0].layers)
        files.append(_save(figure, folder / "report_layers.png"))
    return files


def write_picture(path: Path, panel: Panel) -> Path:
    figure, axes = _alone()
    draw_panel(axes, panel)
    axes.set_xlabel(panel.across)
    return _save(figure, path)


def panel_svg(panel: Panel) -> str:
    """Return the panel for an HTML page, which has its own titles and legends."""
    figure, axes = _alone(0.16, 0.1, 0.82, 0.87)
    draw_panel(axes, panel, in_a_page=True)
    return _svg(figure, panel.title)


def map_svg(rows: Sequence[Row]) -> str:
    figure, axes = _alone(0.13, 0.1, 0.77, 0.87)
    draw_map(axes, rows, in_a_page=True)
    return _svg(figure, MAP)


def _alone(*place: float) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.5), dpi=150)
    axes: Any = figure.add_axes(place or (0.13, 0.14, 0.84, 0.76))  # type: ignore[arg-type]
    return figure, axes


def _save(figure: "Figure", path: Path) -> Path:
    with atomic_file(path) as file:
        figure.savefig(file, format="png", pil_kwargs={"compress_level": 3})  # the default takes three times as long
    return path


def _svg(figure: "Figure", label: str) -> str:
    """Return a figure as SVG for HTML, with text as text and the colours of the page."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Names without an underscore are those of markers and clips, which are used.
    text = re.sub(r' (?:xmlns(?::\w+)?|version|width="[^"]*pt" height|id(?=="[\w.]*_\d+"))="[^"]*"', "", text)
    for ours, of_page in IN_A_PAGE.items():
        text = text.replace(ours, of_page)
    text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
    return re.sub(r"\n\s*", "\n", text)


def _layout(keys: Sequence[str], *, with_map: bool) -> list[list[str]]:
    above, below = [*keys[:2]], [*keys[2:]]
    curves = [below] if len(below) < 4 else [below[:2], below[2:]]
    return [above, *curves, *([[MAP]] if with_map else [])]


def _add_axes(figure: "Figure", rows: list[list[str]]) -> dict[str, Any]:
    """Add the axes of all panels, which share their epochs, at fixed places; return them by name.

    matplotlib's own layouts would measure every text first, which takes as long as drawing.
    """
    places: dict[str, Any] = {}
    height = (HEIGHT * len(rows) - TOP - BOTTOM - BETWEEN_ROWS * (len(rows) - 1)) / len(rows)
    for number, row in enumerate(rows):
        width = (WIDTH - LEFT - RIGHT - BETWEEN_COLUMNS * (len(row) - 1)) / len(row)
        bottom = BOTTOM + (len(rows) - 1 - number) * (height + BETWEEN_ROWS)
        for column, name in enumerate(row):
            place = LEFT + column * (width + BETWEEN_COLUMNS), bottom, width, height
            parts: Any = [inches / of for inches, of in zip(place, 2 * figure.get_size_inches().tolist())]
            places[name] = figure.add_axes(parts, sharex=next(iter(places.values()), None))
            # Panels that stand above each other show the same numbers.
            below = rows[number + 1] if number + 1 < len(rows) else []
            places[name].tick_params(labelbottom=len(row) != len(below))
    return places


def _result(row: Row) -> str:
    averaged = "" if math.isnan(row.get("ema_top1", math.nan)) else f" (averaged weights {row['ema_top1']:.2f} %)"
    return f"top-1 {row['top1']:.2f} %{averaged} after {row['epoch']:.4g} epochs"


def draw_panel(axes: Any, panel: Panel, *, in_a_page: bool = False) -> None:
    """Draw a panel into axes of matplotlib. A panel without a number says so."""
    points = [y for line in panel.lines for _, y in line.points if y > 0 or not panel.log]
    for line in panel.lines:
        style = {"linewidth": 1.0, "alpha": THIN, "zorder": 1} if line.thin else {"linewidth": 1.6}
        marker = "o" if len(line.points) < 40 and not line.thin else ""
        xs, ys = zip(*line.points)
        axes.plot(xs, ys, DASHES[line.dash], color=line.colour, label=line.label, marker=marker, markersize=3, **style)
    for place, colour in panel.marks:
        axes.axvline(place, color=colour, linestyle=(0, (1, 3)), linewidth=1.0)
    if panel.across != "epoch":
        axes.set_xscale("log")
    if panel.ticks:
        axes.set_xticks(panel.ticks, [f"{place:,.0f}" for place in panel.ticks])
        axes.minorticks_off()
    if panel.log and points:
        _log_scale(axes)
    else:
        _linear_scale(axes, min(points, default=0.0), max(points, default=1.0), least=panel.least)
    _clean(axes, "" if in_a_page else panel.title, in_a_page=in_a_page)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if not points:
        middle = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, "no numbers", color=TEXT, fontsize=10, **middle)
        axes.set_yticks([])
    elif not in_a_page and any(line.label for line in panel.lines):
        axes.legend(frameon=False, fontsize=9)


def _clean(axes: Any, title: str, *, in_a_page: bool) -> None:
    axes.set_title(title, loc="left", y=1.0, fontsize=10)  # without a place, matplotlib measures all numbers first
    if in_a_page:
        axes.tick_params(which="both", color=GRID, labelcolor="#000001", labelsize=12)
        axes.spines[:].set_color(GRID)


def _linear_scale(axes: Any, low: float, high: float, *, least: float) -> None:
    """Begin at 0 where a small or no change would look large."""
    axes.yaxis.set_major_formatter("{x:g}")  # no power of ten above the panel, where its title is
    if 0 < low < 0.5 * high or 0 < low == high or least:
        axes.set_ylim(0, max(1.05 * high, least))


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}" if high < 1e4 * low else "")  # more of them would not be legible


def draw_map(axes: Any, rows: Sequence[Row], *, in_a_page: bool = False) -> None:
    """Draw a line of colours for each tensor of layers.csv, over the epochs, with names and a scale of colours.

    The colour of an evaluation reaches back to the evaluation before.
    """
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator

    kinds = by_kind(tensors(rows))
    values = np.array([[row.get(name, math.nan) for row in rows] for names in kinds.values() for name in names])
    values[~(np.isfinite(values) & (values > 0))] = math.nan
    epochs = [row["epoch"] for row in rows]
    first = max(0.0, 2 * epochs[0] - epochs[1]) if len(rows) > 1 else 0.0
    low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (1.0, 1.0)
    norm = LogNorm(low, high if high > low else 1.01 * low)
    mesh = axes.pcolormesh(
        [first, *epochs], np.arange(len(values) + 1), values, norm=norm, cmap="viridis", rasterized=True
    )
    if not in_a_page:
        mesh.sticky_edges.x.clear()  # the points of the panels above are not to be cut at the last epoch
    axes.invert_yaxis()
    _clean(axes, "" if in_a_page else MAP, in_a_page=in_a_page)
    axes.spines[:].set_visible(False)
    _label(axes, kinds, height=len(values), size=12 if in_a_page else 8, largest=14 if in_a_page else 8)
    bar = axes.figure.colorbar(mesh, ax=axes, fraction=0.06, pad=0.01, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.yaxis.set_minor_formatter("")
    _clean(bar.ax, "", in_a_page=in_a_page)


def _label(axes: Any, kinds: dict[str, list[str]], *, height: int, size: float, largest: float) -> None:
    """Name each kind at its middle, unless the name above is too near. largest: size of letters in a narrow page."""
    left, bottom, width, top = axes.get_position().bounds
    least = 1.25 * largest / 72 / (top * axes.figure.get_figheight()) * height
    begin, last, places = 0, -math.inf, {}
    for kind, names in kinds.items():
        middle = begin + len(names) / 2
        if middle - last >= least:
            text = f"{kind} × {len(names)}" if len(names) > 1 else kind
            places[middle], last = text if len(text) <= LONGEST else f"…{text[1 - LONGEST :]}", middle
        if begin:
            axes.axhline(begin, color="white", linewidth=1.0)
        begin += len(names)
    axes.set_yticks([*places], [*places.values()], fontsize=size)
    axes.tick_params(axis="y", length=0)
    margin = max(left, LETTER * largest * max(map(len, places.values())) / axes.figure.get_figwidth())
    axes.set_position((margin, bottom, width - (margin - left), top))
