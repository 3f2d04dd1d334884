"""Consecutive parts of a ViT, which computed one after the other are the model: each can be a CUDA graph of its own."""

from collections.abc import Callable, Iterable
from functools import partial

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

HEAD = ("norm", "attn_pool", "fc_norm", "head_drop", "head")  # the modules after the blocks
METHODS = ("forward", "forward_features", "forward_head")  # what the segments compute


class Segment(nn.Module):
    """Consecutive layers of a model. Its parameters are those of the model, and of these layers alone."""

    def __init__(
        self,
        steps: list[Callable[[Tensor], Tensor]],
        modules: Iterable[nn.Module],
        parameters: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        self.steps = steps
        self.layers, self.own = nn.ModuleList(modules), nn.ParameterList(parameters)

    def forward(self, x: Tensor) -> Tensor:
        """Images or tokens -> tokens or logits"""
        for step in self.steps:
            x = step(x)
        return x


def segments_of(model: nn.Module, count: int) -> list[Segment]:
    """Cut a ViT into so many segments of about as many blocks, or into one per block; other models: none.

    The model stays as it is, and knows nothing of them.
    """
    if not isinstance(model, VisionTransformer) or any(_changed(model, method) for method in METHODS):
        return []
    blocks = list(model.blocks)
    count = min(count, len(blocks))
    cuts = [len(blocks) * number // count for number in range(count + 1)]
    parts = [blocks[start:stop] for start, stop in zip(cuts, cuts[1:])]
    before = [module for name, module in model.named_children() if name not in ("blocks", *HEAD)]
    after = [module for name, module in model.named_children() if name in HEAD]
    segments = []
    for number, part in enumerate(parts):
        first, last = number == 0, number == count - 1
        segments.append(
            Segment(
                [partial(_embed, model)] * first + part + [model.norm, model.forward_head] * last,
                before * first + part + after * last,
                model.parameters(recurse=False) if first else (),
            )
        )
    return segments


def _changed(model: VisionTransformer, method: str) -> bool:
    """Return whether a model computes otherwise than timm's class does."""
    return getattr(type(model), method) is not getattr(VisionTransformer, method) or method in vars(model)


def _embed(model: VisionTransformer, images: Tensor) -> Tensor:
    """All that timm's class does before the blocks: images (B, 3, H, W) -> tokens (B, N, C)"""
    return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
