"""Names a rank that is slower than the others, which all wait for it in each step.

A rank's own time, without waits for others, has three phases: the wait for images; the passes that do not communicate,
or the only one; and the rest. Other work on a host makes steps longer, and none shorter. So each rank takes the lower
quartile of a phase over WINDOW steps, and an allreduce that nobody waits for shares them.

On a GPU, events around the first pass tell its time, if a step has several. The rest does not count there.
"""

import logging
import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from largebatch.augment import Augmented
from largebatch.engine import Hook, StepOutput, Trainer

logger = logging.getLogger(__name__)

PHASES = ("loading", "forward and backward", "other work of the host")
WINDOW, EVERY = 20, 5  # steps; the quartiles are shared after each EVERY
LIMIT, FLOOR_S = 0.1, 0.05  # a slow rank takes this part, and this time of a step, longer than the median rank
Table = Sequence[Sequence[float]]  # by rank, the seconds of each phase


def excess(table: Table) -> list[float]:
    """Return how far each rank is above the median; 1 is the limit of a slow rank."""
    totals = [sum(times) for times in table]
    usual = statistics.median_low(totals)
    return [(total - usual) / max(LIMIT * usual, FLOOR_S) for total in totals]


def describe(table: Table, rank: int) -> str:
    """Say how slow a rank is, and in which phase most."""
    usual = statistics.median_low(map(sum, table))
    medians = [statistics.median_low(times) for times in zip(*table)]
    mine, theirs, phase = max(zip(table[rank], medians, PHASES), key=lambda one: one[0] - one[1])
    percent = 100 * (sum(table[rank]) / usual - 1)
    took = f"its {phase} takes {1000 * mine:.0f} ms a step, theirs {1000 * theirs:.0f} ms"
    return f"{percent:.0f} % slower than the median rank: {took}"


class SlowRank(Hook):
    """Needs whole models: ranks that share one wait for each other in each pass."""

    def __init__(self) -> None:
        self.rank = math.nan  # the slowest rank, if it is too slow
        self.named = set[int]()  # ranks that have been told, until they have recovered
        self.handle: Any = None
        self.forget()

    def forget(self) -> None:
        self.steps: deque[tuple[float, ...]] = deque(maxlen=WINDOW)
        self.began: tuple[float, float] | None = None  # when the step did, and the waits for others until then
        self.events: list[torch.cuda.Event] = []  # before and after the first pass

    def before_fit(self, trainer: Trainer) -> None:
        self.hosts = trainer.comm.allgather_object(socket.gethostname(), name="slow ranks/hosts")

    def at_first_batch(self, trainer: Trainer, batch: Augmented) -> None:
        self.events = [recorded_event()] if trainer.device.type == "cuda" and trainer.comm.size > 1 else []

    def at_point(self, trainer: Trainer) -> None:
        if len(self.events) == 1:
            self.events.append(recorded_event())

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        comm = trainer.comm
        if self.handle is not None:
            self.judge(trainer)
        if self.began is not None and comm.size > 1:
            self.steps.append(self.measure(trainer, output, *self.began))
            if len(self.steps) == WINDOW and trainer.state.step % EVERY == 0:
                table = torch.zeros(comm.size, len(PHASES), dtype=torch.float64)
                table[comm.rank] = torch.tensor([sorted(times)[WINDOW // 4] for times in zip(*self.steps)])
                self.handle = comm.start_allreduce(table, name="slow ranks")
        self.events = []

    def measure(self, trainer: Trainer, output: StepOutput, began: float, waited_s: float) -> tuple[float, ...]:
        own = time.perf_counter() - began - (trainer.comm.waited_s - waited_s)
        passes = trainer.pass_s[:-1] or trainer.pass_s
        rest = own - output.waited_s - sum(trainer.pass_s)
        if trainer.device.type != "cuda":
            return output.waited_s, sum(passes), rest
        on_device = 0.0
        if len(self.events) == 2 and self.events[1].query():  # the host has waited for the norm, which came later
            on_device = len(passes) * self.events[0].elapsed_time(self.events[1]) / 1000
        return output.waited_s, max(sum(passes), on_device), 0.0

    def judge(self, trainer: Trainer) -> None:
        table = trainer.comm.finish_allreduce(self.handle).tolist()
        self.handle, above = None, excess(table)
        slowest = max(range(len(above)), key=above.__getitem__)
        self.rank = slowest if above[slowest] > 1 else math.nan
        if above[slowest] > 1 and slowest not in self.named and trainer.comm.rank == 0:
            logger.warning("rank %d on %s is %s", slowest, self.hosts[slowest], describe(table, slowest))
        self.named = {rank for rank, one in enumerate(above) if one > 0.5 and rank in (*self.named, self.rank)}

    def after_step(self, trainer: Trainer) -> None:
        self.began = time.perf_counter(), trainer.comm.waited_s

    def after_rollback(self, trainer: Trainer) -> None:
        self.after_fit(trainer)

    def after_fit(self, trainer: Trainer) -> None:
        if self.handle is not None:
            self.judge(trainer)
        self.forget()


def recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
