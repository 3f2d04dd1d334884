"""The hosts and the Slurm that the tests of this folder share; each test finds them whole."""

from collections.abc import Iterator

import hosts as hosts_module
import pytest
from hosts import Hosts


@pytest.fixture(scope="session")
def session_hosts() -> Iterator[Hosts]:
    """Three hosts, h1 to h3, for the whole session."""
    if reason := hosts_module.missing():
        pytest.skip(reason)
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def hosts(session_hosts: Hosts) -> Iterator[Hosts]:
    """Three hosts with their cables in and nothing running but sshd (and Slurm's daemons once a test used them)."""
    yield session_hosts
    session_hosts.mend()
