"""A small trainer of real parts, but for images that are a function of their sample number."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch import checkpoint
from largebatch.augment import Augment, seed_for
from largebatch.config import RunConfig, TrainConfig, dump
from largebatch.data.order import MicroBatch, Plan
from largebatch.data.stream import Batch
from largebatch.engine import Trainer, TrainState
from largebatch.losses import classification
from largebatch.optim import LookSam, build_optimizer, init_state
from largebatch.ranks import Ranks
from largebatch.replica import Replica
from zoo.vit import VisionTransformer

CLASSES = 7


def small_model(*, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4),
        nn.GELU(),
        nn.Flatten(),
        nn.LayerNorm(32),
        nn.Dropout(dropout),
        nn.Linear(32, CLASSES),
    )


class OddModel(nn.Sequential):
    """A small model as users have them: a layer that is never used, one that is frozen, one that is used twice, and
    one with the weight of another. Layers of `left_out` are not used in a pass; their numbers are those of the list.
    """

    def __init__(self, *, dropout: float = 0.0, seed: int = 0) -> None:
        torch.manual_seed(seed)
        first = nn.Conv2d(3, 8, 4, stride=4)
        branches = [nn.Linear(32, 32) for _ in range(5)]
        super().__init__(
            first, nn.GELU(), nn.Flatten(), nn.LayerNorm(32), nn.Dropout(dropout), nn.Linear(32, CLASSES), *branches
        )
        self[FROZEN].requires_grad_(False)
        self[TIED].weight = self[TWICE].weight
        self.left_out: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self[4](self[3](self[2](self[1](self[0](x)))))
        for branch in (TWICE, TWICE, TIED, FROZEN, OPTIONAL):
            if branch not in self.left_out:
                x = x + self[1](self[branch](x))
        return self[5](x)


NEVER, FROZEN, TWICE, TIED, OPTIONAL = range(6, 11)  # places in OddModel


def tiny_vit(*, depth: int = 3, **rates: float) -> nn.Module:
    """timm's class with few blocks, for images (B, 3, 8, 8)."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=depth, num_heads=2, num_classes=CLASSES, **rates
    )
    nn.init.normal_(model.head.weight)
    return model


def seen_by_optimizer(trainer: Trainer, batches: Iterator[Batch]) -> tuple[list[Tensor], float]:
    """Gradients and their norm in one step of the trainer."""
    gradients: list[Tensor] = []

    def keep(*_) -> None:
        gradients[:] = [parameter.grad.clone() for parameter in trainer.model.parameters()]

    handle = trainer.optimizer.register_step_pre_hook(keep)
    output = trainer.train_step(batches)
    handle.remove()
    return gradients, float(output.grad_norm)


def begun(optimizer: Any) -> set[nn.Parameter]:
    """What Horovod has begun to reduce in this step."""
    sent = [number for number, handle in optimizer.so_far.sent.items() if handle is not None]
    return {parameter for number in sent for parameter in optimizer.trained.buckets[number]}


def images(samples: list[int], *, dtype: torch.dtype) -> Tensor:
    """(B, 3, 8, 8), each a function of its sample number alone."""
    return torch.stack([torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(n), dtype=dtype) for n in samples])


def plan_for(comm: Ranks, *, passes: int = 2, steps: int = 1, left_over: int = 0) -> Plan:
    """Steps of so many passes over four images on each rank, and one of what is left over."""
    batch = comm.size * passes * 4
    num_images = steps * batch + left_over
    return Plan(num_samples=50, global_batch_size=batch, micro_batch_size=4, num_images=num_images, seed=0)


def replicas_agree(comm: Ranks, model: nn.Module, name: str) -> bool:
    """Whether all ranks hold the same bits."""
    mine = [tensor.detach().double().flatten().tolist() for tensor in model.state_dict().values()]
    return all(other == mine for other in comm.allgather_object(mine, name=name))


