"""From a config to a run that can start: the only place that assembles the parts.

`build_trainer` sets up the rank, opens the images, builds the replica and the trainer, and resumes. Every rank
builds the same from the config and the seed; then all get the state of rank 0, fresh or resumed. Work that can fail
on one rank alone (files, memory, a GPU) is done inside `comm.together`, so that all ranks stop with the cause.
"""

import json
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch import checkpoint, hooks, optim
from largebatch.augment import Augment
from largebatch.batch_norm import batch_norms
from largebatch.comm import Communicator, Stopped
from largebatch.comm.cores import loader_threads
from largebatch.comm.signals import Signals
from largebatch.compiling import compile_model
from largebatch.config import (
    NEVER,
    DataConfig,
    TrainConfig,
    accumulation_passes,
    dump,
    duration_images,
    duration_seconds,
    nearest_batches,
    options,
    profiled_steps,
    ramp,
)
from largebatch.data.order import Plan
from largebatch.data.randaugment import parse as parse_policy
from largebatch.data.token_labels import CELL
from largebatch.engine import Batches, Hook, Trainer, TrainState
from largebatch.hooks.ema import Ema, check_half_life
from largebatch.hooks.profile import Profile
from largebatch.hooks.starts import count as count_of
from largebatch.hooks.stop_early import StopEarly, end_time
from largebatch.losses import Objective, TokenLabeling, classification
from largebatch.native.attention import choose_attention, describe_attention, outlook_difference
from largebatch.optim import can_compile, init_state, why_not_fused
from largebatch.precision import DTYPES
from largebatch.replica import Replica
from largebatch.schedules import Schedule, make_schedule, scale_lr
from largebatch.start import set_up
from zoo import create_model, hub
from zoo.volo import fuse_outlook, outlookers

if TYPE_CHECKING:
    from largebatch.data.dali import EvalLoader, TrainLoader
    from largebatch.data.index import Index

logger = logging.getLogger(__name__)

FEW = 16  # images of a micro-batch, below which batch norm suffers (https://arxiv.org/abs/1803.08494, figure 1)


class Images(NamedTuple):
    """The images of a run; without an evaluation there are no held-out ones."""

    train: "Index"
    held_out: "Index | None"


def build_trainer(
    config: TrainConfig,
    comm: Communicator,
    signals: Signals | None = None,
    *,
    device: torch.device | None = None,
    images: Images | None = None,
) -> Trainer:
    """Build a whole run, resumed from its folder if there is a checkpoint.

    signals: those that stop the run early. device: that of `start.set_up`, if it has resolved the config already.
    images: those of `open_images`, if they are open already.
    """
    if device is None:
        config, device = set_up(config, comm)
    if images is None:
        check_model(config, comm)
        check_batch(config, comm)
        images = open_images(config, comm)
    config = with_classes(config, images.train)
    passes = count_passes(config, comm)
    if comm.rank == 0:
        warn_of_large_batch(config.data.global_batch_size, len(images.train))
    replica = build_replica(config, comm, device, passes=passes)
    if comm.rank == 0:
        warn_of_few_statistics(replica.model, config.data.micro_batch_size)
    trainer = assemble(config, replica, device, images=images, signals=signals)
    if not checkpoint.resume(config, trainer):
        comm.broadcast_model(trainer.model)
    return trainer


# -- the images ------------------------------------------------------------------------------------------------


def check_model(config: TrainConfig, comm: Communicator) -> None:
    """Refuse a model, a size or a rate that does not fit before data are opened: build the model without memory.

    Weights that are not there are refused, too; whether they fit is found when they are loaded.
    """
    values = config.model.arguments() | {"weights": None, "num_classes": config.model.num_classes or 1000}
    weights = config.model.weights
    with comm.together("model"), torch.device("meta"):
        if comm.rank == 0 and weights and not Path(weights).exists() and not hub.is_reference(weights):
            raise ValueError(f"--init-from is {weights}: there is no such file or folder.")
        try:
            model = create_model(**values)
        except ValueError as error:
            raise ValueError(_as_typed(str(error), values)) from error
        if config.model.outlook != "plain" and not outlookers(model):
            raise ValueError(
                f"--model.outlook is {config.model.outlook}, and {config.model.name} has no outlook attention: leave "
                "it out, or choose a model that has it, such as volo_d1."
            )


