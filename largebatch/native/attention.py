"""The fastest way to compute attention on each device.

GPUs use torch's fused kernel, for which torch chooses a back-end. CPUs use two matrix products around a softmax, except
for a VOLO in bfloat16: attention.cpp never writes the map of attention weights to memory (benchmark/NOTES.md).
"""

import ctypes
import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from largebatch.native.compile import can_load, load_library
from zoo import set_fused_attn
from zoo.volo import Attention

SOURCE = Path(__file__).with_name("attention.cpp")
FLAGS = ("-fopenmp",)  # resolves to the libgomp that torch has loaded, so both use the same threads
MAX_DIM = 1024  # the largest dimension of a head


def choose_attention(model: nn.Module, device: torch.device) -> nn.Module:
    """Let the model's attention layers use the fastest kernel of this device; return the model."""
    set_fused_attn(model, device.type != "cpu")
    layers = native_layers(model) if device.type == "cpu" else []
    if layers and available():
        for layer in layers:
            layer.native = attend
    return model


def native_layers(model: nn.Module) -> list[Attention]:
    """List the attention layers that attention.cpp can compute: VOLO's, without dropout, heads of a multiple of 16."""
    found = [module for module in model.modules() if isinstance(module, Attention) and not module.attn_drop.p]
    return [layer for layer in found if _is_known(layer.proj.in_features // layer.num_heads)]


def _is_known(dim: int) -> bool:
    return dim % 16 == 0 and dim <= MAX_DIM


@functools.cache
def available() -> bool:
    has_instructions = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return has_instructions and can_load("VOLO's attention", SOURCE, *FLAGS)


def attend(qkv: Tensor, scale: float) -> Tensor:
    """Return softmax(scale · q kᵀ) v: bfloat16 (B, N, 3, heads, d), d a multiple of 16, -> (B, N, heads, d)."""
    fits = qkv.ndim == 5 and qkv.shape[2] == 3 and _is_known(qkv.shape[-1])
    if qkv.dtype != torch.bfloat16 or qkv.device.type != "cpu" or not fits:
        raise ValueError(
            f"attend got {qkv.dtype} of shape {tuple(qkv.shape)} on {qkv.device}: expected bfloat16 of shape "
            f"(B, N, 3, heads, d) on the CPU, d a multiple of 16, up to {MAX_DIM}."
        )
    return _Attend.apply(qkv, scale)


# -- the choice, for the log -----------------------------------------------------------------------------------------


def describe_attention(model: nn.Module, images: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> str:
    """Return the code that computes the model's attention in training, as a clause; "" if we know none.

    images: their shape (B, 3, H, W); dtype: that of autocast, or float32.
    """
    layers = [module for module in model.modules() if hasattr(module, "fused_attn")]
    native = sum(getattr(layer, "native", None) is not None for layer in layers)
    if native and dtype == torch.bfloat16:
        return f"C++ of this project in {native} of {len(layers)} layers"
    if not any(getattr(layer, "fused_attn") for layer in layers):
        return "torch's two products around a softmax" if layers else ""
    try:
        calls = sorted(fused_calls(model, images))
    except Exception:  # an operation that torch does not have without memory; the first step will tell
        return "that of torch, of a shape that is not known before the first step"
    return "torch's scaled_dot_product_attention: " + ", ".join(
        f"{backend_of(call, device, dtype)} for {call.heads} heads of {call.dim} and {call.tokens} tokens"
        for call in calls
    )


class Call(NamedTuple):
    """The shape of a call of torch's fused attention, and the rate of its dropout."""

    heads: int
    tokens: int
    dim: int
    dropout: float


def fused_calls(model: nn.Module, images: tuple[int, ...]) -> set[Call]:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    shapes = {name: tensor.detach().to("meta") for name, tensor in tensors}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _Calls() as calls:
        torch.func.functional_call(model, shapes, torch.empty(images, device="meta"))
    return calls.found


def backend_of(call: Call, device: torch.device, dtype: torch.dtype) -> str:
    """Return the back-end that torch chooses for a call with gradients."""
    shape = (1, call.tokens, call.heads, call.dim)
    q, k, v = (torch.empty(shape, device=device, dtype=dtype, requires_grad=True).transpose(1, 2) for _ in range(3))
    number = torch._fused_sdp_choice(q, k, v, dropout_p=call.dropout)
    return SDPBackend(number).name.lower().replace("_", " ")


class _Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[Call] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            heads, tokens, dim = args[0].shape[-3:]
            self.found.add(Call(heads, tokens, dim, (kwargs or {}).get("dropout_p", 0.0)))
        return func(*args, **kwargs or {})


# -- the call ---------------------------------------------------------------------------------------------------------


class _Shape(ctypes.Structure):
    """The struct Shape of attention.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "tokens", "heads", "dim")]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, scale: float) -> Tensor:
        qkv = qkv.contiguous()
        batch, tokens, _, heads, dim = qkv.shape
        out, logs = qkv.new_empty(batch, tokens, heads, dim), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
        _call("attend", (qkv, out, logs), qkv, scale)
        ctx.save_for_backward(qkv, out, logs)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        qkv, out, logs = ctx.saved_tensors
        d_qkv = torch.empty_like(qkv)
        _call("gradient", (qkv, out, grads[0].contiguous(), logs, d_qkv), qkv, ctx.scale)
        return d_qkv, None


def _call(name: str, tensors: tuple[Tensor, ...], qkv: Tensor, scale: float) -> None:
    """Call a function of attention.cpp with torch's number of threads. It sees addresses, so check the rest."""
    batch, tokens, _, heads, dim = qkv.shape
    half = {(*qkv.shape,), (batch, tokens, heads, dim)}
    kinds = {(shape, torch.bfloat16) for shape in half} | {((batch, heads, tokens), torch.float32)}
    for t in tensors:
        if ((*t.shape,), t.dtype) not in kinds or t.device.type != "cpu" or not t.is_contiguous() or t.is_neg():
            raise ValueError(f"attention.cpp got {t.dtype} of shape {(*t.shape,)} on {t.device}, expected {kinds}.")
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    shape, threads = ctypes.byref(_Shape(batch, tokens, heads, dim)), torch.get_num_threads()
    getattr(load_library(SOURCE, *FLAGS), name)(*addresses, shape, ctypes.c_float(scale), threads)
