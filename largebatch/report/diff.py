"""Finds where two runs part, from what is in their folders: config.yaml, log.txt, the tables and the checkpoints."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from largebatch import checkpoint, config
from largebatch.checkpoint.snapshot import AVERAGE, WEIGHTS
from largebatch.config import TrainConfig
from largebatch.data.order import Plan
from largebatch.files.run_folder import Row, RunFolder, read_rows
from largebatch.report.panels import placed
from largebatch.report.tables import MEASURED
from zoo.weights import read_weights

PLACES = ("run.folder",)  # options in which all runs differ
NAME_AND_VERSION = r"(.+?) (\d.*|[0-9a-f]{8}|missing)"  # as preflight.versions writes them
SHOWN = 8  # options and columns in one line


@dataclass(frozen=True)
class Finding:
    """The comparison of one part of two runs. differs: None if the folders do not tell."""

    part: str
    differs: bool | None
    text: str

    def __str__(self) -> str:
        verdict = "unknown" if self.differs is None else "DIFFER" if self.differs else "same"
        return f"{verdict:<9}{self.part:<13}{self.text}"


def compare(one: Path, other: Path) -> list[Finding]:
    """Compare two run folders part by part; ValueError if one is not a run folder."""
    runs = RunFolder(one).check(), RunFolder(other).check()
    configs = [config.load(str(run.config)) for run in runs]
    steps, evaluations = ([read_rows(run.steps) for run in runs], [read_rows(run.epochs) for run in runs])
    return [
        compare_options(*configs),
        compare_versions(*map(_versions, runs)),
        compare_images(configs[0], configs[1], *steps),
        compare_rows("steps", *steps),
        compare_rows("evaluations", *evaluations),
        compare_tensors(one, other),
    ]


# -- what was asked for, and by what it was run ------------------------------------------------------------------


def compare_options(one: TrainConfig, other: TrainConfig) -> Finding:
    found = [(name, both) for name, both in config.differences(one, other).items() if name not in PLACES]
    if not found:
        return Finding("options", False, f"{len(config.options(one))} values")
    return Finding("options", True, _listed([f"--{name} {was} and {now}" for name, (was, now) in found]))


def compare_versions(one: dict[str, str], other: dict[str, str]) -> Finding:
    """Compare the versions of packages and the digest of our sources that the logs name last."""
    names = dict.fromkeys([*one, *other])
    both = ((name, one.get(name, "unknown"), other.get(name, "unknown")) for name in names)
    differing = [f"{name} {was} and {now}" for name, was, now in both if was != now]
    if not names:
        return Finding("versions", None, "no log.txt names them")
    return Finding("versions", bool(differing), _listed(differing) or f"{len(names)} packages")


def _versions(run: RunFolder) -> dict[str, str]:
    """Return the versions that a log names last: each start has a line."""
    lines = re.findall(r"Python \d+\..*, torch \d.*", run.read_log())
    found = (re.fullmatch(NAME_AND_VERSION, text) for text in lines[-1].split(", ")) if lines else ()
    return {match[1]: match[2] for match in found if match}


# -- images ------------------------------------------------------------------------------------------------------


def compare_images(one: TrainConfig, other: TrainConfig, rows: list[Row], other_rows: list[Row]) -> Finding:
    """Compare the images of each step by their numbers."""
    first, second = _plan(one, rows), _plan(other, other_rows)
    if first is None or second is None:
        by_noise = any(map(config.ramp.by_noise, (one, other)))
        noise = f", or {config.ramp.OPTION} follows the noise scale" if by_noise else ""
        reason = f"a run has no row in steps.csv, or --data.shuffle_window or --augment.repeats is set{noise}"
        return Finding("images", None, reason)
    for step in range(min(first.num_steps, second.num_steps)):
        ours, theirs = _samples(first, step), _samples(second, step)
        if len(ours) != len(theirs):
            return Finding("images", True, f"first in step {step + 1}: {len(ours)} and {len(theirs)} images")
        if not np.array_equal(ours, theirs):
            place = int(np.argmax((ours != theirs).any(axis=1)))
            texts = (f"image {sample} in epoch {epoch}" for epoch, sample in (ours[place], theirs[place]))
            return Finding("images", True, f"first in step {step + 1}, place {place}: {' and '.join(texts)}")
    return Finding("images", False, f"{first.num_samples:,} images in the same order, if their files are the same")


def _plan(of: TrainConfig, rows: list[Row]) -> Plan | None:
    """Return the order of a run's images; None if the folder does not tell."""
    told = [row for row in placed(rows) if 0 < row["epoch"] <= row["images"] < 2**40 * row["epoch"]]
    if not told or of.data.shuffle_window or of.augment.repeats > 1 or config.ramp.by_noise(of):
        return None
    num_samples = round(told[-1]["images"] / told[-1]["epoch"])
    images = config.duration_images(
        of.run.duration, option="--run.duration", num_samples=num_samples, batch_size=of.data.global_batch_size
    )
    phases = config.ramp.phases(of, num_samples=num_samples, run_images=images)
    return Plan(num_samples, of.data.global_batch_size, of.data.micro_batch_size, images, of.run.seed, phases=phases)


