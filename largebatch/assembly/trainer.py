"""The trainer of a run: images, replica, schedule, hooks and state."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch import checkpoint, hooks
from largebatch.assembly.images import (
    Images,
    build_augment,
    build_eval_loader,
    build_plan,
    check_batch,
    check_model,
    count_passes,
    hint_at_weights,
    images_of,
    model_geometry,
    open_images,
    refuse_lone_image,
    sizes_of,
    train_batches,
    warn_of_few_statistics,
    warn_of_large_batch,
    with_classes,
)
from largebatch.assembly.replica import batch_scaling, build_objective, build_replica, build_sam, peak_lr
from largebatch.batch_norm import batch_norms
from largebatch.config import NEVER, TrainConfig, dump, duration_seconds, options, profiled_steps, ramp
from largebatch.data.order import Plan
from largebatch.engine import Batches, Hook, Trainer, TrainState
from largebatch.hooks.ema import Average, Ema, ScheduleFree, check_half_life
from largebatch.hooks.profile import Profile
from largebatch.hooks.stop_early import StopEarly, end_time
from largebatch.optim import init_state
from largebatch.ranks import Ranks
from largebatch.ranks.signals import Signals
from largebatch.replica import Replica
from largebatch.schedules import Schedule, make_schedule
from largebatch.start import set_up
from zoo import hub
from zoo.vit import VisionTransformer

if TYPE_CHECKING:
    from largebatch.data.index import Index

logger = logging.getLogger(__name__)


def build_trainer(
    config: TrainConfig,
    comm: Ranks,
    signals: Signals | None = None,
    *,
    device: torch.device | None = None,
    images: Images | None = None,
) -> Trainer:
    """Build a whole run, resumed from its folder if there is a checkpoint.

    signals: stop the run early. device: that of `start.set_up`, if it has resolved the config. images: of
    `open_images`, if they are open.
    """
    if device is None:
        config, device = set_up(config, comm)
    from largebatch.data.sources import class_names

    if images is None:
        check_model(config, comm)
        check_batch(config, comm)
        images = open_images(config, comm)
    config = with_classes(config, images.train)
    passes = count_passes(config, comm)
    if comm.rank == 0:
        warn_of_large_batch(config.data.global_batch_size, len(images.train))
        hint_at_weights(config, len(images.train))
    names = comm.from_rank_0(lambda: class_names(images.train), phase="reading the names of the classes")
    replica = build_replica(config, comm, device, passes=passes, names=names)
    if comm.rank == 0:
        warn_of_few_statistics(replica.model, config.data.micro_batch_size)
    trainer = assemble(config, replica, device, images=images, signals=signals)
    checkpoint.resume(config, trainer)
    return trainer


def assemble(
    config: TrainConfig,
    replica: Replica,
    device: torch.device,
    *,
    images: Images,
    signals: Signals | None,
) -> Trainer:
    """Build the parts that depend on the images, and put all together, at the beginning of the run."""
    comm, model = replica.comm, replica.model
    with comm.together("building"):
        train, held_out = images
        plan = build_plan(config, train)
        refuse_lone_image(config, plan)
        sizes = sizes_of(config, plan)
        if len(sizes) > 1:
            cast(VisionTransformer, model).take_smaller_images()
        average = build_average(config, plan, model)
        eval_batches: Any = ()
        if held_out is not None:
            eval_batches = build_eval_loader(config, comm, model=model, index=held_out, device=device)
            comm.before_shutdown(eval_batches.close)
        description = describe(config, model, train) if comm.rank == 0 else ""
        trainer = put_together(
            config,
            replica,
            device,
            plan=plan,
            # A batch ramp may change the plan, and the batches are then opened anew.
            open_batches=lambda step: train_batches(
                config, comm, step, sizes=sizes, model=model, index=train, plan=trainer.plan, device=device
            ),
            eval_batches=eval_batches,
            hooks=build_hooks(config, train, plan, average, signals, description),
            average=average,
            data=train.digest(),
        )
    for line in replica.describe():
        logger.info("%s", line)
    return trainer


def put_together(
    config: TrainConfig,
    replica: Replica,
    device: torch.device,
    *,
    plan: Plan,
    open_batches: Callable[[int], Any],
    eval_batches: Batches,
    hooks: Sequence[Hook],
    average: Average | None,
    data: str,
) -> Trainer:
    """Put the parts together, and create the optimizer's state. data: the digest of the training images."""
    init_state(replica.optimizer)
    set_half_life(config, replica.optimizer, plan)
    return Trainer(
        comm=replica.comm,
        model=replica.model,
        objective=replica.adapt_objective(build_objective(config, replica.model)),
        optimizer=replica.optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled="fp16" in (config.run.precision, config.run.compression)),
        learning_rate=build_learning_rate(config, plan),
        plan=plan,
        open_batches=open_batches,
        eval_batches=eval_batches,
        augment=build_augment(config),
        seed=config.run.seed,
        precision=config.run.precision,
        clip_norm=config.optim.clip_norm,
        eval_images=evaluation_images(config, plan),
        device=device,
        replica=replica,
        hooks=hooks,
        sam=build_sam(config, replica.optimizer),
        average=average.model if average else None,
        state=TrainState(data=data, phases=plan.phases),
    )


