"""The processes that started this one, and whether they are still there.

A launcher that is killed may leave its ranks behind: horovodrun becomes a shell that waits for mpirun, and a signal to
that shell ends it alone. The ranks would train on, and nobody could stop them.
"""

import os
from pathlib import Path

from largebatch.comm.launcher import recognise

SHELL_OF_HOROVODRUN = (b"-c", b"mpirun ")  # the second word, and how the third begins


class Parents:
    """The launcher of this process, as far as it runs on this host; nobody if no launcher started the process."""

    def __init__(self) -> None:
        """Look for them; a parent that is gone already is not missed."""
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
    """Return the parent of a process; None if the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _is_shell_of_horovodrun(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    option, start = SHELL_OF_HOROVODRUN
    return len(words) > 2 and words[1] == option and words[2].startswith(start)
