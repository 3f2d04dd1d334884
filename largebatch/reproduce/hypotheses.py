"""The four hypotheses about Fashion-MNIST at the largest batch, their tests, and the tables; written before the runs.

All differences are paired by seed, in points of accuracy. A claim holds if a one-sided t-test against its threshold
gives p < 0.05 after Holm's correction over the four; it is refuted if the 95 % interval lies on the other side of the
threshold; else it is open. A claim about two optimizers holds if it holds for both, and is refuted if for one.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from largebatch.files import atomic_file
from largebatch.files.table import write_table
from largebatch.reproduce.contenders import CONTENDERS
from largebatch.reproduce.fashion import CARRIED, OPTIMIZERS, Fashion, Run
from largebatch.reproduce.results import Result
from largebatch.reproduce.table import aligned

COLUMNS = (
    "purpose", "optimizer", "batch", "learning_rate", "seed", "epochs", "precision", "warmup", "steps", "accuracy",
    "loss", "train_loss", "diverged", "steps_to_target",
    *("noise_scale_1", "noise_scale_2", "noise_scale_3", "noise_scale_4"),
)  # fmt: skip
CURVES = ("trial", "step", "accuracy", "loss", "train_loss")
LEVEL = 0.05
BEND = 1.0  # point of accuracy


class Paired(NamedTuple):
    """A claim that the mean of differences is above a threshold; absolute: above it or below its negative."""

    what: str
    differences: Sequence[float]
    threshold: float
    absolute: bool = False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def interval(self) -> tuple[float, float]:
        half = half_width(self.differences)
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        above = tail(self.differences, self.threshold)
        if not self.absolute:
            return above
        below = tail([-difference for difference in self.differences], self.threshold)
        return min(1.0, 2 * min(above, below))

    @property
    def refuted(self) -> bool:
        low, high = self.interval
        return high < self.threshold and (not self.absolute or low > -self.threshold)


def tail(values: Sequence[float], threshold: float) -> float:
    """Return the p-value of the hypothesis that the mean is not above the threshold."""
    from scipy import stats  # takes half a second to import

    error = standard_error(values)
    above = statistics.fmean(values) - threshold
    if not error:
        return 0.0 if above > 0 else 1.0
    return float(stats.t.sf(above / error, len(values) - 1))


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % t-interval of the mean."""
    from scipy import stats

    return float(stats.t.ppf(1 - LEVEL / 2, len(values) - 1)) * standard_error(values)


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for place, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[number]))
        adjusted[number] = highest
    return adjusted


# -- the hypotheses ------------------------------------------------------------------------------------------


class Found:
    """The results of a finished experiment."""

    def __init__(self, study: Fashion, results: Mapping[Run, Result]) -> None:
        self.study, self.results = study, results
        precision = study.precision(results)
        assert precision is not None
        length = study.length(results, precision)
        assert length is not None
        self.precision, self.length = precision, length
        self.runs = study.results(results, length, precision)

    def accuracies(self, purpose: str, name: str, batch: int) -> list[float]:
        return [self.results[run].accuracy for run in self.runs[purpose, name, batch]]

    def searches(self) -> Iterator[tuple[str, int, int, list[tuple[float, float]]]]:
        """Yield optimizer, batch and epochs of each search whose rate is used, with the accuracy of each rate."""
        study = self.study
        cells = [(name, study.smallest, study.lengths[0]) for name in CARRIED]
        for name, batch, epochs in (*cells, *((name, study.largest, self.length) for name in OPTIMIZERS)):
            runs = study.search(self.results, name, batch, epochs, self.precision)
            yield name, batch, epochs, sorted((run.lr, self.results[run].accuracy) for run in runs)

    def bend(self, name: str) -> float:
        """Return the batch at which the carried rate first costs one point, interpolated; infinity without one."""
        batches = self.study.batches
        cells = [("tuned", batches[0]), *(("carried", batch) for batch in batches[1:])]
        means = [statistics.fmean(self.accuracies(purpose, name, batch)) for purpose, batch in cells]
        limit = means[0] - BEND
        for (left, right), (above, below) in zip(pairwise(batches), pairwise(means)):
            if below <= limit:
                return left * (right / left) ** ((above - limit) / (above - below))
        return math.inf

    def hypotheses(self) -> dict[str, tuple[str, list[Paired]]]:
        small, large, longer = self.study.smallest, self.study.largest, self.study.longer
        tuned = {name: self.accuracies("tuned", name, large) for name in OPTIMIZERS}
        lost = {
            name: minus(self.accuracies("tuned", name, small), self.accuracies("carried", name, large))
            for name in CARRIED
        }
        short = {
            name: minus(self.accuracies("longer", name, large), self.accuracies("tuned", name, small)) for name in lost
        }
        return {
            "H1": (
                f"tuned at {large:,}, LAMB and AdamW differ by more than 0.5",
                [Paired("LAMB − AdamW", minus(tuned["lamb"], tuned["adamw"]), 0.5, absolute=True)],
            ),
            "H2": (
                f"with the rate of {small} carried to {large:,}, LAMB loses at least 1 less than AdamW",
                [Paired("AdamW's loss − LAMB's", minus(lost["adamw"], lost["lamb"]), 1.0)],
            ),
            "H3": (
                f"tuned at {large:,}, Muon is more than 0.5 ahead of both",
                [Paired(f"Muon − {label(name)}", minus(tuned["muon"], tuned[name]), 0.5) for name in lost],
            ),
            "H4": (
                f"with {longer} times the steps at {large:,}, both come within 1 of their results at {small}",
                [Paired(f"{label(name)}, {large:,} − {small}", short[name], -1.0) for name in lost],
            ),
        }


