"""The images of a run: checks of its model and batch, files, plan, loaders, augmentation."""

import logging
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch import checkpoint
from largebatch.assembly.replica import batch_scaling, peak_lr
from largebatch.augment import Augment
from largebatch.batch_norm import batch_norms
from largebatch.config import (
    NEVER,
    DataConfig,
    TrainConfig,
    accumulation_passes,
    byte_size,
    duration_images,
    image_sizes,
    nearest_batches,
    ramp,
)
from largebatch.data.order import Plan, epoch_images
from largebatch.data.randaugment import parse as parse_policy
from largebatch.data.token_labels import CELL
from largebatch.launch.cores import loader_threads
from largebatch.ranks import Ranks
from largebatch.report.history import count as count_of
from zoo import create_model, hub
from zoo.vit import VisionTransformer

if TYPE_CHECKING:
    from largebatch.data.dali import EvalLoader, TrainLoader
    from largebatch.data.index import Index
    from largebatch.data.stream import Batch

logger = logging.getLogger(__name__)

FEW = 16  # images of a micro-batch, below which batch norm suffers (https://arxiv.org/abs/1803.08494, figure 1)
FEW_IMAGES = 50_000  # below this published weights are hinted at; our choice


class Images(NamedTuple):
    """The images of a run; without an evaluation there are no held-out ones."""

    train: "Index"
    held_out: "Index | None"


def check_model(config: TrainConfig, comm: Ranks) -> None:
    """Refuse a model, a size, a rate or missing weights before data are opened: build the model without memory."""
    values = config.model.arguments() | {"weights": None, "num_classes": config.model.num_classes or 1000}
    weights = config.model.weights
    with comm.together("model"), torch.device("meta"):
        if comm.rank == 0 and weights and not Path(weights).exists() and not hub.is_reference(weights):
            raise ValueError(f"--init-from is {weights}: there is no such file or folder.")
        try:
            model = create_model(**values)
        except ValueError as error:
            raise ValueError(_as_typed(str(error), values)) from error
        if config.schedule.image_sizes:
            _check_image_sizes(config, model)


def _check_image_sizes(config: TrainConfig, model: nn.Module) -> None:
    given = f"{image_sizes.OPTION} is {config.schedule.image_sizes!r}"
    if not isinstance(model, VisionTransformer):
        raise ValueError(f"{given}, and {config.model.name} has one size: choose a ViT of the zoo, or leave it out.")
    if config.data.token_labels or config.loss.dense_weight:
        raise ValueError(f"{given}, and token labels have one size: leave one of the two out.")
    for _, size in image_sizes.phases(config, num_samples=1, run_images=1, places=False):
        if size % (patch := model.patch_embed.patch_size[0]):
            raise ValueError(f"{given}: {size} is no multiple of the {patch} px of a patch.")


def _as_typed(mistake: str, options: Collection[str]) -> str:
    """Return a sentence of the zoo; an option at its beginning is written as it is typed."""
    option = mistake.partition(" ")[0]
    return f"--model.{mistake}." if option in options else f"{mistake[0].upper()}{mistake[1:]}."


def check_batch(config: TrainConfig, comm: Ranks) -> int:
    """Return the passes of a rank in a step; refuse mistakes in batch and augmentation before data are opened."""
    saved = comm.rank == 0 and bool(checkpoint.checkpoints(config.folder))
    resuming = comm.broadcast_object(saved, name="build/resuming")
    with comm.together("batch"):
        parse_policy(config.augment.auto_augment)
        ramp.check_batches(config, num_ranks=comm.data_size, resuming=resuming)
        return accumulation_passes(**_batch(config, comm, config.data.global_batch_size), resuming=resuming)


def _batch(config: TrainConfig, comm: Ranks, size: int) -> dict[str, Any]:
    return {
        "global_batch_size": size,
        "micro_batch_size": config.data.micro_batch_size,
        "num_ranks": comm.data_size,
    }


def count_passes(config: TrainConfig, comm: Ranks) -> int:
    """Log the passes of a rank in a step and return them; for a batch ramp, those of its largest batch."""
    passes = check_batch(config, comm)
    if config.schedule.batch_ramp:
        logger.info("batch ramp %s, with --schedule.scaling %s:", config.schedule.batch_ramp, config.schedule.scaling)
    for size in ramp.batches(config):
        _log_batch(config, comm, size)
    return passes


def _log_batch(config: TrainConfig, comm: Ranks, size: int) -> None:
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


def open_images(config: TrainConfig, comm: Ranks) -> Images:
    """Open the training images, and the held-out images of the same classes if the run has evaluations."""
    train = open_data(config, comm, "train", with_maps=config.data.token_labels)
    return Images(train, open_held_out(with_classes(config, train), comm, train))


def open_held_out(config: TrainConfig, comm: Ranks, train: "Index") -> "Index | None":
    """Open the held-out images; None if the run has no evaluations. The config has a number of classes."""
    from largebatch.data.sources import class_names

    if config.run.eval_every == NEVER:
        logger.info("no evaluations: --run.eval_every is never, so there will be no accuracy")
        return None
    names = comm.from_rank_0(lambda: class_names(train), phase="reading the names of the classes")
    return open_data(config, comm, "validation", names=names)


