"""Weights that tell which model they belong to: config.json beside them, in the form of timm and of its models' hub.

    FOLDER/
        model.safetensors     the weights
        config.json           timm's name of the model, image size, crop, mean, classes and their names

    timm.create_model("local-dir:FOLDER", pretrained=True)    the same logits, without this package
    zoo.create_model(weights="FOLDER")                        FOLDER: such a folder, or that of a run

Without config.json, as in older checkpoints and published files, the shapes of the tensors tell the model, its image
size and its classes; crop, mean and standard deviation are then those that the zoo gives the model.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
from torch import nn

from zoo import vit, volo
from zoo.timm_models import PREFIX
from zoo.weights import identify

logger = logging.getLogger(__name__)

WEIGHTS, AVERAGE = "model.safetensors", "model_ema.safetensors"
CONFIG, MANIFEST = "config.json", "manifest.json"
GEOMETRY = ("crop_pct", "interpolation", "mean", "std")
HUB, LOCAL = "hf-hub:", "local-dir:"  # as timm's create_model takes them
BASE = "vit_base_patch32_224"  # a ViT that timm has no name for is this one with other sizes
SIZES = ("patch_size", "embed_dim", "depth", "num_heads")


@dataclass(frozen=True)
class Found:
    """Weights, and the model that they belong to."""

    weights: Path
    name: str
    """the model's name in the zoo"""
    img_size: int
    num_classes: int
    global_pool: str
    """avg, or empty: the class token"""
    cfg: Mapping[str, Any] = field(default_factory=dict)
    """the known values of `GEOMETRY`, and label_names if the classes have names"""


# -- write -------------------------------------------------------------------------------------------------------


def describe(name: str, model: nn.Module, *, label_names: Sequence[str] = (), **geometry: Any) -> dict[str, Any]:
    """Return the content of config.json for a model of the zoo, or, with the name timm/NAME, for one of timm.

    geometry: values of `GEOMETRY` that replace the model's own. If there are not as many names as classes, none is
    written.
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
        "num_features": getattr(model, "num_features"),
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
    structure = (vit.STRUCTURES | volo.STRUCTURES).get(name)
    if structure is None or structure.timm_name:
        return structure.timm_name if structure else name.removeprefix(PREFIX).partition(".")[0], {}
    if name in vit.STRUCTURES:
        return BASE, {size: getattr(structure, size) for size in SIZES}
    return name, {}  # timm's VOLOs take no other sizes


# -- read --------------------------------------------------------------------------------------------------------


def find(source: str | Path, *, average: bool = False) -> Found:
    """Find weights and their model; average: in a folder, the average of the weights.

    source: a weights file, a folder with model.safetensors, a run folder, whose newest checkpoint is meant,
    local-dir:FOLDER, or, to be downloaded, hf-hub:OWNER/NAME or timm's name of published weights, such as
    vit_base_patch16_224.augreg_in1k. Raises ValueError if there are none, if a checkpoint has changed since it was
    written, or if the weights belong to no model of the zoo.
    """
    path = _local(str(source))
    file = _weights_of(path, AVERAGE if average else WEIGHTS) if path.is_dir() else path
    config = file.with_name(CONFIG)
    for checked in (file, config):
        if checked.is_file() and (reason := why_changed(checked)):
            raise ValueError(f"{checked} {reason}: restore it, or take another checkpoint")
    if not config.is_file():
        return Found(file, *identify(file))
    try:
        return _read(file, json.loads(config.read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{config} does not describe a model as timm does: {error!r}") from error


def is_reference(source: str | Path) -> bool:
    """Return whether `find` has to look for the weights' file: a folder, or a name from a hub."""
    text = str(source)
    return text.startswith((HUB, LOCAL)) or Path(text).is_dir() or _is_tag(text)


