"""Read weights into a model, whoever wrote them, and write them so that anyone can read them.

A file is a .safetensors file or a torch file of tensors (read with `weights_only=True`), bare or inside the container
of a training checkpoint, with or without the prefixes of wrappers. The position embedding is adapted if the image size
differs, and the head if the classes differ. Anything else that does not fit is an error, and leaves the model
unchanged.

Loading copies into the model's own tensors, so the model may be wrapped or compiled, and an optimizer may already have
its parameters.
"""

import errno
import logging
import math
import os
import pickle
import re
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed, resample_abs_pos_embed_nhwc
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from zoo import vit, volo
from zoo.timm_models import TIMM, as_timm_reads

logger = logging.getLogger(__name__)

Tensors = dict[str, Tensor]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".tar", ".ckpt")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
CONTAINERS = ("state_dict", "model", "state_dict_ema")  # the first one found is taken
WRAPPERS = ("module", "_orig_mod")  # DistributedDataParallel and averaged models; torch.compile
COUNTER = "n_averaged"  # of AveragedModel, beside the weights
WRAPPER_CLASSES = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
HEADS = ("head", "aux_head")  # VOLO has the second one, for its cells; the heads of timm's models have other names
SHOWN = 3  # of a list of names in a message

# What training checkpoints of the field keep beside the weights: plain data. numpy 1 had another name for its scalars.
_scalar: Any = np.float64().__reduce__()[0]
_dtypes = {type(np.dtype(kind)) for kind in np.typecodes["All"] if kind != "O"}
PLAIN_DATA = [Namespace, np.dtype, *_dtypes, _scalar, (_scalar, "numpy.core.multiarray.scalar")]


class Gone(ValueError):
    """There is no such file, or not any more: a run removes its older checkpoints."""


class OtherModel(ValueError):
    """Most tensors of a file are not those of the model, nor those of another one of the zoo."""


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    new_heads: bool = True,
    rows: Sequence[int] | None = None,
    content: Tensors | None = None,
) -> list[str]:
    """Copy the weights of a file into a model of the zoo; return the names of the tensors that are not as in the file.

    A position embedding of another (square) grid is resized as timm does it: bicubic, antialiased, in fp32. A head for
    another number of classes, or none, is left out and the model's is initialised anew, as timm does it: normal with
    std 0.02, zero bias, drawn from torch's global random state. Without new_heads, as for a validation, that is an
    error.

    rows: for each class of the model its row in the file's head; empty: the file has other classes, so its head is left
    out; None: both have the same. content: a result of `read_weights`. Of several containers the first of `CONTAINERS`
    is taken: plain weights before averaged ones.

    Raises ValueError if the file cannot be read or does not fit, with the first keys that do not fit, or the file's
    model.
    """
    model = _inner(model)
    target = _strip_names(named_weights(model))
    content = read_weights(path) if content is None else content
    weights = _without_prefix(content, target)
    _check_variant(weights, target, path=path)
    if "blocks.0.ls1.gamma" in target:  # DeiT III's authors have other names than timm
        weights = {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name): tensor for name, tensor in weights.items()}
    heads = _heads(model)
    if hasattr(model, TIMM) and _body(weights, heads) != _body(target, heads):
        weights = as_timm_reads(weights, model)
    changes: dict[str, int] = {}  # what to log, and its level, if all fits
    weights = _resize_pos_embed(weights, target, changes)
    weights = _replace_heads(weights, target, heads, changes, path=path, allowed=new_heads, rows=rows)
    _check_fit(weights, target, path=path)
    for change, level in changes.items():
        logger.log(level, "%s: %s", path, change)
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(weights[name])
    taken = {id(tensor) for tensor in content.values()}
    return [name for name in target if id(weights[name]) not in taken]


def save_weights(model: nn.Module, path: str | Path) -> None:
    """Write a model's weights, without the prefixes of wrappers: .safetensors, .pt, .pth or .bin.

    The file appears under its name only when it is complete.
    """
    try:
        write_weights(named_weights(model), path)
    except (SafetensorError, RuntimeError) as error:  # how the two libraries report a failed write
        Path(f"{path}.unfinished").unlink(missing_ok=True)
        raise OSError(errno.EIO, f"writing failed: {reason_of(error)}", str(path)) from error


