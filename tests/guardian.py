"""Clear up after a session of tests, however it ends: `guardian.py FOLDER`, with a pipe from pytest as standard input.

The pipe closes when pytest ends, also by SIGKILL. Then the guardian kills every process that the session has started
and that still runs, and removes the session's folder, its folder in /dev/shm, and the shared memory and semaphores that
those processes had open. It uses only Python's own library, which is quick to import.
"""

import os
import shutil
import signal
import sys
import time

SHARED_MEMORY = "/dev/shm"
LIMIT_S = 20
TRACKERS_S = 5  # how long Python's trackers of semaphores may take to end by themselves


def processes(folder: str) -> list[int]:
    """Return the processes whose environment named the folder when they were started, except this process."""
    wanted, found = f"LARGEBATCH_TESTS={folder}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and wanted in read(f"/proc/{name}/environ").split(b"\0"):
            found.append(int(name))
    return found


def read(path: str) -> bytes:
    """Return a file's content; nothing if the process has ended or belongs to another user."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def is_tracker(pid: int) -> bool:
    """Tell whether a process is Python's tracker, which removes semaphores and shared memory that others forgot."""
    return b"resource_tracker" in read(f"/proc/{pid}/cmdline")


def open_memory(pid: int) -> set[str]:
    """Return the files in /dev/shm that a process has mapped: shared memory and POSIX semaphores.

    They are found by their inode: who creates a semaphore maps it under another name, which is removed at once.
    """
    lines = read(f"/proc/{pid}/maps").decode(errors="surrogateescape").splitlines()
    fields = [line.split(maxsplit=5) for line in lines if f" {SHARED_MEMORY}/" in line]
    inodes = {int(inode) for _, _, _, _, inode, _ in fields}
    return {entry.path for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes} if inodes else set()


def send(pids: list[int], number: int) -> None:
    """Send a signal to each process that still runs."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def end_all(folder: str) -> set[str]:
    """Kill the session's processes until none is left; return the shared memory that they had open.

    All are stopped before the first is killed, so that none ends, and is forgotten, because another one was killed.
    A tracker ends by itself, after it has cleared, when the processes it works for have ended.
    """
    began, memory = time.monotonic(), set()
    while (left := processes(folder)) and time.monotonic() < began + LIMIT_S:
        if time.monotonic() < began + TRACKERS_S:
            left = [pid for pid in left if not is_tracker(pid)]
        send(left, signal.SIGSTOP)
        for pid in left:
            memory |= open_memory(pid)
        send(left, signal.SIGKILL)
        time.sleep(0.02)
    return memory


def main(folder: str) -> None:
    """Wait until pytest ends, then clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for path in end_all(folder):
        try:
            os.remove(path)
        except OSError:  # its owner has removed it
            pass
    shutil.rmtree(os.path.join(SHARED_MEMORY, os.path.basename(folder)), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


main(sys.argv[1])