def batch_of(plan: Plan, micro: MicroBatch, *, dtype: torch.dtype) -> Batch:
    samples = plan.samples(micro.start, micro.stop)[1]
    labels = torch.from_numpy(samples) % CLASSES
    return Batch(images(samples.tolist(), dtype=dtype), labels, micro.step, micro.number, samples)


def small_trainer(
    comm: Ranks,
    plan: Plan,
    *,
    passes: int,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    precision: str = "fp32",
    mixup_alpha: float = 0.2,
    optimizer_name: str = "lamb",
    lr: float = 0.01,
    clip_norm: float | None = 1.0,
    compression: str = "none",
    sam: LookSam | None = None,
    **options: Any,
) -> Trainer:
    """options: those of the optimizer."""
    model = (model or small_model()).to(dtype)
    impl = "eager" if optimizer_name == "lamb" else None
    plain = build_optimizer(model, name=optimizer_name, lr=lr, weight_decay=0.1, impl=impl, **options)
    optimizer = comm.wrap(plain, model, passes=passes, compression=compression, watch=False)
    init_state(optimizer)
    if sam:
        sam.begin(optimizer)
    replica = Replica()
    replica.attach(model, optimizer, comm)

    def open_batches(start: int) -> Iterator[Batch]:
        plan = trainer.plan
        for step in range(start, plan.num_steps):
            for micro in plan.micro_batches(step, comm.rank, comm.size):
                yield batch_of(plan, micro, dtype=dtype)

    trainer = Trainer(
        comm=comm,
        model=model,
        objective=classification,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler("cpu", enabled="fp16" in (precision, compression)),
        learning_rate=lambda plan, step: lr / (1 + plan.time(step)),
        plan=plan,
        open_batches=open_batches,
        eval_batches=[batch_of(plan, micro, dtype=dtype) for micro in plan.micro_batches(0, comm.rank, comm.size)],
        augment=Augment(CLASSES, mixup_alpha=mixup_alpha),
        seed=3,
        precision=precision,
        clip_norm=clip_norm,
        eval_images=10**9,
        device=torch.device("cpu"),
        replica=replica,
        state=TrainState(phases=plan.phases),
        sam=sam,
    )
    return trainer


def serial_run(
    plan: Plan,
    model: nn.Module,
    scaling: Callable[[int], float] = lambda batch: 1.0,
    *,
    half_life: float = 0,
    optimizer: Optimizer | None = None,
) -> nn.Module:
    """The same run written out in one process, float64: the reference for any number of ranks."""
    power = 1.0
    augment = Augment(CLASSES, mixup_alpha=0.2)
    optimizer = optimizer or build_optimizer(model, lr=0.01, weight_decay=0.1, impl="plain")
    for step in range(plan.num_steps):
        for micro in plan.micro_batches(step, 0, 1):
            batch = batch_of(plan, micro, dtype=torch.float64)
            torch.manual_seed(seed_for(3, step, micro.number, purpose="model"))
            generator = torch.Generator().manual_seed(seed_for(3, step, micro.number))
            mixed = augment(batch.images, batch.labels, generator)
            (classification(model, mixed) / plan.window_images(step)).backward()
        beta2 = 2 ** (-plan.window_images(step) / half_life) if half_life else 0.999
        power *= beta2
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + plan.time(step)) * scaling(plan.batch_size(step))
            group["betas"], group["beta2_power"] = (0.9, beta2), power
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def stopped_and_resumed(make: Callable[[], Trainer], stop: int, folder: Path) -> Trainer:
    """A trainer at its end that took over from another one after `stop` steps; rank 0 alone finds the checkpoint."""
    config = TrainConfig(run=RunConfig(folder=str(folder)))
    first, second = make(), make()
    first.fit(max_steps=stop)
    if first.comm.rank == 0:
        snapshot = checkpoint.take_snapshot(
            model=first.model, optimizer=first.optimizer, scaler=first.scaler, state=first.state,
            config_text=dump(config), average=first.average,
        )  # fmt: skip
        checkpoint.save(config.run.folder, snapshot)
    nn.init.ones_(second.model[0].weight)
    assert checkpoint.resume(config, second) and second.state.step == stop
    second.fit()
    return second
