"""Runs whose ranks share a model equal the plain run on every mesh, and resume on any other mesh."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from runs import rows
from safetensors.torch import load_file

# Ranks, and the runs that put as many ranks to a replica. "chain" goes on where the launch before stopped.
LAUNCHES = (
    (1, ["plain", "volo"]),
    (2, ["zero", "offload", "zero/chain=2"]),
    (4, ["1d", "volo_1d", "sequence", "sequence/chain=4"]),
    (4, ["2d", "pipeline", "pipeline/chain"]),
    (8, ["2.5d", "3d", "2.5d/cubes=3", "3d/cubes"]),
)
SMALL = ("zero", "offload", "1d", "sequence", "2d", "pipeline", "chain")
RUNS = [*SMALL, *(pytest.param(name, marks=pytest.mark.cluster) for name in ("2.5d", "3d", "cubes"))]
Run = Callable[[str], Path]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """Name of a run -> its folder; starts the launches that train it, if no test did so before."""
    folder, done = tmp_path_factory.mktemp("parallel"), set()

    def trained(name: str) -> Path:
        for number, (ranks, names) in enumerate(LAUNCHES):
            if number in done or not any(name == other.partition("=")[0].rpartition("/")[2] for other in names):
                continue
            code, output = launch(
                ["tests/mpi/parallel_runs.py", str(folder), *names],
                ranks=ranks,
                timeout_s=600,
                environment=ENVIRONMENT,
            )
            assert code == 0, output
            done.add(number)
        return folder / name

    return trained


def numbers(folder: Path, name: str) -> list[dict[str, float]]:
    """A table of the run."""
    return [{key: float(value) for key, value in row.items() if value} for row in rows(folder, name)]


def optimizer_state(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "00000006" / "state.pt", weights_only=True)["optimizer"]


def assert_steps_equal(theirs: Path, ours: Path, *, precision: float) -> None:
    """Also of the run's last batch, which is too short for every mesh."""
    plain, others = numbers(theirs, "steps.csv"), numbers(ours, "steps.csv")
    assert len(others) == len(plain) == 6
    for one, other in zip(plain, others):
        assert other["step"] == one["step"] and other["images"] == one["images"]
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-6), one["step"]
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=precision), one["step"]


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_the_plain_run(run, name):
    assert_steps_equal(run("plain"), run(name), precision=2e-6)


def test_losses_and_norms_of_volo_are_those_of_the_plain_run(run):
    """Its ReLUs turn rounding into more."""
    assert_steps_equal(run("volo"), run("volo_1d"), precision=1e-3)


@pytest.mark.parametrize("name", RUNS)
def test_evaluations_are_those_of_the_plain_run(run, name):
    theirs, ours = numbers(run("plain"), "epochs.csv"), numbers(run(name), "epochs.csv")
    assert len(ours) == len(theirs) == 2
    for one, other in zip(theirs, ours):
        assert other["eval_loss"] == pytest.approx(one["eval_loss"], abs=2e-6)
        assert other["top1"] == one["top1"] and other["top5"] == one["top5"]


@pytest.mark.parametrize("name", RUNS)
def test_checkpoints_are_plain(run, name):
    """Names, shapes and, but for rounding, values; weights that the zoo reads."""
    plain, ours = (load_file(run(one) / "checkpoints" / "00000006" / "model.safetensors") for one in ("plain", name))
    assert ours.keys() == plain.keys()
    for key, theirs in plain.items():
        assert float((ours[key] - theirs).norm() / theirs.norm()) < 1e-5, key


@pytest.mark.parametrize("name", RUNS)
def test_the_optimizers_state_is_plain(run, name):
    """As one rank numbers it, put together from stages, squares, cubes and pieces."""
    plain, ours = optimizer_state(run("plain")), optimizer_state(run(name))
    for group, theirs in zip(ours["param_groups"], plain["param_groups"], strict=True):
        assert group.keys() == theirs.keys() and group["params"] == theirs["params"]
        assert group["lr"] == theirs["lr"]
    assert ours["state"].keys() == plain["state"].keys()
    for number, theirs in plain["state"].items():
        assert ours["state"][number]["step"] == theirs["step"] == 6
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours["state"][number][name], theirs[name], rtol=1e-4, atol=1e-7)


@pytest.mark.cluster
@pytest.mark.parametrize("ranks, names", [(ranks, names) for ranks, names in LAUNCHES if ranks > 1], ids=str)
def test_every_mesh_of_ranks_of_torch_distributed(run, tmp_path, ranks, names):
    """Horovod has no part in it; the weights are put together as ever."""
    names = [name for name in names if "/" not in name]
    command = ["tests/mpi/parallel_runs.py", str(tmp_path), *names]
    code, output = launch(command, ranks=ranks, launcher="torchrun", timeout_s=600, environment=ENVIRONMENT)
    assert code == 0, output
    for name in names:
        theirs, ours = run("volo" if "volo" in name else "plain"), tmp_path / name
        assert "ranks: torch.distributed" in (ours / "log.txt").read_text()
        assert_steps_equal(theirs, ours, precision=1e-3 if "volo" in name else 2e-6)
        whole, parts = (load_file(one / "checkpoints" / "00000006" / "model.safetensors") for one in (theirs, ours))
        for key, value in whole.items():
            assert float((parts[key] - value).double().norm()) <= 1e-4 * float(value.double().norm()), key


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo", "torchrun"])
def test_data_ranks_reduce_and_broadcast_among_those_of_the_same_part(launcher):
    code, output = launch(["-m", "tests.mpi.programs", "reduces_among_data_ranks"], ranks=4, launcher=launcher)
    assert code == 0 and output.count("sound 4") == 4, output


def test_what_fails_on_one_rank_of_a_replica_is_said(tmp_path):
    options = "--model vit_nano32 --img-size 64 --parallel.sequence 2".split()
    arguments = ["-m", "tests.mpi.programs", "cannot_build_on_rank_1", *options]
    batch = "--data.global_batch_size 32 --data.micro_batch_size 16".split()
    code, output = launch([*arguments, *batch, "--run.folder", str(tmp_path)], ranks=4, timeout_s=90)
    assert code == 2 and "rank 1 of 4, building: no such file on this host" in output, output


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("--parallel.tensor.size 2", r"replicas of 2 ranks \(tensor 2\), and the job has 3: start a multiple of 2"),
        ("--parallel.tensor.size 3 --model.num_classes 10", "10 classes, and tensor 3 cuts them into 3 equal parts"),
    ],
)
def test_what_cannot_be_divided_ends_with_one_sentence(options, sentence, tmp_path):
    arguments = ["-m", "largebatch.train", "--run.folder", str(tmp_path), *options.split(), "--img-size", "32"]
    code, output = launch([*arguments, "--data.global_batch_size", "32", "--data.micro_batch_size", "32"], ranks=3)
    assert code != 0 and re.search(sentence, output) and "Traceback" not in output, output
