"""Stands in for `torch.cuda.make_graphed_callables` on a CPU: what torch's graphs do to memory, without graphs.

Inputs are copied into memory that stays; a "replay" computes into the same outputs and the same gradients each time, by
the weights and the random state of that time; autograd gets detached aliases of that memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def capture(callables: tuple[nn.Module, ...], sample_args: tuple[tuple[Tensor, ...], ...]) -> tuple[nn.Module, ...]:
    """Return the modules with a forward that stands in for their graphs."""
    if torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled():
        raise RuntimeError("make_graphed_callables does not support the autocast caching.")
    torch.rand(7)  # warming up draws
    for module, (sample,) in zip(callables, sample_args, strict=True):
        setattr(module, "forward", _switched(module, _graphed(module, sample), module.forward))
    return callables


def _switched(module: nn.Module, graphed: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    captured = module.training
    return lambda *inputs: graphed(*inputs) if module.training == captured else plain(*inputs)


def _graphed(module: nn.Module, sample: Tensor) -> Callable[[Tensor], Tensor]:
    compute, parameters = module.forward, tuple(module.parameters())
    surface = (sample, *parameters)
    wanted = [index for index, tensor in enumerate(surface) if tensor.requires_grad]
    casts = {"dtype": torch.get_autocast_dtype("cpu"), "enabled": torch.is_autocast_enabled("cpu")}

    def run() -> Tensor:
        with torch.enable_grad(), torch.autocast("cpu", **casts, cache_enabled=False):
            return compute(sample)

    live = [run()]
    static_output, static_grad_output = torch.empty_like(live[0]), torch.empty_like(live[0])
    static_grads: list[Any] = [None] * len(surface)
    grads = torch.autograd.grad(live[0], [surface[index] for index in wanted], static_grad_output)
    for index, grad in zip(wanted, grads, strict=True):
        static_grads[index] = torch.empty_like(grad)

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
            with torch.no_grad():
                sample.copy_(x)
            live[0] = run()
            static_output.copy_(live[0].detach())
            return static_output.detach()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            static_grad_output.copy_(grad)
            grads = torch.autograd.grad(live[0], [surface[index] for index in wanted], static_grad_output)
            for index, fresh in zip(wanted, grads):
                static_grads[index].copy_(fresh)
            return tuple(None if grad is None else grad.detach() for grad in static_grads)

    return lambda x: Graphed.apply(x, *parameters)
