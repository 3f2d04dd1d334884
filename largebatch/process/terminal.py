"""The terminal at which a person watches this process, also behind a launcher, which reads its ranks through pipes."""

import functools
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

LAUNCHERS = {b"mpirun", b"mpiexec", b"mpiexec.hydra", b"orterun", b"prterun", b"horovodrun"}


def watched_terminal() -> TextIO | None:
    """Return stderr if it is a terminal, else the terminal that is stderr of the launcher; None if there is neither.

    If the launcher's stderr goes to a file or a pipe, nobody watches, although there may be a controlling terminal.
    """
    return sys.stderr if sys.stderr.isatty() else _of_launcher()


@functools.cache
def _of_launcher() -> TextIO | None:
    found = [pid for pid in _ancestors() if _is_launcher(pid)]
    return open_terminal(found[-1]) if found else None  # the outermost, if one starts another


def open_terminal(pid: int) -> TextIO | None:
    """Open the terminal that is stderr of a process; None if it is none, or if the process is in the background.

    It cannot be found as /dev/tty: horovodrun gives its ranks a session of their own.
    """
    path = f"/proc/{pid}/fd/2"
    try:
        if not stat.S_ISCHR(os.stat(path).st_mode) or not _in_foreground(pid):
            return None
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
    except OSError:  # another user's, or gone
        return None
    if not os.isatty(descriptor):
        os.close(descriptor)
        return None
    return open(descriptor, "w", encoding="utf-8", errors="replace")


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 1:
        yield pid
        pid = int(_stat(pid)[1])


def _in_foreground(pid: int) -> bool:
    """Return whether the terminal of a process belongs to its process group now; a job after & has to be quiet."""
    _, _, group, _, _, foreground, *_ = _stat(pid)
    return group == foreground


def _stat(pid: int) -> list[bytes]:
    """Return what /proc tells about a process after its name: state, parent, group, session, terminal, foreground."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return [b"", b"0", b"", b"", b"", b"-1"]


def _is_launcher(pid: int) -> bool:
    """Return whether a process is a launcher: itself, or as a script of Python or a shell."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:2]
    except OSError:
        return False
    return any(os.path.basename(word) in LAUNCHERS for word in words)
