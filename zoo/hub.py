"""Weights that tell which model they belong to: config.json beside them, in the form of timm and of its models' hub.

    FOLDER/
        model.safetensors     the weights
        config.json           timm's name of the model, image size, crop, mean, classes and their names

    timm.create_model("local-dir:FOLDER", pretrained=True)    the same logits, without this package
    zoo.create_model(weights="FOLDER")                        FOLDER: such a folder, or that of a run

Without config.json the shapes of the tensors tell the model, its image size and its classes; crop, mean and standard
deviation are then those that the zoo gives the model.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
from torch import nn

from zoo import vit, volo
from zoo.timm_models import FILTERS, PREFIX
from zoo.weights import Gone, Tensors, identify, printable, read_weights, reason_of

logger = logging.getLogger(__name__)

STRUCTURES = vit.STRUCTURES | volo.STRUCTURES
WEIGHTS, AVERAGE = "model.safetensors", "model_ema.safetensors"
CONFIG, MANIFEST = "config.json", "manifest.json"
GEOMETRY = ("crop_pct", "interpolation", "mean", "std")
HUB, LOCAL = "hf-hub:", "local-dir:"  # as timm's create_model takes them
BASE = "vit_base_patch32_224"  # a ViT that timm has no name for is this one with other sizes
SIZES = ("patch_size", "embed_dim", "depth", "num_heads")
MOST_PIXELS = 2**14  # per side of an image
TRIES = 5  # to read weights of a run that goes on and removes its older checkpoints


@dataclass(frozen=True)
class Found:
    weights: Path
    name: str
    """the model's name in the zoo"""
    img_size: int
    num_classes: int
    global_pool: str
    """avg, or empty: the class token"""
    cfg: Mapping[str, Any] = field(default_factory=dict)
    """the known values of `GEOMETRY`, and label_names if the classes have names"""
    tensors: Tensors = field(default_factory=dict, repr=False)
    """those in the file, if `read` has found it"""


# -- write -------------------------------------------------------------------------------------------------------


def describe(name: str, model: nn.Module, *, label_names: Sequence[str] = (), **geometry: Any) -> dict[str, Any]:
    """Return the content of config.json for a model of the zoo, or, with the name timm/NAME, for one of timm.

    geometry: values of `GEOMETRY` that replace the model's own. label_names are written if there is one for each class.
    """
    name = (zoo_name(name) or (name,))[0]
    cfg: dict[str, Any] = getattr(model, "default_cfg")
    pool, fixed = getattr(model, "global_pool", "token"), cfg.get("fixed_input_size", not name.startswith(PREFIX))
    architecture, arguments = _architecture(name)
    if fixed:
        arguments["img_size"] = cfg["input_size"][-1]
    if name in vit.STRUCTURES:
        arguments["global_pool"] = pool
    content = {
        "architecture": architecture,
        "num_classes": cfg["num_classes"],
        **({"num_features": getattr(model, "num_features")} if hasattr(model, "num_features") else {}),
        **({"global_pool": pool} if isinstance(pool, str) and pool else {}),
        "model_args": arguments,
        "pretrained_cfg": {
            **{key: cfg.get(key) for key in ("num_classes", "input_size", *GEOMETRY, "first_conv", "classifier")},
            "fixed_input_size": fixed,
            **geometry,
        },
    }
    return content | ({"label_names": list(label_names)} if len(label_names) == cfg["num_classes"] else {})


def _architecture(name: str) -> tuple[str, dict[str, Any]]:
    """Return timm's name of a model, and the arguments that make it this one."""
    structure = STRUCTURES.get(name)
    if structure is None or structure.timm_name:
        return structure.timm_name if structure else name.removeprefix(PREFIX).partition(".")[0], {}
    if name in vit.STRUCTURES:
        usual = SIZES if structure.mlp_ratio == 4 else (*SIZES, "mlp_ratio")
        return BASE, {size: getattr(structure, size) for size in usual} | vit.FAMILIES[vit.STRUCTURES[name].family]
    return name, {}  # timm's VOLOs take no other sizes


# -- read --------------------------------------------------------------------------------------------------------


def find(source: str | Path, *, average: bool = False) -> Found:
    """Find weights and their model; average: in a folder, the average of the weights.

    source: a weights file, a folder with model.safetensors, a run folder, whose newest checkpoint is meant,
    local-dir:FOLDER, or, to be downloaded, hf-hub:OWNER/NAME or timm's name of published weights, such as
    vit_base_patch16_224.augreg_in1k. Raises ValueError if there are none, a checkpoint has changed, or the weights
    belong to no model of the zoo.
    """
    path = _local(str(source))
    file = _weights_of(path, AVERAGE if average else WEIGHTS) if path.is_dir() else path
    config = file.with_name(CONFIG)
    for checked in (file, config):
        if checked.is_file() and (reason := why_changed(checked)):
            raise ValueError(f"{checked} {reason}: restore it, or take another checkpoint")
    return _read(file, config, *_description(config)) if config.is_file() else Found(file, *identify(file))


