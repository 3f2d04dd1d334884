"""Packs images into TFRecord shards, and checks that everything can be decoded.

    python -m largebatch.pack imagenet/ shards/              # train/<class>/*, validation/<class>/* (or val/)
    python -m largebatch.pack digits shards/ --shards 4
    python -m largebatch.pack check shards/                  # lists every image that cannot be decoded

The shards look like the published ImageNet records: train-00000-of-01024, labels from 1 in the sorted order
of the class names, training images shuffled by a fixed seed. JPEG files are copied byte for byte; what is not
an RGB or grey JPEG (ImageNet has a PNG and 22 CMYK files under JPEG names) is stored as an RGB JPEG. Every
image is decoded on the way: a bad one stops the packing with its name, and `check` on the source lists them
all. A few images per shard are no gain, so by default there are as many shards as give ImageNet its 1024 and
128.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from largebatch.data import sources
from largebatch.data.index import Index
from largebatch.data.sources import Images

SHARD_IMAGES = {"train": 1252, "validation": 391}  # ceil(1,281,167 / 1024), ceil(50,000 / 128)
_AT_ONCE = 256  # images per round of `check`


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if `check` found bad images."""
    argv = sys.argv[1:] if argv is None else list(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        return _main_check(argv[1:]) if argv[:1] == ["check"] else _main_pack(argv)
    except ValueError as error:
        sys.exit(str(error))


def _main_pack(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m largebatch.pack")
    parser.add_argument("source", help='image folder or "digits"; "check" checks instead')
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument("--shards", type=int, default=0, help="training shards (default: 1252 images each)")
    parser.add_argument("--validation-shards", type=int, default=0, help="(default: 391 images each)")
    parser.add_argument("--seed", type=int, default=0, help="order of the training images (default 0)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(default: one per core)")
    args = parser.parse_args(argv)
    num_shards = {"train": args.shards, "validation": args.validation_shards}
    done = pack(args.source, args.out, num_shards=num_shards, seed=args.seed, threads=args.threads)
    for split, count in done.items():
        print(f"{split}: {count} images")
    return 0


def pack(source: str, out: str, *, num_shards: dict[str, int], seed: int, threads: int) -> dict[str, int]:
    """Writes each split of `source` into the folder `out` and indexes it; returns the number of images of each.

    0 shards of a split stand for the default. Raises ValueError for a bad image, naming it, and if `out` is in use.
    """
    folder = Path(out).expanduser()
    splits = sources.available_splits(source) or ["train"]  # without any, opening says what was looked for
    images = {split: _open(source, split) for split in splits}
    for split in splits:
        if sources.find_shards(folder, split):
            raise ValueError(f"{folder} already has {split} shards: choose another folder or delete them.")
    folder.mkdir(parents=True, exist_ok=True)
    for split in splits:
        count = len(images[split].labels)
        shards = num_shards[split] or math.ceil(count / SHARD_IMAGES[split])
        ordered = _shuffled(images[split], seed) if split == "train" else images[split]
        for done in sources.write_split(folder, split, ordered, num_shards=shards, num_threads=threads):
            _progress(f"packing {split}", done, count)
        sources.open_source(str(folder), split=split)
    return {split: len(images[split].labels) for split in splits}


def _open(source: str, split: str) -> Images:
    if source in sources.BUILT_IN:
        return {"digits": sources.digits, "synthetic": sources.synthetic}[source](split)
    files, labels, _ = sources.find_images(Path(source).expanduser(), split)
    return Images(labels, lambda k: as_jpeg(Path(files[k]).read_bytes(), where=files[k]))


def _shuffled(images: Images, seed: int) -> Images:
    words = np.random.Philox(key=[seed, 0]).random_raw(len(images.labels))
    order = np.argsort(words, kind="stable").tolist()
    return Images([images.labels[k] for k in order], lambda k: images.encoded(order[k]))


def as_jpeg(data: bytes, *, where: str) -> bytes:
    """`data` itself if it is an RGB or grey JPEG, else the same image as an RGB JPEG."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
                return data
            file = io.BytesIO()
            image.convert("RGB").save(file, "JPEG", quality=100, subsampling=0)
            return file.getvalue()
    except Exception as error:  # a damaged file may raise nearly anything
        raise ValueError(f"{where} cannot be decoded: {error}") from error


def _main_check(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m largebatch.pack check")
    parser.add_argument("data", help='folder of TFRecords or images, or "digits"')
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(default: one per core)")
    args = parser.parse_args(argv)
    bad = []
    for split in sources.available_splits(args.data) or ["train"]:
        index = sources.open_source(args.data, split=split)
        found = check(index, threads=args.threads)
        print(f"{split}: {len(index)} images, {len(found)} bad")
        bad += found
    for line in bad:
        print(line)
    return 1 if bad else 0


def check(index: Index, *, threads: int) -> list[str]:
    """Decodes every image; for each that fails, a line with its file, record and the reason."""

    def reason(sample: int) -> str:
        try:
            with open(index.files[index.file[sample]], "rb") as file:
                data = os.pread(file.fileno(), int(index.length[sample]), int(index.offset[sample]))
            Image.open(io.BytesIO(data)).load()
        except Exception as error:
            return f"{index.where(sample)}: {error}"
        return ""

    found = []
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(index), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(index))
            found += [line for line in pool.map(reason, range(start, stop)) if line]
            _progress("checking", stop, len(index))
    return found


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{what}: {done} of {total} images" + ("\n" if done == total else ""))
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
