"""Draws RUN/curves.png from the CSV tables of the run."""

import math
from pathlib import Path
from typing import Any

from largebatch.files import atomic_file
from largebatch.hooks.ratio_map import draw_map
from largebatch.hooks.tables import EPOCHS, LAYERS, NOISE, STEPS, TRUST, Row, read_rows

CURVES = "curves.png"
MAP = "layers"  # the panel with the trust ratios of all tensors

# Inches: of the picture, of a row of panels, and of the margins, in which the numbers and titles of the panels stand.
WIDTH, HEIGHT = 10.5, 3.3
LEFT, RIGHT, TOP, BOTTOM, BETWEEN_COLUMNS, BETWEEN_ROWS = 0.75, 0.2, 0.8, 0.55, 0.75, 0.65

Lines = list[tuple[str, list[Row], str, dict[str, Any]]]  # label, rows, column, style

THIN = {"color": "#9bbbe0", "linewidth": 1.0}
PALE = {"color": "#e6a89c", "linewidth": 1.8}
BLUE = {"color": "#2463a6", "linewidth": 1.8}
RED = {"color": "#c8442f", "linewidth": 1.8}
GREEN = {"color": "#3b8f5c", "linewidth": 1.8}
GREY = {"color": "#808080", "fontsize": 10}


def draw_curves(folder: Path, *, title: str) -> None:
    """Draw RUN/curves.png from RUN/steps.csv, RUN/epochs.csv and RUN/layers.csv.

    The panels show loss, accuracy, learning rate, gradient norm and, if the run has them, trust ratios, the gradient
    noise scale beside the batch, and the map of the trust ratios of all tensors.
    """
    from matplotlib.figure import Figure  # takes half a second to import, and only rank 0 needs it

    steps, epochs = read_rows(folder / STEPS), read_rows(folder / EPOCHS)
    layers = read_rows(folder / LAYERS) if _has(steps, "trust_median") else []
    rows = _layout(
        with_trust=_has(steps, "trust_median"), with_noise=_has(steps, NOISE[2]), with_map=len(layers) > 1
    )
    figure = Figure(figsize=(WIDTH, HEIGHT * len(rows)), dpi=120)
    panels = _add_panels(figure, rows)
    averaged, whole = _has(epochs, "ema_top1"), whole_steps(steps)
    lines: Lines = [
        ("training, single steps", whole, "loss", THIN),
        ("training, mean", at_middles(epochs), "train_loss", BLUE),
        ("held out", epochs, "eval_loss", RED),
        ("held out, averaged weights", epochs, "ema_loss", GREEN),
    ]
    _draw(panels["loss"], "loss", lines if averaged else lines[:-1])
    lines = [
        ("top-5", epochs, "top5", PALE),
        ("top-1", epochs, "top1", RED),
        ("top-1, averaged weights", epochs, "ema_top1", GREEN),
    ]
    _draw(panels["accuracy"], "held-out accuracy (%)", lines if averaged else lines[:-1])
    _draw(panels["lr"], "learning rate", [("", steps, "lr", BLUE)])
    _draw(panels["grad_norm"], "gradient norm before clipping", [("", whole, "grad_norm", BLUE | {"linewidth": 1.0})])
    _log_scale(panels["grad_norm"])
    if "trust" in panels:
        lines = [("", whole, column, style) for column, style in zip(TRUST, (THIN, BLUE | {"linewidth": 1.0}, THIN))]
        _draw(panels["trust"], "trust ratios: smallest, median, largest", lines)
        _log_scale(panels["trust"])
    if NOISE[2] in panels:
        lines = [("gradient noise scale", steps, NOISE[2], BLUE), ("global batch", batches(steps), "batch", PALE)]
        _draw(panels[NOISE[2]], "largest useful batch (images)", lines)
        _log_scale(panels[NOISE[2]])
    if MAP in panels:
        draw_map(panels[MAP], layers)
    for name in rows[-1]:
        panels[name].set_xlabel("epoch")
    heading = title + (f"\n{_result(epochs[-1])}" if epochs else "")
    figure.suptitle(heading, y=1 - 0.08 / figure.get_figheight(), va="top", fontsize=12)
    with atomic_file(folder / CURVES) as file:
        figure.savefig(file, format="png", pil_kwargs={"compress_level": 3})  # the default takes three times as long


