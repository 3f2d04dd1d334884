"""The search for a batch by branched training (arXiv:2505.23971, section 3.1).

From a checkpoint, branches train at 1, 2, 4, 8 ... times the run's batch over the same images in the same order, at
constant rates that follow the batch. The search ends with the first branch that ends above that of the run's batch.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch import checkpoint
from largebatch.assembly import Images, build_trainer
from largebatch.config import TrainConfig
from largebatch.data.order import Plan
from largebatch.engine import Trainer
from largebatch.ranks import Ranks, Stopped
from largebatch.ranks.signals import Signals
from largebatch.rate_search import DECAY, Losses, smoothed, train, unwatched, write_rows
from largebatch.report.draw import write_picture
from largebatch.report.panels import COLOURS, Line, Panel
from largebatch.schedules import scale_lr

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

STEPS = 50  # of the largest batch, at least
FACTOR = 8  # the largest batch without --images, in batches of the run
TOLERANCE = 0.01  # nats, that of the paper
TABLE, PICTURE = "find_batch.csv", "find_batch.png"
EARLIER = "give an earlier checkpoint, such as RUN/checkpoints/00001000."


@dataclass(frozen=True)
class Branch:
    batch: int
    lr: float
    losses: list[float]  # of each step
    curve: list[float]  # smoothed

    def above(self, base: "Branch") -> float:
        return self.curve[-1] - base.curve[-1]

    def departs(self, base: "Branch") -> bool:
        """Return whether the loss ends above that of `base`, or is not finite."""
        return not self.above(base) <= TOLERANCE


def find_batch(
    config: TrainConfig,
    comm: Ranks,
    signals: Signals | None,
    *,
    device: "torch.device",
    images: Images,
    step: int,
    num_images: int,
) -> None:
    """Search from the checkpoint of `step`, and write the table and the picture; StoppedEarly if a signal came.

    num_images: of each branch; 0: STEPS steps of the largest batch.
    """
    config = unwatched(config)
    trainer = build_trainer(config, comm, signals, device=device, images=Images(images.train, None))
    rewind(config, trainer, step)
    plan, lr = trainer.plan, trainer.lr()
    own = plan.batch_size(step)
    with comm.together("choosing the batches"):
        batches = choose_batches(own, plan.num_samples, num_images)
        if not lr:
            raise ValueError(f"The learning rate after step {step} is 0, so no branch would learn: {EARLIER}")
    length = math.ceil(num_images / batches[-1] or STEPS) * batches[-1]
    past = max(0, plan.start(step) + length - plan.num_images)
    logger.info(
        "branches from step %d on, each over %d images%s, at global batches of %s",
        *(step, length, f", {past} of them after the end of the run" * (past > 0), ", ".join(map(str, batches))),
    )
    found: list[Branch] = []
    for batch in batches:
        rewind(config, trainer, step)
        trainer.plan = branched(plan, step, batch, length)
        branch = train_branch(trainer, batch, scaled(config, lr, batch, own), decay=DECAY ** (batch / batches[-1]))
        found.append(branch)
        logger.info(
            "global batch %d: %d steps at a learning rate of %.3g, smoothed loss %.4f, %+.4f from that of %d",
            *(batch, len(branch.losses), branch.lr, branch.curve[-1], branch.above(found[0]), own),
        )
        if branch.departs(found[0]):
            break
    if found[0].departs(found[0]):
        raise Stopped(f"At the run's own batch of {own} the loss is not finite, so nothing can be compared: {EARLIER}")
    with comm.together("writing the search"):
        if comm.rank == 0:
            tell(config, found, plan.num_samples)


def choose_batches(own: int, num_samples: int, num_images: int) -> list[int]:
    """Return the batches of the branches: the run's, twice that and so on, up to an epoch and to STEPS steps."""
    if 0 < num_images < 2 * STEPS * own:
        raise ValueError(
            f"--images is {num_images}: expected at least {2 * STEPS * own}, which are {STEPS} steps of {2 * own}, "
            "twice the run's batch."
        )
    if 2 * own > num_samples:
        raise ValueError(
            f"The run's global batch is {own}, and twice that is more than the {num_samples} training images: give a "
            f"run whose --data.global_batch_size is at most {num_samples // 2}."
        )
    most = min(num_images // STEPS or FACTOR * own, num_samples) // own
    return [own * 2**power for power in range(most.bit_length())]


def rewind(config: TrainConfig, trainer: Trainer, step: int) -> None:
    """Bring the trainer to the checkpoint of `step`, unless it is there."""
    if trainer.state.step != step:
        checkpoint.resume(config, trainer, last_step=step)
    if trainer.state.step != step:
        raise Stopped(f"Checkpoint {step} of {config.folder} is not valid any more: give the same command again.")


def branched(plan: Plan, step: int, batch: int, num_images: int) -> Plan:
    """Return the plan of a branch: from `step` on, so many images in this batch."""
    start, largest = plan.start(step), max(batch, plan.global_batch_size)
    before = [phase for phase in plan.phases or ((0, plan.global_batch_size),) if phase[0] < start]
    own, phases = plan.epoch_batch_size or plan.global_batch_size, (*before, (start, batch))
    return replace(
        plan, global_batch_size=largest, num_images=start + num_images, phases=phases, epoch_batch_size=own
    )


def scaled(config: TrainConfig, lr: float, batch: int, own: int) -> float:
    """Scale the rate of the run's batch by its own rule; without one, linearly for SGD, else by the square root."""
    rule = config.schedule.scaling
    if rule == "none":
        rule = "linear" if config.optim.name == "sgd" else "sqrt"
    return scale_lr(lr, batch_size=batch, reference_batch_size=own, rule=rule)


def train_branch(trainer: Trainer, batch: int, lr: float, *, decay: float) -> Branch:
    """Train to the end of the plan at a constant rate, of which nothing is halved any more."""
    trainer.learning_rate, trainer.state.halvings = lambda plan, step: lr, 0
    kept = Losses()
    train(trainer, kept)
    return Branch(batch, lr, kept.losses, smoothed(kept.losses, decay))


def tell(config: TrainConfig, found: Sequence[Branch], num_samples: int) -> None:
    folder, base, last = Path(config.folder), found[0], found[-1]
    rows = (
        (branch.batch, number * branch.batch, branch.lr, loss, smooth)
        for branch in found
        for number, (loss, smooth) in enumerate(zip(branch.losses, branch.curve), 1)
    )
    write_rows(folder / TABLE, ["batch", "images", "lr", "loss", "smoothed"], rows)
    draw(folder / PICTURE, found, title=f"loss after the same images, {config.model.name}, {config.optim.name}")
    result, more = f"the loss does not depart up to {last.batch:,}", 2 * last.batch
    why = f"--images {STEPS * more} tries {more:,}, too"
    if last.departs(base):
        result = f"the loss departs between {found[-2].batch:,} and {last.batch:,}"
        why = f"it ends {last.above(base):.3g} above that of the run's batch of {base.batch:,}"
    elif more > num_samples:
        why = f"{more:,} are more than the {num_samples:,} training images"
    logger.info("%s: %s; %s and %s have the curves.", result, why, folder / TABLE, PICTURE)


def draw(path: Path, found: Sequence[Branch], *, title: str) -> None:
    batches = [float(branch.batch) for branch in found]
    ends = [(batch, branch.curve[-1]) for batch, branch in zip(batches, found) if math.isfinite(branch.curve[-1])]
    limit = [(batch, found[0].curve[-1] + TOLERANCE) for batch in batches]
    lines = [Line("branches", COLOURS[0], ends), Line(f"the run's batch + {TOLERANCE}", COLOURS[1], limit, dash=1)]
    write_picture(path, Panel("find_batch", title, lines, across="global batch", ticks=batches))
