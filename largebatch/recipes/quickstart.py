"""Something real in a few minutes on two CPU cores: the full model, the full stack, small images."""

from largebatch.config import (
    AugmentConfig,
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)


def quickstart(model: str = "vit_b32") -> TrainConfig:
    """A ViT with all its layers on scikit-learn's handwritten digits at 64 px; LAMB, batch 256.

    horovodrun -np 2 python -m largebatch.train --model vit_b32
    """
    return TrainConfig(
        recipe="quickstart",
        model=ModelConfig(name=model, img_size=64, num_classes=10),
        data=DataConfig(  # 256 = 2 ranks × 32 × 4 passes
            path="digits",
            global_batch_size=256,
            micro_batch_size=32,
            eval_batch_size=60,
            scale=(0.85, 1.0),
            hflip=0.0,
            crop_pct=0.875,
            num_threads=1,  # a mirrored digit is none
        ),
        augment=AugmentConfig(),
        optim=OptimConfig(preset="paper", lr=1.5e-3, weight_decay=0.02),
        schedule=ScheduleConfig(name="cosine", warmup="15 %"),
        run=RunConfig(
            folder="" if model == "vit_b32" else f"runs/quickstart_{model}", duration="12 epochs", precision="bf16"
        ),
        log=LogConfig(every="1 step"),
        checkpoint=CheckpointConfig(every="50 %"),
    )
