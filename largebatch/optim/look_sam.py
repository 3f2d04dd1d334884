"""Look-LayerSAM: train towards flat minima at little more than the cost of one gradient per step (arXiv:2203.02714).

x are the weights, and g is the gradient of the global batch at x. Every `every` steps, for each tensor j,

    e_j = rho |x_j| / |g_j| g_j                 uphill, by the fraction rho of the norm of the tensor
    s   = gradient at x + e                     of the same micro-batches, with the same random draws
    d   = s - (s g) / |g|^2 g                   the part of s that is orthogonal to g; it is kept

and the base optimizer takes its step from x with s instead of g. In the other steps it gets

    g + alpha |g| / |d| d

Norms and products without an index are over all tensors together. They are added up in double precision. e_j is 0 if a
norm is 0 or not finite; the kept part is left out as long as d is 0. Clipping comes after all this.

SAM (arXiv:2010.01412) has e = rho g / |g|, LookSAM d and its reuse as above, and the layer-wise variant a ratio
|x_j| / |g_j| for each layer. This file was written from restatements of the paper and from public code, not from the
paper's text; the repository of its authors is empty. Those sources differ in four places, and here the first is done:

    e_j         rho times ratio times g_j, which does not depend on the scale of the loss, as LARS does not. Others
                divide by |g| over all tensors as well, which makes e longer the smaller the gradient is, and bound the
                ratio; or they take no |x_j|, and move all tensors by the same length.
    d           by product and norms of whole gradients, as in the paper's formulas. Others take them per tensor.
    order       clip what the base optimizer gets. Others clip g and s.
    start       the first step computes s. One of them takes no d in the first `every` steps.

A layer is a tensor here, as in LAMB. So rho is relative, and not comparable with published values of SAM without
ratios. The reuse gives d the length alpha |g|, however short d is; docs/optimizers.md shows what a large alpha does
to a short run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

DIRECTION = "sam_direction"  # key of a parameter's state: d, or g while the second gradient is computed
AGE = "sam_age"  # option of each group: steps since d was computed; d is due when it is `every`


@dataclass(frozen=True)
class LookSam:
    """The arithmetic of Look-LayerSAM on the weights and gradients of an optimizer, which keeps its state.

    So checkpoints, broadcasts and comparisons of the state hold its state, too. Each rank computes the same bits
    from the same reduced gradient. Besides d, a second gradient needs a copy of the weights.
    """

    rho: float
    every: int
    alpha: float

    def begin(self, optimizer: Optimizer) -> None:
        """Create the state of a run at its beginning; the optimizer's own state is there already."""
        for group in optimizer.param_groups:
            group[AGE] = self.every
            for p in group["params"]:
                if p.requires_grad:
                    optimizer.state[p][DIRECTION] = torch.zeros_like(p)

    def due(self, optimizer: Optimizer) -> bool:
        """Return whether the coming step computes a second gradient; the same on all ranks."""
        return bool(optimizer.param_groups[0][AGE] >= self.every)

    @contextmanager
    def perturbed(self, optimizer: Optimizer) -> Iterator[None]:
        """Move the weights by e for the time of the block, and keep g. At its end the weights have their bits again."""
        params = _with_gradient(optimizer)
        saved = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, factor in zip(params, self._factors(params)):
                _direction(optimizer, p).copy_(p.grad)
                p.addcmul_(p.grad, factor)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, saved)

    def _factors(self, params: list[Any]) -> list[Tensor]:
        """Return rho |x_j| / |g_j|, 0-d, in the type of each tensor."""
        norms = (torch._foreach_norm(tensors, 2, torch.float64) for tensors in (params, [p.grad for p in params]))
        factors = []
        for p, x_norm, g_norm in zip(params, *norms):
            factor = self.rho * x_norm / g_norm
            factors.append(torch.where(torch.isfinite(factor), factor, 0.0).to(p.dtype))
        return factors

    @torch.no_grad()
    def keep(self, optimizer: Optimizer) -> None:
        """Compute d from g, which was kept, and the second gradient, which is in the parameters."""
        params = _with_gradient(optimizer)
        kept, gradients = [_direction(optimizer, p) for p in params], [p.grad for p in params]
        product = torch.stack([torch.mul(s, g).sum(dtype=torch.float64) for s, g in zip(gradients, kept)]).sum()
        share = product / _norm(kept).square()
        for d, s in zip(kept, gradients):
            d.mul_(-share.to(d.dtype)).add_(s)

    @torch.no_grad()
    def reuse(self, optimizer: Optimizer) -> None:
        """Add the kept part to the gradient."""
        params = _with_gradient(optimizer)
        kept, gradients = [_direction(optimizer, p) for p in params], [p.grad for p in params]
        length = _norm(kept)
        factor = torch.where(length > 0, self.alpha * _norm(gradients) / length, 0.0)
        for d, g in zip(kept, gradients):
            g.addcmul_(d, factor.to(g.dtype))

    def complete_step(self, optimizer: Optimizer, *, refreshed: bool, applied: bool) -> None:
        """Count the step. If it should have computed d and was skipped, the next one does."""
        for group in optimizer.param_groups:
            if not refreshed:
                group[AGE] += 1
            elif applied:
                group[AGE] = 1


def _with_gradient(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _direction(optimizer: Optimizer, p: Tensor) -> Tensor:
    """Return d of a parameter; zeros if it was unfrozen since the run began."""
    state = optimizer.state[p]
    if DIRECTION not in state:
        state[DIRECTION] = torch.zeros_like(p)
    found: Tensor = state[DIRECTION]
    return found


def _norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack(list(torch._foreach_norm(tensors, 2, torch.float64))).norm()
