"""Decides when to save a checkpoint, and what to do if a save fails. `largebatch.checkpoint` writes the files."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from largebatch import checkpoint
from largebatch.engine import Hook, Trainer

logger = logging.getLogger(__name__)


class Checkpoint(Hook):
    """Saves a checkpoint every `every_images` and at the end of the run.

    A checkpoint includes the average of `Ema`. If a save fails, the hook warns, keeps the older checkpoints and lets
    the run go on. If the last save fails, the run fails.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_images: int,
        keep: int,
        config_text: str,
        before_save: Callable[[Trainer], None] | None = None,
    ) -> None:
        """before_save: is called on all ranks, and may raise comm.Stopped to keep a state from being saved."""
        self.folder = Path(folder)
        self.every_images = every_images
        self.keep = keep
        self.config_text = config_text
        self.before_save = before_save
        self.saved_step = 0
        self.failure: OSError | None = None  # the error of the newest save, on rank 0
        self.longest_s = 0.0  # the longest save so far, on rank 0

    def before_fit(self, trainer: Trainer) -> None:
        """A state that was resumed need not be saved again, unless its evaluation is made first."""
        self.saved_step = trainer.state.step if trainer.state.train_loss is None else -1

    def after_step(self, trainer: Trainer) -> None:
        """Save if a save is due. The other ranks go on, and wait in the allreduce of the next step."""
        if trainer.due(self.every_images):
            self.save(trainer)

    def after_fit(self, trainer: Trainer) -> None:
        """Save the last step, also if run.max_steps ended the run.

        Raises comm.Stopped if no checkpoint holds what this process has trained.
        """
        if trainer.state.step != self.saved_step:
            self.save(trainer)
        with trainer.comm.together("saving"):
            if self.failure:
                raise ValueError(
                    f"the last checkpoint, of step {trainer.state.step}, could not be written ({self.failure}): older "
                    "ones are kept, and the same command goes on from the newest once there is room."
                )

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint, on rank 0."""
        if self.before_save:
            self.before_save(trainer)
        began = time.perf_counter()
        self.saved_step = trainer.state.step  # also if the save fails, so that all ranks hold the same number
        model, optimizer = trainer.replica.gather_whole()
        if trainer.comm.rank != 0:
            return
        self.failure = None
        try:
            checkpoint.save(
                self.folder,
                model=model,
                optimizer=optimizer,
                scaler=trainer.scaler,
                state=trainer.state,
                config_text=self.config_text,
                keep=self.keep,
                average=trainer.average,
            )
        except OSError as error:
            self.failure = error
            logger.warning("the checkpoint of step %d failed: %s; older ones are kept", trainer.state.step, error)
        self.longest_s = max(self.longest_s, time.perf_counter() - began)
