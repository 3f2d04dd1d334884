"""The hosts and the Slurm that the tests of this folder share; each test finds them whole."""

from collections.abc import Iterator

import hosts as hosts_of_this_machine
import pytest
import slurm as slurm_of_this_machine


@pytest.fixture(scope="session")
def session_hosts() -> Iterator[hosts_of_this_machine.Hosts]:
    """Three hosts, h1 to h3, for the whole session."""
    if reason := hosts_of_this_machine.missing():
        pytest.skip(reason)
    with hosts_of_this_machine.Hosts(3) as three:
        yield three


@pytest.fixture(name="hosts")
def mended_hosts(session_hosts: hosts_of_this_machine.Hosts) -> Iterator[hosts_of_this_machine.Hosts]:
    """Three hosts with their cables in and nothing running but sshd (and Slurm's daemons once a test used them)."""
    yield session_hosts
    session_hosts.mend()


@pytest.fixture(scope="session")
def session_slurm(session_hosts: hosts_of_this_machine.Hosts) -> slurm_of_this_machine.Slurm:
    if reason := slurm_of_this_machine.missing():
        pytest.skip(reason)
    return slurm_of_this_machine.Slurm(session_hosts)


@pytest.fixture(name="slurm")
def idle_slurm(
    hosts: hosts_of_this_machine.Hosts, session_slurm: slurm_of_this_machine.Slurm
) -> slurm_of_this_machine.Slurm:
    """A Slurm of three idle nodes, h1 to h3, with 4 CPUs each; commands run on h1."""
    session_slurm.ready()
    return session_slurm
