"""The panels, and the lines of runs that they show. draw.py draws them."""

import bisect
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from largebatch import config
from largebatch.config import TrainConfig
from largebatch.files.run_folder import Row, RunFolder, read_rows
from largebatch.report.history import Start, events, read_starts
from largebatch.report.tables import TRUST

# Colours that differ on a light and on a dark page, also for most who see colours otherwise (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
OF_A_STEP = ("loss", "grad_norm", "images_per_s", *TRUST)  # a short last step has others
MAP = "trust ratio of each tensor (the first block of a kind is on top)"
# The title of each panel, and its columns: table, column, label, number of the colour, thin line behind the others.
KINDS: dict[str, tuple[str, tuple[tuple[str, str, str, int, bool], ...]]] = {
    "loss": (
        "loss",
        (
            ("steps", "loss", "training, single steps", 0, True),
            ("epochs", "train_loss", "training, mean", 0, False),
            ("epochs", "eval_loss", "held out", 1, False),
            ("epochs", "ema_loss", "held out, averaged weights", 2, False),
        ),
    ),
    "top1": (
        "held-out accuracy (%)",
        (
            ("epochs", "top5", "top-5", 1, True),
            ("epochs", "top1", "top-1", 1, False),
            ("epochs", "ema_top1", "top-1, averaged weights", 2, False),
        ),
    ),
    "lr": ("learning rate", (("steps", "lr", "", 0, False),)),
    "grad_norm": ("gradient norm before clipping", (("steps", "grad_norm", "", 0, False),)),
    "trust": (
        "trust ratios: smallest, median, largest",
        tuple(("steps", column, "", 0, column != TRUST[1]) for column in TRUST),
    ),
    "noise_scale": (
        "noise scale, an order of magnitude (images)",
        (("steps", "noise_scale", "gradient noise scale", 0, False), ("steps", "batch", "global batch", 1, False)),
    ),
    "images_per_s": ("throughput (images per second)", (("steps", "images_per_s", "", 0, False),)),
    "stall": ("time that rank 0 waited for images (%)", (("steps", "stall", "", 0, False),)),
    "memory_gib": ("peak memory of rank 0 (GiB)", (("steps", "memory_gib", "", 0, False),)),
    "skipped": ("skipped steps, since the start of the run", (("steps", "skipped", "", 0, False),)),
    "hours": ("hours since the first start", (("steps", "hours", "", 0, False),)),
}
ALWAYS = ("loss", "top1", "lr", "grad_norm")  # without a number, too
LIVE = (*ALWAYS, "trust", "noise_scale")  # in curves.png
LOG = ("grad_norm", "trust", "noise_scale")
LEAST = {"stall": 10.0}  # to which an axis reaches at least: small shares look small


@dataclass
class Run:
    """A run folder; its files are read when they are asked for."""

    folder: RunFolder
    name: str
    colour: str = COLOURS[0]

    @cached_property
    def config(self) -> TrainConfig:
        return config.load(str(self.folder.config))

    @cached_property
    def steps(self) -> list[Row]:
        return placed(read_rows(self.folder.steps))

    @cached_property
    def epochs(self) -> list[Row]:
        return placed(read_rows(self.folder.epochs))

    @cached_property
    def layers(self) -> list[Row]:
        """The rows of layers.csv, if there are several and the run has trust ratios."""
        rows = read_rows(self.folder.layers) if _has(self.steps, TRUST[1]) else []
        return rows if len(rows) > 1 and tensors(rows) else []

    @cached_property
    def starts(self) -> list[Start]:
        return read_starts(self.folder.path)


@dataclass(frozen=True)
class Line:
    """A line of a panel. dash: of one run's lines, 0 is the main one."""

    label: str
    colour: str
    points: list[tuple[float, float]]
    dash: int = 0
    thin: bool = False


