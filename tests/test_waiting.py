"""The watchdog in one process; that it ends a run on all ranks is in tests/mpi/test_watchdog.py."""

import threading
import time

from largebatch.comm.watchdog import Watchdog


def test_a_wait_that_is_too_long_is_reported_once_with_its_name():
    reported: list[str] = []
    watchdog, limit = Watchdog(0.2, reported.append), time.monotonic() + 10
    with watchdog.waiting("gradients"):
        while not reported:
            assert time.monotonic() < limit, "nobody looked"
            time.sleep(0.01)
        time.sleep(0.3)
    assert reported == ["gradients"]


def test_short_waits_and_no_wait_are_no_reason():
    reported: list[str] = []
    watchdog = Watchdog(0.6, reported.append)
    for _ in range(5):
        with watchdog.waiting("a moment"):
            time.sleep(0.01)
    time.sleep(1.0)
    watchdog.stop()
    assert reported == []


def test_without_a_limit_nobody_looks():
    before = threading.active_count()
    watchdog = Watchdog(0, lambda what: None)
    assert threading.active_count() == before
    with watchdog.waiting("for ever"):
        pass
