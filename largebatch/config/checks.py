"""The checks of a config: options that must fit together. The range of a value stands at its field.

An option without effect is refused on a command line, and only reported if a file names it: a run from before this
check must go on.
"""

from largebatch.arguments import expanded, local
from largebatch.config import image_sizes, ramp
from largebatch.config.durations import NEVER, duration_images, duration_seconds, epoch_seconds, profiled_steps
from largebatch.config.parallel import ParallelConfig
from largebatch.config.sections import DataConfig, OptimConfig, TrainConfig
from largebatch.config.values import check_values

DROPS = ("pos_drop_rate", "proj_drop_rate", "drop_rate", "drop_path_rate")


def dropping(config: TrainConfig) -> list[str]:
    """Return the options by which a pass drops at random, with their rates."""
    return [f"--model.{option} {getattr(config.model, option)}" for option in DROPS if getattr(config.model, option)]


def without_effect(config: TrainConfig) -> list[str]:
    """Return a sentence for each option that changes nothing."""
    schedule, tensor = config.schedule, config.parallel.tensor
    found = []
    if schedule.stairs == "timm" and not _lasts(schedule.warmup):
        found.append(
            f"--schedule.stairs is timm and --schedule.warmup {schedule.warmup!r}: without a warm-up that is the same "
            "as true, so set --schedule.warmup, or true."
        )
    if tensor.mode != "1d" and tensor.size == 1:
        found.append(
            f"--parallel.tensor.mode is {tensor.mode} and --parallel.tensor.size 1, so no matrix is cut: set the size "
            "to the number of ranks that share each matrix, or leave the mode out."
        )
    return found


def _lasts(duration: str) -> bool:
    size = 10**6  # of any data set
    return duration_images(duration, option="duration", num_samples=size, batch_size=size, run_images=size) > 0


def check(config: TrainConfig) -> None:
    """Raise ValueError for the first invalid value, or the first two options that contradict each other."""
    c = config
    check_values(c)
    _check_crop(c.data)
    _check_durations(c)
    ramp.check(c)
    image_sizes.check(c)
    profiled_steps(c.run.profile_steps)
    if c.run.end_time is not None:
        epoch_seconds(c.run.end_time, option="--run.end_time")
    if (c.schedule.scaling == "none") == bool(c.schedule.reference_batch_size):
        raise ValueError(
            f"--schedule.scaling is {c.schedule.scaling} and --schedule.reference_batch_size is "
            f"{c.schedule.reference_batch_size}: linear and sqrt need a reference batch; with none, leave it at 0."
        )
    if c.checkpoint.best == "ema_top1" and not c.optim.averages:
        raise ValueError(
            "--checkpoint.best is ema_top1, and there are no averaged weights: set --optim.ema_half_life, or take top1."
        )
    local(c.run.folder), expanded(c.checkpoint.mirror)  # which refuse an address, and one with a password
    _check_tokens(c)
    _check_bce(c)
    _check_half_life(c.optim)
    _check_schedule_free(c)
    _check_sam(c)
    _check_parallel(c)
    _check_timm(c)


def _check_half_life(optim: OptimConfig) -> None:
    given = f"--optim.second_moment_half_life is {optim.second_moment_half_life!r} and"
    reasons = dict.fromkeys(("sgd", "lars"), "which has no second moment")
    reasons |= dict.fromkeys(("nadamw", "schedule_free_adamw"), "whose bias correction expects one rate")
    if optim.second_moment_half_life and (reason := reasons.get(optim.name)):
        raise ValueError(f"{given} --optim.name {optim.name}, {reason}: choose lamb or adamw, or leave it out.")
    if optim.second_moment_half_life and optim.betas is not None:
        raise ValueError(
            f"{given} --optim.betas {list(optim.betas)}: both give the decay rate of the second moment, so leave one "
            "of the two out."
        )


def _check_schedule_free(config: TrainConfig) -> None:
    optim, schedule, average = config.optim, config.schedule, "its average takes the place of"
    for option, value, refused, reason, remedy in (
        ("schedule.name", schedule.name, schedule.name != "constant", f"{average} a decay", "constant"),
        ("schedule.cooldown", schedule.cooldown, _lasts(schedule.cooldown), f"{average} a decay", "'0 epochs'"),
        ("optim.ema_half_life", optim.ema_half_life, optim.ema_half_life, f"{average} another one", "''"),
        ("optim.sam_rho", optim.sam_rho, optim.sam_rho, "it was never tried with Look-LayerSAM", "null"),
    ):
        if optim.name == "schedule_free_adamw" and refused:
            raise ValueError(
                f"--optim.name is schedule_free_adamw and --{option} {value!r}: {reason}, so set --{option} {remedy}, "
                "or choose another optimizer."
            )


def _check_sam(config: TrainConfig) -> None:
    rho, parallel = config.optim.sam_rho, config.parallel
    if rho is None:
        return
    if (shape := parallel.shape()).size > 1 or parallel.zero:
        other = f"--parallel {shape}" if shape.size > 1 else f"--parallel.zero {parallel.zero}"
        raise ValueError(
            f"--optim.sam_rho is {rho} and {other}: Look-LayerSAM needs whole tensors and their state on every rank, "
            "so leave one of the two out."
        )


