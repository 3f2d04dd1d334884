"""The rule that tells a loss that sags from one that diverges, on recorded curves (tests/curves/README.md).

What all ranks do then is in tests/mpi/ranks/test_rollback.py.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from largebatch.config import AugmentConfig, LossConfig, ModelConfig, TrainConfig
from largebatch.engine import Smoothed
from largebatch.hooks.divergence import DIVERGED, SAGS, SOUND, share_of_way, smooth, uniform_loss, window

CURVES = Path(__file__).with_name("curves")
DIGITS, IMAGENET = math.log(10), math.log(1000)
# The largest share of the way back, rounded, of the runs that came back or never lost anything.
HEALTHY = {
    "sgd_0.1": 0.03,
    "adamw_0.003": 0.01,
    "lamb_0.03": 0.02,
    "adamw_0.05": 0.06,
    "lamb_0.05_mixup": 0.20,
    "adamw_0.3": 0.53,
    "lamb_0.1": 0.56,
    "adamw_0.1_without_warmup": 0.59,
    "sgd_1": 0.72,
}
# The step at which the rule finds those that did not.
DIVERGING = {"lamb_0.3": 255, "lamb_3": 78, "sgd_3": 173, "adamw_3": 160}
EPOCH = 39.1  # steps at 32,768


def recorded(name: str) -> list[float]:
    with open(CURVES / f"{name}.csv", newline="") as file:
        return [float(row["loss"] or math.nan) for row in csv.DictReader(file)]


def published() -> np.ndarray:
    """The loss of each of the 11,730 steps of ViT-B/16 at 32,768: constructed from what its picture shows."""
    with open(CURVES / "published_vit_b16_at_32768.csv", newline="") as file:
        epochs, losses = zip(*((float(row["epoch"]), float(row["loss"])) for row in csv.DictReader(file)))
    steps = np.arange(11_730)
    return np.interp(steps / EPOCH, epochs, losses) + np.random.default_rng(0).normal(0, 0.1, len(steps))


def shares(losses: Sequence[float] | np.ndarray, uniform: float) -> list[float]:
    """The share of the way back after each loss, as the hook computes it: skipped steps do not count."""
    state: Smoothed | None = None
    found = []
    for step, loss in enumerate(losses, 1):
        if math.isfinite(loss):
            state = smooth(state, float(loss), step, steps=window(len(losses)), uniform=uniform)
        found.append(share_of_way(state, uniform))
    return found


def first_above(values: Iterable[float], limit: float) -> int | None:
    """The number, from 1, of the first value above a limit."""
    return next((number for number, value in enumerate(values, 1) if value > limit), None)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_run_that_comes_back_goes_on(name):
    assert round(max(shares(recorded(name), DIGITS)), 2) == HEALTHY[name] < DIVERGED


@pytest.mark.parametrize("name", DIVERGING)
def test_a_run_that_never_comes_back_is_found(name):
    assert first_above(shares(recorded(name), DIGITS), DIVERGED) == DIVERGING[name]


def test_each_recording_is_of_one_kind():
    names = {path.stem for path in CURVES.glob("*.csv")} - {"published_vit_b16_at_32768"}
    assert names == {*HEALTHY, *DIVERGING} and len(names) >= 10


def test_the_published_32k_curve_sags_and_goes_on():
    found = shares(published(), IMAGENET)
    assert 0.14 < max(found) < 0.16
    assert 120 < first_above(found, SAGS) / EPOCH < 150  # near the end of the warm-up, whose top is epoch 150


def test_the_published_curve_if_it_had_not_come_back_is_found_within_six_epochs():
    """Constructed: at the top of its warm-up the loss rises to a uniform guess within an epoch, and stays there."""
    losses, top = published(), round(150 * EPOCH)
    losses[top:] = np.minimum(losses[top] + np.arange(len(losses) - top) / EPOCH * 4, IMAGENET)
    found = shares(losses, IMAGENET)
    assert top < first_above(found, DIVERGED) < top + 6 * EPOCH
    assert max(found[:top]) < 0.2


def test_a_warmup_that_learns_nothing_yet_is_no_divergence():
    """Constructed: the loss stays around a uniform guess, above it at first, as with a head that is not zero."""
    steps = np.arange(5000)
    losses = IMAGENET + 0.3 * np.exp(-steps / 500) + np.random.default_rng(0).normal(0, 0.1, len(steps))
    assert max(shares(losses, IMAGENET)) < SAGS


@pytest.mark.parametrize("height", [7.0, 1e6, 1e300])
def test_spikes_that_pass_are_no_divergence_however_high(height):
    """Constructed: of 150 losses in a row, 120 are as high as that; the window has 117 steps."""
    losses = published()
    losses[8000:8080] = losses[8110:8150] = height
    assert SAGS < max(shares(losses, IMAGENET)) < DIVERGED


def test_the_formulas():
    """A window of 25; the loss of 9 counts as 2.0 + 2.3 / 3, the least way; then the way is that to a uniform guess."""
    state = smooth(None, 2.0, 1, steps=25, uniform=2.3)
    assert state == (2.0, 2.0, 1)
    state = smooth(state, 9.0, 2, steps=25, uniform=2.3)
    assert state == pytest.approx((2.0 + 2.3 / 75, 2.0, 1))
    assert share_of_way(state, 2.3) == pytest.approx(1 / 25) and 1 / 25 > SOUND
    state = smooth((0.5, 0.5, 7), 1.4, 8, steps=100, uniform=2.3)  # 0.009 of 1.8 is sound
    assert state == pytest.approx((0.509, 0.5, 8)) and share_of_way(state, 2.3) == pytest.approx(0.005)
    assert smooth(state, 0.3, 9, steps=100, uniform=2.3) == pytest.approx((0.50691, 0.5, 9))
    assert (window(57), window(11_730), window(375_300)) == (25, 117, 3753)


def test_a_uniform_guess_of_token_logits_weighs_as_the_loss_does():
    model = ModelConfig(num_classes=1000)
    assert uniform_loss(TrainConfig(model=model)) == pytest.approx(6.9078, abs=1e-4)
    single = uniform_loss(TrainConfig(model=ModelConfig(num_classes=1)))  # whose loss is always 0
    assert max(shares([0.0, 0.0, 0.0], single)) == 0
    assert uniform_loss(TrainConfig(model=model, loss=LossConfig(dense_weight=0.5))) == pytest.approx(1.5 * IMAGENET)


@pytest.mark.parametrize("classes, mixup, ones", [(1000, 0.0, 1), (1000, 0.8, 2), (2, 0.8, 2)])
def test_a_uniform_guess_of_a_binary_loss_is_the_best_constant_one(classes, mixup, ones):
    config = TrainConfig(
        model=ModelConfig(num_classes=classes), loss=LossConfig(name="bce"), augment=AugmentConfig(mixup_alpha=mixup)
    )
    guesses = [n / 20_000 for n in range(1, 10_001)]
    losses = [-(ones * math.log(p) + (classes - ones) * math.log(1 - p)) / classes for p in guesses]
    assert uniform_loss(config) == pytest.approx(min(losses) if classes > 2 else math.log(2), rel=1e-9)
