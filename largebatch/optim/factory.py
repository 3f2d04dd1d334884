"""Build the optimizer of a run, with presets and parameter groups; and functions that work for every optimizer."""

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.optim.apex_lamb import apex_lamb
from largebatch.optim.lamb import Lamb
from largebatch.optim.lars import Lars


def gradient_norm(optimizer: Optimizer) -> Tensor:
    """Return the global norm of the gradients, 0-d."""
    return nn.utils.get_total_norm(_gradients(optimizer))


def clip_gradients(optimizer: Optimizer, norm: Tensor, max_norm: float | None) -> None:
    """Clip the gradients of the next step, whose global norm is `norm`, to `max_norm`; do nothing if that is None.

    See `scale_gradients` for how the factor is applied.
    """
    if max_norm is not None:
        scale_gradients(optimizer, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def scale_gradients(optimizer: Optimizer, factor: Tensor) -> None:
    """Make the next step of `optimizer` use its gradients times `factor`, a 0-d tensor.

    Lamb multiplies while it reads them, which saves a pass over memory; for any other optimizer the gradients
    change here. Call it right before the step, on the instance that steps (Horovod's wrapper).
    """
    if isinstance(optimizer, Lamb):
        optimizer.clip_factor = factor
        return
    if grads := _gradients(optimizer):
        torch._foreach_mul_(grads, factor)


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def trust_summary(optimizer: Optimizer) -> Tensor | None:
    """Return minimum, median and maximum of the trust ratios of the last step: (3,), on the device of the parameters.

    They are over the adapted tensors, each counted as a whole. Returns None if no tensor is adapted or the optimizer
    has no trust ratios.
    """
    adapted = [*adapted_ratios(optimizer).values()]
    if not adapted:
        return None
    return torch.stack(adapted).quantile(adapted[0].new_tensor([0.0, 0.5, 1.0]))


def adapted_ratios(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the trust ratio of each adapted parameter in the last step; empty if the optimizer has none."""
    ratios: Mapping[Tensor, Tensor] = getattr(optimizer, "trust_ratios", {})
    groups = (group["params"] for group in optimizer.param_groups if group.get("adapt"))
    return {p: ratios[p] for params in groups for p in params if p in ratios}


def init_state(optimizer: Optimizer) -> None:
    """Set the state of every trainable parameter that has none to zeros, its value before the first step.

    It never steps, because a step with zero gradients would decay the weights. It knows the optimizers of
    `build_optimizer`.
    """
    init_param = getattr(optimizer, "init_param", None)  # ours have it
    if init_param is None and not isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD)):
        known = ", ".join(DEFAULTS)
        raise ValueError(f"the initial state of {type(optimizer).__name__} is not known; use one of {known}")
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad or optimizer.state.get(p):
                continue
            if init_param is not None:
                init_param(p)
            elif isinstance(optimizer, torch.optim.Adam):
                optimizer.state[p].update(_adam_state(p, group))
            elif group["momentum"]:
                optimizer.state[p]["momentum_buffer"] = _momentum_state(p, group)


def _adam_state(p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    on_device = group["capturable"] or group["fused"]  # otherwise torch keeps the step counter on the host
    state = {"step": torch.zeros((), device=p.device if on_device else "cpu")}
    names = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())
    return state | {name: torch.zeros_like(p) for name in names}


def _momentum_state(p: Tensor, group: Mapping[str, Any]) -> Tensor:
    if group["dampening"]:  # torch does not dampen the first gradient, which no initial buffer can express
        raise ValueError(f"SGD with dampening={group['dampening']} has no initial state; set dampening to 0")
    return torch.zeros_like(p)


@dataclass(frozen=True)
class Preset:
    """One published reading of LAMB. 1-D tensors, biases and the parameters that the model names may be excluded."""

    bias_correction: bool
    exclude: bool
    """exclude them from decay"""
    adapt_excluded: bool | None = None
    """give excluded parameters a trust ratio"""
    max_trust_ratio: float = math.inf


PRESETS: dict[str, Preset] = {
    # arXiv:1904.00962 with the exclusions of its authors' code
    "paper": Preset(bias_correction=True, exclude=True, adapt_excluded=False),
    # the 32K run: everything decayed and adapted, no bias correction; its clip of 1.0 is the engine's
    "colossal": Preset(bias_correction=False, exclude=False),
    # NVIDIA's reading: parameters without decay are adapted, too; its clip of 1.0 is the engine's
    "nvlamb": Preset(bias_correction=True, exclude=True, adapt_excluded=True),
    # arXiv:2011.13584: as in the paper, with ratios of at most 1
    "lambc": Preset(bias_correction=True, exclude=True, adapt_excluded=False, max_trust_ratio=1.0),
}


def param_groups(
    model: nn.Module, *, weight_decay: float, exclude: bool = True, adapt_excluded: bool | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups: decayed, and not decayed (1-D, biases, names in `model.no_weight_decay()`).

    With `exclude=False` there is only the first group; `adapt_excluded` is the option `adapt` of the second, for Lamb
    and Lars. Frozen parameters stay in their group: without a gradient they get no state and no update, and unfreezing
    one does not renumber a saved state.
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


# The optimizers, with the options that not every one of them has.
DEFAULTS: dict[str, dict[str, Any]] = {
    "lamb": {"preset": "paper", "betas": (0.9, 0.999), "eps": 1e-6, "impl": "auto"},
    "apex_lamb": {"preset": "paper", "betas": (0.9, 0.999), "eps": 1e-6},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": {"momentum": 0.9},
    "lars": {"momentum": 0.9, "eps": 1e-8, "trust_coefficient": 1e-3},
}


def build_optimizer(
    model: nn.Module,
    *,
    name: str = "lamb",
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    preset: str | None = None,
    impl: str | None = None,
    momentum: float | None = None,
    trust_coefficient: float | None = None,
) -> Optimizer:
    """Build the optimizer of a run.

    Args:
        model: the owner of the parameters; frozen ones are included, see `param_groups`.
        name: "lamb"; torch's "adamw" or "sgd" (Nesterov), fused; "lars"; "apex_lamb" (NVIDIA's, on GPUs).
        weight_decay: decoupled for adamw, added to the gradient for sgd and lars, in the update for LAMB.
        betas, eps, preset, impl, momentum, trust_coefficient: see `DEFAULTS`, `PRESETS`, `Lamb` and `Lars`.

    Raises:
        ValueError: an unknown name, a value out of range, or an option that the optimizer would not use.
    """
    if name not in DEFAULTS:
        raise ValueError(f"unknown optimizer {name!r}; choose one of {', '.join(DEFAULTS)}")
    options: dict[str, Any] = dict(preset=preset, betas=betas, eps=eps, impl=impl)
    options |= dict(momentum=momentum, trust_coefficient=trust_coefficient)
    given = {option: value for option, value in options.items() if value is not None}
    _refuse_unused(name, given)
    chosen = {"lr": lr} | DEFAULTS[name] | given
    if "preset" in chosen:
        return _build_lamb(model, name, weight_decay, chosen)
    if not 0 <= chosen.get("momentum", 0) < 1:
        raise ValueError(f"momentum must be a number in [0, 1), got {momentum}")
    if name == "lars":
        return Lars(param_groups(model, weight_decay=weight_decay, adapt_excluded=False), **chosen)
    groups = param_groups(model, weight_decay=weight_decay)
    if name == "sgd":
        return torch.optim.SGD(groups, **chosen, nesterov=chosen["momentum"] > 0, fused=True)
    return torch.optim.AdamW(groups, **chosen, fused=True)


def _refuse_unused(name: str, given: Mapping[str, Any]) -> None:
    for option, value in given.items():
        if option not in DEFAULTS[name]:
            users = ", ".join(other for other in DEFAULTS if option in DEFAULTS[other])
            raise ValueError(f"{option}={value!r} has no effect on {name}; remove it or choose one of {users}")


def _build_lamb(model: nn.Module, name: str, weight_decay: float, options: dict[str, Any]) -> Optimizer:
    preset = options.pop("preset")
    if preset not in PRESETS:
        raise ValueError(f"unknown LAMB preset {preset!r}; choose one of {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    adapt = chosen.adapt_excluded if name == "lamb" else None
    groups = param_groups(model, weight_decay=weight_decay, exclude=chosen.exclude, adapt_excluded=adapt)
    options["bias_correction"] = chosen.bias_correction
    if name == "lamb":
        return Lamb(groups, max_trust_ratio=chosen.max_trust_ratio, **options)
    if chosen.max_trust_ratio < math.inf:
        raise ValueError(f"apex_lamb has no bound on trust ratios, which preset {preset} needs; choose lamb")
    use_nvlamb = chosen.adapt_excluded is not False
    if not use_nvlamb and not weight_decay:
        raise ValueError(f"apex_lamb adapts nothing without decay under preset {preset}; choose lamb or preset nvlamb")
    if any(not p.is_cuda for p in model.parameters()):
        raise ValueError("apex_lamb works on GPUs only; choose lamb, which works everywhere")
    return apex_lamb(groups, use_nvlamb=use_nvlamb, **options)
