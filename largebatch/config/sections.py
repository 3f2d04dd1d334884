"""Every option of a run, in a tree of dataclasses. The docstring below an option is its text in --help.

Durations are texts, such as "300 epochs": only a run knows how many images its data has.
"""

from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from typing import Any, Literal

from largebatch.config.horovod import HorovodConfig
from largebatch.config.parallel import ParallelConfig
from largebatch.config.values import at_least, byte_size, limited

RGB = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model of the zoo, or of timm."""

    name: str = "vit_b32"
    """zoo name, such as vit_b32, or timm/NAME for a classifier of timm"""
    img_size: int = 224
    """image side in pixels"""
    num_classes: int = at_least(0, 0)
    """number of classes; 0: those of the training images"""
    weights: str = ""
    """file of weights to start from (safetensors or torch), or a run folder, whose newest weights are taken; empty:
    random initialisation"""
    pos_drop_rate: float = limited(0.0, lambda x: 0 <= x < 1, "0 <= rate < 1")
    """dropout rate after the position embedding"""
    proj_drop_rate: float = limited(0.0, lambda x: 0 <= x < 1, "0 <= rate < 1")
    """dropout rate after the attention projection and in the MLP"""
    drop_rate: float = limited(0.0, lambda x: 0 <= x < 1, "0 <= rate < 1")
    """dropout rate before the classifier"""
    drop_path_rate: float = limited(0.0, lambda x: 0 <= x < 1, "0 <= rate < 1")
    """stochastic depth rate of the last block; the rate of an earlier block is proportionally lower"""
    global_pool: Literal["", "avg"] = ""
    """input of a ViT's head; empty: the class token; avg: the mean of the other tokens, as a teacher of token labels
    needs it"""
    weight_init: Literal["", "jax"] = ""
    """initialisation of a ViT; empty: timm's default; jax: the one that timm calls jax, with zeros in the head"""
    grad_checkpointing: bool = False
    """activation checkpointing: compute the blocks again in the backward pass, with the same random numbers, and keep
    no activations of them; 1306 instead of 2313 MiB in all, 16 % slower (ViT-B/32, micro-batch 64, bf16, 2 CPU
    cores)"""

    def arguments(self) -> dict[str, Any]:
        """Return the options that `zoo.create_model` takes."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, the sizes of batches, and the crops."""

    path: str = "digits"
    """folder of TFRecords, of WebDataset tars, of images, or of CIFAR-10's, Parquet or IDX files
    (MNIST, Fashion-MNIST, KMNIST, EMNIST); address of TFRecords, tars or Parquet files, s3://bucket/imagenet, gs://,
    hf:// or https://; "synthetic" or "digits" (built in)"""
    cache: str = limited("200 GB", lambda x: byte_size(x) >= 0, 'a size, such as "200 GB"')
    """disk of each host for copies of shards at addresses, in all; shards beyond it are read anew in each epoch"""
    allow_incomplete: bool = False
    """go on, with a warning, if a shard is missing, empty or doubled, or if records are lost; the default refuses such
    data, because a model that has not seen some images looks like any other"""
    quarantine: str = ""
    """list of images to leave out (made by pack check --out); empty: quarantine.csv in the data folder, if it exists"""
    global_batch_size: int = at_least(32768, 1)
    """images per optimizer step, over all ranks and passes"""
    micro_batch_size: int = at_least(256, 1)
    """images per forward pass of one rank (gradient accumulation: as many passes as a step needs)"""
    eval_batch_size: int = at_least(256, 1)
    """images per forward pass of one rank in evaluation"""
    crop_padding: int | None = at_least(None, 0)
    """null: a training crop is a window of random area and aspect ratio; N: a window of the size of the stored image,
    moved by up to N pixels, into black, as for CIFAR-10. The window is then resized to the model's image size"""
    scale: tuple[float, float] = limited((0.08, 1.0), lambda x: 0 < x[0] <= x[1] <= 1, "0 < low <= high <= 1")
    """smallest and largest area of a training crop, as fractions of the image"""
    hflip: float = limited(0.5, lambda x: 0 <= x <= 1, "a probability, 0 to 1")
    """probability of a horizontal flip"""
    crop_pct: float | None = limited(None, lambda x: 0 < x < inf, "a fraction above 0, or null")
    """evaluation crop as a fraction of the resized image; null: the model's own"""
    interpolation: Literal["bilinear", "bicubic", "random"] | None = None
    """filter of resizes and RandAugment's warps; null: the model's own; random: bilinear or bicubic, drawn for each
    training image or warp, and in evaluation the model's own"""
    mean: RGB | None = limited(None, lambda x: all(map(isfinite, x)), "three finite numbers, or null")
    """mean of the RGB channels in 0..1; null: the model's own"""
    std: RGB | None = limited(None, lambda x: 0 < min(x) <= max(x) < inf, "three numbers above 0, or null")
    """standard deviation of the RGB channels in 0..1; null: the model's own"""
    num_threads: int | None = at_least(None, 1)
    """decoding threads per rank; null: one fewer than the cores of the rank, but at least 1"""
    shuffle_window: int = at_least(0, 0)
    """number of shards that are shuffled together, for storage that needs sequential reads, as file systems do that
    many hosts share; 0: shuffle the whole set"""
    token_labels: bool = False
    """train on the label maps of a teacher; `python -m largebatch.pack token-labels` adds them to the records"""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Random changes of each image (policy, erasing) and of each micro-batch (mixup, cutmix)."""

    auto_augment: str = ""
    """policy: RandAugment in timm's notation, such as rand-m9-mstd0.5-inc1 (m: magnitude, n: number of operations, p:
    probability of each operation, mstd: standard deviation of the magnitude, mmax: its upper bound, inc1: a higher
    magnitude always changes more); tf-m10-n2: RandAugment of big_vision, written in TensorFlow, which always applies n
    operations; its cutout and translations are in pixels, for images of 224; cifar10: AutoAugment's policy for
    CIFAR-10; 3a: 3-Augment of DeiT III (grey, solarised or blurred, then a colour jitter of 0.3); empty: no policy"""
    repeats: int = at_least(1, 1)
    """repeated augmentation: number of times in a row that an epoch takes an image, with a crop, flip and policy of
    its own each time. An epoch stays as long, in whole batches, so with 3 it has a third of the images. The
    repetitions are in micro-batches of their own, if a step has as many; else mixup may mix an image with itself"""
    reprob: float = limited(0.0, lambda x: 0 <= x <= 1, "a probability, 0 to 1")
    """probability of random erasing; 0: off"""
    mixup_alpha: float = at_least(0.0, 0)
    """alpha of mixup's distribution, Beta(alpha, alpha); 0: off"""
    cutmix_alpha: float = at_least(0.0, 0)
    """alpha of cutmix's distribution, Beta(alpha, alpha); 0: off; with mixup a micro-batch gets either, at random"""
    label_smoothing: float = 0.0
    """share of the target that is spread over all classes"""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss of class logits, and of token logits for models that compute both in training."""

    name: Literal["cross_entropy", "bce"] = "cross_entropy"
    """bce: binary cross entropy, the mean over the classes; both classes of a mixed image are right (DeiT III)"""
    dense_weight: float = at_least(0.0, 0)
    """weight of the mean cross entropy of the token logits, beside 1 of the class logits; 0: class logits alone.
    Published: 0.5 (VOLO), 1 (LV-ViT). Unless mixup or CutMix mix the images, a box of tokens from another image is
    pasted into each (MixToken)"""
    ground_truth: Literal["none", "published", "intended"] = "none"
    """share of the label in the class target, the rest is the teacher's: one share if the teacher is right, another if
    it is wrong: none: 0 and 0; published: 0.5 and 0.1; intended: 0.1 and 0.5, as the published code describes itself"""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, and the clipping of the gradient before it."""

    name: Literal["lamb", "adamw", "nadamw", "schedule_free_adamw", "sgd", "lars", "muon", "muon_lamb"] = "lamb"
    """lamb and lars (this project's), adamw, nadamw and sgd with Nesterov momentum (torch's), schedule_free_adamw
    (Schedule-Free AdamW of the package schedulefree), muon (torch's, for the matrices of hidden layers, and adamw for
    the rest, on whose scale optim.lr is), muon_lamb (the same with lamb for the rest)"""
    preset: Literal["paper", "colossal", "nvlamb", "lambc", "decoupled", "corrected", "cautious"] | None = None
    """variant of LAMB (see largebatch.optim.PRESETS); null: paper; an error for optimizers without LAMB. decoupled,
    corrected and cautious are paper with timm's options of these names"""
    lr: float = at_least(1e-3, 0)
    """peak learning rate; with schedule.scaling, that of a global batch of schedule.reference_batch_size"""
    weight_decay: float = 0.01
    """weight decay: decoupled for AdamW of all kinds and muon, part of the update for lamb, added to the gradient
    (coupled) for sgd and lars"""
    layer_decay: float | None = limited(None, lambda x: 0 < x <= 1, "a factor above 0 and at most 1, or null")
    """factor of the learning rate from a layer to the one below it, for fine-tuning, such as 0.75: the head has the
    whole rate, and the first layers have the lowest; null: all layers have the same"""
    betas: tuple[float, float] | None = None
    """decay rates of the two moments; null: 0.9 and 0.999; an error for sgd and lars"""
    second_moment_half_life: str = ""
    """half-life of the second moment, such as "1 epoch": its decay rate is 2^(-images of the step / half-life), so it
    follows the batch, also in a batch ramp; the first rate is 0.9. For lamb, adamw, muon and muon_lamb; empty: the rate
    of optim.betas at every batch"""
    eps: float | None = None
    """number added to the divisor; null: 1e-6 for lamb, 1e-8 for AdamW of all kinds and lars; an error for sgd"""
    split_qkv: bool = False
    """for muon and muon_lamb: orthogonalise query, key and value each by itself, where one weight holds them"""
    clip_norm: float | None = limited(1.0, lambda x: x > 0, "a positive norm, or null for no clip")
    """global norm to which the averaged gradient is clipped; null: no clipping"""
    sam_rho: float | None = limited(None, lambda x: 0 < x < inf, "a fraction above 0, such as 0.005, or null")
    """radius of Look-LayerSAM, which trains towards flat minima, such as 0.005: in every fifth step the gradient is
    taken where each tensor of weights has moved uphill by this fraction of its norm; null: off"""
    ema_half_life: str = ""
    """half-life of a moving average of the weights, such as "5 epochs"; the average is evaluated and saved beside the
    weights; empty: no average"""

    @property
    def averages(self) -> bool:
        """Whether the run keeps an average of the weights."""
        return bool(self.ema_half_life) or self.name == "schedule_free_adamw"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, as a function of the step."""

    name: Literal["linear", "cosine", "constant"] = "cosine"
    """shape of the decay"""
    warmup: str = "0 epochs"
    """duration of the linear warm-up"""
    start: float | None = None
    """learning rate of the first warm-up step as a fraction of the peak; null: 1 / (number of warm-up steps + 1)"""
    floor: float = 0.0
    """lowest learning rate of the decay as a fraction of the peak"""
    cooldown: str = "0 epochs"
    """time at the lowest learning rate, at the end of the run; after a constant one, time of linear decay to it (WSD:
    warm-up, stable, decay)"""
    stairs: bool | Literal["timm", "deit"] = False
    """true: keep the learning rate constant within each epoch; timm: so, too, and the decay begins with the run, whose
    first part the warm-up replaces, as in timm and VOLO; deit: the same an epoch later, as DeiT's code sets it; false:
    the rate changes at every step"""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """rule by which optim.lr follows the global batch size"""
    reference_batch_size: int = 0
    """global batch size for which optim.lr was tuned; needed by linear and sqrt scaling"""
    batch_ramp: str = ""
    """a global batch that grows to data.global_batch_size: phases such as "1024@0,4096@10 epochs,32768@50 epochs", each
    with its batch and its place in epochs, images or %; or "1024@0,noise": twice the batch whenever the gradient noise
    scale exceeds it. The learning rate follows by scaling; log.every and other times in steps count steps of the last
    batch; empty: the same batch throughout"""
    image_sizes: str = ""
    """training images that grow to model.img_size: phases such as "128@0,192@30 %,224@80 %", each with the side in
    pixels and its place in epochs, images or %; smaller images take less time, and evaluations have model.img_size.
    For ViTs of the zoo, whose position embedding is resampled; empty: one size"""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run: its folder, length, seed, device and precision."""

    folder: str = ""
    """run folder; empty: runs/<recipe>. The same command line resumes the run that it finds there"""
    duration: str = "300 epochs"
    """duration of training"""
    max_steps: int = at_least(0, 0)
    """stop after this step, without a change of the schedule; 0: train for the whole duration"""
    end_time: float | str | None = None
    """time at which the job around this run ends: seconds since the epoch, or ISO 8601 such as 2026-11-21T18:00; the
    run stops before it, with a checkpoint and exit code 75. null: SLURM_JOB_END_TIME, if Slurm sets it"""
    profile_steps: str = ""
    """record steps with torch's profiler on rank 0: "a:b", such as 10:13, records steps a to b - 1 of this process,
    counted from 1. The trace for https://ui.perfetto.dev is written to TMPDIR or /tmp; empty: no trace"""
    eval_every: str = "1 epoch"
    """time between evaluations; never: train without held-out images, which are then not looked for"""
    check_replicas: str = "evaluation"
    """time between checks that all ranks hold the same bits in weights and optimizer, such as "500 steps"; each
    checkpoint is preceded by one as well. evaluation: at each evaluation, which takes far longer than a check; empty:
    no checks, for hosts with processors of different kinds, which round differently"""
    recompute: str = ""
    """time between checks that all ranks compute the same gradient of the same micro-batch, such as "500 steps"; a rank
    with a faulty processor is named. A check takes as long as a pass. On GPUs it needs run.deterministic, whose sums
    come in one order. Empty: no checks"""
    seed: int = at_least(0, 0)
    """seed of the weights, the data order, crops, mixup and dropout"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """autocast type; auto: bf16 if the processor computes it, else fp16 on GPUs and fp32 on CPUs; config.yaml then
    names the type that was chosen. Parameters and gradients are always fp32"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU of the local rank, or the CPU on a host without GPUs; an error if torch does not see the host's
    GPUs, as with a driver older than its CUDA"""
    deterministic: bool = False
    """compute the same bits in each repetition, at some cost in speed"""
    on_divergence: Literal["stop", "halve", "ignore"] = "stop"
    """if the smoothed training loss rises 85 % of the way back to that of a uniform guess (docs/divergence.md); stop:
    end the run; halve: go back to the newest checkpoint from before the rise, and on at half the learning rate, three
    times at most; ignore: warn, and go on"""
    compile: bool | Literal["blocks"] = False
    """true: compile the model: 8 % faster after 31 s of compiling (ViT-B/32, micro-batch 64, bf16, 2 CPU cores); the
    reduction no longer overlaps with the backward pass. blocks: compile each block of a ViT or a VOLO by itself, and
    equal ones once, so that it still does. With both, dropout draws other masks, which still depend on the seed alone.
    A pass is tried first: if one rank cannot compile it, all compute without a compiler"""
    ranks: Literal["auto", "horovod", "torch"] = "auto"
    """what the ranks of a launcher speak by; auto: torch.distributed (NCCL, Gloo) under torchrun and an srun without
    MPI, Horovod under horovodrun, mpirun and an srun with its MPI; torch: torch.distributed under these, too"""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """type in which gradients are sent; both halve the bytes. fp16 rounds the reduced gradient by 4e-4 (3 CPU ranks),
    and trains with a loss scale in every precision; a step whose gradients overflow in fp16 is skipped. bf16 rounds by
    3e-3, needs no loss scale, and works with the ranks of torch.distributed alone"""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The files that are written during training."""

    every: str = "10 steps"
    """time between rows of steps.csv and TensorBoard points"""
    to: str | None = limited(
        "tensorboard",
        lambda x: {*x.split(",")} <= {"tensorboard", "wandb", "mlflow"},
        "some of tensorboard,wandb,mlflow, or null",
    )
    """where the numbers go besides the tables, as tensorboard,mlflow: tensorboard (event files in the run folder),
    wandb (Weights & Biases) and mlflow, which must be installed; WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI and
    their other variables hold; null: nowhere"""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The checkpoints from which a run is resumed."""

    every: str = "1 epoch"
    """time between checkpoints, in epochs, steps, images, % of the run, seconds, minutes or hours; the last step always
    writes one"""
    best: Literal["top1", "ema_top1", "loss", "none"] = "top1"
    """keep the best checkpoint, too, as RUN/checkpoints/best: that of the highest held-out top-1, of the highest top-1
    of the averaged weights, or of the lowest held-out loss; an evaluation that is better than all before it is saved
    at once. none: keep the newest alone"""
    mirror: str = ""
    """folder or address, such as s3://bucket/runs (fsspec's; needs s3fs), to which a thread copies checkpoints, tables
    and log, into a folder of the run folder's name. An empty run folder resumes from there. Credentials come from the
    environment; empty: none"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    recipe: str = ""
    """recipe that gives the values of all other options: a name, or my.py:function for one of your own; empty: that of
    the model and the data, without data quickstart"""
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
    def mixes_tokens(self) -> bool:
        return bool(self.loss.dense_weight) and not self.augment.mixup_alpha and not self.augment.cutmix_alpha

    @property
    def folder(self) -> str:
        return self.run.folder or f"runs/{self.recipe or 'custom'}"


@dataclass(frozen=True, kw_only=True)
class Unsized(TrainConfig):
    """A run whose recipe depends on the number of its images, not known yet."""

    argv: tuple[str, ...] = ()  # the command line; no option of a run
