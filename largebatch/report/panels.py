"""The panels of a report: which lines of which runs they show, whoever draws them (svg.py, pictures.py)."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from largebatch import config
from largebatch.config import TrainConfig
from largebatch.hooks import curves
from largebatch.hooks.ratio_map import by_kind, tensors
from largebatch.hooks.starts import Start, read_starts
from largebatch.hooks.tables import EPOCHS, LAYERS, STEPS, TRUST, Row, read_rows

OF_A_STEP = ("loss", "grad_norm", "images_per_s", *TRUST)  # a short last step has others
# Colours that differ on a light and on a dark page, also for most who see colours otherwise (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Run:
    """The content of a run folder."""

    folder: Path
    name: str
    colour: str
    config: TrainConfig
    steps: list[Row]
    epochs: list[Row]
    layers: list[Row]
    starts: list[Start]


@dataclass(frozen=True)
class Line:
    """A line of a panel; points that are not finite are left out. style: of one run's lines, 0 is the main one."""

    label: str
    colour: str
    points: list[tuple[float, float]]
    style: int = 0


@dataclass(frozen=True)
class Panel:
    """A diagram over epochs. marks: (epoch, colour, text) of a start or an end of a run."""

    key: str
    title: str
    lines: list[Line]
    log: bool = False
    least: float = 0.0
    """to which the axis reaches at least: small shares look small"""
    marks: list[tuple[float, str, str]] = field(default_factory=list)


def read_run(folder: Path, name: str, colour: str) -> Run:
    """Read a run folder; ValueError if it is none."""
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is not a run folder: expected a config.yaml in it; give the --run.folder of a run.")
    return Run(
        folder,
        name,
        colour,
        config=config.load(str(folder / "config.yaml")),
        steps=read_rows(folder / STEPS),
        epochs=read_rows(folder / EPOCHS),
        layers=read_rows(folder / LAYERS),
        starts=read_starts(folder),
    )


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders; each is named by the end of its path that tells it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    depth = next((k for k in range(1, 99) if len({part[-k:] for part in parts}) == len(parts)), 99)
    names = ("/".join(part[-depth:]).lstrip("/") for part in parts)
    return [read_run(*of) for of in zip(folders, names, (COLOURS[k % len(COLOURS)] for k in range(len(folders))))]


