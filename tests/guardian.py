"""Clear up after a session of tests, however it ends: `guardian.py FOLDER`, with a pipe from pytest as standard input.

When the pipe closes, pytest has ended, perhaps by SIGKILL. Then every process that the session has started and that is
still there is killed, and the session's folder is removed. Only Python's own library, which is quick to import.
"""

import os
import shutil
import signal
import sys
import time


def processes(folder: str) -> list[int]:
    """Those whose environment, when they were started, named the folder; but for this one."""
    wanted, found = f"LARGEBATCH_TESTS={folder}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:  # ended, or another user's
                continue
    return found


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    limit = time.monotonic() + 20
    while (left := processes(folder)) and time.monotonic() < limit:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


main(sys.argv[1])
