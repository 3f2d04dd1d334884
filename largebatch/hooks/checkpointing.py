"""Decides when to save a checkpoint, and what to do if a save fails. `largebatch.checkpoint` writes the files.

In a step, rank 0 only copies the state to host memory; a thread writes the copy while training goes on. The run waits
for the thread when the next checkpoint is due, and at the end. Meanwhile rank 0 tells the other ranks again and again
that it still writes, so no rank waits long in one collective.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from pathlib import Path

import torch

from largebatch import checkpoint
from largebatch.engine import Hook, Trainer
from largebatch.process.background import in_background
from largebatch.ranks import Ranks, Stopped
from largebatch.report import history

logger = logging.getLogger(__name__)

SIGNS = {"top1": 1, "ema_top1": 1, "loss": -1}  # of the metrics by which an evaluation is the best
TELL_EVERY_S = 0.5  # how often rank 0 tells the others that it still writes


class Checkpoint(Hook):
    """Saves every `every_images`, or every `every_s` by rank 0's clock, at the best evaluation so far, and at the end.

    If a save fails, the hook warns, keeps the older checkpoints and lets the run go on; the last one must succeed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_images: int = 0,
        every_s: float = 0.0,
        keep: int = 2,
        config_text: str,
        description: str = "",
        best: str = "none",
        before_save: Sequence[Callable[[Trainer], None]] = (),
        after_save: Callable[[], None] | None = None,
    ) -> None:
        """best: the metric that decides which evaluation is the best: top1, ema_top1, loss or none.

        before_save: called in turn on all ranks, may raise comm.Stopped to refuse a state. after_save: called in the
        thread when a checkpoint is complete. description: for config.json.
        """
        assert bool(every_images) != bool(every_s), (every_images, every_s)
        self.folder = Path(folder)
        self.every_images, self.every_s = every_images, every_s
        self.config_text, self.description, self.best = config_text, description, best
        self.before_save = before_save
        self.writer = Writer(folder, keep=keep, after_save=after_save)
        self.memory = checkpoint.HostMemory()
        self.saved_step = 0
        self.saved_at = 0.0  # rank 0's clock
        self.writing = False  # the same on all ranks
        self.handle: int | None = None  # of the allreduce in flight that tells whether the time has come
        self.copied: torch.cuda.Event | None = None  # until then a GPU copies what the next step changes

    @property
    def longest_s(self) -> float:
        return self.writer.next_takes_s()

    def before_fit(self, trainer: Trainer) -> None:
        """A resumed state is saved again only if its evaluation is still to be made."""
        self.saved_step = trainer.state.step if trainer.state.train_loss is None else -1
        self.saved_at = time.monotonic()
        with trainer.comm.together("making the run folder"):
            if trainer.comm.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.check_space(trainer)
        trainer.comm.before_shutdown(lambda: self.wait(trainer.comm))
        trainer.optimizer.register_step_pre_hook(lambda *_: self.before_update())

    def before_update(self) -> None:
        """Let the GPU change nothing before it is copied. The host does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None

    def check_space(self, trainer: Trainer) -> None:
        """Raise ValueError if this rank's part of a checkpoint cannot fit on the disk."""
        models = [model.state_dict() for model in (trainer.model, trainer.average) if model is not None]
        try:
            needed = checkpoint.num_bytes([models, list(trainer.optimizer.state.values())])
            checkpoint.check_space(self.folder, needed)
        except OSError as error:
            raise ValueError(f"{error.strerror}: make room, or give another --run.folder.") from error

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Note the best evaluation; all ranks have the same metrics, so they decide alike."""
        value, best = metrics.get(self.best, math.nan), trainer.state.best
        if best is not None and best[0] == self.best:  # a resumed run may have another metric
            better = SIGNS[self.best] * value > SIGNS[self.best] * best[1]
        else:
            better = math.isfinite(value)
        if better:
            trainer.state.best = self.best, value, trainer.state.step

    def after_step(self, trainer: Trainer) -> None:
        due = trainer.due(self.every_images) if self.every_images else self.time_has_come(trainer.comm)
        if due or trainer.state.best and trainer.state.best[2] == trainer.state.step:
            self.save(trainer)

    def complete(self, comm: Ranks) -> None:
        self.finish(comm)
        self.wait(comm)

    def after_rollback(self, trainer: Trainer) -> None:
        self.save(trainer)

    def after_fit(self, trainer: Trainer) -> None:
        """Save the last step and wait until it is on the disk; comm.Stopped if that failed."""
        self.finish(trainer.comm)
        if trainer.state.step != self.saved_step:
            self.save(trainer)
        self.wait(trainer.comm)
        with trainer.comm.together("saving"):
            if self.writer.failure:
                raise ValueError(self.explain(trainer.state.step, self.writer.failure))

    def save(self, trainer: Trainer) -> None:
        """Begin to write the state, on rank 0, when the save before is complete. A collective."""
        for call in self.before_save:
            call(trainer)
        began = time.monotonic()
        self.wait(trainer.comm)
        self.saved_step = trainer.state.step  # also if the save fails, so that all ranks agree
        trainer.state.losses = trainer.total_losses()
        model, optimizer = trainer.replica.gather_whole()
        self.writing, self.saved_at = True, began
        if trainer.comm.rank != 0:
            return
        snapshot = checkpoint.take_snapshot(
            model=model,
            optimizer=optimizer,
            scaler=trainer.scaler,
            state=trainer.state,
            config_text=self.config_text,
            average=trainer.average,
            # A model gathered from several ranks is a copy already; an average beside it is not.
            memory=self.memory if model is trainer.model or trainer.average else None,
            description=self.description,
            # The weights change first in the optimizer, or for a second gradient; buffers in the forward pass.
            beside=trainer.sam is None and next(trainer.model.buffers(), None) is None,
        )
        self.copied = snapshot.copied
        self.writer.start(snapshot, began=began)

    def wait(self, comm: Ranks) -> None:
        """Wait on all ranks until rank 0 has nothing to write; comm.Stopped after --horovod.hang_limit_s.

        Rounds are counted, not seconds, because a suspended job does not wait.
        """
        rounds = 0
        while self.writing:
            done = comm.rank == 0 and self.writer.wait(TELL_EVERY_S)
            self.writing = not comm.broadcast_object(done, name="checkpoint/done")
            rounds += 1
            if self.writing and 0 < comm.hang_limit_s < rounds * TELL_EVERY_S:
                self.writing = False  # nobody waits again
                raise Stopped(
                    f"the checkpoint of step {self.saved_step} was not written in {comm.hang_limit_s:g} s: the file "
                    f"system of {self.folder} does not answer, or is too slow; --horovod.hang_limit_s is the limit."
                )

    # -- by time -----------------------------------------------------------------------------------------------

    def time_has_come(self, comm: Ranks) -> bool:
        """Return what rank 0's clock said one step ago; the answer travels during a step, so no step waits."""
        due = self.finish(comm)
        if not due:
            passed = comm.rank == 0 and time.monotonic() - self.saved_at >= self.every_s
            self.handle = comm.start_allreduce(torch.tensor([float(passed)]), name="checkpoint/due")
        return due

    def finish(self, comm: Ranks) -> bool:
        """Return the answer to the question in flight, False if there is none."""
        if self.handle is None:
            return False
        handle, self.handle = self.handle, None
        return bool(comm.finish_allreduce(handle))

    def explain(self, step: int, failure: OSError) -> str:
        sentence = f"the last checkpoint, of step {step}, could not be written ({failure}): "
        if not self.folder.exists():
            return f"{sentence}nothing of this run is left; choose another --run.folder to train again."
        return f"{sentence}older ones are kept; mend that, and the same command goes on from the newest."


