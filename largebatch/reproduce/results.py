"""A file for each finished trial, and the trials that come next: a killed experiment goes on where it was.

    FOLDER/trials/NAME.yaml    the config, for `largebatch.train --config`
    FOLDER/trials/NAME.json    the result, written last: a trial that has it is finished
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from largebatch.config import differences, dump, load
from largebatch.files import atomic_file
from largebatch.reproduce.contenders import CONTENDERS
from largebatch.reproduce.experiment import SEARCH_SEED, Experiment, Trial
from largebatch.reproduce.search import Score, best_rate, next_rates


@dataclass(frozen=True)
class Result:
    """The evaluations of a trial, in order: steps done, top-1 in percent, losses. seconds: of the whole trial."""

    steps: list[int]
    accuracies: list[float]
    losses: list[float]
    train_losses: list[float]
    diverged: bool
    seconds: float

    @property
    def accuracy(self) -> float:
        """The accuracy after the last step; 0 if the trial diverged."""
        return 0.0 if self.diverged else self.accuracies[-1]

    @property
    def score(self) -> Score:
        """The accuracy after the last step, then the lower loss; the higher, the better."""
        return (0.0, float("-inf")) if self.diverged else (self.accuracies[-1], -self.losses[-1])

    def steps_to(self, target: float) -> int | None:
        """Return the steps until the first evaluation with this accuracy, None without one."""
        return next((step for step, top1 in zip(self.steps, self.accuracies) if top1 >= target), None)


class Journal:
    """The finished trials of an experiment, in its folder."""

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self.folder, self.experiment = folder / "trials", experiment
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results: dict[Trial, Result] = {}

    def read(self) -> None:
        """Read the trials of this experiment that are finished; ValueError if one had another config."""
        while found := {trial: result for trial in self.next() if (result := self._read(trial))}:
            self.results |= found

    def _read(self, trial: Trial) -> Result | None:
        file = self.folder / f"{trial.name}.json"
        if not file.is_file():
            return None
        config = file.with_suffix(".yaml")
        expected = self.experiment.config(trial)
        same = config.read_text() == dump(expected)  # reading YAML is slow
        if not same and (other := [*differences(load(str(config)), expected)]):
            advice = "choose another --output, or remove it."
            raise ValueError(f"{config} is of a trial whose {other[0]} was another one: {advice}")
        return Result(**json.loads(file.read_text()))

    def add(self, trial: Trial, result: Result) -> None:
        file = self.folder / f"{trial.name}.json"
        with atomic_file(file.with_suffix(".yaml")) as yaml:
            yaml.write(dump(self.experiment.config(trial)).encode())
        with atomic_file(file) as out:
            out.write(json.dumps(asdict(result)).encode())
        self.results[trial] = result

    def next(self) -> list[Trial]:
        """Return the trials that can start, first those with small batches, which take longest."""
        return [trial for cell in self.experiment.cells for trial in self._of_cell(*cell) if trial not in self.results]

    def _of_cell(self, optimizer: str, batch: int) -> list[Trial]:
        scores = self.scores(optimizer, batch)
        rates = next_rates(CONTENDERS[optimizer].rate, self.experiment.rates, scores)
        if rates:
            return [Trial(optimizer, batch, rate, SEARCH_SEED) for rate in rates]
        first = Trial(optimizer, batch, best_rate(scores), SEARCH_SEED)
        return [replace(first, seed=SEARCH_SEED + 1 + number) for number in range(self.experiment.seeds)]

    def scores(self, optimizer: str, batch: int) -> dict[float, Score]:
        return {
            trial.lr: result.score
            for trial, result in self.results.items()
            if trial.searches and (trial.contender, trial.batch) == (optimizer, batch)
        }