def named_weights(model: nn.Module) -> Tensors:
    """Return a model's own tensors by their names, without wrappers: their prefixes, and what an average counts.

    "module" is a prefix below a wrapper of torch, or if it is all there is of the whole model; "_orig_mod" everywhere.
    """
    wrapped = set()
    for path, module in model.named_modules(remove_duplicate=False):
        parts = [*module._modules, *module._parameters, *module._buffers]
        alone = parts == ["module"] and all(part in WRAPPERS for part in path.split(".") if part)
        if alone or isinstance(module, WRAPPER_CLASSES):
            wrapped.add(path)

    def own(name: str) -> str:
        *parts, last = name.split(".")
        parents = accumulate(("", *parts), lambda path, part: f"{path}.{part}".lstrip("."))
        inner = [part for part, parent in zip(parts, parents) if part != "_orig_mod" and parent not in wrapped]
        return ".".join([*inner, last])

    tensors = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in wrapped}
    names = {own(name): name for name in tensors}
    if len(names) < len(tensors):
        raise ValueError(f"some weights differ only in a wrapper's prefix, {' or '.join(WRAPPERS)}")
    return {name: tensors[within] for name, within in names.items()}


def write_weights(weights: Tensors, path: str | Path) -> None:
    path = Path(path)
    _check_suffix(path)
    taken: set[int] = set()
    weights = {name: _standalone(tensor, taken) for name, tensor in weights.items()}
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.unlink(missing_ok=True)
    unfinished.touch()
    mode = unfinished.stat().st_mode  # as the umask says; safetensors would let nobody else read the file
    if path.suffix == ".safetensors":
        save_file(weights, unfinished, metadata={"format": "pt"})
    else:
        torch.save(weights, unfinished)
    unfinished.chmod(mode)
    os.replace(unfinished, path)


def read_weights(path: str | Path, *, device: str = "cpu") -> Tensors:
    """The tensors of a file out of their container, without prefixes of wrappers; on "meta" only their shapes."""
    path = Path(path)
    _check_suffix(path)
    if not path.is_file():
        raise Gone(f"there is no weights file {path}")
    try:
        open(path, "rb").close()  # safetensors reports a file that it may not read as missing
        content = (_load_safetensors if path.suffix == ".safetensors" else _load_torch)(path, device)
    except FileNotFoundError:
        raise Gone(f"there is no weights file {path}") from None
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a file of tensors: {_why_unread(path, error)}") from error
    return _strip_names(_unwrap(content, path=path))


def _load_safetensors(path: Path, device: str) -> Tensors:
    if device != "meta":
        return load_file(path, device)
    with safe_open(path, framework="pt") as file:
        return {name: torch.empty(file.get_slice(name).get_shape(), device=device) for name in file.keys()}


def _load_torch(path: Path, device: str) -> Any:
    with torch.serialization.safe_globals(PLAIN_DATA):
        return torch.load(path, map_location=device, weights_only=True)


def _why_unread(path: Path, error: Exception) -> str:
    """Return why a file cannot be read; torch hides what is no plain data behind advice to unpickle it."""
    if isinstance(error, pickle.UnpicklingError):
        try:
            with torch.serialization.safe_globals(PLAIN_DATA):
                others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except Exception:  # a damaged file may raise anything
            others = []
        if others:
            return f"it holds {listed(others)}, which is no plain data: save the state_dict alone"
        error = error.__context__ if isinstance(error.__context__, Exception) else error
    return reason_of(error)


def reason_of(error: BaseException) -> str:
    """Return an exception's text on one line without terminal codes; without a text, its type."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).partition("Exception raised from")[0]
    return printable(" ".join(text.split()))[:500].rstrip(".") or type(error).__name__


def printable(name: str) -> str:
    """Return a name of others as one line of text, which cannot command a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def listed(names: Collection[str]) -> str:
    shown = ", ".join(printable(name) for name in [*names][:SHOWN])
    return shown + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def _unwrap(content: Any, *, path: Path) -> Tensors:
    """Take the weights out of a training checkpoint, which may be a container in a container."""
    while isinstance(content, Mapping):
        inside = [key for key in CONTAINERS if isinstance(content.get(key), Mapping)]
        if not inside:
            break
        logger.info("%s: taking the weights under %r, of %s", path, inside[0], inside)
        content = content[inside[0]]
    if isinstance(content, Mapping) and content and all(isinstance(v, Tensor) for v in content.values()):
        return dict(content)
    found = listed([*map(str, content)]) if isinstance(content, Mapping) else type(content).__name__
    raise ValueError(f"{path} holds {found}: expected tensors, bare or under {' or '.join(CONTAINERS)}")


def _inner(model: nn.Module) -> nn.Module:
    """Return the model in wrappers, if it is one of timm's that is known by an attribute."""
    inner = model
    while not hasattr(inner, TIMM) and len(found := [name for name in WRAPPERS if name in inner._modules]) == 1:
        inner = inner.get_submodule(found[0])
    return inner if hasattr(inner, TIMM) else model


