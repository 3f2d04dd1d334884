"""Trains as `python -m largebatch.train` does, with a fault at one place of one rank.

    LARGEBATCH_FAULT="1 reduce 3 SIGKILL" mpirun -np 2 python -m tests.reliability.injector --model vit_nano32 ...

The variable names the rank (or "all"), the phase, the number of the step that is being done, from 1 (0 for phases
before and after the steps), and the kind: "raise", "hang" or a signal. Without the variable nothing is changed. The
file planted.RANK in the run folder gets the process and the time of the fault just before it happens.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "LARGEBATCH_FAULT"
OUTSIDE = ("start", "data", "end")  # phases before the first step and after the last one
INSIDE = ("load", "forward", "reduce", "update", "evaluate", "save")  # phases of a step
AFTER_STEP = ("evaluate", "save")  # of these, when the step has been counted
PHASES = (*OUTSIDE, *INSIDE)
KINDS = ("raise", "hang", "SIGKILL", "SIGTERM", "SIGUSR1", "SIGSTOP")


@dataclass(frozen=True)
class Fault:
    """What happens where; step 0: outside the steps."""

    rank: int | None  # None: on all ranks
    phase: str
    step: int
    kind: str

    def __post_init__(self) -> None:
        assert self.phase in PHASES and self.kind in KINDS, self
        assert (self.step > 0) == (self.phase in INSIDE), self

    def __str__(self) -> str:
        return f"{'all' if self.rank is None else self.rank} {self.phase} {self.step} {self.kind}"

    @classmethod
    def read(cls, text: str) -> "Fault":
        rank, phase, step, kind = text.split()
        return cls(None if rank == "all" else int(rank), phase, int(step), kind)


class Injector:
    """Does what a fault says when a phase begins, once in a process."""

    def __init__(self, fault: Fault, folder: Path, rank: int) -> None:
        self.fault, self.folder, self.rank = fault, folder, rank
        self.steps: Callable[[], int] = lambda: -1  # steps done; known when the trainer is there
        self.done = False

    def enter(self, phase: str) -> None:
        """Called when a phase begins on this rank."""
        step = self.steps() + (phase not in AFTER_STEP) if phase in INSIDE else 0
        if self.done or (phase, step) != (self.fault.phase, self.fault.step):
            return
        if self.fault.rank not in (None, self.rank):
            return
        self.done = True
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"planted.{self.rank}").write_text(f"{os.getpid()} {time.time()}")
        if self.fault.kind == "raise":
            raise RuntimeError("planted")
        if self.fault.kind == "hang":
            time.sleep(10_000)
        os.kill(os.getpid(), signal.Signals[self.fault.kind])


def plant(injector: Injector) -> None:
    """Put the injector before each phase, and let the curves be drawn after each evaluation, at once."""
    from largebatch import engine, evaluation, start
    from largebatch.assembly import images
    from largebatch.data.dali import TrainLoader
    from largebatch.hooks import Checkpoint, sinks
    from largebatch.ranks.reduction import Reduced

    def before(owner: Any, name: str, phase: str) -> None:
        whole = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            injector.enter(phase)
            return whole(*arguments, **options)

        setattr(owner, name, wrapped)

    before(start, "set_up", "start")
    before(images, "open_data", "data")
    before(TrainLoader, "__next__", "load")
    before(engine.Trainer, "forward_backward", "forward")
    before(Reduced, "synchronize", "reduce")
    before(Reduced, "step_if_finite", "update")
    before(evaluation, "count_correct", "evaluate")
    before(Checkpoint, "save", "save")
    sinks.REDRAW_S = 0.0
    fit = engine.Trainer.fit

    def fitting(self: engine.Trainer, **options: Any) -> str:
        injector.steps = lambda: self.state.step
        reason = fit(self, **options)
        injector.enter("end")
        return reason

    engine.Trainer.fit = fitting  # type: ignore[method-assign]


def main(argv: list[str]) -> None:
    from largebatch import train
    from largebatch.launch.launcher import recognise

    if text := os.environ.get(VARIABLE):
        folder = Path(argv[argv.index("--run.folder") + 1])
        plant(Injector(Fault.read(text), folder, recognise(os.environ).rank))
    train.main(argv)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
