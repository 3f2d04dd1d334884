"""Recipes for any model, whose batch and length follow from the number of training images.

    scratch   from random weights, with LAMB: the settings of DeiT III, scaled to the data
    finetune  from other weights, with SGD: the settings of the ViT paper, scaled to the data

Until the images are counted, the batch is the largest that the recipe takes. The micro-batch is an eighth of the batch,
for eight ranks, and 64 at most; if that is below the 16 that batch norm needs, up to a quarter, for four ranks.
"""

import math

from largebatch.config import (
    AugmentConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

IMAGENET = 1_281_167
UPDATES = 39  # of an epoch, as ImageNet has at 32,768
SMALLEST, SMALL_MICRO_BATCH, LARGEST_MICRO_BATCH = 64, 16, 64


def scratch(model: str = "vit_b32", num_images: int = 0, *, batch_size: int = 0) -> TrainConfig:
    """Any model from random weights: 300 epochs with LAMB, at a batch of 4,096 at most.

    horovodrun -np 4 python -m largebatch.train --model vit_s16 --data FOLDER

    The batch is the largest power of two that leaves 39 updates in an epoch, as 32,768 does on ImageNet: 1,024 for
    50,000 images, and 64 at least. Source: DeiT III (https://arxiv.org/abs/2204.07118) trains with LAMB, at 3e-3 and a
    batch of 2,048, decay 0.02, mixup 0.8, CutMix 1; the square-root rule scales its rate. RandAugment takes the place
    of its own policy. The accuracy depends on the data, and has not been measured on published ones.
    """
    batch_size = batch_size or batch_for(num_images, updates=UPDATES, largest=4096)
    return TrainConfig(
        recipe="scratch",
        model=ModelConfig(name=model),
        data=DataConfig(path="", global_batch_size=batch_size, micro_batch_size=micro_batch_for(batch_size)),
        augment=AugmentConfig(auto_augment="rand-m9-mstd0.5-inc1", mixup_alpha=0.8, cutmix_alpha=1.0),
        optim=OptimConfig(preset="paper", lr=3e-3, weight_decay=0.02, clip_norm=1.0),
        schedule=ScheduleConfig(name="cosine", warmup="5 %", scaling="sqrt", reference_batch_size=2048),
        run=RunConfig(folder=folder_of(model), duration="300 epochs"),
        checkpoint=CheckpointConfig(every="10 minutes"),
    )


def finetune(
    model: str = "vit_b32", num_images: int = 0, *, batch_size: int = 0, img_size: int = 224, **of_run: str
) -> TrainConfig:
    """Any model from the weights that --init-from names: SGD with momentum 0.9 at a batch of 512 at most, no decay.

    horovodrun -np 2 python -m largebatch.train --init-from runs/vit_b32 --data FOLDER --recipe finetune

    Source: the ViT paper (https://arxiv.org/abs/2010.11929), which clips at 1 and decays from 0.03 by a cosine, after a
    warm-up of 500 steps, for 20,000 steps on ImageNet, which are 8 epochs, and 500 on 3,680 pets, 70 epochs. Here the
    epochs are 8 on ImageNet, more on fewer images by the square root, and 40 at most. Small data leave 20 updates in an
    epoch, and the rate follows the batch.
    """
    batch_size = batch_size or batch_for(num_images, updates=20, largest=512)
    epochs = min(40, round(8 * math.sqrt(IMAGENET / (num_images or IMAGENET))))
    return TrainConfig(
        recipe="finetune",
        model=ModelConfig(name=model, img_size=img_size),
        data=DataConfig(path="", global_batch_size=batch_size, micro_batch_size=micro_batch_for(batch_size)),
        optim=OptimConfig(name="sgd", lr=0.03, weight_decay=0.0, clip_norm=1.0),
        schedule=ScheduleConfig(name="cosine", warmup="2.5 %", scaling="linear", reference_batch_size=512),
        run=RunConfig(folder=f"{folder_of(model)}_finetuned", duration=f"{epochs} epochs"),
        checkpoint=CheckpointConfig(every="10 minutes"),
    )


def batch_for(num_images: int, *, updates: int, largest: int) -> int:
    """Return the largest power of two with `updates` in an epoch, at least 64, and not more than the images."""
    if not num_images:
        return largest
    wanted = min(max(num_images // updates, SMALLEST), num_images, largest)
    return 2 ** (wanted.bit_length() - 1)


def micro_batch_for(batch_size: int) -> int:
    """Return the largest micro-batch that divides a batch into enough parts, as above."""
    most = max(1, min(LARGEST_MICRO_BATCH, max(batch_size // 8, min(SMALL_MICRO_BATCH, batch_size // 4))))
    return next(micro for micro in range(most, 0, -1) if batch_size % micro == 0)


def folder_of(model: str) -> str:
    return f"runs/{model.replace('/', '_')}"