def _check_durations(config: TrainConfig) -> None:
    """Refuse a duration without a number or a unit."""
    run, size = config.run, 10**6
    durations = {
        "optim.ema_half_life": config.optim.ema_half_life,
        "optim.second_moment_half_life": config.optim.second_moment_half_life,
        "schedule.warmup": config.schedule.warmup,
        "schedule.cooldown": config.schedule.cooldown,
        "run.eval_every": "" if run.eval_every == NEVER else run.eval_every,
        "run.check_replicas": "" if run.check_replicas == "evaluation" else run.check_replicas,
        "run.recompute": run.recompute,
        "log.every": config.log.every,
        "checkpoint.every": "" if duration_seconds(config.checkpoint.every) else config.checkpoint.every,
    }
    for option, text in durations.items():
        if text:
            duration_images(text, option=f"--{option}", num_samples=size, batch_size=size, run_images=size)
    duration_images(run.duration, option="--run.duration", num_samples=size, batch_size=size)


def _check_timm(config: TrainConfig) -> None:
    name = config.model.name
    if not name.startswith("timm/"):
        return
    shape = config.parallel.shape()
    if shape.size > 1:
        raise ValueError(
            f"--parallel is {shape} and --model {name}: only the zoo's own models can be cut, so leave --parallel out, "
            "or choose one of them, such as vit_b16."
        )
    tokens = {"loss.dense_weight": config.loss.dense_weight, "data.token_labels": config.data.token_labels}
    for option, value in tokens.items():
        if value:
            raise ValueError(
                f"--{option} is {value} and --model {name}: models of timm have no logits of tokens in training, so "
                "leave it out, or choose one that has them, such as volo_d1."
            )


def _check_parallel(config: TrainConfig) -> None:
    parallel = config.parallel
    if parallel.zero and config.optim.name != "lamb":
        raise ValueError(
            f"--parallel.zero is {parallel.zero} and --optim.name {config.optim.name}: ZeRO divides lamb's state only."
        )
    if config.optim.preset == "cautious" and (parallel.zero or parallel.shape().size > 1):
        raise ValueError(
            "--optim.preset is cautious, which needs whole tensors on every rank: with --parallel choose another one."
        )
    own = ParallelConfig()
    for name in ("schedule", "micro_batches", "cuts"):
        value = getattr(parallel, name)
        if parallel.pipeline == 1 and value != getattr(own, name):
            raise ValueError(f"--parallel.{name} is {value}, which only a pipeline uses: raise --parallel.pipeline.")
    if parallel.pipeline > 1 and config.optim.layer_decay is not None:
        raise ValueError(
            f"--optim.layer_decay is {config.optim.layer_decay} and --parallel.pipeline {parallel.pipeline}: a stage "
            "has some of the layers only, and cannot count those above them; leave one of the two out."
        )
    if parallel.shape().size == 1:
        return
    if config.optim.name not in ("lamb", "adamw", "sgd"):
        raise ValueError(
            f"--optim.name is {config.optim.name}, which needs whole tensors on every rank or was never tried with "
            "--parallel: choose lamb, adamw or sgd."
        )
    for name, refused, reason in (
        ("precision", ["fp16"], "the ranks of a replica would choose different loss scales; choose bf16 or fp32"),
        ("compression", ["fp16"], "the ranks of a replica would choose different loss scales; choose none"),
        ("compile", [True, "blocks"], "torch.compile cannot compile the messages inside a model; choose false"),
    ):
        if (value := getattr(config.run, name)) in refused:
            raise ValueError(f"--run.{name} is {value} and --parallel {parallel.shape()}: {reason}.")
    if config.run.recompute:
        raise ValueError(
            f"--run.recompute is {config.run.recompute!r} and --parallel {parallel.shape()}: it needs a whole model on "
            "each rank, so leave it out."
        )
    if config.optim.ema_half_life:
        raise ValueError(
            f"--optim.ema_half_life is {config.optim.ema_half_life!r} and --parallel {parallel.shape()}: there is no "
            "average of divided weights, so leave it out."
        )


def _check_tokens(config: TrainConfig) -> None:
    data, loss, augment = config.data, config.loss, config.augment
    if loss.ground_truth != "none" and not data.token_labels:
        raise ValueError(
            f"--loss.ground_truth is {loss.ground_truth}: it divides the target between label and teacher, so it needs "
            "--data.token_labels true."
        )
    if augment.cutmix_alpha and data.token_labels and loss.dense_weight:
        raise ValueError(
            f"--augment.cutmix_alpha is {augment.cutmix_alpha} with token labels: the tokens of a pasted box would "
            "have the labels of the image below it, so leave it out: MixToken takes its place."
        )
    if loss.dense_weight and config.model.img_size % 16:
        raise ValueError(
            f"--model.img_size is {config.model.img_size}: --loss.dense_weight needs a multiple of 16, the "
            "pixels along each side of an output cell."
        )


def _check_bce(config: TrainConfig) -> None:
    shape, spread = config.parallel.shape(), "every class with a share of the target counts as right"
    for option, value, reason in (
        ("augment.label_smoothing", config.augment.label_smoothing, f"{spread}, so all would; set 0"),
        ("data.token_labels", config.data.token_labels, f"{spread}, and a teacher gives many a share; set false"),
        ("loss.dense_weight", config.loss.dense_weight, "token logits have a cross entropy; set 0"),
        ("parallel", shape if shape.size > 1 else 0, "ranks that share a model compute a cross entropy; leave it out"),
    ):
        if config.loss.name == "bce" and value:
            raise ValueError(f"--loss.name is bce and --{option} {value}: {reason}, or choose cross_entropy.")


def _check_crop(data: DataConfig) -> None:
    own = DataConfig()
    if data.crop_padding is not None and data.scale != own.scale:
        raise ValueError(
            f"--data.crop_padding is {data.crop_padding}, which does not use --data.scale {list(data.scale)}: leave it "
            f"at {list(own.scale)}, or set null."
        )
