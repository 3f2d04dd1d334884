"""Optimizers for large batches.

    factory        builds the optimizer of a run, ours or torch's; clips gradients; sets initial states
    presets        the published readings of LAMB, as parameter groups and options
    lamb           LAMB: formulas, implementations and the optimizer
    lamb_triton    LAMB on a GPU in three launches
    fused_check    whether these give the numbers of LAMB's specification on a device
    weight_copies  weights in bfloat16, which LAMB's kernels write and the next passes read
    triton_check   a kernel that shows whether Triton can compile for a GPU here
    lars           LARS
    look_sam       Look-LayerSAM, over any of them
    muon           torch's Muon for matrices, with AdamW or LAMB for the rest
    states         states before the first step, and before they are loaded
    apex_lamb      NVIDIA's FusedLAMB made safe for Horovod
"""

from largebatch.optim.factory import (
    adapted_ratios,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    init_state,
    scale_gradients,
    trust_summary,
)
from largebatch.optim.fused_check import why_not_fused
from largebatch.optim.lamb import Lamb, can_compile
from largebatch.optim.lars import Lars
from largebatch.optim.look_sam import LookSam
from largebatch.optim.muon import Muon
from largebatch.optim.presets import PRESETS, Preset, param_groups
from largebatch.optim.weight_copies import WeightCopies

__all__ = [
    "PRESETS",
    "Lamb",
    "Lars",
    "LookSam",
    "Muon",
    "Preset",
    "WeightCopies",
    "adapted_ratios",
    "build_optimizer",
    "can_compile",
    "clip_gradients",
    "gradient_norm",
    "init_state",
    "param_groups",
    "scale_gradients",
    "trust_summary",
    "why_not_fused",
]
