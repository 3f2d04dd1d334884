"""The watchdog in one process; that it ends a run on all ranks is in tests/mpi/test_watchdog.py."""

import threading
import time

from largebatch.ranks.watchdog import Mark, Watchdog


def test_a_wait_that_is_too_long_is_reported_once_with_its_name():
    reported: list[str] = []
    watchdog, limit = Watchdog(0.2, 0, lambda mark: reported.append(mark.what)), time.monotonic() + 10
    with watchdog.waiting("gradients"):
        while not reported:
            assert time.monotonic() < limit, "nobody looked"
            time.sleep(0.01)
        time.sleep(0.3)
    assert reported == ["gradients"]


def test_short_waits_and_no_wait_are_no_reason():
    reported: list[Mark] = []
    watchdog = Watchdog(0.6, 0, reported.append)
    for _ in range(5):
        with watchdog.waiting("a moment"):
            time.sleep(0.01)
    time.sleep(1.0)
    watchdog.stop()
    assert reported == []


def test_the_start_has_a_limit_of_its_own():
    reported: list[Mark] = []
    watchdog, limit = Watchdog(0.4, 0, reported.append, start_limit_s=60.0), time.monotonic() + 10
    with watchdog.waiting("a checkpoint"):
        time.sleep(1.0)
    assert reported == [] and watchdog.wait_limit_s == 60.0
    watchdog.started()
    with watchdog.waiting("gradients"):
        while not reported:
            assert time.monotonic() < limit, "nobody looked"
            time.sleep(0.01)
    assert [mark.what for mark in reported] == ["gradients"] and watchdog.wait_limit_s == 0.4


def test_without_a_limit_nobody_looks():
    before = threading.active_count()
    watchdog = Watchdog(0, 0, lambda mark: None)
    assert threading.active_count() == before
    with watchdog.waiting("for ever"):
        pass


def test_work_without_progress_is_reported_with_its_phase_and_a_wait_is_not_work():
    """Work before the first mark is not watched: a program may do what it likes beside its collectives."""
    reported: list[Mark] = []
    watchdog, limit = Watchdog(0, 0.4, reported.append), time.monotonic() + 10
    time.sleep(0.6)
    watchdog.progress("loading")
    with watchdog.waiting("gradients"):
        time.sleep(0.6)
    for _ in range(30):
        time.sleep(0.02)
        watchdog.progress("reading")
    assert reported == []
    while not reported:
        assert time.monotonic() < limit, "nobody looked"
        time.sleep(0.01)
    assert [(mark.what, mark.waits) for mark in reported] == [("reading", False)]


def test_a_job_that_was_suspended_may_go_on(monkeypatch):
    """A batch system may stop a job for hours: what counts is the time in which it could have worked."""
    reported: list[Mark] = []
    watchdog, now, suspended_s, looks = Watchdog(0.6, 0.6, reported.append), time.monotonic, [0], []

    def clock():
        looks.append(1)
        return now() + suspended_s[0]

    watchdog.progress("reading")
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        while not looks:
            time.sleep(0.01)
        suspended_s[0] = 10000
        while len(looks) < 5 and not reported:
            time.sleep(0.01)
        assert reported == []
        while not reported:  # and then it still counts
            time.sleep(0.01)


def test_waits_beside_the_work_of_another_thread_do_not_lengthen_its_limit():
    over, expired = threading.Event(), []
    watchdog = Watchdog(60.0, 0.2, lambda mark: (expired.append(mark), over.set()))
    watchdog.progress("opening the images")
    end = time.monotonic() + 10
    while not over.is_set() and time.monotonic() < end:
        with watchdog.waiting("the others hear of it", is_progress=False):
            pass
        over.wait(0.01)
    watchdog.stop()
    assert [(mark.what, mark.waits) for mark in expired] == [("opening the images", False)]
