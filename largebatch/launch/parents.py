"""The processes that started this one, whether they are still there, and the ranks that cannot end without them.

A launcher that is killed may leave its ranks behind: horovodrun becomes a shell that waits for mpirun, and a signal to
it ends the shell alone. A rank that was stopped, as by SIGSTOP, does not notice, and obeys only SIGKILL.
"""

import os
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from largebatch.launch.launcher import recognise

OPEN_MPI = ("mpirun", "orte", "prte")  # how the names of its programs begin
GRACE_S = 20
END_IF_STILL_THERE = f'for n in $(seq {GRACE_S}); do sleep 1; kill -0 "$1" || exit 0; done; kill -KILL "$1"'
SHELL_OF_HOROVODRUN = (b"-c", b"mpirun ")  # the second word, and how the third begins
BOOT, NUMBERING = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Process:
    """A process, told from those with the same number on another host, in another container, or later."""

    place: tuple[str, str]  # the boot of the host, and the space of process numbers
    pid: int
    began: bytes


def this_process() -> Process | None:
    """Return this process, None if the system does not describe it."""
    fields = _stat(os.getpid())
    try:
        return Process((BOOT.read_text(), os.readlink(NUMBERING)), os.getpid(), fields[19])
    except (OSError, IndexError):
        return None


def end_stopped(processes: Iterable[Process | None]) -> None:
    """Send SIGKILL to those of the processes that are here and stopped."""
    for process in processes:
        if process and is_stopped(process):
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)


def is_stopped(process: Process) -> bool:
    """Return whether this process is here and stopped."""
    here = this_process()
    state, *_, began = _stat(process.pid)[:20] or [b"", b""]
    return here is not None and process.place == here.place and state == b"T" and began == process.began


def end_hung_mpirun(pid: int) -> None:
    """Send SIGKILL to `pid` in GRACE_S seconds if it is Open MPI's launcher or daemon and is still there.

    mpirun hangs if it is stopped, or if somebody holds a connection to its port open. Another process waits, because
    this rank ends; it has its own session, because mpirun ends the groups of its ranks.
    """
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:  # no such process, or not ours
        return
    if name.startswith(OPEN_MPI):
        none = subprocess.DEVNULL
        command = ["/bin/sh", "-c", END_IF_STILL_THERE, "sh", str(pid)]
        subprocess.Popen(command, stdin=none, stdout=none, stderr=none, start_new_session=True)


class Parents:
    """The launcher of this process, as far as it runs on this host; nobody without a launcher."""

    def __init__(self) -> None:
        self._parent: int | None = None
        self._shell: int | None = None  # of horovodrun, if it is the parent's parent
        try:
            if recognise(os.environ).launcher == "python":
                return
        except ValueError:  # the run will be refused
            return
        self._parent = os.getppid()
        shell = _parent_of(self._parent)
        if shell is not None and _is_shell_of_horovodrun(shell):
            self._shell = shell

    def gone(self) -> bool:
        """Return whether one of them has ended since."""
        if self._parent is None:
            return False
        if os.getppid() != self._parent:
            return True
        return self._shell is not None and _parent_of(self._parent) != self._shell


def _parent_of(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def _is_shell_of_horovodrun(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    option, start = SHELL_OF_HOROVODRUN
    return len(words) > 2 and words[1] == option and words[2].startswith(start)
