"""Ranks that run different programs stop together before the first step, and the odd rank is named."""

import os
import re
import shutil
from pathlib import Path

from launch import ROOT, launch, run

OPTIONS = ["--model", "vit_nano32", "--img-size", "64", "--run.precision", "fp32"]
SHORT = ["--data.global_batch_size", "48", "--data.micro_batch_size", "4", "--run.duration", "1 steps"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def odd_rank(folder: Path, *options: str, environment: list[str] | None = None) -> tuple[int, str]:
    """mpirun with two equal ranks and a third that has other options or another environment (NAME=value)."""
    command = ["python", "-m", "largebatch.train", *OPTIONS, *SHORT, "--run.folder", str(folder)]
    odd = ["env", *(environment or []), *command, *options]
    return run(["mpirun", "-np", "2", *command, ":", "-np", "1", *odd], timeout_s=60, environment=ONE_THREAD)


def assert_stopped(code: int, output: str, sentence: str) -> None:
    """All together, with one sentence and nothing of a step."""
    assert code == 2, output
    assert output.count(sentence) == 1, output
    assert "Traceback" not in output and "step 1" not in output, output


def test_a_rank_with_other_options(tmp_path):
    """Also ones that decide how Horovod is started, or that alone would stop that rank."""
    options = {"--run.deterministic": "true", "--data.global_batch_size": "50", "--optim.lr": "7.0"}
    code, output = odd_rank(tmp_path, *[word for option in options.items() for word in option])
    assert_stopped(code, output, "start every rank with the same options.")
    assert "has --data.global_batch_size 50, the other 2 ranks 48;" in output
    for option, value in options.items():
        assert re.search(f"rank 2 on [^;]* has {option} {value.capitalize()}, the other 2 ranks [^;]+[;:]", output)


def test_a_rank_with_another_version(tmp_path):
    """Another timm lies in front on one host; and a variable of Horovod has another value there."""
    info = tmp_path / "site" / "timm-0.9.99.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: timm\nVersion: 0.9.99\n")
    environment = [f"PYTHONPATH={info.parent}", "HOROVOD_CYCLE_TIME=7"]
    code, output = odd_rank(tmp_path / "run", environment=environment)
    assert_stopped(code, output, "has timm 0.9.99, the other 2 ranks 1.")
    assert "has HOROVOD_CYCLE_TIME 7, the other 2 ranks 5: " in output
    assert "largebatch: rank 2 on " in output and "set up all hosts alike with mpi_scripts/install.sh." in output


def test_a_rank_with_a_stale_checkout(tmp_path):
    for package in ("largebatch", "zoo"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "largebatch" / "losses.py", "a") as file:
        file.write("# of last week\n")
    code, output = odd_rank(tmp_path / "run", environment=[f"PYTHONPATH={tmp_path}", "PYTHONSAFEPATH=1"])
    assert_stopped(code, output, "has the sources of largebatch ")
    assert "largebatch: rank 2 on " in output and "bring the working trees of all hosts to the same state." in output


def test_a_rank_with_another_option_under_gloo(tmp_path):
    """horovodrun starts one command, so a script decides by rank; its own exit code is 1 whatever a rank's is."""
    script = tmp_path / "odd.sh"
    script.write_text('#!/bin/sh\n[ "$HOROVOD_RANK" = 1 ] && set -- "$@" --run.seed 5\nexec "$@"\n')
    script.chmod(0o755)
    program = ["python", "-m", "largebatch.train", *OPTIONS, *SHORT, "--run.folder", str(tmp_path / "run")]
    command = [str(script), *program]
    code, output = run(["horovodrun", "--gloo", "-np", "3", *command], timeout_s=60, environment=ONE_THREAD)
    assert code != 0 and "Exit code: 2" in output, output
    assert output.count("largebatch: rank 1 on ") == 1 and "has --run.seed 5, the other 2 ranks 0" in output


def test_validation_compares_ranks_too(tmp_path):
    command = ["python", "-m", "largebatch.validate", "--model", "vit_nano32", "--data", "digits"]
    one, other = ([*command, "--init-from", str(tmp_path / name)] for name in ("a", "b"))
    code, output = run(["mpirun", "-np", "1", *one, ":", "-np", "1", *other], timeout_s=60, environment=ONE_THREAD)
    assert_stopped(code, output, "largebatch: rank 1 on ")
    assert f"has --model.weights {tmp_path}/b, the other rank {tmp_path}/a" in output


def test_two_ranks_on_one_gpu(tmp_path):
    program = ["-m", "tests.mpi.programs", "shares_a_gpu", *OPTIONS, *SHORT, "--run.device", "cpu"]
    code, output = launch([*program, "--run.folder", str(tmp_path)], ranks=2, timeout_s=60, environment=ONE_THREAD)
    assert_stopped(code, output, f"largebatch: ranks 0, 1 on {os.uname().nodename} share GPU GPU-1")
    assert "give each rank a GPU of its own" in output