def _as_typed(mistake: str, options: Collection[str]) -> str:
    """Return a sentence of the zoo with the option as it is typed, if it begins with one."""
    option = mistake.partition(" ")[0]
    return f"--model.{mistake}." if option in options else f"{mistake[0].upper()}{mistake[1:]}."


def check_batch(config: TrainConfig, comm: Communicator) -> int:
    """Return the passes of a rank in a step. Mistakes in batch and augmentation are refused before data are opened."""
    saved = comm.rank == 0 and bool(checkpoint.checkpoints(config.folder))
    resuming = comm.broadcast_object(saved, name="build/resuming")
    with comm.together("batch"):
        parse_policy(config.augment.auto_augment)
        ramp.check_batches(config, num_ranks=comm.data_size, resuming=resuming)
        return accumulation_passes(**_batch(config, comm, config.data.global_batch_size), resuming=resuming)


def _batch(config: TrainConfig, comm: Communicator, size: int) -> dict[str, Any]:
    return {
        "global_batch_size": size,
        "micro_batch_size": config.data.micro_batch_size,
        "num_ranks": comm.data_size,
    }


def count_passes(config: TrainConfig, comm: Communicator) -> int:
    """Return the passes of a rank in a step, and log them; of a batch ramp, those of the largest batch."""
    passes = check_batch(config, comm)
    if config.schedule.batch_ramp:
        logger.info("batch ramp %s, with --schedule.scaling %s:", config.schedule.batch_ramp, config.schedule.scaling)
    for size in ramp.batches(config):
        _log_batch(config, comm, size)
    return passes


