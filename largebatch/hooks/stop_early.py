"""Stops a run before a batch system does: at a signal, or while there is time left for a checkpoint.

SIGUSR1 or SIGTERM may reach any rank, at any moment, and the ranks at different ones. So each only notes it; what all
have noted is summed by a small reduction that runs beside the next step and is read after it: no step waits for it, and
all ranks stop after the same one. The process ends with exit code 75 then, and the same command line resumes. mpirun
and horovodrun end with 75, too; horovodrun --gloo with 1, and the ranks' 75 in what it prints.

What comes within `ONCE_S` of the first signal is taken for the same request: mpirun under Slurm was seen to deliver it
twice. A later one ends the process at once, even where it waits for a rank that is lost: a thread hears the signals,
because Python calls handlers in the main thread alone, and not while that is inside a collective.
"""

import datetime
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from largebatch.comm import Communicator
from largebatch.config import epoch_seconds
from largebatch.engine import Hook, StepOutput, Trainer

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
ONCE_S = 2.0
RECENT_STEPS = 50
MARGIN_S = 30.0  # sinks, curves, the launcher's own end, clocks that differ; as long as Slurm waits until it kills
SLURM_END = "SLURM_JOB_END_TIME"


class Signals:
    """Notes the first of `SIGNALS` that reaches this process inside `with`, and ends the process at a later one.

    A process that is ending ignores them: the run may have stopped for another rank's signal, and its own come late.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            self._before[number] = signal.signal(number, _heard)
            signal.siginterrupt(number, False)  # libraries need not know
        self._thread = threading.Thread(target=self._listen, name="largebatch-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if kind is SystemExit else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writer)  # the thread sees the end
        self._thread.join()
        os.close(self._reader)

    def _listen(self) -> None:
        at = 0.0
        while number := os.read(self._reader, 1):
            if number[0] not in SIGNALS:
                continue
            if self.first is None:
                self.first, at = signal.Signals(number[0]), time.monotonic()
            elif time.monotonic() - at > ONCE_S:
                os._exit(128 + number[0])  # as a shell reports it


def _heard(number: int, frame: FrameType | None) -> None:
    """What Python calls in the main thread, some time after `_listen` has heard."""


def end_time(option: float | str | None) -> float | None:
    """Seconds since the epoch at which the job ends, by --run.end_time or else by Slurm; None if nobody says.

    ValueError for an option in the past; Slurm's is ignored then, as a limit that was raised leaves it behind.
    """
    if option is not None:
        end = epoch_seconds(option, option="run.end_time")
        if end <= time.time():
            raise ValueError(f"--run.end_time is {option}, which has passed: expected a time to come, or null.")
        return end
    if not os.environ.get(SLURM_END):
        return None
    end = epoch_seconds(os.environ[SLURM_END], option=SLURM_END)
    if end <= time.time():
        logger.info("%s is %s, which has passed: it is ignored", SLURM_END, os.environ[SLURM_END])
        return None
    return end


class StopEarly(Hook):
    """Ends the run on all ranks after the same step, once a signal came to one of them or `end` comes near.

    end: seconds since the epoch, None for none; only rank 0's counts. longest_save_s: of the checkpoints written so
    far. The loop ends after the step's evaluation and checkpoint, if they were due; the last checkpoint is written
    then, as at the end of a run.
    """

    def __init__(self, signals: Signals, *, end: float | None, longest_save_s: Callable[[], float]) -> None:
        self.signals = signals
        self.end = end
        self.longest_save_s = longest_save_s
        self.steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.evaluation_s = 0.0  # the longest one
        self.since = 0.0  # when the step or the evaluation began
        self.handle: int | None = None  # of the reduction that is under way

    def before_fit(self, trainer: Trainer) -> None:
        """The first step is timed, too."""
        self.since = time.monotonic()

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """How long steps take."""
        now = time.monotonic()
        self.steps_s.append(now - self.since)
        self.since = now

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """How long evaluations take."""
        self.evaluation_s = max(self.evaluation_s, time.monotonic() - self.since)

    def after_step(self, trainer: Trainer) -> None:
        """What all had noted when the step began; then begin to ask again."""
        requests = self.finish(trainer.comm)
        if any(requests):
            trainer.stop_reason = self.explain(requests, trainer.comm)
        else:
            noted = [self.signals.first == number for number in SIGNALS]
            near = trainer.comm.rank == 0 and self.end is not None and self.end - time.time() < self.needed_s()
            flags = torch.tensor([*noted, near], dtype=torch.float32)
            self.handle = trainer.comm.start_allreduce(flags, name="stop early")
        self.since = time.monotonic()

    def after_fit(self, trainer: Trainer) -> None:
        """The last step has nobody to tell."""
        self.finish(trainer.comm)

    def finish(self, comm: Communicator) -> list[int]:
        """Ranks with a SIGUSR1, with a SIGTERM, and whether time runs out; empty if nothing was asked."""
        if self.handle is None:
            return []
        handle, self.handle = self.handle, None
        return [round(count) for count in comm.finish_allreduce(handle).tolist()]

    def needed_s(self) -> float:
        """Time to end well from now on, if the next step is the last but one that can be told.

        A request is read one step after it is made, so two steps pass at most between two chances to make one and to
        stop, one of them with an evaluation; a checkpoint on a busy disk takes twice its longest time.
        """
        return 2 * max(self.steps_s) + self.evaluation_s + 2 * self.longest_save_s() + MARGIN_S

    def explain(self, requests: list[int], comm: Communicator) -> str:
        """Why, as the end of a sentence."""
        *counts, near = requests
        came = [f"{number.name} came to {n} of {comm.size} ranks" for number, n in zip(SIGNALS, counts) if n]
        if near and self.end is not None:
            end = datetime.datetime.fromtimestamp(self.end).strftime("%Y-%m-%d %H:%M:%S")
            came.append(f"the job ends at {end}, and two steps and a checkpoint may take {self.needed_s():.0f} s")
        return ", and ".join(came) or "the end of the job is near"  # the time is rank 0's
