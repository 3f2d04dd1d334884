"""The speed of a device on a model, from a table that `largebatch.benchmark model` or `step` has written."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from largebatch.config import LossConfig, TrainConfig
from largebatch.devices import device_named, find_device, is_part
from largebatch.files.table import read_table
from largebatch.plan.planning import cluster_of
from largebatch.plan.step import Cluster, Speed, Step, pass_seconds, step_of
from largebatch.plan.trace import precision_of, trace
from largebatch.recipes import RECIPES

EXPECTED = "a table of `largebatch.benchmark model` or `step`, of this version"
COLUMNS = ("contender", "seconds", "benchmark", "hardware", "command", "versions", "date")
WORK = ("model", "img_size", "precision", "ranks", "micro_batch", "images", "cores", "data", "plain")
MEMORY = re.compile(r"_\d+gb$")
WHOLE = re.compile(r"[1-9]\d{0,11}", re.ASCII)
NUMBER = re.compile(r"(?=[^e]*[1-9])\d+(\.\d+)?(e[-+]?\d\d)?", re.ASCII)  # above 0


@dataclass(frozen=True)
class Measured:
    """The time of a step or of passes, from the table of a benchmark."""

    seconds: float  # median of the rounds of the first contender, which is ours
    model: str
    img_size: int
    precision: str
    ranks: int
    micro_batch: int
    images: int  # of a rank in that time
    hardware: str
    cores: float = 0.0  # of a CPU that each rank computed with; 0: a GPU computed
    data: str = ""  # where the images of steps came from; empty: passes alone were measured
    plain: bool = False  # without dropout, with the cross entropy of the classes alone
    benchmark: str = ""
    command: str = ""
    versions: str = ""
    date: str = ""

    @property
    def passes(self) -> int:
        return self.images // self.micro_batch

    @property
    def name(self) -> str:
        if not self.data:
            return f"{self.model}, passes of {self.micro_batch}"
        several = f" × {self.passes}" * (self.passes > 1)
        return f"{self.model}, {self.ranks} rank{'s' * (self.ranks > 1)} × {self.micro_batch}{several}"

    @property
    def config(self) -> TrainConfig:
        """The recipe of the model as the benchmark runs it: steps are without dropout."""
        config = RECIPES[self.model]() if self.model in RECIPES else TrainConfig()
        model = replace(config.model, name=self.model, img_size=self.img_size, num_classes=1000)
        if self.data or self.plain:
            model = replace(model, pos_drop_rate=0.0, proj_drop_rate=0.0)
        batch = self.ranks * self.images if self.data else self.micro_batch
        return replace(
            config,
            model=model,
            loss=LossConfig() if self.plain else config.loss,
            data=replace(config.data, global_batch_size=batch, micro_batch_size=self.micro_batch),
            run=replace(config.run, precision=self.precision),  # type: ignore[arg-type]  # one of its texts
        )


def read_measured(path: Path, *, option: str) -> Measured:
    rows = read_table(path, COLUMNS, what=option, expected=EXPECTED)
    first = rows[0]
    fits = all(WHOLE.fullmatch(first.get(name) or "") for name in ("img_size", "ranks", "micro_batch", "images"))
    fits = fits and first.keys() >= {*WORK} and first["precision"] in ("fp32", "bf16", "fp16")
    numbers = [f"1{first.get('cores')}", *(row["seconds"] for row in rows)]  # cores may be 0, or empty
    if not (fits and first["model"] and all(map(NUMBER.fullmatch, numbers))):
        raise ValueError(f"{option} is {path}, a table of {first['benchmark']!r}: expected {EXPECTED}.")
    return Measured(
        seconds=statistics.median(float(row["seconds"]) for row in rows if row["contender"] == first["contender"]),
        img_size=int(first["img_size"]),
        ranks=int(first["ranks"]),
        micro_batch=int(first["micro_batch"]),
        images=int(first["images"]),
        cores=float(first["cores"] or 0),
        plain=first["plain"] == "True",
        **{name: first[name] for name in ("model", "precision", "data", *COLUMNS[2:])},
    )


def calibrated(path: Path, config: TrainConfig, cluster: Cluster) -> Speed:
    """Return the speed of the config's model by a table; ValueError if it is of another model, size or device."""
    measured = read_measured(path, option="--calibrate")
    wanted = (config.model.name, config.model.img_size)
    if (measured.model, measured.img_size) != wanted:
        raise ValueError(
            f"--calibrate is {path}, measured with {measured.model} at {measured.img_size} px, and the plan is for "
            f"{wanted[0]} at {wanted[1]} px: measure that one, or leave --calibrate out."
        )
    precision = precision_of(config, cluster.device.kind)
    if measured.precision != precision:
        raise ValueError(
            f"--calibrate is {path}, measured in {measured.precision}, and the plan is for {precision}: "
            f"set --run.precision {measured.precision}."
        )
    _check_device(path, measured, cluster)
    data = replace(config.data, micro_batch_size=measured.micro_batch)
    if measured.data:
        data = replace(data, global_batch_size=measured.ranks * measured.images)
    on = replace(cluster, device=find_device("cpu").times(measured.cores)) if measured.cores else cluster
    factor = _factor(_step(measured, replace(config, data=data), on), measured.seconds)
    if factor <= 0:
        raise ValueError(
            f"--calibrate is {path}, whose steps take {measured.seconds:.3g} s, less than their reduction: measure on "
            "one rank."
        )
    return Speed(factor, f"{path}: {measured.hardware}, {measured.date}")


