"""Published runs by name. A recipe is a function that returns a complete `TrainConfig`."""

import difflib
from collections.abc import Callable

from largebatch.config import TrainConfig
from largebatch.recipes.quickstart import quickstart
from largebatch.recipes.vit import vit_b16, vit_b32, vit_l32

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "quickstart": quickstart,
    "vit_b32": vit_b32,
    "vit_b16": vit_b16,
    "vit_l32": vit_l32,
}


def choose(recipe: str, model: str, data: str) -> TrainConfig:
    """The recipe that was named, or else the model's published one with data and its quickstart without.

    Empty texts mean that nothing was said; the model is then vit_b32. ValueError for an unknown recipe, and for a model
    without a published one.
    """
    if not recipe and data in ("", "digits"):
        return quickstart(model or "vit_b32")
    name = recipe or model or "vit_b32"
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"There is no recipe {name!r}: {hint}--recipe takes {', '.join(RECIPES)}.")
    return RECIPES[name]()
