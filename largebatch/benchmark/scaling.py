"""Join the tables of `largebatch.benchmark step` at several numbers of ranks into one table and one picture.

Images per second serve for weak scaling (the same work per rank) and strong scaling (the same global batch). Efficiency
is images per second and rank, relative to the fewest ranks.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from largebatch.files.table import write_table
from largebatch.plan.calibrate import Measured, predicted, read_measured

SAME = ("benchmark", "command", "hardware", "versions", "date")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="+", type=Path, metavar="STEP.CSV", help="what `benchmark step` wrote")


def run(options: argparse.Namespace) -> "Scaling":
    rows = sorted((read_measured(path, option="STEP.CSV") for path in options.tables), key=lambda row: row.ranks)
    for one, other in zip(rows, rows[1:]):
        if one.ranks == other.ranks:
            raise ValueError(f"Two tables have {one.ranks} ranks: give one table for each number of ranks.")
    if others := [row.benchmark for row in rows if not row.data]:
        raise ValueError(f"STEP.CSV is a table of {others[0]!r}: expected steps, of `largebatch.benchmark step`.")
    return Scaling(rows)


@dataclass
class Scaling:
    rows: Sequence[Measured]

    def rate(self, row: Measured) -> float:
        return row.ranks * row.images / row.seconds

    def efficiency(self, row: Measured) -> float:
        return self.rate(row) / row.ranks * self.rows[0].ranks / self.rate(self.rows[0])

    def figures(self, row: Measured) -> dict[str, str]:
        figures = {"seconds": row.seconds, "images_per_s": self.rate(row), "efficiency": self.efficiency(row)}
        return {name: f"{figure:.6g}" for name, figure in figures.items()}

    def write(self, folder: Path) -> None:
        """Print the table with the predictions of `largebatch.plan` from its first row; write scaling.csv and .png."""
        print(f"{'ranks':>6}{'s per step':>12}{'img/s':>12}{'efficiency':>12}{'plan: s per step':>18}")
        found = predicted(self.rows)
        plans = [f"{seconds:.4g}" for seconds in found] if found else ["-"] * len(self.rows)
        for row, plan in zip(self.rows, plans):
            measured = f"{row.ranks:6}{row.seconds:12.4g}{self.rate(row):12.1f}{100 * self.efficiency(row):10.1f} %"
            print(f"{measured}{plan:>18}")
        print(self.rows[-1].hardware, self.rows[-1].versions, self.rows[-1].date, sep="; ")
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{name: getattr(row, name) for name in ("ranks", *SAME)} | self.figures(row) for row in self.rows]
        write_table(folder / "scaling.csv", ("ranks", "seconds", "images_per_s", "efficiency", *SAME), rows)
        self._draw(folder / "scaling.png")

    def _draw(self, path: Path) -> None:
        from matplotlib.figure import Figure

        ranks, rates = [row.ranks for row in self.rows], [self.rate(row) for row in self.rows]
        figure = Figure(figsize=(7, 5), dpi=120, layout="constrained")
        axes = figure.subplots()
        perfect = [rates[0] * n / ranks[0] for n in ranks]
        axes.plot(ranks, perfect, "--", color="#888888", label="each rank adds as much as the first")
        axes.plot(ranks, rates, "o-", color="#c8442f", label="measured")
        for row, rate in zip(self.rows, rates):
            note = f"{rate:.4g}, {100 * self.efficiency(row):.0f} %"
            axes.annotate(note, (row.ranks, rate), (6, -12), textcoords="offset points", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ranks, [str(n) for n in ranks])
        axes.set(xlabel="ranks", ylabel="images per second")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{self.rows[-1].benchmark}\n{self.rows[-1].hardware}", fontsize=9, loc="left")
        figure.savefig(path, format="png")
