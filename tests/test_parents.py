"""What a rank knows of its launcher; that ranks end after horovodrun was killed is in tests/mpi/test_stopping.py."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from largebatch.launch.parents import Parents, Process, end_stopped, this_process

LAUNCHED = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
PROGRAM = """
import time
from largebatch.launch.parents import Parents
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


TELLS = """
import sys
from largebatch.launch.parents import this_process
print(repr(this_process()), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stopped() -> Iterator[tuple[subprocess.Popen, Process]]:
    """A process that is stopped, and what it says of itself."""
    command = [sys.executable, "-c", TELLS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        said = eval(process.stdout.readline(), {"Process": Process})
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        yield process, said
        process.kill()


def test_a_process_that_is_stopped_is_ended(stopped):
    process, said = stopped
    end_stopped([None, this_process(), said])
    assert process.wait(60) == -signal.SIGKILL


def test_no_other_process_with_its_number_is_ended(stopped):
    """One of another boot or another container, or one that began at another time."""
    process, said = stopped
    boot, numbering = said.place
    others = [("another", numbering), (boot, "another")]
    end_stopped([*(replace(said, place=place) for place in others), replace(said, began=said.began + b"0")])
    process.send_signal(signal.SIGCONT)
    process.stdin.close()
    assert process.wait(60) == 0


def test_a_process_that_goes_on_or_has_ended_is_left_alone(stopped):
    process, said = stopped
    process.send_signal(signal.SIGCONT)
    os.waitpid(process.pid, os.WCONTINUED)
    end_stopped([said])
    process.stdin.close()
    assert process.wait(60) == 0
    end_stopped([said])
