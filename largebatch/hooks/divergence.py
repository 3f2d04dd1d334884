"""Tells a training loss that sags from one that diverges; at a divergence it stops the run, or goes back.

A large batch at a high learning rate may lose ground and win more later: the loss of the published ViT-B/16 at 32,768
rises from 2.5 to 3.3 in its warm-up, and ends at 1.1. So a rise is measured as a share of the way from the lowest loss
back to that of a uniform guess:

    window    1 % of the steps of the run, at least 25
    way       uniform - lowest, at least uniform / 3; uniform is ln(classes), of a binary cross entropy its entropy
    smoothed  smoothed + (min(loss, lowest + way) - smoothed) / window, from the first loss on
    lowest    the lowest value of smoothed so far
    share     (smoothed - lowest) / way: sound up to 0.03, a sag above 0.125, a divergence above 0.85

The published sag has a share of 0.15. Runs on the digits came back from up to 0.72; runs that never came back reached
1.0 (tests/curves). A loss counts at most `lowest + way`, so it must stay high for 1.9 windows or longer. With the least
way, a run that never left the loss of a uniform guess has not diverged. Skipped steps do not count.

The sum of the loss over the ranks travels while the next step runs, so no step waits, and all ranks decide alike, one
step later.
"""

import logging
import math
from collections.abc import Callable
from functools import partial

from largebatch import checkpoint
from largebatch.checkpoint.mirror import Mirror
from largebatch.config import TrainConfig
from largebatch.engine import Hook, Smoothed, StepOutput, Trainer
from largebatch.ranks import Stopped

logger = logging.getLogger(__name__)

SHORTEST = 25  # steps of the shortest window
MOST_HALVINGS = 3
SOUND, SAGS, DIVERGED = 0.03, 0.125, 0.85  # shares of the way back


def window(num_steps: int) -> int:
    return max(SHORTEST, round(num_steps / 100))


def uniform_loss(config: TrainConfig) -> float:
    """Return the loss of a model that gives all classes the same probability."""
    num_classes = max(2, config.model.num_classes)  # with a single class there is no way back
    if config.loss.name == "bce":
        share = min(0.5, (2 if config.augment.mixup_alpha or config.augment.cutmix_alpha else 1) / num_classes)
        return -share * math.log(share) - (1.0 - share) * math.log1p(-share)
    return (1.0 + config.loss.dense_weight) * math.log(num_classes)


def way_back(lowest: float, uniform: float) -> float:
    return max(uniform - lowest, uniform / 3)


def smooth(before: Smoothed | None, loss: float, step: int, *, steps: int, uniform: float) -> Smoothed:
    """Return the smoothed loss after the finite loss of one more step. steps: of the window."""
    if before is None:
        return loss, loss, step
    now, lowest, sound_step = before
    now += (min(loss, lowest + way_back(lowest, uniform)) - now) / steps
    after = (now, min(now, lowest), step)
    return after if share_of_way(after, uniform) <= SOUND else (now, lowest, sound_step)


def share_of_way(smoothed: Smoothed | None, uniform: float) -> float:
    if smoothed is None:
        return 0.0
    now, lowest, _ = smoothed
    return (now - lowest) / way_back(lowest, uniform)


