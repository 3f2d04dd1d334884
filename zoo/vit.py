"""The vision transformers of the ViT paper (https://arxiv.org/abs/2010.11929) and of later ones, as timm's class.

Weights, names and logits are timm's, and timm loads a file written here. The class is called directly, not through
timm's `create_model`, so that `default_cfg` describes the model that was built, at its image size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from timm import layers
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import vision_transformer
from torch import Tensor, nn


@dataclass(frozen=True)
class Structure:
    """The sizes of a ViT. mlp_ratio: width of its MLP, in widths of its embedding. family: in `FAMILIES`."""

    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int
    timm_name: str
    mlp_ratio: float = 4.0
    family: str = "vit"


FAMILIES: dict[str, dict[str, Any]] = {  # the arguments of timm's class that make it this one
    "vit": {},
    "deit3": {"init_values": 1e-4, "no_embed_class": True},  # https://arxiv.org/abs/2204.07118
    "plain": {"class_token": False, "fc_norm": False, "act_layer": "gelu_tanh"},  # https://arxiv.org/abs/2205.01580
}
STRUCTURES = {
    "vit_b32": Structure(32, embed_dim=768, depth=12, num_heads=12, timm_name="vit_base_patch32_224"),
    "vit_b16": Structure(16, embed_dim=768, depth=12, num_heads=12, timm_name="vit_base_patch16_224"),
    "vit_l32": Structure(32, embed_dim=1024, depth=24, num_heads=16, timm_name="vit_large_patch32_224"),
    "vit_l16": Structure(16, embed_dim=1024, depth=24, num_heads=16, timm_name="vit_large_patch16_224"),
    "vit_s16": Structure(16, embed_dim=384, depth=12, num_heads=6, timm_name="vit_small_patch16_224"),
    "deit3_s16": Structure(16, 384, depth=12, num_heads=6, timm_name="deit3_small_patch16_224", family="deit3"),
    "deit3_b16": Structure(16, 768, depth=12, num_heads=12, timm_name="deit3_base_patch16_224", family="deit3"),
    "deit3_l16": Structure(16, 1024, depth=24, num_heads=16, timm_name="deit3_large_patch16_224", family="deit3"),
    "plain_s16": Structure(16, embed_dim=384, depth=12, num_heads=6, timm_name="", family="plain"),
    "plain_b16": Structure(16, embed_dim=768, depth=12, num_heads=12, timm_name="", family="plain"),
    "vit_6b16": Structure(16, embed_dim=4096, depth=32, num_heads=64, timm_name=""),  # for ranks that share it
    "vit_ti16": Structure(16, embed_dim=192, depth=12, num_heads=3, timm_name="vit_tiny_patch16_224"),
    "vit_nano32": Structure(32, embed_dim=32, depth=2, num_heads=2, timm_name=""),  # for tests: seconds, not minutes
    "vit_nano7": Structure(7, embed_dim=48, depth=2, num_heads=3, timm_name="", mlp_ratio=2.0),  # for images of 28 px
}


class VisionTransformer(vision_transformer.VisionTransformer):
    def take_smaller_images(self) -> None:
        """Let the model take images of other sides that its patches divide, as timm's `dynamic_img_size` does."""
        self.patch_embed.strict_img_size = False

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C), of smaller images if these are square. A GPU adds up a product's gradient in one order."""
        rows, columns = self.patch_embed.grid_size
        one_size = getattr(self.patch_embed, "strict_img_size", True)  # that of ranks that share a model has one
        if one_size or self.pos_embed is None or x.shape[1] == rows * columns:
            return super()._pos_embed(x)
        whole, side = rows, isqrt(x.shape[1])
        prefix = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        first = self.pos_embed.shape[1] - whole**2  # the places of the prefix
        with torch.autocast(x.device.type, enabled=False):
            places = resampling(whole, side, x.device) @ self.pos_embed[:, first:].float()
        places = places.to(self.pos_embed.dtype)
        if first:
            return self.pos_drop(torch.cat([*prefix, x], dim=1) + torch.cat([self.pos_embed[:, :first], places], dim=1))
        return self.pos_drop(torch.cat([*prefix, x + places], dim=1))


