"""The type in which a model computes, and the types for which the processor has instructions."""

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str, *, cache: bool = True) -> torch.autocast:
    """Compute in this precision; parameters and gradients stay fp32. cache: cast each weight once, not at each use."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32", cache_enabled=cache)


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def computes(device: torch.device, precision: str) -> bool:
    """Return whether the processor has instructions for this type; without them a CPU takes a hundred times as long."""
    if precision == "fp32":
        return True
    if device.type == "cuda":
        return precision == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)
    supported = {"bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported, "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported}
    return bool(supported[precision]())


def choose_precision(device: torch.device) -> str:
    if computes(device, "bf16"):
        return "bf16"
    return "fp16" if device.type == "cuda" else "fp32"
