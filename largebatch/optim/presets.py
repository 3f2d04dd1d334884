"""The published readings of LAMB, as parameter groups and options."""

import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Preset:
    """One published reading of LAMB; "excluded" are 1-D tensors, biases and parameters that the model names."""

    bias_correction: bool
    exclude: bool
    """exclude them from decay"""
    adapt_excluded: bool | None = None
    """give excluded parameters a trust ratio"""
    max_trust_ratio: float = math.inf
    decay: str = "coupled"
    caution: bool = False


PRESETS: dict[str, Preset] = {
    # arXiv:1904.00962 with the exclusions of its authors' code
    "paper": Preset(bias_correction=True, exclude=True, adapt_excluded=False),
    # the 32K run: everything decayed and adapted, no bias correction; its clip of 1.0 is the engine's
    "colossal": Preset(bias_correction=False, exclude=False),
    # NVIDIA's reading: parameters without decay are adapted, too; its clip of 1.0 is the engine's
    "nvlamb": Preset(bias_correction=True, exclude=True, adapt_excluded=True),
    # arXiv:2011.13584: as in the paper, with ratios of at most 1
    "lambc": Preset(bias_correction=True, exclude=True, adapt_excluded=False, max_trust_ratio=1.0),
    # as in the paper, but for the options that timm's LAMB has under these names
    "decoupled": Preset(bias_correction=True, exclude=True, adapt_excluded=False, decay="decoupled"),
    "corrected": Preset(bias_correction=True, exclude=True, adapt_excluded=False, decay="corrected"),
    "cautious": Preset(bias_correction=True, exclude=True, adapt_excluded=False, caution=True),
}


def owner(model: nn.Module, attribute: str) -> nn.Module:
    """Return the model, or the one inside of a wrapper, that has an attribute; the model if none has.

    Names of parameters are those in the model that has it. A wrapper, such as DistributedDataParallel or what
    torch.compile returns, has one module and no parameters of its own.
    """
    inner = model
    while not (attribute in vars(inner) or hasattr(type(inner), attribute)):  # wrappers may pass `hasattr` on
        modules = [*inner.children()]
        if len(modules) != 1 or any(True for _ in inner.parameters(recurse=False)):
            return model
        (inner,) = modules
    return inner


def layer_scales(model: nn.Module, layer_decay: float) -> dict[nn.Parameter, float]:
    """Return the factor of each parameter's learning rate: layer_decay to the number of layers above its own.

    The head has factor 1, and the factors are those of timm's `param_groups_layer_decay`. In the code of BEiT
    (arXiv:2106.08254) a ViT's last norm has the head's factor; here it has that of the last block. ValueError for a
    factor outside of (0, 1], or a model that does not tell its layers by `group_matcher`, as timm's do.
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay must be a number above 0 and at most 1, got {layer_decay}")
    model = owner(model, "group_matcher")
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise ValueError(
            f"layer_decay={layer_decay} needs a model that tells its layers by a method group_matcher, as models of "
            f"timm and of the zoo do; {type(model).__name__} has none"
        )
    from timm.models import group_parameters  # a model with that method has imported timm

    layers: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {p: layer_decay ** (last - layers[name]) for name, p in model.named_parameters()}


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    exclude: bool = True,
    adapt_excluded: bool | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return the parameter groups: decayed, and not decayed (1-D, biases, names in `model.no_weight_decay()`).

    With `exclude=False` there is only the first; `adapt_excluded` is the option `adapt` of the second. Frozen
    parameters stay in their group: without a gradient they get no state and no update, and unfreezing one does not
    renumber a saved state. With `layer_decay` each layer has these two groups, with its factor of the learning rate as
    the option `lr_scale`; the engine multiplies by it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"names choose the groups: give the model, not its parameters, got {type(model).__name__}")
    scales = None if layer_decay is None else layer_scales(model, layer_decay)
    model = owner(model, "no_weight_decay")
    names: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    groups: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
    for name, p in model.named_parameters():
        listed = any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
        out = exclude and (p.ndim <= 1 or name.endswith(".bias") or listed)
        groups[1.0 if scales is None else scales[p], out].append(p)
    return [
        {"params": params, "weight_decay": 0.0 if out else weight_decay}
        | ({"adapt": adapt_excluded} if out and adapt_excluded is not None else {})
        | ({} if scales is None else {"lr_scale": scale})
        for (scale, out), params in sorted(groups.items(), key=lambda item: item[0])
    ]


def options_of(
    preset: str, model: nn.Module, *, weight_decay: float, layer_decay: float | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the parameter groups and the options of `Lamb` under a preset; ValueError for an unknown one."""
    if preset not in PRESETS:
        raise ValueError(f"unknown LAMB preset {preset!r}; choose one of {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    groups = param_groups(
        model,
        weight_decay=weight_decay,
        exclude=chosen.exclude,
        adapt_excluded=chosen.adapt_excluded,
        layer_decay=layer_decay,
    )
    options = ("bias_correction", "max_trust_ratio", "decay", "caution")
    return groups, {name: getattr(chosen, name) for name in options}