def _check_device(path: Path, measured: Measured, cluster: Cluster) -> None:
    """Refuse a table of another device or of a part of one; an unknown device may be the right one."""
    found, planned = device_named(measured.hardware), cluster.device
    name = "cpu" if measured.cores else found.name if found else planned.name
    if is_part(measured.hardware):
        advice = "measure on a whole one, or leave --calibrate out."
    elif MEMORY.sub("", name) == MEMORY.sub("", planned.name):  # a100 and a100_40gb compute alike
        return
    else:
        advice = f"give --gpu {name}, or leave --calibrate out."
    raise ValueError(
        f"--calibrate is {path}, measured on {measured.hardware}, and the plan is for {planned.name}: {advice}"
    )


def joined(paths: Sequence[Path]) -> list[Measured]:
    """Read the tables; those with the same title count as one."""
    by_title: dict[str, list[Measured]] = {}
    for path in dict.fromkeys(paths):
        table = read_measured(path, option="TABLE")
        by_title.setdefault(table.benchmark, []).append(table)
    return [
        replace(tables[0], seconds=statistics.median(table.seconds for table in tables)) for tables in by_title.values()
    ]


def predicted(tables: Sequence[Measured]) -> list[float] | None:
    """Return the time of each table, predicted from the first; None for an unknown GPU. All ranks are on one host."""
    steps: list[Step] = []
    for table in tables:
        device = find_device("cpu") if table.cores else device_named(table.hardware)
        if device is None:
            return None
        cluster = cluster_of(table.ranks, device.name, per_host=table.ranks, cores_per_rank=table.cores)
        steps.append(_step(table, table.config, cluster))
    factor = max(0.01, _factor(steps[0], tables[0].seconds))
    return [replace(step, compute=factor * step.compute).seconds for step in steps]


def _factor(step: Step, seconds: float) -> float:
    """Return the time of the passes as a multiple of the counted time, if the step takes `seconds`."""
    return (seconds - step.exposed - step.optimizer - step.input) / step.compute


def _step(measured: Measured, config: TrainConfig, cluster: Cluster) -> Step:
    """Return the counted step of a table; for a table of passes, the rest of the step is 0."""
    counted = trace(config, device=cluster.device.kind)
    if not measured.data:
        passes = measured.images / counted.images
        return Step(passes * pass_seconds(counted, cluster.device, measured.precision), 0.0, 0.0, 0.0)
    step = step_of(config, counted, replace(cluster, ranks=measured.ranks))
    # Cores that compute prepare the images themselves, unless these lie there.
    return step if measured.cores and measured.data != "resident" else replace(step, input=0.0)
