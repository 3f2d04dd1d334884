"""Stops a run before the batch system kills it: at a signal, or while there is time left for a checkpoint.

SIGUSR1 or SIGTERM may reach any rank at any moment, and different ranks at different moments. Each rank only sets a
flag. A small asynchronous allreduce sums the flags while the next step runs, so no step waits for it and all ranks stop
after the same one. The process then ends with exit code 75, and the same command line resumes the run. mpirun and
horovodrun end with 75, too; horovodrun --gloo ends with 1 and prints the exit code of the ranks, 75.

Signals within `ONCE_S` after the first one count as the same request, because mpirun under Slurm may deliver a signal
twice. A later signal ends the process at once, even if it waits for a lost rank: a thread of its own reads the signals,
because Python runs signal handlers only in the main thread, and not while that thread is inside a collective.
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
MARGIN_S = 30.0  # for sinks, curves, the launcher's end and clocks that differ; Slurm waits as long before SIGKILL
SLURM_END = "SLURM_JOB_END_TIME"


class Signals:
    """Keeps the first of `SIGNALS` that reaches this process inside `with`, and ends the process at a later one.

    After `with`, a process that exits ignores the signals: the run may have stopped for a signal to another rank,
    and the signal to this rank may come later.
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
            signal.siginterrupt(number, False)  # system calls of libraries go on instead of failing with EINTR
        self._thread = threading.Thread(target=self._listen, name="largebatch-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if kind is SystemExit else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writer)  # the thread reads the end of the pipe and returns
        self._thread.join()
        os.close(self._reader)

    def _listen(self) -> None:
        """The thread: read the numbers of the signals from the pipe that Python writes them to."""
        at = 0.0
        while number := os.read(self._reader, 1):
            if number[0] not in SIGNALS:
                continue
            if self.first is None:
                self.first, at = signal.Signals(number[0]), time.monotonic()
            elif time.monotonic() - at > ONCE_S:
                os._exit(128 + number[0])  # the exit code that a shell gives to a process killed by a signal


def _heard(number: int, frame: FrameType | None) -> None:
    """Does nothing: it only replaces the default action, which would kill the process. `_listen` does the work."""


def end_time(option: float | str | None) -> float | None:
    """Returns the end of the job in seconds since the epoch, from --run.end_time or else Slurm; None if unknown.

    Raises ValueError if the option is in the past. A time of Slurm's in the past is ignored, because Slurm does not
    update the variable if the time limit of a job is raised.
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
    """Ends the run on all ranks after the same step, when a signal has reached any rank or `end` is near.

    The loop ends after the evaluation and the checkpoint of that step, if they are due. Then the last checkpoint is
    written, as at the end of a run.

    end: seconds since the epoch, or None; only the value of rank 0 counts.
    longest_save_s: returns the time of the longest checkpoint so far.
    """

    def __init__(self, signals: Signals, *, end: float | None, longest_save_s: Callable[[], float]) -> None:
        self.signals = signals
        self.end = end
        self.longest_save_s = longest_save_s
        self.steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.evaluation_s = 0.0  # the longest so far
        self.since = 0.0  # when the current step or evaluation began
        self.handle: int | None = None  # of the allreduce in flight

    def before_fit(self, trainer: Trainer) -> None:
        """Start the clock of the first step."""
        self.since = time.monotonic()

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """Measure the step."""
        now = time.monotonic()
        self.steps_s.append(now - self.since)
        self.since = now

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Measure the evaluation."""
        self.evaluation_s = max(self.evaluation_s, time.monotonic() - self.since)

    def after_step(self, trainer: Trainer) -> None:
        """Read the flags that the ranks had when the step began; if there are none, start to sum the present flags."""
        requests = self.finish(trainer.comm)
        if any(requests):
            trainer.stop_reason = self.explain(requests, trainer.comm)
        else:
            received = [self.signals.first == number for number in SIGNALS]
            near = trainer.comm.rank == 0 and self.end is not None and self.end - time.time() < self.needed_s()
            flags = torch.tensor([*received, near], dtype=torch.float32)
            self.handle = trainer.comm.start_allreduce(flags, name="stop early")
        self.since = time.monotonic()

    def after_fit(self, trainer: Trainer) -> None:
        """Wait for the last allreduce; its result has no effect."""
        self.finish(trainer.comm)

    def finish(self, comm: Communicator) -> list[int]:
        """Returns the number of ranks with a SIGUSR1, of ranks with a SIGTERM and of ranks with no time left (0 or 1).

        The list is empty if no allreduce is in flight.
        """
        if self.handle is None:
            return []
        handle, self.handle = self.handle, None
        return [round(count) for count in comm.finish_allreduce(handle).tolist()]

    def needed_s(self) -> float:
        """Returns the time that the run may need from now on if it asks to stop one step later.

        Ranks read a request one step after it is made. So at most two steps pass from here, one of them with an
        evaluation. A checkpoint on a busy disk may take twice the longest time so far.
        """
        return 2 * max(self.steps_s) + self.evaluation_s + 2 * self.longest_save_s() + MARGIN_S

    def explain(self, requests: list[int], comm: Communicator) -> str:
        """Returns the reason for the stop, as the end of a sentence."""
        *counts, near = requests
        reasons = [f"{number.name} reached {n} of {comm.size} ranks" for number, n in zip(SIGNALS, counts) if n]
        if near and self.end is not None:
            end = datetime.datetime.fromtimestamp(self.end).strftime("%Y-%m-%d %H:%M:%S")
            reasons.append(f"the job ends at {end}, and two steps and a checkpoint may take {self.needed_s():.0f} s")
        return ", and ".join(reasons) or "the end of the job is near"  # only rank 0 knows the time