def classes_of_run(config: TrainConfig) -> tuple[str, ...]:
    """Return the names of the classes in the newest checkpoint that has its description whole."""
    saved = (path / hub.WEIGHTS for path in checkpoint.checkpoints(config.folder))
    whole = (file for file in saved if file.is_file() and not hub.why_changed(file.with_name(hub.CONFIG)))
    return next(map(hub.label_names, whole), ())


def with_classes(config: TrainConfig, train: "Index") -> TrainConfig:
    """Return the config with a number of classes: its own, or that of the training images."""
    return replace(config, model=replace(config.model, num_classes=config.model.num_classes or train.num_classes))


def open_data(
    config: TrainConfig, comm: Ranks, split: str, *, with_maps: bool = False, names: Sequence[str] = ()
) -> "Index":
    """Open the index of one split. Rank 0 finds and checks the files, and gives its index to all ranks.

    Images that need a cache are written on each host. The first rank of each host checks that the files there are those
    of rank 0, or copies. with_maps: each image must have a label map. names: of the model's classes, which number the
    labels.
    """
    from largebatch.data import index_file  # a benchmark without images does without the packages behind these
    from largebatch.data.sources import find_folder, number_classes, open_source

    data, phase = config.data, f"opening {config.data.path}"
    with comm.together(phase):
        if not data.path:
            raise ValueError(f"Recipe {config.recipe} has no images of its own: give --data FOLDER or synthetic.")
        cache = byte_size(data.cache)
        here = str(find_folder(data.path, split=split, cache=cache, progress=comm.progress))

    def open_index() -> "tuple[str, Index, list[int]]":
        index = open_source(
            data.path,
            split=split,
            listed=data.quarantine,
            allow_incomplete=data.allow_incomplete,
            cache=cache,
            progress=comm.progress,
        )
        index = number_classes(index, num_classes=config.model.num_classes, names=names)
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
    if global_batch_size > num_samples:
        logger.warning(
            "--data.global_batch_size is %d, and there are %d training images: a step sees each image %.1f times. For "
            "an update in each epoch give at most %d.",
            *(global_batch_size, num_samples, global_batch_size / num_samples, num_samples),
        )


def hint_at_weights(config: TrainConfig, num_samples: int) -> None:
    """Log hints for beginners: few images for random weights, and the loss of mixed targets."""
    own = not config.model.weights and config.data.path not in ("digits", "synthetic")
    name = hub.published(config.model.name) if own and num_samples < FEW_IMAGES else ""
    if name:
        logger.info(
            "%d training images are few for a model from random weights: --init-from %s, of timm, begins with "
            "published ones",
            *(num_samples, name),
        )
    if config.loss.name == "bce":
        logger.info("the training loss is a binary cross entropy, and the held-out loss a cross entropy")
    elif config.augment.mixup_alpha or config.augment.cutmix_alpha:
        logger.info("mixup and cutmix mix the targets, so the training loss lies above the held-out loss")


def warn_of_few_statistics(model: nn.Module, micro_batch_size: int) -> None:
    """Warn of batch norm over few images: its statistics are of one micro-batch."""
    if micro_batch_size < FEW and batch_norms(model):
        logger.warning(
            "--data.micro_batch_size is %d, and the model has batch norm, whose statistics are those of a micro-batch: "
            "accuracy suffers below about %d images.",
            *(micro_batch_size, FEW),
        )


def refuse_lone_image(config: TrainConfig, plan: Plan) -> None:
    """Raise ValueError if batch norm would see one value per channel, which torch would refuse in that step."""
    size, images = plan.micro_batch_size, plan.num_images
    if size > 1 and images % size != 1:  # all steps but the last are whole numbers of micro-batches
        return
    if layer := _norm_of_one_value(config):
        lone = "every" if size == 1 else "the last"
        remedy = "--data.micro_batch_size 2" if size == 1 else f"--run.duration '{images - 1 or 2} images'"
        raise ValueError(
            f"In this run {lone} micro-batch has one image, of which the batch norm {layer} of {config.model.name} at "
            f"{config.model.img_size} px sees one value per channel, and it needs two: set {remedy}."
        )


def _norm_of_one_value(config: TrainConfig) -> str:
    """Return the name of the first batch norm that sees one value per channel of one image; else ""."""
    found: list[str] = []
    with torch.device("meta"), torch.no_grad():
        model = create_model(**config.model.arguments() | {"weights": None}).eval()
        names = {layer: name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}

        def look(layer: _BatchNorm, inputs: tuple[torch.Tensor]) -> None:
            if inputs[0].numel() == layer.num_features:
                found.append(names[layer])

        for layer in names:
            layer.register_forward_pre_hook(look)
        if names:
            model(torch.zeros(1, 3, config.model.img_size, config.model.img_size))
    return found[0] if found else ""


