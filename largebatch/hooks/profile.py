"""Records a few steps with torch's profiler, as a trace that chrome://tracing and https://ui.perfetto.dev show.

The file lies on the disk of rank 0's host: a trace of 100 MB would delay everybody who shares the disk of the run
folder.
"""

import errno
import logging
import os
import re
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.files import atomic_file

logger = logging.getLogger(__name__)


class Profile(Hook):
    """Records steps `first` to `last` of this process, counted from 1, on rank 0."""

    def __init__(self, first: int, last: int, *, run: str) -> None:
        self.first, self.last, self.run = first, last, run
        self.done = 0  # steps of this process
        self.profiler: profile | None = None  # while it records

    def before_fit(self, trainer: Trainer) -> None:
        self.after_step(trainer)

    def after_step(self, trainer: Trainer) -> None:
        if trainer.comm.rank == 0 and self.done + 1 == self.first:
            gpu = [ProfilerActivity.CUDA] if trainer.device.type == "cuda" else []
            self.profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            self.profiler.start()

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """Stop before an evaluation, which would be most of the trace."""
        self.done += 1
        if self.done == self.last:
            self.finish()

    def after_fit(self, trainer: Trainer) -> None:
        """Write the steps there are, if the run ends early."""
        if self.done >= self.first:
            self.finish()
        elif trainer.comm.rank == 0:
            logger.warning("no trace: this process had %d steps, and the first to record was %d", self.done, self.first)

    def finish(self) -> None:
        """Stop recording and write the trace. A full disk costs the trace, not the run."""
        if self.profiler is None:
            return
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        steps = f"{self.first}-{self.done}"
        path = Path(tempfile.gettempdir()) / f"largebatch-{self.run}-rank0-steps-{steps}.json"
        try:
            with atomic_file(path) as file:
                _export(profiler, Path(file.name))
        except (OSError, RuntimeError) as error:
            logger.warning("the trace of steps %s of this process could not be written: %s", steps, error)
        else:
            logger.info("trace of steps %s of this process: %s", steps, path)


def _export(profiler: profile, trace: Path) -> None:
    """Raise OSError if the file is not whole: the profiler does not report a full disk."""
    try:
        profiler.export_chrome_trace(str(trace))
    finally:
        trace.with_name(trace.name + ".tmp").unlink(missing_ok=True)
    with open(trace, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 1000))
        if not re.search(rb'"traceName": "[^"]*"\s*}\s*$', file.read()):
            raise OSError(errno.ENOSPC, f"{trace.parent} is full, or a file may not be that large")