def _samples(plan: Plan, step: int) -> np.ndarray:
    """Return (epoch, number) of each image of a step."""
    start = plan.start(step)
    return np.stack(plan.samples(start, start + plan.window_images(step)), axis=1)


# -- numbers -----------------------------------------------------------------------------------------------------


def compare_rows(part: str, one: list[Row], other: list[Row]) -> Finding:
    theirs = {row["step"]: row for row in other}
    common = [(row, theirs[row["step"]]) for row in one if row["step"] in theirs]
    for ours, their in common:
        cells = [f"{name} {_digits(ours[name])} and {_digits(their.get(name))}" for name in _differing(ours, their)]
        if cells:
            return Finding(part, True, f"first in step {ours['step']:.0f}: {_listed(cells)}")
    if not common:
        return Finding(part, None, f"no row of the same step ({len(one)} and {len(other)} rows)")
    return Finding(part, False, f"{len(common)} rows of the same steps ({len(one)} and {len(other)} rows)")


def _differing(one: Row, other: Row) -> list[str]:
    """Return the columns in which two rows differ; two empty cells (nan) are equal."""
    repeated = [name for name in one if name not in MEASURED]
    return [name for name in repeated if not np.array_equal(one[name], other.get(name, np.inf), equal_nan=True)]


def _digits(value: float | None) -> str:
    return "missing" if value is None else f"{value:.9g}"


# -- tensors -----------------------------------------------------------------------------------------------------


def compare_tensors(one: Path, other: Path) -> Finding:
    """Compare weights, average and optimizer's state in checkpoints of the same steps, oldest first."""
    paths = [{int(path.name): path for path in checkpoint.checkpoints(folder)} for folder in (one, other)]
    common = sorted(paths[0].keys() & paths[1].keys())
    for step in common:
        pair = paths[0][step], paths[1][step]
        for path in pair:
            if reason := checkpoint.why_invalid(path):
                raise ValueError(f"{path} is damaged: {reason}; remove it to compare the others.")
        if found := list(_differing_tensors(dict(_tensors(pair[0])), dict(_tensors(pair[1])))):
            rest = f"; {len(found) - 1} more" if len(found) > 1 else ""
            return Finding("tensors", True, f"first after step {step}: {found[0]}{rest}")
    if not common:
        steps = " and ".join(str(sorted(of)) for of in paths)
        return Finding("tensors", None, f"no checkpoint of the same step ({steps})")
    return Finding("tensors", False, f"all bits after step {', '.join(map(str, common))}")


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    for name, prefix in ((WEIGHTS, ""), (AVERAGE, "average of ")):
        if (path / name).exists():
            yield from ((prefix + key, tensor) for key, tensor in read_weights(path / name).items())
    optimizer = checkpoint.read_state(path)["optimizer"]
    for number, state in optimizer["state"].items():
        yield from ((f"{key} of parameter {number}", x) for key, x in state.items() if isinstance(x, Tensor))


def _differing_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> Iterator[str]:
    """Yield a clause for each tensor that differs in any bit."""
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other:
            yield f"{name} is in {'the first' if name in one else 'the second'} run alone"
        elif one[name].shape != other[name].shape or one[name].dtype != other[name].dtype:
            shapes = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (one[name], other[name]))
            yield f"{name} is {' and '.join(shapes)}"
        elif not torch.equal(_bits(one[name]), _bits(other[name])):
            unequal = one[name] != other[name]
            largest = (one[name].double() - other[name].double()).abs().max()
            yield f"{name} in {int(unequal.sum()):,} of {unequal.numel():,} numbers, by up to {largest:.3g}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _listed(texts: list[str]) -> str:
    more = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
