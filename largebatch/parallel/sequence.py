"""Sequence parallelism: the tokens of each image cut over the ranks of an axis, attention as a ring between them.

Each rank keeps its queries, while blocks of keys and values travel around the ring. The rank merges their results by
the log of the sum of exponentials, so no rank ever has all keys, or a map of all tokens against all. In the backward
pass the blocks travel once more together with their gradients. Per layer each of the p ranks sends 2 (p - 1) tensors of
(tokens of a rank) × (features) forward, and 2 (p - 1) + 2 p backward.

The number of tokens, 197 or 50, is rarely a multiple of the ranks: the last ranks get padding, which no token sees.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from largebatch.parallel.collectives import reduce, split
from largebatch.parallel.cuts import cuts_of
from largebatch.parallel.mesh import Axis, Mesh
from largebatch.parallel.tensor import Dropout
from zoo.vit import VisionTransformer

# -- the ring -----------------------------------------------------------------------------------------------------


def tokens_per_rank(length: int, axis: Axis) -> int:
    """Number of tokens of each rank, padding included, of `length` in all."""
    return -(-length // axis.size)


def _valid(owner: int, length: int, number: int) -> int:
    """Count the tokens of the rank at place `owner` that are not padding."""
    return min(max(length - owner * number, 0), number)


def _pass_on(block: Tensor, axis: Axis) -> tuple[Tensor, list[Any]]:
    """Start to send a block to the next rank; return the buffer for the previous rank's block, and what to wait for."""
    incoming = torch.empty_like(block)
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    send = dist.P2POp(dist.isend, block, group=axis.group, group_peer=after)
    receive = dist.P2POp(dist.irecv, incoming, group=axis.group, group_peer=before)
    return incoming, dist.batch_isend_irecv([send, receive])


def _finish(works: list[Any]) -> None:
    while works:
        works.pop().wait()


