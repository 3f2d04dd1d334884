"""Records a few steps with torch's profiler, as a trace that chrome://tracing and https://ui.perfetto.dev show.

A run that is not profiled pays nothing: the names of a step's phases are put around the trainer's parts when the first
of these steps begins, and taken away after the last. The backward pass has no name of its own: it is what autograd
does between forward and synchronize. The file lies on the disk of rank 0's host, since a trace of 100 MB would delay
all that share the run folder's, and has its name only when it is whole.
"""

import errno
import functools
import logging
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.files import atomic_file

logger = logging.getLogger(__name__)


class Profile(Hook):
    """Records steps `first` to `last` of this process, counted from 1, on rank 0."""

    def __init__(self, first: int, last: int, *, run: str) -> None:
        self.first, self.last, self.run = first, last, run
        self.done = 0  # steps of this process
        self.profiler: profile | None = None  # while it records
        self.restore = ExitStack()

    def before_fit(self, trainer: Trainer) -> None:
        """The first step begins."""
        self.after_step(trainer)

    def after_step(self, trainer: Trainer) -> None:
        """The next step begins, after what other hooks do."""
        if trainer.comm.rank == 0 and self.done + 1 == self.first:
            self.start(trainer)

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """Before an evaluation, which would be most of the trace."""
        self.done += 1
        if self.done == self.last:
            self.finish()

    def after_fit(self, trainer: Trainer) -> None:
        """What there is, if the run ends before."""
        if self.done >= self.first:
            self.finish()
        elif trainer.comm.rank == 0:
            logger.warning("no trace: this process had %d steps, and the first to record was %d", self.done, self.first)

    def start(self, trainer: Trainer) -> None:
        """Begin to record, and name the phases."""
        self.name(trainer, "train_step", "step")
        self.name(trainer, "objective", "forward")
        self.name(trainer.comm, "synchronize", "synchronize")
        self.name(trainer.comm, "apply", "optimizer step")
        gpu = [ProfilerActivity.CUDA] if trainer.device.type == "cuda" else []
        self.profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
        self.profiler.start()

    def name(self, owner: object, attribute: str, name: str) -> None:
        """Give the calls of owner.attribute a name in the trace, until the end."""
        call, own = getattr(owner, attribute), attribute in vars(owner)
        setattr(owner, attribute, _named(call, name))
        if own:
            self.restore.callback(setattr, owner, attribute, call)
        else:  # a method of its class
            self.restore.callback(delattr, owner, attribute)

    def finish(self) -> None:
        """End, and write the trace, if it records. A full disk costs the trace, not the run."""
        if self.profiler is None:
            return
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        self.restore.close()
        steps = f"{self.first}-{self.done}"
        path = Path(tempfile.gettempdir()) / f"largebatch-{self.run}-rank0-steps-{steps}.json"
        try:
            with atomic_file(path) as file:
                _export(profiler, Path(file.name))
        except (OSError, RuntimeError) as error:
            logger.warning("the trace of steps %s of this process could not be written: %s", steps, error)
        else:
            logger.info("trace of steps %s of this process: %s", steps, path)


def _named(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def recorded(*arguments: Any) -> Any:
        with record_function(name):
            return call(*arguments)

    return recorded


def _export(profiler: profile, trace: Path) -> None:
    """OSError if the file is not whole: of a full disk the profiler says nothing, and leaves what it had written."""
    try:
        profiler.export_chrome_trace(str(trace))
    finally:
        trace.with_name(trace.name + ".tmp").unlink(missing_ok=True)
    with open(trace, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 1000))
        if not re.search(rb'"traceName": "[^"]*"\s*}\s*$', file.read()):
            raise OSError(errno.ENOSPC, f"{trace.parent} is full, or a file may not be that large")