def _read(file: Path, content: Mapping[str, Any]) -> Found:
    cfg = content.get("pretrained_cfg", content)  # the oldest files have one level
    arguments = dict(content.get("model_args") or {})
    size = arguments.pop("img_size", cfg["input_size"][-1])
    pool = arguments.pop("global_pool", "token")
    labels = content.get("label_names") or cfg.get("label_names")
    known = {key: cfg[key] for key in GEOMETRY if cfg.get(key) is not None}
    known |= {key: tuple(known[key]) for key in ("mean", "std") if key in known}
    return Found(
        file,
        _zoo_name(content["architecture"], arguments, file=file),
        size if isinstance(size, int) else size[-1],
        content.get("num_classes", cfg.get("num_classes")),
        "avg" if pool == "avg" else "",
        known | ({"label_names": tuple(labels)} if isinstance(labels, list) else {}),
    )


def zoo_name(timm_name: str) -> tuple[str, int] | None:
    """Return the zoo's name of a model of timm and its image size: vit_base_patch32_384 -> vit_b32, 384."""
    base, _, size = timm_name.rpartition("_")
    for name, structure in (vit.STRUCTURES | volo.STRUCTURES).items():
        if base and size.isdecimal() and structure.timm_name.rpartition("_")[0] == base:
            return name, int(size)
    return None


def _zoo_name(architecture: str, arguments: Mapping[str, Any], *, file: Path) -> str:
    known = zoo_name(architecture)
    if known and not arguments:
        return known[0]
    for name in vit.STRUCTURES | volo.STRUCTURES:
        if _architecture(name) == (architecture, arguments):
            return name
    if not arguments and architecture in timm.list_models():
        return PREFIX + architecture
    others = f" with {', '.join(f'{key} {value}' for key, value in arguments.items())}" if arguments else ""
    raise ValueError(
        f"{file} belongs to timm's {architecture}{others}, which the zoo does not have: "
        f'timm.create_model("{LOCAL}{file.parent}", pretrained=True) builds it'
    )


# -- places ------------------------------------------------------------------------------------------------------


def _local(source: str) -> Path:
    """Return the file or folder of a source; download it if it is on a hub."""
    if source.startswith(LOCAL):
        return Path(source.removeprefix(LOCAL))
    if source.startswith(HUB):
        return _download(source.removeprefix(HUB))
    if not Path(source).exists() and _is_tag(source):
        return _download(f"timm/{source}")
    return Path(source)


def _is_tag(source: str) -> bool:
    """Return whether this is timm's name of published weights."""
    return "." in source and timm.is_model_pretrained(source)


def _download(repository: str) -> Path:
    """Return the folder of a repository in the hub's cache; only its weights and their description are downloaded."""
    import huggingface_hub  # timm needs it; a slow import

    repo_id, _, revision = repository.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id, revision=revision or None, allow_patterns=[WEIGHTS, CONFIG]
        )
    except Exception as error:  # its own errors, those of its HTTP client, and OSError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{HUB}{repository} could not be fetched: {reason.rstrip('.')}; without a network, copy {WEIGHTS} and "
            f"{CONFIG} from https://huggingface.co/{repo_id} into a folder and give that"
        ) from error
    return Path(folder)


def _weights_of(folder: Path, name: str) -> Path:
    """Return the weights in a folder; of a run, those of the newest checkpoint that is as it was written."""
    if (folder / name).is_file():
        return folder / name
    saved = [path for path in folder.glob("checkpoints/*") if re.fullmatch(r"\d{8,}", path.name)]
    for path in sorted(saved, key=lambda path: int(path.name), reverse=True):
        reason = next((f"{part} {why}" for part in (name, CONFIG) if (why := why_changed(path / part))), "")
        if not reason and (path / name).is_file():
            return path / name
        logger.warning("checkpoint %s is refused: %s", path, reason or f"it has no {name}")
    raise ValueError(f"{folder} has no weights: expected {name}, or the checkpoints of a run with it")


def why_changed(file: Path) -> str:
    """Return the reason why a file of a checkpoint is not as it was written, or ""; other files are not checked."""
    manifest = file.with_name(MANIFEST)
    if not manifest.is_file():
        return ""
    try:
        recorded = json.loads(manifest.read_text())["parts"].get(file.name)
        if recorded is None:
            return ""
        found = digest(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"cannot be checked ({error})"
    return "" if found == recorded["sha256"] else "has changed since it was written"


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
