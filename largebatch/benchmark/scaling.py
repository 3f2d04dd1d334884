"""Join the tables of `benchmark step` at several numbers of ranks into one table and one picture.

Images per second serve for weak scaling (the same work per rank) and strong scaling (the same global batch). Efficiency
is images per second and rank, relative to the run with the fewest ranks.
"""

import argparse
import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SAME = ("benchmark", "command", "hardware", "versions", "date")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("tables", nargs="+", type=Path, metavar="STEP.CSV", help="what `benchmark step` wrote")


def run(options: argparse.Namespace) -> "Scaling":
    """Read the tables. ValueError if one is not a table of steps, or if two have the same number of ranks."""
    rows = sorted((read(path) for path in options.tables), key=lambda row: row.ranks)
    for one, other in zip(rows, rows[1:]):
        if one.ranks == other.ranks:
            raise ValueError(f"Two tables have {one.ranks} ranks: give one table for each number of ranks.")
    return Scaling(rows)


@dataclass(frozen=True)
class Row:
    """The measurements at one number of ranks."""

    ranks: int
    seconds: float
    """median time of a step"""
    images_per_s: float
    """images per second of all ranks"""
    same: dict[str, str]
    """columns that are the same in every row of the table"""


def read(path: Path) -> Row:
    """Read the rounds of a table's first contender, which is ours."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or "ranks" not in rows[0] or rows[0]["images"] in ("", "0"):
        raise ValueError(
            f"{path} is not a table of training steps: make it with `python -m largebatch.benchmark step`."
        )
    first = [row for row in rows if row["contender"] == rows[0]["contender"]]
    seconds = statistics.median(float(row["seconds"]) for row in first)
    ranks = int(rows[0]["ranks"])
    return Row(ranks, seconds, ranks * int(rows[0]["images"]) / seconds, {name: rows[0][name] for name in SAME})


@dataclass
class Scaling:
    """Rows in order of ranks; all are compared with the first."""

    rows: Sequence[Row]

    def efficiency(self, row: Row) -> float:
        """Images per second and rank, relative to the smallest number of ranks."""
        return row.images_per_s / row.ranks * self.rows[0].ranks / self.rows[0].images_per_s

    def predicted(self) -> list[str]:
        """Return the steps that `largebatch.plan` predicts from the row with the fewest ranks, all on one host."""
        from largebatch.plan.calibrate import Measured, predicted

        found = predicted(
            [
                Measured(
                    title=row.same["benchmark"],
                    hardware=row.same["hardware"],
                    command=row.same["command"],
                    date=row.same["date"],
                    seconds=row.seconds,
                    images=round(row.images_per_s * row.seconds / row.ranks),
                )
                for row in self.rows
            ]
        )
        return [f"{seconds:.4g}" for seconds in found] if found else ["-"] * len(self.rows)

    def write(self, folder: Path) -> None:
        """Print the table, and write scaling.csv and scaling.png into `folder`."""
        print(f"{'ranks':>6}{'s per step':>12}{'img/s':>12}{'efficiency':>12}{'plan: s per step':>18}")
        for row, plan in zip(self.rows, self.predicted()):
            measured = f"{row.ranks:6}{row.seconds:12.4g}{row.images_per_s:12.1f}{100 * self.efficiency(row):10.1f} %"
            print(f"{measured}{plan:>18}")
        print(self.rows[-1].same["hardware"], self.rows[-1].same["versions"], self.rows[-1].same["date"], sep="; ")
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "scaling.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["ranks", "seconds", "images_per_s", "efficiency", *SAME])
            for row in self.rows:
                figures = [f"{x:.6g}" for x in (row.seconds, row.images_per_s, self.efficiency(row))]
                writer.writerow([row.ranks, *figures, *row.same.values()])
        self._draw(folder / "scaling.png")

    def _draw(self, path: Path) -> None:
        from matplotlib.figure import Figure

        ranks = [row.ranks for row in self.rows]
        figure = Figure(figsize=(7, 5), dpi=120, layout="constrained")
        axes = figure.subplots()
        perfect = [self.rows[0].images_per_s * n / ranks[0] for n in ranks]
        axes.plot(ranks, perfect, "--", color="#888888", label="each rank adds as much as the first")
        axes.plot(ranks, [row.images_per_s for row in self.rows], "o-", color="#c8442f", label="measured")
        for row in self.rows:
            note = f"{row.images_per_s:.4g}, {100 * self.efficiency(row):.0f} %"
            axes.annotate(note, (row.ranks, row.images_per_s), (6, -12), textcoords="offset points", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ranks, [str(n) for n in ranks])
        axes.set(xlabel="ranks", ylabel="images per second")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        same = self.rows[-1].same
        axes.set_title(f"{same['benchmark']}\n{same['hardware']}", fontsize=9, loc="left")
        figure.savefig(path, format="png")
