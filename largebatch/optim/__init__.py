"""Optimizers for large batches."""

from largebatch.optim.factory import (
    adapted_ratios,
    build_optimizer,
    clip_gradients,
    follow_half_life,
    gradient_norm,
    init_state,
    scale_gradients,
    trust_summary,
)
from largebatch.optim.lamb import Lamb, can_compile
from largebatch.optim.lars import Lars
from largebatch.optim.look_sam import LookSam
from largebatch.optim.muon import Muon
from largebatch.optim.presets import PRESETS, Preset, param_groups

__all__ = [
    "Lamb", "Lars", "LookSam", "Muon", "PRESETS", "Preset", "adapted_ratios", "build_optimizer", "can_compile",
    "clip_gradients", "follow_half_life", "gradient_norm", "init_state", "param_groups", "scale_gradients",
    "trust_summary",
]  # fmt: skip
