"""A classifier's logits for each place of an image, to make token labels with.

A head that acts on the mean over all places can be applied to the features of each place, as if they were the mean. If
the head is linear, the mean of these logits is that of the whole image. VOLO has a separate head for places.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn

from zoo import MODELS, create_model, hub
from zoo.model import ZooModel
from zoo.volo import VOLO
from zoo.weights import listed, load_weights, read_weights


def build_teacher(
    name: str,
    *,
    num_classes: int = 1000,
    weights: str | Path | None = None,
    img_size: int | None = None,
    label_names: Sequence[str] = (),
) -> nn.Module:
    """Build a model of the zoo or of timm, or that of a run or an exported folder, in evaluation mode.

    weights: a file; without it timm downloads them, and a folder has its own. img_size: for models of the zoo only.
    label_names: of the classes to label; a folder that names its own must have these. ValueError for an unknown name,
    for weights that do not fit, or if its logits are not those of a mean over places.
    """
    if name not in MODELS and Path(name).is_dir():
        if weights is not None:
            raise ValueError(f"{name} is a folder with weights of its own: leave other weights out.")
        model = _of_folder(name, img_size, label_names)
    elif name in MODELS:
        if weights is None:
            raise ValueError(f"{name} has no weights to label with: give a file of them.")
        pool = "avg" if "fc_norm.weight" in read_weights(weights) else ""  # what timm calls the norm behind a mean
        model = create_model(name, num_classes=num_classes, img_size=img_size or 224, global_pool=pool)
        load_weights(model, weights, new_heads=False)  # a new head would label with noise
    elif timm.is_model(name.partition(".")[0]):
        if img_size:
            raise ValueError(f"img_size is {img_size}, but {name} is timm's and has a size of its own: leave it out.")
        model = timm.create_model(name, pretrained=weights is None, num_classes=num_classes)
        if weights is not None:
            _load(model, weights)
    else:
        close = difflib.get_close_matches(name, [*MODELS, *timm.list_models()], n=1)
        hint = f": did you mean {close[0]}?" if close else "."
        raise ValueError(f"There is no model {name!r} in the zoo or in timm{hint}")
    model.eval()
    _check(model, name)
    return model


def _of_folder(name: str, img_size: int | None, label_names: Sequence[str]) -> nn.Module:
    found = hub.read(name)
    theirs = found.cfg.get("label_names", ())
    if hub.head_rows(theirs, label_names) == []:
        raise ValueError(
            f"{name} knows the classes {listed(theirs)}, and the images have {listed(label_names)}: take a teacher "
            "that has learned these."
        )
    return create_model(weights=found, img_size=img_size, label_names=label_names if theirs else ())


def _load(model: nn.Module, weights: str | Path) -> None:
    try:
        timm.models.load_checkpoint(model, str(weights))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{weights} does not fit the model: {error}") from error


def input_size(model: nn.Module) -> int:
    cfg = cast(ZooModel, model).default_cfg
    fixed = cfg.get("fixed_input_size") or not cfg.get("test_input_size")
    return cfg["input_size" if fixed else "test_input_size"][-1]


def dense_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Images (B, 3, H, W) -> logits (B, K, h, w) at the places of the last features."""
    if isinstance(model, VOLO):
        _, logits = model.forward_train(images)
        return logits.transpose(1, 2).unflatten(2, model.pos_embed.shape[1:3])
    body_and_head = cast(ZooModel, model)
    cells, (height, width) = _cells(model, body_and_head.forward_features(images))
    return body_and_head.forward_head(cells).view(len(images), height, width, -1).permute(0, 3, 1, 2)


def _cells(model: Any, features: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Make of each place the features of an image, in the model's layout; return them and (height, width) in places."""
    if features.ndim == 3:  # tokens (B, prefix + N, C); the pool strips the prefix
        prefix = getattr(model, "num_prefix_tokens", 0)
        first, tokens = features[:, :prefix], features[:, prefix:]
        cells = torch.cat([first.repeat_interleave(tokens.shape[1], dim=0), tokens.flatten(0, 1)[:, None]], dim=1)
        return cells, model.patch_embed.grid_size
    if _channels_last(model, features):
        return features.flatten(0, 2)[:, None, None], (features.shape[1], features.shape[2])
    cells = features.permute(0, 2, 3, 1).flatten(0, 2)
    return cells[:, :, None, None], (features.shape[2], features.shape[3])


def _channels_last(model: ZooModel, features: Tensor) -> bool:
    return features.shape[1] != model.num_features


@torch.inference_mode()
def _check(model: nn.Module, name: str) -> None:
    """Raise ValueError unless the head depends on the last features only through their mean over all places."""
    if isinstance(model, VOLO):
        return
    side, body_and_head = input_size(model), cast(ZooModel, model)
    features = body_and_head.forward_features(torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0)))
    if features.ndim == 3:
        by_mean = getattr(model, "global_pool", None) == "avg"
    else:
        dims = (1, 2) if _channels_last(body_and_head, features) else (2, 3)
        whole = body_and_head.forward_head(features)
        of_mean = body_and_head.forward_head(features.mean(dim=dims, keepdim=True))
        by_mean = torch.allclose(whole, of_mean, rtol=1e-3, atol=1e-3 * float(whole.abs().max()))
    if not by_mean:
        raise ValueError(
            f"{name} cannot label places: its head does not act on a mean over them (but on a class token, or another "
            "pool), so take a ConvNet, a ViT with global_pool avg, or a VOLO."
        )
