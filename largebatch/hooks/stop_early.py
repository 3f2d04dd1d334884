"""Stops a run before the batch system kills it: at a signal, or while there is time left for a checkpoint.

Before the first step is done there is nothing to lose, and a signal itself ends the process (`ranks.signals`). Later
the ranks agree on a point (`ranks.stop_points`) before a pass of a step or a batch of an evaluation, and all leave
there. An incomplete step is dropped; an incomplete evaluation is made when the run is resumed. Then the last checkpoint
is written.

The process ends with exit code 75, and the same command line resumes the run. mpirun and horovodrun end with 75, too;
horovodrun --gloo and torchrun end with 1 and print 75. A second signal ends the process at once.
"""

import datetime
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable

from largebatch.config import epoch_seconds
from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.ranks import Ranks
from largebatch.ranks.signals import SIGNALS, Signals
from largebatch.ranks.stop_points import StopPoints

logger = logging.getLogger(__name__)

RECENT_STEPS = 50
MARGIN_S = 30.0  # sinks, curves, the launcher's own end, clocks that differ; as long as Slurm waits until it kills
SLURM_END = "SLURM_JOB_END_TIME"


def end_time(option: float | str | None) -> float | None:
    """Return the end of the job in seconds since the epoch, from --run.end_time or else Slurm; None if unknown.

    ValueError if the option is in the past. A past time of Slurm's is ignored: its variable stays when a job's time
    limit is raised.
    """
    if option is not None:
        end = epoch_seconds(option, option="run.end_time")
        if end <= time.time():
            raise ValueError(f"--run.end_time is {option}, which has passed: expected a time in the future, or null.")
        return end
    if not os.environ.get(SLURM_END):
        return None
    end = epoch_seconds(os.environ[SLURM_END], option=SLURM_END)
    if end <= time.time():
        logger.info("%s is %s, which has passed: it is ignored", SLURM_END, os.environ[SLURM_END])
        return None
    return end


class StopEarly(Hook):
    """Ends the run on all ranks at the same point, when a signal has reached any rank or `end` is near.

    end: seconds since the epoch; only rank 0's counts, and only after the first step.
    """

    def __init__(self, signals: Signals, *, end: float | None, longest_save_s: Callable[[], float]) -> None:
        self.signals = signals
        self.end = end
        self.longest_save_s = longest_save_s
        self.pauses_s: deque[float] = deque(maxlen=RECENT_STEPS)  # the longest time between two points of each step
        self.pause_s = 0.0  # the longest of the current step
        self.since = 0.0  # when the last point was passed
        self.latest = math.inf  # the time at which the run must begin to stop
        self.points: StopPoints | None = None

    def before_fit(self, trainer: Trainer) -> None:
        is_first = trainer.comm.rank == 0

        def requests() -> list[bool]:
            return [*self.signals.requests(), is_first and time.time() > self.latest]

        self.points = trainer.comm.stop_points(requests)
        self.since = time.monotonic()

    def at_point(self, trainer: Trainer) -> None:
        now = time.monotonic()
        self.pause_s, self.since = max(self.pause_s, now - self.since), now
        if self.points and self.points.leave():
            trainer.stop_reason = self.explain(self.points.counts, trainer.comm)

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        self.signals.nothing_to_lose = False  # this step would be lost
        self.pauses_s.append(max(self.pause_s, time.monotonic() - self.since))
        self.pause_s = 0.0
        if self.end is not None:
            self.latest = self.end - self.needed_s()

    def after_fit(self, trainer: Trainer) -> None:
        if self.points:
            self.points.close()

    def needed_s(self) -> float:
        """Return the longest time from a request to the end; a busy disk may double the time of a save."""
        return max(self.pauses_s) + 2 * self.longest_save_s() + MARGIN_S

    def explain(self, requests: list[int], comm: Ranks) -> str:
        *counts, gone, near = requests
        reasons = [f"{number.name} reached {n} of {comm.size} ranks" for number, n in zip(SIGNALS, counts) if n]
        if gone:
            reasons.append(f"the launcher of {gone} of {comm.size} ranks is gone")
        if near and self.end is not None:
            end = datetime.datetime.fromtimestamp(self.end).strftime("%Y-%m-%d %H:%M:%S")
            reasons.append(f"the job ends at {end}, and a pass and a checkpoint may take {self.needed_s():.0f} s")
        return ", and ".join(reasons) or "the end of the job is near"  # only rank 0 knows the time
