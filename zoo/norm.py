"""Layer norm of activations in half precision that computes in float32, on CPUs as on GPUs.

torch's other norms (group, batch, instance, RMS) add up in float32 on CPUs, too.
"""

from typing import Any

import torch
from timm.layers import LayerNorm
from torch import Tensor, nn


class Float32Norm(LayerNorm):
    """Layer norm that computes in the type of its weight, and keeps its input for the backward pass in its own type.

    On GPUs autocast gives a norm float32, and the copy in float32 is kept. torch's kernel on CPUs takes bfloat16 as it
    is, but adds the gradients of weight and bias up in bfloat16: over 10,000 tokens that of the bias was wrong by 90 %.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> the same shape and type"""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        return _Norm.apply(x, self.weight, self.bias, self.eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x.to(weight.dtype), weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        grad, precise = grads[0].to(weight.dtype), x.to(weight.dtype)
        dx, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
            grad, precise, weight.shape, mean, rstd, weight, bias, [True, True, True]
        )
        return dx.to(x.dtype), d_weight, d_bias, None


def norms_in_float32(model: nn.Module) -> nn.Module:
    """Give the other layer norms float32 on every device, as autocast does on GPUs alone; return the model."""
    for layer in model.modules():
        if isinstance(layer, nn.LayerNorm) and not isinstance(layer, Float32Norm):
            layer.register_forward_pre_hook(_in_type_of_weight)
    return model


def _in_type_of_weight(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = inputs
    return (x if layer.weight is None else x.to(layer.weight.dtype), *others)
