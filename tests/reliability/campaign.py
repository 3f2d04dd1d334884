"""A campaign: many trials of one promise. What has been tried is written down, so a campaign can be continued."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from largebatch.files import run_lock


class Trial(NamedTuple):
    """One attempt; `run` returns "" if the promise was kept, else a sentence on what happened instead."""

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Size:
    """How much of a campaign is run, and where its files are."""

    folder: Path
    full: bool

    def choose(self, gate: int, full: int) -> int:
        return full if self.full else gate


@dataclass
class Campaign:
    """A promise, and the trials of it; trials may build on the ones before, in their order."""

    name: str
    promise: str
    trials: Callable[[Size], Iterator[Trial]]


@dataclass
class Verdict:
    """What a campaign found."""

    campaign: Campaign
    seconds: dict[str, float] = field(default_factory=dict)  # by trial
    failures: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        word = "FAIL" if self.failures or not self.seconds else "PASS"
        kept, longest = len(self.seconds) - len(self.failures), max(self.seconds.values(), default=0.0)
        figures = f"{kept} of {len(self.seconds)} kept, {sum(self.seconds.values()):.0f} s, the longest {longest:.0f} s"
        lines = [f"{self.campaign.name:3}  {word}  {self.campaign.promise}: {figures}"]
        return "\n".join([*lines, *(f"      {trial}: {failure}" for trial, failure in self.failures.items())])


def carry_out(campaign: Campaign, size: Size, tell: Callable[[str], None]) -> Verdict:
    """Run the trials that `size.folder` has no result of; `tell` hears of each that ends.

    A trial that failed stops the campaign, since later ones may build on it; the next call tries it again.
    """
    size.folder.mkdir(parents=True, exist_ok=True)
    with run_lock.hold(size.folder):
        return _carry_out(campaign, size, tell)


def _carry_out(campaign: Campaign, size: Size, tell: Callable[[str], None]) -> Verdict:
    log, verdict = size.folder / "trials.jsonl", Verdict(campaign)
    for line in log.read_text().splitlines() if log.exists() else ():
        said = json.loads(line)
        verdict.seconds[said["trial"]] = said["seconds"]
    for trial in campaign.trials(size):
        if trial.name in verdict.seconds:
            continue
        began = time.monotonic()
        try:
            failure = trial.run()
        except AssertionError as error:  # such as that of a run that does not end
            failure = str(error)
        verdict.seconds[trial.name] = time.monotonic() - began
        tell(f"{campaign.name} {len(verdict.seconds)}: {trial.name}: {failure or 'kept'}")
        if failure:
            verdict.failures[trial.name] = failure
            break
        with open(log, "a") as file:
            print(json.dumps({"trial": trial.name, "seconds": verdict.seconds[trial.name]}), file=file)
    return verdict
