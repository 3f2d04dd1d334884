"""ViT-B/16 on CIFAR-10 at 224 px with LAMB: 300 epochs at a global batch of 16,384. No accuracy is known.

    python -m largebatch.pack cifar-10-batches-bin/ cifar10/
    horovodrun -np 4 python -m largebatch.train --recipe cifar10 --data cifar10/

The settings follow the step-by-step tutorial of Colossal-AI: its accumulation (16 on 4 GPUs) as the global batch, the
initialisation of its other models. It names no accuracy: it trains on images of 32 px inside a black frame of 224, and
tests on images enlarged to 224. Here both are enlarged: training cuts the usual 32 px window out of the image with a
border of 4.
"""

from largebatch.config import (
    AugmentConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)


def cifar10() -> TrainConfig:
    """ViT-B/16, 300 epochs of 3 or 4 steps at a global batch of 16,384, with AutoAugment's CIFAR-10 policy.

    For comparison: a ViT-Lite-7/4 reaches about 90.5 % in 200 epochs at batch 512 with AdamW (the same team's
    benchmark).
    """
    return TrainConfig(
        recipe="cifar10",
        model=ModelConfig(name="vit_b16", num_classes=10, pos_drop_rate=0.1, proj_drop_rate=0.1, weight_init="jax"),
        data=DataConfig(
            path="",
            global_batch_size=16384,  # = 4 ranks × 256 × 16 passes
            micro_batch_size=256,
            crop_padding=4,
            crop_pct=1.0,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2023, 0.1994, 0.2010),
        ),
        augment=AugmentConfig(auto_augment="cifar10"),
        optim=OptimConfig(preset="colossal", lr=1.8e-2, weight_decay=0.1, clip_norm=1.0),
        schedule=ScheduleConfig(name="linear", warmup="50 epochs", stairs=True),
        run=RunConfig(duration="300 epochs", precision="fp16"),
    )
