"""Shared memory that killed jobs left behind.

Ranks of a host send each other messages through files in /dev/shm, which Open MPI removes at the end. If mpirun and all
ranks are killed at once, each rank leaves 4 MB of the host's memory behind.
"""

import os
import re
import socket
import time
from pathlib import Path

SEGMENT = re.compile(r"(?:vader|sm)_segment\.(.+)\.(\d+)\.[0-9a-f]+\.\d+")  # host, user, job, rank
# Processes of another container may be invisible here. Within this time their ranks have found each other, and no
# longer need the name of the file.
MIN_AGE_S = 600.0


def remove_leftovers(folder: Path = Path("/dev/shm")) -> list[str]:
    """Remove Open MPI's files of this user and host that no process has mapped; return their names."""
    old = [name for name in _segments(folder) if time.time() - (folder / name).stat().st_ctime > MIN_AGE_S]
    leftovers = [name for name in old if name not in _mapped(old)] if old else []
    for name in leftovers:
        (folder / name).unlink(missing_ok=True)
    return leftovers


def _segments(folder: Path) -> list[str]:
    """Return the files of this user and host."""
    found = []
    for entry in os.scandir(folder):
        parts = SEGMENT.fullmatch(entry.name)
        if parts and (parts[1], parts[2]) == (socket.gethostname(), str(os.geteuid())):
            if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                found.append(entry.name)
    return found


def _mapped(names: list[str]) -> set[str]:
    """Return the files that a process has mapped, as far as this user may see."""
    mapped: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "maps").read_text(errors="replace")
        except OSError:  # it has ended, or is another user's, who cannot map this user's files
            continue
        mapped.update(name for name in names if name in text)
    return mapped