def _log_batch(config: TrainConfig, comm: Communicator, size: int) -> None:
    """Log how a global batch is computed."""
    count = size // config.data.micro_batch_size
    passes = -(-count // comm.data_size)
    rate = f", peak learning rate {peak_lr(config) * batch_scaling(config)(size):.3g}"
    logger.info(
        "global batch %d = %s%s × %d micro-batch × %s%s%s",
        size,
        count_of(comm.size, "rank"),
        "" if comm.model_size == 1 else f" / {comm.model_size} to a replica ({config.parallel.shape()})",
        config.data.micro_batch_size,
        "up to " if count % comm.data_size else "",
        "1 pass" if passes == 1 else f"{passes} passes",
        rate if config.schedule.batch_ramp else "",
    )
    if count % comm.data_size and comm.rank == 0:
        logger.warning(
            "the %d micro-batches of a step do not come out even on %d ranks: some compute %d, others %d, and %.0f %% "
            "of their time is spent waiting; the update is the same. Nearest exact for a new run: %s.",
            count,
            comm.data_size,
            passes,
            count // comm.data_size,
            100 * (1 - count / (passes * comm.data_size)),
            nearest_batches(**_batch(config, comm, size)),
        )


def open_images(config: TrainConfig, comm: Communicator) -> Images:
    """Open the training images, and the held-out ones of the same classes if the run has evaluations."""
    train = open_data(config, comm, "train", with_maps=config.data.token_labels)
    return Images(train, open_held_out(with_classes(config, train), comm))


def open_held_out(config: TrainConfig, comm: Communicator) -> "Index | None":
    """Open the held-out images of a config that has a number of classes; None if the run has no evaluations."""
    if config.run.eval_every == NEVER:
        logger.info("no evaluations: --run.eval_every is never, so there will be no accuracy")
        return None
    return open_data(config, comm, "validation")


def with_classes(config: TrainConfig, train: "Index") -> TrainConfig:
    """Return the config with the number of classes of the training images, if it leaves that open."""
    return replace(config, model=replace(config.model, num_classes=config.model.num_classes or train.num_classes))


def open_data(config: TrainConfig, comm: Communicator, split: str, *, with_maps: bool = False) -> "Index":
    """Open the index of one split. Rank 0 finds and checks the files, and gives its index to all ranks.

    So a file system gets no more calls if there are more ranks. Images that are written into a cache first are written
    on each host. The first rank of each host looks if the files there are those of rank 0; a copy will do.
    with_maps: each image must have a label map.
    """
    from largebatch.data import index_file  # a benchmark without images does without the packages behind these
    from largebatch.data.sources import find_folder, open_source

    data, phase = config.data, f"opening {config.data.path}"
    with comm.together(phase):
        if not data.path:
            raise ValueError(f"Recipe {config.recipe} has no images of its own: give --data FOLDER or synthetic.")
        here = str(find_folder(data.path, split=split, progress=comm.progress))

    def open_index() -> "tuple[str, Index, list[int]]":
        index = open_source(
            data.path,
            split=split,
            listed=data.quarantine,
            allow_incomplete=data.allow_incomplete,
            progress=comm.progress,
        )
        index = index.for_classes(config.model.num_classes)
        if with_maps:
            index.check_maps(config.model.num_classes or index.num_classes)
        return here, index, index_file.file_numbers(index)

    there, index, numbers = comm.from_rank_0(open_index, phase=f"{phase}, {split} images")
    index = index.moved(there, here)
    with comm.together(phase):
        if comm.local_rank == 0 and (reason := index_file.why_other_files(index, numbers)):
            raise ValueError(f"{reason}: make the data of all hosts the same.")
    return index


def warn_of_large_batch(global_batch_size: int, num_samples: int) -> None:
    """Warn of a batch with more images than there are."""
    if global_batch_size > num_samples:
        logger.warning(
            "--data.global_batch_size is %d, and there are %d training images: a step sees each image %.1f times. For "
            "an update in each epoch give at most %d.",
            *(global_batch_size, num_samples, global_batch_size / num_samples, num_samples),
        )


def warn_of_few_statistics(model: nn.Module, micro_batch_size: int) -> None:
    """Warn of batch norm over few images: it does not know of the other micro-batches of a step."""
    if micro_batch_size < FEW and batch_norms(model):
        logger.warning(
            "--data.micro_batch_size is %d, and the model has batch norm, whose statistics are those of a micro-batch: "
            "accuracy suffers below about %d images.",
            *(micro_batch_size, FEW),
        )


def build_plan(config: TrainConfig, index: "Index") -> Plan:
    """Build the plan that cuts the run's data into steps and micro-batches."""
    num_images = _images(config, "run.duration", len(index))
    return Plan(
        num_samples=len(index),
        global_batch_size=config.data.global_batch_size,
        micro_batch_size=config.data.micro_batch_size,
        num_images=num_images,
        seed=config.run.seed,
        shard_sizes=index.shard_sizes if config.data.shuffle_window else (),
        shuffle_window=config.data.shuffle_window,
        phases=ramp.phases(config, num_samples=len(index), run_images=num_images),
    )


def open_train_loader(
    config: TrainConfig,
    comm: Communicator,
    start_step: int,
    *,
    model: nn.Module,
    index: "Index",
    plan: Plan,
    device: torch.device,
) -> "TrainLoader":
    """Open the training images of this rank: its micro-batches from step `start_step` on, in the order of the plan."""
    from largebatch.data.dali import TrainLoader

    data, geometry = config.data, model_geometry(config.data, model)
    return TrainLoader(
        index,
        plan,
        shard=comm.data_rank,
        num_shards=comm.data_size,
        img_size=config.model.img_size,
        mean=geometry.mean,
        std=geometry.std,
        interpolation=data.train_interpolation or geometry.interpolation,
        scale=data.scale,
        ratio=data.ratio,
        hflip=data.hflip,
        padding=data.crop_padding if data.train_crop == "pad" else None,
        policy=parse_policy(config.augment.auto_augment),
        device=device,
        num_threads=data.num_threads or loader_threads(comm.num_cores),
        token_label_axes=data.token_label_axes if data.token_labels else None,
        start_step=start_step,
    )


def build_eval_loader(
    config: TrainConfig, comm: Communicator, *, model: nn.Module, index: "Index", device: torch.device
) -> "EvalLoader":
    """Open the held-out images of this rank: numbered batches, which do not depend on the number of ranks."""
    from largebatch.data.dali import EvalLoader

    return EvalLoader(
        index,
        shard=comm.data_rank,
        num_shards=comm.data_size,
        batch_size=config.data.eval_batch_size,
        img_size=config.model.img_size,
        device=device,
        num_threads=config.data.num_threads or loader_threads(comm.num_cores),
        **model_geometry(config.data, model)._asdict(),
    )


class Geometry(NamedTuple):
    """The preparation of images for a model."""

    crop_pct: float
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def model_geometry(config: DataConfig, model: nn.Module) -> Geometry:
    """Return the geometry of the config, and the model's own for each value that the config leaves open."""
    own: dict[str, Any] = getattr(model, "default_cfg")
    chosen = {name: getattr(config, name) for name in Geometry._fields}
    return Geometry(**{name: own[name] if value is None else value for name, value in chosen.items()})


def build_augment(config: TrainConfig) -> Augment:
    """Build the augmentation of the config's sections."""
    a = config.augment
    return Augment(
        config.model.num_classes,
        mixup_alpha=a.mixup_alpha,
        cutmix_alpha=a.cutmix_alpha,
        switch_prob=a.mixup_switch_prob,
        label_smoothing=a.label_smoothing,
        erase_prob=a.reprob,
        erase_mode=a.remode,
        grid=config.model.img_size // CELL if config.loss.dense_weight else 0,
        ground_truth=config.loss.ground_truth,
        mix_token=a.mix_token,
    )


# -- the replica -----------------------------------------------------------------------------------------------


def build_replica(config: TrainConfig, comm: Communicator, device: torch.device, *, passes: int) -> Replica:
    """Build this rank's model, cut if ranks share it, and its optimizer, wrapped; both without a state yet."""
    has_lamb = "lamb" in (config.optim.name, config.optim.rest)
    impl = lamb_impl(comm, device, config.optim.impl) if has_lamb else config.optim.impl
    weights = find_weights(config.model.weights, comm)[0] if config.model.weights else None
    make_optimizer = partial(build_optimizer, config, impl=impl)
    if divides(config):
        from largebatch.parallel import rendezvous  # imported only by runs that need it

        rendezvous.start_torch_distributed(comm, device)
    fused = config.model.outlook == "triton" and fuses_outlook(comm, device)
    with comm.together("building"):
        model = build_model(config, device, weights=weights)
        if fused:
            fuse_outlook(model)
        log_attention(config, model, device, comm)
    # The ranks of a replica talk to each other while they divide the model, so a failure there happens on all of them.
    with comm.together("dividing"):
        replica = divide(config, model, make_optimizer, limit_s=comm.stall_limit_s)
    with comm.together("building"):
        model.to(device)
        objective = build_objective(config, model)
    if config.run.compile:
        compile_model(config, model, objective, device, comm)
    with comm.together("building"):
        optimizer = replica.adapt_optimizer(make_optimizer(model))
        optimizer = comm.wrap(optimizer, model, passes=passes, compression=config.run.compression)
    with comm.together("dividing"):
        replica.attach(model, optimizer, comm)
    return replica


def lamb_impl(comm: Communicator, device: torch.device, wanted: str | None = None) -> str:
    """Choose how LAMB runs: as wanted, or compiled if all ranks can: the two ways differ in the last bits of a weight.

    All ranks raise Stopped if one cannot compile what is wanted. If one cannot use the kernels of "triton", all go on
    without them.
    """
    if wanted == "eager":
        return wanted
    if wanted == "triton":
        cause = why_not_everywhere(comm, device, optim.fused_check.difference, name="build/fused_lamb")
        if not cause:
            return wanted
        wanted = None
        if comm.rank == 0:
            logger.warning("--optim.impl triton is not used: %s; LAMB runs as by default", cause)
    able = comm.allgather_object(can_compile(device.type), name="build/can_compile")
    if wanted and not all(able):
        raise Stopped(
            f"--optim.impl is compile, and rank {able.index(False)} has no compiler for {device.type}: install "
            f"{'g++' if device.type == 'cpu' else 'Triton, gcc and the headers of Python'}, or set --optim.impl eager."
        )
    if not all(able) and comm.rank == 0:
        logger.warning("no compiler on rank %d: LAMB runs eagerly, which is slower", able.index(False))
    return "compile" if all(able) else "eager"


def fuses_outlook(comm: Communicator, device: torch.device) -> bool:
    """Return whether all ranks can use the kernels of outlook attention; if one cannot, warn, and all go on without."""
    cause = why_not_everywhere(comm, device, outlook_difference, name="build/fused_outlook")
    if cause and comm.rank == 0:
        logger.warning("--model.outlook triton is not used: %s; outlook attention runs as by default", cause)
    return not cause


def why_not_everywhere(
    comm: Communicator, device: torch.device, trial: Callable[[torch.device], str], *, name: str
) -> str:
    """Return which rank cannot use Triton kernels, and why; empty: all can. All ranks call it, and get the same."""
    causes = comm.allgather_object(why_not_fused(device, trial), name=name)
    return next((f"rank {rank} {cause}" for rank, cause in enumerate(causes) if cause), "")


def find_weights(path: str, comm: Communicator, *, average: bool = False, every: bool = False) -> list[str]:
    """Call `checkpoint.find_weights` on rank 0 and give all ranks its files: a run may add files while ranks look."""
    found: list[str] = []
    with comm.together("looking for weights"):
        if comm.rank == 0:
            found = [str(file) for file in checkpoint.find_weights(path, average=average, every=every)]
    return comm.broadcast_object(found, name="build/weights")


def build_model(config: TrainConfig, device: torch.device, *, weights: str | None) -> nn.Module:
    """Build the zoo model with this config's rates, initialised from a weights file or the run's seed, for `device`.

    It is still in host memory: a model that ranks share may be too large for one device before it is cut.
    """
    torch.manual_seed(config.run.seed)
    try:
        model = create_model(**config.model.arguments() | {"weights": weights})
    except ValueError as error:
        if not config.model.weights:
            raise
        raise ValueError(f"--init-from is {config.model.weights}: {error}.") from error
    return choose_attention(model, device)


def log_attention(config: TrainConfig, model: nn.Module, device: torch.device, comm: Communicator) -> None:
    """Log, on rank 0, which code computes the attention of a whole model."""
    if comm.rank or config.parallel.shape().size > 1:
        return
    side, dtype = config.model.img_size, DTYPES[config.run.precision]
    if text := describe_attention(model, (config.data.micro_batch_size, 3, side, side), device, dtype):
        logger.info("attention: %s", text)


def build_optimizer(config: TrainConfig, model: nn.Module, impl: str | None) -> Optimizer:
    """Build the optimizer of the config's section for a whole model. impl: see `lamb_impl`."""
    o = config.optim
    return optim.build_optimizer(
        model,
        name=o.name,
        lr=peak_lr(config),
        weight_decay=o.weight_decay,
        layer_decay=o.layer_decay,
        betas=o.betas,
        eps=o.eps,
        preset=o.preset,
        impl=impl,
        momentum=o.momentum,
        trust_coefficient=o.trust_coefficient,
        rest=o.rest,
    )


def build_sam(config: TrainConfig, optimizer: Optimizer) -> optim.LookSam | None:
    """Build Look-LayerSAM, if the run has it, with its state in that of the optimizer, which is there already."""
    o = config.optim
    if o.sam_rho is None:
        return None
    sam = optim.LookSam(rho=o.sam_rho, every=o.sam_every, alpha=o.sam_alpha)
    sam.begin(optimizer)
    return sam


def divides(config: TrainConfig) -> bool:
    """Return whether ranks share a model, or its optimizer's state."""
    return config.parallel.shape().size > 1 or bool(config.parallel.zero)


def divide(
    config: TrainConfig, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], *, limit_s: float
) -> Replica:
    """Return the replica of this rank; cuts the model in place if ranks share it."""
    if not divides(config):
        return Replica()
    from largebatch.parallel.replica import ParallelReplica

    return ParallelReplica(
        config.parallel,
        model,
        batch_size=config.data.micro_batch_size,
        precision=config.run.precision,
        make_optimizer=make_optimizer,
        limit_s=limit_s,
    )


