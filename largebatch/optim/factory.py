"""Build the optimizer of a run; and functions that work for every optimizer."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.optim.lamb import Lamb
from largebatch.optim.lars import Lars
from largebatch.optim.muon import SCALES, Muon, divided, hidden_matrices
from largebatch.optim.presets import options_of, param_groups
from largebatch.optim.states import adam_state, init_params, momentum_state, nadam_state, with_gradient


def gradient_norm(optimizer: Optimizer) -> Tensor:
    norm = optimizer.gradient_norm() if isinstance(optimizer, Lamb) else None
    return nn.utils.get_total_norm([p.grad for p in with_gradient(optimizer)]) if norm is None else norm


def clip_gradients(optimizer: Optimizer, norm: Tensor, max_norm: float | None) -> None:
    """Clip the gradients of the next step, of global norm `norm`, as `scale_gradients` does; None: do not clip."""
    if max_norm is not None:
        scale_gradients(optimizer, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def scale_gradients(optimizer: Optimizer, factor: Tensor) -> None:
    """Make the next step of `optimizer` use its gradients times `factor`, a 0-d tensor.

    Lamb multiplies while it reads them, which saves a pass over memory. Call this right before the step, on the
    instance that steps (Horovod's wrapper).
    """
    if isinstance(optimizer, Lamb):
        optimizer.clip_factor = factor
        return
    if grads := [p.grad for p in with_gradient(optimizer)]:
        torch._foreach_mul_(grads, factor)


def follow_half_life(group: dict[str, Any], images: int, *, before: int) -> None:
    """Set beta2 for a step of `images` images, after `before` in all steps taken, if the group has a half_life.

    beta2_power is the product of beta2 over all steps, this one included, by which LAMB corrects the bias.
    """
    if half_life := group.get("half_life"):
        group["betas"] = (group["betas"][0], 0.5 ** (images / half_life))
        group["beta2_power"] = 0.5 ** ((before + images) / half_life)


def trust_summary(optimizer: Optimizer) -> Tensor | None:
    """Return minimum, median and maximum, (3,), of the trust ratios of the last step; None if there are none."""
    adapted = [*adapted_ratios(optimizer).values()]
    if not adapted:
        return None
    return torch.stack(adapted).quantile(adapted[0].new_tensor([0.0, 0.5, 1.0]))


def adapted_ratios(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    ratios: Mapping[Tensor, Tensor] = getattr(optimizer, "trust_ratios", {})
    groups = (group["params"] for group in optimizer.param_groups if group.get("adapt"))
    return {p: ratios[p] for params in groups for p in params if p in ratios}


def init_state(optimizer: Optimizer) -> None:
    """Set the state of every trainable parameter that has none to its value before the first step: zeros, z to weights.

    Horovod's `broadcast_optimizer_state` takes a step with zero gradients if there is no state, which would decay the
    weights: call this first, for AdamW, SGD and Lars, too; `Lamb` guards against it by itself. It knows the optimizers
    of `build_optimizer`.
    """
    if hasattr(optimizer, "init_param"):  # one of ours
        init_params(optimizer)
        return
    schedule_free = "AdamWScheduleFree" in (kind.__name__ for kind in type(optimizer).__mro__)
    if not schedule_free and not isinstance(optimizer, (torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD)):
        known = ", ".join(DEFAULTS)
        raise ValueError(f"the initial state of {type(optimizer).__name__} is not known; use one of {known}")
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad or optimizer.state.get(p):
                continue
            if schedule_free:
                optimizer.state[p].update(z=p.detach().clone(), exp_avg_sq=torch.zeros_like(p))
            elif isinstance(optimizer, torch.optim.Adam):
                optimizer.state[p].update(adam_state(p, group))
            elif isinstance(optimizer, torch.optim.NAdam):
                optimizer.state[p].update(nadam_state(p, group))
            elif group["momentum"]:
                optimizer.state[p]["momentum_buffer"] = momentum_state(p, group)


# The optimizers, with the options that not every one of them has.
DEFAULTS: dict[str, dict[str, Any]] = {
    "lamb": {"preset": "paper", "betas": (0.9, 0.999), "eps": 1e-6, "impl": "auto"},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "impl": None},
    "nadamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "schedule_free_adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": {"momentum": 0.9},
    "lars": {"momentum": 0.9, "eps": 1e-8, "trust_coefficient": 1e-3},
    "muon": {"momentum": 0.95, "rest": "adamw", "split_qkv": False},  # and the options of the optimizer for the rest
}


def build_optimizer(
    model: nn.Module,
    *,
    name: str = "lamb",
    lr: float,
    weight_decay: float,
    layer_decay: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    preset: str | None = None,
    impl: str | None = None,
    momentum: float | None = None,
    trust_coefficient: float | None = None,
    rest: str | None = None,
    split_qkv: bool | None = None,
) -> Optimizer:
    """Build the optimizer of a run.

    Args:
        model: the owner of the parameters; frozen ones are included, see `param_groups`.
        name: "lamb"; torch's "adamw" or "sgd" (Nesterov), fused; torch's "nadamw"; "schedule_free_adamw" (of the
            package schedulefree; the model stays in training); "lars"; "muon".
        weight_decay: decoupled for AdamW of all kinds and muon, added to the gradient for sgd and lars, in the update
            for LAMB.
        layer_decay: factor of the learning rate from a layer to the one below it; None: all have the same. Each group
            has its factor as `lr_scale`, and starts with lr × lr_scale.
        betas, eps, preset, impl, momentum, trust_coefficient: see `DEFAULTS`, `PRESETS`, `Lamb` and `Lars`. adamw with
            an impl is `Lamb` without trust ratios, which corrects the bias also while beta2 changes.
        rest: "adamw" or "lamb", for the tensors that muon leaves; they take its options.
        split_qkv: muon takes the query, key and value of an attention as a matrix each.

    Raises ValueError for an unknown name, a value out of range, or an option without a use.
    """
    if name not in DEFAULTS:
        raise ValueError(f"unknown optimizer {name!r}; choose one of {', '.join(DEFAULTS)}")
    decays = {"weight_decay": weight_decay, "layer_decay": layer_decay}
    options: dict[str, Any] = dict(preset=preset, betas=betas, eps=eps, impl=impl)
    options |= dict(momentum=momentum, trust_coefficient=trust_coefficient, rest=rest, split_qkv=split_qkv)
    given = {option: value for option, value in options.items() if value is not None}
    defaults = _defaults(name, rest)
    _refuse_unused(name, given, defaults)
    chosen = {"lr": lr} | defaults | given
    optimizer = _build(model, name, decays, chosen)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        if "max_lr" in group:
            group["max_lr"] = group["lr"]
    return optimizer


def _defaults(name: str, rest: str | None) -> dict[str, Any]:
    own = DEFAULTS[name]
    if "rest" not in own:
        return own
    rest = rest or own["rest"]
    if rest not in SCALES:
        raise ValueError(f"rest must be one of {', '.join(SCALES)}, got {rest!r}")
    return DEFAULTS[rest] | own | {"rest": rest}


def _build(model: nn.Module, name: str, decays: dict[str, Any], chosen: dict[str, Any]) -> Optimizer:
    if not 0 <= chosen.get("momentum", 0) < 1:
        raise ValueError(f"momentum must be a number in [0, 1), got {chosen['momentum']}")
    if "rest" in chosen:
        return _build_muon(model, decays, chosen)
    if "preset" in chosen:
        groups, options = options_of(chosen.pop("preset"), model, **decays)
        return Lamb(groups, **options, **chosen)
    if name == "lars":
        return Lars(param_groups(model, **decays, adapt_excluded=False), **chosen)
    groups = param_groups(model, **decays)
    if name == "sgd":
        return torch.optim.SGD(groups, **chosen, nesterov=chosen["momentum"] > 0, fused=True)
    if name == "nadamw":
        # With momentum_decay=inf beta1 is that of every step, as in AlgoPerf, and does not grow to it. On a GPU the
        # counters are there, too, so that no step waits for them.
        chosen |= dict(decoupled_weight_decay=True, capturable=all(p.is_cuda for p in model.parameters()))
        return torch.optim.NAdam(groups, momentum_decay=math.inf, **chosen)
    if name == "schedule_free_adamw":
        return _build_schedule_free(groups, chosen)
    kind, chosen = _adamw(chosen)
    return kind(groups, **chosen)


def _build_schedule_free(groups: list[dict[str, Any]], options: dict[str, Any]) -> Optimizer:
    """Build schedulefree's AdamW without its own warm-up: the engine sets the rate of each step."""
    if not options["betas"][0]:
        raise ValueError(f"betas of schedule_free_adamw must begin above 0, for its average, got {options['betas']}")
    torch.optim.AdamW([{**group} for group in groups], **options)  # schedulefree does not check its options
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError as error:
        raise ValueError(
            "schedule_free_adamw needs the package schedulefree: pip install 'largebatch[schedulefree]', or choose "
            "another optimizer"
        ) from error
    # It is always in training; the wrapper, which makes a new instance of the groups alone, keeps that.
    return AdamWScheduleFree([group | {"train_mode": True} for group in groups], **options)


def _refuse_unused(name: str, given: Mapping[str, Any], used: Mapping[str, Any]) -> None:
    for option, value in given.items():
        if option not in used:
            users = " or ".join(other for other in DEFAULTS if option in DEFAULTS[other])
            subject = f"{name} with {used['rest']} for the rest" if "rest" in used else name
            raise ValueError(f"{option}={value!r} has no effect on {subject}; remove it or choose {users}")


def _build_muon(model: nn.Module, decays: dict[str, Any], options: dict[str, Any]) -> Optimizer:
    rest, momentum, lr, split_qkv = (options.pop(option) for option in ("rest", "momentum", "lr", "split_qkv"))
    if rest == "lamb":
        groups, chosen = options_of(options.pop("preset"), model, **decays)
    else:
        groups, (_, chosen) = param_groups(model, **decays), _adamw(options)
    matrices = hidden_matrices(model, split_qkv=split_qkv)
    return Muon(divided(groups, matrices, momentum=momentum, rest=rest, options=options | chosen), lr)


def _adamw(options: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
    """Return the class and the options of AdamW: torch's, or, with an impl, `Lamb` without trust ratios."""
    impl = options.pop("impl")
    return (Lamb, options | {"impl": impl, "adapt": False}) if impl else (torch.optim.AdamW, options | {"fused": True})
