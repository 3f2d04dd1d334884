"""LAMB where no rank has a whole tensor: cut along model axes, or updated piece by piece by data ranks (ZeRO).

The formulas are those of optim/lamb.py, and so are options and state. Its norms are those of whole tensors, so a step
is in two phases: moments, updates u, and the squares of x and u of what this rank has; one sum of all squares of all
tensors over all ranks that have a part, each element counted once; then x - lr ratio u, and under ZeRO the gathering
of the parameters. u depends on the clip, so the norm of the gradients is a sum of its own before that (`global_norm`).

With adapt=False in every group, and eps 1e-8, it is AdamW, to which ZeRO comes this way.

u waits for the sum in memory as long as what this rank updates, which is given back after the step.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.optim.lamb import Lamb, Scalars, Tensors, moments, scalars, trust_ratio
from largebatch.parallel import collectives
from largebatch.parallel.state_sharding import Sharding


class _Work(NamedTuple):
    """What the first phase leaves to the second."""

    params: list[Tensor]  # of one group, at the same step
    s: Scalars
    owned: list[Tensor]  # those of which this rank updates a piece;
    x: list[Tensor]  # the pieces, where they are updated,
    u: Sequence[Tensor]  # and by what


class ShardedLamb(Lamb):
    """`Lamb` for parts of tensors. Set `sharding` before it is used, and after wrapping: Horovod makes a new instance.

    Under ZeRO the moments in `state` are those of this rank's piece, 1-D; step counters are everywhere. `state_of`
    and `set_state_of` speak of whole local tensors in any case.
    """

    sharding: Sharding | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; a collective. Returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sharding = self._known()
        factor, self.clip_factor = self.clip_factor, None
        squares = torch.zeros(2, sharding.count, dtype=torch.float64, device=sharding.home)
        works = [
            self._first_phase(params, scalars(group, step), group["impl"], factor, squares)
            for group in self.param_groups
            for (step, *_), params in self._alike(group).items()
        ]
        squares = collectives.all_reduce(squares, sharding.counted)
        ratios: dict[Tensor, Tensor] = {}
        for work in works:
            ratios |= self._second_phase(work, squares)
        sharding.gather(ratios)
        self.trust_ratios = MappingProxyType(ratios)
        return loss

    def _first_phase(
        self, params: list[Tensor], s: Scalars, impl: str, factor: Tensor | None, squares: Tensor
    ) -> _Work:
        """Moments, u, and this rank's share of the squares of parameters of one device and type."""
        sharding = self._known()
        owned = [p for p in params if sharding.own(p).length]
        if not owned:
            return _Work(params, s, [], [], [])
        tensors = [self._tensors(p) for p in owned]
        x, sizes = [four[0] for four in tensors], [four[0].numel() for four in tensors]
        u = x[0].new_empty(sum(sizes)).split(sizes)
        scale = x[0].new_ones(()) if factor is None else factor.to(x[0])
        share = squares.new_tensor([sharding.share[p] for p in owned])
        found = moments(impl, [(*four, part) for four, part in zip(tensors, u)], s, scale)
        squares[:, [sharding.numbers[p] for p in owned]] = found * share
        return _Work(params, s, owned, x, u)

    def _second_phase(self, work: _Work, squares: Tensor) -> dict[Tensor, Tensor]:
        """Update this rank's pieces; the trust ratios of all parameters."""
        sharding = self._known()
        x_square, u_square = squares[:, [sharding.numbers[p] for p in work.params]]
        ratios = trust_ratio(x_square, u_square, work.s).to(work.params[0].dtype)
        ratio_of = dict(zip(work.params, ratios.unbind()))
        for p, x, u in zip(work.owned, work.x, work.u):
            x.addcmul_(u, ratio_of[p], value=-work.s.lr)
            if sharding.offload:
                sharding.own(p).of(p).copy_(x)
        return dict(zip(work.params, ratios.to(work.params[0].device).unbind()))

    def _tensors(self, p: Tensor) -> Tensors:
        """x, g, m and v of this rank's piece, flat, on the device where it is updated."""
        sharding = self._known()
        x, g, m, v = super()._tensors(p)
        piece = sharding.own(p)
        x, g = piece.of(x), piece.of(g)
        if sharding.offload:  # a copy in any case, so that the host's own parameters take the same way
            x, g = x.to(sharding.home, copy=True), g.to(sharding.home)
        return x, g.to(x.dtype), m, v

    def init_param(self, p: Tensor) -> dict[str, Any]:
        """The state of one parameter; zeros if it had none."""
        state = self.state[p]
        if not state:
            zeros = torch.zeros_like(p, memory_format=torch.contiguous_format)
            self.set_state_of(p, {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros})
        return self.state[p]

    # -- whole local tensors, for checkpoints ------------------------------------------------------------------

    def state_of(self, p: Tensor) -> dict[str, Any]:
        """step, exp_avg and exp_avg_sq of p's shape, on all data ranks; {} if there is none. A collective."""
        sharding, state = self._known(), self.state.get(p)
        if not state:
            return {}
        return {"step": state["step"]} | {name: sharding.whole(p, state[name]) for name in ("exp_avg", "exp_avg_sq")}

    def set_state_of(self, p: Tensor, state: dict[str, Any]) -> None:
        """Take this rank's piece of what `state_of` gave, or of what was put together and cut anew for another mesh."""
        sharding = self._known()
        self.state.pop(p, None)
        if not state:
            return
        piece = sharding.own(p)
        self.state[p] = {"step": int(state["step"])}
        for name in ("exp_avg", "exp_avg_sq"):
            whole = state[name].detach().contiguous()
            part = piece.of(whole) if sharding.zero else whole
            self.state[p][name] = part.to(sharding.home, p.dtype, copy=True)

    def _known(self) -> Sharding:
        if self.sharding is None:
            raise ValueError("ShardedLamb does not know its mesh: set its sharding, after Communicator.wrap.")
        return self.sharding


def global_norm(optimizer: Optimizer, sharding: Sharding) -> Tensor:
    """Norm of the gradients of the whole model, 0-d, the same on all its ranks: a collective of a replica.

    Where a rank has a summand of a gradient, `cuts.sum_partial_gradients` comes before.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    device = next(iter(sharding.numbers)).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    if params:
        norms = torch.stack(torch._foreach_norm([p.grad for p in params], 2, torch.float64))
        total = norms.square() @ norms.new_tensor([sharding.share[p] for p in params])
    return collectives.all_reduce(total, sharding.model).sqrt().to(next(iter(sharding.numbers)).dtype)
