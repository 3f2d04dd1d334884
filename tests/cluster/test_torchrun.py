"""Ranks of torch.distributed on several hosts, each started by an agent of torchrun; nothing of Horovod or MPI."""

import os
import re
import signal
from pathlib import Path

import warm
from hosts import Hosts, Job
from runs import different
from test_faults import assert_end_everywhere, ranks
from training import ONE_THREAD, launcher_on, state, training

LIMIT = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"}
BOTH = ("h1", "h2")


def start(
    hosts: Hosts, folder: Path, *options: str, on: tuple[str, ...] = BOTH, each: int = 2, cold: bool = False
) -> list[Job]:
    """Start an agent on each host."""
    jobs = []
    for number, host in enumerate(on):
        agent = [str(Path(warm.python()).with_name("torchrun")), "--nnodes", str(len(on)), "--node-rank", str(number)]
        agent += ["--nproc-per-node", str(each), "--master-addr", on[0], "--master-port", "29500", "--no-python"]
        command = [*agent, *training(folder, *options, cold=cold)]
        jobs.append(hosts.start(host, command, environment=ONE_THREAD | LIMIT))
    return jobs


def trained(jobs: list[Job], folder: Path):
    for job in jobs:
        code, output = job.wait(400)
        assert code == 0, output
    return state(folder)


STEPS = ["--run.max_steps", "20", "--schedule.warmup", "0 steps"]


def test_two_hosts_train_as_one_does_bit_for_bit(hosts, tmp_path):
    one = trained(start(hosts, tmp_path / "one", *STEPS, on=("h1",), each=4), tmp_path / "one")
    two = trained(start(hosts, tmp_path / "two", *STEPS), tmp_path / "two")
    log = (tmp_path / "two" / "log.txt").read_text()
    assert "h1: rank 0" in log and "h2: rank 2" in log and different(one, two) == []


def test_a_model_shared_by_two_hosts(hosts, tmp_path):
    sharing = "--run.max_steps 2 --parallel.pipeline 2 --parallel.sequence 2 --data.micro_batch_size 16".split()
    trained(start(hosts, tmp_path, *sharing), tmp_path)


def test_mpirun_with_the_ranks_of_torch_distributed(hosts, tmp_path):
    """It does not tell its ranks on which host rank 0 is."""
    program = training(tmp_path, "--run.max_steps", "2", "--run.ranks", "torch")
    mpirun = launcher_on("mpirun", "h1:1,h2:1")
    code, output = hosts.run("h1", [*mpirun, *program], environment=ONE_THREAD)
    assert code != 0 and "mpirun does not tell the ranks of torch.distributed which host rank 0 is on" in output, output
    code, output = hosts.run("h1", [*mpirun, "-x", "MASTER_ADDR=h1", *program], timeout_s=300, environment=ONE_THREAD)
    assert code == 0, output


def in_its_steps(hosts: Hosts, folder: Path) -> list[Job]:
    jobs = start(hosts, folder, cold=True)
    jobs[0].wait_for_line("step 1/", 300)
    assert len(ranks(hosts, "h1", folder)) == len(ranks(hosts, "h2", folder)) == 2
    return jobs


def test_a_killed_rank_ends_the_job_on_all_hosts(hosts, tmp_path):
    jobs = in_its_steps(hosts, tmp_path)
    os.kill(ranks(hosts, "h2", tmp_path)[0], signal.SIGKILL)
    assert_end_everywhere(hosts, jobs, 60)


def test_a_killed_host_ends_the_job_on_the_other(hosts, tmp_path):
    jobs = in_its_steps(hosts, tmp_path)
    hosts.kill("h2")
    assert_end_everywhere(hosts, jobs, 60)


def test_a_cut_cable_ends_the_job_on_both_sides(hosts, tmp_path):
    """Nobody closes a connection; each rank waits for its limit, and says so."""
    jobs = in_its_steps(hosts, tmp_path)
    hosts.cut("h2")
    assert_end_everywhere(hosts, jobs, 90)
    assert re.search(r"rank \d of 4 on h1 waited 20 s for the others", jobs[0].output), jobs[0].output
