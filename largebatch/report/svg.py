"""Diagrams as SVG, which fits any width and takes its colours from the page, light or dark. No library is needed."""

import html
import math
from collections.abc import Sequence

from largebatch.report.panels import Line, Panel

WIDTH, HEIGHT = 460, 250  # of the view box; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 12, 28
DASHES = ("", "6 3", "2 3", "")
MOST_POINTS = 600  # of one line: more are not seen


def draw(panel: Panel) -> str:
    """Return a panel as a figure of HTML with its legend."""
    scale = Scale(panel)
    parts = [*_grid(scale, panel)]
    for epoch, colour, text in panel.marks:
        if scale.x_low <= epoch <= scale.x_high:
            x = scale.x(epoch)
            line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{colour}"/>'
            parts.append(f"<g><title>{html.escape(text)}</title>{line}</g>")
    parts += [_polyline(line, scale) for line in sorted(panel.lines, key=lambda line: -line.style)]
    label = html.escape(panel.title)
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    caption = f'<figcaption>{label} <span class="soft">by epoch</span></figcaption>'
    return f'<figure id="{panel.key}">{caption}{picture}{_legend(panel.lines)}</figure>'


class Scale:
    """Maps epochs and values to the view box."""

    def __init__(self, panel: Panel) -> None:
        points = [point for line in panel.lines for point in line.points if not panel.log or point[1] > 0]
        xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [1.0]
        self.log = panel.log
        self.x_low, self.x_high = min(0.0, *xs, 0.0), max(*xs, 1e-9)
        low, high = (math.log10(min(ys)), math.log10(max(ys))) if panel.log else (min(ys), max(*ys, panel.least))
        if not panel.log and 0 < low < 0.5 * high or 0 < low == high:
            low = 0.0
        room = 0.04 * (high - low) or (0.5 if panel.log else abs(high) / 10 or 1.0)
        self.low, self.high = low - room * (low != 0 or panel.log), high + room

    def x(self, epoch: float) -> float:
        """Return the place of an epoch."""
        return LEFT + (epoch - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the place of a value."""
        place = math.log10(value) if self.log else value
        return HEIGHT - BOTTOM - (place - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers between two others, about `count` of them."""
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next((unit * m for m in (1, 2, 2.5, 5) if unit * m >= rough), 10 * unit)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(scale: Scale, panel: Panel) -> list[str]:
    parts = []
    values = ticks(scale.low, scale.high)
    if panel.log:
        decades = range(math.ceil(scale.low), math.floor(scale.high) + 1)
        values = [10.0**k for k in decades[:: max(1, len(decades) // 5)]]
        if len(values) < 3:
            between = [m * 10.0**k for k in range(math.floor(scale.low), math.ceil(scale.high)) for m in (1, 2, 5)]
            values = [value for value in between if scale.low <= math.log10(value) <= scale.high]
    for value in values:
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for epoch in ticks(scale.x_low, scale.x_high):
        x = scale.x(epoch)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{number(epoch)}</text>')
    return parts


def number(value: float) -> str:
    """Return a number as short as an axis needs it."""
    if value and not 1e-2 <= abs(value) < 1e5:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def _polyline(line: Line, scale: Scale) -> str:
    points = [(x, y) for x, y in thinned(line.points) if not scale.log or y > 0]
    places = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
    width, opacity = (1.0, 0.45) if line.style == 3 else (1.8, 1.0)
    dots = "".join(
        f'<circle cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="2.2" fill="{line.colour}"/>'
        for x, y in (points if len(points) < 40 and line.style != 3 else ())
    )
    return (
        f'<polyline points="{places}" fill="none" stroke="{line.colour}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}" stroke-dasharray="{DASHES[line.style]}"/>{dots}'
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most MOST_POINTS points: of each group the lowest and the highest, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept = []
    for at in range(0, len(points), size):
        group = points[at : at + size]
        kept += sorted({min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])})
    return kept


def _legend(lines: Sequence[Line]) -> str:
    labelled = [line for line in lines if line.label]
    items = "".join(
        f'<li><svg viewBox="0 0 26 8"><line x1="0" x2="26" y1="4" y2="4" stroke="{line.colour}" stroke-width="2.5" '
        f'stroke-opacity="{0.45 if line.style == 3 else 1}" stroke-dasharray="{DASHES[line.style]}"/></svg>'
        f"{html.escape(line.label)}</li>"
        for line in labelled
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def heat_map(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], *, title: str) -> str:
    """Return a table of colours, which stand for the logarithms of the values, with names for rows and columns."""
    finite = [math.log10(v) for line in values for v in line if v > 0 and math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    side, left, top = 9, 190, 14
    width = left + max(260, side * len(columns)) + 10
    cell = (width - left - 10) / max(1, len(columns))
    parts = []
    for k, (name, line) in enumerate(zip(rows, values)):
        y = top + k * side
        parts.append(f'<text x="{left - 5}" y="{y + 7.5}" text-anchor="end" class="small">{html.escape(name)}</text>')
        for j, value in enumerate(line):
            if value > 0 and math.isfinite(value):
                share = (math.log10(value) - low) / (high - low or 1.0)
                tip = f"{name}, epoch {columns[j]}: {value:.3g}"
                parts.append(
                    f'<rect x="{left + j * cell:.1f}" y="{y}" width="{cell + 0.2:.1f}" height="{side}" '
                    f'fill="{shade(share)}"><title>{html.escape(tip)}</title></rect>'
                )
    for j in range(0, len(columns), max(1, math.ceil(len(columns) * 30 / (width - left)))):
        x = left + (j + 0.5) * cell
        parts.append(f'<text x="{x:.1f}" y="{top - 4}" text-anchor="middle" class="small">{columns[j]}</text>')
    height = top + side * len(rows) + 4
    picture = f'<svg viewBox="0 0 {width:.0f} {height}" role="img" aria-label="{title}">{"".join(parts)}</svg>'
    key = (
        f'<ul class="legend"><li><span class="shade" style="background:{shade(0)}"></span>{10**low:.2g}</li>'
        f'<li><span class="shade" style="background:{shade(1)}"></span>{10**high:.2g}</li></ul>'
    )
    return f'<figure class="wide" id="layers"><figcaption>{title}</figcaption>{picture}{key}</figure>'


def shade(share: float) -> str:
    """Return a colour from dark blue over green to yellow, which also differ in brightness."""
    stops = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    k = min(int(place), len(stops) - 2)
    mixed = (round(a + (b - a) * (place - k)) for a, b in zip(stops[k], stops[k + 1]))
    return "#" + "".join(f"{value:02x}" for value in mixed)
