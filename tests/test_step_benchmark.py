"""The parts of `benchmark step` that need no ranks."""

import pytest
import torch
from events import note_events

from largebatch.benchmark import step


def test_exposed_communication_is_the_time_that_the_reduction_adds():
    """Ranks that reduce wait for the slowest. What it computes longer than others is not communication."""
    reduced = [[2.0, 4.0, 2.0], [2.0, 4.0, 2.0]]
    alone = [[1.0, 1.0, 1.0], [1.8, 3.6, 1.0]]  # the second rank is slower, less so in a third round that was disturbed
    assert step.exposed(reduced, alone) == pytest.approx(0.1)


def test_the_parts_of_a_step_are_timed_without_waiting_for_the_device(monkeypatch):
    calls = note_events(monkeypatch, milliseconds=500.0)
    watch = step.Stopwatch()
    for _ in range(3):
        watch.steps.append([])
        with watch.timing("optimizer", torch.device("cuda")):
            calls.append("work")
    assert calls == ["record", "work", "record"] * 3
    assert watch.shares([2.0, 3.0]) == {"optimizer": pytest.approx(1.0 / 5.0)}  # the last two steps alone
