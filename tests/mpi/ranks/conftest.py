"""Runs inside every rank of a launch: one communicator, and the first failure of any rank ends them all."""

import sys

import pytest

from largebatch.comm import Communicator

LIVE: list[Communicator] = []


@pytest.fixture(scope="session")
def comm():
    communicator = Communicator(deterministic=True)
    LIVE.append(communicator)
    yield communicator
    communicator.shutdown()


def pytest_exception_interact(node, call, report):
    """Other ranks may wait for this one in a collective: tell the reason, then end the run."""
    if LIVE:
        sys.stderr.write(f"rank {LIVE[0].rank}: {node.nodeid}\n{report.longreprtext}\n")
        LIVE[0].abort(1)
