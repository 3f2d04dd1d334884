"""Published runs by name. A recipe is a function that returns a complete `TrainConfig`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from largebatch.config import TrainConfig, given_options, read_file, typed
from largebatch.config.values import with_value
from largebatch.files.run_folder import RunFolder
from largebatch.nearest import nearest
from largebatch.recipes import small_batch, user_file, volo
from largebatch.recipes.cifar import cifar10
from largebatch.recipes.hybrid import cifar10_hybrid, cifar10_pipeline, vit_6b16
from largebatch.recipes.quickstart import quickstart
from largebatch.recipes.sized import finetune, folder_of, scratch
from largebatch.recipes.vit import vit_b16, vit_b32, vit_l32, vit_s16

PRETRAINING = (volo.volo_d1, volo.volo_d2, volo.volo_d3, volo.volo_d4, volo.volo_d5)
FINE_TUNING = (
    volo.volo_d1_384, volo.volo_d2_384, volo.volo_d3_448, volo.volo_d4_448, volo.volo_d5_448, volo.volo_d5_512,
    small_batch.deit3_b16_224, small_batch.deit3_l16_224,
)  # fmt: skip
SMALL_BATCH = (
    small_batch.deit3_s16, small_batch.deit3_b16, small_batch.deit3_l16,
    small_batch.plain_s16_like, small_batch.plain_b16_like, small_batch.augreg_b32_like, small_batch.augreg_b16_like,
)  # fmt: skip
RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "quickstart": quickstart,
    "scratch": scratch,
    "finetune": finetune,
    "vit_s16": vit_s16,
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
    **{recipe.__name__: recipe for recipe in SMALL_BATCH + PRETRAINING + FINE_TUNING},
    **{f"{recipe.__name__}_lamb": partial(volo.large_batch, recipe) for recipe in PRETRAINING},
}


# The zoo's models, and timm's names for them at 224 px. The modules of both take seconds to import; a test compares.
MODELS = {
    "vit_b32": "vit_base_patch32_224",
    "vit_b16": "vit_base_patch16_224",
    "vit_l32": "vit_large_patch32_224",
    "vit_l16": "vit_large_patch16_224",
    "vit_s16": "vit_small_patch16_224",
    "deit3_s16": "deit3_small_patch16_224",
    "deit3_b16": "deit3_base_patch16_224",
    "deit3_l16": "deit3_large_patch16_224",
    "plain_s16": "",
    "plain_b16": "",
    "vit_6b16": "",
    "vit_ti16": "vit_tiny_patch16_224",
    "vit_nano32": "",
    "vit_nano7": "",
    **{f"volo_d{size}": f"volo_d{size}_224" for size in range(1, 6)},
    "volo_nano": "",
}
SIZED: dict[str, Callable[..., TrainConfig]] = {"scratch": scratch, "finetune": finetune}
MANY = 1_000_000  # images, from which the published recipes are taken: they were made for ImageNet's 1,281,167
WHOLE = {"model.name", "data.path", "optim.name", "schedule.name", "run.duration"}  # a file that has all is a config
OF_RUN = (
    "model.name", "model.img_size", "model.global_pool", "data.mean", "data.std", "data.crop_pct", "data.interpolation",
)  # fmt: skip


def choose(given: Mapping[str, Any], num_images: int | None = None, *, argv: Sequence[str] = ()) -> TrainConfig:
    """Return the recipe to train (`find`); ValueError also for a fine-tuning without weights to start from."""
    config = find(given, num_images, argv=argv)
    tunes = config.recipe == "finetune" or config.recipe in {recipe.__name__ for recipe in FINE_TUNING}
    if tunes and not given.get("model.weights"):
        raise ValueError(f"Recipe {config.recipe} is a fine-tuning: give the weights to start from with --init-from.")
    return config


def find(given: Mapping[str, Any], num_images: int | None = None, *, argv: Sequence[str] = ()) -> TrainConfig:
    """Return the recipe for the options that were given, by dotted name; the others are absent or None.

    Without a name and without data it is the quick start. With a million images or more it is the published recipe of
    the model, or with weights its fine-tuning for the image size; else finetune with weights and scratch without. The
    default model is that of the run whose weights are taken, or vit_b32. num_images: training images; None: unknown,
    and taken to be many. argv: the command line; a user's file is run only if it is named there, since a config may be
    somebody else's. ValueError for an unknown recipe or model.
    """
    name = given.get("recipe") or ""
    if user_file.is_one(name) and name in typed(argv, "recipe"):
        return user_file.load(name)
    if user_file.is_one(name) and not WHOLE <= given.keys():
        raise ValueError(f"A config names recipe {name}, which is code: to run it, give --recipe {name} as well.")
    run = run_of(given.get("model.weights"))
    model = given.get("model.name") or run.get("model.name") or "vit_b32"
    if not WHOLE <= given.keys():  # a run may have a model that a user's file has brought
        check_model(model)
    if name == "quickstart" or not name and _without_data(given):
        return quickstart(model, own_images=not _without_data(given))
    if not name:
        name = _by_size(given, model, num_images)
    if name in SIZED:
        config = SIZED[name](model, num_images or 0, batch_size=given.get("data.global_batch_size") or 0)
        return _like_run(config, run) if name == "finetune" else config
    if name not in RECIPES and WHOLE <= given.keys():  # the config of a run whose recipe is not there, or not to be run
        return TrainConfig(recipe=name)
    if name not in RECIPES:
        hint = nearest(name, RECIPES, cutoff=0.5, hint="{}? ")
        raise ValueError(
            f"There is no recipe {name!r}: {hint}--recipe takes {', '.join(RECIPES)}, or my.py:function for one of "
            "your own."
        )
    config = RECIPES[name]()
    if given.get("recipe") or not given.get("model.weights"):
        return config
    # A fine-tuning has one folder, which is opened before its images are counted.
    return replace(config, run=replace(config.run, folder=f"{folder_of(model)}_finetuned"))


def depends_on_data(argv: Sequence[str]) -> bool:
    given = given_options(argv)
    name = given.get("recipe") or ""
    model = given.get("model.name") or run_of(given.get("model.weights")).get("model.name") or "vit_b32"
    if name or _without_data(given):
        return name in SIZED
    return given["data.path"] != "synthetic" or model not in RECIPES  # synthetic images stand for ImageNet


def check_model(model: str) -> None:
    """Raise ValueError if the zoo has no such model; `zoo` checks those of timm."""
    if model in MODELS or model.startswith("timm/"):
        return
    base = model.rpartition("_")[0]
    ours = [name for name, theirs in MODELS.items() if base and theirs.rpartition("_")[0] == base]
    if ours:
        hint = f"did you mean {ours[0]}, or timm/{model}?"
    else:
        hint = nearest(model, MODELS, none=f"if it is timm's, give timm/{model}.")
    raise ValueError(f"There is no model {model!r}: {hint} --model takes {', '.join(MODELS)}, or timm/NAME.")


def _without_data(given: Mapping[str, Any]) -> bool:
    return given.get("data.path") in (None, "", "digits")


def _by_size(given: Mapping[str, Any], model: str, num_images: int | None) -> str:
    weights, finetuning = given.get("model.weights"), f"{model}_{given.get('model.img_size')}"
    published = finetuning if weights and finetuning in RECIPES else model
    many = num_images is None or num_images >= MANY or given.get("data.path") == "synthetic"
    if published in RECIPES and many:
        return published
    return "finetune" if weights else "scratch"


def run_of(weights: str | None) -> dict[str, Any]:
    """Return the options of the run to which a folder or weights file belongs; empty if it belongs to none."""
    file = RunFolder.of(weights or "").config
    return read_file(str(file)) if weights and file.is_file() else {}


def _like_run(config: TrainConfig, run: Mapping[str, Any]) -> TrainConfig:
    for name in OF_RUN:
        if name in run and run[name] != "random":  # of training images alone
            config = with_value(config, name, run[name])
    return config
