"""Letting one process at a time do a piece of work."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`: one process at a time makes the file or folder, and the others wait and find it made.

    The lock only saves work. On a file system without locks all processes may do the work, which is harmless if each of
    them writes aside and renames.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
