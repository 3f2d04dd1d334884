"""The state of torch's own optimizers before their first step, which would create it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def adam_state(p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state of Adam and AdamW for a parameter of a group."""
    on_device = group["capturable"] or group["fused"]  # otherwise torch keeps the step counter on the host
    state = {"step": torch.zeros((), device=p.device if on_device else "cpu")}
    names = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())
    return state | {name: torch.zeros_like(p) for name in names}


def momentum_state(p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the momentum of SGD for a parameter of a group; ValueError for dampening."""
    if group["dampening"]:  # torch does not dampen the first gradient, which no initial buffer can express
        raise ValueError(f"SGD with dampening={group['dampening']} has no initial state; set dampening to 0")
    return torch.zeros_like(p)
