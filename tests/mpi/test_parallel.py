"""Runs whose ranks share a model are the run of ranks that do not, whatever the mesh, and go on in any other."""

import csv
from pathlib import Path

import pytest
from launch import launch
from safetensors.torch import load_file

LAUNCHES = (  # ranks, and the runs that put as many ranks to a replica; "chain" goes on where the launch before stopped
    (2, ["plain", "zero", "offload", "zero/chain=5"]),
    (2, ["1d", "sequence", "sequence/chain=9"]),
    (8, ["2d", "pipeline", "pipeline/chain=14"]),
    (8, ["2.5d", "3d", "3d/chain"]),
)
RUNS = ("zero", "offload", "1d", "sequence", "2d", "pipeline", "2.5d", "3d", "chain")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    for ranks, names in LAUNCHES:
        code, output = launch(
            ["tests/mpi/parallel_runs.py", str(folder), *names],
            ranks=ranks,
            timeout_s=600,
            environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
        )
        assert code == 0, output
    return folder


def rows(folder: Path, name: str) -> list[dict[str, float]]:
    with open(folder / name, newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_the_plain_run(runs, name):
    plain, divided = rows(runs / "plain", "steps.csv"), rows(runs / name, "steps.csv")
    assert len(divided) == len(plain) == 20
    for theirs, ours in zip(plain, divided):
        assert ours["step"] == theirs["step"] and ours["images"] == theirs["images"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-5), ours["step"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-4), ours["step"]


@pytest.mark.parametrize("name", RUNS)
def test_evaluations_are_those_of_the_plain_run(runs, name):
    plain, divided = rows(runs / "plain", "epochs.csv"), rows(runs / name, "epochs.csv")
    assert len(divided) == len(plain) == 2
    for theirs, ours in zip(plain, divided):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=2e-5)
        assert abs(ours["top1"] - theirs["top1"]) <= 100 / 360  # one image, at the edge


@pytest.mark.parametrize("name", RUNS)
def test_checkpoints_are_plain(runs, name):
    """Names, shapes and, but for rounding, values; weights that the zoo reads."""
    plain, ours = (load_file(runs / run / "checkpoints" / "00000020" / "model.safetensors") for run in ("plain", name))
    assert ours.keys() == plain.keys()
    for key, theirs in plain.items():
        assert float((ours[key] - theirs).norm() / theirs.norm().clamp_min(1e-6)) < 1e-3, key
