"""Muon for the matrices of hidden linear layers, and AdamW or LAMB for all other tensors.

One step for a matrix x (rows, columns) with gradient g, as torch.optim.Muon computes it, with the constants of
https://kellerjordan.github.io/posts/muon:

    m = momentum m + (1 - momentum) g
    u = momentum m + (1 - momentum) g                               Nesterov
    o = u / |u|                                                     transposed if there are more rows than columns
    o = 3.4445 o + (-4.7750 a + 2.0315 a a) o   with a = o o'       five times, in bfloat16
    x = x - lr weight_decay x - lr scale o

This iteration of Newton and Schulz brings all singular values of o near 1; it lifts small ones, and roundings with
them, by a factor of up to 3.4445^5 (docs/optimizers.md). After `comm.wrap`, each o is computed by one rank for all.

scale depends on the optimizer of the other tensors, so that one learning rate serves both:

    AdamW     0.2 sqrt(max(rows, columns))    the update of an element is as large as AdamW's (arXiv:2502.16982)
    LAMB      sqrt(max(1, rows / columns))    that of the page above; lr is a step relative to weights of a usual norm

Embeddings, biases, norms, convolutions and the classifier are other tensors, as published. A matrix that holds several
(the query, key and value of an attention) is updated as one, or, with split_qkv, as several.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, _muon

from largebatch.optim.lamb import STATE, Lamb, choose_impl
from largebatch.optim.presets import owner
from largebatch.optim.states import Stateful, adam_state, adopted, require_parameters, takes_closure

KINDS: dict[str, Callable[..., Optimizer]] = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW, "lamb": Lamb}
STATES = {"muon": ("momentum_buffer",), "adamw": STATE, "lamb": STATE}  # of a parameter
SCALES = {"adamw": "match_rms_adamw", "lamb": "original"}  # torch's names, by the optimizer of the other tensors
FUSED = {"qkv": 3, "kv": 2}  # matrices in one weight, one below the other, by the name of the layer


class Muon(Stateful):
    """Several optimizers as one. The option `kind` of a group names the one that steps it: muon, adamw or lamb.

    The other options of a group are those of that optimizer. So all are in the groups, from which Horovod's
    DistributedOptimizer is built.
    """

    _parts: dict[str, Optimizer] | None = None  # a class default: copies skip the constructor
    comm: Any = None  # the ranks that share the work, if `comm.wrap` has set them
    choose_impl = choose_impl

    def __init__(self, params: Iterable[dict[str, Any]], lr: float = 1e-3) -> None:
        require_parameters(params, "call largebatch.optim.build_optimizer with this model and name='muon'")
        super().__init__(params, dict(lr=lr))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        kind = param_group.get("kind")
        if kind not in KINDS:
            raise ValueError(f"the kind of a group of Muon must be one of {', '.join(KINDS)}, got {kind!r}")
        (whole,) = KINDS[kind]([self.defaults | param_group]).param_groups  # with its defaults, and checked
        param_group.update(whole)
        super().add_param_group(param_group)

    def _part(self, kind: str) -> Optimizer:
        """Return the optimizer of one kind; it works on the groups and on the state of this one."""
        groups = [group for group in self.param_groups if group["kind"] == kind]
        if self._parts is None:
            self._parts = {}
        if kind not in self._parts:
            self._parts[kind] = KINDS[kind]([dict(group) for group in groups])
        part = self._parts[kind]
        part.param_groups, part.state = groups, self.state
        return part

    @takes_closure
    def step(self) -> None:
        for kind in dict.fromkeys(group["kind"] for group in self.param_groups):
            if kind == "muon":
                self._step_matrices()
            else:
                self._part(kind).step()

    def _step_matrices(self) -> None:
        """Step as torch.optim.Muon does, to the bit; each data rank computes o for some matrices, for all ranks."""
        if not (matrices := [*self._matrices()]):
            return
        rank, size = (self.comm.data_rank, self.comm.data_size) if self.comm else (0, 1)
        ranks, sizes = owners([x.shape for x, *_ in matrices], size), [0] * size
        own = [matrices[0][0].new_empty(0, dtype=torch.bfloat16)]  # There may be more ranks than matrices.
        for (x, g, m, group), by in zip(matrices, ranks):
            m.lerp_(g, 1 - group["momentum"])
            sizes[by] += x.numel()
            if by == rank:
                u = g.lerp(m, group["momentum"]) if group["nesterov"] else m
                options = group["ns_coefficients"], group["ns_steps"], group["eps"]
                own.append(_muon._zeropower_via_newtonschulz(u, *options).flatten())
        flat, starts = torch.cat(own), [*accumulate(sizes, initial=0)]
        if self.comm:  # Horovod copies no bfloat16, so this is another type of 16 bits.
            flat = self.comm.allgather(flat.view(torch.float16), sizes=sizes, name="muon").view(torch.bfloat16)
        for (x, _, _, group), by in zip(matrices, ranks):
            o, lr = flat[starts[by] :][: x.numel()], float(group["lr"])
            starts[by] += x.numel()
            x.mul_(1 - lr * group["weight_decay"])
            x.add_(o.view_as(x), alpha=-_muon._adjust_lr(lr, group["adjust_lr_fn"], x.shape))

    def _matrices(self) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]:
        """Yield each matrix that has a gradient, with the gradient, the momentum and the group."""
        for group in (group for group in self.param_groups if group["kind"] == "muon"):
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                whole = p, p.grad, state["momentum_buffer"]
                for x, g, m in zip(*(tensor.chunk(group.get("parts", 1)) for tensor in whole)):
                    yield x, g, m, group

    @property
    def trust_ratios(self) -> Mapping[Tensor, Tensor]:
        ratios: Mapping[Tensor, Tensor] = getattr((self._parts or {}).get("lamb"), "trust_ratios", MappingProxyType({}))
        return ratios

    def init_param(self, p: Tensor) -> dict[str, Any]:
        group = next(group for group in self.param_groups if any(p is other for other in group["params"]))
        state: dict[str, Any] = self.state[p]
        if not state and group["kind"] == "muon":
            state["momentum_buffer"] = torch.zeros_like(p)
        elif not state and group["kind"] == "adamw":
            state.update(adam_state(p, group))
        elif not state:
            cast(Lamb, self._part("lamb")).init_param(p)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check what `load_state_dict` loads: a state of this class, of the same optimizers."""
        if "defaults" not in state:  # which copies and pickles have
            for number, (own, saved) in enumerate(zip(self.param_groups, state["param_groups"])):
                if saved.get("kind", own["kind"]) != own["kind"]:
                    raise ValueError(
                        f"The state is of another optimizer: {saved['kind']} made that of group {number}, and here "
                        f"that group is of {own['kind']}. Build Muon as it was then, or begin without a state."
                    )
            state = adopted(self, state, lambda group: STATES[group["kind"]])
        super().__setstate__(state)


