"""One trial: the run that `largebatch.train` would make of its config on one rank, with images from memory."""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from largebatch.assembly import build_replica, check_model, count_passes, put_together
from largebatch.config import TrainConfig, duration_images
from largebatch.data.order import Plan
from largebatch.data.sources import open_source
from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.ranks import Stopped
from largebatch.ranks.single import Single
from largebatch.reproduce.experiment import SEARCH_SHARE
from largebatch.reproduce.images import Pixels, Preparation, evaluation_batches, training_batches
from largebatch.reproduce.results import Result


class Record(Hook):
    """Keeps the evaluations of a trial; ends it at a gradient that is not finite, or if asked to."""

    def __init__(self, given_up: Callable[[], bool]) -> None:
        self.given_up = given_up
        self.rows: list[dict[str, float]] = []
        self.diverged = False

    def at_point(self, trainer: Trainer) -> None:
        if self.given_up():
            trainer.stop_reason = "the experiment has ended"

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        if not output.applied:
            self.diverged, trainer.stop_reason = True, "the gradient is not finite"

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.rows.append({"step": trainer.state.step, **metrics})


@functools.lru_cache(maxsize=1)
def images(path: str, border: int) -> tuple[Pixels, Pixels]:
    train, held_out = (open_source(path, split=split).for_classes(10) for split in ("train", "validation"))
    return Pixels(train, border), Pixels(held_out, border)


@functools.lru_cache(maxsize=1)
def images_of_search(path: str, border: int) -> tuple[Pixels, Pixels]:
    """Return the training images of a search, and those by which it is scored."""
    train, _ = images(path, border)
    numbers = np.arange(len(train))
    scored = numbers % SEARCH_SHARE == 0
    return train.subset(numbers[~scored]), train.subset(numbers[scored])


def run(config: TrainConfig, *, searches: bool, given_up: Callable[[], bool] = lambda: False) -> Result | None:
    """Train on one thread; return None if `given_up` says that nobody waits. ValueError if the config does not fit."""
    began, threads = time.perf_counter(), torch.get_num_threads()
    record, comm = Record(given_up), Single()
    torch.set_num_threads(1)
    try:
        trainer = build(config, comm, searches=searches, hook=record)
        trainer.fit()
    except Stopped as error:
        raise ValueError(str(error)) from error
    finally:
        torch.set_num_threads(threads)
    if trainer.stop_reason and not record.diverged:
        return None
    losses, train_losses, accuracies = ([row[key] for row in record.rows] for key in ("loss", "train_loss", "top1"))
    steps, seconds = [int(row["step"]) for row in record.rows], time.perf_counter() - began
    return Result(steps, accuracies, losses, train_losses, diverged=record.diverged, seconds=seconds)


def build(config: TrainConfig, comm: Single, *, searches: bool, hook: Hook) -> Trainer:
    device = comm.device(config.run.device)
    check_model(config, comm)
    border = config.data.crop_padding or 0
    everything = images(config.data.path, border)
    train, held_out = images_of_search(config.data.path, border) if searches else everything
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
        hooks=[hook],
        ema=None,
        data=config.data.path,
    )