def _strip_names(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return tensors without any part of a name that is a wrapper's, unless names would then be the same."""
    names = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in tensors}
    names.pop(COUNTER, None)
    same = len(set(names.values())) < len(names)
    return {name if same else short: tensors[name] for name, short in names.items()}


def _shared_prefix(names: Collection[str]) -> str:
    """Return the first part of all names, with its dot; "" if they differ."""
    first = {name.partition(".")[0] + "." for name in names}
    prefix = first.pop() if len(first) == 1 else ""
    return prefix if all(name.startswith(prefix) for name in names) else ""


def _without_prefix(weights: Tensors, target: Collection[str] = ()) -> Tensors:
    """Take off the prefixes that all names of a file share, such as Lightning's, unless the model has them, too."""
    while prefix := _shared_prefix(weights):
        if target and all(name.startswith(prefix) for name in target):
            break
        logger.info("the prefix %r of all names in the file is taken off", prefix)
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def _standalone(tensor: Tensor, taken: set[int]) -> Tensor:
    """Copy a tensor to the CPU, into memory of its own: the file of a view would contain its whole storage.

    taken: addresses of the tensors before; safetensors refuses tied weights, which share one.
    """
    tensor = tensor.detach().cpu().contiguous()
    memory = tensor.untyped_storage()
    alone = memory.nbytes() == tensor.nbytes and memory.data_ptr() not in taken
    taken.add(memory.data_ptr())
    return tensor if alone else tensor.clone()


def _resize_pos_embed(weights: Tensors, target: Tensors, changes: dict[str, int]) -> Tensors:
    """Bring the position embedding, (1, 1 + n * n, C), (1, n * n, C) or VOLO's (1, n, n, C), to the model's grid."""
    name = "pos_embed"
    if name not in weights or name not in target or weights[name].shape == target[name].shape:
        return weights
    found, wanted = weights[name], target[name]
    old, new = _grid(found), _grid(wanted)
    prefix = found.shape[1] - old * old  # 1 if the class token has a place
    same = (found.ndim, found.shape[-1]) == (wanted.ndim, wanted.shape[-1])
    if not old or not new or not same or found.ndim == 3 and prefix != wanted.shape[1] - new * new:
        return weights  # the image size is not the reason: `_check_fit` reports a wrong shape
    changes[f"position embedding resized from {old} x {old} to {new} x {new}"] = logging.INFO
    if found.ndim == 4:
        return weights | {name: resample_abs_pos_embed_nhwc(found.float(), new_size=[new, new])}
    resized = resample_abs_pos_embed(found.float(), new_size=[new, new], old_size=[old, old], num_prefix_tokens=prefix)
    return weights | {name: resized}


def _grid(pos_embed: Tensor) -> int:
    """Cells per side of a position embedding; 0 if its grid is not square."""
    if pos_embed.ndim == 4:
        return pos_embed.shape[1] if pos_embed.shape[1] == pos_embed.shape[2] else 0
    tokens = pos_embed.shape[1] if pos_embed.ndim == 3 else 0
    side = math.isqrt(tokens)
    return side if tokens - side * side <= 1 else 0


def _replace_heads(
    weights: Tensors,
    target: Tensors,
    heads: tuple[str, ...],
    changes: dict[str, int],
    *,
    path: str | Path,
    allowed: bool,
    rows: Sequence[int] | None,
) -> Tensors:
    """Put new heads in place of those for other classes; a missing head counts as one for 0 classes."""
    if rows is not None and not any(_num_classes(target, head) for head in heads):
        raise ValueError(
            f"{path} has other classes than the model, whose head is not named {' or '.join(heads)}: give the model "
            'its name, as in pretrained_cfg = {"classifier": "fc"}'
        )
    for head in heads:
        found, wanted = _num_classes(weights, head), _num_classes(target, head)
        if found is None or not (found or wanted) or found == wanted and rows is None:
            continue
        weight, bias = f"{head}.weight", f"{head}.bias"
        if found == wanted and rows:
            changes[f"rows of {head} brought into the order of the model's classes"] = logging.INFO
            weights = weights | {name: weights[name][[*rows]] for name in (weight, bias)}
            continue
        if not allowed and not found:
            continue  # `_check_fit` names what is missing
        if not allowed:
            raise ValueError(f"{path} has a head of {found} classes, the model one of {wanted}: set its num_classes")
        other = ", whose names are others," if found == wanted else ""
        left_out = f"{head} of {found} classes{other} left out" if found else f"it has no {head}"
        changes[f"{left_out}, one of {wanted} classes initialised anew"] = logging.WARNING
        weights = {name: tensor for name, tensor in weights.items() if name not in (weight, bias)}
        if wanted:
            weights[weight] = nn.init.trunc_normal_(torch.empty(target[weight].shape), std=0.02)
            weights[bias] = torch.zeros(target[bias].shape)
    return weights


