"""The search for a learning rate: its ramp, its end, and its suggestion, for curves that are known."""

import csv
import math

import pytest

from largebatch import rate_search
from largebatch.config import DataConfig, OptimConfig, RunConfig, ScheduleConfig, TrainConfig


def falling(at: float, *, until: float = math.inf) -> list[float]:
    """From 2.3 down by 2, fastest at the rate `at`; from `until` on it explodes."""
    rates = map(rate_search.rate, range(rate_search.STEPS))
    return [2.3 - 2 / (1 + (at / rate) ** 2) + (rate / until) ** 4 for rate in rates]


def test_the_rate_grows_by_a_constant_factor():
    rates = [rate_search.rate(step) for step in range(rate_search.STEPS)]
    assert rates[0] == rate_search.LOWEST and rates[-1] == pytest.approx(rate_search.HIGHEST)
    factors = [later / rate for rate, later in zip(rates, rates[1:])]
    assert factors == pytest.approx([1e6 ** (1 / 199)] * 199)


def test_the_smoothed_loss_is_a_weighted_mean():
    losses = [3.0, 1.0, 2.0, 5.0]
    for number, found in enumerate(rate_search.smoothed(losses), 1):
        weights = [rate_search.DECAY ** (number - 1 - k) for k in range(number)]
        expected = sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("at", [1e-3, 0.03, 0.5])
def test_the_suggestion_is_between_the_steepest_fall_and_the_lowest_loss(at):
    """Halfway on a logarithmic scale; a step is a factor of 1.07, and smoothing moves the lowest point a little."""
    rates, losses = [rate_search.rate(step) for step in range(rate_search.STEPS)], falling(at, until=10 * at)
    lowest = rates[losses.index(min(losses))]
    assert 1.5 * at < lowest < 8 * at
    assert rate_search.suggest(rates, losses) == pytest.approx(math.sqrt(at * lowest), rel=0.2)


def test_the_line_through_losses_on_a_line_is_that_line():
    rates = [rate_search.rate(step) for step in range(rate_search.STEPS)]
    losses = [3.0 - 0.25 * math.log10(rate) for rate in rates]
    height, slope = rate_search.fit_lines(rates, losses)
    assert slope == pytest.approx([-0.25] * len(rates)) and height[20:-20] == pytest.approx(losses[20:-20], rel=0.02)


def test_a_loss_that_hardly_falls_has_no_suggestion():
    rates = [rate_search.rate(step) for step in range(rate_search.STEPS)]
    for losses in ([2.3] * 200, [2.3 + 0.01 * step for step in range(200)], [2.3 - 1e-4 * step for step in range(200)]):
        assert rate_search.suggest(rates, losses) is None
    assert rate_search.suggest([], []) is None


def test_the_search_ends_when_the_loss_explodes_and_not_before():
    losses, ended = falling(0.03, until=0.3), []
    for step in range(1, len(losses) + 1):
        ended.append(rate_search.has_diverged(losses[:step]))
    first = ended.index(True)
    assert losses[first] > 2.3 > max(losses[60 : first - 12]) and rate_search.rate(first) < 1.0
    assert rate_search.has_diverged([2.3, math.nan]) and not rate_search.has_diverged([2.3, 2.4, 2.5, 2.2])


def test_the_suggestion_is_that_of_the_option(tmp_path, caplog):
    """With schedule.scaling the option is the rate of the reference batch: the rate found is 4 times that."""
    caplog.set_level("INFO")
    rates, losses = [rate_search.rate(step) for step in range(rate_search.STEPS)], falling(0.03)
    config = TrainConfig(
        data=DataConfig(global_batch_size=8192), run=RunConfig(folder=str(tmp_path)), optim=OptimConfig(lr=7.0),
        schedule=ScheduleConfig(scaling="sqrt", reference_batch_size=512),
    )  # fmt: skip
    rate_search.tell(config, rates, losses)
    found = rate_search.suggest(rates, losses)
    assert f"lamb at a global batch of 8192: the suggestion is --optim.lr {found / 4:.2g};" in caplog.text
    with open(tmp_path / "find_lr.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == pytest.approx(losses, rel=1e-8)
    assert (tmp_path / "find_lr.png").stat().st_size > 10_000
    rate_search.tell(config, rates, [2.3] * len(rates))
    assert "no learning rate can be suggested: the loss never fell" in caplog.text