def hidden_matrices(model: nn.Module, *, split_qkv: bool = False) -> dict[Tensor, int]:
    """Return the weights of the linear layers that are not the classifier, each with the number of its matrices.

    The classifier is what timm's `default_cfg` names so, or else the last linear layer. ValueError if there are no such
    weights, or, with split_qkv, none of `FUSED`.
    """
    model = owner(model, "default_cfg")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    named = getattr(model, "default_cfg", {}).get("classifier") or list(layers)[-1:]
    classifiers = {named} if isinstance(named, str) else set(named)
    parts = {name: FUSED.get(name.rpartition(".")[2], 1) if split_qkv else 1 for name in layers}
    found = {layer.weight: parts[name] for name, layer in layers.items() if name not in classifiers}
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layer below its classifier, so muon has no matrix")
    if split_qkv and {*found.values()} == {1}:
        layer = f"linear layer named {' or '.join(FUSED)}"
        raise ValueError(f"split_qkv=True needs a {layer}, and {type(model).__name__} has none; remove it")
    return found


def cost(shape: Sequence[int]) -> int:
    """Return the floating-point operations of the iteration for a matrix."""
    short, long = sorted(shape)
    return 10 * short**2 * (2 * long + short)


def owners(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Return a rank for each matrix: the costliest first, each for the rank that has the least to compute so far."""
    found, loads = [0] * len(shapes), [(0, rank) for rank in range(ranks)]
    for number in sorted(range(len(shapes)), key=lambda number: -cost(shapes[number])):
        load, found[number] = loads[0]
        heapq.heapreplace(loads, (load + cost(shapes[number]), found[number]))
    return found


def divided(
    groups: list[dict[str, Any]], matrices: dict[Tensor, int], *, momentum: float, rest: str, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Divide groups of parameters among Muon, with `momentum`, and the optimizer `rest`, with `options`."""
    found = []
    for group in groups:
        inside = [p for p in group["params"] if p in matrices]
        others = [p for p in group["params"] if p not in matrices]
        for parts in sorted({matrices[p] for p in inside}):
            own = {key: value for key, value in group.items() if key != "adapt"}  # LAMB's option
            own |= {"kind": "muon", "parts": parts, "momentum": momentum, "adjust_lr_fn": SCALES[rest]}
            found.append(own | {"params": [p for p in inside if matrices[p] == parts]})
        if others:
            found.append({"kind": "lamb" if "impl" in options else rest, **options, **group, "params": others})
    return found
