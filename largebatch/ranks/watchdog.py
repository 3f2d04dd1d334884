"""Limits on waiting for other ranks, and on working without progress.

Horovod looks for silent ranks only under MPI, and does not notice a stopped rank or a lost host. So each rank limits
its own waits. If all ranks hang alike, in a file system that does not answer, none waits for another. So the main
thread also leaves marks in long loops, and a thread looks at the newest one. If the whole job is suspended, so is the
thread: it subtracts the time in which it could not look.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CHECKS = 20  # during one limit, and at least one per second
LATE_S = 2.0  # a busy machine may delay a look by this much


@dataclass(frozen=True, eq=False)
class Mark:
    """The work of the main thread: it waits for other ranks, or works by itself."""

    what: str
    waits: bool
    began: float = field(default_factory=time.monotonic)


class Watchdog:
    """Calls `expired(mark)` once, from its own thread, if the main thread left no newer mark for too long.

    stall_limit_s: the limit of a wait for other ranks; start_limit_s: the same until the first call of `started`;
    hang_limit_s: the limit of work without a mark, from the first call of `progress` on. 0: no limit.
    """

    def __init__(
        self,
        stall_limit_s: float,
        hang_limit_s: float,
        expired: Callable[[Mark], None],
        *,
        start_limit_s: float | None = None,
    ) -> None:
        self.stall_limit_s, self.hang_limit_s = stall_limit_s, hang_limit_s
        self.start_limit_s = start_limit_s  # None: as later, or the start is over
        self._expired = expired
        self.phase = ""  # of the newest call of `progress`
        self.waited_s = 0.0  # in all blocks of `waiting` that are over
        self._mark: Mark | None = None
        self._over = threading.Event()
        limits = (stall_limit_s, hang_limit_s, start_limit_s or 0.0)
        if any(limits):
            self._interval_s = min(1.0, min(filter(None, limits)) / CHECKS)
            threading.Thread(target=self._watch, name="largebatch-watchdog", daemon=True).start()

    @contextmanager
    def waiting(self, what: str, *, is_progress: bool = True) -> Iterator[None]:
        """Limit the time of this block. what: the name of the collective that it waits for.

        is_progress: False if another thread of this rank works meanwhile, whose time goes on.
        """
        before, mark = self._mark, Mark(what, waits=True)
        self._mark = mark
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - mark.began
            if is_progress:
                self._mark = Mark(self.phase, waits=False) if self.phase else None
            else:
                self._mark = before

    def progress(self, phase: str) -> None:
        self.phase = phase
        self._mark = Mark(phase, waits=False)

    @property
    def wait_limit_s(self) -> float:
        return self.stall_limit_s if self.start_limit_s is None else self.start_limit_s

    def explain(self, mark: Mark) -> str:
        if mark.waits:
            option = "stall_limit_s" if self.start_limit_s is None else "start_limit_s"
            return (
                f"waited {self.wait_limit_s:g} s for the others ({mark.what}): one that does not say so hangs, or is "
                f"lost. --horovod.{option} is the limit; this rank is here:"
            )
        return (
            f"made no progress for {self.hang_limit_s:g} s ({mark.what}): it hangs, perhaps in a file system that does "
            "not answer. --horovod.hang_limit_s is the limit; this rank is here:"
        )

    def started(self) -> None:
        self.start_limit_s = None

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        interval_s = self._interval_s
        seen, looked, suspended_s = self._mark, time.monotonic(), 0.0
        while not self._over.wait(interval_s):
            mark, before, looked = self._mark, looked, time.monotonic()
            if mark is not seen:
                seen, suspended_s = mark, 0.0
            if looked - before > interval_s + LATE_S:
                suspended_s += looked - before
            limit_s = 0.0 if mark is None else self.wait_limit_s if mark.waits else self.hang_limit_s
            # One look early: Horovod has the same limit for waits, and says less.
            if mark and limit_s and looked - mark.began - suspended_s > limit_s - interval_s:
                self._expired(mark)
                return