def panels(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels that have a point; with several runs, each has its own colour in all of them."""
    marks = [mark for run in runs for mark in _marks(run)]
    steps = {
        "lr": ("learning rate", [("lr", "")], False),
        "grad_norm": ("gradient norm before clipping", [("grad_norm", "")], True),
        "trust": (
            "trust ratios: smallest, median, largest",
            [("trust_median", "median"), ("trust_min", "smallest"), ("trust_max", "largest")],
            True,
        ),
        "images_per_s": ("throughput (images per second)", [("images_per_s", "")], False),
        "stall": ("time that rank 0 waited for images (%)", [("stall", "")], False),
        "memory_gib": ("peak memory of rank 0 (GiB)", [("memory_gib", "")], False),
        "skipped": ("skipped steps, since the start of the run", [("skipped", "")], False),
        "hours": ("hours since the first start", [("hours", "")], False),
    }
    evaluations = [("train_loss", "training, mean"), ("eval_loss", "held out"), ("ema_loss", "averaged weights")]
    single = _lines(runs, "steps", [("loss", "training, single steps")], style=3)
    found = [
        Panel("loss", "loss", [*_lines(runs, "epochs", evaluations), *single]),
        Panel(
            "top1",
            "held-out accuracy (%)",
            _lines(runs, "epochs", [("top1", "top-1"), ("top5", "top-5"), ("ema_top1", "top-1, averaged weights")]),
        ),
        *(Panel(key, title, _lines(runs, "steps", columns), log) for key, (title, columns, log) in steps.items()),
    ]
    if any(math.isfinite(row.get("noise_scale", math.nan)) for run in runs for row in run.steps):
        lines = _lines(runs, "steps", [("noise_scale", "gradient noise scale"), ("batch", "global batch")])
        found.insert(5, Panel("noise_scale", "largest useful batch (images)", lines, True))
    shown = [panel for panel in found if any(y for line in panel.lines for _, y in line.points)]  # not zeros alone
    return [replace(panel, marks=marks, least=10.0 * (panel.key == "stall")) for panel in shown]


def _lines(runs: Sequence[Run], table: str, columns: list[tuple[str, str]], *, style: int = 0) -> list[Line]:
    """Return a line for each run and column. A single run has a colour for each column."""
    lines = []
    for run in runs:
        for number, (column, what) in enumerate(columns):
            rows = _rows(run, table, column)
            points = [(row["epoch"], _value(run, row, column)) for row in rows]
            points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
            label = what if len(runs) == 1 else f"{run.name}{', ' * bool(what)}{what}"
            colour = COLOURS[number % len(COLOURS)] if len(runs) == 1 else run.colour
            if points:
                lines.append(Line(label, colour, points, style or (0 if len(runs) == 1 else min(number, 2))))
    return lines


def _rows(run: Run, table: str, column: str) -> list[Row]:
    if column == "batch":
        return curves.batches(run.steps)
    if column == "train_loss":
        return curves.at_middles(run.epochs)
    rows: list[Row] = getattr(run, table)
    return curves.whole_steps(rows) if column in OF_A_STEP else rows


def _value(run: Run, row: Row, column: str) -> float:
    if column != "hours":
        return row.get(column, math.nan)
    began = run.starts[0].time if run.starts else next((r["time"] for r in run.steps if "time" in r), math.nan)
    return (row.get("time", math.nan) - began) / 3600


def _marks(run: Run) -> list[tuple[float, str, str]]:
    """Return the places at which a run was stopped early, killed or resumed."""
    if not run.steps:
        return []
    return [(epoch_of(event.step, run.steps), run.colour, event.text) for event in history(run) if event.on_axis]


def epoch_of(step: int, rows: Sequence[Row]) -> float:
    """Return the epoch after a step, between the rows around it: the steps of a batch ramp differ in length.

    Steps after the last row are like those before it.
    """
    steps, epochs = ([0.0, *(row[name] for row in rows)] for name in ("step", "epoch"))
    after = min(bisect.bisect_left(steps, step, lo=1), len(rows))
    pace = (epochs[after] - epochs[after - 1]) / (steps[after] - steps[after - 1])
    return epochs[after] + (step - steps[after]) * pace


@dataclass(frozen=True)
class Event:
    """A line of a run's history."""

    time: float
    step: int
    text: str
    on_axis: bool = True


def history(run: Run) -> list[Event]:
    """Return the starts and ends of a run, oldest first."""
    events = []
    for number, start in enumerate(run.starts):
        resumed = f"resumed after step {start.step}" if start.step else "started"
        again = " (the start before was killed)" if number and run.starts[number - 1].ended is None else ""
        hosts = ", ".join(start.hosts[:4]) + (f" and {len(start.hosts) - 4} more" if len(start.hosts) > 4 else "")
        place = f"{start.ranks} ranks on {hosts} by {start.launcher}" if start.ranks > 1 else f"1 rank on {hosts}"
        events.append(Event(start.time, start.step, f"{resumed}{again}: {place}", on_axis=number > 0))
        if start.ended is not None:
            reason = f"stopped early after step {start.last_step}: {start.reason}" if start.reason else ""
            told = reason or f"ended after step {start.last_step}"
            events.append(Event(start.ended, start.last_step or 0, told, on_axis=bool(start.reason)))
    return events


def layer_names(run: Run) -> list[str]:
    """Return the tensors in layers.csv, those of a kind after each other."""
    return [name for names in by_kind(tensors(run.layers)).values() for name in names]


def has_map(run: Run) -> bool:
    """Return whether there are trust ratios of each tensor."""
    return bool(layer_names(run)) and any(math.isfinite(row.get(TRUST[1], math.nan)) for row in run.steps)
