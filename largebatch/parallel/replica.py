"""One copy of the model, divided among ranks, behind the methods of `Replica`.

Every rank builds the whole model from the seed in host memory, cuts it and keeps its part, under the names of the
serial model. A checkpoint is that of a whole model: rank 0 puts the parts together, tensor by tensor, as one rank would
have them, and divides what it reads in the same way.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.augment import Augmented
from largebatch.config.parallel import ParallelConfig
from largebatch.losses import Objective, TokenLabeling
from largebatch.optim import Lamb
from largebatch.parallel import pipeline, sequence, vit, volo
from largebatch.parallel.collectives import gather_objects
from largebatch.parallel.cuts import UNCUT, Cut, cuts_of, local, sum_partial_gradients
from largebatch.parallel.loss import classification, cross_entropy
from largebatch.parallel.mesh import Mesh, block
from largebatch.parallel.pipeline import Pipeline
from largebatch.parallel.sharded_lamb import ShardedLamb, global_norm
from largebatch.parallel.state_sharding import Sharding, state_bytes
from largebatch.parallel.tensor import layouts, num_blocks
from largebatch.precision import autocast
from largebatch.ranks import Ranks
from largebatch.ranks.reduction import Reduced
from largebatch.replica import ForwardBackward, Replica
from zoo.vit import VisionTransformer
from zoo.volo import VOLO


@dataclass(frozen=True)
class Holder:
    """A rank of the replica with a part of a tensor that no rank before it has."""

    index: int  # on axis "model"
    place: dict[str, int]
    cut: Cut


class ParallelReplica(Replica):
    def __init__(
        self,
        config: ParallelConfig,
        model: Any,
        *,
        batch_size: int,
        precision: str,
        make_optimizer: Callable[[nn.Module], Optimizer],
        limit_s: float = 0,
    ) -> None:
        """Cut `model`, a whole module, the same on every rank, in place. torch.distributed has been started.

        batch_size: images of a micro-batch. make_optimizer: makes the optimizer of a whole model. limit_s: see `Mesh`.
        Raises ValueError, on all ranks, for a model or a batch that cannot be cut so.
        """
        self.config, self.precision, self.make_optimizer = config, precision, make_optimizer
        shape = config.shape()
        check(config, model, batch_size=batch_size)
        self.model = model
        self.mesh = Mesh(shape, limit_s=limit_s)
        self.serial = _without_memory(model)
        self.cuts_tensors = num_blocks(shape, shape.tensor) > 1
        self.is_vit = isinstance(model, VisionTransformer)
        if self.cuts_tensors:
            (vit if self.is_vit else volo).parallelize(model, self.mesh)
        if config.sequence > 1:
            sequence.parallelize(model, self.mesh)
        loss = functools.partial(cross_entropy, mesh=self.mesh)
        self.pipeline = Pipeline(model, self.mesh, config, loss) if config.pipeline > 1 else None
        self.multiple = multiple_of(config)
        self.cuts = cuts_of(model)
        self.holders = self._find_holders(model)
        self.sharding: Sharding | None = None
        self.objective: Objective | None = None

    def adapt_optimizer(self, serial: Optimizer) -> Optimizer:
        return ShardedLamb(serial.param_groups) if isinstance(serial, Lamb) else serial

    def adapt_objective(self, serial: Objective) -> Objective:
        self.objective = serial
        if self.cuts_tensors and isinstance(serial, TokenLabeling):
            self.objective = volo.token_labeling(self.mesh, dense_weight=serial.dense_weight)
        elif self.cuts_tensors and self.is_vit:
            self.objective = classification(self.mesh)
        return self.objective

    def check_objective(self, objective: Objective) -> None:
        if objective is not self.objective and (self.pipeline or self.cuts_tensors):
            raise ValueError(
                "trainer.objective was set, and --parallel.pipeline and --parallel.tensor train with a loss of their "
                "own: leave one of the two out."
            )

    def attach(self, model: nn.Module, optimizer: Reduced, comm: Ranks) -> None:
        super().attach(model, optimizer, comm)
        self._device = next(model.parameters()).device
        zero, offload = bool(self.config.zero), self.config.zero == "offload"
        self.sharding = Sharding(dict(model.named_parameters()), self.cuts, self.mesh, zero=zero, offload=offload)
        if isinstance(optimizer, ShardedLamb):
            optimizer.sharding = self.sharding

    def describe(self) -> list[str]:
        stages = self.pipeline.log().splitlines() if self.pipeline else []
        return [*stages, f"the optimizer's state on rank 0: {state_bytes(self.optimizer) / 2**20:.1f} MiB"]

    # -- one step ----------------------------------------------------------------------------------------------

    def run_pass(self, batch: Augmented, weight: float, forward_backward: ForwardBackward) -> Tensor:
        """Fill a batch too short for the mesh up with images without a target, so without a loss, and run it."""
        images, targets = (vit.filled(tensor, self.multiple) for tensor in (batch.images, batch.targets))
        batch = batch._replace(images=images, targets=targets)
        if self.pipeline is None:
            return forward_backward(batch, weight)
        with autocast(batch.images.device, self.precision):
            return self.pipeline.run(batch.images, batch.targets, weight)

    def complete_gradients(self) -> None:
        sum_partial_gradients(self.model, self.cuts, self.mesh)

    def gradient_norm(self) -> Tensor:
        assert self.sharding is not None
        return global_norm(self.optimizer, self.sharding)

    def predictor(self, model: nn.Module) -> nn.Module:
        predict = self.pipeline.predict if self.pipeline else model
        return vit.Predictor(model, predict, multiple=self.multiple)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def gather_whole(self) -> tuple[nn.Module, Optimizer]:
        """Return, on rank 0, the whole model and optimizer in host memory; elsewhere this rank's own."""
        own, axis = dict(self.model.state_dict(keep_vars=True)), self.mesh.axis("model")
        described = gather_objects(_describe(self.model, self.optimizer), axis)
        states = {name: state for of_rank in described for name, state in of_rank.items()}
        model, optimizer = self.empty_whole()
        leads = self.comm.rank == 0
        parameters = dict(model.named_parameters())
        for name, meta in self.serial.state_dict().items():
            self._gather(name, own.get(name), model.state_dict()[name] if leads else meta)
            state = _state_of(self.optimizer, own[name]) if name in own and name in states else {}
            for key, value in states.get(name, {}).items():
                whole = torch.empty(meta.shape, dtype=meta.dtype) if leads else meta
                if value is MOMENT:
                    self._gather(name, state.get(key), whole)
                if leads:
                    optimizer.state[parameters[name]][key] = whole if value is MOMENT else value
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return model, optimizer

    def empty_whole(self) -> tuple[nn.Module, Optimizer]:
        """Return, on rank 0, an empty whole model and optimizer in host memory; elsewhere this rank's own."""
        if self.comm.rank > 0:
            return self.model, self.optimizer
        model = copy.deepcopy(self.serial).to_empty(device="cpu")
        return model, self.make_optimizer(model)

    def scatter_whole(self, model: nn.Module, optimizer: Optimizer) -> None:
        own, leads = dict(self.model.state_dict(keep_vars=True)), self.comm.rank == 0
        states = self.comm.broadcast_object(_describe(model, optimizer) if leads else None, name="replica/states")
        tensors, parameters = model.state_dict(), dict(model.named_parameters())
        for name, meta in self.serial.state_dict().items():
            part = self._scatter(name, tensors[name] if leads else None, meta, own.get(name))
            state = dict(states.get(name, {}))
            for key, value in state.items():
                if value is MOMENT:
                    moment = optimizer.state[parameters[name]][key] if leads else None
                    state[key] = self._scatter(name, moment, meta, own.get(name))
            if part is not None:
                own[name].detach().copy_(part)
            if part is not None and state:
                _set_state_of(self.optimizer, own[name], state)

    def _find_holders(self, model: nn.Module) -> dict[str, list[Holder]]:
        """Find, for each tensor of the whole model, the ranks that hold its parts, each part once."""
        axis, sizes = self.mesh.axis("model"), self.mesh.shape.sizes
        tables = gather_objects({name: self.cuts.get(name, UNCUT) for name in model.state_dict()}, axis)
        holders: dict[str, dict[Any, Holder]] = {}
        for index, (place, table) in enumerate(zip(self.mesh.places(), tables)):
            for name, cut in table.items():
                part = tuple(block(sizes, place, axes) for axes in cut.dims.values())
                holders.setdefault(name, {}).setdefault(part, Holder(index, place, cut))
        return {name: list(parts.values()) for name, parts in holders.items()}

    def _gather(self, name: str, mine: Tensor | None, whole: Tensor) -> None:
        """Write into `whole`, on rank 0, the parts of a tensor; the ranks of its replica take part."""
        axis = self.mesh.axis("model")
        for holder in self.holders[name] if self.mesh.place["data"] == 0 else ():
            if axis.index == holder.index != 0:
                assert mine is not None
                dist.send(mine.detach().to(self._device).contiguous(), group_dst=0, group=axis.group)
            if axis.index == 0:
                view = holder.cut.slice_(whole, self.mesh.shape.sizes, holder.place)
                if holder.index == 0:
                    assert mine is not None
                    part = mine.detach()
                else:
                    part = torch.empty(view.shape, dtype=whole.dtype, device=self._device)
                    dist.recv(part, group_src=holder.index, group=axis.group)
                view.copy_(part.reshape(view.shape))

    def _scatter(self, name: str, whole: Tensor | None, meta: Tensor, own: Tensor | None) -> Tensor | None:
        """Return this rank's part of a whole tensor, which rank 0 has, in the shape of `own`; None without `own`."""
        whole = torch.empty(meta.shape, dtype=meta.dtype) if whole is None else whole.detach().contiguous()
        dist.broadcast(whole, 0)
        return None if own is None else local(whole, self.cuts.get(name, UNCUT), self.mesh).view_as(own).to(own.device)