def read(source: str | Path, *, average: bool = False) -> Found:
    """Find weights, and read them; again, if a run has removed the checkpoint meanwhile."""
    for _ in range(TRIES):
        try:
            found = find(source, average=average)
            return replace(found, tensors=read_weights(found.weights))
        except (Gone, FileNotFoundError) as error:
            gone = error
    raise Gone(str(gone))


def label_names(weights: str | Path) -> tuple[str, ...]:
    """Return the names of the classes that config.json beside a weights file has, or ()."""
    config = Path(weights).with_name(CONFIG)
    if not Path(weights).is_file():
        raise Gone(f"there is no weights file {weights}")
    return _label_names(config, *_description(config)) if config.is_file() else ()


def preparation(weights: str | Path, img_size: int) -> dict[str, Any]:
    """Return the values of `GEOMETRY` that config.json beside a weights file has for images of this size, or {}."""
    config = Path(weights).with_name(CONFIG)
    size, _, known = _facts(config, *_description(config)) if config.is_file() else (0, 0, {})
    return {key: known[key] for key in GEOMETRY if key in known and (key != "crop_pct" or size == img_size)}


def head_rows(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """Return, for each of our classes, its row in a head for theirs; [] if these are others, None if they fit.

    Unknown names fit.
    """
    if not theirs or not ours or tuple(theirs) == tuple(ours):
        return None
    rows = {name: row for row, name in enumerate(theirs)}
    return [rows[name] for name in ours] if sorted(theirs) == sorted(ours) and len(rows) == len(ours) else []


def is_reference(source: str | Path) -> bool:
    """Return whether `find` has to look for the weights' file: a folder, or a name from a hub."""
    text = str(source)
    return text.startswith((HUB, LOCAL)) or Path(text).is_dir() or _is_tag(text)


def _description(config: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of a config.json, and the part of it about images and classes."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config} is no JSON: {reason_of(error)}") from error
    cfg = content.get("pretrained_cfg", content) if isinstance(content, dict) else None  # the oldest have one level
    if not isinstance(cfg, dict):
        raise ValueError(f"{config} does not describe a model as timm does: expected an object with pretrained_cfg")
    return content, cfg


def _read(file: Path, config: Path, content: Mapping[str, Any], cfg: Mapping[str, Any]) -> Found:
    size, classes, known = _facts(config, content, cfg)
    arguments = dict(content.get("model_args") or {})
    arguments.pop("img_size", None)
    pool = "avg" if arguments.pop("global_pool", "token") == "avg" else ""
    return Found(file, _zoo_name(content["architecture"], arguments, file=file), size, classes, pool, known)


def _facts(config: Path, content: Mapping[str, Any], cfg: Mapping[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """Return image size, number of classes, and the `cfg` of a `Found`; ValueError for a value that cannot be."""

    def check(name: str, value: Any, fits: bool, expected: str) -> Any:
        if not fits:
            what = printable(repr(value)[:60])
            raise ValueError(f"{config} does not describe a model as timm does: {name} is {what}, expected {expected}")
        return value

    arguments = content.get("model_args") or {}
    check("model_args", arguments, isinstance(arguments, dict), "an object")
    size: Any = arguments.get("img_size", cfg.get("input_size"))
    size = size[-1] if isinstance(size, list) and size else size
    name, classes = content.get("architecture"), content.get("num_classes", cfg.get("num_classes"))
    check("architecture", name, isinstance(name, str), "a name of timm")
    check("img_size", size, _whole(size) and 0 < size <= MOST_PIXELS, f"pixels, 1 to {MOST_PIXELS}")
    check("num_classes", classes, _whole(classes) and classes >= 0, "a whole number")
    known = {key: cfg[key] for key in GEOMETRY if cfg.get(key) is not None}
    for key in ("mean", "std"):
        if key in known:
            three = isinstance(known[key], list) and len(known[key]) == 3 and all(map(_number, known[key]))
            least, most = (-1000, 1000) if key == "mean" else (0.001, 1000)
            fits = three and least <= min(known[key]) and max(known[key]) <= most
            known[key] = tuple(check(key, known[key], fits, f"three numbers from {least} to {most}"))
    crop, filter_ = known.get("crop_pct", 1.0), known.get("interpolation", FILTERS[0])
    check("crop_pct", crop, _number(crop) and 1 <= size / crop <= MOST_PIXELS if crop else False, "a fraction")
    check("interpolation", filter_, filter_ in FILTERS, " or ".join(FILTERS))
    names = _label_names(config, content, cfg)
    check("label_names", [*names], len(names) in (0, classes), f"{classes} names, one for each class")
    return size, classes, known | ({"label_names": names} if names else {})


def _label_names(config: Path, content: Mapping[str, Any], cfg: Mapping[str, Any]) -> tuple[str, ...]:
    names = content.get("label_names") or cfg.get("label_names") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{config} does not describe a model as timm does: label_names is no list of texts")
    return tuple(names)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return (_whole(value) or isinstance(value, float)) and math.isfinite(value)


def published(name: str) -> str:
    """Return timm's name of published weights for a model of the zoo, or ""."""
    structure = STRUCTURES.get(name)
    found = timm.models.get_pretrained_cfg(structure.timm_name if structure else name.removeprefix(PREFIX))
    return f"{found.architecture}.{found.tag}" if found and found.has_weights and found.tag else ""


def zoo_name(timm_name: str) -> tuple[str, int] | None:
    """Return the zoo's name of a model of timm and its image size: vit_base_patch32_384 -> vit_b32, 384."""
    base, _, size = timm_name.rpartition("_")
    for name, structure in STRUCTURES.items():
        if base and size.isdecimal() and structure.timm_name.rpartition("_")[0] == base:
            return name, int(size)
    return None


def _zoo_name(architecture: str, arguments: Mapping[str, Any], *, file: Path) -> str:
    known = zoo_name(architecture)
    if known and not arguments:
        return known[0]
    for name in STRUCTURES:
        if _architecture(name) == (architecture, arguments):
            return name
    if not arguments and architecture in timm.list_models():
        return PREFIX + architecture
    others = f" with {', '.join(f'{key} {value}' for key, value in arguments.items())}"[:200] if arguments else ""
    if not arguments and re.fullmatch(r"\w+", architecture) and not timm.is_model(architecture):
        raise ValueError(
            f"{file} belongs to the model {architecture}, which timm does not have: run the file that registers it "
            "first, as --recipe FILE.py:FUNCTION does"
        )
    raise ValueError(
        f"{file} belongs to timm's {printable(architecture + others)}, which the zoo does not have: "
        f'timm.create_model("{LOCAL}{file.parent}", pretrained=True) builds it'
    )


# -- places ------------------------------------------------------------------------------------------------------


def _local(source: str) -> Path:
    if source.startswith(LOCAL):
        return Path(source.removeprefix(LOCAL))
    if source.startswith(HUB):
        return _download(source.removeprefix(HUB))
    if not Path(source).exists() and _is_tag(source):
        return _download(f"timm/{source}")
    return Path(source)


def _is_tag(source: str) -> bool:
    return "." in source and timm.is_model_pretrained(source)


def _download(repository: str) -> Path:
    """Return the folder of a repository in the hub's cache, with its weights and their description alone."""
    import huggingface_hub  # timm needs it; a slow import

    repo_id, _, revision = repository.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(repo_id, revision=revision or None, allow_patterns=[WEIGHTS, CONFIG])
    except Exception as error:  # its own errors, those of its HTTP client, and OSError
        raise ValueError(
            f"{HUB}{repository} could not be fetched: {reason_of(error)}; without a network, copy {WEIGHTS} and "
            f"{CONFIG} from https://huggingface.co/{repo_id} into a folder and give that"
        ) from error
    return Path(folder)


def _weights_of(folder: Path, name: str) -> Path:
    """Return the weights in a folder; of a run, those of the newest checkpoint that is as it was written."""
    if (folder / name).is_file():
        return folder / name
    for path in saved(folder / "checkpoints"):
        reason = next((f"{part} {why}" for part in (name, CONFIG) if (why := why_changed(path / part))), "")
        if not reason and (path / name).is_file():
            return path / name
        logger.warning("checkpoint %s is refused: %s", path, reason or f"it has no {name}")
    raise ValueError(f"{folder} has no weights: expected {name}, or the checkpoints of a run with it")


def saved(folder: Path) -> list[Path]:
    """Return the checkpoints in this folder of a run, newest first; OSError if it may not be listed."""
    there = folder.iterdir() if folder.is_dir() else ()  # glob finds nothing where it may not look
    found = [path for path in there if re.fullmatch(r"\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def why_changed(file: Path) -> str:
    """Return why a file of a checkpoint is not as it was written, or ""; other files are not checked."""
    manifest = file.with_name(MANIFEST)
    if not manifest.is_file():
        return ""
    try:
        recorded = json.loads(manifest.read_text())["parts"].get(file.name)
        if recorded is None:
            return ""
        found = digest(file) if file.is_file() else ""  # to read a FIFO would wait
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"cannot be checked ({error})"
    return "" if found == recorded["sha256"] else "has changed since it was written"


def digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
