"""Any image classifier of timm, by the name timm/NAME, such as timm/resnet50 or timm/vit_base_patch16_224.augreg_in1k.

timm builds the model, so weights, names and logits are timm's; also one of the user's that timm's `register_model` has
made known. Nothing is downloaded. The published weights decide how images are prepared; a tag behind the dot chooses
one of several.
"""

import difflib
import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

import timm
import torch
from timm.models import PretrainedCfg
from torch import Tensor, nn

logger = logging.getLogger(__name__)

PREFIX = "timm/"
TIMM = "timm_name"  # the attribute by which these models are known
FILTERS = ("bilinear", "bicubic")


def build_timm(
    name: str,
    *,
    img_size: int,
    num_classes: int,
    drop_rate: float,
    pos_drop_rate: float,
    proj_drop_rate: float,
    attn_drop_rate: float,
    drop_path_rate: float,
) -> nn.Module:
    """Build the model `name`, which begins with timm/: images (B, 3, img_size, img_size) -> logits (B, num_classes).

    On device "meta" the model is tried as well. ValueError for an unknown name, or a rate or size that does not fit.
    """
    _check_name(name)
    rates = {
        "drop_rate": drop_rate,
        "pos_drop_rate": pos_drop_rate,
        "proj_drop_rate": proj_drop_rate,
        "attn_drop_rate": attn_drop_rate,
        "drop_path_rate": drop_path_rate,
    }
    options: dict[str, Any] = {"num_classes": num_classes} | {rate: value for rate, value in rates.items() if value}
    try:
        model = _create(name, options | {"img_size": img_size})
        if model is None:  # a network that takes any size has no such option
            model = _create(name, options)
        assert model is not None
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(_unfit(name, img_size, error)) from error
    own = PretrainedCfg().to_dict(remove_null=False) | dict(getattr(model, "pretrained_cfg", None) or {})
    if not hasattr(model, "num_classes"):  # nor has it a pretrained_cfg: a model of the user, by `register_model`
        model.num_classes = num_classes  # type: ignore[assignment]
    if own["input_size"][0] != 3:
        raise ValueError(f"{name} takes images of {own['input_size'][0]} channels, expected a model for 3: RGB")
    prepared: Any = own | {"input_size": (3, img_size, img_size), "num_classes": num_classes}
    if own["interpolation"] not in FILTERS:
        prepared["interpolation"] = "bicubic"
    model.default_cfg = model.pretrained_cfg = prepared
    setattr(model, TIMM, name)
    if own.get("crop_mode", "center") != "center":
        logger.warning("%s: timm prepares its images by %s, and here the centre is cut out", name, own["crop_mode"])
    if next(model.parameters()).is_meta:
        _try(model, name, img_size=img_size, num_classes=num_classes, native=own["input_size"][-1])
    return model


def _check_name(name: str) -> None:
    architecture = name.removeprefix(PREFIX)
    bare, _, tag = architecture.partition(".")
    names = timm.list_models()
    if tag and bare in names:
        names = timm.list_models(f"{bare}.*", pretrained=True)
    if architecture in names:
        return
    close = difflib.get_close_matches(architecture, names, n=3)
    hint = f"did you mean {' or '.join(PREFIX + other for other in close)}? " if close else ""
    raise ValueError(
        f"there is no model {name!r}: {hint}timm.list_models() has them all; one of your own is there when the file "
        "that registers it has run, as --recipe FILE.py:FUNCTION runs it"
    )


def _create(name: str, options: Mapping[str, Any]) -> nn.Module | None:
    """Let timm build a model; None if it has no option img_size, ValueError if it lacks a rate."""
    try:
        return timm.create_model(name.removeprefix(PREFIX), **options)
    except TypeError as error:
        unknown = re.search(r"(?:unexpected|multiple values for) keyword argument(?:\(s\):)? \[?'(\w+)'", str(error))
        if unknown and unknown[1] == "img_size":
            return None
        if unknown and unknown[1] in options:
            option = unknown[1]
            raise ValueError(f"{option} of {name} is {options[option]!r}, and {name} has no use for it: leave it out")
        raise


def _try(model: nn.Module, name: str, *, img_size: int, num_classes: int, native: int) -> None:
    """Compute the shape of the logits of two images, without memory; ValueError if they are not (2, num_classes)."""
    images = torch.empty(2, 3, img_size, img_size, device="meta")
    for training in (False, True):
        try:
            logits = model.train(training)(images)
        except NotImplementedError:  # an operation that torch does not have without memory
            return
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ValueError(_unfit(name, img_size, error, native)) from error
        if not isinstance(logits, Tensor) or logits.shape != (2, num_classes):
            raise ValueError(f"{name} is no image classifier: expected logits of {num_classes} classes")


def _unfit(name: str, img_size: int, error: Exception, native: int = 0) -> str:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    made_for = f"; it was made for {native}" if native else ""
    return f"img_size {img_size} does not fit {name}: {reason}{made_for}"


def as_timm_reads(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename weights of the authors, and resize those that depend on the image size, as timm does it for the model.

    Weights that timm cannot change stay as they are: the caller compares names and shapes.
    """
    convert = getattr(sys.modules.get(type(model).__module__), "checkpoint_filter_fn", None)
    try:
        return convert(dict(weights), model) if convert else weights
    except (RuntimeError, AssertionError, KeyError, AttributeError, ValueError, IndexError):
        return weights
