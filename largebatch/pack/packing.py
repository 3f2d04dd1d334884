"""Packs images into TFRecord shards, and checks that everything can be decoded.

    python -m largebatch.pack imagenet/ shards/              # train/<class>/*, validation/<class>/* (or val/)
    python -m largebatch.pack tars/ shards/                  # ILSVRC2012_img_train.tar, _val.tar, devkit_t12.tar.gz
    python -m largebatch.pack cifar-10-batches-bin/ shards/  # or -py, or the .tar.gz of either
    python -m largebatch.pack shards/ other/ --shards 64     # TFRecords again: another order, another number
    mpirun -np 8 python -m largebatch.pack tars/ shards/     # the shards are shared out among the processes
    python -m largebatch.pack check shards/                  # lists every image that cannot be decoded
    python -m largebatch.pack token-labels shards/ ...       # adds a teacher's label maps, see `labelling`

The shards look like the published ImageNet records: train-00000-of-01024, labels from 1 in the sorted order
of the class names, training images shuffled by a fixed seed. Beside the two published features a record has
`image/filename`, where its image comes from a file, and records that are packed again keep all they have. JPEG files
are copied byte for byte; what is not an RGB or grey JPEG (ImageNet has a PNG and 22 CMYK files under JPEG names) is
stored as an RGB JPEG; CIFAR-10 becomes PNG, which loses nothing. Tars are not unpacked. A few images per shard are no
gain, so by default there are as many shards as give ImageNet its 1024 and 128.

Packing that was interrupted goes on when the same command is given again: packing.json in the folder says what it was,
whole shards are kept, and the bytes are those of one run. Every image is decoded on the way; a bad one stops the
packing with its name.

`check` decodes all images of a folder of TFRecords or images and writes the bad ones into quarantine.csv beside them.
Training, validation and packing from then on leave these out; a record with a wrong CRC may be among them. If the
folder cannot be written, `--out FILE` says where, and `--data.quarantine FILE` lets training know. `check` returns 1
if it found any. Where nothing is bad any more, the list is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from largebatch.comm.launcher import HOROVODRUN, MPI_LAUNCHERS, TORCHRUN
from largebatch.data import quarantine, records, sources
from largebatch.data.shards import Images, shard_images, write_split
from largebatch.pack import inputs as originals

SHARD_IMAGES = {"train": 1252, "validation": 391}  # ceil(1,281,167 / 1024), ceil(50,000 / 128)
PLAN = "packing.json"
LOCAL_SIZES = tuple(launcher.local_size for launcher in MPI_LAUNCHERS)
_BAR = 30  # characters


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if `check` found bad images."""
    argv = sys.argv[1:] if argv is None else list(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if argv[:1] == ["token-labels"]:
            from largebatch.pack import token_labels as labelling  # torch and timm, which packing does without

            with processes() as world:
                return labelling.main(argv[1:], rank=world.rank, size=world.size, barrier=world.barrier)
        return _main_check(argv[1:]) if argv[:1] == ["check"] else _main_pack(argv)
    except (ValueError, OSError) as error:  # a mistake; or a full disk, a file that cannot be read
        sys.exit(str(error))


# -- packing -----------------------------------------------------------------------------------------------------


def _main_pack(argv: Sequence[str]) -> int:
    description, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m largebatch.pack",
        description=description,
        epilog="The same command goes on where it was interrupted. `check FOLDER --help`: the other command.",
    )
    parser.add_argument("source", help="folder of images, of ImageNet's tars, of CIFAR-10 or of TFRecords, or digits")
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument("--shards", type=int, default=0, help="training shards (default: 1252 images each)")
    parser.add_argument("--validation-shards", type=int, default=0, help="(default: 391 images each)")
    parser.add_argument("--seed", type=int, default=0, help="order of the training images (default 0)")
    parser.add_argument(
        "--threads", type=int, default=_cores(), help="shards at once in each process (default: one per core)"
    )
    args = parser.parse_args(argv)
    num_shards = {"train": args.shards, "validation": args.validation_shards}
    with processes() as world:
        done = pack(args.source, args.out, num_shards=num_shards, seed=args.seed, threads=args.threads, world=world)
        if world.rank == 0:
            for split, count in done.items():
                print(f"{split}: {count} images")
    return 0


