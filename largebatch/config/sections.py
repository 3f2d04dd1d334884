"""What a run is: one tree of dataclasses, its checks, and its two forms, command line and YAML.

A recipe (largebatch/recipes) returns a complete `TrainConfig`; a YAML file and dotted options go on top, in
that order; the result is written to the run folder and can be fed back with `--config`. Parsing and YAML are
jsonargparse's. Durations stay texts ("300 epochs") in here and become steps in one place, `duration_images`,
because only a run knows how many images its data has.
"""

import datetime
import difflib
import math
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Literal, Mapping, Sequence

import jsonargparse

from largebatch.config.horovod import HorovodConfig
from largebatch.config.parallel import ParallelConfig

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(kw_only=True)
class ModelConfig:
    """A model of the zoo."""

    name: str = "vit_b32"
    """zoo name, such as vit_b32"""
    img_size: int = 224
    """image side in pixels"""
    num_classes: int = 1000
    """number of classes"""
    weights: str = ""
    """file to start from (safetensors or torch), or a run folder: its newest; empty: random initialisation"""
    pos_drop_rate: float = 0.0
    """dropout after the position embedding"""
    proj_drop_rate: float = 0.0
    """dropout after attention projection and in the MLP"""
    attn_drop_rate: float = 0.0
    """dropout of attention weights"""
    drop_rate: float = 0.0
    """dropout before the classifier"""
    drop_path_rate: float = 0.0
    """stochastic depth of the last block; earlier blocks have proportionally less"""
    outlook_drop_path: bool = False
    """stochastic depth in VOLO's outlookers too; the published models have none there"""
    global_pool: Literal["", "avg"] = ""
    """what a ViT's head acts on: empty, the class token; avg, the mean of the others, as a teacher of labels needs"""
    weight_init: Literal["", "jax"] = ""
    """initialisation of a ViT: timm's usual one, or the one it calls jax, with a head of zeros"""
    grad_checkpointing: bool = False
    """compute the blocks anew in the backward pass, with the same draws, instead of keeping what is inside them:
    2313 -> 1306 MiB in all, 16 % slower (ViT-B/32, micro-batch 64, bf16, 2 CPU cores)"""


@dataclass(kw_only=True)
class DataConfig:
    """Images, the batch, and the geometry of crops."""

    path: str = "digits"
    """folder of TFRecords, image folder, CIFAR-10's files, "synthetic", or "digits" (embedded)"""
    quarantine: str = ""
    """list of images to leave out (pack check --out); empty: quarantine.csv in the data folder, if there is one"""
    global_batch_size: int = 32768
    """images per optimizer step, over all ranks and passes"""
    micro_batch_size: int = 256
    """images per forward pass of one rank"""
    eval_batch_size: int = 256
    """images per forward pass of one rank in evaluation"""
    train_crop: Literal["random_resized", "pad"] = "random_resized"
    """random_resized: a window of random area and aspect ratio; pad: one of the stored image's own size, moved by up to
    crop_padding pixels, as for CIFAR-10; either is then resized to the model's size"""
    crop_padding: int = 0
    """pixels of the stored image by which a padded training crop may reach out of it, into black; pad only"""
    scale: tuple[float, float] = (0.08, 1.0)
    """area of a random_resized training crop, as fractions of the image"""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """aspect ratio of a random_resized training crop"""
    hflip: float = 0.5
    """probability of a horizontal flip"""
    crop_pct: float | None = None
    """evaluation crop as a fraction of the resized image; null: the model's own"""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """resizing filter in training and evaluation; null: the model's own"""
    train_interpolation: Literal["bilinear", "bicubic", "random"] | None = None
    """resizing filter in training; random: bilinear or bicubic, drawn for each image; null: that of evaluation"""
    mean: tuple[float, float, float] | None = None
    """mean of the RGB channels in 0..1; null: the model's own"""
    std: tuple[float, float, float] | None = None
    """standard deviation of the RGB channels in 0..1; null: the model's own"""
    num_threads: int | None = None
    """decoding threads per rank; null: one fewer than the cores it has, 1 to 8"""
    shuffle_window: int = 0
    """shards shuffled together, for storage that needs sequential reads; 0: shuffle over the whole set"""
    token_labels: bool = False
    """train on a teacher's label maps, which `python -m largebatch.pack token-labels` adds to the records"""
    token_label_axes: Literal["exact", "legacy_transposed"] = "exact"
    """exact: tokens get what the teacher saw there; legacy_transposed: crops are cut out of the maps as the published
    code does it: with rows and columns swapped, and as if the teacher had seen more than the centre square"""


