"""If a rank does not come, the ranks that wait for it end the run under every launcher, and say where they waited."""

import pytest
from launch import launch

PROGRAM = ["-m", "tests.mpi.programs", "one_rank"]
LIMIT = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}  # the option says the same


@pytest.mark.parametrize(
    "launcher, what", [("mpirun", "sleeps"), ("mpirun", "is stopped"), ("horovodrun --gloo", "is stopped")]
)
def test_a_rank_that_does_not_come_ends_all(launcher, what):
    code, output = launch([*PROGRAM, what], ranks=3, launcher=launcher, timeout_s=100, environment=LIMIT, cold=True)
    assert code != 0 and "done" not in output, output
    assert "waited 4 s for the others (middle)" in output and "in allreduce" in output, output
    assert "rank 0 of 3" in output and "rank 2 of 3" in output and "rank 1 of 3" not in output, output


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_one_that_is_late_does_not(launcher):
    code, output = launch([*PROGRAM, "is late"], ranks=2, launcher=launcher, timeout_s=100, environment=LIMIT)
    assert code == 0 and output.count("done") == 2 and "waited" not in output, output
