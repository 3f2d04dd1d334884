"""Pipeline parallelism: a ViT cut into stages, and one micro-batch of the engine through all of them and back.

torch.distributed.pipelining orders the passes and moves activations and their gradients. A stage keeps its modules
under the serial model's names, so optimizer, checkpoint and weight decay see a smaller model of the same kind. Stages
may exchange parts of activations; torch learns their shape from the first part of a batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from largebatch.augment import seed_draws
from largebatch.config.parallel import ParallelConfig
from largebatch.parallel.collectives import all_gather, broadcast
from largebatch.parallel.mesh import Axis, Mesh
from zoo.vit import VisionTransformer

Schedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B

FIRST = ("patch_embed", "cls_token", "reg_token", "pos_embed", "norm_pre")
LAST = ("norm", "attn_pool", "fc_norm", "head")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 6

# -- the cut -----------------------------------------------------------------------------------------------------


def num_stages(config: ParallelConfig) -> int:
    return config.pipeline * (2 if config.schedule == "interleaved" else 1)


def num_parts(config: ParallelConfig) -> int:
    return num_stages(config) if config.micro_batches is None else config.micro_batches


def starts(config: ParallelConfig, depth: int) -> list[int]:
    """First block of every stage of a model of `depth` blocks; ValueError if it cannot be cut this way."""
    stages = num_stages(config)
    if stages > depth:
        raise ValueError(
            f"--parallel.pipeline is {config.pipeline} with schedule {config.schedule}, {stages} stages, and the model "
            f"has {depth} blocks: expected at least one block per stage, so fewer stages or a deeper model."
        )
    if config.cuts is None:
        return [stage * depth // stages for stage in range(stages)]
    bounds = [0, *config.cuts, depth]
    if len(config.cuts) != stages - 1 or any(first >= last for first, last in zip(bounds, bounds[1:])):
        raise ValueError(
            f"--parallel.cuts is {config.cuts}: expected the first block of each of {stages} stages but the first, "
            f"{stages - 1} ascending numbers from 1 to {depth - 1}."
        )
    return bounds[:-1]


def check(config: ParallelConfig, *, depth: int, batch_size: int) -> None:
    """Raise ValueError if a model of `depth` blocks, or a batch of `batch_size` images, does not fit the pipeline."""
    starts(config, depth)
    stages, parts = num_stages(config), num_parts(config)
    if parts < 1 or batch_size % parts:
        raise ValueError(
            f"The pipeline cuts a micro-batch of {batch_size} images into {parts} parts: expected a number of parts "
            "that divides it, so set --parallel.micro_batches or --data.micro_batch_size."
        )
    if config.schedule == "1f1b" and parts < stages:
        raise ValueError(
            f"--parallel.micro_batches is {parts}: schedule 1f1b expects at least as many as its {stages} stages, so "
            "set more, or --parallel.schedule gpipe."
        )
    if config.schedule == "interleaved" and parts % max(1, parts // config.pipeline):
        raise ValueError(
            f"--parallel.micro_batches is {parts}: schedule interleaved expects a multiple of its {config.pipeline} "
            f"ranks, or fewer than twice as many, such as {parts // config.pipeline * config.pipeline}."
        )


def stage_of(name: str, firsts: list[int]) -> int:
    """The stage of a parameter or module of the serial model. firsts: see `starts`."""
    top, _, rest = name.partition(".")
    if top == "blocks":
        number = int(rest.partition(".")[0])
        return sum(first <= number for first in firsts) - 1
    return len(firsts) - 1 if top in LAST else 0


# -- stages -------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """Some blocks of a model: images or activations -> activations or, in the last stage, logits."""

    def __init__(self, model: VisionTransformer, index: int, number: int, blocks: range) -> None:
        super().__init__()
        self.model = model
        self.index = index
        self.blocks = blocks
        self.is_first, self.is_last = index == 0, index == number - 1
        self.precision: tuple[torch.dtype, bool] | None = None  # of autocast; None: keep that of the caller

    def features(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) or activations -> activations, or pooled features of the last stage."""
        model = self.model
        if self.is_first:
            x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
        for number in self.blocks:
            block = model.blocks[number]
            # `checkpoint` recomputes the block with the same random draws.
            x = checkpoint(block, x, use_reentrant=False) if model.grad_checkpointing else block(x)
        return model.forward_head(model.norm(x), pre_logits=True) if self.is_last else x.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Compute `features`, and in the last stage logits, or this rank's part if the head has `own_logits`."""
        dtype, enabled = self.precision or (None, torch.is_autocast_enabled(x.device.type))
        with torch.autocast(x.device.type, dtype=dtype, enabled=enabled):
            x = self.features(x)
            return getattr(self.model.head, "own_logits", self.model.head)(x) if self.is_last else x


