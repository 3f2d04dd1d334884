"""An experiment: data, model, batches, epochs, rates and seeds; and the config of each trial.

A trial is one training run. The trials of SEARCH_SEED choose the learning rate: they train on four fifths of the
training images, with as many steps, and are scored on the rest. The other seeds train on all training images with the
best rate, and are evaluated on the held-out images, which no search has seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from largebatch.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, ScheduleConfig, TrainConfig
from largebatch.config.cli import checked
from largebatch.reproduce.contenders import CONTENDERS

SEARCH_SEED = 0
SEARCH_SHARE = 5  # one image of so many scores the search, which trains on the others
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

    @property
    def num_trials(self) -> int:
        return len(self.cells) * (self.rates + self.seeds)

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


PADDED = DataConfig(crop_padding=4, crop_pct=1.0, eval_batch_size=512)


def digits() -> Experiment:
    """Return an experiment on the 1,437 digits at 32 px, moved by up to half of one of their 8 x 8 pixels."""
    data = replace(PADDED, path="digits", hflip=0.0)
    return Experiment("digits", data, batches=(32, 128, 512, 1437), epochs=25, target=90.0)


def cifar10(folder: str) -> Experiment:
    """Return the same experiment on CIFAR-10's files, with the usual crops and flips."""
    data = replace(PADDED, path=folder, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
    return Experiment("cifar10", data, batches=(128, 512, 2048, 8192), epochs=15, target=40.0)


def quick(experiment: Experiment) -> Experiment:
    """Return a smaller size of an experiment, which shows that all works, and little more."""
    few = (experiment.batches[1], experiment.batches[-1])
    return replace(experiment, batches=few, epochs=max(1, experiment.epochs // 4), rates=3, seeds=2)
