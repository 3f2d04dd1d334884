"""LAMB for large batches: the formulas, the ways to compute them, and the optimizer.

One step for one parameter tensor x with gradient g (arXiv:1904.00962), at its t-th step:

    m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
    m_hat = m / (1 - beta1^t)            v_hat = v / (1 - beta2^t)      without bias_correction: m and v
    u = m_hat / (sqrt(v_hat) + eps) + weight_decay x
    ratio = phi(|x|) / |u|               phi(z) = clamp(z, *norm_range); ratio <= max_trust_ratio
    x = x - lr ratio u

With decay="decoupled" u has no decay, and x is first multiplied by 1 - lr weight_decay; with "corrected" by
1 - lr^2 / max_lr weight_decay, where max_lr is the lr that the group began with (arXiv:2506.02285). With caution, u
before decay is zero where its sign is not that of g, and divided by the share of the others, or 0.001
(arXiv:2411.16085).

|.| is the L2 norm of the whole tensor, added up in double precision. The ratio is 1 if the group has adapt=False, if a
norm is zero or not finite, and if it would be above 1e30. Lamb does not clip; see `factory.scale_gradients`. If beta2
changes from step to step, the option beta2_power of a group is the product that takes the place of beta2^t
(`factory.follow_half_life`), and for one that is unfrozen late that since its first step.

Every option sits in the parameter group, because Horovod's DistributedOptimizer is a new instance that is built from
`param_groups` alone. The step counter is per parameter, so that one that is unfrozen late gets its own bias correction.
"""

import functools
import logging
import math
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from largebatch.native import lamb as cpp_lamb
from largebatch.native.lamb import DTYPES, as_kernels_read, same_kind
from largebatch.optim.presets import options_of
from largebatch.optim.states import Stateful, adopted, require_parameters, takes_closure, with_gradient

logger = logging.getLogger(__name__)

IMPLS = ("auto", "compile", "eager", "plain")
DECAYS = ("coupled", "decoupled", "corrected")

NATIVE = {("cpu", dtype, torch.strided) for dtype in DTYPES}  # gradients for lamb.cpp

NOT_COMPILED = "LAMB could not be compiled here: give Lamb impl='eager'"

LARGEST = 1e30  # ratio: lr times a larger one may overflow; u is then all but zero, and so is a step without it

STATE = ("step", "exp_avg", "exp_avg_sq")  # of a parameter

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # x, g, m, v of one parameter
Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # and u, scratch memory for the update


class Scalars(NamedTuple):
    """The numbers of one update.

    m_hat / (sqrt(v_hat) + eps) is computed as m / (root sqrt(v) + eps), which saves two divisions per element.
    """

    lr: float
    beta1: float
    new1: float  # 1 - beta1, subtracted in double precision; single precision would be wrong by 1e-5
    beta2: float
    new2: float  # 1 - beta2
    root: float  # bias1 / sqrt(bias2)
    eps: float  # bias1 * the option eps
    weight_decay: float
    norm_min: float
    norm_max: float
    ratio_max: float
    adapt: float  # 1 or 0
    keep: float  # the factor of x; 1 where decay is a part of u
    caution: float  # 1 or 0; compiled code does not read it


def scalars(group: Mapping[str, Any], step: int, before: float = 1.0) -> Scalars:
    """Return the numbers of a group for update number `step`; the first is 1. before: beta2_power before the first."""
    beta1, beta2 = group["betas"]
    beta2_power = group["beta2_power"] / before if "beta2_power" in group and before else beta2**step
    bias1, bias2 = (1 - beta1**step, 1 - beta2_power) if group["bias_correction"] else (1.0, 1.0)
    decay, coupled = group["weight_decay"], group["decay"] == "coupled"
    shrinks = float(group["lr"]) ** 2 / group["max_lr"] if group["decay"] == "corrected" else float(group["lr"])
    return Scalars(
        lr=float(group["lr"]),
        beta1=beta1,
        new1=1 - beta1,
        beta2=beta2,
        new2=1 - beta2,
        root=bias1 / math.sqrt(bias2),
        eps=bias1 * group["eps"],
        weight_decay=decay if coupled else 0.0,
        norm_min=group["norm_range"][0],
        norm_max=group["norm_range"][1],
        ratio_max=group["max_trust_ratio"],
        adapt=float(group["adapt"]),
        keep=1.0 if coupled else 1 - shrinks * decay,
        caution=float(group["caution"]),
    )