def _travel(block: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield (owner, block) for every rank, this one first; the next block travels while this one is used."""
    for step in range(axis.size):
        last = step == axis.size - 1
        incoming, works = (block, []) if last else _pass_on(block, axis)
        yield (axis.index - step) % axis.size, block
        _finish(works)
        block = incoming


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, axis: Axis, length: int) -> Tensor:
        precise = torch.promote_types(q.dtype, torch.float32)
        q, kv = q.contiguous(), torch.stack((k, v))  # copies: saved views would keep the whole product of qkv
        out = torch.zeros_like(q, dtype=precise, memory_format=torch.contiguous_format)
        log_sum = torch.full_like(out[..., :1], -torch.inf)
        for owner, block in _travel(kv, axis):
            keys, values = block[..., : _valid(owner, length, q.shape[-2]), :]
            if keys.shape[-2]:
                scores = (q @ keys.transpose(-2, -1)).to(precise) * scale
                own = scores.logsumexp(dim=-1, keepdim=True)
                merged = torch.logaddexp(log_sum, own)
                found = (scores - merged).exp().to(values.dtype) @ values
                out = out * (log_sum - merged).exp() + found
                log_sum = merged
            # Free the block before the one after the next arrives.
            del block, keys, values
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, log_sum)
        ctx.scale, ctx.axis, ctx.length = scale, axis, length
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, kv, out, log_sum = ctx.saved_tensors
        precise = log_sum.dtype
        common = (grad.to(precise) * out).sum(dim=-1, keepdim=True)
        grad_q = torch.zeros_like(out, dtype=precise)
        grad_kv = torch.zeros_like(kv, dtype=precise)
        for owner, block in _travel(kv, ctx.axis):
            valid = _valid(owner, ctx.length, q.shape[-2])
            keys, values = block[..., :valid, :]
            if valid:
                scores = (q @ keys.transpose(-2, -1)).to(precise) * ctx.scale
                shares = (scores - log_sum).exp()
                grad_scores = shares * ((grad @ values.transpose(-2, -1)).to(precise) - common) * ctx.scale
                grad_scores = grad_scores.to(q.dtype)
                grad_q += grad_scores @ keys
                grad_kv[0, ..., :valid, :] += grad_scores.transpose(-2, -1) @ q
                grad_kv[1, ..., :valid, :] += shares.to(grad.dtype).transpose(-2, -1) @ grad
            del block, keys, values
            if ctx.axis.size > 1:
                grad_kv, works = _pass_on(grad_kv, ctx.axis)  # back on its own rank after the last block
                _finish(works)
        grad_k, grad_v = grad_kv.to(q.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, length: int) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks: softmax(q kᵀ / √d) v, (B, heads, n, d).

    q, k, v: (B, heads, n, d), of one dtype, this rank's n = `tokens_per_rank` of `length` tokens; those beyond length
    are padding. Products are in that dtype, sums in at least float32.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _Ring.apply(q, k, v, q.shape[-1] ** -0.5, axis, length)


# -- a ViT on the ring --------------------------------------------------------------------------------------------


class RingAttention(nn.Module):
    """timm's Attention with the same modules and names, but a ring between its linear layers."""

    qkv: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    norm: nn.Module
    proj: nn.Module
    proj_drop: nn.Module

    def __init__(self, attention: Any, axis: Axis, length: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = attention.num_heads, attention.head_dim, attention.attn_dim
        self.axis, self.length = axis, length
        for name, module in attention.named_children():
            if name != "attn_drop":
                self.add_module(name, module)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError("Ring attention supports no mask but that of the padding: call the model without one.")
        number, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(number, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        out = ring_attention(q, k, v, self.axis, length=self.length)
        return self.proj_drop(self.proj(self.norm(out.transpose(1, 2).reshape(number, tokens, self.attn_dim))))


class CutTokens(nn.Module):
    """All tokens (B, N, C), the same on all ranks -> this rank's (B, n, C), padded with zeros."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        missing = tokens_per_rank(x.shape[1], self.axis) * self.axis.size - x.shape[1]
        return split(F.pad(x, (0, 0, 0, missing)), self.axis, 1)


class ClassToken(nn.Module):
    """The first token (B, C) of each rank -> that of the first rank, on all ranks."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        # Multiply by 0 instead of making zeros, so that every rank's backward pass goes through all rings.
        return reduce(x * float(self.axis.index == 0), self.axis)


class MeanToken(nn.Module):
    """This rank's tokens (B, n, C) -> the mean of all tokens but the first `prefix`, on all ranks.

    The result is (B, prefix + 1, C), because the model averages all tokens but the first `prefix` itself.
    """

    def __init__(self, axis: Axis, length: int, prefix: int) -> None:
        super().__init__()
        self.axis, self.length, self.prefix = axis, length, prefix

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device) + self.axis.index * x.shape[1]
        used = ((places >= self.prefix) & (places < self.length)).to(x.dtype) / (self.length - self.prefix)
        mean = reduce((x * used[:, None]).sum(dim=1, keepdim=True), self.axis)
        return mean.expand(-1, self.prefix + 1, -1)


def check(model: nn.Module, size: int) -> None:
    option = f"--parallel.sequence is {size}"
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"{option}, and {type(model).__name__} is not a ViT, the only kind of model that can be cut by its tokens: "
            "set 1."
        )
    length = model.patch_embed.num_patches + model.num_prefix_tokens
    if size > length:
        raise ValueError(f"{option}, and the model has {length} tokens: expected at most one rank per token.")
    if model.global_pool not in ("token", "avg"):
        raise ValueError(f"{option}, which expects a model that pools by token or avg, and it has {model.global_pool}.")
    if model.global_pool == "avg" and not isinstance(model.norm, nn.Identity):
        raise ValueError(f"{option}, and the model has a norm before the mean of its tokens, not behind it: set 1.")
    blocks: Any = model.blocks
    if any(_rate(block.attn.attn_drop) for block in blocks):
        raise ValueError(
            f"{option}, and the ring has no dropout between scores and values: build the model without attn_drop_rate."
        )


def parallelize(model: VisionTransformer, mesh: Mesh) -> None:
    """Cut the tokens of a model, in place, behind its embedding; after its matrices, before its stages are cut.

    Embedding and head, and so their gradients, are the same on all ranks. Gradients of blocks and norm are summands
    (`cuts.sum_partial_gradients`). ValueError: see `check`.
    """
    axis = mesh.axis("sequence")
    check(model, axis.size)
    length = model.patch_embed.num_patches + model.num_prefix_tokens
    model.add_module("patch_drop", CutTokens(axis))
    blocks: Any = model.blocks
    for block in blocks:
        block.attn = RingAttention(block.attn, axis, length)
        for owner, name in ((block.attn, "proj_drop"), (block.mlp, "drop1"), (block.mlp, "drop2")):
            owner.add_module(name, _dropout(getattr(owner, name), mesh))
    for module in (model.norm_pre, model.blocks, model.norm):
        _mark_partial(module)
    if model.global_pool == "token":
        model.fc_norm = ClassToken(axis)
    else:
        model.norm = MeanToken(axis, length, model.num_prefix_tokens)


def _rate(dropout: Any) -> float:
    return dropout.rate if isinstance(dropout, Dropout) else dropout.p


def _dropout(dropout: Any, mesh: Mesh) -> nn.Module:
    """A dropout layer whose mask differs between ranks of the sequence axis, too."""
    if not _rate(dropout):
        return dropout
    return Dropout(_rate(dropout), mesh, ("sequence", *getattr(dropout, "axes", ())))


def _mark_partial(module: nn.Module) -> None:
    """Mark the gradients of all parameters inside as summands over "sequence"; keep their other cuts."""
    cuts = cuts_of(module)
    for prefix, owner in module.named_modules():
        names = {name: f"{prefix}.{name}" if prefix else name for name, _ in owner.named_parameters(recurse=False)}
        own = {name: replace(cuts[full], partial=(*cuts[full].partial, "sequence")) for name, full in names.items()}
        if own:
            setattr(owner, "cuts", own)
