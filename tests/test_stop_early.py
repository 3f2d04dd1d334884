"""Signals to one process, and the time a job has; that ranks stop together is in tests/mpi/test_stopping.py."""

import os
import signal
import time
from datetime import datetime

import pytest

from largebatch.config import RunConfig, TrainConfig, check
from largebatch.hooks.stop_early import MARGIN_S, SLURM_END, StopEarly, end_time
from largebatch.ranks.signals import SIGNALS, Signals


def wait_for(condition, limit_s: float = 10):
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "not in time"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def same_handlers_afterwards():
    """SIGINT may be ignored when tests run in the background of a shell."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_its_copies_are_not_others(number):
    before = {each: signal.getsignal(each) for each in SIGNALS}
    with Signals() as signals:
        assert signals.requests() == [False, False, False, False]
        os.kill(os.getpid(), number)
        wait_for(lambda: signals.first)
        for other in SIGNALS:
            os.kill(os.getpid(), other)
    assert signals.requests() == [each == number for each in SIGNALS] + [False]
    assert {each: signal.getsignal(each) for each in before} == before


def test_other_signals_are_left_alone():
    before, heard = signal.signal(signal.SIGUSR2, lambda *_: heard.append(1)), []
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGUSR2)
            wait_for(lambda: heard)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert signals.first is None  # the thread is done


def test_a_job_in_the_background_of_a_shell_does_not_hear_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signals.first is None


def test_as_long_as_nothing_is_lost_the_first_signal_ends_the_run_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(Signals, "_end_at_once", lambda self, number: ended.append(number))
    with Signals(nothing_to_lose=True) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: ended)
    assert ended == [signal.SIGTERM]
    with Signals(nothing_to_lose=True) as signals:
        signals.nothing_to_lose = False
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: signals.first)
    assert ended == [signal.SIGTERM]


def test_a_process_that_ends_hears_no_more():
    with pytest.raises(SystemExit):
        with Signals():
            raise SystemExit(75)
    for number in SIGNALS:
        os.kill(os.getpid(), number)


SOON = time.time() + 1e5  # still to come when the test is run


@pytest.mark.parametrize(
    "option, slurm, end",
    [
        (None, None, None),
        (None, "", None),
        (SOON, None, SOON),
        (str(SOON), None, SOON),
        (datetime.fromtimestamp(SOON).isoformat(), None, SOON),
        (datetime.fromtimestamp(SOON).astimezone().isoformat(), None, SOON),
        (None, str(int(SOON)), int(SOON)),
        (SOON, str(int(SOON) + 500), SOON),  # the option wins
        (SOON + 500, str(int(SOON)), SOON + 500),
        (None, "1700000000", None),  # the limit was raised since the job began
    ],
    ids=range(10),  # names that are the same in every process
)
def test_when_the_job_ends(monkeypatch, option, slurm, end):
    monkeypatch.delenv(SLURM_END, raising=False)
    if slurm is not None:
        monkeypatch.setenv(SLURM_END, slurm)
    assert end_time(option) == (None if end is None else pytest.approx(end, abs=1e-3))


def test_a_time_that_cannot_be_meant(monkeypatch):
    with pytest.raises(ValueError, match=r"^--run.end_time is 17\d+, which has passed: expected a time"):
        end_time(1700000000)
    with pytest.raises(ValueError, match=r"^--run.end_time is 'noon': expected seconds since the epoch"):
        check(TrainConfig(run=RunConfig(end_time="noon")))
    check(TrainConfig(run=RunConfig(end_time="2020-01-01")))  # as a finished run's config.yaml may have it
    monkeypatch.setenv(SLURM_END, "Unknown")
    with pytest.raises(ValueError, match=f"^{SLURM_END} is 'Unknown'"):
        end_time(None)


def test_the_time_to_end_well():
    """The longest pass, and a checkpoint on a disk that has become slower."""
    hook = StopEarly(Signals(), end=None, longest_save_s=lambda: 100.0)
    hook.pauses_s.extend([7.0, 1.0, 2.0])
    assert hook.needed_s() == 7 + 2 * 100 + MARGIN_S
    hook.pauses_s.extend([3.0] * 50)  # the slow first one is forgotten
    assert hook.needed_s() == 3 + 2 * 100 + MARGIN_S