# In all updates of one tensor, x, g, m and v are flat and equally long; x, m and v change in place.


def trust_ratio(x_square: Tensor, u_square: Tensor, s: Scalars) -> Tensor:
    """Return phi(|x|) / |u|, 0-d, from the sums of squares, that of x before its decay."""
    x_norm, u_norm = s.keep * x_square.sqrt(), u_square.sqrt()
    ratio = (x_norm.clamp(s.norm_min, s.norm_max) / u_norm).clamp(max=s.ratio_max)
    usable = (x_norm > 0) & (u_norm > 0) & (x_norm < math.inf) & (u_norm < math.inf) & (s.adapt > 0)
    return torch.where(usable & (ratio <= LARGEST), ratio, 1.0)


def _square_sum(t: Tensor) -> Tensor:
    """Return the sum of squares, in double precision so that length, threads and compiler do not change the ratio."""
    return t.square().sum(dtype=torch.float64)


def lamb_(
    x: Tensor, g: Tensor, m: Tensor, v: Tensor, s: Scalars, factor: Tensor, finite: Tensor | None = None
) -> Tensor:
    """Update one tensor: the specification, of which lamb.cpp and lamb_triton.py are copies. Returns the trust ratio.

    finite: 0-d; if it is False, x, m and v stay as they are.
    """

    def replace(old: Tensor, new: Tensor) -> None:
        old.copy_(new if finite is None else torch.where(finite, new, old))

    g = g * factor
    replace(m, s.beta1 * m + s.new1 * g)
    replace(v, s.beta2 * v + s.new2 * g * g)
    u = m / (s.root * v.sqrt() + s.eps)
    u = (u * cautious(u, g) if s.caution else u) + s.weight_decay * x
    ratio = trust_ratio(_square_sum(x), _square_sum(u), s).to(x.dtype)
    replace(x, s.keep * x - s.lr * ratio * u)
    return ratio


def cautious(u: Tensor, g: Tensor) -> Tensor:
    """Return the factors of an update that goes nowhere uphill, of mean 1: 0 where u and g differ in sign."""
    same = u * g > 0
    return same / (same.sum(dtype=torch.float64) / max(same.numel(), 1)).clamp(min=1e-3).to(u.dtype)


def lamb_eager_(x: Tensor, g: Tensor, m: Tensor, v: Tensor, s: Scalars, factor: Tensor, u: Tensor) -> Tensor:
    """Do the same as `lamb_` in place, without a compiler. u is scratch memory as long as x."""
    ((x_square,), (u_square,)) = moments_foreach_([(x, g, m, v, u)], s, factor)
    ratio = trust_ratio(x_square, u_square, s).to(x.dtype)
    if s.keep != 1:
        x.mul_(s.keep)
    x.sub_(u.mul_(s.lr * ratio))
    return ratio


def moments_foreach_(rows: Sequence[Row], s: Scalars, factor: Tensor) -> Tensor:
    """Compute m, v and u, the first half of an update. Returns the squares of |x| and |u|: (2, len(rows)), float64."""
    x, g, m, v, u = (list(column) for column in zip(*rows))
    torch._foreach_copy_(u, g)
    torch._foreach_mul_(u, factor)
    torch._foreach_lerp_(m, u, s.new1)
    torch._foreach_mul_(v, s.beta2)
    torch._foreach_addcmul_(v, u, u, s.new2)
    torch._foreach_copy_(u, v)
    torch._foreach_sqrt_(u)
    torch._foreach_mul_(u, s.root)
    torch._foreach_add_(u, s.eps)
    torch._foreach_reciprocal_(u)
    torch._foreach_mul_(u, m)
    if s.caution:
        torch._foreach_mul_(u, [cautious(*pair) for pair in zip(u, g)])
    torch._foreach_add_(u, x, alpha=s.weight_decay)
    squares = (torch._foreach_mul(column, column) for column in (x, u))
    return torch.stack([torch.stack(torch._foreach_norm(some, 1, torch.float64)) for some in squares])  # their sums


