"""Optimizers for large batches: ours, torch's beside them, and how a run builds one."""

from largebatch.optim.factory import (
    PRESETS,
    Preset,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    init_state,
    param_groups,
    scale_gradients,
    trust_summary,
)
from largebatch.optim.lamb import Lamb, can_compile
from largebatch.optim.lars import Lars

__all__ = [
    "PRESETS",
    "Lamb",
    "Lars",
    "Preset",
    "build_optimizer",
    "can_compile",
    "clip_gradients",
    "gradient_norm",
    "init_state",
    "param_groups",
    "scale_gradients",
    "trust_summary",
]
