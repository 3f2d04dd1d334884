"""Decides when checkpoints are saved, and what happens if that fails; `largebatch.checkpoint` writes them."""

import logging
import time
from pathlib import Path

from largebatch import checkpoint
from largebatch.engine import Hook, Trainer

logger = logging.getLogger(__name__)


class Checkpoint(Hook):
    """Saves every `every_images` and at the end. A save that fails is a warning: older ones stay, the run goes on.
    The last one must not fail.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_images: int,
        keep: int,
        config_text: str,
    ) -> None:
        self.folder = Path(folder)
        self.every_images = every_images
        self.keep = keep
        self.config_text = config_text
        self.saved_step = 0
        self.failure: OSError | None = None  # of the newest save, on rank 0
        self.longest_s = 0.0  # time of a save, on rank 0

    def before_fit(self, trainer: Trainer) -> None:
        """What was resumed need not be saved again."""
        self.saved_step = trainer.state.step

    def after_step(self, trainer: Trainer) -> None:
        """The other ranks go on, and wait in the next step's reduction."""
        if trainer.due(self.every_images):
            self.save(trainer)

    def after_fit(self, trainer: Trainer) -> None:
        """Also where run.max_steps ended. comm.Stopped if what this process trained is nowhere."""
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
        began = time.perf_counter()
        self.saved_step = trainer.state.step  # or tried to, on all ranks alike
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