def check(config: ParallelConfig, model: Any, *, batch_size: int) -> None:
    shape = config.shape()
    if shape.size == 1:
        return
    if isinstance(model, VOLO):
        if config.pipeline * config.sequence > 1:
            raise ValueError(f"--parallel is {shape}, and VOLO is cut over tensor axes alone: set --parallel.tensor.")
        volo.check(model, shape)
        return
    if num_blocks(shape, shape.tensor) > 1:
        vit.check(vit.Dimensions.of(model), shape, batch_size)
    if config.sequence > 1:
        sequence.check(model, config.sequence)
    if config.pipeline > 1:
        pipeline.check(config, depth=len(model.blocks), batch_size=batch_size)
    if batch_size % multiple_of(config):
        raise ValueError(
            f"--data.micro_batch_size is {batch_size}, and {pipeline.num_parts(config)} parts for the pipeline, each "
            f"cut by {shape}, expect a multiple of {multiple_of(config)}."
        )


def multiple_of(config: ParallelConfig) -> int:
    """Return the number that divides every micro-batch: parts for the pipeline, each cut for the mesh."""
    shape = config.shape()
    return pipeline.num_parts(config) * num_blocks(shape, layouts(shape)[0].batch)


def _without_memory(model: nn.Module) -> nn.Module:
    """Copy a module to device "meta", without a second copy of its tensors on the way."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(model, memo)


class _Moment:
    """Stands for a tensor of the parameter's shape in a result of `_describe`; pickling keeps it one object."""

    def __reduce__(self) -> str:
        return "MOMENT"


