"""Letting one process at a time do a piece of work."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_S = 0.1  # between two tries of a process that waits


def no_progress() -> None:
    """Do nothing."""


@contextlib.contextmanager
def locked(path: Path, progress: Callable[[], None] = no_progress) -> Iterator[Callable[[], None]]:
    """Hold the lock of `path`: one process at a time makes the file or folder, and the others wait and find it made.

    Yields a function for the holder to call while it works: it calls `progress`, and so do the processes that wait. On
    a file system without locks all may do the work, each aside, and rename.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "a") as file:

        def go_on() -> None:
            progress()
            os.utime(file.fileno())

        with contextlib.suppress(OSError):
            _wait(file.fileno(), progress)
        yield go_on


def _wait(file: int, progress: Callable[[], None]) -> None:
    """Take the lock, and call `progress` whenever its holder has gone on. OSError without locks."""
    seen = os.fstat(file).st_mtime_ns
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # another process holds it
            time.sleep(POLL_S)
        if os.fstat(file).st_mtime_ns != seen:
            seen = os.fstat(file).st_mtime_ns
            progress()
