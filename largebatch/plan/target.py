"""Hours to a target: the epochs that a batch needs, and the number of GPUs that costs least or takes the least time.

    --target TABLE.csv    epochs of one's own runs to the target: columns batch and epochs, or batch and steps; or the
                          results.csv of `python -m largebatch.reproduce`, of which the rows of --optim.name count
    --target lars, lamb   MLPerf's points: how many times more epochs another batch takes than that of the plan, whose
                          duration is taken to reach the target

Between two batches of the points the logarithm of the epochs is linear in that of the batch. No batch outside of them
is planned. The error of an interpolation is the largest one of a point that is left out.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

from largebatch.config import TrainConfig, duration_images
from largebatch.files.table import Row, read_table
from largebatch.plan.calibrate import NUMBER
from largebatch.plan.planning import Plan, fitted, on_gpus
from largebatch.plan.run import failures_of

# Batch, and the mean length of 10 to 28 runs to the target: https://github.com/mlcommons/logging, in
# mlperf_logging/rcp_checker.
POINTS = {
    # ResNet-50 on ImageNet to 75.9 %, epochs: training_4.0.0/rcps_resnet.json
    "lars": {
        1632: 35.0, 3264: 35.2, 4096: 40.0, 8192: 42.0, 13056: 45.4, 32768: 56.0, 49152: 68.0, 58880: 79.9,
        65536: 84.5, 67840: 85.857,
    },
    # BERT to a masked accuracy of 72 %, millions of sequences: training_5.0.0/rcps_bert.json
    "lamb": {
        256: 2.553, 448: 2.411, 1536: 2.778, 3072: 2.768, 4096: 2.843, 4608: 2.795, 6144: 3.321, 6912: 3.596,
        8192: 4.191, 8704: 4.278, 12288: 4.47, 13056: 4.633, 16384: 5.504,
    },
}  # fmt: skip
EXPECTED = "lars, lamb, or a CSV file with the columns batch and epochs, or batch and steps"
REACHED = ("optimizer", "purpose", "epochs", "steps", "steps_to_target")  # columns of reproduce's results.csv
MOST_GPUS = 8192


@dataclass(frozen=True)
class Curve:
    """The epochs to a target at each batch."""

    source: str
    points: Sequence[tuple[float, float]]  # batch and epochs, at least two

    def epochs(self, batch: float) -> float:
        (first, _), (last, _) = self.points[0], self.points[-1]
        if not first <= batch <= last:
            raise ValueError(
                f"--global-batch is {batch:g}, and --target {self.source} has batches from {first:g} to {last:g}: "
                "give one of these, as nothing is known outside."
            )
        (below, few), (above, many) = next(pair for pair in pairwise(self.points) if batch <= pair[1][0])
        return few * (many / few) ** (math.log(batch / below) / math.log(above / below))

    def errors(self) -> dict[float, float]:
        """Return, for each point between the first and the last, the error of its epochs if it is left out."""
        inner = range(1, len(self.points) - 1)
        others = (Curve(self.source, [*self.points[:n], *self.points[n + 1 :]]) for n in inner)
        return {batch: one.epochs(batch) / known - 1 for (batch, known), one in zip(self.points[1:-1], others)}

    @property
    def factor(self) -> float:
        """The largest of these errors, either way, as a factor of at least 1."""
        return math.exp(max(abs(math.log1p(error)) for error in self.errors().values()))


@dataclass(frozen=True)
class Choice:
    """A number of GPUs with the batch that reaches the target in the shortest time. seconds: with failures."""

    gpus: int
    batch: int
    epochs: float
    seconds: float


def curve_of(target: str, config: TrainConfig, *, num_images: int) -> Curve:
    """Return the curve of a --target; ValueError for a table that has none, or not the batch of the config."""
    curve = Curve(target, [*POINTS[target].items()] if target in POINTS else _points(target, config, num_images))
    at_batch, batch = curve.epochs(config.data.global_batch_size), config.data.global_batch_size
    if target not in POINTS:
        return curve
    images = duration_images(config.run.duration, option="--run.duration", num_samples=num_images, batch_size=batch)
    times = images / num_images / at_batch
    return replace(curve, points=[(batch, times * epochs) for batch, epochs in curve.points])


def at_target(config: TrainConfig, curve: Curve, *, num_images: int) -> TrainConfig:
    """Return the config with the duration that reaches the target at its batch."""
    images = round(curve.epochs(config.data.global_batch_size) * num_images)
    return replace(config, run=replace(config.run, duration=f"{images} images"))


def choices(
    config: TrainConfig, plan: Plan, curve: Curve, *, num_images: int, hours_per_failure: float
) -> list[Choice]:
    """Return the fastest batch on 1, 2, 4 to `MOST_GPUS` GPUs, and on those of the plan, where one can be made."""
    found = []
    for gpus in sorted({2**k for k in range(MOST_GPUS.bit_length())} | {plan.cluster.ranks}):
        times = {}
        for at in _batches(config, curve, gpus):
            at = at_target(at, curve, num_images=num_images)
            _, run = on_gpus(at, plan, gpus, num_images=num_images)
            failures = failures_of(
                at, plan.counted, ranks=gpus, seconds=run.seconds, hours_per_failure=hours_per_failure
            )
            times[at.data.global_batch_size] = failures.seconds
        if times:
            batch = min(times, key=lambda batch: times[batch])
            found.append(Choice(gpus, batch, curve.epochs(batch), times[batch]))
    if not found:
        raise ValueError(
            f"--gpus is {plan.cluster.ranks}, and no number of GPUs can make a batch between those of --target "
            f"{curve.source}: give fewer."
        )
    return found


def _batches(config: TrainConfig, curve: Curve, gpus: int) -> Iterator[TrainConfig]:
    """Yield the config with the exact batches next to the points, and to four in each doubling between them."""
    first, last = curve.points[0][0], curve.points[-1][0]
    between = (first * 2 ** (quarter / 4) for quarter in range(math.ceil(4 * math.log2(last / first))))
    for wanted in sorted({*map(round, between), *(round(batch) for batch, _ in curve.points)}):
        try:
            at, _, _ = fitted(replace(config, data=replace(config.data, global_batch_size=wanted)), gpus)
        except ValueError:  # no whole replica, or fewer images than GPUs
            continue
        if first <= at.data.global_batch_size <= last:
            yield at


# -- a table of one's own ------------------------------------------------------------------------------------


def _points(target: str, config: TrainConfig, num_images: int) -> list[tuple[float, float]]:
    if not (path := Path(target)).exists():
        raise ValueError(f"--target is {target}: expected {EXPECTED}.")
    given = {"what": "--target", "expected": EXPECTED}
    rows = read_table(path, ("batch",), **given)
    if "steps_to_target" in rows[0]:
        return _checked(target, _reached(read_table(path, REACHED, **given), target, config.optim.name))
    column = "epochs" if "epochs" in rows[0] else "steps"
    pairs = [_numbers(target, row, "batch", column) for row in read_table(path, (column,), **given)]
    return _checked(target, [(batch, n if column == "epochs" else n * batch / num_images) for batch, n in pairs])


def _reached(rows: Sequence[Row], target: str, optimizer: str) -> Iterator[tuple[float, float]]:
    """Yield the batches at which all seeds of an optimizer reached the target, with their mean epochs to it."""
    own = [row for row in rows if (row["optimizer"], row["purpose"]) == (optimizer, "result")]
    if not own:
        names = ", ".join(sorted({row["optimizer"] for row in rows}))
        raise ValueError(f"--target is {target}, without a result of --optim.name {optimizer}: it has {names}.")
    for _, group in groupby(own, key=lambda row: row["batch"]):
        seeds = [*group]
        if all(row["steps_to_target"] for row in seeds):
            found = [_numbers(target, row, "batch", "epochs", "steps_to_target", "steps") for row in seeds]
            yield found[0][0], statistics.fmean(epochs * reached / steps for _, epochs, reached, steps in found)


def _numbers(target: str, row: Row, *columns: str) -> list[float]:
    for column in columns:
        if not NUMBER.fullmatch(row[column]):
            raise ValueError(f"--target is {target}, with {row[column]!r} as {column}: expected a number above 0.")
    return [float(row[column]) for column in columns]


def _checked(target: str, found: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    points = [*found]
    for (before, _), (batch, _) in pairwise(points):
        if batch <= before:
            raise ValueError(f"--target is {target}, in which batch {batch:g} follows {before:g}: they must rise.")
    if len(points) < 3:
        raise ValueError(f"--target is {target}, with {len(points)} batches: expected at least 3 that reach it.")
    return points
