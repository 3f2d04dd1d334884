"""One trial: the run that `largebatch.train` would make of its config on one rank, with images from memory."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from largebatch.assembly import build_replica, check_model, count_passes, put_together
from largebatch.config import TrainConfig, dump, duration_images
from largebatch.data.order import Plan
from largebatch.data.sources import open_source
from largebatch.engine import Hook, StepOutput, Trainer, TrainState
from largebatch.files import atomic_file
from largebatch.hooks.noise_scale import NoiseScale, estimates
from largebatch.ranks import Stopped
from largebatch.ranks.single import Single
from largebatch.reproduce.images import Pixels, Preparation, evaluation_batches, training_batches
from largebatch.reproduce.results import Result, Split


class Record(Hook):
    """Keeps the evaluations of a trial, and the estimates of its noise scale; ends it at a gradient that is not finite,
    or if asked to. With `file`, each evaluation leaves the state there, and a trial goes on from it."""

    def __init__(self, given_up: Callable[[], bool], file: Path | None = None, config_text: str = "") -> None:
        self.given_up, self.file, self.config_text = given_up, file, config_text
        self.began, self.seconds_before = time.perf_counter(), 0.0
        self.noise = NoiseScale(every_images=1)  # a hook of the same trainer
        self.estimates: list[tuple[float, float]] = []  # of the steps that can be measured
        self.rows: list[dict[str, float]] = []
        self.diverged = False

    def at_point(self, trainer: Trainer) -> None:
        if self.given_up():
            trainer.stop_reason = "the experiment has ended"

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        square, measured = self.noise.measured(trainer).tolist()
        if not output.applied:
            self.diverged, trainer.stop_reason = True, "the gradient is not finite"
        elif measured:
            sizes = {"small": trainer.plan.micro_batch_size, "large": output.images}
            self.estimates.append(estimates(square, float(output.grad_norm) ** 2, **sizes))

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.rows.append({"step": trainer.state.step, **metrics})

    def after_step(self, trainer: Trainer) -> None:
        if not self.file or not self.rows or self.rows[-1]["step"] != trainer.state.step:
            return
        parts: dict[str, Any] = {"model": trainer.model, "optimizer": trainer.optimizer, "scaler": trainer.scaler}
        content = {name: part.state_dict() for name, part in parts.items()} | {"state": asdict(trainer.state)}
        content |= {"rows": self.rows, "estimates": self.estimates, "seconds": self.seconds()}
        with atomic_file(self.file) as file:
            torch.save(content | {"config": self.config_text}, file)

    def resume(self, trainer: Trainer) -> None:
        if not self.file or not self.file.is_file():
            return
        try:
            content = torch.load(self.file, weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError):  # it is damaged
            return
        if content["config"] != self.config_text:
            return
        trainer.model.load_state_dict(content["model"])
        trainer.optimizer.load_state_dict(content["optimizer"])
        trainer.scaler.load_state_dict(content["scaler"])
        trainer.state, self.seconds_before = TrainState(**content["state"]), content["seconds"]
        self.rows, self.estimates = content["rows"], content["estimates"]

    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def noise_scales(self) -> list[float]:
        """Return the noise scale of each quarter of the trial, from means; nan where the gradient is lost in noise."""
        sums = [np.sum(part, axis=0) for part in np.array_split(np.reshape(self.estimates, (-1, 2)), 4)]
        return [float(noise / signal) if signal > 0 < noise else math.nan for signal, noise in sums]


@functools.lru_cache(maxsize=1)
def images(path: str, border: int) -> tuple[Pixels, Pixels]:
    train, held_out = (open_source(path, split=split).for_classes(10) for split in ("train", "validation"))
    return Pixels(train, border), Pixels(held_out, border)


@functools.lru_cache(maxsize=1)
def images_of_search(path: str, border: int, split: Split) -> tuple[Pixels, Pixels]:
    """Return the training images of a search, and those by which it is scored."""
    train, _ = images(path, border)
    scored = split(train.labels.numpy())
    return train.subset(np.flatnonzero(~scored)), train.subset(np.flatnonzero(scored))


def run(
    config: TrainConfig,
    *,
    split: Split | None,
    file: Path | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> Result | None:
    """Train on one thread; return None if `given_up` says that nobody waits. ValueError if the config does not fit.

    split: that of a search; None: train on all training images, and evaluate on the held-out ones. file: of the state,
    with which the trial goes on later.
    """
    threads, comm = torch.get_num_threads(), Single()
    record = Record(given_up, file, dump(config))
    torch.set_num_threads(1)
    try:
        trainer = build(config, comm, split=split, hooks=[record.noise, record])
        record.resume(trainer)
        trainer.fit()
    except Stopped as error:
        raise ValueError(str(error)) from error
    finally:
        torch.set_num_threads(threads)
    if trainer.stop_reason and not record.diverged:
        return None
    losses, train_losses, accuracies = ([row[key] for row in record.rows] for key in ("loss", "train_loss", "top1"))
    steps, seconds = [int(row["step"]) for row in record.rows], record.seconds()
    noise_scales = record.noise_scales()
    return Result(steps, accuracies, losses, train_losses, record.diverged, seconds=seconds, noise_scales=noise_scales)


def build(config: TrainConfig, comm: Single, *, split: Split | None, hooks: Sequence[Hook]) -> Trainer:
    device = comm.device(config.run.device)
    check_model(config, comm)
    border = config.data.crop_padding or 0
    everything = images(config.data.path, border)
    train, held_out = images_of_search(config.data.path, border, split) if split else everything
    size, number = config.data.global_batch_size, len(everything[0])
    if size > number:
        raise ValueError(f"--batches has {size}, and there are {number} training images: expected at most {number}.")
    count = duration_images(config.run.duration, option="--run.duration", num_samples=number, batch_size=size)
    plan = Plan(len(train), size, config.data.micro_batch_size, count, seed=config.run.seed)
    replica = build_replica(config, comm, device, passes=count_passes(config, comm))
    prepared: dict[str, Any] = {"config": config, "preparation": Preparation(config, replica.model)}
    return put_together(
        config,
        replica,
        device,
        plan=plan,
        open_batches=functools.partial(training_batches, pixels=train, plan=plan, **prepared),
        eval_batches=evaluation_batches(held_out, **prepared),
        hooks=hooks,
        average=None,
        data=config.data.path,
    )