# -- the trainer -----------------------------------------------------------------------------------------------


def assemble(
    config: TrainConfig,
    replica: Replica,
    device: torch.device,
    *,
    images: Images,
    signals: Signals | None,
) -> Trainer:
    """Build the parts that depend on the images, and put all together, with the run at its beginning."""
    comm, model = replica.comm, replica.model
    with comm.together("building"):
        train, held_out = images
        plan = build_plan(config, train)
        ema = build_ema(config, plan, model)
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
            open_batches=lambda step: open_train_loader(
                config, comm, step, model=model, index=train, plan=trainer.plan, device=device
            ),
            eval_batches=eval_batches,
            hooks=build_hooks(config, train, plan, ema, signals, description),
            ema=ema,
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
    ema: Ema | None,
    data: str,
) -> Trainer:
    """Put the parts together, with the optimizer's state created; data: the digest of the training images."""
    init_state(replica.optimizer)
    return Trainer(
        comm=replica.comm,
        model=replica.model,
        objective=replica.adapt_objective(build_objective(config, replica.model)),
        optimizer=replica.optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled="fp16" in (config.run.precision, config.run.compression)),
        base_lr=peak_lr(config),
        schedule=build_schedule(config, plan),
        scaling=batch_scaling(config),
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
        average=ema.model if ema else None,
        state=TrainState(data=data, phases=plan.phases),
    )


