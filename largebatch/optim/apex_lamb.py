"""NVIDIA's FusedLAMB, for those who have its library, apex; ours needs nothing and is the default.

What apex keeps on the instance (use_nvlamb) or reads from the defaults (max_grad_norm) is lost when Horovod makes a
new instance from the parameter groups; the class made here takes both from where they survive. apex clips inside of
its step, beside the engine's clip: with a limit of infinity it divides by exactly 1.
"""

import importlib.util
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HINT = "build it from https://github.com/NVIDIA/apex with its CUDA extensions, or set optim.name to lamb"


def apex_lamb(groups: Iterable[dict[str, Any]], *, use_nvlamb: bool, **options: Any) -> Optimizer:
    """FusedLAMB that keeps its options under Horovod; options: lr, betas, eps and bias_correction.

    use_nvlamb: every tensor has a trust ratio; else those of groups without decay have none. ValueError if apex is
    not there, is another library of that name, or was built without CUDA.
    """
    groups = [group | {"use_nvlamb": use_nvlamb} for group in groups]
    try:
        return fused_lamb()(groups, **options)
    except RuntimeError as error:  # apex's own, at the first use of what was not built
        raise ValueError(f"apex_lamb needs the CUDA extensions of apex ({error}): {HINT}") from error


def fused_lamb() -> type[Optimizer]:
    """apex's class, made safe for Horovod."""
    if importlib.util.find_spec("apex") is None:
        raise ValueError(f"apex_lamb needs NVIDIA's apex, which is not installed: {HINT}")
    try:
        from apex.optimizers import FusedLAMB
    except ImportError as error:  # the package registry's apex is something else
        raise ValueError(f"apex_lamb needs NVIDIA's apex, and the apex here is another ({error}): {HINT}") from error

    class ApexLamb(FusedLAMB):
        def __init__(self, params: Iterable[Any], **options: Any) -> None:
            super().__init__(params, max_grad_norm=math.inf, **options)
            self.use_nvlamb = self.param_groups[0]["use_nvlamb"]
            for group in self.param_groups:
                group.setdefault("step", 0)  # apex's counter, which it would make in its first step

        def init_param(self, p: Tensor) -> None:
            """Make the state of one parameter, zeros, if it has none."""
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))

    return ApexLamb
