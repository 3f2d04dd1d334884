"""Adds label maps to TFRecords: converted from the published files, or made by any classifier.

    python -m largebatch.pack token-labels shards/ labelled/ --labels token_labels/   # <wnid>/<image>.pt, as published
    python -m largebatch.pack token-labels shards/ labelled/ --teacher dm_nfnet_f6    # timm's name, or the zoo's
    mpirun -np 8 python -m largebatch.pack token-labels ...                           # shards are shared out

Whole new shards are written, under the names of the old ones and with the same records in the same order, apart from
those in quarantine; held-out shards are copied. What was interrupted goes on when the same command is given again:
token_labels.json in the folder says what it was, and whole shards are kept.

A teacher sees the centre square of each image at its own size (crop 1.0), and the five highest logits of each place
are kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from largebatch.comm.launcher import MPI_LAUNCHERS, SRUN
from largebatch.data import records, sources
from largebatch.data.dali import EvalLoader
from largebatch.data.index import Index
from largebatch.data.label_maps import encode_map
from zoo.teacher import build_teacher, dense_logits, input_size

logger = logging.getLogger(__name__)

TOP = 5  # scores of a place that are kept
PLAN = "token_labels.json"
EXACT_HALVES = 2048  # the published files hold classes in half precision, which is exact up to here
LOCAL_RANKS = tuple(launcher.local_rank for launcher in (*MPI_LAUNCHERS, SRUN))

Maps = Callable[[Index], Iterator[tuple[np.ndarray, np.ndarray]]]  # of images: scores and classes (k, h, w) of each


def main(argv: Sequence[str], *, rank: int, size: int, barrier: Callable[[], None]) -> int:
    """Runs the command line as process `rank` of `size`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m largebatch.pack token-labels", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("source", help="folder of TFRecords")
    parser.add_argument("out", help="folder for the same records with label maps")
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--labels", default="", help="folder of published label files, <class>/<image>.pt")
    one.add_argument("--teacher", default="", help="model that makes them: a name in timm or in the zoo")
    parser.add_argument("--weights", default="", help="file of the teacher's weights (default: timm's download)")
    parser.add_argument("--num-classes", type=int, default=1000, help="of the teacher (default 1000)")
    parser.add_argument("--img-size", type=int, default=0, help="of a teacher of the zoo (default 224)")
    parser.add_argument("--batch-size", type=int, default=32, help="images at once (default 32)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="of the teacher")
    parser.add_argument("--threads", type=int, default=4, help="decoding threads (default 4)")
    args = parser.parse_args(argv)
    if args.labels and args.weights:
        raise ValueError("--weights are those of a --teacher, and --labels needs none: leave one of them out.")
    maps = converted(args.labels) if args.labels else _taught(args)
    made_by = {"labels": args.labels} if args.labels else {"teacher": args.teacher, "weights": args.weights}
    count = add_maps(args.source, args.out, maps, made_by=made_by, rank=rank, size=size, barrier=barrier)
    if rank == 0:
        print(f"train: {count} images with label maps")
    return 0


def _taught(args: argparse.Namespace) -> Maps:
    model = build_teacher(
        args.teacher, num_classes=args.num_classes, weights=args.weights or None, img_size=args.img_size or None
    )
    return generated(model.to(_device(args.device)), batch_size=args.batch_size, num_threads=args.threads)


def _device(kind: str) -> torch.device:
    """The processes of a host share its GPUs."""
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank = next((int(os.environ[name]) for name in LOCAL_RANKS if name in os.environ), 0)
    return torch.device("cuda", local_rank % torch.cuda.device_count())


# -- shards ------------------------------------------------------------------------------------------------------


def add_maps(
    source: str,
    out: str,
    maps: Maps,
    *,
    made_by: Mapping[str, str],
    rank: int = 0,
    size: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> int:
    """Writes the training shards of the folder `source` with `maps` into `out`; the number of images.

    Process `rank` of `size` writes every `size`-th shard that is not there yet. ValueError if `source` has no shards,
    or `out` others, made by something else.
    """
    folder, target = Path(source).expanduser(), Path(out).expanduser()
    if not sources.find_shards(folder, "train"):
        raise ValueError(f"{source} has no TFRecords train-*: pack the images with `largebatch.pack` first.")
    index = sources.open_source(source, split="train")
    plan = {**made_by, "images": len(index), "digest": index.digest()}
    if rank == 0:
        _begin(target, plan)
    barrier()
    if rank > 0:
        _begin(target, plan)  # finds rank 0's, or says that this rank sees other images
    for number in range(rank, len(index.files), size):
        path = target / os.path.basename(index.files[number])
        if not path.exists():
            shard = index.without(np.flatnonzero(index.file != number).tolist())
            written = records.write_records(path, _labelled(shard, number, maps))
            logger.info("%s: %d images", path.name, written)
    barrier()
    if rank == 0:
        _finish(folder, target)
    return len(index)


def _begin(target: Path, plan: Mapping) -> None:
    """Writes down what is made. ValueError if the folder has shards of something else."""
    file = target / PLAN
    begun = json.loads(file.read_text()) if file.is_file() else {}
    if begun == plan:
        return
    if sources.find_shards(target, "train"):
        names = sorted(name for name in {*plan, *begun} if begun.get(name) != plan.get(name))
        was = "; ".join(f"{name} {begun.get(name)}, now {plan.get(name)}" for name in names) if begun else f"no {PLAN}"
        raise ValueError(f"{target} already has other training shards ({was}): choose another folder, or delete them.")
    target.mkdir(parents=True, exist_ok=True)
    with records.atomic_file(file) as opened:
        opened.write(json.dumps(plan, indent=2).encode() + b"\n")


def _labelled(shard: Index, number: int, maps: Maps) -> Iterator[bytes]:
    """The records of file `number`, which `shard` describes, with their maps."""
    if not len(shard):
        return
    for sample, (features, (scores, ids)) in enumerate(zip(_features(shard), maps(shard), strict=True)):
        try:
            yield records.encode_example(features | dict(encode_map(scores, ids)))
        except ValueError as error:
            raise ValueError(f"{shard.where(sample)}: {error}.") from error


def _features(shard: Index) -> Iterator[dict]:
    """The features of each record that holds an image of `shard`, an index of one file."""
    path = shard.files[shard.file[0]]
    kept = iter([*shard.offset.tolist(), -1])
    image = next(kept)
    for start, payload, intact in records.scan_records(path):
        if start <= image < start + len(payload):
            if not intact:
                raise ValueError(f"{path}: the record at byte {start - 12} {records.WRONG_CRC}.")
            yield {name: values for name, values in records.decode_example(payload).items() if values}
            image = next(kept)


def _finish(folder: Path, target: Path) -> None:
    """Copies the held-out shards, and builds the indexes."""
    held_out = sources.find_shards(folder, "validation")
    for path in held_out:
        copy = target / os.path.basename(path)
        if not copy.exists():
            with open(path, "rb") as file, records.atomic_file(copy) as out:
                shutil.copyfileobj(file, out)
    for split in ("train", "validation") if held_out else ("train",):
        for left in target.glob(f".{split}-*"):  # by one that was killed
            left.unlink()
        sources.open_source(str(target), split=split)


# -- maps --------------------------------------------------------------------------------------------------------


def converted(root: str) -> Maps:
    """Maps out of the published tree: <root>/<class>/<image>.pt, a tensor of half floats (2, k, h, w).

    [0] are logits, [1] classes. Classes are numbered by their sorted folders; the image's name is that in its record,
    up to the first dot.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ValueError(f"There is no folder {root}: expected one of label files, <class>/<image>.pt.")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))

    def maps(shard: Index) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if len(names) != shard.num_classes:
            raise ValueError(f"{root} has {len(names)} class folders, expected those of {shard.num_classes} classes.")
        for sample, features in enumerate(_features(shard)):
            if records.FILENAME not in features:
                raise ValueError(
                    f"{shard.where(sample)} has no {records.FILENAME}, by which its labels are found: pack the images "
                    "again with `largebatch.pack`."
                )
            file = os.path.basename(features[records.FILENAME][0].decode("utf-8", "surrogateescape"))
            yield load_published(folder / names[shard.label[sample]] / f"{file.partition('.')[0]}.pt")

    return maps


def load_published(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Scores and classes (k, h, w) of a published label file; ValueError if it is missing or something else."""
    try:
        tensor = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise nearly anything
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4 or len(tensor) != 2:
        raise ValueError(f"{path} is no label file: expected a tensor of shape (2, k, h, w).")
    scores, ids = tensor.numpy()
    if not (ids == np.rint(ids)).all() or ids.max() > EXACT_HALVES:
        raise ValueError(f"{path} has classes that half precision cannot tell apart: expected 0 to {EXACT_HALVES}.")
    return scores, ids.astype(np.int64)


def generated(model: torch.nn.Module, *, batch_size: int, num_threads: int) -> Maps:
    """Maps by a teacher of `zoo.teacher`, on its device and at its own size."""
    cfg = getattr(model, "default_cfg")
    device = next(model.parameters()).device

    @torch.inference_mode()
    def maps(shard: Index) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        batches = EvalLoader(
            shard,
            shard=0,
            num_shards=1,
            batch_size=batch_size,
            img_size=input_size(model),
            crop_pct=1.0,
            interpolation=cfg["interpolation"],
            mean=cfg["mean"],
            std=cfg["std"],
            device=device,
            num_threads=num_threads,
        )
        for batch in batches:
            logits = dense_logits(model, batch.images).float()
            scores, ids = logits.topk(min(TOP, logits.shape[1]), dim=1)
            yield from zip(scores.half().cpu().numpy(), ids.cpu().numpy())

    return maps
