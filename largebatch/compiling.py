"""Compile the passes of a model before the first step, or go on without a compiler, on all ranks alike.

A missing compiler would end a job in its first step. So each rank first runs one pass of a compiled copy of the model;
the first step finds its graphs ready.
"""

import copy
import logging
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from largebatch.augment import Augmented
from largebatch.batch_norm import BatchNormStatistics
from largebatch.config import TrainConfig
from largebatch.losses import Objective
from largebatch.optim import can_compile
from largebatch.precision import autocast
from largebatch.ranks import Ranks
from zoo.blocks import blocks_of, compile_blocks

logger = logging.getLogger(__name__)


def compile_model(
    config: TrainConfig, model: nn.Module, objective: Objective, device: torch.device, comm: Ranks
) -> None:
    """Let torch compile the passes as --run.compile says; names and state_dict stay. Every rank calls it.

    If one rank cannot compile, rank 0 warns, and all compute without a compiler. A compiled backward pass, of the model
    or of each block, hands out its gradients at its end, and only then Horovod's hooks run.
    """
    wanted = config.run.compile
    given = f"--run.compile {str(wanted).lower()}"
    if wanted == "blocks" and not blocks_of(model):
        if comm.rank == 0:
            logger.warning("%s is not used: only a ViT or a VOLO has blocks that it can compile", given)
        return
    change = compile_blocks if wanted == "blocks" else compile_passes
    comm.progress("compiling")
    cause = first_cause(comm, lacks_compiler(device), name="build/compiler")
    if not cause:  # only now, because to compile takes minutes
        failed = why_not(config, model, objective, device, comm, change)
        cause = first_cause(comm, failed, name="build/compile")
    if cause:
        if comm.rank == 0:
            logger.warning("%s is not used: %s; all ranks compute without it", given, cause)
        return
    change(model)
    if change is compile_passes and comm.size > 1:
        logger.info("compiled: gradients are reduced after the backward pass, no longer during it")


def compile_passes(model: nn.Module, **options: Any) -> None:
    model.compile(**options)
    if hasattr(model, "forward_train"):  # the objective calls it by name, so model.compile() does not reach it
        setattr(model, "forward_train", torch.compile(getattr(model, "forward_train"), **options))


# -- the trial -------------------------------------------------------------------------------------------------------


def lacks_compiler(device: torch.device) -> str:
    """Return what this rank lacks to compile for the device, as the end of a sentence; "" if it lacks nothing."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if can_compile(device.type) and (device.type != "cpu" or header.exists()):
        return ""
    on_cpu, on_gpu = f"a C++ compiler (g++, or CXX) and {header}", "Triton and a GPU that it supports"
    return f"has no compiler for {device.type}: expected {on_cpu if device.type == 'cpu' else on_gpu}"


def why_not(
    config: TrainConfig,
    model: nn.Module,
    objective: Objective,
    device: torch.device,
    comm: Ranks,
    change: Callable[[nn.Module], object],
) -> str:
    """Return why this rank cannot compute both passes of a changed copy of the model; "" if it can."""
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            trial = copy.deepcopy(model).train()
            change(trial)
            with BatchNormStatistics(trial, comm).over_steps():  # takes batch norm out of the graphs
                with autocast(device, config.run.precision):
                    loss = objective(trial, micro_batch(config, trial, device))
                loss.backward()
    except Exception as error:  # of torch, of the compiler that it calls, of the driver; a lack of memory
        return f"cannot compute a compiled pass ({first_line(error)})"
    return ""


def first_cause(comm: Ranks, cause: str, *, name: str) -> str:
    """Return the first rank with a cause, and its cause; "" if none has one. All ranks call it."""
    causes = comm.allgather_object(cause, name=name)
    return next((f"rank {rank} {cause}" for rank, cause in enumerate(causes) if cause), "")


def micro_batch(config: TrainConfig, model: nn.Module, device: torch.device) -> Augmented:
    """Return a micro-batch of zeros in the shapes of training."""
    count, side = config.data.micro_batch_size, config.model.img_size
    images = torch.zeros(count, 3, side, side, device=device)
    targets = torch.zeros(count, getattr(model, "num_classes"), device=device)
    return Augmented(images, targets, mix_box=(0, 0, 1, 1) if config.mixes_tokens else None)


def first_line(error: BaseException) -> str:
    """Return the type and the first line of the innermost error: torch wraps errors of a compiler."""
    while inner := getattr(error, "inner_exception", None) or error.__cause__:
        error = inner
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
