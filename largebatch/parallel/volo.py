"""VOLO cut in place in one dimension: its attentions by heads, its MLPs by hidden features, its heads by classes.

Activations between these layers are whole on every rank. So are the stem, the layer between the two grids, norms and
position embeddings: 3 % of D1's parameters and 1 % of D5's. The other modes cut activations by images and features, and
convolutions and batch norm need all of both.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from largebatch.augment import Augmented
from largebatch.config.parallel import Shape
from largebatch.losses import mixed_targets, targets_of_tokens
from largebatch.parallel import collectives
from largebatch.parallel.loss import cross_entropy
from largebatch.parallel.mesh import Mesh
from largebatch.parallel.tensor import Dropout, Head, Linear, check_divisible
from zoo.volo import CELL, VOLO, Attention, Block, OutlookAttention, mix_back


def check(model: VOLO, shape: Shape) -> None:
    if "tensor" not in shape.sizes:
        raise ValueError(
            f"--parallel.tensor.mode cuts images and features ({shape}), and VOLO's convolutions and batch norm need "
            "all of them: set mode 1d, the only one that VOLO has, or take a ViT."
        )
    number = shape.sizes["tensor"]
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, Block)]
    for heads in sorted({block.attn.num_heads for block in blocks}):
        check_divisible(shape, "attention heads", heads, number)
    for mlp_dim in sorted({block.mlp.fc1.out_features for block in blocks}):
        check_divisible(shape, "features inside its MLPs", mlp_dim, number)
    check_divisible(shape, "classes", model.num_classes, number, "--model.num_classes, or ")


def parallelize(model: VOLO, mesh: Mesh) -> None:
    check(model, mesh.shape)
    for module in list(model.modules()):
        if isinstance(module, Block):
            cut_block(module, mesh)
    for name in ("head", "aux_head"):
        setattr(model, name, Head(getattr(model, name), mesh, inwards=True))


def cut_block(block: Any, mesh: Mesh) -> None:
    attn, mlp, axis = block.attn, block.mlp, mesh.axis("tensor")
    if isinstance(block.attn, Attention):
        attn.qkv = Linear(attn.qkv, mesh, inwards=True, pieces=3)
    else:
        for name in ("v", "attn") if isinstance(attn, OutlookAttention) else ("q", "kv"):
            pieces = 2 if name == "kv" else 1
            setattr(attn, name, _Branch(getattr(attn, name), mesh, inwards=True, pieces=pieces))
        attn.register_forward_pre_hook(lambda module, inputs: (collectives.copy(inputs[0], axis),))
    attn.num_heads //= axis.size
    attn.proj = Linear(attn.proj, mesh, inwards=False)
    if attn.attn_drop.p:
        attn.attn_drop = Dropout(attn.attn_drop.p, mesh, ("tensor",))
        if isinstance(attn, Attention):
            attn.fused_attn = False  # see vit.py
    mlp.fc1, mlp.fc2 = Linear(mlp.fc1, mesh, inwards=True), Linear(mlp.fc2, mesh, inwards=False)


def token_labeling(mesh: Mesh, *, dense_weight: float) -> Callable[[Any, Augmented], Tensor]:
    """The objective `losses.TokenLabeling` of a cut VOLO: no rank holds all classes' logits of the cells."""

    def objective(model: Any, batch: Augmented) -> Tensor:
        x = model.forward_features(batch.images, batch.mix_box)
        logits = model.head.own_logits(model.head_drop(x[:, 0]))
        cells = mix_back(model.aux_head.own_logits(x[:, 1:]), batch.mix_box, batch.images.shape[-1] // CELL)
        num_tokens = cells.shape[1]
        loss = cross_entropy(logits, mixed_targets(batch.targets, batch.mix_box, num_tokens), mesh)
        dense = cross_entropy(cells, targets_of_tokens(batch, num_tokens), mesh) / num_tokens
        return loss + dense_weight * dense

    return objective


class _Branch(Linear):
    """A layer inwards that shares one `collectives.copy` with others, or whose weight is used without the layer."""

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)
