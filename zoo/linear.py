"""Linear layers that read their weight in bfloat16 from a copy, instead of rounding it in every pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """torch's linear layer, by `weight_of`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., D)"""
        return F.linear(x, weight_of(self), self.bias)


def read_copies(model: nn.Module) -> list[nn.Module]:
    """Let the linear layers of a model read copies of their weights; return them, and the layers that do so anyway.

    Whoever keeps the copies becomes the attribute `copies` of each layer: `copies.of(weight)` is what autocast would
    make of a weight, with the gradient that leads to it, or None. Names and state_dict stay as they are.
    """
    layers: list[nn.Module] = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = Linear
    patches: list[Any] = [module for module in model.modules() if getattr(module, "proj_reads_copy", False)]
    return layers + [module.proj for module in patches]


def weight_of(layer: nn.Linear | nn.Conv2d) -> Tensor:
    """Return a layer's weight for a product; under autocast to bfloat16 its copy, if there is one now.

    Products and gradients have the bits that autocast gives them.
    """
    weight = layer.weight
    device, copies = weight.device.type, layer.__dict__.get("copies")
    if not copies or not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.bfloat16:
        return weight
    copy = copies.of(weight)
    return weight if copy is None else copy
