"""The replica of a run: its model, objective and optimizer on this rank."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch import checkpoint, optim
from largebatch.compiling import compile_model
from largebatch.config import TrainConfig
from largebatch.losses import Objective, TokenLabeling, binary_classification, classification
from largebatch.native.attention import choose_attention, describe_attention
from largebatch.optim import can_compile
from largebatch.precision import DTYPES
from largebatch.ranks import Ranks
from largebatch.replica import Replica
from largebatch.schedules import scale_lr
from zoo import create_model, hub
from zoo.weights import Gone, OtherModel

logger = logging.getLogger(__name__)


def build_replica(
    config: TrainConfig, comm: Ranks, device: torch.device, *, passes: int, names: Sequence[str] = ()
) -> Replica:
    """Build this rank's model, cut if ranks share it, and its optimizer, wrapped and without a state.

    names: of the classes. By them a fine-tuning knows whether the head of its first weights fits.
    """
    o = config.optim
    updates = torch.device("cpu") if config.parallel.zero == "offload" else device
    impl = lamb_impl(comm, updates) if o.name in ("lamb", "muon_lamb") or o.second_moment_half_life else None
    make_optimizer = partial(build_optimizer, config, impl=impl)
    if divides(config):
        from largebatch.parallel.mesh import start_torch_distributed  # imported only by runs that need it

        start_torch_distributed(comm, device)
    model = build_first_model(config, device, comm, names)
    with comm.together("building"):
        log_attention(config, model, device, comm)
    # The ranks of a replica talk to each other while they divide the model, so a failure there happens on all of them.
    with comm.together("dividing"):
        replica = divide(config, model, make_optimizer, limit_s=comm.stall_limit_s)
    with comm.together("building"):
        model.to(device)
        objective = build_objective(config, model)
    if config.run.compile:
        compile_model(config, model, objective, device, comm)
    with comm.together("building"):
        optimizer = replica.adapt_optimizer(make_optimizer(model))
        optimizer = comm.wrap(optimizer, model, passes=passes, compression=config.run.compression, watch=False)
    with comm.together("dividing"):
        replica.attach(model, optimizer, comm)
    comm.broadcast_model(model)  # before an average, or the optimizer's state, begins with a copy of the weights
    return replica


def lamb_impl(comm: Ranks, device: torch.device) -> str:
    """Choose how LAMB runs: compiled if all ranks can, as the two ways differ in the last bits of a weight."""
    able = comm.allgather_object(can_compile(device.type), name="build/can_compile")
    if not all(able) and comm.rank == 0:
        logger.warning("no compiler on rank %d: LAMB runs eagerly, which is slower", able.index(False))
    return "compile" if all(able) else "eager"


def build_model(
    config: TrainConfig, device: torch.device, *, weights: str | None, names: Sequence[str] = ()
) -> nn.Module:
    """Build the model for `device`, from a weights file or the run's seed.

    It is still in host memory: before it is cut, a model that ranks share may be too large for a device.
    """
    torch.manual_seed(config.run.seed)
    given = {"weights": weights, "label_names": names if len(names) == config.model.num_classes else ()}
    try:
        model = create_model(**config.model.arguments() | given)
    except ValueError as error:
        if not config.model.weights or isinstance(error, Gone):
            raise
        other = "; for weights of another model of timm give --model timm/NAME" * isinstance(error, OtherModel)
        raise ValueError(f"--init-from is {config.model.weights}: {error}{other}.") from error
    return choose_attention(model, device)


def build_first_model(
    config: TrainConfig, device: torch.device, comm: Ranks, names: Sequence[str] = ()
) -> nn.Module:
    """Build the model with its first weights; look again if another run has removed them meanwhile."""
    place, weights, prepared = config.model.weights, None, dict[str, Any]()

    def find() -> tuple[str, dict[str, Any]]:  # on rank 0, because a run may add files while ranks look
        file = str(checkpoint.find_weights(place)[0])
        return file, hub.preparation(file, config.model.img_size)

    while True:
        before, model = weights, None
        if place:
            weights, prepared = comm.from_rank_0(find, phase="looking for weights")
        with comm.together("building"):
            try:
                model = build_model(config, device, weights=weights, names=names)
            except Gone:
                if weights == before:
                    raise
        if all(comm.allgather_object(model is not None, name="build/model")):
            assert model is not None
            cast(Any, model).default_cfg.update(prepared)
            return model


def log_attention(config: TrainConfig, model: nn.Module, device: torch.device, comm: Ranks) -> None:
    """Log the code that computes the attention of a whole model."""
    if comm.rank or config.parallel.shape().size > 1:
        return
    side, dtype = config.model.img_size, DTYPES[config.run.precision]
    if text := describe_attention(model, (config.data.micro_batch_size, 3, side, side), device, dtype):
        logger.info("attention: %s", text)


def build_optimizer(config: TrainConfig, model: nn.Module, impl: str | None) -> Optimizer:
    """Build the optimizer for a whole model. impl: see `lamb_impl`."""
    o = config.optim
    return optim.build_optimizer(
        model,
        name="muon" if o.name == "muon_lamb" else o.name,
        lr=peak_lr(config),
        weight_decay=o.weight_decay,
        layer_decay=o.layer_decay,
        betas=o.betas,
        eps=o.eps,
        preset=o.preset,
        impl=impl,
        rest="lamb" if o.name == "muon_lamb" else None,
        split_qkv=o.split_qkv or None,
    )


def build_sam(config: TrainConfig, optimizer: Optimizer) -> optim.LookSam | None:
    """Build Look-LayerSAM, if the run has it. Its state is added to that of the optimizer."""
    o = config.optim
    if o.sam_rho is None:
        return None
    sam = optim.LookSam(rho=o.sam_rho)
    sam.begin(optimizer)
    return sam


def divides(config: TrainConfig) -> bool:
    """Return whether ranks share a model, or its optimizer's state."""
    return config.parallel.shape().size > 1 or bool(config.parallel.zero)


def divide(
    config: TrainConfig, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], *, limit_s: float
) -> Replica:
    """Return the replica of this rank; cut the model in place if ranks share it."""
    if not divides(config):
        return Replica()
    from largebatch.parallel.replica import ParallelReplica

    return ParallelReplica(
        config.parallel,
        model,
        batch_size=config.data.micro_batch_size,
        precision=config.run.precision,
        make_optimizer=make_optimizer,
        limit_s=limit_s,
    )


def build_objective(config: TrainConfig, model: nn.Module) -> Objective:
    """Build the loss; ValueError if the model has no token logits for it."""
    loss = config.loss
    if not loss.dense_weight:
        return binary_classification if loss.name == "bce" else classification
    if not hasattr(model, "forward_train"):
        raise ValueError(
            f"--loss.dense_weight is {loss.dense_weight}: {config.model.name} has no token logits in training, "
            "expected a model that has them, such as volo_d1, or 0."
        )
    return TokenLabeling(dense_weight=loss.dense_weight)


def peak_lr(config: TrainConfig) -> float:
    batch_size = config.data.global_batch_size
    reference = config.schedule.reference_batch_size or batch_size
    return scale_lr(
        config.optim.lr, batch_size=batch_size, reference_batch_size=reference, rule=config.schedule.scaling
    )


def batch_scaling(config: TrainConfig) -> Callable[[int], float]:
    """Return the factor of `peak_lr` for the global batch of a phase, 1 for that of the config."""
    whole, rule = config.data.global_batch_size, config.schedule.scaling
    return lambda size: scale_lr(1.0, batch_size=size, reference_batch_size=whole, rule=rule)
