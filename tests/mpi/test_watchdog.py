"""Ranks that wait too long for one another, or that all hang alike, end the run and say where they were."""

import os
import re
import signal

import pytest
from launch import launch
from runs import SMALL, steps_saved

PROGRAM = ["-m", "tests.mpi.programs", "one_rank"]
LIMITS = ["--horovod.stall_limit_s", "4", "--horovod.hang_limit_s", "60"]
LIMIT = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}  # the option says the same


@pytest.mark.cluster
@pytest.mark.parametrize(
    "launcher, what",
    [("mpirun", "sleeps"), ("mpirun", "is stopped"), ("horovodrun --gloo", "is stopped"), ("torchrun", "sleeps")],
)
def test_a_rank_that_does_not_come_ends_all(launcher, what):
    code, output = launch([*PROGRAM, what], ranks=3, launcher=launcher, timeout_s=100, environment=LIMIT, cold=True)
    assert code != 0 and "done" not in output, output
    assert "waited 4 s for the others (middle)" in output and "in allreduce" in output, output
    assert "rank 0 of 3" in output and "rank 2 of 3" in output and "rank 1 of 3" not in output, output
    newest = r"the newest collectives of rank 0 of 3:\n(.*\n)*.* middle: 4 bytes, \d\.\d s ago\n"
    assert re.search(newest, output), output


@pytest.mark.parametrize("kind, launcher", [("hang", "mpirun"), ("SIGSTOP", "horovodrun --gloo")])
def test_a_rank_that_hangs_in_a_step_is_named_with_its_collective(tmp_path, kind, launcher):
    """The thread of a rank that hangs still answers; that a rank is stopped is seen by those of its host."""
    batch = ["--data.global_batch_size", "24", "--data.micro_batch_size", "4", "--run.duration", "5 steps"]
    command = ["-m", "tests.reliability.injector", *SMALL, *batch, "--run.folder", str(tmp_path), *LIMITS]
    fault = LIMIT | {"LARGEBATCH_FAULT": f"1 forward 3 {kind}"}
    code, output = launch(command, ranks=3, launcher=launcher, timeout_s=100, environment=fault)
    host = os.uname().nodename
    behind = rf"rank 1 on {host} is behind, after collective (\d+), .*, and not yet in (\d+), "
    named = re.search(behind + "bucket 0 of step 3, pass 2; the others have come to", output)
    assert code != 0 and "rank 0 of 3" in output, output
    assert kind == "SIGSTOP" or named and int(named[2]) == int(named[1]) + 1, output
    assert kind == "hang" or f"largebatch: rank 1 on {host} is stopped." in output, output


@pytest.mark.cluster
def test_an_mpirun_that_does_not_answer_is_ended_with_its_ranks():
    code, output = launch([*PROGRAM, "stops mpirun"], ranks=2, timeout_s=100, environment=LIMIT, cold=True)
    assert code == -signal.SIGKILL, output  # what the ranks said is lost: mpirun did not pass it on


@pytest.mark.cluster
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo", "torchrun"])
def test_one_that_is_late_does_not(launcher):
    code, output = launch([*PROGRAM, "is late"], ranks=2, launcher=launcher, timeout_s=100, environment=LIMIT)
    assert code == 0 and output.count("done") == 2 and "waited" not in output, output


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo", "torchrun"])
def test_at_the_start_a_rank_may_be_later(launcher):
    """Horovod's own limit, under MPI, is the longer one, too."""
    program, limit = ["-m", "tests.mpi.programs", "late_at_the_start"], {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    code, output = launch(program, ranks=2, launcher=launcher, timeout_s=100, environment=limit)
    assert code != 0 and output.count("first step done") == 2 and "second step done" not in output, output
    assert "waited 3 s for the others (second step)" in output and "--horovod.stall_limit_s is the" in output, output


@pytest.mark.cluster
@pytest.mark.parametrize(
    "fault, phase, place",
    [
        ("hangs_in_the_loader", "step 1, pass 1", "programs.py"),
        ("hangs_in_indexing", "opening digits, train images", "scan.py"),
        ("hangs_in_the_evaluation", "evaluation after step 1, batch 2", "counting"),
    ],
)
def test_ranks_that_all_hang_alike_end(tmp_path, fault, phase, place):
    """No rank waits for another, so only the missing progress shows it."""
    options = ["--horovod.hang_limit_s", "4", "--run.eval_every", "1 steps", "--run.folder", str(tmp_path / "run")]
    options += ["--data.global_batch_size", "16", "--data.micro_batch_size", "4", "--data.eval_batch_size", "16"]
    environment = {"XDG_CACHE_HOME": str(tmp_path)}  # without an index
    command = ["-m", "tests.mpi.programs", fault, *SMALL, *options]
    code, output = launch(command, ranks=2, timeout_s=60, environment=environment)
    assert code != 0 and "waited" not in output, output
    assert f"made no progress for 4 s ({phase})" in output and "--horovod.hang_limit_s is the limit" in output, output
    assert place in output and "Thread 0x" in output, output


def test_a_save_slower_than_the_limit_ends_nothing(tmp_path):
    """The third step goes on while that of the second is written; the end waits for both."""
    batch = ["--data.global_batch_size", "16", "--data.micro_batch_size", "4", "--run.duration", "24 steps"]
    saving = ["--checkpoint.every", "2 steps", "--run.max_steps", "3", "--run.folder", str(tmp_path)]
    code, output = launch(["-m", "tests.mpi.programs", "writes_slowly", *SMALL, *batch, *saving], ranks=2)
    assert code == 0 and "waited" not in output and steps_saved(tmp_path) == [2, 3], output