def _num_classes(tensors: Tensors, head: str) -> int | None:
    """The number of classes of a head, linear or a convolution; 0 without a head, None if the head is incomplete."""
    weight, bias = tensors.get(f"{head}.weight"), tensors.get(f"{head}.bias")
    if weight is None and bias is None:
        return 0
    if weight is None or bias is None or weight.ndim not in (2, 4) or bias.shape != weight.shape[:1]:
        return None
    return weight.shape[0]


def count_classes(model: nn.Module, path: str | Path) -> int:
    """The number of classes of the weights in a file for this model; ValueError without a head."""
    model = _inner(model)
    weights = _without_prefix(read_weights(path, device="meta"), _strip_names(named_weights(model)))
    classes = _num_classes(weights, _heads(model)[0])
    if not classes:
        raise ValueError(f"{path} has no head, so it knows no classes: expected weights of a classifier")
    return classes


def _heads(model: nn.Module) -> tuple[str, ...]:
    if not hasattr(model, TIMM):
        return HEADS
    names = getattr(model, "default_cfg")["classifier"] or HEADS
    return (names,) if isinstance(names, str) else tuple(names)


def _body(tensors: Tensors, heads: tuple[str, ...]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items() if name.rpartition(".")[0] not in heads}


def recognise(tensors: Tensors) -> str | None:
    """The name of the zoo's model with such weights, at any image size and number of classes, or None."""
    shapes = _shapes(tensors)
    return vit.recognise(shapes) or volo.recognise(shapes)


def identify(path: str | Path) -> tuple[str, int, int, str]:
    """Tell the model of a weights file by its tensors: the zoo's name, image size, classes, and `global_pool`.

    Raises ValueError if they are those of no model of the zoo, or of images that are not square.
    """
    tensors = _without_prefix(read_weights(path, device="meta"))
    name, grid = recognise(tensors), _grid(tensors["pos_embed"]) if "pos_embed" in tensors else 0
    if name is None or not grid:
        raise ValueError(f"{path} does not tell its model, which is none of the zoo: name the model")
    side = vit.STRUCTURES[name].patch_size if name in vit.STRUCTURES else volo.CELL
    pool = "avg" if "fc_norm.weight" in tensors else ""  # what timm calls the norm behind a mean
    return name, grid * side, _num_classes(tensors, "head") or 0, pool


def _shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is not known as a weights file: expected a name ending in {', '.join(SUFFIXES)}")


def _check_variant(weights: Tensors, target: Tensors, *, path: str | Path) -> None:
    found, wanted = recognise(weights), recognise(target)
    if found is not None and found != wanted:
        raise ValueError(f"{path} does not fit {wanted or 'the model'}: it looks like {found}, ask for that")


def _check_fit(weights: Tensors, target: Tensors, *, path: str | Path) -> None:
    both = {name: tensor for name, tensor in target.items() if name in weights}
    problems = {
        "missing": [name for name in target if name not in weights],
        "unexpected": [name for name in weights if name not in target],
        "wrong shape": [
            f"{name} (file {tuple(weights[name].shape)}, model {tuple(tensor.shape)})"
            for name, tensor in both.items()
            if weights[name].shape != tensor.shape
        ],
        "wrong numbers": [f"{name} ({why})" for name in both if (why := _why_no_numbers(weights[name], both[name]))],
    }
    if any(problems.values()):
        reason = "; ".join(f"{kind} {listed(names)}" for kind, names in problems.items() if names)
        others = len(problems["unexpected"]) + len(problems["wrong shape"]) > len(weights) / 2
        kind = OtherModel if others else ValueError
        raise kind(f"{path} does not fit {recognise(target) or 'the model'}: {reason}")


def _why_no_numbers(found: Tensor, wanted: Tensor) -> str:
    if found.is_floating_point() and wanted.is_floating_point():  # in float32, as the model is
        return "" if found.float().isfinite().all() or not wanted.float().isfinite().all() else "not finite"
    return "" if found.is_floating_point() == wanted.is_floating_point() else str(found.dtype)


def check_description(model: nn.Module, path: Path, content: Tensors, told: str) -> None:
    """Raise ValueError if tensors in a file have other sizes than in the model that a description tells."""
    found = _shapes(content)
    for name, shape in _shapes(_strip_names(named_weights(model))).items():
        if name in found and math.prod(found[name]) != math.prod(shape):
            raise ValueError(f"{told}, but {name} in {path.name} is {tuple(found[name])}, not {tuple(shape)}")
