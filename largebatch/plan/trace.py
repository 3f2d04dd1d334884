"""A pass forward and backward, counted without computing it: kernels, FLOPs, bytes, and the memory that autograd keeps.

The model runs on the meta device, where tensors have shapes and no numbers. A dispatch mode sees every operation, and
all memory from its allocation to its end. The meta device has no autocast, fused attention or fused dropout: `_Casts`
stands for these.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from largebatch.assembly import build_objective
from largebatch.augment import Augmented
from largebatch.config import TrainConfig
from largebatch.native.attention import native_layers
from largebatch.optim.muon import hidden_matrices
from largebatch.precision import DTYPES
from zoo import create_model, set_fused_attn, volo

META = torch.device("meta")


class Kernel(NamedTuple):
    """The work of one operation on the device."""

    flops: float  # of products of matrices and convolutions; 0 for all others
    moved: float  # bytes that it reads and writes, each tensor once


@dataclass(frozen=True)
class Gradient:
    name: str
    size: int  # bytes
    after: int  # number of kernels of the pass after which it is ready


@dataclass(frozen=True)
class Pass:
    """A pass forward and backward of one micro-batch on one rank that holds the whole model; all memory in bytes."""

    images: int
    kernels: tuple[Kernel, ...]
    forward_kernels: int  # how many of the kernels belong to the forward pass
    gradients: tuple[Gradient, ...]  # in the order in which the backward pass finishes them
    weights: int
    matrices: int  # weights of which Muon keeps one moment; 0 with another optimizer
    buffers: int  # such as the statistics of batch norm
    inputs: int  # images and targets of the micro-batch
    kept: Mapping[str, int]  # activations after the forward pass, by their module; negative where more is freed
    casts: int  # weights that autocast keeps in half precision; the rest of the peak grows with the images
    whole: float  # share of the activations as wide as the embedding, which mode 1d does not cut
    peak: int  # the most memory at once, beside weights, buffers, inputs and gradients that stay for the step

    @property
    def flops(self) -> float:
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def activations(self) -> int:
        return sum(self.kept.values())


class Uncountable(RuntimeError):
    """An error: the model has an operation that needs numbers, so its passes can only be measured."""


def trace(config: TrainConfig, *, device: str) -> Pass:
    """Count a pass of a config's model and loss on "cuda" or "cpu".

    Gradients of earlier passes are in memory, as in all passes of a step but the first. ValueError for a model that
    cannot be built, Uncountable for one that cannot be counted.
    """
    try:
        return _trace(config, device)
    except RuntimeError as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise Uncountable(
            f"{config.model.name} cannot be counted without its numbers ({reason}): measure it, by "
            f"`python -m largebatch.benchmark step --model {config.model.name}`."
        ) from error


def _trace(config: TrainConfig, device: str) -> Pass:
    config = replace(config, model=replace(config.model, num_classes=config.model.num_classes or 1000))
    precision = precision_of(config, device)
    model = meta_model(config, device)
    counter = _Counter(model)
    if device == "cpu" and precision == "bf16" and torch.cpu.get_capabilities().get("avx512_bf16", False):
        for layer in native_layers(model):  # as `native.attention.choose_attention` does
            layer.native = lambda qkv, scale: _Native.apply(qkv.contiguous(), counter)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    counter.ignore(parameter.grad for parameter in model.parameters())
    batch = _inputs(config)
    counter.ignore(tensors_in(batch))
    objective = build_objective(config, model)
    casts, widths = _Casts(device, precision, counter), _Widths(model)
    counter.watch(model)
    casts.watch(model)
    with torch.random.fork_rng(devices=[]), counter:
        torch.manual_seed(0)  # stochastic depth draws on the host
        with casts, widths:
            loss = objective(model, batch)
        casts.end_forward()
        counter.end_forward()
        loss.backward()
    return Pass(
        images=config.data.micro_batch_size,
        kernels=tuple(counter.kernels),
        forward_kernels=counter.forward_kernels,
        gradients=tuple(counter.gradients),
        weights=sum(p.nbytes for p in model.parameters()),
        matrices=sum(p.nbytes for p in hidden_matrices(model)) if config.optim.name.startswith("muon") else 0,
        buffers=sum(b.nbytes for b in model.buffers()),
        inputs=sum(t.nbytes for t in tensors_in(batch)),
        kept=counter.kept,
        casts=casts.size,
        whole=widths.share(casts.size),
        peak=counter.peak,
    )


def precision_of(config: TrainConfig, device: str) -> str:
    auto = "bf16" if device == "cuda" else "fp32"
    return auto if config.run.precision == "auto" else config.run.precision


def meta_model(config: TrainConfig, device: str) -> nn.Module:
    """Build the model on the meta device, with the attention of this device."""
    options = config.model.arguments() | {"weights": None, "num_classes": config.model.num_classes or 1000}
    with META, _Uninitialised():
        model = create_model(**options).train()
    return set_fused_attn(model, device == "cuda")


def _inputs(config: TrainConfig) -> Augmented:
    images, side, classes = config.data.micro_batch_size, config.model.img_size, config.model.num_classes
    pixels, targets = torch.empty(images, 3, side, side, device=META), torch.empty(images, classes, device=META)
    if not config.loss.dense_weight:
        return Augmented(pixels, targets)
    return Augmented(pixels, targets, torch.empty(images, (side // volo.CELL) ** 2, classes, device=META))


class _Uninitialised(TorchDispatchMode):
    """Skips operations that write into a tensor: they would take most of the time to build a model."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and isinstance(args[0], Tensor) and args[0].device == META:
            return args[0]
        return func(*args, **(kwargs or {}))