def cut(model: VisionTransformer, mesh: Mesh, config: ParallelConfig) -> list[Stage]:
    """Remove the modules of other ranks' stages from the model, in place; return the stages of this rank."""
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"--parallel.pipeline is {config.pipeline}, and {type(model).__name__} is not a ViT, the only kind of "
            "model that can be cut into stages: set 1."
        )
    axis = mesh.axis("pipeline")
    depth = len(model.blocks)
    firsts = starts(config, depth)
    for name in (*FIRST, *LAST, *(f"blocks.{number}" for number in range(depth))):
        if stage_of(name, firsts) % axis.size != axis.index:
            _remove(model, name)
    bounds = [*firsts, depth]
    return [
        Stage(model, index, len(firsts), range(bounds[index], bounds[index + 1]))
        for index in range(axis.index, len(firsts), axis.size)
    ]


def _remove(model: nn.Module, name: str) -> None:
    parent, _, last = name.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, last, nn.Identity() if isinstance(getattr(owner, last), nn.Module) else None)


# -- the pipeline -------------------------------------------------------------------------------------------------


class Pipeline:
    """A model cut into stages, and the passes through them; all ranks of a replica call its methods together."""

    def __init__(
        self, model: VisionTransformer, mesh: Mesh, config: ParallelConfig, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Cut the model in place. loss: (logits, or this rank's part; targets (b, K)) -> sum over b samples."""
        self.config = config
        self.axis = mesh.axis("pipeline")
        self.loss = loss
        self.depth = len(model.blocks)
        self.stages = cut(model, mesh, config)
        self._model = model
        self._weight = 1.0
        self._schedule: tuple[object, Schedule] | None = None

    def log(self) -> str:
        firsts = starts(self.config, self.depth)
        counts = torch.zeros(1, len(firsts), dtype=torch.int64, device=next(self._model.parameters()).device)
        for name, parameter in self._model.named_parameters():
            counts[0, stage_of(name, firsts)] += parameter.numel()
        totals = all_gather(counts, self.axis).sum(dim=0).tolist()
        return "\n".join(
            f"stage {index} on pipeline rank {index % self.axis.size}: {'embedding, ' if index == 0 else ''}blocks "
            f"{first} to {last - 1}{', norm and head' if last == self.depth else ''}, {count:,} parameters a rank"
            for index, (first, last, count) in enumerate(zip(firsts, [*firsts[1:], self.depth], totals))
        )

    def run(self, images: Tensor, targets: Tensor, weight: float) -> Tensor:
        """Add the gradients of weight × sum of the losses of images (B, 3, H, W) and targets (B, K), which every rank
        passes.

        Returns this weighted sum on all stages, 0-d in float64, without a gradient. Random masks follow from the state
        of torch's generator, which must be the same on all stages, and stays the same. ValueError: see `check`.
        """
        check(self.config, depth=self.depth, batch_size=len(images))
        self._weight = weight
        losses: list[Tensor] = []
        with self._own_draws(images.device), self._autocast_in_stages(images.device):
            schedule = self._schedule_for(images, targets)
            inputs = (images,) if self.stages[0].is_first else ()
            target = targets if self.stages[-1].is_last else None
            schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=images.device)
        if losses:
            total += torch.stack(losses).detach().sum()
        return broadcast(total, self.axis, self.axis.size - 1)

    @contextmanager
    def _own_draws(self, device: torch.device) -> Iterator[None]:
        """Let each rank draw its own numbers: all ranks draw the seeds of all from the common generator."""
        seeds = torch.randint(2**62, (self.axis.size,))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed_draws(int(seeds[self.axis.index]), device)
            yield

    @contextmanager
    def _autocast_in_stages(self, device: torch.device) -> Iterator[None]:
        """Apply the caller's autocast to forward passes and losses only: backward passes must not run under it."""
        precision = (torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))
        try:
            for stage in self.stages:
                stage.precision = precision
            with torch.autocast(device.type, enabled=False):
                yield
        finally:
            for stage in self.stages:
                stage.precision = None

    def _weighted_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        dtype, enabled = self.stages[-1].precision or (None, False)
        with torch.autocast(logits.device.type, dtype=dtype, enabled=enabled):
            return self._weight * self.loss(logits, targets)

    def _schedule_for(self, images: Tensor, targets: Tensor) -> Schedule:
        """torch's schedule; a new one when shapes change, because it keeps buffers for its messages."""
        key = (images.shape, images.dtype, targets.shape, self.stages[0].precision)
        if self._schedule is None or self._schedule[0] != key:
            self._schedule = (key, self._new_schedule(images.device))
        return self._schedule[1]

    def _new_schedule(self, device: torch.device) -> Schedule:
        number, parts = num_stages(self.config), num_parts(self.config)
        stages: list[Any] = [
            PipelineStage(stage, stage.index, number, device, group=self.axis.group) for stage in self.stages
        ]
        if self.config.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, parts, self._weighted_loss, scale_grads=False)
        schedule = Schedule1F1B if self.config.schedule == "1f1b" else ScheduleGPipe
        return schedule(stages[0], parts, self._weighted_loss, scale_grads=False)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Compute the whole logits (B, K) of images (B, 3, H, W) on all stages, without a gradient.

        B may be any number, and the head may be cut. Images go through in parts, so that stages work at the same time.
        """
        found = []
        for x in images.chunk(num_parts(self.config)):
            for stage in self.stages:
                if not stage.is_first:
                    x = _receive(self.axis, (stage.index - 1) % self.axis.size, images.device)
                x = stage.features(x)
                if stage.is_last:
                    found.append(self._model.head(x))
                else:
                    _send(x, self.axis, (stage.index + 1) % self.axis.size)
        logits = torch.cat(found) if found else None
        shape = _header(logits) if logits is not None else torch.zeros(MAX_DIMS + 2, dtype=torch.int64)
        last = self.axis.size - 1
        empty = _empty(broadcast(shape.to(images.device), self.axis, last), images.device)
        return broadcast(empty if logits is None else logits, self.axis, last)


# -- activations of any shape -------------------------------------------------------------------------------------


def _header(tensor: Tensor) -> Tensor:
    """Encode dtype, number of dimensions and shape for `_empty`."""
    return torch.tensor([DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *[0] * (MAX_DIMS - tensor.ndim)])


def _empty(header: Tensor, device: torch.device) -> Tensor:
    dtype, ndim, *sizes = header.tolist()
    return torch.empty(sizes[:ndim], dtype=DTYPES[dtype], device=device)


def _send(tensor: Tensor, axis: Axis, target: int) -> None:
    dist.send(_header(tensor).to(tensor.device), group=axis.group, group_dst=target)
    dist.send(tensor.contiguous(), group=axis.group, group_dst=target)


def _receive(axis: Axis, source: int, device: torch.device) -> Tensor:
    header = torch.empty(MAX_DIMS + 2, dtype=torch.int64, device=device)
    dist.recv(header, group=axis.group, group_src=source)
    tensor = _empty(header, device)
    dist.recv(tensor, group=axis.group, group_src=source)
    return tensor
