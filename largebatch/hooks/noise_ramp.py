"""A batch ramp that follows the gradient noise scale: the batch doubles while it is smaller than the noise scale.

With --schedule.batch_ramp "1024@0,noise" the batch begins at 1,024. At each row of steps.csv, from the 30th on, a batch
below the averaged noise scale doubles, up to data.global_batch_size. Rank 0 decides for all ranks, so rounding cannot
part them. Checkpoints have the phases and averages, so a resumed run on as many ranks decides the same.
"""

import logging

from largebatch.engine import Trainer
from largebatch.hooks.noise_scale import HORIZON, Averages

logger = logging.getLogger(__name__)


def follow_noise(trainer: Trainer, averages: Averages) -> None:
    """Double the batch from the next step on, if the averages say so. A collective."""
    phases, plan, images = trainer.state.phases, trainer.plan, trainer.state.images
    batch, scale = phases[-1][1], averages.scale
    if batch == plan.global_batch_size or images == plan.num_images or averages.count < HORIZON:
        return
    if not trainer.comm.broadcast_object(scale > batch, name="noise_ramp/larger"):
        return
    larger = min(2 * batch, plan.global_batch_size)
    trainer.change_phases((*phases, (images, larger)))
    if trainer.comm.rank == 0:
        logger.info(
            "global batch %d after step %d, epoch %.2f: the noise scale is %.3g, above %d; %d steps in all",
            *(larger, trainer.state.step, trainer.epoch, scale, batch, trainer.num_steps),
        )