def _cores() -> int:
    """Of this process: those of the host, shared with the others that its launcher started there."""
    of_host = next((os.environ[name] for name in LOCAL_SIZES if name in os.environ), "1")
    return max(1, len(os.sched_getaffinity(0)) // int(of_host))


@dataclasses.dataclass(frozen=True)
class World:
    """The processes that share the shards of one packing."""

    rank: int = 0
    size: int = 1
    barrier: Callable[[], None] = lambda: None


def _refuse_without_mpi(environment: Mapping[str, str]) -> None:
    for variables in (TORCHRUN, HOROVODRUN):
        name = variables.size
        if environment.get(name, "1") != "1":
            raise ValueError(
                f"{name}={environment[name]}, as {variables.launcher} sets it, but the processes of pack share out "
                f"their work by MPI: start it by mpirun, or unset {name} to pack alone."
            )


@contextlib.contextmanager
def processes() -> Iterator[World]:
    """MPI's processes, if its launcher started this one. What goes wrong on one of them ends them all."""
    names = [launcher.size for launcher in MPI_LAUNCHERS] + (["SLURM_NTASKS"] if "PMIX_RANK" in os.environ else [])
    announced = next((os.environ[name] for name in names if name in os.environ), "1")
    if announced == "1":
        _refuse_without_mpi(os.environ)
        yield World()
        return
    from mpi4py import MPI  # starts MPI

    world = MPI.COMM_WORLD
    if world.size == 1:
        raise ValueError(
            f"The launcher announced {announced} processes, but mpi4py sees 1: use the launcher of its MPI."
        )
    try:
        yield World(world.rank, world.size, world.Barrier)
    except BaseException as error:
        cause = error if isinstance(error, (ValueError, OSError)) else traceback.format_exc()
        sys.stderr.write(f"rank {world.rank} of {world.size}: {cause}\n")
        sys.stderr.flush()
        world.Abort(1)


def pack(
    source: str, out: str, *, num_shards: Mapping[str, int], seed: int, threads: int, world: World = World()
) -> dict[str, int]:
    """Writes each split of `source` into the folder `out` and indexes it; returns the number of images of each.

    0 shards of a split stand for the default. What an interrupted call has written is kept. Raises ValueError for a bad
    image, naming it, and if `out` holds anything else.
    """
    folder = Path(out).expanduser()
    images = {split: originals.open_images(source, split) for split in originals.splits(source)}
    counts = {split: len(images[split].labels) for split in images}
    shards = {split: _number_of_shards(split, counts[split], wanted=num_shards[split]) for split in images}
    plan = {"images": counts, "digest": _digest(images), "shards": shards, "seed": seed}
    if world.rank == 0:
        _begin(folder, plan)
    world.barrier()
    if world.rank > 0:
        _begin(folder, plan)  # finds rank 0's, or says that this rank sees other images
    for split, here in images.items():
        ordered = originals.shuffled(here, seed) if split == "train" else here
        mine = range(world.rank, shards[split], world.size)
        sizes = [len(shard_images(shard, count=counts[split], num_shards=shards[split])) for shard in mine]
        progress = Progress(f"packing {split}", sum(sizes), quiet=world.rank > 0)
        for done in write_split(folder, split, ordered, num_shards=shards[split], num_threads=threads, mine=mine):
            progress(done)
    world.barrier()
    if world.rank == 0:
        for split in images:
            for left in folder.glob(f".{split}-*"):  # by one that was killed
                left.unlink()
            sources.open_source(str(folder), split=split)
    return counts


def _number_of_shards(split: str, count: int, *, wanted: int) -> int:
    shards = wanted or math.ceil(count / SHARD_IMAGES[split])
    if not 1 <= shards <= count:
        raise ValueError(f"{count} {split} images cannot fill {shards} shards, expected 1 to {count}.")
    return shards


def _digest(images: Mapping[str, Images]) -> str:
    """For the names and labels of all images. Not for their bytes: a bad one may be mended before packing goes on."""
    digest = hashlib.sha256()
    for split, here in images.items():
        digest.update(repr((split, list(here.labels), list(here.names))).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _begin(folder: Path, plan: Mapping) -> None:
    """Writes the plan down. ValueError if the folder has shards of another one."""
    file = folder / PLAN
    begun = json.loads(file.read_text()) if file.is_file() else {}
    if begun == plan:
        return
    if any(any(folder.glob(f"{split}-*")) for split in sources.SPLITS):
        differing = [f"{name} {begun.get(name)}, now {plan[name]}" for name in plan if begun.get(name) != plan[name]]
        was = f"shards of another packing ({'; '.join(differing)})" if begun else f"shards, and no {PLAN} of them"
        raise ValueError(f"{folder} already has {was}: choose another folder, or delete them.")
    folder.mkdir(parents=True, exist_ok=True)
    with records.atomic_file(file) as opened:
        opened.write(json.dumps(plan, indent=2).encode() + b"\n")


# -- check -------------------------------------------------------------------------------------------------------


def _main_check(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m largebatch.pack check", description="Decodes all images and lists the bad ones."
    )
    parser.add_argument("data", help='folder of TFRecords or images, or "digits"')
    parser.add_argument("--out", default="", help=f"file for the list (default: {quarantine.NAME} in the folder)")
    parser.add_argument("--threads", type=int, default=_cores(), help="files at once (default: one per core)")
    args = parser.parse_args(argv)
    lists: dict[Path, list[quarantine.Entry]] = {}
    lines = []
    for split in sources.available_splits(args.data) or ["train"]:
        folder, index = sources.open_everything(args.data, split=split)
        progress, found = Progress(f"checking {split}", len(index)), []
        for done, bad in quarantine.find_bad(index, folder=folder, split=split, num_threads=args.threads):
            found += bad
            progress(done)
        print(f"{split}: {len(index)} images, {len(found)} bad")
        for entry in sorted(found, key=dataclasses.astuple):
            lines.append(f"{folder / entry.file}, record {entry.record} (at byte {entry.offset}): {entry.reason}")
        file = Path(args.out).expanduser() if args.out else folder / quarantine.NAME
        lists[file] = lists.get(file, []) + found
    for line in lines:
        print(line)
    for file, found in lists.items():
        _keep_list(file, found)
    return 1 if lines else 0


def _keep_list(file: Path, bad: Sequence[quarantine.Entry]) -> None:
    """Writes a list; where nothing is bad, an old one is removed."""
    try:
        if bad:
            quarantine.save(file, bad)
            print(f"listed in {file}: training leaves them out")
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be written ({error.strerror}): give --out FILE, and train with --data.quarantine FILE."
        ) from error


class Progress:
    """One line that grows on a terminal; elsewhere, as in a log, a line about every tenth."""

    def __init__(self, what: str, total: int, *, quiet: bool = False) -> None:
        self._what, self._total, self._quiet = what, total, quiet
        self._tenths = 0

    def __call__(self, done: int) -> None:
        if self._quiet:
            return
        share = min(1.0, done / max(1, self._total))
        text = f"{self._what}: {done} of {self._total} images"
        if sys.stderr.isatty():
            bar = "=" * round(_BAR * share)
            sys.stderr.write(f"\r[{bar:{_BAR}}] {text}" + ("\n" if done >= self._total else ""))
        elif int(10 * share) > self._tenths:
            self._tenths = int(10 * share)
            sys.stderr.write(text + "\n")
        sys.stderr.flush()
