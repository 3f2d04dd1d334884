"""Published runs by name. A recipe is a function that returns a complete `TrainConfig`.

    quickstart  any model on handwritten digits, in minutes on two CPU cores
    vit         ViT-B/32, B/16 and L/32 on ImageNet with LAMB at batch 32,768
    cifar       ViT-B/16 on CIFAR-10 with LAMB
    hybrid      ranks that share a model: ViT-B/16 on CIFAR-10, and a ViT of 6.45 billion parameters
    volo        VOLO-D1 to D5 on ImageNet with token labels, and their fine-tunings
"""

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from largebatch.config import TrainConfig
from largebatch.recipes import volo
from largebatch.recipes.cifar import cifar10
from largebatch.recipes.hybrid import cifar10_hybrid, cifar10_pipeline, vit_6b16
from largebatch.recipes.quickstart import quickstart
from largebatch.recipes.vit import vit_b16, vit_b32, vit_l32

PRETRAINING = (volo.volo_d1, volo.volo_d2, volo.volo_d3, volo.volo_d4, volo.volo_d5)
FINE_TUNING = (
    volo.volo_d1_384, volo.volo_d2_384, volo.volo_d3_448, volo.volo_d4_448, volo.volo_d5_448, volo.volo_d5_512,
)  # fmt: skip
RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "quickstart": quickstart,
    "vit_b32": vit_b32,
    "vit_b16": vit_b16,
    "vit_l32": vit_l32,
    "cifar10": cifar10,
    "cifar10_pipeline": cifar10_pipeline,
    "cifar10_hybrid": cifar10_hybrid,
    "vit_6b16_1d": partial(vit_6b16, "1d", size=4, stages=16, global_batch_size=4096),
    "vit_6b16_2d": partial(vit_6b16, "2d", size=4, stages=16, global_batch_size=8192),
    "vit_6b16_2.5d": partial(vit_6b16, "2.5d", size=4, stages=16, global_batch_size=7168),
    "vit_6b16_3d": partial(vit_6b16, "3d", size=8, stages=8, global_batch_size=1536),
    "volo_d5_as_run": volo.volo_d5_as_run,
    **{recipe.__name__: recipe for recipe in PRETRAINING + FINE_TUNING},
    **{f"{recipe.__name__}_lamb": partial(volo.large_batch, recipe) for recipe in PRETRAINING},
}


def choose(given: Mapping[str, Any]) -> TrainConfig:
    """The recipe to train, as `find` has it; ValueError also for a fine-tuning without weights to start from."""
    config = find(given)
    if config.recipe in {recipe.__name__ for recipe in FINE_TUNING} and not given.get("model.weights"):
        raise ValueError(f"Recipe {config.recipe} is a fine-tuning: give the weights to start from with --init-from.")
    return config


def find(given: Mapping[str, Any]) -> TrainConfig:
    """The recipe for the options that were given, by dotted name; the others are absent or None.

    A recipe that was named is taken. Without data it is the quick start, and with data the published recipe of the
    model: its fine-tuning for the image size, if there is one and there are weights to start from. The model is vit_b32
    if none was given. ValueError for an unknown recipe and for a model without a published one.
    """
    model, weights = given.get("model.name") or "vit_b32", given.get("model.weights")
    without_data = given.get("data.path") in (None, "", "digits")
    if given.get("recipe") == "quickstart" or (without_data and not given.get("recipe")):
        return quickstart(model)
    finetuning = f"{model}_{given.get('model.img_size')}"
    name = given.get("recipe") or (finetuning if weights and finetuning in RECIPES else model)
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"There is no recipe {name!r}: {hint}--recipe takes {', '.join(RECIPES)}.")
    return RECIPES[name]()
