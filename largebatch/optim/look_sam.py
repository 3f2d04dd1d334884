"""Look-LayerSAM: train towards flat minima at little more than the cost of one gradient per step (arXiv:2203.02714).

x are the weights, and g is the gradient of the global batch at x. Every `every` steps, for each tensor j,

    e_j = rho |x_j| / |g_j| g_j                 uphill, by the fraction rho of the norm of the tensor
    s   = gradient at x + e                     of the same micro-batches, with the same random draws
    d   = s - (s g) / |g|^2 g                   the part of s that is orthogonal to g; it is kept

and the base optimizer takes its step from x with s instead of g. In the other steps it gets

    g + alpha |g| / |d| d

Norms and products without an index are over all tensors together, in double precision. e_j is 0 if a norm is 0 or not
finite; d is left out while it is 0. Clipping comes after all this. Where sources differ: docs/optimizers.md.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.native.copies import set_aside
from largebatch.optim.factory import init_state
from largebatch.optim.states import with_gradient

DIRECTION = "sam_direction"  # key of a parameter's state: d, or g while the second gradient is computed
AGE = "sam_age"  # option of each group: steps since d was computed; d is due when it is `every`


@dataclass(frozen=True)
class LookSam:
    """The arithmetic of Look-LayerSAM. Its state is in that of the optimizer, so checkpoints and broadcasts have it."""

    rho: float
    every: int = 5  # steps from one second gradient to the next; 1: in every step, as SAM does
    alpha: float = 0.1  # norm of the part that is used again, relative to that of the gradient

    def begin(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group[AGE] = self.every
            for p in group["params"]:
                if p.requires_grad:
                    optimizer.state[p][DIRECTION] = torch.zeros_like(p)

    def due(self, optimizer: Optimizer) -> bool:
        """Return whether this step computes a second gradient; the same on all ranks."""
        return bool(optimizer.param_groups[0][AGE] >= self.every)

    def gradient(
        self, optimizer: Optimizer, compute: Callable[..., tuple[Tensor, Tensor]], batches: Iterator[Any]
    ) -> tuple[Tensor, Tensor]:
        """Leave the gradient for the base optimizer in the parameters; return the loss and the norm of g.

        compute: leaves the reduced gradient of micro-batches in the parameters and returns its loss and norm; with
        again=True it is called once more in the step, for the same micro-batches at x + e.
        """
        if not self.due(optimizer):
            loss, norm = compute(batches)
            self.reuse(optimizer)
            return loss, norm
        recorded: list[Callable[[], Any]] = []
        loss, norm = compute(_record(batches, recorded))
        if torch.isfinite(norm):  # else the step will be skipped
            with self.perturbed(optimizer):
                compute((batch() for batch in recorded), again=True)
            self.keep(optimizer)
        return loss, norm

    def complete_step(self, optimizer: Optimizer, *, applied: bool) -> None:
        """Count the step. If it should have computed d and was skipped, the next one does."""
        due = self.due(optimizer)
        for group in optimizer.param_groups:
            if not due:
                group[AGE] += 1
            elif applied:
                group[AGE] = 1

    @contextmanager
    def perturbed(self, optimizer: Optimizer) -> Iterator[None]:
        """Keep g, and move the weights by e for the time of the block; then they have their bits again."""
        params, kept, gradients = _parts(optimizer)
        saved = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, d, g, factor in zip(params, kept, gradients, self._factors(params, gradients)):
                d.copy_(g)
                p.addcmul_(g, factor)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, saved)

    def _factors(self, params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Return rho |x_j| / |g_j|, 0-d, in the type of each tensor."""
        norms = (torch._foreach_norm(tensors, 2, torch.float64) for tensors in (params, gradients))
        factors = [(p, self.rho * x_norm / g_norm) for p, x_norm, g_norm in zip(params, *norms)]
        return [torch.where(torch.isfinite(factor), factor, 0.0).to(p.dtype) for p, factor in factors]

    @torch.no_grad()
    def keep(self, optimizer: Optimizer) -> None:
        """Compute d from g, which was kept, and the second gradient."""
        _, kept, gradients = _parts(optimizer)
        product = torch.stack([torch.mul(s, g).sum(dtype=torch.float64) for s, g in zip(gradients, kept)]).sum()
        share = product / _norm(kept).square()
        for d, s in zip(kept, gradients):
            d.mul_(-share.to(d.dtype)).add_(s)

    @torch.no_grad()
    def reuse(self, optimizer: Optimizer) -> None:
        _, kept, gradients = _parts(optimizer)
        length = _norm(kept)
        factor = torch.where(length > 0, self.alpha * _norm(gradients) / length, 0.0)
        for d, g in zip(kept, gradients):
            g.addcmul_(d, factor.to(g.dtype))


def _record(batches: Iterator[Any], into: list[Callable[[], Any]]) -> Iterator[Any]:
    for batch in batches:
        into.append(_aside(batch))
        yield batch


def _aside(value: Any) -> Callable[[], Any]:
    """Set a batch aside, tensors of a GPU in the host's memory; return a function that gives it back."""
    if isinstance(value, Tensor):
        return set_aside(value)
    if isinstance(value, tuple):  # a named one
        items = [*map(_aside, value)]
        return lambda: type(value)(*(item() for item in items))
    if is_dataclass(value):
        parts = {one.name: _aside(getattr(value, one.name)) for one in fields(value)}
        kind: Any = type(value)
        return lambda: kind(**{name: part() for name, part in parts.items()})
    return lambda: value


def _parts(optimizer: Optimizer) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    """Return the parameters that have a gradient, d of each (zeros if just unfrozen), and the gradients."""
    params = with_gradient(optimizer)
    if any(not optimizer.state[p] for p in params):
        init_state(optimizer)  # torch's optimizers take a state that has anything for a whole one
    for p in (p for p in params if DIRECTION not in optimizer.state[p]):
        optimizer.state[p][DIRECTION] = torch.zeros_like(p)
    return params, [optimizer.state[p][DIRECTION] for p in params], [p.grad for p in params]


def _norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack(list(torch._foreach_norm(tensors, 2, torch.float64))).norm()