class Divergence(Hook):
    """Watches the smoothed loss, which is part of the state, and does what --run.on_divergence says."""

    def __init__(
        self, config: TrainConfig, *, complete_saves: Callable[[Trainer], None], mirror: Mirror | None = None
    ) -> None:
        """config: with the number of classes. complete_saves: waits for a save under way."""
        self.config, self.complete_saves, self.mirror = config, complete_saves, mirror
        self.uniform = uniform_loss(config)
        self.handle: int | None = None  # of the allreduce in flight
        self.step = 0  # of its loss
        self.told = 0.0  # the share that the log has been told of, since the last sound step

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        self.settle(trainer)
        share = share_of_way(trainer.state.smoothed, self.uniform)
        if share > DIVERGED:
            self.act(trainer)
        elif share > SAGS and self.told < SAGS:
            self.told = share
            if trainer.comm.rank == 0:
                told = self.describe(trainer)
                logger.info("step %d: the training loss sags: %s; a sag may pass", trainer.state.step, told)
        elif share <= SOUND:
            self.told = 0.0
        if output.applied and trainer.rollback is None:
            self.handle = trainer.comm.start_allreduce(output.loss_on_host(), name="divergence/loss")
            self.step = trainer.state.step

    def after_fit(self, trainer: Trainer) -> None:
        """Leave no message under way."""
        self.settle(trainer)

    def settle(self, trainer: Trainer) -> None:
        """Take the loss in flight into the state; also before each save, so that a resumed run decides alike."""
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        loss = float(trainer.comm.finish_allreduce(handle)) / trainer.comm.size
        if math.isfinite(loss):
            state, steps = trainer.state, window(trainer.num_steps)
            state.smoothed = smooth(state.smoothed, loss, self.step, steps=steps, uniform=self.uniform)

    # -- after a rise ------------------------------------------------------------------------------------------

    def act(self, trainer: Trainer) -> None:
        """Stop, arrange for a return to a checkpoint, or warn once; on all ranks at the same step."""
        action, found = self.config.run.on_divergence, f"the training loss diverged: {self.describe(trainer)}"
        if action == "ignore":
            if self.told < DIVERGED and trainer.comm.rank == 0:
                logger.warning("step %d: %s; --run.on_divergence is ignore", trainer.state.step, found)
            self.told = math.inf
            return
        self.complete_saves(trainer)
        sound = self.newest_sound(trainer)
        if action == "stop" or sound is None or trainer.state.halvings == MOST_HALVINGS:
            raise Stopped(f"Training stopped at step {trainer.state.step}, as {found}. {self.advise(trainer, sound)}")
        trainer.rollback = self.roll_back

    def newest_sound(self, trainer: Trainer) -> int | None:
        """Return the step of the newest checkpoint from before the rise, on all ranks."""
        assert trainer.state.smoothed
        last_step = trainer.state.smoothed[2]
        found = trainer.comm.from_rank_0(
            lambda: checkpoint.latest(self.config.folder, last_step=last_step), phase="looking for a checkpoint"
        )
        return None if found is None else int(found.name)

    def advise(self, trainer: Trainer, sound: int | None) -> str:
        anew = "begin anew in another --run.folder with a lower --optim.lr or a longer --schedule.warmup"
        if trainer.state.halvings == MOST_HALVINGS:
            return f"The learning rate was halved {MOST_HALVINGS} times before (--run.on_divergence halve): {anew}."
        if sound is None:
            return f"There is no checkpoint from before the rise: {anew}."
        return (
            f"The same command with --run.on_divergence halve goes back to the checkpoint of step {sound}, from before "
            f"the rise, and on at half the learning rate; or {anew}."
        )

    def describe(self, trainer: Trainer) -> str:
        assert trainer.state.smoothed
        now, lowest, sound_step = trainer.state.smoothed
        limit = lowest + DIVERGED * way_back(lowest, self.uniform)
        return (
            f"smoothed over {window(trainer.num_steps)} steps it is {now:.3g}, its lowest was {lowest:.3g}, it has "
            f"risen since step {sound_step}, and it counts as diverged above {limit:.3g} (a uniform guess has "
            f"{self.uniform:.3g})"
        )

    def roll_back(self, trainer: Trainer) -> None:
        """Go back to the newest checkpoint from before the rise, at half the learning rate. A collective.

        Newer checkpoints are removed first. If the process is killed before the halved rate is saved, the same steps
        diverge again.
        """
        assert trainer.state.smoothed
        step, last_step, halvings = trainer.state.step, trainer.state.smoothed[2], trainer.state.halvings + 1
        found = f"the training loss diverged: {self.describe(trainer)}"
        checkpoint.resume(self.config, trainer, last_step=last_step)
        state, mirror = trainer.state, self.mirror
        discard = partial(checkpoint.discard_after, self.config.folder, state.step, state.best)
        if mirror:
            discard = partial(mirror.discard_after, state.step, discard)
        state.best = trainer.comm.from_rank_0(discard, phase="going back")
        state.halvings = halvings
        if state.smoothed:  # this state is sound, also if its own loss was not
            state.smoothed = (*state.smoothed[:2], state.step)
        self.told = 0.0
        if trainer.comm.rank == 0:
            logger.warning(
                "step %d: %s; back to step %d, and on at %g of the learning rate (--run.on_divergence halve)",
                *(step, found, state.step, 0.5**halvings),
            )