def set_half_life(config: TrainConfig, optimizer: Optimizer, plan: Plan) -> None:
    """Give the groups with a second moment its half-life in images, by which the engine sets beta2 in each step."""
    text = config.optim.second_moment_half_life
    if not text:
        return
    images = images_of(config, "optim.second_moment_half_life", plan.num_samples, plan.num_images)
    sizes = ramp.batches(config)
    low, high = math.ceil(max(sizes) / 126), min(sizes) * 2**24  # the smallest normal number of float32 is 2^-126
    if not low <= images <= high:
        raise ValueError(
            f"--optim.second_moment_half_life is {text!r}, {images} images: expected {low} to {high} images, for which "
            f"beta2 is neither 0 nor 1 in float32 at a global batch of {' or '.join(map(str, sizes))}."
        )
    rates = ", ".join(f"{0.5 ** (size / images):.6g} at a global batch of {size}" for size in sizes)
    logger.info("second moment: a half-life of %d images, so beta2 is %s", images, rates)
    for group in optimizer.param_groups:
        if "betas" in group:
            group["half_life"] = images


def evaluation_images(config: TrainConfig, plan: Plan) -> int:
    """Return the training images between evaluations; 0 without evaluations."""
    if config.run.eval_every == NEVER:
        return 0
    return images_of(config, "run.eval_every", plan.num_samples, plan.num_images)


def build_learning_rate(config: TrainConfig, plan: Plan) -> Callable[[Plan, int], float]:
    """Return a function of the learning rate in a step of this plan, or of one with other phases."""
    peak, scaling, schedule = peak_lr(config), batch_scaling(config), build_schedule(config, plan)
    return lambda plan, step: peak * scaling(plan.batch_size(step)) * schedule(plan.time(step))