class Writer:
    """Writes snapshots in a thread, one at a time; for rank 0."""

    def __init__(self, folder: str | Path, *, keep: int, after_save: Callable[[], None] | None = None) -> None:
        self.folder, self.keep, self.after_save = folder, keep, after_save
        self.failure: OSError | None = None  # of the newest save
        self.recorded = False  # that this start has a checkpoint
        self.longest_s = 0.0  # from the moment when a save was due until it was complete
        self._began = 0.0  # when the newest save was due
        self._result: futures.Future[None] | None = None  # of the save under way

    def start(self, snapshot: checkpoint.Snapshot, *, began: float) -> None:
        assert self._result is None
        self.failure, self._began = None, began
        # Whoever ends the process waits for the save before, but no longer than its limit.
        self._result = in_background(lambda: self._write(snapshot), name="largebatch-checkpoint")

    def wait(self, timeout_s: float) -> bool:
        """Wait for the save under way; return whether it is over. Raises its error, except an OSError."""
        if self._result is not None and futures.wait([self._result], timeout_s).done:
            result, self._result = self._result, None
            result.result()
        return self._result is None

    def next_takes_s(self) -> float:
        """Return the longest time of a save so far, plus the rest of that time for a save under way."""
        if self._result is None or self._result.done():
            return self.longest_s
        passed = time.monotonic() - self._began
        longest = max(self.longest_s, passed)
        return longest + longest - passed

    def _write(self, snapshot: checkpoint.Snapshot) -> None:
        try:
            checkpoint.save(self.folder, snapshot, keep=self.keep)
        except OSError as error:
            self.failure = error
            logger.warning("the checkpoint of step %d failed: %s; older ones are kept", snapshot.step, error)
        else:
            self._record(snapshot.step)
            if self.after_save:
                self.after_save()
        self.longest_s = max(self.longest_s, time.monotonic() - self._began)

    def _record(self, step: int) -> None:
        if not self.recorded:
            with suppress(OSError):  # without this note, a run that has lost all checkpoints begins anew
                history.write_saved(Path(self.folder), step=step)
                self.recorded = True
