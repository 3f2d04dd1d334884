"""LARS: SGD with momentum whose step is scaled to the norm of each tensor (arXiv:1708.03888).

One step for one parameter tensor x with gradient g:

    ratio = trust_coefficient |x| / (|g| + weight_decay |x| + eps)
    d = ratio (g + weight_decay x)
    m = momentum m + d
    x = x - lr m                        nesterov: x = x - lr (d + momentum m)

|.| is the L2 norm of the whole tensor, added up in double precision. The ratio is 1 if the group has adapt=False, and
if a norm is zero or not finite. The learning rate is outside of the momentum, as in torch's SGD, and inside in the
paper, which is the same as long as it does not change.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.optim.states import adopted, require_parameters, takes_closure


class Lars(Optimizer):
    """LARS; the formulas are at the top of this file. All options can be set per parameter group.

    Args:
        params: parameters or groups.
        lr: learning rate.
        momentum: decay of the sum of past steps.
        weight_decay: decay, added to the gradient before the ratio.
        trust_coefficient: the length of a step of learning rate 1, as a fraction of the norm of the tensor.
        eps: added to the divisor of the ratio.
        nesterov: look ahead by one step.
        adapt: multiply by the ratio; if False, the group takes SGD's steps.

    `trust_ratios` holds each parameter's ratio in the last step, as 0-d tensors.
    """

    trust_ratios: Mapping[Tensor, Tensor] = MappingProxyType({})  # a class default: copies skip the constructor

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
        adapt: bool = True,
    ) -> None:
        require_parameters(params, "give Lars model.parameters(), or the groups of largebatch.optim.param_groups")
        options = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, options | dict(trust_coefficient=trust_coefficient, eps=eps, adapt=adapt))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_options(self.defaults | param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check what `load_state_dict` loads: a state of this class or of timm's LARS."""
        if "defaults" not in state:  # which copies and pickles have
            for own, saved in zip(self.param_groups, state["param_groups"]):
                if own["adapt"] and not {"trust_coefficient", "trust_coeff"} & saved.keys():
                    raise ValueError(
                        "The state is of an optimizer without trust ratios, such as SGD, whose momentum is not that "
                        "of LARS: begin without a state."
                    )
            state = adopted(self, state, lambda group: ("momentum_buffer",))
            for group in state["param_groups"]:
                check_options(group)
        super().__setstate__(state)

    @takes_closure
    def step(self) -> None:
        ratios: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                grads = [p.grad.to(p.dtype) for p in params]
                ratios |= zip(params, trust_ratios(params, grads, group))
                for p, g in zip(params, grads):
                    lars_(p, g, self.init_param(p)["momentum_buffer"], ratios[p], group)
        self.trust_ratios = MappingProxyType(ratios)

    def init_param(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state


def trust_ratios(params: list[Tensor], grads: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
    """Return the ratio of each tensor of a group, 0-d, in its dtype."""
    if not group["adapt"]:
        return [p.new_ones(()) for p in params]
    norms = (torch._foreach_norm(tensors, 2, torch.float64) for tensors in (params, grads))
    ratios = []
    for p, x_norm, g_norm in zip(params, *norms):
        ratio = group["trust_coefficient"] * x_norm / (g_norm + group["weight_decay"] * x_norm + group["eps"])
        usable = (x_norm > 0) & (g_norm > 0) & (x_norm < math.inf) & (g_norm < math.inf)
        ratios.append(torch.where(usable, ratio, 1.0).to(p.dtype))
    return ratios


def lars_(x: Tensor, g: Tensor, m: Tensor, ratio: Tensor, group: Mapping[str, Any]) -> None:
    """Update x and m in place, without a temporary of their size."""
    lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"] * ratio
    m.mul_(momentum).addcmul_(g, ratio).addcmul_(x, decay)
    if group["nesterov"]:
        x.mul_(1 - lr * decay).addcmul_(g, ratio, value=-lr)  # d, without storing it
        x.sub_(m, alpha=lr * momentum)
    else:
        x.sub_(m, alpha=lr)


def check_options(options: Mapping[str, Any]) -> None:
    rules = {
        "lr": (options["lr"] >= 0, "a number >= 0"),
        "momentum": (0 <= options["momentum"] < 1, "a number in [0, 1)"),
        "weight_decay": (options["weight_decay"] >= 0, "a number >= 0"),
        "trust_coefficient": (options["trust_coefficient"] > 0, "a number above 0"),
        "eps": (options["eps"] >= 0, "a number >= 0"),
        "maximize": (not options.get("maximize"), "left out, and the loss negated"),
        "nesterov": (options["momentum"] > 0 or not options["nesterov"], "false without momentum"),
    }
    for name, (holds, expected) in rules.items():
        if not holds:
            raise ValueError(f"Lars's {name} must be {expected}, got {options[name]!r}")
