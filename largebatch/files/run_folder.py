"""The folder of a run: the names of its files, and how they are written and read.

It may be somebody else's, or that of a run that was killed: damaged lines are left out.
"""

import csv
import json
import math
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from largebatch.files.atomic import atomic_file

Row = dict[str, float]
CHECKPOINTS, BEST = "checkpoints", "best"
PLACE, FAR = ("step", "epoch", "images", "time"), 1e15  # a row is left out if it is at a place that no run reaches


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.config, self.log, self.lock = path / "config.yaml", path / "log.txt", path / ".lock"
        self.steps, self.epochs, self.layers = path / "steps.csv", path / "epochs.csv", path / "layers.csv"
        self.starts, self.curves, self.tensorboard = path / "starts.jsonl", path / "curves.png", path / "tensorboard"
        self.predictions, self.report = path / "predictions.csv", path / "report.html"
        self.checkpoints, self.best = path / CHECKPOINTS, path / CHECKPOINTS / BEST

    @classmethod
    def of(cls, place: str | Path) -> "RunFolder":
        """Return the run to which a checkpoint, or a file in it, belongs; other places count as runs themselves."""
        run, resolved = cls(place), Path(place).resolve()
        for path in (run.path, run.path.parent, resolved, resolved.parent):
            of_run = path.parent.name == CHECKPOINTS and (path.name.isdecimal() or path.name == BEST)
            if of_run and not run.config.is_file():
                return cls(path.parent.parent)
        return run

    def records(self) -> list[Path]:
        """Return the files beside the checkpoints in which a resumed run goes on."""
        own = (self.config, self.log, self.steps, self.epochs, self.layers, self.starts, self.curves)
        return [path for path in (*own, *self.tensorboard.glob("*")) if path.is_file()]

    def check(self) -> "RunFolder":
        """Return this folder; ValueError if it is not the folder of a run, OSError if it may not be read."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISREG(self.config.stat().st_mode):
                return self
        why = "is not a run folder: expected a config.yaml in it; give the --run.folder of a run."
        raise ValueError(f"{self.path} {why}")

    def write_config(self, text: str) -> None:
        with atomic_file(self.config) as file:
            file.write(text.encode())

    def read_log(self) -> str:
        return _text(self.log)

    def read_lines(self) -> Iterator[Any]:
        for line in _text(self.starts).splitlines():
            with suppress(ValueError, RecursionError):
                yield json.loads(line)

    def add_line(self, content: dict[str, Any]) -> None:
        """Add a line to starts.jsonl, behind one that may be cut off."""
        cut_off = self.starts.is_file() and not self.starts.read_bytes().endswith(b"\n")
        with open(self.starts, "a") as file:
            file.write("\n" * cut_off + json.dumps(content) + "\n")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a run's CSV file as numbers, with nan for empty cells."""
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        try:
            rows = [_numbers(cells) for cells in csv.DictReader(file)]
        except csv.Error as error:
            raise ValueError(f"{path} is not the table of a run: {error}.") from None
    return [row for row in rows if "step" in row and not any(abs(row.get(name, 0)) > FAR for name in PLACE)]


def _numbers(cells: dict[str, str]) -> Row:
    try:
        return {name: float(cell) if cell != "" else math.nan for name, cell in cells.items()}
    except (TypeError, ValueError):  # a cell is missing, is one too many or is not a number
        return {}
