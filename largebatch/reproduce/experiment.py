"""The experiment on the digits: data, model, batches, epochs, rates and seeds; and the config of each trial.

A trial is one training run. The trials of SEARCH_SEED choose the learning rate: they train on four fifths of the
training images, with as many steps, and are scored on the rest. The other seeds train on all training images with the
best rate, and are evaluated on the held-out images, which no search has seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from largebatch.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, ScheduleConfig, TrainConfig
from largebatch.config.cli import checked
from largebatch.reproduce.contenders import CONTENDERS
from largebatch.reproduce.results import Result, Split
from largebatch.reproduce.search import Score, best_rate, tried_rates

SEARCH_SEED = 0
DIGITS = 1437  # training images
LARGEST_PASS = 2048  # images; a larger batch takes several passes


@dataclass(frozen=True)
class Trial:
    contender: str
    batch: int
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.contender}_batch{self.batch}_lr{self.lr:g}_seed{self.seed}"

    @property
    def searches(self) -> bool:
        return self.seed == SEARCH_SEED


def every_fifth(labels: np.ndarray) -> np.ndarray:
    return np.arange(len(labels)) % 5 == 0


@dataclass(frozen=True)
class Experiment:
    """The size of a comparison. target: the accuracy, in percent, to which steps are counted."""

    name: str
    data: DataConfig
    batches: Sequence[int]
    epochs: int
    target: float
    optimizers: Sequence[str] = tuple(CONTENDERS)
    rates: int = 5
    seeds: int = 3
    model: str = "vit_nano32"

    @property
    def cells(self) -> list[tuple[str, int]]:
        return [(optimizer, batch) for batch in self.batches for optimizer in self.optimizers]

    def split(self, trial: Trial) -> Split | None:
        return every_fifth if trial.searches else None

    def images(self, trial: Trial) -> int:
        return self.epochs * DIGITS

    def total(self, results: Mapping[Trial, Result]) -> int:
        """Return the training images of all trials."""
        return len(self.cells) * (self.rates + self.seeds) * self.epochs * DIGITS

    def wanted(self, results: Mapping[Trial, Result]) -> list[Trial]:
        """Return the trials that are known by now, first those with small batches, which take longest."""
        return [trial for cell in self.cells for trial in self._of_cell(*cell, results)]

    def _of_cell(self, optimizer: str, batch: int, results: Mapping[Trial, Result]) -> list[Trial]:
        scores = self.scores(optimizer, batch, results)
        tried = tried_rates(CONTENDERS[optimizer].rate, self.rates, scores)
        searches = [Trial(optimizer, batch, rate, SEARCH_SEED) for rate in tried]
        if any(rate not in scores for rate in tried):
            return searches
        seeds = range(SEARCH_SEED + 1, SEARCH_SEED + 1 + self.seeds)
        return [*searches, *(Trial(optimizer, batch, best_rate(scores), seed) for seed in seeds)]

    def scores(self, optimizer: str, batch: int, results: Mapping[Trial, Result]) -> dict[float, Score]:
        return {
            trial.lr: result.score
            for trial, result in results.items()
            if trial.searches and (trial.contender, trial.batch) == (optimizer, batch)
        }

    def config(self, trial: Trial) -> TrainConfig:
        """Return the config of a trial, with which `largebatch.train` makes the run again."""
        one_pass, epochs = min(trial.batch, LARGEST_PASS), f"{self.epochs} epochs"
        evaluations = "100 %" if trial.searches else "1 epoch"
        config = TrainConfig(
            model=ModelConfig(name=self.model, img_size=32, num_classes=10),
            data=replace(self.data, global_batch_size=trial.batch, micro_batch_size=one_pass),
            schedule=ScheduleConfig(name="cosine", warmup="10 %"),
            run=RunConfig(duration=epochs, eval_every=evaluations, seed=trial.seed, precision="fp32", device="cpu"),
            checkpoint=CheckpointConfig(best="none"),
        )
        return checked(config, {**CONTENDERS[trial.contender].options, "optim.lr": trial.lr})


def digits() -> Experiment:
    """Return an experiment on the 1,437 digits at 32 px, moved by up to half of one of their 8 x 8 pixels."""
    data = DataConfig(path="digits", crop_padding=4, crop_pct=1.0, hflip=0.0, eval_batch_size=512)
    return Experiment("digits", data, batches=(32, 128, 512, DIGITS), epochs=25, target=90.0)


def quick(experiment: Experiment) -> Experiment:
    """Return a smaller size of an experiment, which shows that all works, and little more."""
    few = (experiment.batches[1], experiment.batches[-1])
    return replace(experiment, batches=few, epochs=max(1, experiment.epochs // 4), rates=3, seeds=2)
