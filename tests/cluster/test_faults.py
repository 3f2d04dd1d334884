"""If a rank, a host or a cable is lost, the job ends on all hosts within seconds, with an exit code other than 0.

Nothing is asked for on the command line: the limits that make it so are what mpi_scripts/install.sh writes.
"""

import os
import re
import signal

import pytest
from hosts import Hosts, Job, wait_for
from training import start

LAUNCHERS = ["mpirun", "horovodrun --gloo"]


def training_run(hosts: Hosts, launcher: str, folder, *, ranks_per_host: int = 1) -> Job:
    """A run on h1 and h2 that is in the middle of its steps."""
    job = start(hosts, launcher, f"h1:{ranks_per_host},h2:{ranks_per_host}", folder, cold=True)
    job.wait_for_line("step 1/", 300)
    assert len(ranks(hosts, "h1", folder)) == len(ranks(hosts, "h2", folder)) == ranks_per_host
    return job


def ranks(hosts: Hosts, host: str, folder) -> list[int]:
    """The processes that train into this folder."""
    rank = re.compile(rf"\S*python -m largebatch.train .*--run.folder {folder}$")
    return [pid for pid, line in hosts.processes(host).items() if rank.match(line)]


def assert_end_everywhere(hosts: Hosts, jobs: list[Job], within_s: float) -> None:
    for job in jobs:
        code, output = job.wait(within_s)
        assert code != 0, output

    def left() -> list[str]:    # sshd itself may hold on to a lost connection
        lines = [f"{name}: {line}" for name in hosts.names for line in hosts.processes(name).values()]
        return [line for line in lines if "sshd: " not in line]

    try:
        wait_for(lambda: not left(), "nothing is left on the hosts", within_s)
    except AssertionError as error:
        raise AssertionError(f"{error}: {left()}\n" + "\n".join(job.output for job in jobs)) from None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_job_on_all_hosts(hosts, launcher, tmp_path):
    job = training_run(hosts, launcher, tmp_path, ranks_per_host=2)
    os.kill(ranks(hosts, "h2", tmp_path)[0], signal.SIGKILL)
    assert_end_everywhere(hosts, [job], 30)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_host_ends_the_job_on_all_others(hosts, launcher, tmp_path):
    job = training_run(hosts, launcher, tmp_path)
    hosts.kill("h2")
    assert_end_everywhere(hosts, [job], 30)


def test_a_cut_cable_ends_jobs_on_both_sides(hosts, tmp_path):
    """The switch drops everything and says nothing; the ranks of the lost host end too, while it is still cut off.

    With the limits as installed, about 30 s: shorter ones would also cover ranks that start some seconds apart. So a
    job of each launcher is cut at once.
    """
    jobs = [training_run(hosts, launcher, tmp_path / str(number)) for number, launcher in enumerate(LAUNCHERS)]
    hosts.cut("h2")
    assert_end_everywhere(hosts, jobs, 60)
