"""The cores and threads that a launcher's binding leaves to a rank, and the one warning about them."""

import os
import re

import pytest
from launch import run

CORES = len(os.sched_getaffinity(0))
needs_cores = pytest.mark.skipif(CORES < 2, reason=f"{CORES} core: there is nothing to bind apart")


def start(*launcher: str, options: tuple[str, ...] = (), cold: bool = False) -> tuple[str, list[str]]:
    """The line of this host, and the warnings of all ranks. A cold start sees when torch decides on its compilers."""
    program = ["python", "-m", "tests.mpi.programs", "cores", *options]
    code, output = run(["env", "-u", "OMP_NUM_THREADS", "mpirun", *launcher, *program], timeout_s=90, cold=cold)
    assert code == 0, output
    (host,) = re.findall(r"^INFO \S+: (rank 0 cpu .*)$", output, re.MULTILINE)
    ((when, processes),) = re.findall(r"^INFO torch has (.*), and will compile with (\d+)$", output, re.MULTILINE)
    assert when == "not decided yet" or not cold
    assert processes == re.findall(r"threads: (\d+) of torch", host)[0]
    return host, re.findall(r"^WARNING (.*)$", output, re.MULTILINE)


@needs_cores
def test_ranks_bound_to_a_core_each_are_told():
    host, warnings = start("-np", "2", "--bind-to", "core", cold=True)
    bound = re.findall(r"rank (\d): cores? ([0-9,-]+)(?: of NUMA node \d+)?, threads: 1 of torch, 1 of", host)
    assert [rank for rank, _ in bound] == ["0", "1"] and bound[0][1] != bound[1][1], host
    assert len(warnings) == 1 and "are bound to a single core, of" in warnings[0] and "--bind-to none" in warnings[0]
    assert warnings[0].startswith(f"ranks 0, 1 on {os.uname().nodename} ")


@needs_cores
def test_ranks_that_share_all_cores_are_not():
    host, warnings = start("-np", "2", "--bind-to", "none")
    shared = re.search(r"ranks 0-1: cores \S+ .*\((\S+) for each rank\), threads: (\d+) of torch, (\d+) of", host)
    assert shared and float(shared[1]) == CORES / 2 and int(shared[2]) == CORES // 2, host
    assert int(shared[3]) == max(1, CORES // 2 - 1) and warnings == []


def test_loader_threads_that_do_not_fit():
    host, warnings = start("-np", "2", "--bind-to", "none", options=("--data.num_threads", str(CORES)))
    assert f"{CORES} of the loader" in host
    assert len(warnings) == 1 and f"for {CORES} loader thread" in warnings[0] and "--data.num_threads" in warnings[0]


def test_more_ranks_than_cores():
    _, warnings = start("-np", str(CORES + 1), "--oversubscribe", "--bind-to", "none")
    assert len(warnings) == 1 and "start fewer ranks per host" in warnings[0]
