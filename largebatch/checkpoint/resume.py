"""Bring a run to a checkpoint, unless that was made with other options."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch import config as configs
from largebatch.bit_sums import digest
from largebatch.checkpoint.snapshot import STATE, sums_of
from largebatch.checkpoint.store import latest, read_state, recorded_sums
from largebatch.config import TrainConfig
from largebatch.engine import Trainer, TrainState
from zoo import load_weights, named_weights
from zoo.hub import AVERAGE, WEIGHTS

logger = logging.getLogger(__name__)

MAY_DIFFER = {  # options that do not change the numbers of a run that goes on
    "run.max_steps",
    "run.end_time",
    "run.profile_steps",
    "run.folder",
    "run.eval_every",
    "run.check_replicas",
    "run.recompute",
    "run.on_divergence",  # what it did is part of the state
    "run.device",
    "run.ranks",
    "model.weights",  # a checkpoint has the weights
    "model.grad_checkpointing",
    "data.num_threads",
    "data.cache",
    "data.quarantine",  # the images are compared by their digest
    "data.allow_incomplete",
    "data.eval_batch_size",
}
MAY_DIFFER_SECTIONS = ("horovod.", "log.", "checkpoint.", "parallel.")  # the last changes masks: `check_config` warns


def resume(config: TrainConfig, trainer: Trainer, *, last_step: int | None = None) -> bool:
    """Bring `trainer` to the newest valid checkpoint of its run, up to `last_step`; return whether there is one.

    Every rank calls it, with the optimizer's state created (`optim.init_state`); rank 0 reads. Raises Stopped, on every
    rank, if the checkpoint was made with other options.
    """
    comm = trainer.comm
    model, optimizer = trainer.replica.empty_whole()
    found: dict[str, Any] | None = None
    with comm.together("resume"):
        path = latest(config.folder, last_step=last_step) if comm.rank == 0 else None
        if path is not None:
            parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "average": trainer.average}
            state = load(path, **parts, scaler=trainer.scaler, config=config, images=trainer.state.data)
            found = {"path": str(path), "state": asdict(state), "scaler": trainer.scaler.state_dict()}
    found = comm.broadcast_object(found, name="resume/found")
    if found is None:
        return False
    present = trainer.state.data
    trainer.state, trainer.losses = TrainState(**found["state"]), None
    if trainer.state.data != present and comm.rank == 0:
        logger.warning(
            "the training images are not those of %s any more, and %d now: epochs are drawn from these, so the present "
            "one has some images twice and misses others",
            found["path"],
            trainer.plan.num_samples,
        )
    trainer.state.data = present
    trainer.change_phases(trainer.state.phases)  # those of the saved run, not those that the present images give
    trainer.scaler.load_state_dict(found["scaler"])
    trainer.replica.scatter_whole(model, optimizer)
    if trainer.average is not None:
        comm.broadcast_model(trainer.average)
    if comm.rank == 0:
        logger.info("resumed at step %d from %s", trainer.state.step, found["path"])
    return True


def load(
    path: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    config: TrainConfig | None = None,
    average: nn.Module | None = None,
    images: str = "",
) -> TrainState:
    """Load a checkpoint that `latest` found; return the state it was saved with.

    images: the digest of the present training images; another data.path is refused only if they differ. Raises
    ValueError, and loads nothing, if `config` differs in options that change the numbers.
    """
    content = read_state(path)
    if config is not None:
        check_config(content["config"], config, path=path, same_images=content["state"].get("data") == images)
    check_optimizer(content["optimizer"], optimizer, path=path)
    sums = recorded_sums(path)
    check_loaded(path, STATE, content, sums)
    for name, target in {WEIGHTS: model, AVERAGE: average}.items():
        if target is not None:
            load_weights(target, path / name)
            check_loaded(path, name, named_weights(target), sums)
    for own, saved in zip(optimizer.param_groups, content["optimizer"]["param_groups"]):
        if "capturable" in own:  # whether the counters are on a GPU
            saved["capturable"] = own["capturable"]
    optimizer.load_state_dict(content["optimizer"])
    scaler.load_state_dict(content["scaler"])
    return TrainState(**content["state"])


def check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer, *, path: Path) -> None:
    """Raise ValueError if a checkpoint's state lacks moments, or has those of another optimizer.

    A hook may have changed the options of a group, so these are not compared.
    """
    if mistake := next(_differences(saved, optimizer.state_dict()), None):
        raise ValueError(
            f"The optimizer's state in {path / STATE} is not that of this run: {mistake}. Remove {path}, or choose "
            "another --run.folder."
        )


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    for number, group in enumerate(saved["param_groups"]):
        betas = group.get("betas", (0.0,))
        if not isinstance(betas, (tuple, list)) or not all(isinstance(b, (int, float)) and 0 <= b < 1 for b in betas):
            yield f"group {number} has betas {betas}, expected numbers in [0, 1)"
    for number, state in own["state"].items():
        for name in sorted(state.keys() - {"step"}):
            moment, shape = saved["state"].get(number, {}).get(name), tuple(state[name].shape)
            if not isinstance(moment, torch.Tensor):
                yield f"it has no {name} of parameter {number}"
            elif moment.shape != shape:
                yield f"{name} of parameter {number} has shape {tuple(moment.shape)}, expected {shape}"


def check_loaded(path: Path, name: str, content: Mapping[str, Any], sums: dict[str, str]) -> None:
    """Raise ValueError if the tensors loaded from a file are not those of `sums`, which old checkpoints lack."""
    if name in sums and digest(sums_of(content)) != sums[name]:
        raise ValueError(
            f"What was loaded from {path / name} is not what was saved: a bit has flipped on the way from the disk; "
            "give the same command again, on another host if it repeats."
        )


def check_config(text: str, config: TrainConfig, *, path: Path, same_images: bool = False) -> None:
    """Raise ValueError, with options and both values, if a checkpoint's YAML `text` is another run than `config`."""
    try:
        saved = configs.load_text(text, place="state.pt")
    except ValueError as error:
        raise ValueError(f"The config in checkpoint {path} is of another version: {error}") from None
    if differing := describe_differences(saved, config, same_images=same_images):
        raise ValueError(
            f"Checkpoint {path} was made with {differing}: give the options it was made with to continue "
            f"that run, or another --run.folder to start a new one, with --init-from {quote(str(path.parent.parent))} "
            "from its weights."
        )
    was, now = (str(one.parallel.shape()) or "whole" for one in (saved, config))
    if was != now and (rates := ", ".join(configs.dropping(config))):
        logger.warning("%s: the model was %s and is now %s, so the run may go on with other masks", rates, was, now)


def describe_differences(saved: TrainConfig, config: TrainConfig, *, same_images: bool) -> str:
    """Return the options that make another run, with both values; "" if there are none."""
    return "; ".join(
        f"--{option} {quote(str(was))}, now {quote(str(now))}"
        for option, (was, now) in configs.differences(saved, config).items()
        if not may_differ(option, config) and not (option == "data.path" and same_images)
    )


def may_differ(option: str, config: TrainConfig) -> bool:
    """Return whether another value of an option leaves the numbers of a run as they are."""
    if option == "log.every" and configs.ramp.by_noise(config):  # the batch is decided at rows
        return False
    return option in MAY_DIFFER or option.startswith(MAY_DIFFER_SECTIONS)
