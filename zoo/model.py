"""The interface of the zoo's models, for type checkers and readers: timm's, beside that of `nn.Module`.

`create_model` returns an `nn.Module`. Code that needs this interface writes `cast(ZooModel, model)`; `isinstance(model,
TokenLabelingModel)` finds the models with logits for every cell.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

MixBox = tuple[int, int, int, int]  # first row and column, and those behind the last, in cells of the token grid


@runtime_checkable
class ZooModel(Protocol):
    """A model that turns images (B, 3, H, W) into logits (B, num_classes) by a body and a head.

    Not all models of timm have `no_weight_decay`.
    """

    default_cfg: Mapping[str, Any]
    """how its images are to be prepared, in timm's keys: input_size, crop_pct, interpolation, mean, std and others"""
    num_classes: int
    """0: without a head; the logits are then features"""
    num_features: int
    """size C of a token or of a pixel of the last features"""

    def forward_features(self, images: Tensor, /) -> Tensor:
        """Compute the last features of images (B, 3, H, W): tokens (B, prefix + N, C).

        timm's convolutional networks give (B, C, h, w) or, some of them, (B, h, w, C).
        """

    def forward_head(self, features: Tensor, /, pre_logits: bool = False) -> Tensor:
        """Pool features and compute logits (B, num_classes), or with pre_logits pooled features (B, C)."""

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the blocks' inputs for the backward pass and compute the rest again."""

    def no_weight_decay(self) -> Collection[str]:
        """Names of the parameters without weight decay, besides biases and norms."""


@runtime_checkable
class TokenLabelingModel(ZooModel, Protocol):
    """A model with logits for every cell of 16 × 16 pixels as well, for token labeling: VOLO."""

    def forward_train(self, images: Tensor, /, mix_box: MixBox | None = None) -> tuple[Tensor, Tensor]:
        """Compute the logits of the class (B, K) and of the N cells (B, N, K), row by row.

        mix_box: the cells in this box are exchanged with those of the flipped batch on the way (MixToken).
        """