def build_vit(
    name: str,
    *,
    img_size: int,
    num_classes: int,
    drop_rate: float,
    pos_drop_rate: float,
    proj_drop_rate: float,
    attn_drop_rate: float,
    drop_path_rate: float,
    global_pool: str,
    weight_init: str,
) -> VisionTransformer:
    """Build the ViT `name`: images (B, 3, img_size, img_size) -> logits (B, num_classes)."""
    structure = STRUCTURES[name]
    family = structure.family
    _check_img_size(name, img_size)
    for option, value, known in (("global_pool", global_pool, "avg"), ("weight_init", weight_init, "jax")):
        if value not in ("", known):
            raise ValueError(f"{option} of {name} is {value!r}, expected {known!r} or nothing")
    model = VisionTransformer(
        img_size=img_size,
        num_classes=num_classes,
        patch_size=structure.patch_size,
        embed_dim=structure.embed_dim,
        depth=structure.depth,
        num_heads=structure.num_heads,
        mlp_ratio=structure.mlp_ratio,
        drop_rate=drop_rate,
        pos_drop_rate=pos_drop_rate,
        proj_drop_rate=proj_drop_rate,
        attn_drop_rate=attn_drop_rate,
        drop_path_rate=drop_path_rate,
        global_pool="avg" if global_pool or family == "plain" else "token",
        weight_init="jax" if weight_init or family == "plain" else "",
        embed_layer=PatchEmbed,
        **FAMILIES[family],
    )
    cfg: Any = default_cfg(img_size=img_size, num_classes=num_classes)
    if family == "deit3":
        _as_deit3(model, drop_path_rate, weight_init)
        cfg |= {"crop_pct": 1.0, "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
    elif family == "plain":
        _as_plain(model)
        cfg |= {"crop_pct": 0.875, "interpolation": "bilinear"}
    model.default_cfg = model.pretrained_cfg = cfg  # timm's data helpers look for the second
    return model


def _as_deit3(model: VisionTransformer, drop_path_rate: float, weight_init: str) -> None:
    """Drop all blocks at the same rate, and draw the class token, as the published code does and timm does not."""
    for block in model.blocks if drop_path_rate else ():
        block.drop_path1, block.drop_path2 = layers.DropPath(drop_path_rate), layers.DropPath(drop_path_rate)
    if not weight_init and model.cls_token is not None:
        nn.init.trunc_normal_(model.cls_token, std=0.02)


@lru_cache(maxsize=8)
def resampling(whole: int, side: int, device: torch.device) -> Tensor:
    """Return the matrix (side², whole²) by which timm resamples a position embedding of whole² places."""
    with torch.inference_mode(False):  # a later step of training takes the same matrix
        eye = torch.eye(whole**2)[None]
        matrix = resample_abs_pos_embed(eye, new_size=[side, side], old_size=[whole, whole], num_prefix_tokens=0)[0]
        return matrix.to(device)


def _as_plain(model: VisionTransformer) -> None:
    """Fix the positions, as sines and cosines, and draw queries, keys and values as three matrices."""
    rows, columns = model.patch_embed.grid_size
    model.pos_embed = nn.Parameter(sincos2d(rows, columns, model.embed_dim), requires_grad=False)
    blocks: Any = model.blocks
    for block in blocks:
        for matrix in block.attn.qkv.weight.detach().chunk(3):
            nn.init.xavier_uniform_(matrix)


def sincos2d(rows: int, columns: int, dim: int) -> Tensor:
    """Return MoCo v3's position embedding (1, rows * columns, dim): sines and cosines of the column, then the row."""
    frequencies = 10_000.0 ** -torch.linspace(0, 1, dim // 4)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [place.flatten()[:, None] * frequencies for place in (column, row)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)[None]


class PatchEmbed(layers.PatchEmbed):
    """timm's patch embedding; in training it is one product of matrices instead of a convolution with a stride.

    Both give the same up to rounding, and the product is never slower on CPUs (largebatch/benchmark/NOTES.md). In
    evaluation the logits keep timm's bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) of the model's size, or of others if `strict_img_size` is off -> (B, N, C)"""
        if not self.training:
            return super().forward(x)
        height, width = self.patch_size
        rows, columns = self.grid_size if self.strict_img_size else (x.shape[2] // height, x.shape[3] // width)
        grid = x.unflatten(3, (columns, width)).unflatten(2, (rows, height))  # (B, 3, rows, P, columns, P)
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


def set_fused_attn(model: nn.Module, enabled: bool) -> nn.Module:
    """Choose torch's fused kernel, or products around a softmax, for timm's attention layers; return the model.

    Both give the same up to rounding. On CPUs the products are faster (largebatch/benchmark/NOTES.md), and keep the
    attention maps in memory.
    """
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", enabled)
    return model


def default_cfg(*, img_size: int, num_classes: int) -> dict[str, Any]:
    """Return the preparation of images, in timm's keys.

    timm evaluates its ViTs on the central 0.9 of the image at 224 px, and on the whole image at 384 px.
    """
    return {
        "num_classes": num_classes,
        "input_size": (3, img_size, img_size),
        "crop_pct": 1.0 if img_size >= 384 else 0.9,
        "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


def recognise(shapes: Mapping[str, torch.Size]) -> str | None:
    """The name of the ViT that has parameters of these shapes, at any image size, or None."""
    projection = shapes.get("patch_embed.proj.weight")  # (embed_dim, 3, patch_size, patch_size)
    if projection is None or len(projection) != 4 or not shapes.keys() >= {"pos_embed", "blocks.0.attn.qkv.bias"}:
        return None
    blocks = {key.split(".")[1] for key in shapes if key.startswith("blocks.")}
    scaled = not shapes.keys().isdisjoint(("blocks.0.ls1.gamma", "blocks.0.gamma_1"))
    family = "deit3" if scaled else "vit" if "cls_token" in shapes else "plain"
    known = {(s.patch_size, s.embed_dim, s.depth, s.family): name for name, s in STRUCTURES.items()}
    return known.get((projection[3], projection[0], len(blocks), family))


def _check_img_size(name: str, img_size: int) -> None:
    patch_size = STRUCTURES[name].patch_size
    if img_size > 0 and img_size % patch_size == 0:
        return
    below = max(img_size // patch_size, 1) * patch_size
    nearest = f"{below} or {below + patch_size}" if img_size > patch_size else f"{below}"
    raise ValueError(
        f"img_size {img_size} does not fit {name}: expected a multiple of its patch size {patch_size}, "
        f"the nearest being {nearest}"
    )
