"""A file for each finished trial, and the trials that come next: a killed experiment goes on where it was.

    FOLDER/trials/NAME.yaml    the config, for `largebatch.train --config`
    FOLDER/trials/NAME.json    the result, written last: a trial that has it is finished
    FOLDER/trials/NAME.pt      the state after the newest evaluation of a trial that is not finished
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from largebatch.config import TrainConfig, differences, dump, load
from largebatch.files import atomic_file
from largebatch.reproduce.search import Score


@dataclass(frozen=True)
class Result:
    """The evaluations of a trial, in order: steps done, top-1 in percent, losses. seconds: of the whole trial.

    noise_scales: in images, one for each quarter of the run; nan if a step is a single pass.
    """

    steps: list[int]
    accuracies: list[float]
    losses: list[float]
    train_losses: list[float]
    diverged: bool
    seconds: float
    noise_scales: list[float]

    @property
    def accuracy(self) -> float:
        """The accuracy after the last step; 0 if the trial diverged."""
        return 0.0 if self.diverged else self.accuracies[-1]

    @property
    def score(self) -> Score:
        """The accuracy after the last step, then the lower loss; the higher, the better."""
        return (0.0, float("-inf")) if self.diverged else (self.accuracies[-1], -self.losses[-1])

    def figures(self) -> dict[str, Any]:
        """Return the cells of the last evaluation, empty if the trial diverged."""
        last = None if self.diverged else -1
        return {
            "steps": self.steps[last] if last else "",
            "accuracy": round(self.accuracy, 4),
            "loss": round(self.losses[last], 6) if last else "",
            "train_loss": round(self.train_losses[last], 6) if last else "",
            "diverged": int(self.diverged),
        }

    def steps_to(self, target: float) -> int | None:
        """Return the steps until the first evaluation with this accuracy, None without one or if the trial diverged."""
        if self.diverged:
            return None
        return next((step for step, top1 in zip(self.steps, self.accuracies) if top1 >= target), None)


Split = Callable[[np.ndarray], np.ndarray]  # labels -> True for images that score a search


class Study(Protocol):
    """An experiment. Its trials are hashable, and have a name."""

    def config(self, trial: Any) -> TrainConfig: ...

    def split(self, trial: Any) -> Split | None:
        """Return the split of a trial that searches, None for the others."""

    def images(self, trial: Any) -> int:
        """Return the training images of a trial."""

    def total(self, results: Mapping[Any, Result]) -> int:
        """Return the training images of all trials, as far as they are known by these results."""

    def wanted(self, results: Mapping[Any, Result]) -> list[Any]:
        """Return the trials that are known by these results, finished ones included, in the order of their start."""


class Journal:
    """The finished trials of an experiment, in its folder."""

    def __init__(self, folder: Path, study: Study) -> None:
        self.folder, self.study = folder / "trials", study
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results: dict[Any, Result] = {}

    def read(self) -> None:
        """Read the trials of this experiment that are finished; ValueError if one had another config."""
        while found := {trial: result for trial in self.next() if (result := self._read(trial))}:
            self.results |= found

    def _read(self, trial: Any) -> Result | None:
        file = self.folder / f"{trial.name}.json"
        if not file.is_file():
            return None
        config = file.with_suffix(".yaml")
        expected = self.study.config(trial)
        same = config.read_text() == dump(expected)  # reading YAML is slow
        if not same and (other := [*differences(load(str(config)), expected)]):
            advice = "choose another --output, or remove it."
            raise ValueError(f"{config} is of a trial whose {other[0]} was another one: {advice}")
        return Result(**json.loads(file.read_text()))

    def add(self, trial: Any, result: Result) -> None:
        file = self.folder / f"{trial.name}.json"
        with atomic_file(file.with_suffix(".yaml")) as yaml:
            yaml.write(dump(self.study.config(trial)).encode())
        with atomic_file(file) as out:
            out.write(json.dumps(asdict(result)).encode())
        self.state_file(trial).unlink(missing_ok=True)
        self.results[trial] = result

    def state_file(self, trial: Any) -> Path:
        return self.folder / f"{trial.name}.pt"

    def next(self) -> list[Any]:
        """Return the trials that can start."""
        return [trial for trial in self.study.wanted(self.results) if trial not in self.results]

    def spent(self) -> float:
        """Return the seconds of a process that all trials took."""
        return sum(result.seconds for result in self.results.values())
