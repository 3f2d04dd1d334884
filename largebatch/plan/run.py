"""A whole run: hours by part, GPU-hours, price, energy, the images that it needs, failures. Seconds unless named."""

import math
from dataclasses import asdict, dataclass

from largebatch.assembly import images_of
from largebatch.config import NEVER, TrainConfig, duration_seconds, image_sizes
from largebatch.data.order import epoch_images
from largebatch.flops import training_flops
from largebatch.plan import constants
from largebatch.plan.memory import checkpoint_bytes
from largebatch.plan.step import Cluster, Speed, Step, pass_seconds
from largebatch.plan.trace import Pass, precision_of

HOUR = 3600.0
RAMP = (
    "--schedule.batch_ramp {!r} is not counted: the hours are those of the largest batch from the first step on, and "
    "smaller batches take longer; the memory is the same"
)


@dataclass(frozen=True)
class Run:
    start: float
    training: float
    evaluations: float
    checkpoints: float  # training stands still; the writing goes on beside it, unless it takes longer

    @property
    def seconds(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Input:
    images_per_s: float
    bytes_per_s: float
    cores_per_rank: float  # CPU cores that decode them


@dataclass(frozen=True)
class Failures:
    mtbf: float  # mean time between failures of the job
    interval: float  # between checkpoints, by Young and Daly
    seconds: float  # expected time of the run


def num_steps(config: TrainConfig, num_images: int) -> int:
    steps = math.ceil(images_of(config, "run.duration", num_images) / config.data.global_batch_size)
    return min(steps, config.run.max_steps) if config.run.max_steps else steps


def run_of(config: TrainConfig, counted: Pass, cluster: Cluster, step: Step, speed: Speed, *, num_images: int) -> Run:
    """Return the time of a run whose steps with images of model.img_size take the time of `step`."""
    steps = num_steps(config, num_images)
    training = steps * step.seconds * share_of_work(config, num_images)
    evaluations = _count(config, config.run.eval_every, "run.eval_every", steps, num_images, training)
    saves = _count(config, config.checkpoint.every, "checkpoint.every", steps, num_images, training)
    return Run(
        start=constants.START_S.value if cluster.device.kind == "cuda" else 0.0,
        training=training,
        evaluations=evaluations * evaluation_seconds(config, counted, cluster, speed),
        checkpoints=saves * stall_seconds(config, counted, between=training / saves if saves else math.inf),
    )


def share_of_work(config: TrainConfig, num_images: int) -> float:
    """Return the FLOPs of the images of a run, as a share of those at model.img_size: 1 without other sizes."""
    if not config.schedule.image_sizes:
        return 1.0
    whole = images_of(config, "run.duration", num_images)
    epoch = epoch_images(num_images, config.augment.repeats, config.data.global_batch_size)
    starts, sizes = zip(*image_sizes.phases(config, num_samples=epoch, run_images=whole))
    flops = [training_flops(config.model.name, size) for size in sizes]
    done = sum(count * (stop - start) for count, start, stop in zip(flops, starts, (*starts[1:], whole)))
    return done / (whole * flops[-1])


def _count(config: TrainConfig, every: str, option: str, steps: int, num_images: int, seconds: float) -> int:
    if every == NEVER:
        return 0
    if wanted := duration_seconds(every):
        return max(1, math.floor(seconds / wanted))
    batch = config.data.global_batch_size
    images = images_of(config, option, num_images, steps * batch)
    times = steps * batch // images
    also_at_end = math.ceil(times * images / batch) < steps
    return max(1, min(steps, times + also_at_end))


def evaluation_seconds(config: TrainConfig, counted: Pass, cluster: Cluster, speed: Speed) -> float:
    """Return the time of an evaluation; a forward pass is a third of a pass."""
    precision = precision_of(config, cluster.device.kind)
    per_image = pass_seconds(counted, cluster.device, precision, speed) / counted.images / 3
    replicas = config.parallel.shape().data_size(cluster.ranks)
    share = math.ceil(constants.HELD_OUT_IMAGES.value / replicas)
    average = 1 + config.optim.averages
    return constants.EVALUATION_S.value + average * share * per_image / config.parallel.shape().size


def stall_seconds(config: TrainConfig, counted: Pass, *, between: float) -> float:
    """Return the time that training waits for a checkpoint: the copy, and the rest of the save before."""
    size = checkpoint_bytes(config, counted)
    return size / constants.COPY_RATE.value + max(0.0, size / constants.WRITE_RATE.value - between)


def input_of(config: TrainConfig, cluster: Cluster, step: Step) -> Input:
    rate = config.data.global_batch_size / step.seconds
    per_rank = rate / config.parallel.shape().data_size(cluster.ranks)
    return Input(rate, rate * constants.IMAGE_BYTES.value, per_rank / constants.DECODED_PER_CORE.value)


def failures_of(
    config: TrainConfig, counted: Pass, *, ranks: int, seconds: float, hours_per_failure: float
) -> Failures:
    """Return the expected time of a run of `seconds` with failures, at the best checkpoint interval.

    The interval is Young's (https://doi.org/10.1145/361147.361115), the expected time Daly's
    (https://doi.org/10.1016/j.future.2004.11.016).
    """
    mtbf = hours_per_failure * HOUR / ranks
    size = checkpoint_bytes(config, counted)
    cost, writing = size / constants.COPY_RATE.value, size / constants.WRITE_RATE.value
    interval = min(max(math.sqrt(2 * cost * mtbf), writing), seconds)
    restart = constants.RESTART_S.value
    factor = mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf) / interval
    return Failures(mtbf, interval, seconds * factor)