def build_plan(config: TrainConfig, index: "Index") -> Plan:
    num_images, size = images_of(config, "run.duration", len(index)), config.data.global_batch_size
    epoch = epoch_images(len(index), config.augment.repeats, size)
    return Plan(
        num_samples=len(index),
        global_batch_size=size,
        micro_batch_size=config.data.micro_batch_size,
        num_images=num_images,
        seed=config.run.seed,
        shard_sizes=index.shard_sizes if config.data.shuffle_window else (),
        shuffle_window=config.data.shuffle_window,
        phases=ramp.phases(config, num_samples=epoch, run_images=num_images),
        repeats=config.augment.repeats,
    )


def sizes_of(config: TrainConfig, plan: Plan) -> tuple[tuple[int, int], ...]:
    """Return the first image and the size of each phase; ValueError for a phase without a step."""
    found = image_sizes.phases(config, num_samples=plan.epoch_images, run_images=plan.num_images)
    steps = [plan.first_step(start) for start, _ in found]
    for (start, size), first, stop in zip(found, steps, (*steps[1:], plan.num_steps)):
        if first >= stop:
            raise ValueError(
                f"{image_sizes.OPTION} is {config.schedule.image_sizes!r}: no step begins in the phase of {size} px, "
                f"from image {start} on: move it, or leave it out."
            )
    return found


def train_batches(
    config: TrainConfig, comm: Ranks, start_step: int, *, sizes: Sequence[tuple[int, int]], plan: Plan, **parts: Any
) -> Generator["Batch", None, None]:
    """Yield the micro-batches of this rank from step `start_step` on, in the order of the plan.

    sizes: first image and image size of each phase. parts: those of `open_train_loader`.
    """
    starts = [plan.first_step(start) for start, _ in sizes]
    for (_, size), first, stop in zip(sizes, starts, (*starts[1:], plan.num_steps)):
        if stop <= start_step:
            continue
        if first > start_step:
            logger.info("from step %d on, training images have %d px", first + 1, size)
        phase: dict[str, Any] = {"plan": plan, "img_size": size, "stop_step": stop}
        with closing(open_train_loader(config, comm, max(first, start_step), **phase, **parts)) as loader:
            yield from loader


def open_train_loader(
    config: TrainConfig,
    comm: Ranks,
    start_step: int,
    *,
    model: nn.Module,
    index: "Index",
    plan: Plan,
    device: torch.device,
    img_size: int,
    stop_step: int | None = None,
) -> "TrainLoader":
    from largebatch.data.dali import TrainLoader

    data, geometry = config.data, model_geometry(config.data, model)
    interpolation = "random" if data.interpolation == "random" else geometry.interpolation
    return TrainLoader(
        index,
        plan,
        shard=comm.data_rank,
        num_shards=comm.data_size,
        img_size=img_size,
        mean=geometry.mean,
        std=geometry.std,
        interpolation=interpolation,
        scale=data.scale,
        hflip=data.hflip,
        padding=data.crop_padding,
        policy=parse_policy(config.augment.auto_augment, img_size, interpolation),
        device=device,
        num_threads=data.num_threads or loader_threads(comm.num_cores),
        with_maps=data.token_labels,
        start_step=start_step,
        stop_step=stop_step,
    )


def build_eval_loader(
    config: TrainConfig, comm: Ranks, *, model: nn.Module, index: "Index", device: torch.device
) -> "EvalLoader":
    """Open the held-out images of this rank, in batches that do not depend on the number of ranks."""
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
    crop_pct: float
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def model_geometry(config: DataConfig, model: nn.Module) -> Geometry:
    """Return the geometry of the config; a value that it leaves open is the model's."""
    own: dict[str, Any] = getattr(model, "default_cfg")
    chosen = {name: getattr(config, name) for name in Geometry._fields}
    return Geometry(**{name: own[name] if value in (None, "random") else value for name, value in chosen.items()})


def build_augment(config: TrainConfig) -> Augment:
    a = config.augment
    return Augment(
        config.model.num_classes,
        mixup_alpha=a.mixup_alpha,
        cutmix_alpha=a.cutmix_alpha,
        label_smoothing=a.label_smoothing,
        erase_prob=a.reprob,
        grid=config.model.img_size // CELL if config.loss.dense_weight else 0,
        ground_truth=config.loss.ground_truth,
        mix_token=config.mixes_tokens,
    )


def images_of(config: TrainConfig, option: str, num_samples: int, run_images: int = 0) -> int:
    """Return a duration option in images; ValueError for less than one, except in the schedule."""
    text, batch_size = attrgetter(option)(config), config.data.global_batch_size
    num_samples = epoch_images(num_samples, config.augment.repeats, batch_size)
    images = duration_images(
        text, option=f"--{option}", num_samples=num_samples, batch_size=batch_size, run_images=run_images
    )
    if images < 1 and not option.startswith("schedule."):
        raise ValueError(f"--{option} is {text!r}: expected more than nothing.")
    return images
