"""LAMB for tensors that are cut along model axes, or whose pieces are updated by different data ranks (ZeRO).

Formulas, options and state are those of optim/lamb.py. LAMB needs norms of whole tensors, so a step has two phases:

    1. Each rank computes moments, updates u and the squares of x and u for the elements that it has.
       One sum over all ranks follows, for all tensors together. It counts each element once.
    2. Each rank computes x - lr ratio u. Under ZeRO the data ranks then gather the parameters.

u depends on the clip factor, so the gradient norm is reduced first (`global_norm`). Between the phases u needs as much
memory as the parameters that this rank updates.

With adapt=False in every group and eps 1e-8 this is AdamW. That is how AdamW runs under ZeRO.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.native.copies import to_device
from largebatch.optim.lamb import Lamb, Scalars, Tensors, flat, moments, scalars, trust_ratio
from largebatch.optim.states import takes_closure, with_gradient
from largebatch.parallel import collectives
from largebatch.parallel.state_sharding import Sharding


class _Work(NamedTuple):
    """The results of the first phase."""

    params: list[Tensor]  # of one group, at the same step
    s: Scalars
    owned: list[Tensor]  # the parameters of which this rank updates a piece
    x: list[Tensor]  # these pieces, on the device that updates them
    u: Sequence[Tensor]  # the update of each piece


class ShardedLamb(Lamb):
    """`Lamb` for parts of tensors.

    Set `sharding` after comm.wrap, because Horovod makes a new instance there. Under ZeRO `state` has the moments of
    this rank's piece, 1-D, and step counters of all parameters; `state_of` and `set_state_of` exchange whole local
    tensors.
    """

    sharding: Sharding | None = None
    can_skip = False

    @takes_closure
    def step(self) -> None:
        sharding = self._known()
        factor, self.clip_factor = self.clip_factor, None
        squares = torch.zeros(2, sharding.count, dtype=torch.float64, device=sharding.home)
        works = [
            self._first_phase(params, scalars(group, step, before), group["impl"], factor, squares)
            for group in self.param_groups
            for (step, _, _, before), params in self._alike(group).items()
        ]
        squares = collectives.all_reduce(squares, sharding.counted)
        ratios: dict[Tensor, Tensor] = {}
        for work in works:
            ratios |= self._second_phase(work, squares)
        sharding.gather(ratios)
        self.trust_ratios = MappingProxyType(ratios)

    def _first_phase(
        self, params: list[Tensor], s: Scalars, impl: str, factor: Tensor | None, squares: Tensor
    ) -> _Work:
        """Compute moments, u, and this rank's share of the squares, for parameters of one device and type."""
        sharding = self._known()
        owned = [p for p in params if sharding.own(p).length]
        if not owned:
            return _Work(params, s, [], [], [])
        tensors = [self._tensors(p) for p in owned]
        x, sizes = [four[0] for four in tensors], [four[0].numel() for four in tensors]
        u = x[0].new_empty(sum(sizes)).split(sizes)
        scale = x[0].new_ones(()) if factor is None else factor.to(x[0])
        shares = torch.tensor([sharding.share[p] for p in owned], dtype=squares.dtype)
        share, numbers = to_device(shares, sharding.numbers_of(owned), device=squares.device)
        found = moments(impl, [(*four, part) for four, part in zip(tensors, u)], s, scale)
        squares[:, numbers] = found * share
        return _Work(params, s, owned, x, u)

    def _second_phase(self, work: _Work, squares: Tensor) -> dict[Tensor, Tensor]:
        sharding = self._known()
        (numbers,) = to_device(sharding.numbers_of(work.params), device=squares.device)
        x_square, u_square = squares[:, numbers]
        ratios = trust_ratio(x_square, u_square, work.s).to(work.params[0].dtype)
        ratio_of = dict(zip(work.params, ratios.unbind()))
        for p, x, u in zip(work.owned, work.x, work.u):
            if work.s.keep != 1:
                x.mul_(work.s.keep)
            x.addcmul_(u, ratio_of[p], value=-work.s.lr)
            if sharding.offload:
                sharding.own(p).of(p).copy_(x)
        return dict(zip(work.params, ratios.to(work.params[0].device).unbind()))

    def _tensors(self, p: Tensor) -> Tensors:
        """x, g, m and v of this rank's piece, 1-D, on the device that updates it."""
        sharding = self._known()
        x, g, m, v = super()._tensors(p)
        piece = sharding.own(p)
        x, g = piece.of(x), piece.of(g.contiguous())
        if sharding.offload:
            # Copy parameters of the host, too, so that all take the same path: `_second_phase` copies x back.
            x, g = x.to(sharding.home, copy=True), g.to(sharding.home)
        return flat((x, g, m.view(-1), v.view(-1)))

    def init_param(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            zeros = torch.zeros_like(p, memory_format=torch.contiguous_format)
            self.set_state_of(p, {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros})
        return self.state[p]

    def _state_shape(self, p: Tensor) -> tuple[int, ...]:
        sharding = self._known()
        return (sharding.own(p).length,) if sharding.zero else tuple(p.shape)

    # -- whole local tensors, for checkpoints ------------------------------------------------------------------

    def state_of(self, p: Tensor) -> dict[str, Any]:
        """Return step, exp_avg and exp_avg_sq of p's shape; {} without state. All data ranks call it together."""
        sharding, state = self._known(), self.state.get(p)
        if not state:
            return {}
        return {"step": state["step"]} | {name: sharding.whole(p, state[name]) for name in ("exp_avg", "exp_avg_sq")}

    def set_state_of(self, p: Tensor, state: dict[str, Any]) -> None:
        """Keep this rank's piece of a state of p's shape, perhaps one that was cut for another mesh."""
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
            raise ValueError("ShardedLamb does not know its mesh: set its sharding, after comm.wrap.")
        return self.sharding


def global_norm(optimizer: Optimizer, sharding: Sharding) -> Tensor:
    """Compute the norm of the whole model's gradient, 0-d; all ranks of the replica call it together and get the same.

    Call `cuts.sum_partial_gradients` first if ranks have only summands of some gradients.
    """
    params = with_gradient(optimizer)
    device = next(iter(sharding.numbers)).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    if params:
        norms = torch.stack(torch._foreach_norm([p.grad for p in params], 2, torch.float64))
        (share,) = to_device(torch.tensor([sharding.share[p] for p in params], dtype=norms.dtype), device=device)
        total = norms.square() @ share
    return collectives.all_reduce(total, sharding.model).sqrt().to(next(iter(sharding.numbers)).dtype)
