"""results.csv, a row for each trial, and the table of means and spreads that is computed from its rows.

Neither has times, so the same command writes the same bytes.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from largebatch.files import atomic_file
from largebatch.files.table import read_table, write_table
from largebatch.reproduce.contenders import CONTENDERS
from largebatch.reproduce.experiment import Experiment, Trial
from largebatch.reproduce.results import Result

COLUMNS = (
    "optimizer", "batch", "learning_rate", "purpose", "chosen", "seed", "epochs", "steps", "accuracy", "loss",
    "train_loss", "diverged", "target", "steps_to_target",
)  # fmt: skip
Row = dict[str, Any]


class Cell(NamedTuple):
    """An optimizer with a batch, over the seeds: mean and standard deviation of the accuracy in percent.

    steps_to_target: the mean over the seeds, None if one has not reached it.
    """

    optimizer: str
    batch: int
    rate: float
    accuracies: list[float]
    steps: int
    steps_to_target: float | None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds, of a sample; of one seed 0."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


def write(experiment: Experiment, folder: Path, results: Mapping[Trial, Result]) -> tuple[str, list[Cell]]:
    """Write results.csv and table.md; return the text of the table, and its cells."""
    file = folder / "results.csv"
    write_table(file, COLUMNS, rows(experiment, results))
    found = cells(read_table(file, COLUMNS, what="results.csv", expected="one of this program"))
    text = markdown(experiment, found)
    with atomic_file(folder / "table.md") as table:
        table.write(f"{text}\n".encode())
    return text, found


# -- the CSV -------------------------------------------------------------------------------------------------


def rows(experiment: Experiment, results: Mapping[Trial, Result]) -> list[Row]:
    """Return a row for each trial, cell by cell, the search first."""
    chosen = {(trial.contender, trial.batch, trial.lr) for trial in results if not trial.searches}
    return [
        row(experiment, trial, results[trial], (trial.contender, trial.batch, trial.lr) in chosen)
        for trial in experiment.wanted(results)
    ]


def row(experiment: Experiment, trial: Trial, result: Result, chosen: bool) -> Row:
    reached = None if trial.searches else result.steps_to(experiment.target)
    return {
        "optimizer": trial.contender,
        "batch": trial.batch,
        "learning_rate": trial.lr,
        "purpose": "search" if trial.searches else "result",
        "chosen": int(chosen),
        "seed": trial.seed,
        "epochs": experiment.epochs,
        **result.figures(),
        "target": experiment.target,
        "steps_to_target": "" if reached is None else reached,
    }


def cells(found: Sequence[Row]) -> list[Cell]:
    groups: dict[tuple[str, int], list[Row]] = {}
    for one in found:
        if one["purpose"] == "result":
            groups.setdefault((one["optimizer"], int(one["batch"])), []).append(one)
    return [_cell(*key, group) for key, group in groups.items()]


def _cell(optimizer: str, batch: int, group: Sequence[Row]) -> Cell:
    reached = [float(one["steps_to_target"] or "nan") for one in group]
    return Cell(
        optimizer,
        batch,
        rate=float(group[0]["learning_rate"]),
        accuracies=[float(one["accuracy"]) for one in group],
        steps=max(int(one["steps"] or 0) for one in group),
        steps_to_target=None if any(map(math.isnan, reached)) else statistics.fmean(reached),
    )


# -- the table -----------------------------------------------------------------------------------------------


def markdown(experiment: Experiment, found: Sequence[Cell]) -> str:
    """Return three small tables with an optimizer in each row and a batch in each column."""
    seeds, target = experiment.seeds, f"{experiment.target:g}"
    of_batch = {batch: [cell for cell in found if cell.batch == batch] for batch in experiment.batches}
    best = {batch: max(several, key=lambda cell: cell.mean) for batch, several in of_batch.items()}

    def accuracy(cell: Cell) -> str:
        text = f"{cell.mean:.1f} ± {cell.spread:.1f}"
        return f"**{text}**" if alike(cell, best[cell.batch]) else text

    def steps(cell: Cell) -> str:
        return "–" if cell.steps_to_target is None else f"{cell.steps_to_target:,.0f}"

    return "\n\n".join(
        (
            f"Held-out accuracy after {experiment.epochs} epochs in percent, mean ± standard deviation of {seeds} "
            "seeds. Bold: the best at this batch, and all whose range mean ± deviation meets its range.",
            _table(experiment, found, accuracy),
            f"Steps to {target} %, mean of the seeds, with an evaluation after each epoch; –: a seed did not reach it:",
            _table(experiment, found, steps),
            "Learning rate that the search chose:",
            _table(experiment, found, lambda cell: f"{cell.rate:g}"),
        )
    )


def alike(one: Cell, other: Cell) -> bool:
    return abs(one.mean - other.mean) <= one.spread + other.spread + 1e-9


def _table(experiment: Experiment, found: Sequence[Cell], text: Callable[[Cell], str]) -> str:
    texts = {(cell.optimizer, cell.batch): text(cell) for cell in found}
    steps = {cell.batch: cell.steps for cell in found}
    heads = [f"batch {batch:,} ({steps[batch]:,} steps)" for batch in experiment.batches]
    lines = [["optimizer", *heads]]
    for name in experiment.optimizers:
        lines.append([CONTENDERS[name].label, *(texts[name, batch] for batch in experiment.batches)])
    return aligned(lines)


def aligned(lines: list[list[str]]) -> str:
    """Return a table of Markdown; the first line has the heads."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(word.ljust(width) for word, width in zip(line, widths))} |" for line in lines)
