"""Every option of a run: one tree of dataclasses; each option has a default, a meaning and, if measured, a cost.

Durations stay texts here, such as "300 epochs", because only a run knows how many images its data has; `durations`
turns them into images. The docstring below an option is its text in --help.
"""

from dataclasses import dataclass, field
from typing import Literal

from largebatch.config.horovod import HorovodConfig
from largebatch.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Class and token logits, for models that have both in training."""

    dense_weight: float = 0.0
    """weight of the mean cross entropy of the token logits; 0: class logits alone. Published: 0.5 (VOLO), 1 (LV-ViT)"""
    cls_weight: float = 1.0
    """weight of the cross entropy of the class logits beside it"""
    ground_truth: Literal["none", "published", "intended"] = "none"
    """share of the label in the class target, beside a teacher who is right, or wrong: none 0, 0; published 0.5, 0.1;
    intended 0.1, 0.5, which is what the published code says that it does"""


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written while training."""

    every: str = "10 steps"
    """time between rows of steps.csv and TensorBoard points"""
    tensorboard: bool = True
    """write TensorBoard event files into the run folder"""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept to resume from."""

    every: str = "1 epoch"
    """time between checkpoints; the last step always writes one"""
    keep: int = 2
    """how many to keep, at least 2"""


@dataclass(frozen=True, kw_only=True)
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
