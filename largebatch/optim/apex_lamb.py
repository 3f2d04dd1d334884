"""NVIDIA's FusedLAMB, for users who have its library, apex. Our own Lamb needs no library and is the default.

apex keeps use_nvlamb on the instance and max_grad_norm in the defaults. Horovod, which makes a new instance from the
parameter groups, would lose both, so the class here sets them where they survive. apex clips after the engine's clip;
with a limit of infinity it divides by exactly 1.
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
    """Build a FusedLAMB that keeps its options under Horovod: lr, betas, eps and bias_correction.

    With use_nvlamb every tensor has a trust ratio; otherwise tensors of groups without decay have none. Raises
    ValueError if apex is not installed, is another library of that name, or was built without CUDA.
    """
    groups = [group | {"use_nvlamb": use_nvlamb} for group in groups]
    try:
        return fused_lamb()(groups, **options)
    except RuntimeError as error:  # apex raises it at the first use of an extension that was not built
        raise ValueError(f"apex_lamb needs the CUDA extensions of apex ({error}): {HINT}") from error


def fused_lamb() -> type[Optimizer]:
    if importlib.util.find_spec("apex") is None:
        raise ValueError(f"apex_lamb needs NVIDIA's apex, which is not installed: {HINT}")
    try:
        from apex.optimizers import FusedLAMB
    except ImportError as error:  # the apex in the package registry is another library
        raise ValueError(f"apex_lamb needs NVIDIA's apex, and the apex here is another ({error}): {HINT}") from error

    class ApexLamb(FusedLAMB):
        def __init__(self, params: Iterable[Any], **options: Any) -> None:
            super().__init__(params, max_grad_norm=math.inf, **options)
            self.use_nvlamb = self.param_groups[0]["use_nvlamb"]
            for group in self.param_groups:
                group.setdefault("step", 0)  # apex's counter, which it would otherwise create in its first step

        def init_param(self, p: Tensor) -> None:
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))

    return ApexLamb
