"""The CSV tables in the run folder: steps.csv has a row per logged step, epochs.csv a row per evaluation.

layers.csv has the trust ratio of each tensor in the step before an evaluation, if the optimizer computes them.
"""

import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path

from largebatch.files.run_folder import Row, read_rows

TRUST = ("trust_min", "trust_median", "trust_max")
# |G|^2 and tr(Sigma), averaged over rows, and their quotient, the gradient noise scale in images (noise_scale.py).
NOISE = ("grad_square", "grad_variance", "noise_scale")
# Measured columns, which differ when a run is repeated: seconds since the epoch, images per second, percent of the time
# that rank 0 waited for images, peak memory of rank 0, the slowest rank if it is too slow (slow_rank.py).
MEASURED = ("time", "images_per_s", "stall", "memory_gib", "slow_rank")
STEP_COLUMNS = (
    "step", "epoch", "images", "lr", "loss", "grad_norm", "images_per_s", "skipped", *TRUST, "time", "stall",
    "memory_gib", *NOISE, "slow_rank",
)  # fmt: skip
EMA = ("ema_loss", "ema_top1")
EPOCH_COLUMNS = (
    "step", "epoch", "images", "lr", "train_loss", "eval_loss", "top1", "top5", "images_per_s", "skipped", *EMA, "time",
)  # fmt: skip


class Table:
    """A CSV file with rows in the order of their steps, which a resumed run continues."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, columns

    def open(self, *, last_step: int) -> None:
        """Keep the rows up to `last_step`; the run writes the later ones again."""
        kept = [row for row in read_rows(self.path) if row["step"] <= last_step]
        unfinished = self.path.with_suffix(".tmp")
        self.file = open(unfinished, "w", newline="")
        self.writer = csv.DictWriter(self.file, self.columns)
        self.writer.writeheader()
        self.file.flush()
        for row in kept:
            self.append(row)
        os.replace(unfinished, self.path)  # the open file is renamed with it

    def append(self, row: Row) -> None:
        """Write a row and flush it, so that a kill of this process does not lose it."""
        self.writer.writerow({name: _cell(row.get(name, math.nan)) for name in self.columns})
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _cell(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.9g}"  # nine digits hold a float32