def build_schedule(config: TrainConfig, plan: Plan) -> Schedule:
    """Build the schedule, in steps like the first of this plan."""
    s, batch_size = config.schedule, plan.batch_size(0)
    images = {
        option: images_of(config, f"schedule.{option}", plan.num_samples, plan.num_images)
        for option in ("warmup", "cooldown")
    }
    if sum(images.values()) > plan.num_images + 1:  # each is rounded
        raise ValueError(
            f"--schedule.warmup is {s.warmup} and --schedule.cooldown {s.cooldown}: together they are longer than the "
            f"run of {config.run.duration}. Shorten one of them, or set a longer --run.duration."
        )
    total, warmup, cooldown = (-(-count // batch_size) for count in (plan.num_images, *images.values()))
    return make_schedule(
        s.name,
        total_steps=total,
        warmup_steps=warmup,
        cooldown_steps=min(cooldown, total - warmup),  # each is rounded up to whole steps
        start=s.start,
        floor=s.floor,
        prefix=s.stairs not in ("timm", "deit"),
        steps_per_epoch=plan.epoch_images / batch_size if s.stairs else None,
        late=int(s.stairs == "deit"),
    )


def build_hooks(
    config: TrainConfig, index: "Index", plan: Plan, average: Average | None, signals: Signals | None, description: str
) -> list[Hook]:
    """Build the hooks in the order in which they run: checks before a save, StopEarly after it, Log near the end."""

    def images(option: str) -> int:
        return images_of(config, option, plan.num_samples, plan.num_images)

    def where(sample: int) -> str:
        return f"{sample} ({index.where(sample)})"

    recomputing = hooks.RecomputeCheck(interval_images=images("run.recompute")) if config.run.recompute else None
    comparing = None
    if config.run.check_replicas:
        at_evaluations = config.run.check_replicas == "evaluation"
        interval = evaluation_images(config, plan) if at_evaluations else images("run.check_replicas")
        # Without evaluations the checks before each checkpoint and after the last step remain.
        interval = interval or plan.num_images
        comparing = hooks.ReplicaCheck(interval_images=interval, with_optimizer=not config.parallel.zero)
    every_s = duration_seconds(config.checkpoint.every) or 0.0
    mirror = checkpoint.Mirror(config.checkpoint.mirror, config.folder) if config.checkpoint.mirror else None
    mirroring = hooks.Mirroring(mirror) if mirror else None
    divergence = hooks.Divergence(config, complete_saves=lambda trainer: saving.complete(trainer.comm), mirror=mirror)
    saving = hooks.Checkpoint(
        config.folder,
        every_images=0 if every_s else images("checkpoint.every"),
        every_s=every_s,
        config_text=dump(config),
        description=description,
        best=config.checkpoint.best,
        before_save=[divergence.settle, *([comparing.check] if comparing else [])],
        after_save=mirroring.start if mirroring else None,
    )
    early = None
    if signals:
        early = StopEarly(
            signals,
            end=end_time(config.run.end_time),
            longest_save_s=lambda: saving.longest_s + (mirroring.longest_s if mirroring else 0.0),
        )
    slow = hooks.SlowRank() if config.parallel.shape().size == 1 else None
    noise = build_noise_scale(config, plan)
    steps = profiled_steps(config.run.profile_steps)
    profile = Profile(*steps, run=Path(config.folder).resolve().name) if steps else None
    log = hooks.Log(build_sinks(config), every_images=images("log.every"), noise=noise, slow=slow)
    guards = hooks.Guards(where=where)
    first = (guards, divergence, average, recomputing, comparing, saving)
    return [hook for hook in (*first, early, slow, noise, profile, log, mirroring) if hook]


def build_noise_scale(config: TrainConfig, plan: Plan) -> hooks.NoiseScale | None:
    """Build the hook of the gradient noise scale; if this run cannot have one, log why."""
    shape = config.parallel.shape()
    if shape.size > 1:
        logger.info("no gradient noise scale: with --parallel %s no rank has the gradient of a whole model", shape)
        return None
    if plan.repeats > 1:
        logger.info("no gradient noise scale: with --augment.repeats %d micro-batches share images", plan.repeats)
        return None
    if plan.global_batch_size < 2 * plan.micro_batch_size:
        logger.info(
            "no gradient noise scale: a step is a single micro-batch of %d images; --data.micro_batch_size %d, or a "
            "smaller one, allows it.",
            *(plan.micro_batch_size, max(1, plan.micro_batch_size // 2)),
        )
        return None
    every_images = images_of(config, "log.every", plan.num_samples, plan.num_images)
    after_row = hooks.follow_noise if ramp.by_noise(config) else None
    return hooks.NoiseScale(every_images=every_images, after_row=after_row)


def describe(config: TrainConfig, model: nn.Module, index: "Index") -> str:
    """Return the text of config.json: the model, its classes, and the preparation of images."""
    from largebatch.data.sources import class_names

    names, geometry = class_names(index), model_geometry(config.data, model)._asdict()
    if names and len(names) != config.model.num_classes:
        logger.warning("%d classes have names, the model has %d: none is saved", len(names), config.model.num_classes)
    return json.dumps(hub.describe(config.model.name, model, label_names=names, **geometry), indent=2) + "\n"


def build_sinks(config: TrainConfig) -> list[hooks.Sink]:
    """Build the places to which numbers are written. The picture comes after the tables that it draws."""
    sinks: list[hooks.Sink] = [hooks.Progress(), hooks.Csv(config.folder)]
    if "tensorboard" in (config.log.to or ""):
        sinks.append(hooks.TensorBoard(config.folder))
    if "wandb" in (config.log.to or ""):
        sinks.append(hooks.WeightsAndBiases(config.folder, options(config)))
    if "mlflow" in (config.log.to or ""):
        sinks.append(hooks.MLflow(config.folder, options(config)))
    title = f"{config.model.name}, recipe {config.recipe or 'custom'}"
    return [*sinks, hooks.Curves(config.folder, title=title)]


def build_average(config: TrainConfig, plan: Plan, model: nn.Module) -> Average | None:
    if config.optim.name == "schedule_free_adamw":
        if batch_norms(model):
            raise ValueError(
                f"--optim.name is schedule_free_adamw and --model {config.model.name} has batch norm, whose statistics "
                "would not be those of the average: choose a model without, such as vit_b16, or another optimizer."
            )
        return ScheduleFree(model)
    if not config.optim.ema_half_life:
        return None
    half_life_images = images_of(config, "optim.ema_half_life", plan.num_samples, plan.num_images)
    check_half_life(half_life_images, run_images=plan.num_images, epoch_images=plan.epoch_images)
    return Ema(model, half_life_images=half_life_images)