def minus(left: Iterable[float], right: Iterable[float]) -> list[float]:
    """Return the differences of the seeds that both have."""
    return [one - other for one, other in zip(left, right)]


def sag(losses: Sequence[float], classes: int = 10) -> tuple[float, int]:
    """Return the largest rise of a loss above its lowest so far, as the share of docs/divergence.md, and its place."""
    uniform, lowest, largest = math.log(classes), math.inf, (0.0, 0)
    for place, loss in enumerate(losses):
        lowest = min(lowest, loss)
        share = (loss - lowest) / max(uniform - lowest, uniform / 3)
        largest = max(largest, (share, place), key=lambda one: one[0])
    return largest


def label(name: str) -> str:
    return CONTENDERS[name].label


def answer(p: float, claims: Sequence[Paired]) -> str:
    if p < LEVEL:
        return "holds"
    return "refuted" if any(claim.refuted for claim in claims) else "open"


# -- the tables ----------------------------------------------------------------------------------------------


def write(found: Found, folder: Path) -> str:
    """Write results.csv, curves.csv and table.md; return the text of the tables."""
    write_runs(found, folder)
    text = "\n\n".join([*answers(found), *all_results(found), *courses(found), *searches(found)])
    with atomic_file(folder / "table.md") as file:
        file.write(f"{text}\n".encode())
    return text


def write_runs(found: Found, folder: Path) -> None:
    """Write a row for each run, and one for each of its evaluations.

    The purpose of a run is search, result (each batch with the rate of the smallest) or that of `Found.runs`.
    """
    small, results = found.study.smallest, found.results
    purposes = {run: key[0] for key, runs in found.runs.items() for run in runs}
    purposes |= {run: "result" for run, purpose in purposes.items() if purpose == "carried" or run.batch == small}
    runs = found.study.wanted(results)
    rows = [{"purpose": purposes.get(run, "search"), **row(found.study, run, results[run])} for run in runs]
    write_table(folder / "results.csv", COLUMNS, rows)
    evaluations = [
        dict(zip(CURVES, (run.name, step, *(round(value, 4) for value in values))))
        for run in runs
        for step, *values in zip(
            results[run].steps, results[run].accuracies, results[run].losses, results[run].train_losses
        )
    ]
    write_table(folder / "curves.csv", CURVES, evaluations)


def row(study: Fashion, run: Run, result: Result) -> dict[str, object]:
    scales = ["" if math.isnan(scale) else f"{scale:.4g}" for scale in result.noise_scales]
    return {
        "optimizer": run.contender,
        "batch": run.batch,
        "learning_rate": run.lr,
        "seed": run.seed,
        "epochs": run.epochs,
        "precision": run.precision,
        "warmup": run.warmup,
        **result.figures(),
        "steps_to_target": result.steps_to(study.target) or "",
        **{f"noise_scale_{number}": scale for number, scale in enumerate(scales, 1)},
    }


