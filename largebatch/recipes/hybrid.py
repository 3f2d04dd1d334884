"""Ranks that share a model: ViT-B/16 on CIFAR-10 on 4 ranks, and a ViT of 6.45 billion parameters on 64 GPUs.

    horovodrun -np 4 python -m largebatch.train --recipe cifar10_hybrid --data cifar10/

No accuracy is known of any. The numbers are those of the hybrid-parallel examples of Colossal-AI (AdamW 3e-3, decay
0.3, warm-up of 32 of 300 epochs, clip 1), with three differences: bf16 autocast with fp32 weights for pure fp16; epochs
for a schedule that was stepped by batches; the batch is the job's, with one replica, and not the replica's.
"""

from dataclasses import replace

from largebatch.config import DataConfig, ModelConfig, OptimConfig, RunConfig, ScheduleConfig, TrainConfig
from largebatch.config.parallel import Mode, ParallelConfig, TensorConfig
from largebatch.recipes.cifar import cifar10

OPTIM = OptimConfig(name="adamw", lr=3e-3, weight_decay=0.3, clip_norm=1.0)
SCHEDULE = ScheduleConfig(name="cosine", warmup="32 epochs")


def cifar10_pipeline() -> TrainConfig:
    """ViT-B/16 on CIFAR-10 in two stages, each batch of 256 in two parts.

    horovodrun -np 4 python -m largebatch.train --recipe cifar10_pipeline --data cifar10/
    """
    base = cifar10()
    return replace(
        base,
        recipe="cifar10_pipeline",
        model=replace(base.model, grad_checkpointing=True, pos_drop_rate=0.0, proj_drop_rate=0.0),
        data=replace(base.data, global_batch_size=512, micro_batch_size=256),  # 512 = 2 replicas × 256
        augment=replace(base.augment, label_smoothing=0.1),
        optim=OPTIM,
        schedule=SCHEDULE,
        run=replace(base.run, precision="bf16"),
        parallel=ParallelConfig(pipeline=2),
    )


def cifar10_hybrid() -> TrainConfig:
    """`cifar10_pipeline` with every matrix cut over two ranks (1D) in each stage: one replica on 4 ranks.

    horovodrun -np 4 python -m largebatch.train --recipe cifar10_hybrid --data cifar10/
    """
    base = cifar10_pipeline()
    return replace(
        base,
        recipe="cifar10_hybrid",
        data=replace(base.data, global_batch_size=256),
        parallel=ParallelConfig(pipeline=2, tensor=TensorConfig(size=2)),
    )


def vit_6b16(mode: Mode, *, size: int, stages: int, global_batch_size: int) -> TrainConfig:
    """A ViT/16 of 32 blocks of 4,096 features and 64 heads on ImageNet, on size × stages GPUs, at least 64 of 80 GB.

    The whole batch is one micro-batch, in as many parts as there are stages. Every rank builds the whole model in host
    memory before it keeps its part, so for a moment each needs 26 GB.
    """
    return TrainConfig(
        recipe=f"vit_6b16_{mode}",
        model=ModelConfig(name="vit_6b16", grad_checkpointing=True),
        data=DataConfig(path="", global_batch_size=global_batch_size, micro_batch_size=global_batch_size),
        optim=OPTIM,
        schedule=SCHEDULE,
        run=RunConfig(duration="300 epochs", precision="bf16"),
        parallel=ParallelConfig(pipeline=stages, tensor=TensorConfig(mode=mode, size=size)),
    )
