"""Others' recipes for batches of 1,024 to 4,096, to compare with 32,768: DeiT III, and plain ViTs of big_vision.

    horovodrun -np 8 python -m largebatch.train --recipe deit3_b16 --data /data/imagenet_tfrecords

    deit3_s16 deit3_b16 deit3_l16   batch 2,048, LAMB, 800 epochs; deit3_b16_224 and deit3_l16_224 tune the latter two
    plain_s16_like plain_b16_like   batch 1,024, AdamW, 90 epochs
    augreg_b32_like augreg_b16_like batch 4,096, AdamW, 300 epochs

No run of these has been made here. `--recipe deit3_b16 --model vit_b16` trains the model of the 32K recipe by these
settings. Each docstring says what differs from the published run; a name ends in _like if that may change the result.
"""

from dataclasses import replace

from largebatch.config import (
    AugmentConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

FIRST_LR, LOWEST_LR = 1e-6, 1e-5  # of DeiT's warm-up and cosine


# -- DeiT III ----------------------------------------------------------------------------------------------------


def _deit3(recipe: str, *, img_size: int, lr: float, drop_path_rate: float) -> TrainConfig:
    """The settings of DeiT III for all sizes; its LAMB is apex's, with eps 1e-8, which clips at 1."""
    return TrainConfig(
        recipe=recipe,
        model=ModelConfig(name=recipe, img_size=img_size, drop_path_rate=drop_path_rate),
        data=DataConfig(path="", global_batch_size=2048, micro_batch_size=256),  # 8 ranks × 256, or 32 × 64
        augment=AugmentConfig(auto_augment="3a", repeats=3, mixup_alpha=0.8, cutmix_alpha=1.0),
        loss=LossConfig(name="bce"),
        optim=OptimConfig(preset="paper", lr=lr, weight_decay=0.05, eps=1e-8, clip_norm=1.0),
        schedule=_deit_cosine(lr),
        run=RunConfig(duration="800 epochs", precision="fp16"),
    )


def _deit_cosine(lr: float) -> ScheduleConfig:
    """The cosine of DeiT: it runs from epoch 0, and a warm-up of 5 epochs hides its beginning."""
    return ScheduleConfig(name="cosine", warmup="5 epochs", start=FIRST_LR / lr, floor=LOWEST_LR / lr, stairs="deit")


def deit3_s16() -> TrainConfig:
    """DeiT III, ViT-S/16 at 224 px, 800 epochs: 81.4 % top-1 published, on 8 GPUs.

    Source: commands in README_revenge.md, and the code, of facebookresearch/deit (https://arxiv.org/abs/2204.07118).
    """
    return _deit3("deit3_s16", img_size=224, lr=4e-3, drop_path_rate=0.05)


def deit3_b16() -> TrainConfig:
    """DeiT III, ViT-B/16 at 192 px, 800 epochs: 82.8 % top-1 in the published log; 83.8 % after `deit3_b16_224`."""
    return _deit3("deit3_b16", img_size=192, lr=3e-3, drop_path_rate=0.2)


def deit3_l16() -> TrainConfig:
    """DeiT III, ViT-L/16 at 192 px, 800 epochs, on 32 GPUs: 84.0 % top-1 in the log, 84.9 % after `deit3_l16_224`."""
    base = _deit3("deit3_l16", img_size=192, lr=3e-3, drop_path_rate=0.45)
    return replace(base, data=replace(base.data, micro_batch_size=64))


def _deit3_at_224(base: TrainConfig) -> TrainConfig:
    """The published fine-tuning from 192 to 224 px: 20 epochs with AdamW at a batch of 512, and a cross entropy."""
    return replace(
        base,
        recipe=f"{base.recipe}_224",
        model=replace(base.model, img_size=224),
        data=replace(base.data, global_batch_size=512, micro_batch_size=64),
        augment=replace(base.augment, auto_augment="rand-m9-mstd0.5-inc1", repeats=1, label_smoothing=0.1),
        loss=LossConfig(),
        optim=OptimConfig(name="adamw", lr=1e-5, weight_decay=0.1, clip_norm=None),
        schedule=_deit_cosine(1e-5),
        run=replace(base.run, duration="20 epochs"),
    )


def deit3_b16_224() -> TrainConfig:
    """DeiT III, ViT-B/16 from 192 to 224 px: 83.8 % top-1 published.

    horovodrun -np 8 python -m largebatch.train --recipe deit3_b16_224 --init-from runs/deit3_b16 --data ...
    """
    return _deit3_at_224(deit3_b16())


def deit3_l16_224() -> TrainConfig:
    """DeiT III, ViT-L/16 from 192 to 224 px: 84.9 % top-1 published."""
    return _deit3_at_224(deit3_l16())


# -- big_vision --------------------------------------------------------------------------------------------------


def _big_vision(
    recipe: str, model: ModelConfig, *, batch: int, epochs: int, magnitude: int, mixup: float
) -> TrainConfig:
    """The settings that both configs of google-research/big_vision share.

    Its decay of 1e-4 is not multiplied by the learning rate of 1e-3, but by its schedule; torch's AdamW multiplies by
    both, so 0.1 is the same.
    """
    return TrainConfig(
        recipe=recipe,
        model=model,
        data=DataConfig(
            path="",
            global_batch_size=batch,
            micro_batch_size=128,
            scale=(0.05, 1.0),
            crop_pct=0.875,
            interpolation="bilinear",
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
        ),
        augment=AugmentConfig(auto_augment=f"tf-m{magnitude}-n2", mixup_alpha=mixup),
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.1, clip_norm=1.0),
        schedule=ScheduleConfig(name="cosine", warmup="10000 steps", start=0.0),
        run=RunConfig(duration=f"{epochs} epochs", precision="bf16"),
    )


