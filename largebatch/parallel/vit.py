"""timm's VisionTransformer, as the zoo builds it, cut in place for a mesh.

Its layers are replaced under their names, attention computes the heads of this rank, and the patch embedding cuts the
images. `model(images)` returns whole logits on every rank; loss.py computes the loss from their parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largebatch.config.parallel import Shape
from largebatch.parallel.cuts import Cut, local
from largebatch.parallel.mesh import Mesh
from largebatch.parallel.tensor import (
    Dropout,
    DropPath,
    Head,
    LayerNorm,
    Layout,
    Linear,
    check_divisible,
    layouts,
    num_blocks,
    own_block,
)
from zoo.vit import VisionTransformer


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a ViT that are cut."""

    embed_dim: int
    num_heads: int
    mlp_dim: int
    num_classes: int
    patch_features: int  # 3 · P · P

    @classmethod
    def of(cls, model: Any) -> "Dimensions":
        attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
        patch_features = model.patch_embed.proj.weight[0].numel()
        return cls(model.embed_dim, attn.num_heads, mlp.fc1.out_features, model.num_classes, patch_features)


def check(dimensions: Dimensions, shape: Shape, batch: int) -> None:
    _check_dimensions(dimensions, shape)
    number = num_blocks(shape, layouts(shape)[0].batch)
    if batch % number:
        raise ValueError(
            f"--data.micro_batch_size is {batch}, and {shape} cuts each batch into {number}: expected a multiple of "
            f"{number}, such as {-(-batch // number) * number}."
        )


def _check_dimensions(dimensions: Dimensions, shape: Shape) -> None:
    x = ("x",) if "x" in shape.sizes else ()
    linear = max(num_blocks(shape, layout.features + x) for layout in layouts(shape))  # parts of a matrix's inputs
    heads = num_blocks(shape, layouts(shape)[1].features)
    check_divisible(shape, "attention heads", dimensions.num_heads, heads)
    check_divisible(shape, "features", dimensions.embed_dim, linear)
    check_divisible(shape, "features inside its MLPs", dimensions.mlp_dim, linear)
    check_divisible(shape, "numbers per patch", dimensions.patch_features, linear)
    check_divisible(shape, "classes", dimensions.num_classes, heads, "--model.num_classes, or ")


def parallelize(model: VisionTransformer, mesh: Mesh) -> None:
    """Cut a whole model, the same on all ranks, in place; ValueError if it cannot be cut."""
    _check_dimensions(Dimensions.of(model), mesh.shape)
    cut_embedding(model, mesh)
    for block in model.blocks:
        cut_block(block, mesh)
    cut_head(model, mesh)


def cut_embedding(model: Any, mesh: Mesh) -> None:
    outer, _ = layouts(mesh.shape)
    model.patch_embed = PatchEmbed(model.patch_embed, mesh)
    _cut(model, ("cls_token", "pos_embed"), Cut({2: outer.features}, partial=outer.batch), mesh)
    model.pos_drop = _dropout(model.pos_drop, mesh, outer)


def cut_block(block: Any, mesh: Mesh) -> None:
    """Cut attention by heads, the MLP by hidden features, norms and dropout by their activations."""
    outer, inner = layouts(mesh.shape)
    attn, mlp = block.attn, block.mlp
    attn.num_heads //= num_blocks(mesh.shape, inner.features)
    attn.attn_dim = attn.num_heads * attn.head_dim
    attn.qkv, attn.proj = Linear(attn.qkv, mesh, inwards=True, pieces=3), Linear(attn.proj, mesh, inwards=False)
    mlp.fc1, mlp.fc2 = Linear(mlp.fc1, mesh, inwards=True), Linear(mlp.fc2, mesh, inwards=False)
    block.norm1, block.norm2 = _norm(block.norm1, mesh, outer), _norm(block.norm2, mesh, outer)
    for scale in (block.ls1, block.ls2):
        if hasattr(scale, "gamma"):
            _cut(scale, ("gamma",), Cut({0: outer.features}, partial=outer.batch), mesh)
    attn.attn_drop, attn.proj_drop = _dropout(attn.attn_drop, mesh, inner), _dropout(attn.proj_drop, mesh, outer)
    if isinstance(attn.attn_drop, Dropout):
        # The fused kernel draws from the default generator: the heads of all ranks would get the same mask.
        attn.fused_attn = False
    mlp.drop1, mlp.drop2 = _dropout(mlp.drop1, mesh, inner), _dropout(mlp.drop2, mesh, outer)
    for name in ("drop_path1", "drop_path2"):
        rate = getattr(getattr(block, name), "drop_prob", 0.0)
        if rate and outer.batch:
            setattr(block, name, DropPath(rate, mesh, outer.batch))


