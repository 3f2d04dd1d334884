"""A limit on waiting for other ranks.

Horovod itself looks for ranks that do not answer only where MPI carries its messages, and not when a rank is stopped
or its host is gone: the others then wait for ever, while their GPUs are paid for. So each rank watches its own waits,
under every launcher alike. One thread looks now and then, so that a wait costs no more than two assignments.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOKS = 20  # within a limit, and at least one per second


class Watchdog:
    """Calls `expired(what)` once, in a thread of its own, when a wait has lasted `limit_s` seconds; 0: never."""

    def __init__(self, limit_s: float, expired: Callable[[str], None]) -> None:
        self.limit_s = limit_s
        self._expired = expired
        self._wait: tuple[float, str] | None = None  # since when, for what
        self._over = threading.Event()
        if limit_s:
            threading.Thread(target=self._look, name="largebatch-watchdog", daemon=True).start()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The time of this block counts; `what` is waited for."""
        self._wait = (time.monotonic(), what)
        try:
            yield
        finally:
            self._wait = None

    def stop(self) -> None:
        """No longer watch."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(min(1.0, self.limit_s / LOOKS)):
            wait = self._wait
            if wait and time.monotonic() - wait[0] > self.limit_s:
                self._expired(wait[1])
                return