@functools.cache
def can_compile(device_type: str) -> bool:
    """Try whether LAMB can be compiled: by a C++ compiler for CPUs, by torch for GPUs."""
    if device_type == "cpu":
        return cpp_lamb.available()
    if device_type == "meta":  # on which a plan is made
        return False
    try:
        torch.compile(torch.sin, fullgraph=True)(torch.zeros(1, device=device_type))
    except Exception as error:  # of Triton, of the compiler that it calls, of the driver
        logger.warning("torch.compile fails on this GPU: %s", (str(error).strip() or repr(error)).splitlines()[0])
        return False
    return True


def choose_impl(optimizer: Optimizer, agree: Callable[[bool], bool]) -> None:
    """Replace impl="auto" by "eager" unless all ranks can compile: last bits differ. agree: can all if this can?"""
    groups = [group for group in optimizer.param_groups if group.get("impl") == "auto"]
    kinds = {p.device.type for group in groups for p in group["params"]}
    if groups and not agree(all(map(can_compile, kinds))):
        for group in groups:
            group["impl"] = "eager"


def lamb_compiled_(
    tensors: Sequence[Tensors], s: Scalars, factor: Tensor, finite: Tensor | None = None
) -> list[Tensor]:
    """Update many tensors with compiled code; `finite` is for GPUs. Returns their trust ratios."""
    try:
        if factor.is_cpu:
            alike = [(x, as_kernels_read(g, x.dtype), m, v) for x, g, m, v in tensors]
            return cpp_lamb.lamb_native_(alike, s, float(factor))
        from largebatch.optim import lamb_triton  # Triton comes with a torch for CUDA alone

        return lamb_triton.lamb_triton_([same_kind(four) for four in tensors], s, factor, finite)
    except (OSError, ImportError, subprocess.CalledProcessError) as error:
        raise RuntimeError(NOT_COMPILED) from error


def update(
    impl: str, tensors: Sequence[Tensors], s: Scalars, factor: Tensor, finite: Tensor | None = None
) -> list[Tensor]:
    """Update tensors of one device and dtype, those of the factor; return their trust ratios.

    finite: see `lamb_`; the eager code and lamb.cpp do not know it.
    """
    compiles = not s.caution and (impl == "compile" or impl == "auto" and can_compile(factor.device.type))
    if compiles and (finite is None or not factor.is_cpu):
        return lamb_compiled_(tensors, s, factor, finite)
    tensors = [flat(four) for four in tensors]
    if impl == "plain" or finite is not None:
        return [lamb_(*four, s, factor, finite) for four in tensors]
    u = factor.new_empty(max(four[0].numel() for four in tensors))
    return [lamb_eager_(*four, s, factor, u[: four[0].numel()]) for four in tensors]


def moments(impl: str, rows: Sequence[Row], s: Scalars, factor: Tensor) -> Tensor:
    """Call `moments_foreach_`, or its equal in C++ on CPUs."""
    assert not s.caution, "the share of a whole tensor is needed"
    if factor.device.type == "cpu" and (impl == "compile" or impl == "auto" and can_compile("cpu")):
        try:
            return cpp_lamb.moments_native_(rows, s, float(factor))
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(NOT_COMPILED) from error
    return moments_foreach_(rows, s, factor)


