"""Training steps on batches that stay on the device: no files, no loader, and with one process no Horovod.

So a step is augmentation, passes, reduction, clip, update and average of the weights, whatever feeds them. The pixels
are noise, which costs the same.
"""

import itertools
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch.assembly import build_average, build_replica, count_passes, put_together
from largebatch.config import TrainConfig, apply, duration_images, given_options
from largebatch.config.cli import for_optimizer
from largebatch.data.order import Plan
from largebatch.data.token_labels import TokenLabels
from largebatch.engine import Trainer
from largebatch.ranks import Ranks
from largebatch.recipes import RECIPES, find
from largebatch.recipes.quickstart import quickstart

NAME = "resident"  # as the value of --data
NUM_BATCHES = 4  # different micro-batches on the device
NUM_SAMPLES = 1_281_167  # images of an epoch, as in ImageNet
MAP_CLASSES, MAP_SIDE = 5, 18  # classes that are kept in each cell of a label map, and its cells per side, as published


class Batch(NamedTuple):
    """A micro-batch for the trainer, as `data.stream.Batch`."""

    images: Tensor
    labels: Tensor
    step: int
    number: int
    token_labels: TokenLabels | None


def read_config(argv: Sequence[str]) -> TrainConfig:
    """Return the recipe of the model, or the quick start, with the options of a command line."""
    given = {"data.path": NAME} | given_options(argv)
    name = given.get("model.name", "vit_b32")
    recipe = quickstart(name) if name not in RECIPES and "recipe" not in given else find(given, argv=argv)
    classes = recipe.model.num_classes or 1000
    recipe = replace(recipe, data=replace(recipe.data, path=NAME), model=replace(recipe.model, num_classes=classes))
    return apply(replace(recipe, optim=for_optimizer(recipe.optim, given.get("optim.name"))), argv)


def build_resident(config: TrainConfig, comm: Ranks, *, device: torch.device) -> Trainer:
    """Build a trainer as `assembly.build_trainer`, without images, evaluation, log and checkpoints."""
    replica = build_replica(config, comm, device, passes=count_passes(config, comm))
    size = config.data.global_batch_size
    images = duration_images(config.run.duration, option="--run.duration", num_samples=NUM_SAMPLES, batch_size=size)
    with comm.together("building"):
        plan = Plan(NUM_SAMPLES, size, config.data.micro_batch_size, images, seed=config.run.seed)
        average = build_average(config, plan, replica.model)
        trainer = put_together(
            config,
            replica,
            device,
            plan=plan,
            open_batches=partial(open_batches, config, comm, plan=plan, device=device),
            eval_batches=(),
            hooks=[average] if average else [],
            average=average,
            data=NAME,
        )
    return trainer


def open_batches(
    config: TrainConfig, comm: Ranks, start_step: int, *, plan: Plan, device: torch.device
) -> Generator[Batch, None, None]:
    """Yield this rank's micro-batches from step `start_step` on, of a few fixed ones."""
    torch.manual_seed(comm.rank)
    fixed = itertools.cycle([make_batch(config, device) for _ in range(NUM_BATCHES)])
    for step in range(start_step, plan.num_steps):
        for planned in plan.micro_batches(step, comm.data_rank, comm.data_size):
            yield next(fixed)._replace(step=step, number=planned.number)


def make_batch(config: TrainConfig, device: torch.device) -> Batch:
    """Draw a micro-batch on the device; with label maps if the recipe has them."""
    count, side, classes = config.data.micro_batch_size, config.model.img_size, config.model.num_classes
    images = torch.randn(count, 3, side, side, device=device)
    labels = torch.randint(classes, (count,), device=device)
    if not config.data.token_labels:
        return Batch(images, labels, 0, 0, None)
    shape = (count, MAP_CLASSES, MAP_SIDE, MAP_SIDE)
    ids = torch.randint(classes, shape, dtype=torch.int32, device=device)
    scores = torch.randn(shape, device=device).half()
    crop = torch.tensor([[0.5, 0.0, 0.25], [0.0, 0.5, 0.25]], dtype=torch.float64, device=device)
    return Batch(images, labels, 0, 0, TokenLabels(ids, scores, crop.repeat(count, 1, 1)))