def cut_head(model: Any, mesh: Mesh) -> None:
    outer, _ = layouts(mesh.shape)
    model.norm, model.fc_norm = _norm(model.norm, mesh, outer), _norm(model.fc_norm, mesh, outer)
    model.head_drop = _dropout(model.head_drop, mesh, outer)
    model.head = Head(model.head, mesh, inwards=True)


def _cut(module: Any, names: tuple[str, ...], cut: Cut, mesh: Mesh) -> None:
    module.cuts = dict.fromkeys(names, cut)
    for name in names:
        if (whole := getattr(module, name)) is not None:
            setattr(module, name, nn.Parameter(local(whole.detach(), cut, mesh), whole.requires_grad))


def _norm(norm: nn.Module, mesh: Mesh, layout: Layout) -> nn.Module:
    return LayerNorm(norm, mesh, layout) if isinstance(norm, nn.LayerNorm) and layout.features else norm


def _dropout(dropout: nn.Module, mesh: Mesh, layout: Layout) -> nn.Module:
    rate = getattr(dropout, "p", 0.0)
    return Dropout(rate, mesh, layout.axes) if rate and layout.axes else dropout


class PatchEmbed(nn.Module):
    """Whole images -> patches in the outer layout; each rank reads its part of the pixels only, in the inner layout."""

    def __init__(self, serial: Any, mesh: Mesh) -> None:
        super().__init__()
        self.img_size, self.patch_size, self.grid_size = serial.img_size, serial.patch_size, serial.grid_size
        self.num_patches = serial.num_patches
        self.mesh = mesh
        self.proj = Linear(serial.proj, mesh, inwards=False)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W), replicated -> this rank's part of (B, N, C); ValueError if B cannot be cut."""
        (outer, inner), (height, width) = layouts(self.mesh.shape), self.grid_size
        number = num_blocks(self.mesh.shape, outer.batch)
        if len(images) % number:
            raise ValueError(
                f"A batch of {len(images)} images cannot be cut into {number} equal parts: change "
                "--data.micro_batch_size, or --parallel.tensor.size or mode."
            )
        rows, columns = self.patch_size
        pixels = torch.arange(images.shape[1] * rows * columns, device=images.device)
        own = own_block(pixels, self.mesh, inner.features, 0)
        channel, row, column = own // (rows * columns), own // columns % rows, own % columns
        grid = own_block(images, self.mesh, inner.batch, 0).unflatten(3, (width, -1)).unflatten(2, (height, -1))
        return self.proj(grid[:, channel, :, row, :, column].flatten(2).permute(1, 2, 0))


class Predictor(nn.Module):
    """A cut model for batches of any size, such as the last one of an evaluation."""

    def __init__(self, model: nn.Module, predict: Callable[[Tensor], Tensor], *, multiple: int) -> None:
        """predict: computes the whole logits of a batch whose size is a multiple of `multiple`."""
        super().__init__()
        self.model, self.predict, self.multiple = model, predict, multiple

    def forward(self, images: Tensor) -> Tensor:
        return self.predict(filled(images, self.multiple))[: len(images)]


def filled(tensor: Tensor, multiple: int) -> Tensor:
    missing = -len(tensor) % multiple
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing)) if missing else tensor
