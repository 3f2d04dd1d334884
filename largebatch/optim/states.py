"""Parts that our optimizers share: steps with a closure, the state before the first step, loading a state."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Options of other optimizers that change what their moments are, with the value that ours have.
MOMENTS_OF = {"maximize": False, "grad_averaging": True, "dampening": 0}


def takes_closure(step: Callable[[Any], None]) -> Callable[..., Any]:
    """Turn a step without arguments into one as torch's, which returns the result of its closure."""

    @functools.wraps(step)
    @torch.no_grad()
    def stepping(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step(self)
        return loss

    return stepping


def with_gradient(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def init_params(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and not optimizer.state.get(p):
                optimizer.init_param(p)


class Stateful(Optimizer):
    """An optimizer whose state_dict has moments of zero before the first step.

    Without a state Horovod's `broadcast_optimizer_state` would take a step, which decays the weights.
    """

    def state_dict(self) -> dict[str, Any]:
        if not self.state:
            init_params(self)
        return super().state_dict()


def adam_state(p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    on_device = group["capturable"] or group["fused"]  # otherwise torch keeps the step counter on the host
    state = {"step": torch.zeros((), device=p.device if on_device else "cpu")}
    names = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())
    return state | {name: torch.zeros_like(p) for name in names}


def nadam_state(p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    device = p.device if group["capturable"] else torch.device("cpu")
    counters = {"step": torch.zeros((), device=device), "mu_product": torch.ones((), dtype=p.dtype, device=device)}
    return counters | {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}


def momentum_state(p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the momentum of SGD for a parameter; ValueError for dampening."""
    if group["dampening"]:  # torch does not dampen the first gradient, which no initial buffer can express
        raise ValueError(f"SGD with dampening={group['dampening']} has no initial state; set dampening to 0")
    return torch.zeros_like(p)


def require_parameters(params: Any, instead: str) -> None:
    """Raise TypeError for a model in the place of its parameters; some models can be iterated over."""
    if isinstance(params, nn.Module):
        raise TypeError(f"expected parameters, got the model {type(params).__name__}: {instead}")


def adopted(
    optimizer: Optimizer,
    loaded: Mapping[str, Any],
    keys: Callable[[Mapping[str, Any]], Sequence[str]],
    shape: Callable[[Tensor], tuple[int, ...]] = lambda p: tuple(p.shape),
) -> dict[str, Any]:
    """Return what torch's `load_state_dict` hands to `__setstate__`, so that this optimizer goes on from it.

    It may be that of another optimizer with the same moments: options that its groups lack stay as they are here, and a
    step of the group becomes one of each parameter. keys: the entries of a parameter's state; shape: that of its
    moments. Raises ValueError for any other state.
    """
    state, groups, numbers = loaded["state"].copy(), [], itertools.count()  # state remains torch's defaultdict
    for own, saved in zip(optimizer.param_groups, loaded["param_groups"]):
        _check_moments(saved)
        merged, needed = own | saved, keys(own)
        merged.pop("beta2_power", None)  # of the last step alone
        step = {"step": merged.pop("step", None)} if "step" in needed else {}
        for p, number in zip(own["params"], numbers):
            if state.get(p):
                entry = (step | state[p]).items()
                state[p] = {key: v.contiguous() if isinstance(v, Tensor) else v for key, v in entry}
                _check_entry(state[p], needed, shape(p), number)
        groups.append(merged | ({"impl": own["impl"]} if "impl" in own else {}))  # that of this machine
    return {**loaded, "state": state, "param_groups": groups}


def _check_entry(entry: Mapping[str, Any], keys: Sequence[str], shape: tuple[int, ...], number: int) -> None:
    kinds = {"step": (Tensor, int, float)}
    if missing := [key for key in keys if not isinstance(entry.get(key), kinds.get(key, Tensor))]:
        raise ValueError(
            f"The state is of another optimizer: for parameter {number} it has no {' and no '.join(missing)}. Load it "
            "into the optimizer that saved it, or begin without a state."
        )
    for key, value in entry.items():
        if isinstance(value, Tensor) and key != "step" and tuple(value.shape) != shape:
            raise ValueError(
                f"The state is of another model: {key} of parameter {number} has shape {tuple(value.shape)}, expected "
                f"{shape}. Load it for the model that it was saved with, or begin without a state."
            )


def _check_moments(group: Mapping[str, Any]) -> None:
    """Raise ValueError for moments of something else than the gradients that our optimizers take."""
    wanted = MOMENTS_OF | ({"decoupled_weight_decay": True} if group.get("weight_decay") else {})
    for key, value in wanted.items():
        if key in group and group[key] != value:
            raise ValueError(
                f"The state is of an optimizer with {key}={group[key]!r}, and its moments are not those of "
                f"{key}={value!r}, which this optimizer has: begin without a state."
            )
