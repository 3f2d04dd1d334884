"""One job per run folder: RUN/.lock names the job that holds it, and says that the job is alive.

Two jobs in one folder would rotate each other's checkpoints. `flock` tells jobs of one host apart. On some network file
systems it is missing, or ends at the host. So the holder also counts up a number in the file, and a job on another host
watches that number before it takes over.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from largebatch.files.run_folder import RunFolder

logger = logging.getLogger(__name__)

BEAT_S = 5.0  # the holder counts up this often
PATIENCE_S = 20.0  # a holder that has not counted for so long is gone
SETTLE_S = 1.0  # without flock, two jobs that start together may both have written; the last one keeps the folder
NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    host: str
    pid: int
    since: str  # local time, to the second
    boot: str  # one per start of a host: names of hosts repeat, in containers for example
    count: int = 0  # heartbeats so far

    @classmethod
    def this_process(cls) -> "Holder":
        boot = Path("/proc/sys/kernel/random/boot_id")
        since = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        return cls(socket.gethostname(), os.getpid(), since, boot.read_text().strip() if boot.exists() else "")


@contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Hold the run folder until the block ends, or this process does. ValueError names another job that holds it."""
    path = RunFolder(folder).lock
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    mine, ended = Holder.this_process(), threading.Event()
    try:
        _take(descriptor, mine, path)
        beats = threading.Thread(target=_count_up, args=(descriptor, mine, ended, path), name="run lock", daemon=True)
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join(BEAT_S)
            with suppress(OSError):  # then other jobs have to wait
                os.ftruncate(descriptor, 0)  # an empty file: nobody holds the folder
    finally:
        os.close(descriptor)  # which also releases the flock


def _take(descriptor: int, mine: Holder, path: Path) -> None:
    locked, folder = _flock(descriptor), path.parent
    other = _read(path)
    if locked is False:
        raise ValueError(_refusal(folder, other))
    same_host = locked and other is not None and other.boot == mine.boot  # flock has just shown that it is gone
    if other is not None and not same_host:
        logger.warning("%s was held by %s: waiting %.0f s for a sign of life", folder, _name(other), PATIENCE_S)
        if _counts(path, other):
            raise ValueError(_refusal(folder, other))
    _write(descriptor, mine)
    if locked is None:
        time.sleep(SETTLE_S)
        other = _read(path)
        if other is not None and not _is_same(other, mine):
            raise ValueError(_refusal(folder, other))


def _flock(descriptor: int) -> bool | None:
    """True: locked; False: another process holds the lock; None: this file system has no flock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return None
    return True


def _counts(path: Path, holder: Holder) -> bool:
    """Watch until the holder counts up or another one writes (True), or until its time is over (False)."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        time.sleep(min(BEAT_S, PATIENCE_S) / 5)
        now = _read(path)
        if now is None:
            return False  # released while we watched
        if now != holder:
            return True
    return False


def _count_up(descriptor: int, mine: Holder, ended: threading.Event, path: Path) -> None:
    while not ended.wait(BEAT_S):
        try:
            now = _read(path)
            if now is not None and not _is_same(now, mine):
                logger.critical(
                    "%s was taken over by %s while this process did not run; it ends, so that both do not write.",
                    path.parent,
                    _name(now),
                )
                os._exit(1)
            mine = replace(mine, count=mine.count + 1)
            _write(descriptor, mine)
        except OSError as error:  # a file system that fails for a moment must not end the run
            logger.warning("%s cannot be renewed: %s", path, error)


def _read(path: Path) -> Holder | None:
    """Return the holder; None if nobody has written, or a job was killed while it wrote.

    The file is opened each time, so that a network file system asks its server.
    """
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError, FileNotFoundError):
        return None


def _write(descriptor: int, holder: Holder) -> None:
    text = json.dumps(asdict(holder)).encode()
    os.pwrite(descriptor, text.ljust(512), 0)  # of one length, so that nothing of another record remains
    os.fsync(descriptor)


def _is_same(one: Holder, other: Holder) -> bool:
    return replace(one, count=0) == replace(other, count=0)


def _name(holder: Holder) -> str:
    return f"process {holder.pid} on {holder.host}, since {holder.since}"


def _refusal(folder: str | Path, holder: Holder | None) -> str:
    who = _name(holder) if holder else "another process of this host"
    return (
        f"{folder} is in use by {who}: two jobs would overwrite each other's checkpoints. "
        "Wait until that job ends, or choose another --run.folder."
    )