def evaluation_images(config: TrainConfig, plan: Plan) -> int:
    """Return the training images between evaluations; 0: there are none."""
    if config.run.eval_every == NEVER:
        return 0
    return _images(config, "run.eval_every", plan.num_samples, plan.num_images)


def build_objective(config: TrainConfig, model: nn.Module) -> Objective:
    """Build the loss of the config's section; ValueError if the model has no token logits for it."""
    loss = config.loss
    if not loss.dense_weight:
        return classification
    if not hasattr(model, "forward_train"):
        raise ValueError(
            f"--loss.dense_weight is {loss.dense_weight}: {config.model.name} has no token logits in training, "
            "expected a model that has them, such as volo_d1, or 0."
        )
    return TokenLabeling(cls_weight=loss.cls_weight, dense_weight=loss.dense_weight)


def build_schedule(config: TrainConfig, plan: Plan) -> Schedule:
    """Build the schedule, in steps like the first one of this plan."""
    s, batch_size = config.schedule, plan.batch_size(0)
    images = {
        option: _images(config, f"schedule.{option}", plan.num_samples, plan.num_images)
        for option in ("warmup", "cooldown")
    }
    steps = {option: -(-count // batch_size) for option, count in images.items()}
    return make_schedule(
        s.name,
        total_steps=-(-plan.num_images // batch_size),
        warmup_steps=steps["warmup"],
        cooldown_steps=steps["cooldown"],
        start=s.start,
        floor=s.floor,
        prefix=s.prefix,
        power=s.power,
        steps_per_epoch=plan.num_samples / batch_size if s.stairs else None,
    )


def peak_lr(config: TrainConfig) -> float:
    """Return optim.lr, scaled to the global batch if the schedule says so."""
    batch_size = config.data.global_batch_size
    reference = config.schedule.reference_batch_size or batch_size
    return scale_lr(
        config.optim.lr, batch_size=batch_size, reference_batch_size=reference, rule=config.schedule.scaling
    )


def batch_scaling(config: TrainConfig) -> Callable[[int], float]:
    """Return the factor of `peak_lr` in the phase of a batch ramp, by its global batch: 1 for that of the config."""
    whole, rule = config.data.global_batch_size, config.schedule.scaling
    return lambda size: scale_lr(1.0, batch_size=size, reference_batch_size=whole, rule=rule)


def build_hooks(
    config: TrainConfig, index: "Index", plan: Plan, ema: Ema | None, signals: Signals | None, description: str
) -> list[Hook]:
    """Build the hooks in the order in which they run.

    Guards and Divergence may stop the run, Ema averages the weights, RecomputeCheck compares gradients over the ranks
    and ReplicaCheck weights, Checkpoint saves them, StopEarly ends the run after a save, NoiseScale measures gradients,
    Profile traces steps, and Log, last, writes down the numbers of all.
    """

    def images(option: str) -> int:
        return _images(config, option, plan.num_samples, plan.num_images)

    def where(sample: int) -> str:
        return f"{sample} ({index.where(sample)})"

    recomputing: list[Hook] = []
    if config.run.recompute:
        recomputing = [hooks.RecomputeCheck(interval_images=images("run.recompute"))]
    comparing: list[hooks.ReplicaCheck] = []
    if config.run.check_replicas:
        at_evaluations = config.run.check_replicas == "evaluation"
        interval = evaluation_images(config, plan) if at_evaluations else images("run.check_replicas")
        # Without evaluations the checks before each checkpoint and after the last step remain.
        interval = interval or plan.num_images
        comparing = [hooks.ReplicaCheck(interval_images=interval, with_optimizer=not config.parallel.zero)]
    every_s = duration_seconds(config.checkpoint.every) or 0.0
    divergence = hooks.Divergence(config, complete_saves=lambda trainer: saving.complete(trainer.comm))
    saving = hooks.Checkpoint(
        config.folder,
        every_images=0 if every_s else images("checkpoint.every"),
        every_s=every_s,
        keep=config.checkpoint.keep,
        config_text=dump(config),
        description=description,
        best=config.checkpoint.best,
        before_save=hooks.in_turn(divergence.settle, *(each.check for each in comparing)),
    )
    early: list[Hook] = []
    if signals:
        early = [StopEarly(signals, end=end_time(config.run.end_time), longest_save_s=lambda: saving.longest_s)]
    noise = build_noise_scale(config, plan)
    steps = profiled_steps(config.run.profile_steps)
    return [
        hooks.Guards(max_skipped_steps=config.run.max_skipped_steps, where=where),
        divergence,
        *([ema] if ema else []),
        *recomputing,
        *comparing,
        saving,
        *early,
        *([noise] if noise else []),
        *([Profile(*steps, run=Path(config.folder).resolve().name)] if steps else []),
        hooks.Log(build_sinks(config), every_images=images("log.every"), noise=noise),
    ]


def build_noise_scale(config: TrainConfig, plan: Plan) -> hooks.NoiseScale | None:
    """Build the hook that measures the gradient noise scale; if this run cannot have one, log why."""
    shape = config.parallel.shape()
    if shape.size > 1:
        logger.info("no gradient noise scale: with --parallel %s no rank has the gradient of a whole model", shape)
        return None
    if plan.global_batch_size < 2 * plan.micro_batch_size:
        logger.info(
            "no gradient noise scale: a step is a single micro-batch of %d images; --data.micro_batch_size %d, or a "
            "smaller one, allows it.",
            *(plan.micro_batch_size, max(1, plan.micro_batch_size // 2)),
        )
        return None
    every_images = _images(config, "log.every", plan.num_samples, plan.num_images)
    after_row = hooks.follow_noise if ramp.by_noise(config) else None
    return hooks.NoiseScale(every_images=every_images, after_row=after_row)


def describe(config: TrainConfig, model: nn.Module, index: "Index") -> str:
    """Return the text of config.json: the model, its classes in these images, and how this run prepares images."""
    from largebatch.data.sources import class_names

    names, geometry = class_names(index), model_geometry(config.data, model)._asdict()
    if names and len(names) != config.model.num_classes:
        logger.warning("%d classes have names, the model has %d: none is saved", len(names), config.model.num_classes)
    return json.dumps(hub.describe(config.model.name, model, label_names=names, **geometry), indent=2) + "\n"


def build_sinks(config: TrainConfig) -> list[hooks.Sink]:
    """Build the places that numbers go to. The picture comes after the tables, which it draws."""
    sinks: list[hooks.Sink] = [hooks.Progress(), hooks.Csv(config.folder)]
    if config.log.tensorboard:
        sinks.append(hooks.TensorBoard(config.folder))
    if config.log.wandb:
        sinks.append(hooks.WeightsAndBiases(config.folder, options(config)))
    title = f"{config.model.name}, recipe {config.recipe or 'custom'}"
    return [*sinks, hooks.Curves(config.folder, title=title)]


def build_ema(config: TrainConfig, plan: Plan, model: nn.Module) -> Ema | None:
    """Build the hook that averages the weights, if the run has one."""
    if not config.optim.ema_half_life:
        return None
    half_life_images = _images(config, "optim.ema_half_life", plan.num_samples, plan.num_images)
    check_half_life(half_life_images, run_images=plan.num_images, epoch_images=plan.num_samples)
    return Ema(model, half_life_images=half_life_images)


def _images(config: TrainConfig, option: str, num_samples: int, run_images: int = 0) -> int:
    """Return a duration option as images; at least one."""
    section, name = option.split(".")
    text = getattr(getattr(config, section), name)
    batch_size = config.data.global_batch_size
    images = duration_images(
        text, option=f"--{option}", num_samples=num_samples, batch_size=batch_size, run_images=run_images
    )
    if images < 1 and section != "schedule":
        raise ValueError(f"--{option} is {text!r}: expected more than nothing.")
    return images
