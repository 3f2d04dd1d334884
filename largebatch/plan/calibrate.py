"""The speed of a device on a model, from a table that `largebatch.benchmark model` or `step` has written."""

import csv
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from largebatch.config import LossConfig, TrainConfig
from largebatch.plan.constants import device_named, find_device
from largebatch.plan.planning import cluster_of
from largebatch.plan.step import Cluster, Speed, Step, pass_seconds, precision_of, step_of
from largebatch.plan.trace import trace
from largebatch.recipes import RECIPES

STEP = re.compile(
    r"^training step, (?P<model>[\w./]+) at (?P<side>\d+) px, (?P<precision>\w+), "
    r"(?P<batch>\d+) = (?P<ranks>\d+) ranks × (?P<micro>\d+) micro-batch × (?P<passes>\d+) pass"
)
MODEL = re.compile(
    r"^(?P<model>[\w./]+) at (?P<side>\d+) px, forward and backward, (?P<precision>\w+), batch (?P<micro>\d+)"
)
CORES = re.compile(r"cores per rank: ([\d.]+)")
RESIDENT = re.compile(r"--data[ =]resident\b")
MEMORY = re.compile(r"_\d+gb$")
PLAIN = re.compile(r"--plain\b")
THREADS = re.compile(r"threads per rank: (\d+)")


@dataclass(frozen=True)
class Measured:
    """The time of a step or of passes, as a table of a benchmark has it."""

    title: str
    hardware: str
    command: str
    date: str
    seconds: float
    """median of the rounds of the first contender, which is ours"""
    images: int
    """of a rank in that time"""

    @property
    def match(self) -> re.Match[str] | None:
        """The title, taken apart; None: that of another benchmark."""
        return STEP.match(self.title) or MODEL.match(self.title)

    @property
    def name(self) -> str:
        """A short name of the work."""
        match = self.match
        if not match:
            return self.title
        if match.re is MODEL:
            return f"{match['model']}, passes of {match['micro']}"
        ranks, passes = int(match["ranks"]), int(match["passes"])
        return f"{match['model']}, {ranks} rank{'s' * (ranks > 1)} × {match['micro']}" + f" × {passes}" * (passes > 1)

    @property
    def cores(self) -> float:
        """Cores of a CPU that each rank computed with; 0: a GPU computed."""
        found = CORES.search(self.hardware) or THREADS.search(self.hardware)
        return float(found[1]) if found else 0.0


def read_measured(path: Path, *, option: str) -> Measured:
    """Read a table; ValueError, one sentence, for a file that is none."""
    rows = _rows(path, option)
    first = [float(row["seconds"]) for row in rows if row["contender"] == rows[0]["contender"]]
    return Measured(
        title=rows[0]["benchmark"],
        hardware=rows[0]["hardware"],
        command=rows[0].get("command", ""),
        date=rows[0]["date"],
        seconds=statistics.median(first),
        images=int(rows[0]["images"]),
    )


def calibrated(path: Path, config: TrainConfig, cluster: Cluster) -> Speed:
    """Return the speed of the config's model by a table.

    ValueError, one sentence, for a file that is no such table, and for another model, image size or device.
    """
    measured = read_measured(path, option="--calibrate")
    match = measured.match
    if not match:
        raise ValueError(
            f"--calibrate is {path}, which is a table of {measured.title!r}: expected one of `largebatch.benchmark "
            "model` or `step`."
        )
    wanted = (config.model.name, config.model.img_size)
    if (match["model"], int(match["side"])) != wanted:
        raise ValueError(
            f"--calibrate is {path}, measured with {match['model']} at {match['side']} px, and the plan is for "
            f"{wanted[0]} at {wanted[1]} px: measure that one, or leave --calibrate out."
        )
    if match["precision"] != precision_of(config, cluster.device):
        raise ValueError(
            f"--calibrate is {path}, measured in {match['precision']}, and the plan is for "
            f"{precision_of(config, cluster.device)}: set --run.precision {match['precision']}."
        )
    _check_device(path, measured, cluster)
    config = replace(config, data=replace(config.data, micro_batch_size=int(match["micro"])))
    on = replace(cluster, device=find_device("cpu").times(measured.cores)) if measured.cores else cluster
    counted = trace(config, device=on.device.kind)
    if match.re is MODEL:
        compute = measured.images / counted.images * pass_seconds(counted, on.device, match["precision"])
        factor = measured.seconds / compute
    else:
        config = replace(config, data=replace(config.data, global_batch_size=int(match["batch"])))
        step = step_of(config, counted, replace(on, ranks=int(match["ranks"])))
        factor = _factor(_as_run(step, measured), measured.seconds)
    if factor <= 0:
        raise ValueError(
            f"--calibrate is {path}, whose steps take {measured.seconds:.3g} s, less than their reduction: measure on "
            "one rank."
        )
    return Speed(factor, f"{path}: {measured.hardware}, {measured.date}")