def answers(found: Found) -> list[str]:
    hypotheses = found.hypotheses()
    raw = [max(claim.p for claim in claims) for _, claims in hypotheses.values()]
    lines = [["hypothesis", "difference", "mean", "95 % interval", "seeds", "p (Holm)", "answer"]]
    for (name, (text, claims)), p in zip(hypotheses.items(), holm(raw)):
        for number, claim in enumerate(claims):
            low, high = claim.interval
            figures = [f"{claim.mean:+.2f}", f"{low:+.2f} to {high:+.2f}", f"{len(claim.differences)}"]
            first = number == 0
            words = f"{name}: {text}" if first else ""
            lines.append([words, claim.what, *figures, f"{p:.2g}" if first else "", answer(p, claims) if first else ""])
    longer = found.length * found.study.longer
    length = f"Each result has {found.length} epochs, in {found.precision}; H4's longer ones have {longer}."
    return [f"{length} Differences in points of test accuracy, paired by seed:", aligned(lines)]


def all_results(found: Found) -> list[str]:
    target = f"steps to {found.study.target:g} %"
    columns = ["seeds", "diverged", "accuracy", target, "noise scale"]
    lines = [["rate", "optimizer", "batch", "steps", "learning rate", *columns]]
    for (purpose, name, batch), runs in found.runs.items():
        results = [found.results[run] for run in runs]
        values = [result.accuracy for result in results]
        reached = [result.steps_to(found.study.target) for result in results]
        scales = [result.noise_scales[-1] for result in results if not math.isnan(result.noise_scales[-1])]
        lines.append(
            [
                purpose,
                label(name),
                f"{batch:,}",
                f"{math.ceil(runs[0].epochs * found.study.epoch / batch):,}",
                f"{runs[0].lr:g}",
                f"{len(runs)}",
                f"{sum(result.diverged for result in results)}",
                f"{statistics.fmean(values):.2f}" + (f" ± {half_width(values):.2f}" if len(values) > 1 else ""),
                "–" if None in reached else f"{statistics.fmean(filter(None, reached)):,.0f}",
                f"{float(f'{statistics.median(scales):.2g}'):,.0f} ({len(scales)})" if scales else "–",
            ]
        )
    bends = [f"{label(name)} {bend:,.0f}" for name in CARRIED if (bend := found.bend(name)) < math.inf]
    return [
        "Test accuracy after the last step in percent, mean and half of its 95 % t-interval. Steps to the target: to "
        f"the first of {found.study.evaluations} evaluations with it; –: a seed did not reach it. Noise scale: of the "
        "last quarter, in images, the median of the (n) seeds that have one.",
        aligned(lines),
        f"Batch from which on the carried rate costs {BEND:g} point, interpolated: {', '.join(bends) or 'none'}.",
    ]


def courses(found: Found) -> list[str]:
    lines = [["optimizer", "warm-up", "largest share", "at step", "largest fall of the test accuracy"]]
    for name in CARRIED:
        for purpose, warmup in (("tuned", "usual"), ("half warm-up", "half of the run")):
            result = found.results[found.runs[purpose, name, found.study.largest][0]]
            share, place = sag(result.train_losses)
            highest = accumulate(result.accuracies, max)
            fall = max((before - now for before, now in zip(highest, result.accuracies)), default=0.0)
            step = f"{result.steps[place]:,}" if share else "–"
            lines.append([label(name), warmup, f"{share:.3f}", step, f"{fall:.1f}"])
    rise = "Rise of the training loss between evaluations above its lowest, as a share of the way to a uniform guess; "
    return [f"{rise}seed 1 at {found.study.largest:,}. Above 0.125 it sags:", aligned(lines)]


def searches(found: Found) -> list[str]:
    lines = [["optimizer", "batch", "epochs", "accuracy of each learning rate on the 6,000 images"]]
    for name, batch, epochs, points in found.searches():
        rates = ", ".join(f"{rate:g}: {accuracy:.1f}" for rate, accuracy in points)
        lines.append([label(name), f"{batch:,}", f"{epochs}", rates])
    return ["The searches, of one seed:", aligned(lines)]