def _plain(recipe: str, model: str) -> TrainConfig:
    return _big_vision(recipe, ModelConfig(name=model), batch=1024, epochs=90, magnitude=10, mixup=0.2)


def plain_s16_like() -> TrainConfig:
    """Plain ViT-S/16, 224 px, 90 epochs at 1,024 with AdamW: 76.5 % top-1 published, in 6 to 7 hours on a TPU v3-8.

    With `--run.duration "300 epochs"` 80 % are published. Source: "Better plain ViT baselines for ImageNet-1k"
    (https://arxiv.org/abs/2205.01580) and vit_s16_i1k.py of big_vision. Five things differ. There a hidden layer
    is before the head; the paper finds no need for it. Crops are resized there without antialiasing. 1 % of the
    training images are held back there, the first moment is in bf16, and a whole batch is mixed in one ratio.
    """
    return _plain("plain_s16_like", "plain_s16")


def plain_b16_like() -> TrainConfig:
    """Plain ViT-B/16 by the settings of `plain_s16_like`: ours; the authors publish S/16 only."""
    return _plain("plain_b16_like", "plain_b16")


def _augreg(recipe: str, model: str) -> TrainConfig:
    config = ModelConfig(name=model, weight_init="jax")
    return _big_vision(recipe, config, batch=4096, epochs=300, magnitude=15, mixup=0.5)


def augreg_b16_like() -> TrainConfig:
    """ViT-B/16, 224 px, 300 epochs at 4,096 with AdamW: about 79 % top-1, as an author expects of this config.

    Sources: "How to train your ViT?" (https://arxiv.org/abs/2106.10270), vit_i1k.py of big_vision with its medium2 for
    B/16, and issue 7 there. It differs in the five things of `plain_s16_like` and two more: its loss is a sigmoid cross
    entropy with a bias of -6.9 in the head, here it is the cross entropy; and RandAugment's color and sharpness are up
    to two grey levels apart.
    """
    return _augreg("augreg_b16_like", "vit_b16")


def augreg_b32_like() -> TrainConfig:
    """ViT-B/32 by the config of `augreg_b16_like`, which names B/32 with the same settings.

    The paper's best weights have 74.9 % (timm's vit_base_patch32_224.augreg_in1k), chosen from a sweep over dropout,
    stochastic depth and augmentation, so this config alone need not reach it.
    """
    return _augreg("augreg_b32_like", "vit_b32")