class Lamb(Stateful):
    """LAMB; the formulas are at the top of this file. All options can be set per parameter group.

    `Lamb.paper`, `colossal`, `nvlamb` and `lambc` build it for a model with the options of a preset.

    Args:
        params: parameters or groups; contiguous, float32 or float64.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decay, part of the update whose norm is taken.
        bias_correction: divide the moments by 1 - beta^t.
        adapt: multiply by the trust ratio; if False, the group takes Adam's steps, with decay.
        norm_range: phi clamps the norm of the parameter to this range.
        max_trust_ratio: upper bound of the ratio; 1 gives LAMBC.
        decay: "coupled", a part of the update; "decoupled" or "corrected", apart from it.
        caution: leave out what would move against the gradient; computed by eager code.
        impl: "compile", "eager", "plain" (the specification), or "auto": compile if a compiler is found.
        max_grad_norm: None, because Lamb does not clip; a number raises a ValueError, which names the way to clip.

    `trust_ratios` holds each parameter's ratio in the last step, as 0-d tensors.
    """

    # Set for one step and used up by it, so not in the state_dict. Class defaults, because copies skip the constructor.
    clip_factor: Tensor | None = None
    finite: Tensor | None = None  # 0-d; if it is False, the step changes nothing but its count (see `take_back`)
    can_skip = True  # whether a step looks at `finite`
    trust_ratios: Mapping[Tensor, Tensor] = MappingProxyType({})
    choose_impl = choose_impl

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adapt: bool = True,
        norm_range: tuple[float, float] = (0.0, math.inf),
        max_trust_ratio: float = math.inf,
        decay: str = "coupled",
        caution: bool = False,
        impl: str = "auto",
        max_grad_norm: float | None = None,
    ) -> None:
        require_parameters(params, "call Lamb.paper(model), or Lamb(model.parameters()) to adapt all alike")
        if max_grad_norm is not None:
            raise ValueError(
                f"max_grad_norm is {max_grad_norm}, and Lamb does not clip: leave it out, and call "
                f"torch.nn.utils.clip_grad_norm_(model.parameters(), {max_grad_norm}) before the step (with Horovod, "
                "between optimizer.synchronize() and a step inside optimizer.skip_synchronize())."
            )
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, impl=impl)
        options |= dict(bias_correction=bias_correction, adapt=adapt)
        options |= dict(norm_range=norm_range, max_trust_ratio=max_trust_ratio, decay=decay, caution=caution)
        super().__init__(params, options)

    @classmethod
    def paper(cls, model: nn.Module, lr: float = 1e-3, *, weight_decay: float = 0.01, **options: Any) -> "Lamb":
        """Build `--optim.preset paper`: 1-D tensors and biases are neither decayed nor adapted.

        Nor are parameters that `model.no_weight_decay()` names. options: those of `Lamb`.
        """
        return cls._of("paper", model, lr, weight_decay, options)

    @classmethod
    def colossal(cls, model: nn.Module, lr: float = 1e-3, *, weight_decay: float = 0.01, **options: Any) -> "Lamb":
        """Build `--optim.preset colossal`, that of the 32K run: all is decayed and adapted, without bias correction."""
        return cls._of("colossal", model, lr, weight_decay, options)

    @classmethod
    def nvlamb(cls, model: nn.Module, lr: float = 1e-3, *, weight_decay: float = 0.01, **options: Any) -> "Lamb":
        """Build `--optim.preset nvlamb`: as `paper`, but tensors without decay are adapted, too."""
        return cls._of("nvlamb", model, lr, weight_decay, options)

    @classmethod
    def lambc(cls, model: nn.Module, lr: float = 1e-3, *, weight_decay: float = 0.01, **options: Any) -> "Lamb":
        """Build `--optim.preset lambc`: as `paper`, with trust ratios of at most 1."""
        return cls._of("lambc", model, lr, weight_decay, options)

    @classmethod
    def _of(cls, preset: str, model: nn.Module, lr: float, weight_decay: float, options: dict[str, Any]) -> "Lamb":
        groups, chosen = options_of(preset, model, weight_decay=weight_decay)
        return cls(groups, lr, **(chosen | options))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_options(self.defaults | param_group)
        super().add_param_group(param_group)
        if self.param_groups[-1]["decay"] == "corrected":
            self.param_groups[-1].setdefault("max_lr", float(self.param_groups[-1]["lr"]))
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in DTYPES or not p.is_contiguous():
                self.param_groups.pop()
                raise ValueError(
                    f"Lamb needs contiguous float32 or float64 parameters, got {p.dtype} of shape "
                    f"{tuple(p.shape)} and strides {p.stride()}; use autocast for half precision and "
                    f"channels_last for inputs only"
                )

    @takes_closure
    def step(self) -> None:
        factor, self.clip_factor = self.clip_factor, None
        finite, self.finite = self.finite, None
        ratios: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for (step, _, _, before), params in self._alike(group).items():
                scale = params[0].new_ones(()) if factor is None else factor.to(params[0])
                tensors = [self._tensors(p) for p in params]
                ratios |= zip(params, update(group["impl"], tensors, scalars(group, step, before), scale, finite))
                increment_version(params)  # as torch does for what it changes in place
        self.trust_ratios = MappingProxyType(ratios)

    def gradient_norm(self) -> Tensor | None:
        """Return the global norm of the gradients, 0-d, if it can be computed in C++, as the step is; else None.

        It depends on `impl`, on which all ranks agree, so all have the same bits.
        """
        gradients = [p.grad for p in with_gradient(self)]
        kinds = {(g.device.type, g.dtype, g.layout) for g in gradients}
        wanted = all(group["impl"] in ("auto", "compile") for group in self.param_groups)
        in_cpp = wanted and len(kinds) == 1 and kinds <= NATIVE and can_compile("cpu")
        return cpp_lamb.norm_native(gradients) if in_cpp else None

    def take_back(self) -> None:
        """Take back the count of the step just done, because its `finite` was False."""
        for p in with_gradient(self):
            self.state[p]["step"] -= 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check what `load_state_dict` loads: a state of this class, of timm's or apex's LAMB, or of AdamW."""
        if "defaults" not in state:  # which copies and pickles have
            state = adopted(self, state, lambda group: STATE, self._state_shape)
            for group in state["param_groups"]:
                check_options(group)
        super().__setstate__(state)

    def _state_shape(self, p: Tensor) -> tuple[int, ...]:
        return tuple(p.shape)

    def init_param(self, p: Tensor) -> dict[str, Any]:
        """Return the state of one parameter, first set to zeros if there is none."""
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        return state

    def _alike(self, group: dict[str, Any]) -> dict[tuple[int, torch.device, torch.dtype, float], list[Tensor]]:
        """Advance the steps of the parameters with a gradient. Returns them by step, device, dtype and "before"."""
        alike = defaultdict(list)
        before = group["beta2_power"] / group["betas"][1] if "beta2_power" in group else 1.0
        for p in group["params"]:
            if p.grad is not None:
                state = self.init_param(p)
                state["step"] = int(state["step"]) + 1  # AdamW has a tensor
                if state["step"] == 1 and before < 1.0:
                    state["before"] = before
                alike[state["step"], p.device, p.dtype, state.get("before", 1.0)].append(p)
        return alike

    def _tensors(self, p: Tensor) -> Tensors:
        g, state = p.grad, self.state[p]
        if g is None or g.layout is not torch.strided:
            raise ValueError(f"Lamb needs dense gradients, got a sparse one of shape {tuple(p.shape)}")
        return p, g, state["exp_avg"], state["exp_avg_sq"]


def flat(tensors: Tensors) -> Tensors:
    x, g, m, v = same_kind(tensors)
    return x.view(-1).data, g.view(-1).data, m.view(-1).data, v.view(-1).data


def check_options(options: Mapping[str, Any]) -> None:
    number: dict[str, Any] = {
        name: value if isinstance(value, (Real, Tensor)) else math.nan for name, value in options.items()
    }
    betas, norms = (
        [*pair] if isinstance(pair, (tuple, list)) and len(pair) == 2 else [math.nan, math.nan]
        for pair in (options["betas"], options["norm_range"])
    )
    rules = {
        "lr": (number["lr"] >= 0, "a number >= 0"),
        "betas": (all(0 <= beta < 1 for beta in betas), "two numbers in [0, 1)"),
        "eps": (number["eps"] >= 0, "a number >= 0"),
        "weight_decay": (number["weight_decay"] >= 0, "a number >= 0"),
        "norm_range": (0 <= norms[0] <= norms[1], "two numbers with 0 <= low <= high"),
        "max_trust_ratio": (number["max_trust_ratio"] > 0, "a number above 0"),
        "impl": (options["impl"] in IMPLS, f"one of {', '.join(IMPLS)}"),
        "decay": (options["decay"] in DECAYS, f"one of {', '.join(DECAYS)}"),
        "maximize": (not options.get("maximize"), "left out, and the loss negated"),
    }
    for name, (holds, expected) in rules.items():
        if not holds:
            raise ValueError(f"Lamb's {name} must be {expected}, got {options[name]!r}")
