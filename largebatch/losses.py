"""Losses, objectives and the counts of an evaluation.

An objective is a function (model, batch) -> loss, the *sum* over the samples of the batch: the engine knows
nothing but this, and divides by the images of the whole global batch, so micro-batches of unequal size weigh
right. Every loss is computed in at least float32, whatever the model ran in.
"""

from typing import Callable, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COUNTS = ("images", "top1", "top5", "loss")
LISTED_COUNTS = ("real_images", "real_top1", "real_top5")


class SoftBatch(Protocol):
    """What a classification objective reads of a batch."""

    @property
    def images(self) -> Tensor:
        """(B, 3, H, W)"""

    @property
    def targets(self) -> Tensor:
        """(B, K), each row the probabilities of the K classes"""


class TokenBatch(SoftBatch, Protocol):
    """What `token_labeling` reads of a batch; see `augment.Augmented`."""

    @property
    def token_targets(self) -> Tensor | None:
        """(B, N, K) or None"""

    @property
    def mix_box(self) -> tuple[int, int, int, int] | None:
        """first row and column, last row and column plus one, in cells of the output; or None"""


def soft_target_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits (B, K) against probabilities (B, K), summed over the B samples, in nats.

    Half-precision logits are taken to float32 first; float64 stays float64.
    """
    logits = _at_least_float32(logits)
    return F.cross_entropy(logits, targets.to(logits.dtype), reduction="sum")


def classification(model: nn.Module, batch: SoftBatch) -> Tensor:
    """The objective of image classification: soft-target cross entropy of the model's logits, summed."""
    return soft_target_cross_entropy(model(batch.images), batch.targets)


def token_labeling(model: nn.Module, batch: TokenBatch, *, cls_weight: float, dense_weight: float) -> Tensor:
    """The objective of token labelling (https://arxiv.org/abs/2104.10858), summed over the samples:

        cls_weight · CE(class logits, class target) + dense_weight · mean over the N output cells of CE(token)

    for a model whose forward_train(images, mix_box=...) returns class logits (B, K) and token logits (B, N, K). With a
    mix box, class logits are those of mixed images, so their targets are mixed by the box's share of the cells; token
    logits come back un-mixed. Without token targets each cell has its image's.
    Published weights: 1 and 0.5 (VOLO), 1 and 1 (LV-ViT).
    """
    forward_train: Callable[..., tuple[Tensor, Tensor]] = getattr(model, "forward_train")
    logits, token_logits = forward_train(batch.images, mix_box=batch.mix_box)
    loss = soft_target_cross_entropy(logits, mixed_targets(batch.targets, batch.mix_box, token_logits.shape[1]))
    log_probabilities = _at_least_float32(token_logits).log_softmax(dim=2)
    token_targets = targets_of_tokens(batch, token_logits.shape[1]).to(log_probabilities.dtype)
    dense = -(token_targets * log_probabilities).sum() / token_logits.shape[1]
    return cls_weight * loss + dense_weight * dense


def targets_of_tokens(batch: TokenBatch, num_tokens: int) -> Tensor:
    """(B, N, K), or (B, 1, K) for all tokens of an image alike; ValueError if they are of another number of tokens."""
    targets = batch.targets[:, None] if batch.token_targets is None else batch.token_targets
    if targets.shape[1] not in (1, num_tokens):
        raise ValueError(
            f"The model gives logits of {num_tokens} tokens, expected {targets.shape[1]}: token labels need a model "
            "with one for each 16 × 16 pixels."
        )
    return targets


def mixed_targets(targets: Tensor, mix_box: tuple[int, int, int, int] | None, num_tokens: int) -> Tensor:
    """Class targets (B, K) of images of which `mix_box`, out of `num_tokens` cells, is from the flipped batch."""
    if mix_box is None:
        return targets
    first_row, first_column, last_row, last_column = mix_box
    share = (last_row - first_row) * (last_column - first_column) / num_tokens
    return torch.lerp(targets, targets.flip(0), share)


def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """What an evaluation adds up over batches and ranks: float64 (4,), in the order of `COUNTS`.

    Number of images, right within the first 1, right within the first 5, and summed cross entropy, of logits
    (B, K) and labels int64 (B,). float64 holds the counts exactly, and keeps the order of adding from showing
    in any printed digit of the loss.

    Classes of equal logits rank by their number, the lower first: half-precision logits do tie, and no
    library's top-k promises an order. A sample with a NaN among its logits is wrong, and makes the loss NaN.
    """
    logits = _at_least_float32(logits)
    own = logits.gather(1, labels[:, None])
    before = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    rank = ((logits > own) | ((logits == own) & before)).sum(dim=1)  # of the true class, from 0
    valid = ~logits.isnan().any(dim=1)
    loss = F.cross_entropy(logits, labels, reduction="none").double().sum()
    hits = [((rank < k) & valid).sum().double() for k in (1, 5)]
    return torch.stack([torch.full_like(loss, len(labels)), *hits, loss])


def count_listed(logits: Tensor, listed: Tensor) -> Tensor:
    """Counts where an image may show several classes, or none that counts: float64 (3,), as `LISTED_COUNTS`.

    listed: int64 (B, L), each row the classes of an image, filled up with -1. Number of images that have one, and of
    those for which one is among the first 1, and the first 5, of logits (B, K). Ties and NaN as in `count_correct`.
    """
    first = _at_least_float32(logits).sort(dim=1, descending=True, stable=True).indices[:, :5]
    valid = ~logits.isnan().any(dim=1, keepdim=True)
    found = (first[:, :, None] == listed[:, None, :]).any(dim=2) & valid
    hits = [found[:, :k].any(dim=1).sum().double() for k in (1, 5)]
    return torch.stack([(listed >= 0).any(dim=1).sum().double(), *hits])


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
