"""Without an ssh client, as in slim containers, one host works; another host is refused with the cause."""

import os
import sys
from pathlib import Path

import pytest
from launch import LAUNCHERS, run
from runs import SMALL

BATCH = ["--run.max_steps", "1", "--data.global_batch_size", "16", "--data.micro_batch_size", "8"]
CAUSE = "there is no ssh client on this host to start ranks there: install one (Debian, Ubuntu: sudo apt-get install"


@pytest.fixture(scope="module")
def without_ssh(tmp_path_factory) -> dict[str, str]:
    """An environment whose PATH has everything but ssh: this environment's programs, and links to all others."""
    ours, links = Path(sys.executable).parent, tmp_path_factory.mktemp("bin")
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).glob("*"):
            link = links / program.name
            if program.name not in ("ssh", "slogin", "rsh") and not link.is_symlink():
                link.symlink_to(program)
    return {"PATH": f"{ours}{os.pathsep}{links}", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("launcher, ranks", [("python", 1), ("mpirun", 2), ("horovodrun --gloo", 2)])
def test_ranks_of_one_host_start(without_ssh, launcher, ranks):
    command = [*LAUNCHERS[launcher](ranks), "python", "-m", "tests.mpi.programs", "places"]
    code, output = run(command, environment=without_ssh, cold=launcher == "python")
    places = [(rank, ranks, rank, ranks) for rank in range(ranks)]
    assert code == 0 and f"places {places}" in output, output


def test_horovodrun_trains(without_ssh, tmp_path):
    command = ["python", "-m", "largebatch.train", *SMALL, *BATCH, "--run.folder", str(tmp_path)]
    code, output = run([*LAUNCHERS["horovodrun"](2), *command], environment=without_ssh)
    assert code == 0 and (tmp_path / "checkpoints" / "00000001" / "model.safetensors").exists(), output


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_another_host_is_refused_with_the_cause(without_ssh, launcher):
    """mpirun has more to say afterwards; horovodrun, which would try five times, has not."""
    command = [*LAUNCHERS[launcher](2), "-H", "localhost:1,no-such-host:1", "true"]
    code, output = run(command, timeout_s=60, environment=without_ssh)
    first, *others = [line for line in output.splitlines() if line]
    assert code != 0 and first.startswith(f"{launcher}: host no-such-host is asked for, but {CAUSE}"), output
    assert output.count(CAUSE) == 1 and (launcher == "mpirun" or not others), output
