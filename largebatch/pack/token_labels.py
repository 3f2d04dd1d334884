"""Adds label maps to TFRecords: those of the published files, or new ones that a classifier (the teacher) makes.

    python -m largebatch.pack token-labels shards/ labelled/ --labels token_labels/   # <wnid>/<image>.pt, as published
    python -m largebatch.pack token-labels shards/ labelled/ --teacher dm_nfnet_f6    # timm's name, or the zoo's
    mpirun -np 8 python -m largebatch.pack token-labels ...                           # processes share the shards

New shards have the names of the old ones and the same records in the same order, without those in quarantine. Held-out
shards are copied. The same command goes on with an interrupted one: token_labels.json tells how the shards are made. A
teacher sees the centre square of each image (crop 1.0), scaled to its own image size; the five highest logits of each
place are kept.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from largebatch.arguments import Parser, local
from largebatch.data import records, remote, sources
from largebatch.data.dali import EvalLoader
from largebatch.data.index import Index
from largebatch.data.label_maps import encode_map
from largebatch.files import atomic_file
from largebatch.launch.driver import accept_cpu
from largebatch.launch.launcher import MPI_LAUNCHERS, SRUN
from largebatch.pack import output
from largebatch.pack.processes import World, mpi_world
from zoo.teacher import build_teacher, dense_logits, input_size

logger = logging.getLogger(__name__)

TOP = 5  # the number of scores that are kept for each place
PLAN = "token_labels.json"
EXACT_HALVES = 2048  # half precision, in which the published files hold classes, has all integers up to this one
LOCAL_RANKS = tuple(launcher.local_rank for launcher in (*MPI_LAUNCHERS, SRUN))

# For an index of images, yields the scores and classes of each image, both of shape (k, h, w).
Maps = Callable[[Index], Iterator[tuple[np.ndarray, np.ndarray]]]


def main(argv: Sequence[str]) -> int:
    parser = Parser("pack token-labels", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("source", help="folder of TFRecords")
    parser.add_argument("out", type=local, help="folder for the same records with label maps")
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--labels", default="", help="folder of published label files, <class>/<image>.pt")
    one.add_argument("--teacher", default="", help="model that makes the label maps: timm's name, the zoo's, or a run")
    parser.add_argument("--weights", default="", help="file of the teacher's weights (default: timm's download)")
    parser.add_argument("--num-classes", type=int, default=1000, help="classes of the teacher (default: 1000)")
    parser.add_argument("--img-size", type=int, default=0, help="image size of a teacher of the zoo (default: 224)")
    parser.add_argument("--batch-size", type=int, default=32, help="images that the teacher sees at once (default: 32)")
    parser.add_argument(
        "--device",
        default="auto",
        choices=["auto", "cpu", "cuda"],
        help="device of the teacher (default: a GPU if there is one)",
    )
    parser.add_argument("--threads", type=int, default=4, help="decoding threads (default: 4)")
    args = parser.parse_args(argv)
    if args.labels and args.weights:
        raise ValueError("--weights belongs to --teacher; --labels needs no weights: leave one of the two out.")
    with mpi_world() as world:
        maps = converted(args.labels) if args.labels else _taught(args)
        taught = ("teacher", "weights", "img_size", "num_classes")
        made_by = {name: getattr(args, name) for name in (("labels",) if args.labels else taught)}
        count = add_maps(args.source, args.out, maps, made_by=made_by, world=world)
        if world.rank == 0:
            print(f"train: {count} images with label maps")
    return 0


def _taught(args: argparse.Namespace) -> Maps:
    of_folder = Path(args.teacher).is_dir()
    names = sources.class_names(sources.open_source(args.source, split="train")) if of_folder else ()
    model = build_teacher(
        args.teacher,
        num_classes=args.num_classes,
        weights=args.weights or None,
        img_size=args.img_size or None,
        label_names=names,
    )
    return generated(model.to(_device(args.device)), batch_size=args.batch_size, num_threads=args.threads)


def _device(kind: str) -> torch.device:
    """Return the teacher's device; the processes of a host share its GPUs."""
    if kind != "cpu" and not torch.cuda.is_available():
        accept_cpu(kind, torch=torch.__version__, cuda=torch.version.cuda, option="--device")
        kind = "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    local_rank = next((int(os.environ[name]) for name in LOCAL_RANKS if name in os.environ), 0)
    return torch.device("cuda", local_rank % torch.cuda.device_count())


# -- shards ------------------------------------------------------------------------------------------------------


