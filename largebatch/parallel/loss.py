"""The objective of image classification from parts of the logits: no rank holds a whole row of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.augment import Augmented
from largebatch.parallel import collectives
from largebatch.parallel.mesh import Mesh
from largebatch.parallel.tensor import Layout, layouts, own_block
from largebatch.precision import at_least_float32


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of parts (b, ..., k) against the same parts of the targets, summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mass: Tensor, mesh: Mesh, layout: Layout) -> Tensor:
        """mass (b, ...): sum of targets over all classes; it and targets may be the same for all rows of a sample."""
        largest = logits.amax(-1)
        for name in layout.features:
            largest = collectives.all_max(largest, mesh.axis(name))
        shifted = logits - largest[..., None]
        sums = torch.stack((shifted.exp().sum(-1), (targets * shifted).sum(-1)))
        for name in layout.features:
            sums = collectives.all_reduce(sums, mesh.axis(name))
        logsum, expected = sums[0].log(), sums[1]
        ctx.save_for_backward(shifted.sub_(logsum[..., None]), targets, mass)
        loss = (mass * logsum - expected).sum()
        for name in layout.batch:
            loss = collectives.all_reduce(loss, mesh.axis(name))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        log_probabilities, targets, mass = ctx.saved_tensors
        return grad * (log_probabilities.exp() * mass[..., None] - targets), None, None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, mesh: Mesh) -> Tensor:
    """Cross entropy against probabilities (B, K) or (B, N, K), summed over all samples, in nats; replicated.

    logits: this rank's part, in the inner layout; half precision becomes float32 first. targets: whole; (B, 1, K) for
    logits (B, N, K) means the same for each of the N.
    """
    layout = layouts(mesh.shape)[1]
    logits = at_least_float32(logits)
    rows = own_block(targets, mesh, layout.batch, 0).to(logits.dtype)
    own = own_block(rows, mesh, layout.features, -1)
    return _CrossEntropy.apply(logits, own, rows.sum(-1), mesh, layout)


def classification(mesh: Mesh) -> Callable[[nn.Module, Augmented], Tensor]:
    """Return the objective `losses.classification` for a model that vit.py has cut."""

    def objective(model: Any, batch: Augmented) -> Tensor:
        features = model.forward_head(model.forward_features(batch.images), pre_logits=True)
        return cross_entropy(model.head.own_logits(features), batch.targets, mesh)

    return objective
