"""What a rank knows of its launcher; that ranks end after horovodrun was killed is in tests/mpi/test_stopping.py."""

import os
import subprocess
import sys

import pytest

from largebatch.comm.parents import Parents

LAUNCHED = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
PROGRAM = """
import time
from largebatch.comm.parents import Parents
parents, end = Parents(), time.monotonic() + 60
print(parents.gone(), flush=True)
while not parents.gone() and time.monotonic() < end:
    time.sleep(0.01)
print("gone" if parents.gone() else "still there after a minute", flush=True)
"""


@pytest.fixture
def mpirun(tmp_path) -> dict[str, str]:
    """The environment of a rank, in which mpirun is a program that runs its arguments."""
    (tmp_path / "mpirun").write_text('#!/bin/sh\n"$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "program.py").write_text(PROGRAM)
    return os.environ | LAUNCHED | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_a_shell_of_horovodrun_that_is_killed(tmp_path, mpirun):
    command = f"mpirun '{sys.executable}' '{tmp_path}/program.py'; exit"  # the last command would replace the shell
    with subprocess.Popen(["/bin/sh", "-c", command], env=mpirun, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout.readline() == "False\n"
        shell.terminate()
        assert shell.stdout.readline() == "gone\n"


@pytest.mark.parametrize("launched, missed", [(LAUNCHED, True), ({}, False)])
def test_a_parent_that_is_gone_is_missed_if_it_is_a_launcher(monkeypatch, launched, missed):
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    parents = Parents()
    assert not parents.gone()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert parents.gone() is missed