@dataclass(kw_only=True)
class AugmentConfig:
    """What is drawn per image (policy, erasing) and per micro-batch (mixup, cutmix)."""

    auto_augment: str = ""
    """policy: RandAugment in timm's spelling, such as rand-m9-mstd0.5-inc1 (m magnitude, n number of operations,
    p probability of each, mstd deviation of the magnitude, mmax its bound, inc1 stronger always means more changed);
    cifar10: AutoAugment's for CIFAR-10; empty: none"""
    reprob: float = 0.0
    """probability of random erasing; 0: off"""
    remode: Literal["pixel", "const"] = "pixel"
    """what erased pixels become: pixel: normal noise each; const: the mean (CutOut)"""
    mixup_alpha: float = 0.0
    """Beta(alpha, alpha) of mixup; 0: off"""
    cutmix_alpha: float = 0.0
    """Beta(alpha, alpha) of cutmix; 0: off"""
    mixup_switch_prob: float = 0.5
    """probability that a micro-batch gets cutmix where both are on; the others get mixup"""
    label_smoothing: float = 0.0
    """share of the target spread over all classes"""
    mix_token: bool = False
    """paste a box of each image's tokens from another image; needs loss.dense_weight"""


@dataclass(kw_only=True)
class LossConfig:
    """Class and token logits, for models that have both in training."""

    dense_weight: float = 0.0
    """weight of the mean cross entropy of the token logits; 0: class logits alone. Published: 0.5 (VOLO), 1 (LV-ViT)"""
    cls_weight: float = 1.0
    """weight of the cross entropy of the class logits beside it"""
    ground_truth: Literal["none", "published", "intended"] = "none"
    """share of the label in the class target, beside a teacher who is right, or wrong: none 0, 0; published 0.5, 0.1;
    intended 0.1, 0.5, which is what the published code says that it does"""


@dataclass(kw_only=True)
class OptimConfig:
    """The optimizer and the clip in front of it."""

    name: Literal["lamb", "adamw", "sgd", "lars", "apex_lamb"] = "lamb"
    """lamb and lars (ours), adamw and sgd with Nesterov momentum (torch's), apex_lamb (NVIDIA's, if installed)"""
    preset: Literal["paper", "colossal", "nvlamb", "lambc"] | None = None
    """which LAMB (see largebatch.optim.PRESETS); null: paper; refused for what is no LAMB"""
    lr: float = 1e-3
    """peak learning rate at schedule.reference_batch_size"""
    weight_decay: float = 0.01
    """weight decay: decoupled for adamw, part of the update for lamb, coupled (added to the gradient) for sgd, lars"""
    betas: tuple[float, float] | None = None
    """decay of the two moments; null: 0.9 and 0.999; refused for sgd and lars"""
    eps: float | None = None
    """added to the divisor; null: 1e-6 for lamb and apex_lamb, 1e-8 for adamw and lars; refused for sgd"""
    clip_norm: float | None = 1.0
    """global norm to which the averaged gradient is clipped; null: no clip"""
    momentum: float | None = None
    """momentum of sgd and lars; null: 0.9; refused for the others"""
    trust_coefficient: float | None = None
    """length of a step of lars at learning rate 1, in parts of the weights' norm; null: 1e-3; lars only"""
    ema_half_life: str = ""
    """half-life of an average of the weights, evaluated and saved beside them, such as "5 epochs"; empty: none"""


