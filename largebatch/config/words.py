"""Options that do not exist (misspelt, or of timm, torchvision and others), and the options to give instead."""

from collections.abc import Collection, Mapping

from largebatch.nearest import nearest

INSTEAD = {  # our option: the words for it elsewhere
    "--optim.lr": "learning_rate base_lr",
    "--optim.name": "opt optimizer",
    "--optim.weight_decay": "wd",
    "--optim.clip_norm": "clip_grad clip_grad_norm max_grad_norm gradient_clip_val",
    "--optim.ema_half_life": "ema model_ema ema_decay model_ema_decay",
    "--schedule.name": "sched scheduler lr_scheduler lr_scheduler_type",
    "--schedule.warmup '5 epochs'": "warmup_epochs warmup_steps lr_warmup_epochs",
    "--run.duration '10 epochs'": "epochs num_epochs max_epochs num_train_epochs train_epochs",
    "--run.folder": "output output_dir out out_dir save_dir log_dir experiment",
    "--run.precision": "amp fp16 bf16 fp32 mixed_precision dtype amp_dtype",
    "--data": "dataset data_dir data_path train_dir root",
    "--data.num_threads": "workers num_workers dataloader_num_workers",
    "--img-size": "input_size image_size size resolution",
    "--init-from": "pretrained finetune initial_checkpoint load ckpt weights from_pretrained",
    "--model.drop_path_rate": "drop_path stochastic_depth_prob",
    "--optim.preset cautious": "caution",
    "--optim.preset decoupled": "decoupled_decay",
    "--optim.preset corrected": "corrected_weight_decay",
    "--augment.mixup_alpha": "mixup",
    "--augment.cutmix_alpha": "cutmix",
    "--augment.auto_augment": "aa autoaugment",
    "--augment.auto_augment 3a": "three_augment color_jitter",
    "--augment.repeats": "aug_repeats repeated_aug",
    "--augment.label_smoothing": "smoothing",
    "--loss.name bce": "bce_loss",
    "--checkpoint.every": "save_every save_steps checkpoint_freq save_freq",
}
SENTENCES = {  # advice where no single option fits: the words elsewhere
    "--data.global_batch_size is the batch of a step on all ranks, --data.micro_batch_size that of a pass of a rank.":
        "batch_size batch b train_batch_size per_device_train_batch_size",
    "the passes of a step follow from --data.global_batch_size, --data.micro_batch_size and the number of ranks.":
        "grad_accum_steps gradient_accumulation_steps accum_steps accumulate_grad_batches backward_passes_per_step",
    "the launcher starts the ranks: horovodrun -np 4 python -m largebatch.train.":
        "gpus num_gpus devices np nproc_per_node world_size local_rank num_processes",
    "the same command goes on with the run in --run.folder; --init-from starts a new one from weights.":
        "resume resume_from resume_from_checkpoint auto_resume",
    "largebatch --version prints the versions.": "version",
}  # fmt: skip
# Options of older versions: the default in a config.yaml, which still loads, and what to use for another value.
GONE = {
    "model.drop_path_fixed": ("false", "--model.drop_path_rate draws each image by itself"),
    "model.outlook": ("plain", "--run.compile blocks compiles the blocks of a VOLO"),
    "model.residual": ("", "--model.grad_checkpointing true saves memory"),
    "run.graphs": ("false", "--run.compile blocks saves launches"),
    "model.attn_drop_rate": ("0.0", "--model.proj_drop_rate drops behind the attention"),
    "model.outlook_drop_path": ("false", "VOLO's outlookers drop no path, as published"),
    "data.token_label_axes": ("exact", "a token gets the label of its own place"),
    "augment.remode": ("pixel", "erased pixels become noise"),
    "augment.mixup_switch_prob": ("0.5", "mixup and cutmix are equally likely"),
    "augment.mix_token": ("true", "--loss.dense_weight brings MixToken, unless mixup or CutMix mix the images"),
    "loss.cls_weight": ("1.0", "--loss.dense_weight is relative to 1"),
    "optim.trust_coefficient": ("null", "--optim.lr scales the steps of lars"),
    "optim.sam_every": ("5", "Look-LayerSAM works in every fifth step"),
    "optim.sam_alpha": ("0.1", "Look-LayerSAM has an alpha of 0.1"),
    "schedule.power": ("1.0", "--schedule.name cosine or linear are the shapes"),
    "checkpoint.keep": ("2", "the two newest checkpoints are kept, and --checkpoint.best"),
    "data.train_crop": ("random_resized", "--data.crop_padding alone says that a crop is moved"),
    "data.train_interpolation": ("null", "--data.interpolation has the filter, or random"),
    "schedule.prefix": ("true", "--schedule.stairs timm lets the decay begin with the run"),
    "optim.momentum": ("null", "sgd and lars have 0.9, muon 0.95"),
    "optim.rest": ("null", "--optim.name muon_lamb is muon with lamb for the rest"),
    "optim.impl": ("null", "lamb is compiled if every rank has a compiler"),
    "data.ratio": ("0.75,1.3333333333333333", "crops have ratios of 3/4 to 4/3"),
    "log.tensorboard": ("true", "--log.to names where the numbers go, or none"),
    "log.wandb": ("false", "--log.to names where the numbers go, as tensorboard,wandb"),
    "parallel.offload": ("false", "--parallel.zero offload moves the optimizer's state to the host"),
    "run.find_lr": ("false", "largebatch find_lr searches"),
    "run.max_skipped_steps": ("25", "a run gives up after 25 steps in a row without an update"),
    "horovod.reduction": ("average", "gradients are averaged, because clipping and LAMB need the whole gradient"),
    "horovod.fusion_threshold_mb": ("null", "set HOROVOD_FUSION_THRESHOLD, in bytes"),
    "horovod.cycle_time_ms": ("null", "set HOROVOD_CYCLE_TIME"),
    "horovod.torus_allreduce": ("false", "set HOROVOD_TORUS_ALLREDUCE=1"),
    "horovod.autotune": ("false", "set HOROVOD_AUTOTUNE=1"),
    "horovod.timeline": ("", "set HOROVOD_TIMELINE to a file"),
}
# Values of an older version, and the values that mean the same now. None: the option is not given.
MERGED: list[tuple[dict[str, str | None], dict[str, str]]] = [
    ({"data.train_crop": "pad"}, {}),
    ({"augment.mix_token": "false", "loss.dense_weight": "0.0"}, {}),
    ({"data.train_crop": "random_resized"}, {"data.crop_padding": "null"}),
    ({"data.train_interpolation": "random", "data.interpolation": "null"}, {"data.interpolation": "random"}),
    ({"parallel.zero": "1", "parallel.offload": "true"}, {"parallel.zero": "offload"}),
    ({"log.tensorboard": "false", "log.to": None}, {"log.to": "null"}),
    ({"log.tensorboard": "true", "log.wandb": "true", "log.to": None}, {"log.to": "tensorboard,wandb"}),
    ({"log.tensorboard": None, "log.wandb": "true", "log.to": None}, {"log.to": "tensorboard,wandb"}),
    ({"log.tensorboard": "false", "log.wandb": "true", "log.to": None}, {"log.to": "wandb"}),
    ({"schedule.prefix": "false", "schedule.stairs": "true"}, {"schedule.stairs": "timm"}),
]
WORDS = {word: f"did you mean {option}?" for option, words in INSTEAD.items() for word in words.split()}
WORDS |= {word: sentence for sentence, words in SENTENCES.items() for word in words.split()}


def modern(texts: Mapping[str, str]) -> dict[str, str | None]:
    """Return the new texts of a file's merged options, by dotted name; None: the option is gone."""
    found: dict[str, str | None] = {}
    for old, new in MERGED:
        if all(texts.get(name) == text for name, text in old.items()):
            found |= dict.fromkeys(old.keys() & GONE.keys()) | new
    return found


def hint(name: str, known: Collection[str]) -> str:
    """Return what to give instead of an unknown option; known: the options, without dashes."""
    if name in GONE:
        return f"{GONE[name][1]}, and of an older run --{name} loads with its default alone."
    section, _, word = name.replace("-", "_").rpartition(".")
    if word in WORDS:
        return WORDS[word]
    inside = [option for option in known if section and option.startswith(f"{section}.")]
    short = [option for option in known if "." not in option]
    if section and not inside and (found := nearest(name, known, cutoff=0.7, hint="--{}?")):
        return found
    for options in (inside,) if inside else (short, known):
        ends = {option.replace("-", "_").rpartition(".")[2]: option for option in options}
        if found := nearest(word, ends, hint="--{}?", shown=ends):
            return found
    return "--help lists the options."
