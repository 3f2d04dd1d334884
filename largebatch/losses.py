"""Losses and objectives.

An objective takes (model, batch) and returns the *sum* of the loss over the samples: the engine divides by the images
of the global batch, so micro-batches of unequal size weigh right. Losses are computed in at least float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largebatch.augment import Augmented
from largebatch.precision import at_least_float32
from zoo.model import MixBox

Objective = Callable[[nn.Module, Augmented], Tensor]


def soft_target_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of logits (B, K) and probabilities (B, K), summed over the samples, in nats."""
    logits = at_least_float32(logits)
    return F.cross_entropy(logits, targets.to(logits.dtype), reduction="sum")


def classification(model: nn.Module, batch: Augmented) -> Tensor:
    return soft_target_cross_entropy(model(batch.images), batch.targets)


def binary_classification(model: nn.Module, batch: Augmented) -> Tensor:
    """Return the mean over the classes of binary cross entropies, summed over the samples, as in DeiT III.

    Each class with a share of a target is right, so a mixed image has two.
    """
    logits = at_least_float32(model(batch.images))
    targets = (batch.targets > 0).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / logits.shape[1]


@dataclass(frozen=True)
class TokenLabeling:
    """The objective of token labelling (https://arxiv.org/abs/2104.10858), summed over the samples:

        CE(class logits, class target) + dense_weight · mean over the N output cells of CE(token)

    forward_train(images, mix_box=...) of the model returns class logits (B, K) and token logits (B, N, K). With a mix
    box, class logits are of mixed images, but token logits come back un-mixed. Without token targets each cell has the
    target of its image.
    """

    dense_weight: float

    def __call__(self, model: nn.Module, batch: Augmented) -> Tensor:
        forward_train: Callable[..., tuple[Tensor, Tensor]] = getattr(model, "forward_train")
        logits, token_logits = forward_train(batch.images, mix_box=batch.mix_box)
        loss = soft_target_cross_entropy(logits, mixed_targets(batch.targets, batch.mix_box, token_logits.shape[1]))
        log_probabilities = at_least_float32(token_logits).log_softmax(dim=2)
        token_targets = targets_of_tokens(batch, token_logits.shape[1]).to(log_probabilities.dtype)
        dense = -(token_targets * log_probabilities).sum() / token_logits.shape[1]
        return loss + self.dense_weight * dense


def targets_of_tokens(batch: Augmented, num_tokens: int) -> Tensor:
    """Return targets (B, N, K), or (B, 1, K) without token targets; ValueError if N is not `num_tokens`."""
    targets = batch.targets[:, None] if batch.token_targets is None else batch.token_targets
    if targets.shape[1] not in (1, num_tokens):
        raise ValueError(
            f"The model gives logits of {num_tokens} tokens, expected {targets.shape[1]}: token labels need a model "
            "with one for each 16 × 16 pixels."
        )
    return targets


def mixed_targets(targets: Tensor, mix_box: MixBox | None, num_tokens: int) -> Tensor:
    """Mix class targets (B, K) with those of the flipped batch, by the box's share of the cells."""
    if mix_box is None:
        return targets
    first_row, first_column, last_row, last_column = mix_box
    share = (last_row - first_row) * (last_column - first_column) / num_tokens
    return torch.lerp(targets, targets.flip(0), share)
