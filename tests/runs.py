"""The small training runs of tests: their options, and what a run leaves in its folder."""

import csv
from pathlib import Path

import torch
from safetensors.torch import load_file

SMALL = "--model vit_nano32 --img-size 64 --run.precision fp32 --run.deterministic true --log.to none".split()


def weights(folder: Path, name: str = "model") -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint."""
    return load_file(max((folder / "checkpoints").glob("[0-9]*")) / f"{name}.safetensors")


def steps_saved(folder: Path) -> list[int]:
    """The steps of which there are checkpoints."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("[0-9]*"))


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    """A table of the run; none if it is not there yet."""
    if not (folder / name).exists():
        return []
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of a tensor."""
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).norm() / one[key].norm().clamp_min(1e-12)) for key in one)


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that are not equal bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
