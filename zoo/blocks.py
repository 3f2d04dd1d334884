"""Compile the blocks of a model one by one, so that each hands out its gradients as soon as it has them.

Equal blocks share one graph. Stochastic depth stays outside of the graphs: torch would compile one for each of its
rates, and so its draws are those of the model that is not compiled.
"""

from functools import cache

import torch
from timm.layers import DropPath
from timm.models.vision_transformer import Block as VitBlock
from torch import Tensor, nn

from zoo import volo

GRAPHS = 64  # of one function: training, evaluation, other sizes of batches; past its limit torch silently runs eagerly


class _Apart(DropPath):
    """Stochastic depth that is not compiled."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, VitBlock) or type(module) is volo.Block]


def compile_blocks(model: nn.Module) -> int:
    """Let torch compile the blocks of a ViT or a VOLO at their first calls; return their number, 0 for other models."""
    blocks = blocks_of(model)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    for block in blocks:
        if isinstance(block, volo.Block):
            _compile_layers(block)
        else:
            _compile_whole(block)
    return len(blocks)


def _compile_whole(block: nn.Module) -> None:
    for name, part in block.named_children():
        if isinstance(part, DropPath):
            setattr(block, name, _Apart(part.drop_prob, part.scale_by_keep))
    block.compile()


def _compile_layers(block: volo.Block) -> None:
    """Compile the two layers alone: samples that skip them are left out before. C++ that attends cannot be compiled."""
    if getattr(block.attn, "native", None) is None:
        block.attend = compiled(volo.attend)
    block.feed = compiled(volo.feed)


@cache
def compiled(function: volo.Layer) -> volo.Layer:
    """Return the compiled function, one for all blocks and outside of them, so that a copy of a model shares it."""
    return torch.compile(function)
