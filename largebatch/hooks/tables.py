"""The CSV files of a run.

Tables are CSV files in the run folder, with a row per step that was logged and a row per evaluation. They outlive the
process: a resumed run continues them, and the picture is drawn from them alone.
"""

import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, float]

TRUST = ("trust_min", "trust_median", "trust_max")
STEP_COLUMNS = ("step", "epoch", "images", "lr", "loss", "grad_norm", "images_per_s", "skipped", *TRUST)
EMA = ("ema_loss", "ema_top1")
EPOCH_COLUMNS = (
    "step",
    "epoch",
    "images",
    "lr",
    "train_loss",
    "eval_loss",
    "top1",
    "top5",
    "images_per_s",
    "skipped",
    *EMA,
)
STEPS, EPOCHS = "steps.csv", "epochs.csv"


class Table:
    """A CSV file of rows in the order of their steps, which a resumed run continues."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, columns

    def open(self, *, last_step: int) -> None:
        """Keep the rows up to `last_step`; the run repeats the others."""
        kept = [row for row in read_rows(self.path) if row["step"] <= last_step]
        unfinished = self.path.with_suffix(".tmp")
        self.file = open(unfinished, "w", newline="")
        self.writer = csv.DictWriter(self.file, self.columns)
        self.writer.writeheader()
        self.file.flush()
        for row in kept:
            self.append(row)
        os.replace(unfinished, self.path)  # the open file goes with it

    def append(self, row: Row) -> None:
        """Write a row and hand it to the system, so that a kill cannot take it back."""
        self.writer.writerow({name: _cell(row.get(name, math.nan)) for name in self.columns})
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file as numbers, empty cells as nan; a line that was cut short is left out."""
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        rows = [_numbers(cells) for cells in csv.DictReader(file)]
    return [row for row in rows if "step" in row]


def _numbers(cells: dict[str, str]) -> Row:
    try:
        return {name: float(cell) if cell != "" else math.nan for name, cell in cells.items()}
    except (TypeError, ValueError):  # cells are missing, or none of ours
        return {}


def _cell(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.9g}"  # nine digits hold a float32
