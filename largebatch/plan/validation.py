"""Predictions beside published and measured runs, failures included. No constant is fitted to any of these.

    python -m largebatch.plan validate docs/planner.csv         runs of others, and our own
    python -m largebatch.plan validate A/step.csv B/step.csv    your own steps, predicted from the first

A row of docs/planner.csv has a figure and the options of its plan. "counted": predicted from the rates of the device
alone. "from RUN": with the speed that gives the figure of that run, which is then no prediction.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from largebatch.config import DataConfig, RunConfig, TrainConfig
from largebatch.files.table import Row as Cells
from largebatch.files.table import read_table
from largebatch.plan.calibrate import NUMBER, joined, predicted
from largebatch.plan.constants import IMAGENET_IMAGES
from largebatch.plan.memory import of_rank
from largebatch.plan.run import HOUR, run_of
from largebatch.plan.step import Cluster, Speed, step_of
from largebatch.plan.trace import Pass, trace

COLUMNS = ("group", "run", "figure", "published", "from", "options", "source")
# By figure: hours, images per second, a step with its images or without, the passes of a rank, their peak.
UNITS = {"run": "h", "rate": "img/s", "step": "s", "resident": "s", "passes": "s", "memory": "MiB"}
ITSELF = "itself"  # in the column `from` of a run that only gives its speed to others

Read = Callable[[Sequence[str]], tuple[TrainConfig, Cluster]]


@dataclass(frozen=True)
class Row:
    """A published or measured figure and its prediction."""

    group: str
    what: str
    unit: str
    published: float
    predicted: float
    given: str
    source: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def validated(paths: Sequence[Path], read: Read) -> list[Row]:
    """Return the rows of published runs, or of one's own steps. read: reads the options of a plan."""
    first = read_table(paths[0], (), what="TABLE", expected="a table of runs")
    if first and "options" not in first[0]:
        return [*compared(paths)]
    cells = read_table(paths[0], COLUMNS, what="TABLE", expected="a table of published runs, as docs/planner.csv")
    return [*published(cells, read)]


def published(cells: Sequence[Cells], read: Read) -> Iterator[Row]:
    runs = {row["run"]: row for row in cells}
    for row in cells:
        figure, source = row["figure"], row["from"]
        if figure not in UNITS or source not in ("", ITSELF, *runs) or not NUMBER.fullmatch(row["published"]):
            raise ValueError(
                f"TABLE has the run {row['run']!r} with the figure {figure!r}, published {row['published']!r}, from "
                f"{source!r}: expected one of {', '.join(UNITS)}, a number above 0, and nothing, {ITSELF} or a run."
            )
        if row["from"] == ITSELF:
            continue
        given, speed = "counted", Speed()
        if row["from"]:
            given, speed = f"from {row['from']}", speed_of(runs[row["from"]], read)
        found, unit = predict(row, read, speed), UNITS[row["figure"]]
        yield Row(row["group"], row["run"], unit, float(row["published"]), found, given, row["source"])


def predict(row: Cells, read: Read, speed: Speed) -> float:
    config, cluster = read(row["options"].split())
    one = counted(config, cluster)
    if row["figure"] == "memory":
        rank = of_rank(config, one, cluster.device, ranks=cluster.ranks)
        return (rank.activations + rank.workspace) / 2**20
    step = step_of(config, one, cluster, speed)
    if row["figure"] == "run":
        return run_of(config, one, cluster, step, speed, num_images=int(IMAGENET_IMAGES.value)).seconds / HOUR
    if row["figure"] == "rate":
        return config.data.global_batch_size / step.seconds
    return {"step": step.seconds, "resident": step.seconds - step.input, "passes": step.compute}[row["figure"]]


def speed_of(row: Cells, read: Read) -> Speed:
    rises = -1 if row["figure"] == "rate" else 1  # with the time of a pass
    return Speed(root(lambda factor: rises * (predict(row, read, Speed(factor)) - float(row["published"]))))


def root(function: Callable[[float], float]) -> float:
    """Return the zero of an increasing function between 0.01 and 100, to 1e-6 of it, by bisection."""
    low, high = 0.01, 100.0
    while high > low * (1 + 1e-6):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return low


def counted(config: TrainConfig, cluster: Cluster) -> Pass:
    micro = DataConfig(micro_batch_size=config.data.micro_batch_size)
    run = RunConfig(precision=config.run.precision)
    return _counted(TrainConfig(model=config.model, loss=config.loss, data=micro, run=run), cluster.device.kind)


_counted = cache(lambda config, kind: trace(config, device=kind))


def compared(paths: Sequence[Path]) -> Iterator[Row]:
    tables = joined(paths)
    found = predicted(tables)
    if found is None:
        raise ValueError("The tables are of a GPU that is not known.")
    first = tables[0]
    for table, seconds in list(zip(tables, found))[1:]:
        source = f"measured: {table.hardware}, {table.date}; {first.name} took {first.seconds:.4g} s"
        yield Row("c", table.name, "s", table.seconds, seconds, f"from {first.name}", source)


def lines(found: Iterable[Row]) -> Iterator[str]:
    head = ("", "run", "published or measured", "predicted", "error", "given")
    found = list(found)
    yield from (f"| {' | '.join(head)} |", "|---|---|---|---|---|---|")
    for row in found:
        figures = f"{row.published:,.4g} {row.unit}", f"{row.predicted:,.4g}", f"{100 * row.error:+.0f} %"
        yield f"| {' | '.join((row.group, row.what, *figures, row.given))} |"
    yield from ("", "sources: " + "; ".join(dict.fromkeys(f"({row.group}) {row.source}" for row in found)))