MOMENT = _Moment()


def _describe(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return every parameter's state by its name: scalars unchanged, `MOMENT` for tensors of the parameter's shape."""
    found = {}
    for name, parameter in model.named_parameters():
        state = dict(optimizer.state.get(parameter, {}))
        if isinstance(optimizer, ShardedLamb) and state:
            state = {"step": state["step"], "exp_avg": MOMENT, "exp_avg_sq": MOMENT}
        found[name] = {key: _described(value) for key, value in state.items()}
    return {name: state for name, state in found.items() if state}


def _described(value: Any) -> Any:
    if not torch.is_tensor(value):
        return value
    return MOMENT if value.ndim else value.cpu()  # a step counter, which other ranks keep on GPUs of their own


def _state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    return optimizer.state_of(parameter) if isinstance(optimizer, ShardedLamb) else optimizer.state[parameter]


def _set_state_of(optimizer: Optimizer, parameter: Tensor, state: dict[str, Any]) -> None:
    if isinstance(optimizer, ShardedLamb):
        optimizer.set_state_of(parameter, state)
    else:
        present = optimizer.state[parameter]  # a step counter is on the GPU with some optimizers, and not with others
        for key, value in state.items():
            here = present.get(key, value)
            present[key] = value.to(here.device) if torch.is_tensor(value) else value
