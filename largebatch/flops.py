"""The FLOPs of models, and the share of a GPU's FLOP/s that a run uses (MFU)."""

from functools import lru_cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from largebatch.devices import device_named
from zoo import create_model, set_fused_attn, volo


@lru_cache
def training_flops(model: str, img_size: int, *, drop_path_rate: float = 0.0) -> float:
    """Return the FLOPs of one image, forward and backward: three times those of the forward pass.

    Only matrix products count, as usual for MFU. drop_path_rate: leave out the work that our stochastic depth saves on
    average; timm's, in ViTs, saves none.
    """
    with torch.device("meta"):
        module = set_fused_attn(create_model(model, img_size=img_size, drop_path_rate=drop_path_rate), False).eval()
        counter = FlopCounterMode(display=False)
        with counter:
            module(torch.empty(1, 3, img_size, img_size))
    counts = {name.partition(".")[2]: sum(count.values()) for name, count in counter.get_flop_counts().items()}
    blocks = [(name, block) for name, block in module.named_modules() if isinstance(block, volo.Block)]
    return 3 * (counter.get_total_flops() - sum(block.drop_path * counts[name] for name, block in blocks))


def utilisation(model: str, img_size: int, *, gpu: str, ranks: int) -> float | None:
    """Return the share of the datasheets' FLOP/s that one image per second takes; None if not known.

    gpu: torch's name for the GPU.
    """
    device = device_named(gpu)
    try:
        return training_flops(model, img_size) / (device.peak * ranks) if device else None
    except (ValueError, RuntimeError):  # a model whose FLOPs cannot be counted without its weights
        return None