def add_maps(source: str, out: str, maps: Maps, *, made_by: Mapping[str, str], world: World = World()) -> int:
    """Write the training shards of the folder `source` with `maps` into `out`; return the number of images.

    Rank r of n writes shards r, r + n, ..., unless they are complete. Raise ValueError if `source` has no shards, or if
    `out` has shards that were made differently.
    """
    folder, target = sources.place(source), Path(out).expanduser()
    if not sources.find_shards(folder, "train"):
        raise ValueError(f"{source} has no TFRecords train-*: pack the images with `largebatch.pack` first.")
    index = sources.open_source(source, split="train")
    plan = {**made_by, "images": len(index), "digest": index.digest()}
    output.begin(target / PLAN, plan, has_shards=lambda: bool(sources.find_shards(target, "train")), world=world)
    for number in range(world.rank, len(index.files), world.size):
        path = target / os.path.basename(index.files[number])
        if not path.exists():
            shard = index.without(np.flatnonzero(index.file != number).tolist())
            written = records.write_records(path, _labelled(shard, maps))
            logger.info("%s: %d images", path.name, written)
    world.barrier()
    if world.rank == 0:
        held_out = _copy_held_out(folder, target)
        sources.write_class_names(target, sources.class_names(index))
        output.finish(target, ("train", "validation") if held_out else ("train",))
    return len(index)


def _labelled(shard: Index, maps: Maps) -> Iterator[bytes]:
    if not len(shard):
        return
    for sample, (features, (scores, ids)) in enumerate(zip(_features(shard), maps(shard), strict=True)):
        try:
            yield records.encode_example(features | dict(encode_map(scores, ids)))
        except ValueError as error:
            raise ValueError(f"{shard.where(sample)}: {error}.") from error


def _features(shard: Index) -> Iterator[dict]:
    """Yield the features of each record with an image of `shard`, an index of one file."""
    path = shard.files[shard.file[0]]
    kept = iter([*shard.offset.tolist(), -1])
    image = next(kept)
    for start, payload, fault in records.scan_records(path):
        if start <= image < start + len(payload):
            if fault:
                raise ValueError(f"{path}: the record at byte {start - 12} {fault}.")
            yield {name: values for name, values in records.decode_example(payload).items() if values}
            image = next(kept)


def _copy_held_out(folder: Path, target: Path) -> list[str]:
    held_out = sources.find_shards(folder, "validation")
    for path in held_out:
        copy = target / os.path.basename(path)
        if not copy.exists():
            with remote.open_file(path) as file, atomic_file(copy) as out:
                shutil.copyfileobj(file, out)
    return held_out


# -- maps --------------------------------------------------------------------------------------------------------


def converted(root: str) -> Maps:
    """Return the maps of the published files: <root>/<class>/<image>.pt, a tensor of half floats (2, k, h, w).

    [0] are logits, [1] are classes, numbered in the sorted order of their folders. <image> is the file name in the
    record, up to the first dot.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ValueError(f"There is no folder {root}: expected a folder of label files, <class>/<image>.pt.")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))

    def maps(shard: Index) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if len(names) != shard.num_classes:
            raise ValueError(f"{root} has {len(names)} class folders, expected {shard.num_classes}, one per class.")
        for sample, features in enumerate(_features(shard)):
            if records.FILENAME not in features:
                raise ValueError(
                    f"{shard.where(sample)} has no {records.FILENAME}, which names its label file: pack the images "
                    "again with `largebatch.pack`."
                )
            file = os.path.basename(features[records.FILENAME][0].decode("utf-8", "surrogateescape"))
            yield load_published(folder / names[shard.label[sample]] / f"{file.partition('.')[0]}.pt")

    return maps


def load_published(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores and classes (k, h, w) of a published file; ValueError if it is not one."""
    try:
        tensor = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise nearly anything
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4 or len(tensor) != 2:
        raise ValueError(f"{path} is not a label file: expected a tensor of shape (2, k, h, w).")
    scores, ids = tensor.numpy()
    if not (ids == np.rint(ids)).all() or ids.max() > EXACT_HALVES:
        raise ValueError(
            f"{path} has classes that half precision cannot tell apart: expected whole numbers up to {EXACT_HALVES}."
        )
    return scores, ids.astype(np.int64)


def generated(model: torch.nn.Module, *, batch_size: int, num_threads: int) -> Maps:
    """Return the maps that a teacher of `zoo.teacher` makes, on its device and at its image size."""
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
        with closing(batches):
            for batch in batches:
                logits = dense_logits(model, batch.images).float()
                scores, ids = logits.topk(min(TOP, logits.shape[1]), dim=1)
                yield from zip(scores.half().cpu().numpy(), ids.cpu().numpy())

    return maps
