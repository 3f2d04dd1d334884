"""Copies checkpoints to --checkpoint.mirror in a thread of rank 0, while training goes on.

No step waits for it; the newest checkpoint is copied first, and those that are no longer kept are left out. If a copy
fails, the log says so, and it is tried again until it succeeds. Only the end of the run waits.
"""

import logging
import threading
import time
from concurrent import futures

from largebatch.checkpoint.mirror import Mirror, reason_of
from largebatch.engine import Hook, Trainer
from largebatch.process.background import in_background
from largebatch.ranks import Ranks, Stopped

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0  # between two attempts
WARN_EVERY_S = 3600.0
TELL_EVERY_S = 0.5  # how often rank 0 tells the others that it still copies
LOG_EVERY = 60  # of these
STOP_S = 30.0  # how long a run that was told to end waits, as long as Slurm waits until it kills


class Mirroring(Hook):
    """It comes last, so that the tables and pictures of the other hooks are complete at the end."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self.longest_s = 0.0  # of an update
        self.sent = 0  # bytes
        self.failure = ""  # of the newest attempt
        self.gave_up = False  # the same on all ranks
        self._lock, self._hurry = threading.Lock(), threading.Event()
        self._due = False
        self._work: futures.Future[None] | None = None
        self._warned = -float("inf")

    def before_fit(self, trainer: Trainer) -> None:
        if trainer.comm.rank == 0:
            self.start()
        trainer.comm.before_shutdown(lambda: self.complete(trainer.comm))

    def after_fit(self, trainer: Trainer) -> None:
        """Wait until the mirror has the last checkpoint; Stopped if it fails, unless the run was told to end."""
        told, comm = bool(trainer.stop_reason), trainer.comm
        if why := self.wait(comm, max(STOP_S, self.longest_s) if told else comm.hang_limit_s, patient=not told):
            lacks = (
                f"--checkpoint.mirror {self.mirror.address} lacks the last checkpoint ({why}); it is in "
                f"{self.mirror.run.checkpoints}, and the same command copies it."
            )
            if not told:
                raise Stopped(lacks)
            if comm.rank == 0:
                logger.warning("%s", lacks)

    def complete(self, comm: Ranks) -> None:
        """Copy the last lines of the log, too, or what a run that failed has saved."""
        self.wait(comm, STOP_S)

    def start(self) -> None:
        """Let a thread bring the mirror to the state of the run folder; for rank 0."""
        with self._lock:
            self._due = True
            self._hurry.set()
            if self._work is None:
                self._work = in_background(self._update, name="largebatch-mirror")

    def _update(self) -> None:
        pause = 1.0
        while self._is_due():
            self._hurry.clear()
            began = time.monotonic()
            try:
                self.mirror.update(self._add)
            except Exception as error:  # of any library of a file system
                self._due, self.failure = True, reason_of(error)
                if time.monotonic() - self._warned > WARN_EVERY_S:
                    self._warned = time.monotonic()
                    told = "the mirror %s cannot be written (%s): training goes on, and the copy is tried again"
                    logger.warning(told, self.mirror.address, self.failure)
                self._hurry.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                if self.failure:
                    logger.info("the mirror %s has caught up", self.mirror.address)
                self.failure, self._warned, pause = "", -float("inf"), 1.0
                self.longest_s = max(self.longest_s, time.monotonic() - began)

    def _is_due(self) -> bool:
        with self._lock:
            due, self._due = self._due, False
            if not due:
                self._work = None
            return due

    def _add(self, num_bytes: int) -> None:
        self.sent += num_bytes

    def wait(self, comm: Ranks, limit_s: float, *, patient: bool = False) -> str:
        """Wait on all ranks until the mirror has all, up to limit_s (0: no limit); return why it has not.

        patient: the limit counts from the last byte that was sent. Rounds are counted, as in `Checkpoint.wait`.
        """
        if self.gave_up:
            return ""
        if comm.rank == 0:
            self.start()
        rounds = quiet = 0
        why: str | None = None
        while why is None:
            comm.progress("waiting for the mirror")
            sent, work = self.sent, self._work
            if comm.rank == 0:
                done = work is None or bool(futures.wait([work], TELL_EVERY_S).done)
                quiet = 0 if patient and sent != self.sent else quiet + 1
                if rounds and rounds % LOG_EVERY == 0:
                    logger.info("waiting for the mirror %s: %.3g GB sent", self.mirror.address, self.sent / 1e9)
                late = 0 < limit_s < quiet * TELL_EVERY_S
                why = "" if done else self.failure or f"no answer in {limit_s:g} s" if late else None
            why = comm.broadcast_object(why, name="mirror/done")
            rounds += 1
        self.gave_up = bool(why)
        return why
