"""The learning rates that are tried: a coarse grid, then single rates around the best so far, as many for everyone.

The grid has steps of a factor SPACING around the contender's usual rate. If the best rate is the lowest or the highest,
the next one lies beyond it. Otherwise it halves, on a logarithmic scale, the wider of the two gaps beside the best; of
equal gaps, that towards the better neighbour. So no optimizer loses because the grid lies elsewhere.
"""

import math
from collections.abc import Mapping

SPACING = 4.0
Score = tuple[float, float]  # the higher, the better


def grid(middle: float, budget: int) -> list[float]:
    """Return the first rates, in rising order: half of the budget, but both of two."""
    count = max(min(budget, 2), (budget + 1) // 2)
    return [rounded(middle * SPACING ** (number - (count - 1) / 2)) for number in range(count)]


def tried_rates(middle: float, budget: int, scores: Mapping[float, Score]) -> list[float]:
    """Return the rates in their order, up to those that have no score yet."""
    tried = grid(middle, budget)
    while len(tried) < budget and all(rate in scores for rate in tried):
        tried.append(refined({rate: scores[rate] for rate in tried}))
    return tried


def best_rate(scores: Mapping[float, Score]) -> float:
    """Return the rate with the best score, of equal ones the lowest rate."""
    return max(sorted(scores), key=lambda rate: scores[rate])


def refined(scores: Mapping[float, Score]) -> float:
    rates, best = sorted(scores), best_rate(scores)
    place = rates.index(best)
    if place == 0:
        return rounded(best / SPACING)
    if place == len(rates) - 1:
        return rounded(best * SPACING)
    # A width is rounded, because rates are: two gaps of the same number of steps are equally wide.
    beside = [rates[place - 1], rates[place + 1]]
    wider = max(beside, key=lambda rate: (round(abs(math.log(rate / best)), 1), scores[rate]))
    return rounded(math.sqrt(best * wider))


def rounded(rate: float) -> float:
    return float(f"{rate:.3g}")
