"""The published readings of LAMB, as parameter groups and options."""

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Preset:
    """One published reading of LAMB. 1-D tensors, biases and the parameters that the model names may be excluded."""

    bias_correction: bool
    exclude: bool
    """exclude them from decay"""
    adapt_excluded: bool | None = None
    """give excluded parameters a trust ratio"""
    max_trust_ratio: float = math.inf


PRESETS: dict[str, Preset] = {
    # arXiv:1904.00962 with the exclusions of its authors' code
    "paper": Preset(bias_correction=True, exclude=True, adapt_excluded=False),
    # the 32K run: everything decayed and adapted, no bias correction; its clip of 1.0 is the engine's
    "colossal": Preset(bias_correction=False, exclude=False),
    # NVIDIA's reading: parameters without decay are adapted, too; its clip of 1.0 is the engine's
    "nvlamb": Preset(bias_correction=True, exclude=True, adapt_excluded=True),
    # arXiv:2011.13584: as in the paper, with ratios of at most 1
    "lambc": Preset(bias_correction=True, exclude=True, adapt_excluded=False, max_trust_ratio=1.0),
}


def param_groups(
    model: nn.Module, *, weight_decay: float, exclude: bool = True, adapt_excluded: bool | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups: decayed, and not decayed (1-D, biases, names in `model.no_weight_decay()`).

    With `exclude=False` there is only the first group; `adapt_excluded` is the option `adapt` of the second, for Lamb
    and Lars. Frozen parameters stay in their group: without a gradient they get no state and no update, and unfreezing
    one does not renumber a saved state.
    """
    names: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    decayed: dict[str, Any] = {"params": [], "weight_decay": weight_decay}
    excluded: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    if adapt_excluded is not None:
        excluded["adapt"] = adapt_excluded
    for name, p in model.named_parameters():
        listed = any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
        out = exclude and (p.ndim <= 1 or name.endswith(".bias") or listed)
        (excluded if out else decayed)["params"].append(p)
    return [group for group in (decayed, excluded) if group["params"]]


def options_of(
    preset: str, model: nn.Module, *, weight_decay: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the parameter groups and the options of `Lamb` under a preset; ValueError for an unknown one."""
    if preset not in PRESETS:
        raise ValueError(f"unknown LAMB preset {preset!r}; choose one of {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    groups = param_groups(
        model, weight_decay=weight_decay, exclude=chosen.exclude, adapt_excluded=chosen.adapt_excluded
    )
    return groups, {"bias_correction": chosen.bias_correction, "max_trust_ratio": chosen.max_trust_ratio}
