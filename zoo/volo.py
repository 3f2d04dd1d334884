"""VOLO-D1 to D5 (https://arxiv.org/abs/2106.13112), with the names of its published weights and timm's interface.

    images -> stem, 8 px per cell -> outlookers -> 16 px per cell -> transformer blocks -> class attention -> two heads

Unlike timm's, `forward_train` gives the logits of class and tokens, any image size may be built, and outlook attention
is two small products between a gather and its adjoint instead of unfold and fold. The published model has no stochastic
depth in its outlookers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp, trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.model import MixBox
from zoo.norm import Float32Norm

CELL = 16  # pixels per side of a cell of the token grid


@dataclass(frozen=True)
class Structure:
    depths: tuple[int, int, int, int]  # blocks of the outlookers, and of the three transformer stages
    dims: tuple[int, int]  # of the outlookers, of the transformer blocks
    heads: tuple[int, int]
    mlp_ratio: float
    stem_dim: int
    timm_name: str


STRUCTURES = {
    "volo_d1": Structure((4, 4, 8, 2), (192, 384), (6, 12), mlp_ratio=3.0, stem_dim=64, timm_name="volo_d1_224"),
    "volo_d2": Structure((6, 4, 10, 4), (256, 512), (8, 16), mlp_ratio=3.0, stem_dim=64, timm_name="volo_d2_224"),
    "volo_d3": Structure((8, 8, 16, 4), (256, 512), (8, 16), mlp_ratio=3.0, stem_dim=64, timm_name="volo_d3_224"),
    "volo_d4": Structure((8, 8, 16, 4), (384, 768), (12, 16), mlp_ratio=3.0, stem_dim=64, timm_name="volo_d4_224"),
    "volo_d5": Structure((12, 12, 20, 4), (384, 768), (12, 16), mlp_ratio=4.0, stem_dim=128, timm_name="volo_d5_224"),
    # for tests: seconds, not minutes
    "volo_nano": Structure((1, 1, 1, 1), (32, 64), (2, 4), mlp_ratio=3.0, stem_dim=8, timm_name=""),
}


# -- outlook attention ----------------------------------------------------------------------------------------------


def gather(x: Tensor, num_heads: int) -> Tensor:
    """Gather the 3 × 3 pixels around every second pixel, zero outside: (B, H, W, C) -> (B · h · w · heads, 9, C /
    heads).
    """
    batch, height, width, channels = x.shape
    h, w, d = -(-height // 2), -(-width // 2), channels // num_heads
    padded = x.new_zeros(batch, 2 * h + 1, 2 * w + 1, channels)
    padded[:, 1 : height + 1, 1 : width + 1] = x
    image, row, column, _ = padded.stride()
    shape = (batch, h, w, num_heads, 3, 3, d)
    return padded.as_strided(shape, (image, 2 * row, 2 * column, d, row, column, 1)).reshape(-1, 9, d)


def scatter(cells: Tensor, shape: torch.Size) -> Tensor:
    """The adjoint of `gather`: add every neighbourhood to the pixels it came from; shape is (B, H, W, C)."""
    batch, height, width, channels = shape
    h, w = -(-height // 2), -(-width // 2)
    cells = cells.view(batch, h, w, -1, 9, cells.shape[-1])
    padded = cells.new_zeros(batch, 2 * h + 1, 2 * w + 1, *cells.shape[3::2])
    for k in range(9):
        row, column = divmod(k, 3)
        padded[:, row : row + 2 * h - 1 : 2, column : column + 2 * w - 1 : 2] += cells[:, :, :, :, k]
    return padded[:, 1 : height + 1, 1 : width + 1].reshape(shape)


class _Outlook(torch.autograd.Function):
    """Weights times the neighbourhoods of values, added up; all in the type of the values."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor) -> Tensor:
        """Weights (B, h, w, heads, 9, 9) and values (B, H, W, C) -> (B, H, W, C)."""
        ctx.save_for_backward(weights, values)
        return scatter(torch.bmm(weights.view(-1, 9, 9), gather(values, weights.shape[3])), values.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        weights, values = ctx.saved_tensors
        grad = gather(grads[0], weights.shape[3])
        grad_weights = torch.bmm(grad, gather(values, weights.shape[3]).transpose(1, 2))
        grad_values = scatter(torch.bmm(weights.view(-1, 9, 9).transpose(1, 2), grad), values.shape)
        return grad_weights.view_as(weights), grad_values


class OutlookAttention(nn.Module):
    """Mix the 3 × 3 pixels around every second pixel by weights that are predicted from its 2 × 2 mean."""

    def __init__(self, dim: int, num_heads: int, *, attn_drop: float) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.v = nn.Linear(dim, dim, bias=False)
        self.attn = nn.Linear(dim, num_heads * 81)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)"""
        values = self.v(x)
        cells = F.avg_pool2d(x.permute(0, 3, 1, 2), 2, ceil_mode=True).permute(0, 2, 3, 1)
        weights = self.attn_drop(self._weights(cells)).to(values.dtype)
        return self.proj(_Outlook.apply(weights, values))

    def _weights(self, cells: Tensor) -> Tensor:
        """The share of each of 9 pixels in each of the 9: (B, h, w, C) -> (B, h, w, heads, 9, 9).

        The layer's outputs are reordered so that the softmax runs along long rows: over nine adjacent numbers it takes
        six times as long.
        """
        shape = (self.num_heads, 9, 9)
        weight = self.attn.weight.unflatten(0, shape).permute(2, 0, 1, 3).flatten(0, 2)
        bias = self.attn.bias.unflatten(0, shape).permute(2, 0, 1).flatten()
        logits = F.linear(cells, weight * self.scale, bias * self.scale).unflatten(-1, (9, -1))
        return logits.softmax(dim=-2).transpose(-2, -1).contiguous().unflatten(-2, shape[:2])


# -- blocks ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention of all cells; fused_attn chooses torch's fused kernel, or products around a softmax.

    native, if given, replaces the products in bfloat16, without dropout: (B, N, 3, heads, C / heads), scale ->
    softmax(scale · q kᵀ) v (B, N, heads, C / heads).
    """

    def __init__(self, dim: int, num_heads: int, *, attn_drop: float) -> None:
        super().__init__()
        self.num_heads, self.scale, self.fused_attn = num_heads, (dim // num_heads) ** -0.5, True
        self.native: Callable[[Tensor, float], Tensor] | None = None
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).flatten(1, 2).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        elif self.native and qkv.dtype == torch.bfloat16 and not torch.compiler.is_compiling():
            y = self.native(qkv, self.scale).transpose(1, 2)
        else:
            y = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
        return self.proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class ClassAttention(nn.Module):
    """Attention of the class token to all tokens, itself included."""

    def __init__(self, dim: int, num_heads: int, *, attn_drop: float) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.q = nn.Linear(dim, dim, bias=False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1 + N, C) -> (B, 1, C)"""
        # There is one query per head. So the layers of keys and values are applied to this query and to the weighted
        # mean of x, instead of to every token.
        to_k, to_v = self.kv.weight.unflatten(0, (2, self.num_heads, -1))  # (heads, C / heads, C) each
        q = self.q(x[:, 0]).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)  # (heads, B, C / heads)
        weights = (q * self.scale @ to_k).transpose(0, 1) @ x.mT  # (B, heads, 1 + N)
        mean = self.attn_drop(weights.softmax(dim=-1)) @ x  # (B, heads, C)
        y = mean.transpose(0, 1) @ to_v.mT  # (heads, B, C / heads)
        return self.proj(y.transpose(0, 1).flatten(1))[:, None]


Layer = Callable[["Block", Tensor], Tensor]


def attend(block: "Block", x: Tensor) -> Tensor:
    return block.attn(block.norm1(x))


def feed(block: "Block", x: Tensor) -> Tensor:
    return block.mlp(block.norm2(x))


class Block(nn.Module):
    """A layer of attention and an MLP, each with its norm before it and a residual around it.

    Stochastic depth (https://arxiv.org/abs/1603.09382) with rate drop_path: samples that skip a layer are not computed
    in it, which saves 6 % of the transformer blocks' work in D1 (rate 0.1), 47 % in D5 (0.75).
    """

    def __init__(self, attn: nn.Module, dim: int, *, mlp_ratio: float, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = Float32Norm(dim, eps=1e-5), attn
        self.norm2, self.mlp = Float32Norm(dim, eps=1e-5), Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = drop_path
        self.attend: Layer = attend  # blocks.py puts compiled functions here
        self.feed: Layer = feed

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., C) -> the same shape"""
        x = self._add(x, lambda x: self.attend(self, x))
        return self._add(x, lambda x: self.feed(self, x))

    def _add(self, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """x + layer(x) / (share of samples that take the layer) for these samples, and x for the others."""
        if not self.training or not self.drop_path:
            return x + layer(x)
        taken, scale = torch.rand(len(x)) >= self.drop_path, 1 / (1 - self.drop_path)  # on the host
        if torch.compiler.is_compiling():  # it would make a graph for every number of samples
            kept = (taken * scale).to(x.device, x.dtype, non_blocking=True)
            return x + layer(x) * kept.view(-1, *[1] * (x.ndim - 1))
        if taken.all():
            return torch.add(x, layer(x), alpha=scale)
        if not taken.any():  # parameters need a gradient of zero
            taken[0], scale = True, 0.0
        samples = _to_device(taken.nonzero()[:, 0], x.device)
        part = x.index_select(0, samples)  # the gradient of x[samples] sorts on a GPU, and takes one thread on a CPU
        return x.index_add(0, samples, layer(part).to(x.dtype), alpha=scale)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a GPU without waiting, from page-locked memory."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The class token and those of cells, (B, 1 + N, C) -> (B, 1, C) and (B, N, C).

    Two slices would make two gradients of the size of x and add them.
    """
    token, cells = x.split([1, x.shape[1] - 1], dim=1)
    return token, cells


class ClassBlock(Block):
    """A block that changes only the class token."""

    def forward(self, x: Tensor) -> Tensor:
        token, cells = split(x)
        token = token + self.attn(self.norm1(x))
        return torch.cat([token + self.mlp(self.norm2(token)), cells], dim=1)


class PatchEmbed(nn.Module):
    """The stem: images to a grid of cells of 8 px."""

    def __init__(self, stem_dim: int, embed_dim: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, kernel, stride in ((3, 7, 2), (stem_dim, 3, 1), (stem_dim, 3, 1)):
            conv = nn.Conv2d(channels, stem_dim, kernel, stride=stride, padding=kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(stem_dim), nn.ReLU(inplace=True)]
        self.conv = nn.Sequential(*layers)
        self.proj = nn.Conv2d(stem_dim, embed_dim, kernel_size=4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, H / 8, W / 8, C)"""
        return self.proj(self.conv(x.contiguous(memory_format=torch.channels_last))).permute(0, 2, 3, 1)


class Downsample(nn.Module):
    """Cells of 8 px to cells of 16 px."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(dim, out_dim, kernel_size=2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H / 2, W / 2, C')"""
        return self.proj(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


# -- the model ------------------------------------------------------------------------------------------------------


class VOLO(nn.Module):
    """VOLO for images (B, 3, H, W), with H and W multiples of 16."""

    def __init__(
        self,
        structure: Structure,
        *,
        img_size: int,
        num_classes: int,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        s, (outer, inner) = structure, structure.dims
        self.num_features = self.head_hidden_size = self.embed_dim = inner
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbed(s.stem_dim, outer)
        side = img_size // CELL
        self.pos_embed = nn.Parameter(torch.zeros(1, side, side, inner))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        ramp = iter(drop_path_rate * index / (sum(s.depths) - 1) for index in range(sum(s.depths)))

        def block(attention: type[nn.Module], stage: int) -> Block:
            level, rate = int(stage > 0), next(ramp)
            attn = attention(s.dims[level], s.heads[level], attn_drop=attn_drop_rate)
            drop_path = rate if stage else 0.0
            return Block(attn, s.dims[level], mlp_ratio=s.mlp_ratio, drop_path=drop_path)

        kinds = (OutlookAttention, Attention, Attention, Attention)
        stages = [
            nn.Sequential(*(block(kind, stage) for _ in range(s.depths[stage]))) for stage, kind in enumerate(kinds)
        ]
        self.network = nn.ModuleList([stages[0], Downsample(outer, inner), *stages[1:]])
        self.post_network = nn.ModuleList(
            ClassBlock(ClassAttention(inner, s.heads[1], attn_drop=attn_drop_rate), inner, mlp_ratio=s.mlp_ratio)
            for _ in range(2)
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, inner))
        self.norm = nn.LayerNorm(inner)
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        trunc_normal_(self.cls_token, std=0.02)
        trunc_normal_(self.pos_embed, std=0.02)
        self.apply(_init_weights)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New heads for class and tokens; none for 0 classes. Only the class token is pooled."""
        if global_pool not in (None, "token"):
            raise ValueError(f"global_pool is {global_pool!r}: VOLO has a class token, expected 'token'")
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.aux_head = nn.Linear(self.num_features, num_classes) if num_classes else None
        for head in (self.head, self.aux_head):
            if isinstance(head, nn.Linear):
                _init_weights(head)

    def get_classifier(self) -> nn.Module:
        return self.head

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Tell, in timm's form, which parameters are a layer: the stem, each block, each change of resolution.

        The last norm belongs to the block before it, and all that is not named here to the head. As in timm, the class
        token belongs to the stem, although it enters after the first network.
        """
        return {
            "stem": "cls_token|pos_embed|patch_embed",
            "network": [(r"network\.(\d+)\.(\d+)", None), (r"network\.(\d+)", (0,))],
            "post_network": [(r"post_network\.(\d+)", None), ("norm", (99999,))],
        }

    def forward_features(self, images: Tensor, mix_box: MixBox | None = None) -> Tensor:
        """Images (B, 3, H, W) -> normalised tokens (B, 1 + H · W / 256, C), the class token first."""
        x = self.patch_embed(images)
        if mix_box is not None:
            x = mix(x, mix_box, cells=2)
        for number, stage in enumerate(self.network):
            if number == 2:
                x = self.pos_drop(x + self.pos_embed)
            x = self._run(stage, x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x.flatten(1, 2)], dim=1)
        x = self._run(self.post_network, x)
        return self.norm(x)

    def _run(self, stage: Any, x: Tensor) -> Tensor:
        blocks = stage if isinstance(stage, (nn.Sequential, nn.ModuleList)) else [stage]
        for block in blocks:
            again = self.grad_checkpointing and self.training
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, 1 + N, C) -> logits (B, K): those of the class plus half the maximum over the cells'."""
        token, cells = split(x)
        token = self.head_drop(token[:, 0])
        if pre_logits or self.aux_head is None:
            return token
        # amax would divide the gradient among equal cells.
        return self.head(token) + 0.5 * self.aux_head(cells).max(dim=1).values

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    def forward_train(self, images: Tensor, mix_box: MixBox | None = None) -> tuple[Tensor, Tensor]:
        """Logits of the class (B, K) and of the cells (B, N, K), row by row, each from its own head; ValueError without
        heads.

        mix_box: MixToken (https://arxiv.org/abs/2104.10858). After the stem the cells in this box are exchanged with
        those of the flipped batch, image B - 1 - i for image i. The cells' logits are exchanged back, so they belong to
        their own images; those of the class belong to the mixture.
        """
        if self.aux_head is None:
            raise ValueError("forward_train needs heads, and this VOLO was built with num_classes=0")
        token, cells = split(self.forward_features(images, mix_box))
        cells = mix_back(self.aux_head(cells), mix_box, images.shape[-1] // CELL)
        return self.head(self.head_drop(token[:, 0])), cells


# torch would compile a graph for each kind of box, reach its limit on graphs, and run everything eagerly.
@torch.compiler.disable
def mix(grid: Tensor, box: MixBox, *, cells: int = 1) -> Tensor:
    """Exchange a box of (B, H, W, C) with that of the flipped batch. cells: of the grid per unit of the box."""
    top, left, bottom, right = (cells * edge for edge in box)
    mixed = grid.clone()
    mixed[:, top:bottom, left:right] = grid.flip(0)[:, top:bottom, left:right]
    return mixed


def mix_back(cells: Tensor, box: MixBox | None, side: int) -> Tensor:
    """Undo `mix` for cells (B, N, K), `side` of them per row."""
    return cells if box is None else mix(cells.unflatten(1, (-1, side)), box).flatten(1, 2)


def _init_weights(module: nn.Module) -> None:
    """Initialise linear layers as published; convolutions keep torch's initialisation."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def build_volo(
    name: str,
    *,
    img_size: int,
    num_classes: int,
    drop_rate: float,
    pos_drop_rate: float,
    attn_drop_rate: float,
    drop_path_rate: float,
) -> VOLO:
    """Build the VOLO `name`: images (B, 3, img_size, img_size) -> logits (B, num_classes)."""
    if img_size <= 0 or img_size % CELL:
        below = max(img_size // CELL, 1) * CELL
        raise ValueError(f"img_size {img_size} does not fit {name}: expected a multiple of {CELL}, such as {below}")
    model = VOLO(
        STRUCTURES[name],
        img_size=img_size,
        num_classes=num_classes,
        drop_rate=drop_rate,
        pos_drop_rate=pos_drop_rate,
        attn_drop_rate=attn_drop_rate,
        drop_path_rate=drop_path_rate,
    )
    cfg: Any = default_cfg(name, img_size=img_size, num_classes=num_classes)
    model.default_cfg = model.pretrained_cfg = cfg
    return model


def default_cfg(name: str, *, img_size: int, num_classes: int) -> dict[str, Any]:
    """Return the preparation of images as published, in timm's keys.

    crop_pct 1.15 makes the image smaller than the crop, which gets a black frame.
    """
    return {
        "num_classes": num_classes,
        "input_size": (3, img_size, img_size),
        "crop_pct": 1.15 if name in ("volo_d4", "volo_d5") else 0.96,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.conv.0",
        "classifier": ("head", "aux_head"),
    }


def recognise(shapes: Mapping[str, torch.Size]) -> str | None:
    depths = tuple(
        len({key.split(".")[2] for key in shapes if key.startswith(f"network.{stage}.")}) for stage in (0, 2, 3, 4)
    )
    stem, hidden = shapes.get("patch_embed.conv.0.weight"), shapes.get("network.2.0.mlp.fc1.weight")
    if stem is None or hidden is None or len(hidden) != 2:
        return None
    for name, s in STRUCTURES.items():
        if (depths, stem[0], hidden) == (s.depths, s.stem_dim, (int(s.mlp_ratio * s.dims[1]), s.dims[1])):
            return name
    return None