def _layout(*, with_trust: bool, with_noise: bool, with_map: bool) -> list[list[str]]:
    """Return the names of the panels, row by row."""
    below = ["lr", "grad_norm", *(["trust"] if with_trust else []), *([NOISE[2]] if with_noise else [])]
    curves = [below] if len(below) < 4 else [below[:2], below[2:]]
    return [["loss", "accuracy"], *curves, *([[MAP]] if with_map else [])]


def _add_panels(figure: Any, rows: list[list[str]]) -> dict[str, Any]:
    """Add the axes of all panels, which share their epochs, at fixed places; return them by name.

    matplotlib's own layouts measure every text of the picture first, which takes as long as to draw it.
    """
    panels: dict[str, Any] = {}
    height = (HEIGHT * len(rows) - TOP - BOTTOM - BETWEEN_ROWS * (len(rows) - 1)) / len(rows)
    for number, row in enumerate(rows):
        width = (WIDTH - LEFT - RIGHT - BETWEEN_COLUMNS * (len(row) - 1)) / len(row)
        bottom = BOTTOM + (len(rows) - 1 - number) * (height + BETWEEN_ROWS)
        for column, name in enumerate(row):
            place = LEFT + column * (width + BETWEEN_COLUMNS), bottom, width, height
            parts = [inches / of for inches, of in zip(place, 2 * figure.get_size_inches().tolist())]
            panels[name] = figure.add_axes(parts, sharex=next(iter(panels.values()), None))
            # Panels that stand above each other show the same numbers.
            below = rows[number + 1] if number + 1 < len(rows) else []
            panels[name].tick_params(labelbottom=len(row) != len(below))
    return panels


def at_middles(rows: list[Row]) -> list[Row]:
    """Return rows about the time since the row before at the middle of that time, where their means belong."""
    begins = [0.0, *(row["epoch"] for row in rows)]
    return [row | {"epoch": (begin + row["epoch"]) / 2} for begin, row in zip(begins, rows)]


def whole_steps(rows: list[Row]) -> list[Row]:
    """Return the rows without that of the run's last step if it is short: its norm and its rate are of fewer images."""
    if len(rows) < 2 or rows[-1]["step"] <= rows[-2]["step"]:
        return rows
    mean = (rows[-1]["images"] - rows[-2]["images"]) / (rows[-1]["step"] - rows[-2]["step"])
    return rows if mean > 0.999 * batches(rows[:-1])[-1]["batch"] else rows[:-1]


def batches(rows: list[Row]) -> list[Row]:
    """Return the global batch at each row: the mean since the row before, without the run's last step, which is short.

    It never shrinks. Between two phases of a batch ramp it is between their batches.
    """
    found, before, batch = [], {"step": 0.0, "images": 0.0}, 0.0
    for row in rows:
        if row["step"] > before["step"]:
            batch = max(batch, (row["images"] - before["images"]) / (row["step"] - before["step"]))
        found.append({"epoch": row["epoch"], "batch": batch})
        before = row
    return found


def _result(row: Row) -> str:
    averaged = "" if math.isnan(row.get("ema_top1", math.nan)) else f" (averaged weights {row['ema_top1']:.2f} %)"
    return f"top-1 {row['top1']:.2f} %{averaged} after {row['epoch']:.4g} epochs"


def _has(rows: list[Row], column: str) -> bool:
    return any(math.isfinite(row.get(column, math.nan)) for row in rows)


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}" if high < 1e4 * low else "")  # more of them would not be legible


def _draw(axes: Any, name: str, lines: Lines) -> None:
    """Draw a panel: each line over the epochs, without the points that are not finite. A panel without any says so."""
    for label, rows, column, style in lines:
        points = [(row["epoch"], row[column]) for row in rows if math.isfinite(row.get(column, math.nan))]
        marker = "o" if len(points) < 40 and style is not THIN else ""
        axes.plot(*zip(*points) if points else ((), ()), label=label, marker=marker, markersize=3, **style)
    axes.set_title(name, loc="left", y=1.0, fontsize=10)  # without a place, matplotlib measures all numbers to find one
    axes.yaxis.set_major_formatter("{x:g}")  # no power of ten above the panel, where its title is
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if not any(_has(rows, column) for _, rows, column, _ in lines):
        axes.text(0.5, 0.5, "no numbers", transform=axes.transAxes, ha="center", va="center", **GREY)
        axes.set_yticks([])
    elif any(label for label, *_ in lines):
        axes.legend(frameon=False, fontsize=9)