def _check_device(path: Path, measured: Measured, cluster: Cluster) -> None:
    """Refuse a table of another device; what is not known may be the right one."""
    found, planned = device_named(measured.hardware), cluster.device
    name = "cpu" if measured.cores else found.name if found else planned.name
    if MEMORY.sub("", name) != MEMORY.sub("", planned.name):  # a100 and a100_40gb compute alike
        raise ValueError(
            f"--calibrate is {path}, measured on {measured.hardware}, and the plan is for {planned.name}: "
            f"give --gpu {name}, or leave --calibrate out."
        )


def joined(paths: Sequence[Path], *, option: str) -> list[Measured]:
    """Read tables, those of one title as one; ValueError, one sentence, for a file that is none of steps or passes."""
    by_title: dict[str, list[Measured]] = {}
    for path in dict.fromkeys(paths):
        table = read_measured(path, option=option)
        if not table.match:
            raise ValueError(
                f"{option} is {path}, a table of {table.title!r}: expected one of `largebatch.benchmark model` or "
                "`step`."
            )
        by_title.setdefault(table.title, []).append(table)
    return [
        replace(tables[0], seconds=statistics.median(table.seconds for table in tables)) for tables in by_title.values()
    ]


def predicted(tables: Sequence[Measured]) -> list[float] | None:
    """Return the time of each table's steps or passes, if the first is as it was measured.

    The ranks of each table are on one host. None if one of the tables is not of a model that can be counted, or of a
    GPU that is not known.
    """
    if not all(table.cores or device_named(table.hardware) for table in tables):
        return None
    steps = [_step(table.match, table) for table in tables if table.match]
    if len(steps) < len(tables):
        return None
    factor = max(0.01, _factor(steps[0], tables[0].seconds))
    return [replace(step, compute=factor * step.compute).seconds for step in steps]


def _factor(step: Step, seconds: float) -> float:
    """Return the time of the passes as a multiple of the counted one, in a step that takes so long."""
    return (seconds - step.exposed - step.optimizer - step.input) / step.compute


def _as_run(step: Step, table: Measured) -> Step:
    """Return a step with the time of its images, which cores that compute prepare themselves, unless they lie there."""
    decodes = table.cores and not RESIDENT.search(table.command)
    return step if decodes else replace(step, input=0.0)


def _step(match: re.Match[str], table: Measured) -> Step:
    """Return the step of a table, from counted kernels alone; passes alone are a step without anything else."""
    config, ranks = _config(match, table.command), 1 if match.re is MODEL else int(match["ranks"])
    device = device_named(table.hardware) or find_device("cpu")
    cluster = cluster_of(ranks, device.name, per_host=ranks, cores_per_rank=table.cores)
    counted = trace(config, device=device.kind)
    if match.re is MODEL:
        passes = table.images / counted.images
        return Step(passes * pass_seconds(counted, cluster.device, match["precision"]), 0.0, 0.0, 0.0)
    return _as_run(step_of(config, counted, cluster), table)


def _config(match: re.Match[str], command: str) -> TrainConfig:
    """Return the recipe of a model as a benchmark runs it: without dropout, unless `model` has no --plain."""
    name, side, precision = match["model"], int(match["side"]), match["precision"]
    config = RECIPES[name]() if name in RECIPES else TrainConfig()
    model = replace(config.model, name=name, img_size=side, num_classes=1000)
    if match.re is STEP or PLAIN.search(command):
        model = replace(model, pos_drop_rate=0.0, proj_drop_rate=0.0)
    batch = int(match["micro"] if match.re is MODEL else match["batch"])
    return replace(
        config,
        model=model,
        loss=LossConfig() if PLAIN.search(command) else config.loss,
        data=replace(config.data, global_batch_size=batch, micro_batch_size=int(match["micro"])),
        run=replace(config.run, precision=precision),  # type: ignore[arg-type]  # one of its texts
    )


def _rows(path: Path, option: str) -> list[dict[str, str]]:
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{option} is {path}, which cannot be read: {error}.") from None
    if not rows or not {"benchmark", "contender", "seconds", "images", "hardware", "date"} <= rows[0].keys():
        raise ValueError(f"{option} is {path}, which is no table of `largebatch.benchmark model` or `step`.")
    return rows
