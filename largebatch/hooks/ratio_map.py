"""The map of trust ratios: a line of colours for each tensor of layers.csv, over the epochs.

Tensors of one kind, such as attn.qkv of all blocks, stand together, the first block on top. In the order of the model
neighbours are of different kinds, and stripes would hide how the ratios change with depth.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from largebatch.hooks.tables import Row

LETTER = 0.06  # inches of a letter in the name of a kind
LEAST_LABEL = 0.025  # distance of two labels that can be read, as a part of the height


def tensors(rows: Sequence[Row]) -> list[str]:
    """Return the names of the tensors in layers.csv, in the order of the model."""
    return [name for name in (rows[0] if rows else {}) if name not in ("step", "epoch")]


def by_kind(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the tensors of each kind, which is their name without its numbers; kinds come as the model has them."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[re.sub(r"(?<=\.)\d+(?=\.)", "*", name).removesuffix(".weight")].append(name)
    return dict(kinds)


def draw_map(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the map into axes of matplotlib, with a scale of colours beside it. rows: those of layers.csv, not empty.

    The colour of an evaluation reaches back to the evaluation before. Names and scale of colours take a part of the
    place of the axes.
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
    mesh = axes.pcolormesh([first, *epochs], np.arange(len(values) + 1), values, norm=norm, cmap="viridis")
    mesh.sticky_edges.x.clear()  # the points of the panels above are not to be cut at the last epoch
    axes.invert_yaxis()
    _label(axes, kinds, height=len(values))
    axes.set_title("trust ratio of each tensor (the first block of a kind is on top)", loc="left", y=1.0, fontsize=10)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(mesh, ax=axes, fraction=0.06, pad=0.01, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.yaxis.set_minor_formatter("")


def _label(axes: Any, kinds: dict[str, list[str]], *, height: int) -> None:
    """Name each kind at its middle, unless that is too near to the name above, and part the kinds by a line."""
    begin, last, places = 0, -math.inf, {}
    for kind, names in kinds.items():
        middle = begin + len(names) / 2
        if middle - last >= LEAST_LABEL * height:
            count = f" × {len(names)}" if len(names) > 1 else ""
            places[middle], last = f"{kind}{count}", middle
        if begin:
            axes.axhline(begin, color="white", linewidth=1.0)
        begin += len(names)
    axes.set_yticks([*places], [*places.values()], fontsize=8)
    axes.tick_params(axis="y", length=0)
    left, bottom, width, top = axes.get_position().bounds
    margin = max(left, LETTER * max(map(len, places.values())) / axes.figure.get_figwidth())
    axes.set_position((margin, bottom, width - (margin - left), top))