@dataclass(frozen=True)
class Panel:
    """A diagram over epochs. marks: the epoch and the colour of a start or an end of a run. ticks: all of the axis."""

    key: str
    title: str
    lines: list[Line]
    log: bool = False
    least: float = 0.0
    marks: list[tuple[float, str]] = field(default_factory=list)
    across: str = "epoch"
    ticks: Sequence[float] = ()


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders, each named by the end of its path that differs; ValueError if one is not a run folder."""
    parts = [folder.resolve().parts for folder in folders]
    depth = next((k for k in range(1, 99) if len({part[-k:] for part in parts}) == len(parts)), 99)
    names = ("/".join(part[-depth:]).lstrip("/") for part in parts)
    runs = zip(folders, names, itertools.cycle(COLOURS))
    return [Run(RunFolder(folder).check(), name, colour) for folder, name, colour in runs]


def panels(runs: Sequence[Run], keys: Sequence[str] = tuple(KINDS)) -> list[Panel]:
    """Return the panels with these keys that have a number, and those of ALWAYS.

    A single run has a colour for each column; several runs have a colour each.
    """
    marks = [mark for run in runs for mark in _marks(run)]
    found = [
        Panel(key, KINDS[key][0], [*_lines(runs, key)], key in LOG, LEAST.get(key, 0.0), marks)
        for key in keys
        if key != "noise_scale" or any(_has(run.steps, key) for run in runs)  # not the batch alone
    ]
    shown = (any(y for line in panel.lines for _, y in line.points) for panel in found)  # not zeros alone
    return [panel for panel, has_numbers in zip(found, shown) if has_numbers or panel.key in ALWAYS]


def _lines(runs: Sequence[Run], key: str) -> Iterator[Line]:
    alone = len(runs) == 1
    for run in runs:
        dash = 0
        for table, column, what, colour, thin in KINDS[key][1]:
            points = [(row["epoch"], row.get(column, math.nan)) for row in _rows(run, table, column)]
            if points := [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]:
                label = what if alone else ", ".join(filter(None, (run.name if what or not thin else "", what)))
                yield Line(label, COLOURS[colour] if alone else run.colour, points, 0 if alone or thin else dash, thin)
            dash = min(dash + (not thin), 2)


def _rows(run: Run, table: str, column: str) -> list[Row]:
    if column == "batch":
        return batches(run.steps)
    if column == "train_loss":
        return at_middles(run.epochs)
    if column == "hours":
        times = [row for row in run.steps if "time" in row]
        began = run.starts[0].time if run.starts else times[0]["time"] if times else math.nan
        return [row | {"hours": (row["time"] - began) / 3600} for row in times]
    rows: list[Row] = getattr(run, table)
    return whole_steps(rows) if column in OF_A_STEP else rows


def placed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that say where in the run they are."""
    return [row for row in rows if all(_has([row], column) for column in ("epoch", "images"))]


def _has(rows: Sequence[Row], column: str) -> bool:
    return any(math.isfinite(row.get(column, math.nan)) for row in rows)


def at_middles(rows: list[Row]) -> list[Row]:
    """Return rows at the middle of the time since the row before, where their means belong."""
    begins = [0.0, *(row["epoch"] for row in rows)]
    return [row | {"epoch": (begin + row["epoch"]) / 2} for begin, row in zip(begins, rows)]


def whole_steps(rows: list[Row]) -> list[Row]:
    """Return the rows without that of a short last step, whose norm and rate are of fewer images."""
    if len(rows) < 2 or rows[-1]["step"] <= rows[-2]["step"]:
        return rows
    mean = (rows[-1]["images"] - rows[-2]["images"]) / (rows[-1]["step"] - rows[-2]["step"])
    return rows if mean > 0.999 * batches(rows[:-1])[-1]["batch"] else rows[:-1]


def batches(rows: list[Row]) -> list[Row]:
    """Return the global batch at each row: the mean since the row before, which lies between two phases of a ramp.

    It never shrinks, so a short last step does not count.
    """
    found, before, batch = [], {"step": 0.0, "images": 0.0}, 0.0
    for row in rows:
        if row["step"] > before["step"]:
            batch = max(batch, (row["images"] - before["images"]) / (row["step"] - before["step"]))
        found.append({"epoch": row["epoch"], "batch": batch})
        before = row
    return found


def _marks(run: Run) -> list[tuple[float, str]]:
    found = [event.step for event in events(run.starts) if event.on_axis and run.steps]
    return [(epoch_of(step, run.steps), run.colour) for step in found]


def epoch_of(step: int, rows: Sequence[Row]) -> float:
    """Return the epoch after a step, interpolated between the rows around it, extrapolated after the last."""
    steps, epochs = ([0.0, *(row[name] for row in rows)] for name in ("step", "epoch"))
    after = min(bisect.bisect_left(steps, step, lo=1), len(rows))
    pace = (epochs[after] - epochs[after - 1]) / (steps[after] - steps[after - 1])
    return epochs[after] + (step - steps[after]) * pace


def tensors(rows: Sequence[Row]) -> list[str]:
    return [name for name in (rows[0] if rows else {}) if name not in ("step", "epoch")]


def by_kind(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the tensors of each kind, such as attn.qkv of all blocks, in the order of the model.

    They stand together in the map: otherwise stripes would hide how the ratios change with depth.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[re.sub(r"(?<=\.)\d+(?=\.)", "*", name).removesuffix(".weight")].append(name)
    return dict(kinds)
