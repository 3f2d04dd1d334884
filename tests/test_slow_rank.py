"""Who is slow, by numbers alone; that real ranks are named is in tests/mpi/test_watching.py and tests/reliability."""

import logging
import math
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from largebatch.hooks import SlowRank
from largebatch.hooks.slow_rank import EVERY, PHASES, WINDOW, describe, excess


def times(load: float = 0.2, compute: float = 1.0, host: float = 0.1) -> list[float]:
    return [load, compute, host]


def test_a_rank_is_slow_a_tenth_above_the_median_and_not_by_a_few_milliseconds():
    table = [times(), times(), times(load=0.35), times()]
    assert [above > 1 for above in excess(table)] == [False, False, True, False]
    assert describe(table, 2) == "12 % slower than the median rank: its loading takes 350 ms a step, theirs 200 ms"
    assert max(excess([times(), times(), times(load=0.32), times()])) < 1
    fast = [times(0, 0.02, 0.01)] * 3
    assert max(excess([*fast, times(0, 0.06, 0.01)])) < 1 < max(excess([*fast, times(0, 0.09, 0.01)]))
    assert excess([times(), times(compute=1.4)])[1] > 1, "of two ranks, the faster one is the median"


def test_the_phase_is_that_which_takes_longest_beyond_the_median_of_its_own():
    for phase in range(len(PHASES)):
        slow = [1.0, 1.0, 1.0]
        slow[phase] = 2.0
        assert f"its {PHASES[phase]} takes 2000 ms" in describe([[1.0, 1.0, 1.0]] * 2 + [slow], 2)


class World:
    """The other ranks of a hook on rank 0 of four, whose times are `others`."""

    rank, size, waited_s = 0, 4, 0.0

    def __init__(self) -> None:
        self.others = [times()] * 3
        self.begun: list[torch.Tensor] = []
        self.state, self.device, self.pass_s = SimpleNamespace(step=0), torch.device("cpu"), []
        self.comm = self

    def allgather_object(self, value, *, name):
        return ["a", "b", "c", "d"]

    def start_allreduce(self, table, *, name):
        self.begun.append(table)
        return table.clone()

    def finish_allreduce(self, table):
        table[1:] = torch.tensor(self.others)
        return table

    def step(self, hook: SlowRank, mine: list[float], monkeypatch) -> None:
        load, compute, host = mine
        clock = time.perf_counter()
        monkeypatch.setattr("largebatch.hooks.slow_rank.time.perf_counter", lambda: clock)
        hook.after_step(self)
        self.waited_s += 5.0  # for the others: no time of its own
        clock += load + compute + host + 5.0
        self.pass_s = [compute, 0.3]  # the last pass sends
        clock += 0.3
        self.state.step += 1
        hook.after_train_step(self, SimpleNamespace(waited_s=load))


def test_a_slow_rank_is_told_once_until_it_has_recovered(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    world, hook = World(), SlowRank()
    hook.before_fit(world)
    for _ in range(2 * WINDOW):
        world.step(hook, times(), monkeypatch)
    assert not caplog.messages and math.isnan(hook.rank) and len(world.begun) == WINDOW // EVERY + 1
    assert world.begun[0][0].tolist() == pytest.approx(times()) and not world.begun[0][1:].any()
    world.others = [times(), times(), times(compute=1.5)]
    for _ in range(WINDOW):
        world.step(hook, times(), monkeypatch)
    percent = "38 % slower than the median rank"
    assert caplog.messages == [
        f"rank 3 on d is {percent}: its forward and backward takes 1500 ms a step, theirs 1000 ms"
    ] and hook.rank == 3
    for others, count in (([times()] * 3, 1), ([times(), times(), times(compute=1.5)], 2)):
        world.others = others
        for _ in range(WINDOW):
            world.step(hook, times(), monkeypatch)
        assert len(caplog.messages) == count


def test_a_rank_that_becomes_slow_is_told_within_20_steps_and_a_few_slow_steps_are_none(monkeypatch, caplog):
    world = World()
    for beginning in range(EVERY):
        hook, found = SlowRank(), []
        hook.before_fit(world)
        world.state.step = 0
        for number in range(3 * WINDOW):
            is_slow = 5 <= number < 18 or number >= WINDOW + 10 + beginning
            world.step(hook, times(load=0.6 if is_slow else 0.2), monkeypatch)
            found.append(hook.rank == 0)
        first = found.index(True) + 1 - (WINDOW + 10 + beginning)
        assert 15 < first <= 20, first
        assert all(later >= earlier for earlier, later in pairwise(found))


def test_a_rollback_forgets_the_steps_before(monkeypatch):
    world, hook = World(), SlowRank()
    hook.before_fit(world)
    for _ in range(WINDOW):
        world.step(hook, times(), monkeypatch)
    assert hook.handle is not None
    hook.after_rollback(world)
    assert hook.handle is None and not hook.steps


def test_on_a_gpu_the_first_pass_is_timed_there_and_the_host_does_not_wait(monkeypatch):
    """By planted events; tests/gpu has no second rank."""
    recorded: list[int] = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            recorded.append(len(recorded))

        def query(self):
            return True

        def elapsed_time(self, other):
            return 700.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    world, hook = World(), SlowRank()
    world.device, world.pass_s = torch.device("cuda"), [0.01, 0.01, 0.01]
    hook.at_first_batch(world, None)
    for _ in range(3):
        hook.at_point(world)
    assert recorded == [0, 1], "before the first pass, and before the second"
    measured = hook.measure(world, SimpleNamespace(waited_s=0.2), time.perf_counter() - 9.0, 0.0)
    assert measured == (0.2, pytest.approx(2 * 0.7), 0.0)
