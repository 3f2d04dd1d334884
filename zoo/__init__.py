"""Models and their weights, usable from any plain script: torch and timm, and nothing else.

    from zoo import create_model
    model = create_model(weights="runs/quickstart")
    model = create_model("vit_b32", img_size=384, num_classes=10, weights="vit_b32.safetensors")

A model is timm's, or has timm's interface (model.py). The dict `MODELS` lists all models; nothing registers itself.
`zoo._torchvision` must be imported before timm.
"""

import difflib
import fnmatch
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import zoo._torchvision  # noqa: F401
from zoo import hub, timm_models, vit, volo
from zoo.model import ZooModel
from zoo.norm import norms_in_float32
from zoo.vit import set_fused_attn
from zoo.weights import check_description, listed, load_weights, named_weights, save_weights, write_weights

logger = logging.getLogger(__name__)

__all__ = [
    "MODELS", "create_model", "list_models", "load_weights", "named_weights", "save_weights", "set_fused_attn",
    "write_weights",
]  # fmt: skip

MODELS: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(vit.build_vit, name) for name in vit.STRUCTURES},
    **{name: partial(volo.build_volo, name) for name in volo.STRUCTURES},
}


def list_models(pattern: str = "*") -> list[str]:
    """List the zoo's models that match a pattern, such as "volo*"."""
    return fnmatch.filter(MODELS, pattern)


def create_model(
    name: str = "",
    *,
    img_size: int | None = None,
    num_classes: int | None = None,
    weights: str | Path | hub.Found | None = None,
    label_names: Sequence[str] = (),
    drop_rate: float = 0.0,
    pos_drop_rate: float = 0.0,
    proj_drop_rate: float = 0.0,
    attn_drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    global_pool: str = "",
    weight_init: str = "",
    grad_checkpointing: bool = False,
) -> nn.Module:
    """Build a model of the zoo: images (B, 3, img_size, img_size) -> logits (B, num_classes).

    Args:
        name: the zoo's or timm's name, or timm/NAME for any classifier of timm. With weights it may be left out.
        weights: a .safetensors, .pt, .pth, .bin or .ckpt file, also of another image size or number of classes (see
            `load_weights`); a run, a checkpoint or an exported folder; "hf-hub:OWNER/NAME", "local-dir:FOLDER", or
            timm's name of published weights; or a result of `hub.read`. Unless it is a file and there is a
            name, all that is not given is as in the weights: image size, classes and their names
            (`default_cfg["label_names"]`), crop, mean and standard deviation. Without weights the model has
            224 pixels and 1000 classes, and is initialised from torch's global random state.
        label_names: the names of the classes. If the weights know theirs, too, a head for others is made anew, and the
            rows of one for the same are brought into this order.
        drop_rate, pos_drop_rate, ...: timm's rates. drop_rate is before the head only; dropout as in the ViT paper,
            after the position embedding, the projections and the MLP, is pos_drop_rate and proj_drop_rate.
        global_pool: "avg" for a ViT whose head acts on the mean of its tokens, as in timm; "": the class token.
        weight_init: "jax" for timm's initialisation of that name of a ViT, with a head of zeros; "": the usual one.
        grad_checkpointing: keep only the blocks' inputs for the backward pass and compute the rest again, with the
            same random draws; `set_grad_checkpointing` of the model switches it later.

    Raises ValueError for an unknown name, a size that the model cannot take, a rate outside [0, 1), an option that the
    model does not use, and weights that do not fit.
    """
    found = weights if isinstance(weights, hub.Found) else None
    if weights is not None and not found and (not name or hub.is_reference(cast(str | Path, weights))):
        found = hub.read(cast(str | Path, weights))
    if found:
        if found.cfg:  # config.json, and not the tensors
            _check_found(found)
        name, weights, global_pool = name or found.name, found.weights, global_pool or found.global_pool
    name, usual_size = (hub.zoo_name(name) if name not in MODELS else None) or (name, 224)
    img_size = img_size if img_size is not None else found.img_size if found else usual_size
    num_classes = num_classes if num_classes is not None else found.num_classes if found else 1000
    build = _builder(name)
    rates = {
        "drop_rate": drop_rate,
        "pos_drop_rate": pos_drop_rate,
        "proj_drop_rate": proj_drop_rate,
        "attn_drop_rate": attn_drop_rate,
        "drop_path_rate": drop_path_rate,
    }
    for option, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{option} of {name} is {rate}, expected a rate from 0 up to, not including, 1")
    if label_names and len(label_names) != num_classes:
        raise ValueError(f"label_names of {name} are {len(label_names)}, expected one for each class: {num_classes}")
    if num_classes < 0:
        raise ValueError(f"num_classes of {name} is {num_classes}, expected 1 or more, or 0 for features")
    options: dict[str, Any] = rates | {"global_pool": global_pool, "weight_init": weight_init}
    model = norms_in_float32(build(img_size=img_size, num_classes=num_classes, **_used(name, build, options)))
    if grad_checkpointing:
        try:
            cast(ZooModel, model).set_grad_checkpointing()
        except (AssertionError, AttributeError):
            raise ValueError(f"grad_checkpointing of {name} is true, and {name} cannot do it: leave it out") from None
    if weights is not None:
        assert not isinstance(weights, hub.Found)
        theirs = found.cfg.get("label_names", ()) if found else hub.label_names(weights)
        content = found.tensors if found else None
        new = load_weights(model, weights, rows=hub.head_rows(theirs, label_names), content=content)
        count = f"{len(model.state_dict()) - len(new)} of the model's {len(model.state_dict())} tensors"
        logger.info("%s: %s are as in this file%s", weights, count, f", not {listed(new)}" if new else "")
    known = _fitting(found, img_size=img_size, num_classes=num_classes) if found else {}
    cast(Any, model).default_cfg.update(known | ({"label_names": tuple(label_names)} if label_names else {}))
    return model


def _builder(name: str) -> Callable[..., nn.Module]:
    if not name:
        raise ValueError(f"there is no model's name, and there are no weights: the zoo has {', '.join(MODELS)}")
    if name.startswith(timm_models.PREFIX):
        return partial(timm_models.build_timm, name)
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"there is no model {name!r}: {hint}the zoo has {', '.join(MODELS)}, and timm/NAME")
    return MODELS[name]


def _check_found(found: hub.Found) -> None:
    """Raise ValueError if config.json contradicts the weights beside it, before memory is taken for what it says."""
    size, classes = found.img_size, found.num_classes
    with torch.device("meta"):
        model = create_model(found.name, img_size=size, num_classes=classes, global_pool=found.global_pool)
    told = f"{found.weights.with_name(hub.CONFIG)} says img_size {size} and num_classes {classes}"
    check_description(model, found.weights, found.tensors, told)


def _fitting(found: hub.Found, *, img_size: int, num_classes: int) -> dict[str, Any]:
    """Return the facts about the weights that hold for this image size and these classes, too."""
    other = {"crop_pct"} if img_size != found.img_size else set()
    other |= {"label_names"} if num_classes != found.num_classes else set()
    return {key: value for key, value in found.cfg.items() if key not in other}


def _used(name: str, build: Callable[..., nn.Module], options: dict[str, Any]) -> dict[str, Any]:
    """The options that a model's builder takes; ValueError if another one is set."""
    takes = inspect.signature(build).parameters
    for option, value in options.items():
        if option not in takes and value:
            raise ValueError(f"{option} of {name} is {value!r}, and {name} has no use for it: leave it out")
    return {option: value for option, value in options.items() if option in takes}
