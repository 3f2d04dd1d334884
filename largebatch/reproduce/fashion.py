"""The experiment at 32,768: AdamW, LAMB and Muon on Fashion-MNIST at global batches of 512 to 32,768.

The search spaces and the rules of this file, and the hypotheses and tests of `hypotheses`, were written down before the
first run. The trials that search see 54,000 of the 60,000 training images and are scored by the other 6,000, a tenth of
each class; the others train on all 60,000. An epoch is 60,000 images for both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from largebatch.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, ScheduleConfig, TrainConfig
from largebatch.config.cli import checked
from largebatch.reproduce.contenders import CONTENDERS
from largebatch.reproduce.experiment import SEARCH_SEED, Trial
from largebatch.reproduce.results import Result, Split
from largebatch.reproduce.search import best_rate, tried_rates

OPTIMIZERS = ("adamw", "lamb", "muon")
CARRIED = ("adamw", "lamb")  # those whose rate is carried from the smallest batch, and that have longer runs
NEEDS_LENGTH, MARGIN = "adamw", 10.0  # the optimizer that decides the length, and points below its short runs
LARGEST_PASS = 512  # images; each step has at least two passes, by which the noise scale is measured
RULES = {"optim.weight_decay": 0.05, "optim.clip_norm": 1.0}  # the same for all optimizers
HALF_WARMUP = "50 %"
Results = Mapping["Run", Result]


@dataclass(frozen=True)
class Run(Trial):
    """A trial. warmup: a duration; empty: the rule of all trials."""

    epochs: int
    precision: str
    warmup: str = ""

    @property
    def without_rate(self) -> tuple[Any, ...]:
        return self.contender, self.batch, self.seed, self.epochs, self.precision, self.warmup

    @property
    def name(self) -> str:
        return f"{super().name}_epochs{self.epochs}_{self.precision}{'_half_warmup' * bool(self.warmup)}"


@dataclass(frozen=True)
class Fashion:
    """The sizes of the experiment. epoch: its images. rates: tried in each search.

    seeds: of the results at both ends, of those between, and of the longer runs.
    """

    data: DataConfig
    name: str = "fashion"
    batches: Sequence[int] = (512, 2048, 8192, 32768)
    lengths: Sequence[int] = (20, 50, 100, 200)  # epochs, of which the experiment takes one
    longer: int = 5  # times the length, for H4
    rates: int = 6
    seeds: tuple[int, int, int] = (5, 3, 3)
    epoch: int = 60_000
    evaluations: int = 25  # of each trial, the last after its last step
    target: float = 75.0

    @property
    def smallest(self) -> int:
        return self.batches[0]

    @property
    def largest(self) -> int:
        return self.batches[-1]

    # -- the trials, stage by stage ----------------------------------------------------------------------------

    def wanted(self, results: Results) -> list[Run]:
        """Return the trials that are known by these results: a stage is known when the one before is finished."""
        return [*dict.fromkeys(self._stages(results))]

    def _stages(self, results: Results) -> Iterator[Run]:
        yield from self.precision_pairs()
        precision = self.precision(results)
        if precision is None:
            return
        for name in CARRIED:
            yield from self.search(results, name, self.smallest, self.lengths[0], precision)
        for tried in self.lengths:
            yield from self.search(results, NEEDS_LENGTH, self.largest, tried, precision)
            if self.long_enough(results, tried, precision) is not False:
                break
        length = self.length(results, precision)
        if length is None:
            return
        yield from self._of_length(results, length, precision)

    def _of_length(self, results: Results, length: int, precision: str) -> Iterator[Run]:
        for name in OPTIMIZERS:
            yield from self.search(results, name, self.largest, length, precision)
        for runs in self.results(results, length, precision).values():
            yield from runs

    def precision_pairs(self) -> list[Run]:
        """Return six runs in float32, and the same six in bfloat16."""
        first, *_ = self.lengths
        batches = (self.smallest, self.batches[-2])
        cells = [(name, batch) for batch in batches for name in OPTIMIZERS]
        return [
            Run(name, batch, CONTENDERS[name].rate, SEARCH_SEED, first, precision)
            for name, batch in cells
            for precision in ("fp32", "bf16")
        ]

    def precision(self, results: Results) -> str | None:
        """Return bf16 if it changes nothing: no pair differs by over 1.5 points, nor their mean by over 0.5."""
        runs = self.precision_pairs()
        if any(run not in results for run in runs):
            return None
        apart = [results[bf16].accuracy - results[fp32].accuracy for fp32, bf16 in zip(runs[::2], runs[1::2])]
        nothing = max(map(abs, apart)) <= 1.5 and abs(sum(apart)) / len(apart) <= 0.5
        return "bf16" if nothing else "fp32"

    def length(self, results: Results, precision: str) -> int | None:
        """Return the shortest length that is long enough, else the longest; None if it is not known yet."""
        for length in self.lengths:
            enough = self.long_enough(results, length, precision)
            if enough or enough is not None and length == self.lengths[-1]:
                return length
            if enough is None:
                return None
        return None

    def long_enough(self, results: Results, length: int, precision: str) -> bool | None:
        """Return whether a rate at the largest batch comes close to short runs at the smallest; None: not known yet."""
        goal = self.best(results, NEEDS_LENGTH, self.smallest, self.lengths[0], precision)
        if goal is None:
            return None
        runs = self.search(results, NEEDS_LENGTH, self.largest, length, precision)
        found = [results[run].accuracy for run in runs if run in results]
        close = any(accuracy >= results[goal].accuracy - MARGIN for accuracy in found)
        return True if close else None if len(found) < self.rates else False

    def search(self, results: Results, name: str, batch: int, epochs: int, precision: str) -> list[Run]:
        """Return the runs of a search, up to those that have no result yet."""
        first = Run(name, batch, CONTENDERS[name].rate, SEARCH_SEED, epochs, precision)
        scores = {run.lr: result.score for run, result in results.items() if run.without_rate == first.without_rate}
        return [replace(first, lr=rate) for rate in tried_rates(first.lr, self.rates, scores)]

    def best(self, results: Results, name: str, batch: int, epochs: int, precision: str) -> Run | None:
        """Return the best run of a search; None if it is not finished."""
        runs = self.search(results, name, batch, epochs, precision)
        if any(run not in results for run in runs):
            return None
        return replace(runs[0], lr=best_rate({run.lr: results[run].score for run in runs}))

    def results(self, results: Results, length: int, precision: str) -> dict[tuple[str, str, int], list[Run]]:
        """Return the runs that are no search, by purpose, optimizer and batch; without those that are not known yet.

        tuned: with the rate found at this batch, at the smallest one in the shortest runs. carried: with that of the
        smallest batch, times the square root of the batches' quotient. longer and half warm-up: with the rate found at
        the largest batch.
        """
        found: dict[tuple[str, str, int], list[Run]] = {}
        ends, between, few = self.seeds
        for name in OPTIMIZERS:
            if large := self.best(results, name, self.largest, length, precision):
                found["tuned", name, self.largest] = seeded(large, ends)
                if name in CARRIED:
                    found["longer", name, self.largest] = seeded(replace(large, epochs=self.longer * length), few)
                    found["half warm-up", name, self.largest] = seeded(replace(large, warmup=HALF_WARMUP), 1)
        for name in CARRIED:
            if short := self.best(results, name, self.smallest, self.lengths[0], precision):
                small = replace(short, epochs=length)
                found["tuned", name, self.smallest] = seeded(small, ends)
                for batch in self.batches[1:]:
                    rate = float(f"{small.lr * (batch / self.smallest) ** 0.5:.3g}")
                    carried = replace(small, batch=batch, lr=rate)
                    found["carried", name, batch] = seeded(carried, ends if batch == self.largest else between)
        return found

    # -- one trial ---------------------------------------------------------------------------------------------

    def split(self, run: Run) -> Split | None:
        return tenth_of_each_class if run.searches else None

    def images(self, run: Run) -> int:
        return run.epochs * self.epoch

    def total(self, results: Results) -> int:
        """Return the training images of all trials; until the length is known, with the one that is tried."""
        precision = self.precision(results) or "bf16"
        known = self.wanted(results)
        length = self.length(results, precision) or max(run.epochs for run in known)
        ends, between, few = self.seeds
        runs = len(OPTIMIZERS) * (self.rates + ends)
        runs += len(CARRIED) * (2 * ends + (len(self.batches) - 2) * between + few * self.longer + 1)
        others = {*known} - {*self._of_length(results, length, precision)}
        return sum(map(self.images, others)) + runs * length * self.epoch

    def config(self, run: Run) -> TrainConfig:
        """Return the config of a trial, with which `largebatch.train` makes the run again."""
        images = self.images(run)
        warmup = run.warmup or f"{min(max(images // 10, 10 * run.batch), images // 2)} images"
        config = TrainConfig(
            model=ModelConfig(name="vit_nano7", img_size=28, num_classes=10, weight_init="jax"),
            data=replace(self.data, global_batch_size=run.batch, micro_batch_size=min(run.batch // 2, LARGEST_PASS)),
            schedule=ScheduleConfig(name="cosine", warmup=warmup),
            run=RunConfig(
                duration=f"{images} images",
                eval_every=f"{max(images // self.evaluations, 1)} images",
                seed=run.seed,
                precision="bf16" if run.precision == "bf16" else "fp32",
                device="cpu",
            ),
            checkpoint=CheckpointConfig(best="none"),
        )
        half_life = {"optim.second_moment_half_life": f"{self.epoch} images"}
        return checked(config, RULES | half_life | {"optim.name": run.contender, "optim.lr": run.lr})


def tenth_of_each_class(labels: np.ndarray) -> np.ndarray:
    """Return True for the first of every ten images of a class."""
    numbers = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        numbers[labels == label] = np.arange((labels == label).sum())
    return numbers % 10 == 0


def seeded(run: Run, count: int) -> list[Run]:
    return [replace(run, seed=SEARCH_SEED + 1 + number) for number in range(count)]


def fashion(folder: str) -> Fashion:
    """Return the experiment on the files of Fashion-MNIST, with shifts of up to 2 px and flips."""
    mean, std = (0.286,) * 3, (0.353,) * 3
    return Fashion(DataConfig(path=folder, crop_padding=2, crop_pct=1.0, eval_batch_size=500, mean=mean, std=std))


def quick(experiment: Fashion) -> Fashion:
    """Return a size that shows in minutes that all works, and little more: epochs of 12,000 images."""
    small = replace(experiment, batches=(512, 1024, 2048, 4096), lengths=(2,), epoch=12_000, evaluations=2)
    return replace(small, rates=3, seeds=(2, 2, 2), target=40.0)
