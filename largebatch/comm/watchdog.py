"""A limit on waiting for other ranks.

Horovod itself looks for silent ranks only if MPI carries its messages, and it does not notice a rank that is stopped
or a host that is gone. The other ranks then wait for ever, while their GPUs are paid for. So each rank watches its own
waits, under every launcher. A thread checks now and then, so that a wait costs only two assignments.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CHECKS = 20  # during one limit, and at least one per second


class Watchdog:
    """Calls `expired(what)` once, from its own thread, when a wait has lasted `limit_s` seconds (0: never)."""

    def __init__(self, limit_s: float, expired: Callable[[str], None]) -> None:
        self.limit_s = limit_s
        self._expired = expired
        self._wait: tuple[float, str] | None = None  # when it began, and its name
        self._over = threading.Event()
        if limit_s:
            threading.Thread(target=self._watch, name="largebatch-watchdog", daemon=True).start()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Limit the time of this block. what: the name of the collective that it waits for."""
        self._wait = (time.monotonic(), what)
        try:
            yield
        finally:
            self._wait = None

    def stop(self) -> None:
        """Stop watching."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.limit_s / CHECKS)):
            wait = self._wait
            if wait and time.monotonic() - wait[0] > self.limit_s:
                self._expired(wait[1])
                return
