"""The optimizer that a run is built with: presets, parameter groups, and what works for every optimizer alike."""

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.optim.lamb import Lamb


def scale_gradients(optimizer: Optimizer, factor: Tensor) -> None:
    """Make the next step of ``optimizer`` use its gradients times ``factor``, a 0-d tensor.

    Lamb multiplies while it reads them, which saves a pass over memory; for any other optimizer the gradients
    change here. Call it right before that step, on the instance that steps (Horovod's wrapper).
    """
    if isinstance(optimizer, Lamb):
        optimizer.clip_factor = factor
        return
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)


def init_state(optimizer: Optimizer) -> None:
    """Give every trainable parameter without state what it would have before its first step: zeros.

    Never by stepping: a step with zero gradients moves decayed weights. Lamb, torch's Adam, AdamW and SGD.
    """
    if not isinstance(optimizer, (Lamb, torch.optim.Adam, torch.optim.SGD)):
        raise ValueError(f"the initial state of {type(optimizer).__name__} is not known; use lamb or adamw")
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad or optimizer.state.get(p):
                continue
            if isinstance(optimizer, Lamb):
                optimizer.init_param(p)
            elif isinstance(optimizer, torch.optim.Adam):
                optimizer.state[p].update(_adam_state(p, group))
            elif group["momentum"]:
                optimizer.state[p]["momentum_buffer"] = _momentum_state(p, group)


def _adam_state(p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    on_device = group["capturable"] or group["fused"]  # else torch keeps the step counter on the host
    state = {"step": torch.zeros((), device=p.device if on_device else "cpu")}
    names = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())
    return state | {name: torch.zeros_like(p) for name in names}


def _momentum_state(p: Tensor, group: Mapping[str, Any]) -> Tensor:
    if group["dampening"]:  # torch takes the first gradient undampened, which no initial buffer can express
        raise ValueError(f"SGD with dampening={group['dampening']} has no initial state; set dampening to 0")
    return torch.zeros_like(p)


@dataclass(frozen=True)
class Preset:
    """One published reading of LAMB. Excluded from decay are 1-D tensors, biases and what the model names."""

    bias_correction: bool
    exclude: bool
    """Whether anything is excluded."""
    adapt_excluded: bool | None = None
    """Whether what is excluded gets a trust ratio."""
    max_trust_ratio: float = math.inf


PRESETS: dict[str, Preset] = {
    # arXiv:1904.00962 with the exclusions of its authors' code
    "paper": Preset(bias_correction=True, exclude=True, adapt_excluded=False),
    # the 32K run: everything decayed and adapted, moments as they are; its clip of 1.0 is the engine's
    "colossal": Preset(bias_correction=False, exclude=False),
    # NVIDIA's reading: what is excluded from decay is adapted all the same; its clip of 1.0 is the engine's
    "nvlamb": Preset(bias_correction=True, exclude=True, adapt_excluded=True),
    # arXiv:2011.13584: the paper's with ratios of at most 1
    "lambc": Preset(bias_correction=True, exclude=True, adapt_excluded=False, max_trust_ratio=1.0),
}


def param_groups(
    model: nn.Module, *, weight_decay: float, exclude: bool = True, adapt_excluded: bool | None = None
) -> list[dict[str, Any]]:
    """Parameter groups: decayed, and not decayed (1-D, biases, names in ``model.no_weight_decay()``).

    With ``exclude=False`` there is only the first; ``adapt_excluded`` is Lamb's ``adapt`` in the second.
    Frozen parameters are kept: they have no gradient, so no state and no update, and unfreezing one renumbers
    nothing in a saved state.
    """
    names: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    decayed: dict[str, Any] = {"params": [], "weight_decay": weight_decay}
    excluded: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    if adapt_excluded is not None:
        excluded["adapt"] = adapt_excluded
    for name, p in model.named_parameters():
        listed = any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
        out = exclude and (p.ndim <= 1 or name.endswith(".bias") or listed)
        (excluded if out else decayed)["params"].append(p)
    return [group for group in (decayed, excluded) if group["params"]]


def build_optimizer(
    model: nn.Module,
    *,
    name: str = "lamb",
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float | None = None,
    preset: str | None = None,
    impl: str = "auto",
) -> Optimizer:
    """The optimizer of a run.

    Args:
        model: its parameters, frozen ones included, see `param_groups`.
        name: "lamb", or "adamw" (torch's, fused).
        eps: 1e-6 for lamb and 1e-8 for adamw unless given.
        preset: a name in `PRESETS`, "paper" unless given; lamb only.
        impl: see `Lamb`; lamb only.

    Raises:
        ValueError: an unknown name, a value out of range, or an option that the optimizer would not use.
    """
    if name == "adamw":
        _refuse_lamb_options(preset, impl)
        groups = param_groups(model, weight_decay=weight_decay)
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8 if eps is None else eps, fused=True)
    if name != "lamb":
        raise ValueError(f"unknown optimizer {name!r}; choose lamb or adamw")
    preset = "paper" if preset is None else preset
    if preset not in PRESETS:
        raise ValueError(f"unknown LAMB preset {preset!r}; choose one of {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    return Lamb(
        param_groups(
            model, weight_decay=weight_decay, exclude=chosen.exclude, adapt_excluded=chosen.adapt_excluded
        ),
        lr,
        betas=betas,
        eps=1e-6 if eps is None else eps,
        bias_correction=chosen.bias_correction,
        max_trust_ratio=chosen.max_trust_ratio,
        impl=impl,
    )


def _refuse_lamb_options(preset: str | None, impl: str) -> None:
    for option, value, unset in (("preset", preset, None), ("impl", impl, "auto")):
        if value != unset:
            raise ValueError(f"{option}={value!r} has no effect on adamw; remove it or choose lamb")
