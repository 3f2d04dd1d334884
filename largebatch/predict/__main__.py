"""Names the classes of images.

    python -m largebatch.predict RUN_OR_WEIGHTS IMAGE_OR_FOLDER [...]
    python -m largebatch.predict RUN_OR_WEIGHTS FOLDER --json        # one line for each image

RUN_OR_WEIGHTS is a run folder, whose newest checkpoint is taken, a checkpoint, an exported folder, or a file of
weights. Of a folder, all images in it and in its folders are taken. Images are resized, cut and normalised as
largebatch.validate does it, and the model computes in fp32.
Images that cannot be read are named on stderr after the others, and the exit code is then 2.
"""

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.arguments import Parser, complain
from largebatch.files.names import printable
from largebatch.recipes import user_file
from zoo import create_model, hub

BATCH = 32  # images that the model sees at once


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    args = _parser().parse_args(argv)
    try:
        if args.top < 1:
            raise ValueError(f"--top is {args.top}: expected 1 or more.")
        if args.recipe:
            user_file.run(args.recipe)
        model = open_model(args.weights, average=args.ema)
    except (ValueError, OSError) as mistake:
        return complain(mistake)
    faults: dict[str, str] = {}
    for given in args.images:
        try:
            faults |= {path: why_unreadable(path) for path in images_in(given)}
        except ValueError as error:  # of a folder in it
            faults[given] = str(error).rstrip(".")
    good = [path for path, fault in faults.items() if not fault]
    show = _as_json if args.json else _as_block
    for path, shares in zip(good, probabilities(model, good), strict=True):
        print(show(path, most_likely(shares, class_names(model), args.top)), flush=True)
    for path, fault in faults.items():
        if fault:
            complain(f"{path} is left out: {fault}")
    return 2 if any(faults.values()) else 0


def _parser() -> Parser:
    parser = Parser("predict", __doc__)
    parser.add_argument("weights", metavar="RUN_OR_WEIGHTS", help="a run, a checkpoint, an exported folder, or a file")
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="an image file, or a folder of them")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="number of classes to print (default: 5)")
    parser.add_argument("--recipe", default="", metavar="FILE.py", help="the file that registers a model of your own")
    parser.add_argument("--ema", action="store_true", help="take the average of the weights, if the run kept one")
    parser.add_argument("--json", action="store_true", help="print one JSON object per image, on a line of its own")
    return parser


# -- compute -----------------------------------------------------------------------------------------------------


def open_model(source: str, *, average: bool = False) -> nn.Module:
    """Build the model of a run or of weights, for evaluation; ValueError if it is unknown or has no head."""
    model = create_model(weights=hub.read(source, average=average))
    if not getattr(model, "num_classes"):
        raise ValueError(f"{source} has no head, so it knows no classes: give weights of a classifier.")
    return model.eval()


def class_names(model: nn.Module) -> Sequence[str]:
    known = getattr(model, "default_cfg").get("label_names")
    return known or [f"class {number}" for number in range(getattr(model, "num_classes"))]


@torch.inference_mode()
def probabilities(model: nn.Module, paths: Sequence[str]) -> Iterator[Tensor]:
    """Yield the probability of each class, float64 (K,), for each image, which must be readable."""
    from largebatch.data.dali import EvalLoader
    from largebatch.data.scan import index_images

    if not paths:
        return
    cfg: dict[str, Any] = getattr(model, "default_cfg")
    batches = EvalLoader(
        index_images(paths, [0] * len(paths), class_names=["unknown"]),
        shard=0,
        num_shards=1,
        batch_size=BATCH,
        img_size=cfg["input_size"][-1],
        device=torch.device("cpu"),
        num_threads=len(os.sched_getaffinity(0)),
        **{key: cfg[key] for key in hub.GEOMETRY},
    )
    with closing(batches):
        for batch in batches:
            yield from model(batch.images).double().softmax(dim=1)


def images_in(path: str) -> list[str]:
    """Return the images in a folder and in its folders, as training finds them; if there are none, the path itself."""
    from largebatch.data.sources import entries_below, is_image

    found = entries_below(path) if os.path.isdir(path) and may_list(path) else ()
    return sorted(entry.path for entry in found if is_image(entry.name)) or [path]


def may_list(folder: str) -> bool:
    return os.access(folder, os.R_OK | os.X_OK)


def why_unreadable(path: str) -> str:
    from largebatch.data.quarantine import image_fault

    if "://" in path:
        return "it is an address, and images are read from this host: copy the image"
    if os.path.isdir(path):
        return "it is a folder without images" if may_list(path) else "it is a folder that may not be listed"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "it is a FIFO, a socket or a device"
    except OSError as error:
        return "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return image_fault(Path(path).read_bytes)


def most_likely(shares: Tensor, names: Sequence[str], top: int) -> list[tuple[str, float]]:
    """Return names and probabilities of the most likely classes, of equal ones the lower number first."""
    ordered = shares.sort(descending=True, stable=True)
    return [(names[k], share) for k, share in zip(ordered.indices[:top].tolist(), ordered.values[:top].tolist())]


# -- print -------------------------------------------------------------------------------------------------------


def _as_block(path: str, classes: Sequence[tuple[str, float]]) -> str:
    return "\n".join([printable(path), *(f"{100 * share:8.2f} %  {printable(name)}" for name, share in classes)])


def _as_json(path: str, classes: Sequence[tuple[str, float]]) -> str:
    return json.dumps({"image": path, "classes": [{"name": name, "probability": share} for name, share in classes]})


if __name__ == "__main__":
    raise SystemExit(main())