# -- counting -------------------------------------------------------------------------------------------------------


class _Counter(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.device = next(model.parameters()).device
        self.kernels: list[Kernel] = []
        self.gradients: list[Gradient] = []
        self.kept: dict[str, int] = {}
        self.forward_kernels = self.live = self.peak = self._before = 0
        self._known: dict[int, Any] = {}
        self.ignore([*model.parameters(), *model.buffers()])

    def ignore(self, tensors: Iterable[Tensor | None]) -> None:
        """Do not count the memory of these tensors, which must outlive the counter."""
        for tensor in tensors:
            if tensor is not None:
                storage = tensor.untyped_storage()
                self._known[storage._cdata] = storage

    def watch(self, model: nn.Module) -> None:
        """Note what each part of the model keeps, and when each gradient is ready."""
        for name, module in _parts(model):
            module.register_forward_hook(lambda *_, name=name: self._note(name))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._finish, name))

    def end_forward(self) -> None:
        self._note("head and loss")
        self.forward_kernels = len(self.kernels)

    def _note(self, name: str) -> None:
        if not self.forward_kernels:  # not in the recomputation of the backward pass
            self.kept[name] = self.kept.get(name, 0) + self.live - self._before
            self._before = self.live

    def _finish(self, name: str, parameter: Tensor) -> None:
        self.gradients.append(Gradient(name, parameter.nbytes, len(self.kernels)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        out = func(*args, **kwargs)
        outputs = tensors_in(out)
        read = {tensor.untyped_storage()._cdata for tensor in inputs}
        is_view = outputs and all(tensor.untyped_storage()._cdata in read for tensor in outputs)
        for tensor in outputs:
            self._allocate(tensor)
        if outputs and outputs[0].device == self.device and (not is_view or func._schema.is_mutable):
            packet = func._overloadpacket
            flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
            if packet not in EMPTY:
                self.count(flops, [*inputs, *outputs])
        return out

    def count(self, flops: float, tensors: Iterable[Tensor]) -> None:
        self.kernels.append(Kernel(flops, sum(_bytes(tensor) for tensor in tensors)))

    def _allocate(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or tensor.device != self.device:
            return
        self._known[key] = weakref.ref(storage, partial(self._free, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int, _: Any) -> None:
        self._known.pop(key, None)
        self.live -= size


ROW_CUT = (".attn.proj", ".mlp.fc2")  # layers whose inputs mode 1d cuts, although they may be as wide as the embedding


class _Widths(torch.autograd.graph.saved_tensors_hooks):
    """Notes the bytes that autograd saves, and those of them in activations as wide as the embedding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.embed_dim = getattr(model, "embed_dim", 0)
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._sizes: dict[int, tuple[int, bool]] = {}
        self._inside_cut = False
        for name, module in model.named_modules():
            if name.endswith(ROW_CUT):
                module.register_forward_pre_hook(partial(self._enter, True))
                module.register_forward_hook(partial(self._enter, False))

    def _enter(self, cut: bool, *_: Any) -> None:
        self._inside_cut = cut

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            is_whole = tensor.ndim > 1 and tensor.shape[-1] == self.embed_dim and not self._inside_cut
            self._sizes[storage._cdata] = storage.nbytes(), is_whole
        return tensor

    def share(self, casts: int) -> float:
        """Return the share of wide activations in these bytes, without the casts of weights; 1 if nothing was saved."""
        total = sum(size for size, _ in self._sizes.values()) - casts
        return sum(size for size, is_whole in self._sizes.values() if is_whole) / total if total > 0 else 1.0


EMPTY = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided}


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, without the repetitions of an expanded one."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a model, one by one, and the parts beside them."""
    for name, child in model.named_children():
        is_stack = isinstance(child, (nn.Sequential, nn.ModuleList))
        for inner, module in child.named_children() if is_stack else ():
            if isinstance(module, nn.Sequential):
                yield from ((f"{name}.{inner}.{number}", block) for number, block in module.named_children())
            else:
                yield f"{name}.{inner}", module
        if not is_stack:
            yield name, child


# -- autocast, attention and dropout --------------------------------------------------------------------------------

LOWER = {F.linear, F.conv2d, torch.bmm, torch.mm, torch.matmul, torch.addmm, torch.baddbmm, Tensor.matmul}
LOWER |= {Tensor.__matmul__, Tensor.bmm, Tensor.mm, F.conv1d, F.conv_transpose2d, torch.einsum, Tensor.baddbmm}
# On CUDA these compute in float32: https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-autocast-to-float32
UPPER = {F.layer_norm, F.group_norm, F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax}
UPPER |= {Tensor.log_softmax, torch.sum, Tensor.sum, torch.prod, Tensor.prod, F.cross_entropy, F.nll_loss, torch.cumsum}


class _Casts(TorchFunctionMode):
    """Casts as torch.autocast does on a device; attention and dropout keep as much as the fused kernels."""

    def __init__(self, device: str, precision: str, counter: _Counter) -> None:
        super().__init__()
        self.type = DTYPES[precision]
        self.lower = LOWER if self.type != torch.float32 else set()
        self.upper = UPPER if device == "cuda" and self.lower else set()
        self.counter, self.on_gpu = counter, device == "cuda"
        self.size = self._depth = 0
        # autocast keeps its casts of parameters until the forward pass ends
        self._kept: list[Tensor] | None = []

    def end_forward(self) -> None:
        self.size = sum(_bytes(cast) for cast in self._kept or ())
        self._kept = None

    def watch(self, model: nn.Module) -> None:
        """Cast also in modules that the backward pass computes again, where the modes of the forward pass are off."""
        for module in model.modules():
            module.register_forward_pre_hook(self._enter)
            # always_call: the recomputation stops by an exception when it has all that it needs
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        if self._kept is None:
            self._depth += 1
            if self._depth == 1:
                self.__enter__()

    def _leave(self, *_: Any) -> None:
        if self._kept is None:
            self._depth -= 1
            if self._depth == 0:
                self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.on_gpu:
            return self._attend(*args, **kwargs)
        if func is F.dropout and self.on_gpu:
            return _dropout(*args, **kwargs)
        if func in self.lower:
            args = tuple(self._cast(argument, self.type) for argument in args)
        elif func in self.upper:
            args = tuple(self._cast(argument, torch.float32) for argument in args)
        return func(*args, **kwargs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Any:
        cast = [self._cast(tensor, self.type) if self.lower else tensor for tensor in (q, k, v, attn_mask)]
        return _FusedAttention.apply(*cast, self.counter)

    def _cast(self, argument: Any, dtype: torch.dtype) -> Any:
        if not isinstance(argument, Tensor) or not argument.is_floating_point() or argument.dtype == dtype:
            return argument
        cast = argument.to(dtype)
        if argument.is_leaf and argument.requires_grad and self._kept is not None:
            self._kept.append(cast)
        return cast


class _FusedAttention(torch.autograd.Function):
    """Attention that keeps its inputs, its output and one number per row (https://arxiv.org/abs/2205.14135)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, counter: _Counter) -> Tensor:
        out = torch.empty_like(q[..., :1].expand(*q.shape[:-1], v.shape[-1]))  # values may be wider than keys
        logs = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mask, out, logs)
        ctx.counter = counter
        ctx.flops = 2 * (q.numel() + out.numel()) * k.shape[-2]  # two products
        counter.count(ctx.flops, tensors_in((q, k, v, mask, out, logs)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found = [torch.empty_like(x) if needed else None for x, needed in zip(saved[:4], ctx.needs_input_grad)]
        ctx.counter.count(2.5 * ctx.flops, tensors_in([*saved, *grads, *found]))  # five products
        return *found, None


class _FusedDropout(torch.autograd.Function):
    """Dropout that keeps one byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.empty_like(x, dtype=torch.bool)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _FusedDropout.apply(x) if training and p else x


class _Native(torch.autograd.Function):
    """Attention of attention.cpp, which keeps its input, its output and one number per row."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, counter: _Counter) -> Tensor:
        batch, tokens, _, heads, dim = qkv.shape
        out, logs = qkv.new_empty(batch, tokens, heads, dim), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(qkv, out, logs)
        ctx.counter = counter
        ctx.flops = 4 * out.numel() * tokens
        counter.count(ctx.flops, (qkv, out, logs))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        qkv, out, logs = ctx.saved_tensors
        found = torch.empty_like(qkv)
        ctx.counter.count(2.5 * ctx.flops, (qkv, out, logs, *grads, found))
        return found, None
