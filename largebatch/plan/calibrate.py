"""The speed of a device on a model, from a table that `largebatch.benchmark model` or `step` has written."""

import csv
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from largebatch.config import TrainConfig
from largebatch.plan.constants import device_named, find_device
from largebatch.plan.planning import cluster_of
from largebatch.plan.step import Cluster, Speed, pass_seconds, precision_of, step_of
from largebatch.plan.trace import trace
from largebatch.recipes import RECIPES

STEP = re.compile(
    r"^training step, (?P<model>[\w./]+) at (?P<side>\d+) px, (?P<precision>\w+), "
    r"(?P<batch>\d+) = (?P<ranks>\d+) ranks × (?P<micro>\d+) micro-batch × (?P<passes>\d+) pass"
)
MODEL = re.compile(
    r"^(?P<model>[\w./]+) at (?P<side>\d+) px, forward and backward, (?P<precision>\w+), batch (?P<micro>\d+)"
)


def calibrated(path: Path, config: TrainConfig, cluster: Cluster) -> Speed:
    """Return the speed of the config's model by the first contender of a table, which is ours.

    ValueError, one sentence, for a file that is no such table, and for another model or image size.
    """
    rows = _rows(path)
    title = rows[0]["benchmark"]
    match = STEP.match(title) or MODEL.match(title)
    if not match:
        raise ValueError(
            f"--calibrate is {path}, which is a table of {title!r}: expected one of `largebatch.benchmark model` or "
            "`step`."
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
    first = [float(row["seconds"]) for row in rows if row["contender"] == rows[0]["contender"]]
    seconds = statistics.median(first)
    micro = int(match["micro"])
    measured = replace(config, data=replace(config.data, micro_batch_size=micro))
    counted = trace(measured, device=cluster.device.kind)
    if match.re is MODEL:
        passes = int(rows[0]["images"]) / micro
        rest, compute = 0.0, passes * pass_seconds(counted, cluster.device, match["precision"])
    else:
        measured = replace(measured, data=replace(measured.data, global_batch_size=int(match["batch"])))
        step = step_of(measured, counted, replace(cluster, ranks=int(match["ranks"])))
        rest, compute = step.exposed + step.optimizer, step.compute
    if seconds <= rest:
        raise ValueError(
            f"--calibrate is {path}, whose steps take {seconds:.3g} s, less than their reduction: measure on one rank."
        )
    return Speed((seconds - rest) / compute, f"{path}: {rows[0]['hardware']}, {rows[0]['date']}")


def predicted_steps(titles: Sequence[str], seconds: float, *, hardware: str) -> list[float] | None:
    """Return the time of the steps with these titles, all on one host, if the first takes `seconds`.

    None for titles that do not describe steps of a model that can be counted.
    """
    matches = [STEP.match(title) for title in titles]
    found = [match for match in matches if match]
    if len(found) < len(titles):
        return None
    configs = [_config(match) for match in found]
    ranks = [int(match["ranks"]) for match in found]
    device = device_named(hardware) or find_device("cpu")
    cluster = cluster_of(ranks[0], device.name, per_host=max(ranks))
    counted = trace(configs[0], device=device.kind)
    first = step_of(configs[0], counted, cluster)
    speed = Speed(max(0.01, (seconds - first.exposed - first.optimizer) / first.compute))
    return [step_of(one, counted, replace(cluster, ranks=n), speed).seconds for one, n in zip(configs, ranks)]


def _config(match: re.Match[str]) -> TrainConfig:
    recipe = RECIPES.get(match["model"], TrainConfig)()
    return replace(
        recipe,
        model=replace(recipe.model, name=match["model"], img_size=int(match["side"]), num_classes=1000),
        data=replace(
            recipe.data, global_batch_size=int(match["batch"]), micro_batch_size=int(match["micro"])
        ),
        run=replace(recipe.run, precision=match["precision"]),  # type: ignore[arg-type]  # one of its texts
    )


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"--calibrate is {path}, which cannot be read: {error}.") from None
    if not rows or not {"benchmark", "contender", "seconds", "images", "hardware", "date"} <= rows[0].keys():
        raise ValueError(f"--calibrate is {path}, which is no table of `largebatch.benchmark model` or `step`.")
    return rows
