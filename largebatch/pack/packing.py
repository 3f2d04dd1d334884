"""Packs images into TFRecord shards.

    python -m largebatch.pack imagenet/ shards/              # train/<class>/*, validation/<class>/* (or val/)
    python -m largebatch.pack tars/ shards/                  # ILSVRC2012_img_train.tar, _val.tar, devkit_t12.tar.gz
    python -m largebatch.pack cifar-10-batches-bin/ shards/  # or -py, or the .tar.gz of either
    python -m largebatch.pack fashion-mnist/ shards/         # IDX files: train-images-idx3-ubyte.gz and three more
    python -m largebatch.pack shards/ other/ --shards 64     # TFRecords again: another order, another number
    python -m largebatch.pack shards/ small/ --shorter-side 256      # a copy that fits into memory
    mpirun -np 8 python -m largebatch.pack tars/ shards/     # the processes share the shards

The shards look like the published ImageNet records: train-00000-of-01024, labels from 1 in the sorted order of the
class names, training images shuffled by a fixed seed. The default size gives ImageNet its published 1,024 and 128
shards. A record has `image/filename`, if its image comes from a file; records that are packed again keep all features.
RGB and grey JPEGs are copied byte for byte, other files (ImageNet has a PNG and 22 CMYK files under JPEG names) become
RGB JPEGs; CIFAR-10 and IDX files become PNGs, which lose nothing.

--shorter-side N shrinks larger images: bicubic, as a JPEG of quality 90. It is a copy for training: random crops are
cut from fewer pixels, and the pixels of an evaluation change (benchmark/NOTES.md), so compare with published accuracies
on images of the full size.

packing.json tells how the shards are made: the same command goes on with an interrupted packing. A bad image stops the
packing, and the message names it. classes.json has the names of the classes, which go into the checkpoints.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from largebatch.arguments import Parser, local
from largebatch.data import sources
from largebatch.data.shards import Images, shard_images, write_split
from largebatch.pack import inputs, output
from largebatch.pack.processes import World, cores_per_process, mpi_world
from largebatch.process.progress import show_progress

SHARD_IMAGES = {"train": 1252, "validation": 391}  # ceil(1,281,167 / 1024), ceil(50,000 / 128)
PLAN = "packing.json"


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "pack",
        description="Packs images into TFRecord shards. If it is interrupted, the same command goes on.",
        epilog="Other commands, which have a --help of their own: `check` lists the images that cannot be decoded; "
        "`token-labels` adds a teacher's label maps to TFRecords.",
    )
    parser.add_argument(
        "source",
        help="folder of images, of ImageNet's tars, of CIFAR-10's or IDX files or of TFRecords; or digits or "
        "synthetic, which are built in",
    )
    parser.add_argument("out", type=local, help="folder for the shards")
    parser.add_argument(
        "--shards", type=int, default=0, help="number of training shards (default: as many as give each 1252 images)"
    )
    parser.add_argument(
        "--validation-shards",
        type=int,
        default=0,
        help="number of validation shards (default: as many as give each 391 images)",
    )
    parser.add_argument(
        "--shorter-side",
        type=int,
        default=0,
        help="shrink images whose shorter side has more pixels than this, such as 256 (default: store all as they are)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the training images (default: 0)")
    parser.add_argument(
        "--threads",
        type=int,
        default=cores_per_process(),
        help="number of shards that each process writes at once (default: one per core)",
    )
    args = parser.parse_args(argv)
    num_shards = {"train": args.shards, "validation": args.validation_shards}
    with mpi_world() as world:
        counts = pack(
            args.source,
            args.out,
            num_shards=num_shards,
            seed=args.seed,
            threads=args.threads,
            shorter_side=args.shorter_side,
            world=world,
        )
        if world.rank == 0:
            for split, count in counts.items():
                print(f"{split}: {count} images")
    return 0


def pack(
    source: str,
    out: str,
    *,
    num_shards: Mapping[str, int],
    seed: int,
    threads: int,
    shorter_side: int = 0,
    world: World = World(),
) -> dict[str, int]:
    """Write each split of `source` into the folder `out` and index it; return the number of images of each split.

    0 shards of a split stand for the default number, a `shorter_side` of 0 for images as they are. Complete shards are
    kept. Raise ValueError for a bad image, or if `out` has other shards.
    """
    if shorter_side < 0:
        raise ValueError(f"--shorter-side is {shorter_side}: expected a number of pixels, or 0 for images as they are.")
    folder = Path(out).expanduser()
    if folder.resolve() == Path(source).expanduser().resolve():
        raise ValueError(f"The shards would be written into {source} itself, among the images: give them a folder.")
    images = {split: inputs.open_images(source, split) for split in inputs.splits(source)}
    counts = {split: len(images[split].labels) for split in images}
    shards = {split: _number_of_shards(split, counts[split], wanted=num_shards[split]) for split in images}
    plan: dict[str, Any] = {"images": counts, "digest": _digest(images), "shards": shards, "seed": seed}
    if shorter_side:
        plan["shorter_side"] = shorter_side
        images = {split: inputs.shrunk(images[split], shorter_side) for split in images}
    begun = [f"{split}-*" for split in sources.SPLITS]
    output.begin(folder / PLAN, plan, has_shards=lambda: any(map(any, map(folder.glob, begun))), world=world)
    for split in images:
        ordered = inputs.shuffled(images[split], seed) if split == "train" else images[split]
        _write_share(folder, split, ordered, num_shards=shards[split], num_threads=threads, world=world)
    world.barrier()
    if world.rank == 0:
        sources.write_class_names(folder, next(iter(images.values())).classes)
        output.finish(folder, images)
    return counts


def _write_share(folder: Path, split: str, images: Images, *, num_shards: int, num_threads: int, world: World) -> None:
    count = len(images.labels)
    mine = range(world.rank, num_shards, world.size)
    sizes = [len(shard_images(shard, count=count, num_shards=num_shards)) for shard in mine]
    with show_progress(f"packing {split}", sum(sizes), quiet=world.rank > 0) as show:
        for done in write_split(folder, split, images, num_shards=num_shards, num_threads=num_threads, mine=mine):
            show(done)


def _number_of_shards(split: str, count: int, *, wanted: int) -> int:
    shards = wanted or math.ceil(count / SHARD_IMAGES[split])
    if not 1 <= shards <= count:
        raise ValueError(f"{count} {split} images cannot fill {shards} shards, expected 1 to {count}.")
    return shards


def _digest(images: Mapping[str, Images]) -> str:
    """Return a digest of names and labels; bad bytes may be mended before the packing goes on."""
    digest = hashlib.sha256()
    for split, here in images.items():
        digest.update(repr((split, list(here.labels), list(here.names))).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
