"""A folder in the form of the Hugging Face hub: model.safetensors, config.json, and README.md, the model card."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from torch import nn

import largebatch
from largebatch import config as configs
from largebatch.config import TrainConfig
from largebatch.files import atomic_file
from largebatch.files.names import printable
from largebatch.files.run_folder import RunFolder, read_rows
from zoo import hub, save_weights

CARD = "README.md"
LISTED = 20  # classes that the card names

TEXT = """---
library_name: timm
pipeline_tag: image-classification
license: {licence}
tags:
- image-classification
- timm
- largebatch
---
# {title}

{summary}

| | |
|---|---|
{rows}

## Classify an image

```python
import timm, torch
from PIL import Image

model = timm.create_model("local-dir:{folder}", pretrained=True).eval()  # after an upload: "hf-hub:OWNER/NAME"
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
with torch.inference_mode():
    probabilities = model(transform(Image.open("image.jpg").convert("RGB"))[None]).softmax(dim=1)[0]
names = model.pretrained_cfg.get("label_names")
for probability, k in zip(*probabilities.topk(min(5, len(probabilities)))):
    print(f"{{probability:.1%}}  {{names[k] if names else int(k)}}")
```

With largebatch: `python -m largebatch.predict {folder} image.jpg`, or `zoo.create_model(weights="{folder}")`.
"""


def write_folder(model: nn.Module, found: hub.Found, folder: Path, *, licence: str) -> str:
    """Write the folder, with the weights last; return a sentence about it."""
    folder.mkdir(parents=True, exist_ok=True)
    description = hub.describe(found.name, model, label_names=found.cfg.get("label_names", ()))
    texts = {hub.CONFIG: json.dumps(description, indent=2) + "\n", CARD: card(model, found, folder, licence=licence)}
    for name, text in texts.items():
        with atomic_file(folder / name) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    save_weights(model, folder / hub.WEIGHTS)
    return (
        f'{folder}: {hub.WEIGHTS}, {hub.CONFIG} and {CARD}; timm.create_model("local-dir:{folder}", pretrained=True) '
        f"builds the model, and `hf upload OWNER/NAME {quote(str(folder))}` publishes it"
    )


def card(model: nn.Module, found: hub.Found, folder: Path, *, licence: str) -> str:
    run = RunFolder.of(found.weights)
    of_run = run.path != found.weights
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = [*(_of_run(run, found) if of_run else []), *_of_model(found), ("licence of the weights", licence)]
    return TEXT.format(
        licence=licence,
        title=run.path.resolve().name if of_run else found.name,
        summary=f"{found.name} for images of {found.img_size} px and {found.num_classes} classes, {parameters:,} "
        f"parameters; written by largebatch {largebatch.__version__}.",
        rows="\n".join(f"| {name} | {_cell(value)} |" for name, value in rows),
        folder=folder.resolve().name,  # a card is for others, who do not have the path
    )


def _cell(value: str) -> str:
    """Escape a text, which others may have written, for a table of Markdown."""
    return re.sub(r"([\\`\[\]|<>&])", r"\\\1", printable(value))


def _of_run(run: RunFolder, found: hub.Found) -> Iterator[tuple[str, str]]:
    step, average = int(found.weights.resolve().parent.name), found.weights.name == hub.AVERAGE
    rows = [row for row in read_rows(run.epochs) if row["step"] <= step and {"top1", "top5", "ema_top1"} <= row.keys()]
    if rows:
        top1, top5 = rows[-1]["ema_top1" if average else "top1"], "" if average else f", top-5 {rows[-1]['top5']:.2f} %"
        yield "accuracy", f"top-1 {top1:.2f} %{top5} of the held-out images, at step {rows[-1]['step']:.0f}"
    yield "checkpoint", f"step {step}{', average of the weights' if average else ''}"
    with suppress(OSError, ValueError):  # none, or one of another version: the card says less
        yield from _of_config(configs.load(str(run.config)))


def _of_config(config: TrainConfig) -> Iterator[tuple[str, str]]:
    o, schedule = config.optim, config.schedule
    yield "data", Path(config.data.path).name
    yield "recipe", config.recipe or "custom"
    ramp = f", {schedule.batch_ramp}" if schedule.batch_ramp else ""
    yield "global batch", f"{config.data.global_batch_size:,} images{ramp}"
    yield "training", f"{config.run.duration}, seed {config.run.seed}, {config.run.precision}"
    yield "optimizer", f"{o.name}, peak learning rate {o.lr:g}, weight decay {o.weight_decay:g}"
    yield "learning rate", f"{schedule.name}, warm-up {schedule.warmup}"
    if config.model.weights:
        yield "started from", Path(config.model.weights).name


def _of_model(found: hub.Found) -> Iterator[tuple[str, str]]:
    cfg: dict[str, Any] = dict(found.cfg)
    if names := cfg.get("label_names", ()):
        more = f" and {len(names) - LISTED} more in {hub.CONFIG}" if len(names) > LISTED else ""
        yield "classes", ", ".join(names[:LISTED]) + more
    if all(key in cfg for key in hub.GEOMETRY):
        mean, std = ("(" + ", ".join(f"{value:g}" for value in cfg[key]) + ")" for key in ("mean", "std"))
        yield "images", f"centre crop {cfg['crop_pct']:g}, {cfg['interpolation']}, mean {mean}, std {std}"