@dataclass(kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, as a function of the step."""

    name: Literal["linear", "cosine", "poly", "constant"] = "cosine"
    """form of the decay"""
    warmup: str = "0 epochs"
    """length of the linear warm-up"""
    start: float | None = None
    """learning rate of the first warm-up step as a fraction of the peak; null: one warm-up step's share"""
    floor: float = 0.0
    """lowest learning rate of the decay as a fraction of the peak"""
    cooldown: str = "0 epochs"
    """time at the floor, at the end of the run"""
    prefix: bool = True
    """true: the decay begins at its top after the warm-up; false: the warm-up hides the decay's beginning"""
    power: float = 1.0
    """exponent of the poly decay"""
    stairs: bool = False
    """hold the rate constant within each epoch"""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """how optim.lr follows the global batch"""
    reference_batch_size: int = 0
    """batch that optim.lr was tuned for; needed by linear and sqrt scaling"""


@dataclass(kw_only=True)
class RunConfig:
    """The run: where, how long, from which seed, in which precision."""

    folder: str = ""
    """run folder; empty: runs/<recipe>. The same command line resumes what it finds there"""
    duration: str = "300 epochs"
    """length of training"""
    max_steps: int = 0
    """stop after this step, without changing the schedule; 0: the whole duration"""
    end_time: float | str | None = None
    """when the job around this run will be ended: seconds since the epoch, or ISO 8601 such as 2026-11-21T18:00; the
    run stops before it, with a checkpoint and exit code 75. null: SLURM_JOB_END_TIME, if Slurm sets it"""
    profile_steps: str = ""
    """record steps a to b - 1 of this process, counted from 1, with torch's profiler on rank 0: "a:b", such as 10:13; a
    trace for https://ui.perfetto.dev is written to TMPDIR or /tmp; empty: none"""
    eval_every: str = "1 epoch"
    """time between evaluations"""
    seed: int = 0
    """seed of weights, data order, crops, mixup and dropout"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """autocast type; auto: bf16 where the processor computes it, else fp16 on GPUs and fp32 on CPUs, and written so to
    config.yaml. Parameters and gradients are fp32 always"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU of the local rank where there is one"""
    deterministic: bool = False
    """the same bits in each repetition, at some cost in speed"""
    max_skipped_steps: int = 25
    """give up after this many steps in a row with a non-finite gradient"""
    compile: bool = False
    """compile the model: 8 % faster after 31 s of compiling (ViT-B/32, micro-batch 64, bf16, 2 CPU cores); dropout then
    draws other masks than without, a function of the seed all the same; reduction no longer overlaps with backward"""
    compression: Literal["none", "fp16"] = "none"
    """type of gradients on the wire; fp16 halves the bytes, rounds the reduced gradient by 4e-4 (3 CPU ranks), and
    trains with a loss scale in every precision; an overflow on the wire skips the step"""


@dataclass(kw_only=True)
class LogConfig:
    """What is written while training."""

    every: str = "10 steps"
    """time between rows of steps.csv and TensorBoard points"""
    tensorboard: bool = True
    """write TensorBoard event files into the run folder"""


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is kept to resume from."""

    every: str = "1 epoch"
    """time between checkpoints; the last step always writes one"""
    keep: int = 2
    """how many to keep, at least 2"""


@dataclass(kw_only=True)
class TrainConfig:
    """A whole run."""

    recipe: str = ""
    """recipe this configuration began with"""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)
    horovod: HorovodConfig = field(default_factory=HorovodConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def folder(self) -> str:
        """The run folder, `run.folder` or runs/<recipe>."""
        return self.run.folder or f"runs/{self.recipe or 'custom'}"


# ---------------------------------------------------------------------------------------------------------------
# durations and the batch
# ---------------------------------------------------------------------------------------------------------------


def duration_images(text: str, *, option: str, num_samples: int, batch_size: int, run_images: int = 0) -> int:
    """Turn "300 epochs", "500 steps", "1e6 images" or "5 %" (of the run) into a number of images.

    num_samples: images of one epoch. batch_size: images of one step. run_images: images of the run, needed by
    percentages. option names the setting in the error.
    """
    match = re.fullmatch(r"\s*([0-9.eE+]+)\s*(epoch|step|image|%)s?\s*", text)
    try:
        count = float(match[1]) if match else math.nan
    except ValueError:
        count = math.nan
    if not match or math.isnan(count) or (match[2] == "%" and not run_images):
        units = "epochs, steps or images" + (" or %" if run_images else "")
        raise ValueError(f"{option} is {text!r}: expected a number and a unit ({units}), such as '5 epochs'.")
    unit = {"epoch": num_samples, "step": batch_size, "image": 1, "%": run_images / 100}[match[2]]
    return math.ceil(round(count * unit, 6))


def epoch_seconds(value: float | str, *, option: str) -> float:
    """Seconds since the epoch, given as such or in ISO 8601 (local time, if it names no zone)."""
    try:
        if isinstance(value, str) and not re.fullmatch(r"[0-9.]+", value):
            return datetime.datetime.fromisoformat(value).timestamp()
        return float(value)
    except ValueError:
        raise ValueError(
            f"{option} is {value!r}: expected seconds since the epoch, or a time such as 2026-11-21T18:00."
        ) from None


def profiled_steps(text: str) -> tuple[int, int] | None:
    """The first and the last step of run.profile_steps; None for none. ValueError for what is no range of steps."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not text:
        return None
    if not match or not 1 <= int(match[1]) < int(match[2]):
        raise ValueError(
            f"--run.profile_steps is {text!r}: expected a:b with 1 <= a < b, such as 10:13 for steps 10, 11 and 12."
        )
    return int(match[1]), int(match[2]) - 1


def accumulation_passes(*, global_batch_size: int, micro_batch_size: int, num_ranks: int) -> int:
    """Micro-batches that each rank sums into one step; ValueError names the nearest exact batches if not whole."""
    passes, rest = divmod(global_batch_size, micro_batch_size * num_ranks)
    if passes and not rest:
        return passes
    per_rank = max(1, math.ceil(global_batch_size / (micro_batch_size * num_ranks)))
    below = int(global_batch_size / (num_ranks * per_rank)) // 4 * 4  # multiples of 4 keep kernels aligned
    nearest = [
        f"{num_ranks * micro * per_rank} = {num_ranks} ranks × {micro} micro-batch × {per_rank} passes"
        for micro in (below, below + 4)
        if micro
    ]
    raise ValueError(
        f"A global batch of {global_batch_size} is not a whole number of passes of {num_ranks} ranks × micro-batch "
        f"{micro_batch_size} (= {num_ranks * micro_batch_size}); set --data.global_batch_size and "
        f"--data.micro_batch_size, nearest exact: {', or '.join(nearest)}."
    )


def check(config: TrainConfig) -> None:
    """Raise ValueError, one sentence, for the first value that cannot be meant."""
    c = config
    at_least = [
        ("data.global_batch_size", c.data.global_batch_size, 1),
        ("data.micro_batch_size", c.data.micro_batch_size, 1),
        ("data.eval_batch_size", c.data.eval_batch_size, 1),
        ("data.num_threads", c.data.num_threads, 1),
        ("data.shuffle_window", c.data.shuffle_window, 0),
        ("model.num_classes", c.model.num_classes, 1),
        ("data.crop_padding", c.data.crop_padding, 0),
        ("augment.mixup_alpha", c.augment.mixup_alpha, 0),
        ("loss.dense_weight", c.loss.dense_weight, 0),
        ("loss.cls_weight", c.loss.cls_weight, 0),
        ("augment.cutmix_alpha", c.augment.cutmix_alpha, 0),
        ("optim.lr", c.optim.lr, 0),
        ("run.max_steps", c.run.max_steps, 0),
        ("run.seed", c.run.seed, 0),
        ("run.max_skipped_steps", c.run.max_skipped_steps, 1),
        ("checkpoint.keep", c.checkpoint.keep, 2),
    ]
    for option, value, minimum in at_least:
        if value is not None and value < minimum:
            raise ValueError(f"--{option} is {value}: expected at least {minimum}.")
    for option in ("pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_rate", "drop_path_rate"):
        if not 0 <= getattr(c.model, option) < 1:
            raise ValueError(f"--model.{option} is {getattr(c.model, option)}: expected 0 <= rate < 1.")
    low, high = c.data.scale
    if not 0 < low <= high <= 1:
        raise ValueError(f"--data.scale is [{low}, {high}]: expected 0 < low <= high <= 1.")
    if not 0 < c.data.ratio[0] <= c.data.ratio[1]:
        raise ValueError(f"--data.ratio is {list(c.data.ratio)}: expected 0 < low <= high.")
    if not 0 <= c.data.hflip <= 1:
        raise ValueError(f"--data.hflip is {c.data.hflip}: expected a probability, 0 to 1.")
    _check_crop(c.data)
    _check_augment(c.augment)
    if c.optim.clip_norm is not None and c.optim.clip_norm <= 0:
        raise ValueError(f"--optim.clip_norm is {c.optim.clip_norm}: expected a positive norm, or null for no clip.")
    profiled_steps(c.run.profile_steps)
    if c.run.end_time is not None:
        epoch_seconds(c.run.end_time, option="--run.end_time")
    c.horovod.check(deterministic=c.run.deterministic, device=c.run.device)
    if (c.schedule.scaling == "none") == bool(c.schedule.reference_batch_size):
        raise ValueError(
            f"--schedule.scaling is {c.schedule.scaling} and --schedule.reference_batch_size is "
            f"{c.schedule.reference_batch_size}: linear and sqrt need a reference batch, none has no use for it."
        )
    check_tokens(c)
    check_parallel(c)


def check_parallel(config: TrainConfig) -> None:
    """Raise ValueError, one sentence, for what does not fit together about --parallel."""
    parallel = config.parallel
    if parallel.offload and not parallel.zero:
        raise ValueError("--parallel.offload is true, which moves a ZeRO part to the host: set --parallel.zero 1.")
    if parallel.zero and config.optim.name != "lamb":
        raise ValueError(f"--parallel.zero is 1 and --optim.name {config.optim.name}: only lamb's state is divided.")
    own = ParallelConfig()
    for name in ("schedule", "micro_batches", "cuts"):
        value = getattr(parallel, name)
        if parallel.pipeline == 1 and value != getattr(own, name):
            raise ValueError(f"--parallel.{name} is {value}, of use to a pipeline alone: raise --parallel.pipeline.")
    if parallel.shape().size == 1:
        return
    if config.optim.name in ("lars", "apex_lamb"):
        raise ValueError(
            f"--optim.name is {config.optim.name}, which needs each tensor whole on its rank: with --parallel choose "
            "lamb, adamw or sgd."
        )
    for option, refused, reason in (
        ("run.precision", "fp16", "the ranks of a replica would scale their losses apart; choose bf16 or fp32"),
        ("run.compression", "fp16", "it needs a loss scale, which the ranks of a replica would set apart; choose none"),
        ("run.compile", True, "torch.compile does not follow the messages inside a model; choose false"),
    ):
        section, name = option.split(".")
        if getattr(getattr(config, section), name) == refused:
            raise ValueError(f"--{option} is {refused} and --parallel {parallel.shape()}: {reason}.")
    if config.optim.ema_half_life:
        raise ValueError(
            f"--optim.ema_half_life is {config.optim.ema_half_life!r} and --parallel {parallel.shape()}: an average of "
            "divided weights is not kept, leave it out."
        )


def check_tokens(config: TrainConfig) -> None:
    """Raise ValueError, one sentence, for what does not fit together about token labels and the dense loss."""
    data, loss, augment = config.data, config.loss, config.augment
    if loss.ground_truth != "none" and not data.token_labels:
        raise ValueError(
            f"--loss.ground_truth is {loss.ground_truth}: it shares the target with a teacher, so it needs "
            "--data.token_labels true."
        )
    if data.token_label_axes != "exact" and not data.token_labels:
        raise ValueError(f"--data.token_label_axes is {data.token_label_axes}: it needs --data.token_labels true.")
    if loss.cls_weight != 1 and not loss.dense_weight:
        raise ValueError(
            f"--loss.cls_weight is {loss.cls_weight} and --loss.dense_weight 0: it weighs the class logits against the "
            "token logits, so set both, or none."
        )
    if augment.mix_token and not loss.dense_weight:
        raise ValueError(
            "--augment.mix_token is true and --loss.dense_weight 0: what makes up for a pasted box is the loss of its "
            "tokens, so set --loss.dense_weight, such as 0.5, with a model that has token logits."
        )
    for option in ("mixup_alpha", "cutmix_alpha"):
        if augment.mix_token and getattr(augment, option):
            raise ValueError(
                f"--augment.mix_token is true and --augment.{option} {getattr(augment, option)}: both mix the images "
                "of a micro-batch in pairs, and their targets with them, so leave one of them out."
            )
    if augment.cutmix_alpha and data.token_labels and loss.dense_weight:
        raise ValueError(
            f"--augment.cutmix_alpha is {augment.cutmix_alpha} with token labels: the tokens of a pasted box would "
            "have labels of what it covers, so use --augment.mix_token instead."
        )
    if loss.dense_weight and config.model.img_size % 16:
        raise ValueError(
            f"--model.img_size is {config.model.img_size}: --loss.dense_weight needs a multiple of 16, the "
            "pixels along each side of an output cell."
        )


def _check_crop(data: DataConfig) -> None:
    own = DataConfig()
    if data.train_crop == "pad" and (data.scale, data.ratio) != (own.scale, own.ratio):
        raise ValueError(
            f"--data.train_crop is pad, which has no use for --data.scale {list(data.scale)} and --data.ratio "
            f"{list(data.ratio)}: leave them at {list(own.scale)} and {list(own.ratio)}, or set random_resized."
        )
    if data.train_crop != "pad" and data.crop_padding:
        raise ValueError(
            f"--data.crop_padding is {data.crop_padding}, which --data.train_crop {data.train_crop} has no use for: "
            "leave it out, or set pad."
        )


def _check_augment(augment: AugmentConfig) -> None:
    if not 0 <= augment.reprob <= 1:
        raise ValueError(f"--augment.reprob is {augment.reprob}: expected a probability, 0 to 1.")
    if augment.remode != "pixel" and not augment.reprob:
        raise ValueError(f"--augment.remode is {augment.remode}, but nothing is erased: set --augment.reprob above 0.")
    if not 0 < augment.mixup_switch_prob < 1:
        raise ValueError(
            f"--augment.mixup_switch_prob is {augment.mixup_switch_prob}: expected a probability between 0 and 1; for "
            "mixup or cutmix alone, set the other's alpha to 0."
        )
    both = augment.mixup_alpha > 0 and augment.cutmix_alpha > 0
    if augment.mixup_switch_prob != AugmentConfig().mixup_switch_prob and not both:
        raise ValueError(
            f"--augment.mixup_switch_prob is {augment.mixup_switch_prob}, but there is nothing to choose: set "
            "--augment.mixup_alpha and --augment.cutmix_alpha both above 0, or leave it out."
        )


# ---------------------------------------------------------------------------------------------------------------
# command line and YAML
# ---------------------------------------------------------------------------------------------------------------

ALIASES = {
    "--model": "--model.name",
    "--data": "--data.path",
    "--img-size": "--model.img_size",
    "--init-from": "--model.weights",
}


def make_parser(*, prog: str, description: str = "") -> jsonargparse.ArgumentParser:
    """The parser of every dotted option."""
    parser = jsonargparse.ArgumentParser(prog=prog, description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file of options, such as a run folder's config.yaml")
    parser.add_class_arguments(TrainConfig)
    return parser


def set_defaults(parser: jsonargparse.ArgumentParser, config: TrainConfig) -> None:
    """Make the values of `config` the parser's defaults."""
    parser.set_defaults(options(config))


def expand_aliases(argv: Sequence[str]) -> list[str]:
    """Replace the short options (`--model X`, `--img-size=64`) by their dotted ones."""
    expanded = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        expanded.append(ALIASES.get(name, name) + equals + value)
    return expanded


def parse(
    argv: Sequence[str], *, choose_recipe: Callable[[Mapping[str, Any]], TrainConfig], prog: str, description: str = ""
) -> TrainConfig:
    """Read a command line into a checked config.

    choose_recipe returns the defaults, given the options that were said, by their dotted names.
    ValueError: an unknown option (with the nearest known one) or a value that is not allowed.
    """
    parser = make_parser(prog=prog, description=description)
    argv = expand_aliases(argv)
    try:
        given = parser.parse_args([word for word in argv if word not in ("-h", "--help")], defaults=False)
        recipe = choose_recipe(vars(given.as_flat()))
        set_defaults(parser, replace(recipe, optim=for_optimizer(recipe.optim, given.get("optim.name"))))
        values = parser.parse_args(argv)
    except (jsonargparse.ArgumentError, TypeError) as error:
        raise ValueError(explain(error, parser)) from None
    config = to_config(parser, values)
    check(config)
    return config


def for_optimizer(optim: OptimConfig, name: str | None) -> OptimConfig:
    """A recipe's section when the command line chooses optimizer `name`: without what only the recipe's own can use."""
    lambs = ("lamb", "apex_lamb")
    if name is None or name == optim.name or (name in lambs and optim.name in lambs):
        return optim
    return replace(optim, preset=None, betas=None, eps=None, momentum=None, trust_coefficient=None)


def to_config(parser: jsonargparse.ArgumentParser, values: jsonargparse.Namespace) -> TrainConfig:
    """Build the dataclasses from parsed values."""
    sections = {key: value for key, value in vars(parser.instantiate(values)).items() if key != "config"}
    return TrainConfig(**sections)


def explain(error: Exception, parser: jsonargparse.ArgumentParser) -> str:
    """One sentence for a parser's error, with the nearest known option where one was misspelt."""
    text = " ".join(str(error).split())
    in_group = re.search(r"Group '([\w.]+)' does not accept option '([\w.\-]+)'", text)
    stray = re.search(r"unrecognized arguments: --([\w.\-]+)", text)
    unknown = ".".join(in_group.groups()) if in_group else stray[1] if stray else ""
    if not unknown:
        return text
    known = [action.dest for action in parser._actions if action.dest != "help"]
    guesses = difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)
    hint = f"did you mean --{guesses[0]}?" if guesses else "--help lists the options."
    return f"There is no option {unknown}; {hint}"


def dump(config: TrainConfig) -> str:
    """The YAML text of a config, every option written out; `load` reads it back."""
    parser = make_parser(prog="largebatch.train")
    set_defaults(parser, config)
    return parser.dump(parser.get_defaults(), skip_unset=False)


def load(path: str) -> TrainConfig:
    """Read the YAML file that `dump` made."""
    return parse(["--config", path], choose_recipe=lambda _: TrainConfig(), prog="largebatch.train")


def options(config: TrainConfig) -> dict[str, Any]:
    """Every option by its dotted name."""
    return _dotted("", asdict(config))


def _dotted(prefix: str, section: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= _dotted(f"{prefix}{name}.", value) if isinstance(value, dict) else {prefix + name: value}
    return found


def differences(one: TrainConfig, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The dotted options in which two configs differ, each with both values."""
    left, right = options(one), options(other)
    return {name: (value, right[name]) for name, value in left.items() if "." in name and value != right[name]}
