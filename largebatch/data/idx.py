"""Reads IDX files, in which MNIST, Fashion-MNIST, KMNIST and EMNIST are published.

    {train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]              MNIST, and others with 10 classes
    emnist-NAME-{train,test}-{images-idx3,labels-idx1}-ubyte[.gz]  EMNIST; NAME: balanced, byclass, letters, ...

Images become grey PNGs, which keep every pixel. EMNIST stores them transposed; here they are upright.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import itertools
import math
import os
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np
from PIL import Image

from largebatch.data.shards import Images, encode_image

DIMENSIONS = {"images": 3, "labels": 1}
MERGED = digits + ascii_uppercase + "abdefghnqrt"  # the other small letters look like their capitals
EMNIST: dict[str, Sequence[str]] = {
    "emnist-balanced-": MERGED,
    "emnist-byclass-": digits + ascii_uppercase + ascii_lowercase,
    "emnist-bymerge-": MERGED,
    "emnist-digits-": digits,
    "emnist-letters-": ascii_lowercase,  # small and capital; their labels begin with 1
    "emnist-mnist-": digits,
}
FILE = re.compile(rf"({'|'.join(EMNIST)}|)(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(?:\.gz)?")
FASHION = "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
FASHION_LABELS = (  # SHA-256 of the training and of the test labels: the names of the files are those of MNIST
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
)
LARGEST = 1_000_000_000  # bytes of a file that is read whole; the largest of EMNIST has 547 million
CHUNK = 1 << 20


def is_idx(folder: Path) -> bool:
    return bool(idx_files(folder))


def idx_files(folder: Path) -> dict[tuple[str, ...], Path]:
    """Return the IDX files by data set, part and kind; the unpacked one, if there are both."""
    try:
        names = sorted(os.listdir(folder), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {match.groups(): folder / name for name in names if (match := FILE.fullmatch(name))}


def idx_images(folder: Path, split: str) -> Images:
    """Return one split, as grey PNGs. Raise ValueError with the name of a file that is not as published."""
    files = idx_files(folder)
    names = sorted({name for name, _, _ in files})
    if len(names) > 1:
        several = " and ".join(f"{name}*" for name in names)
        raise ValueError(f"{folder} has the IDX files of several data sets, {several}: give each a folder of its own.")
    name, parts = names[0], ("train", "test" if names[0] else "t10k")
    for part, kind in itertools.product(parts, DIMENSIONS):
        if (name, part, kind) not in files:
            missing = f"{name}{part}-{kind}-idx{DIMENSIONS[kind]}-ubyte.gz"
            raise ValueError(f"{folder} has no {missing}: expected images and labels, for training and for testing.")
    images, labels = (files[name, parts[split != "train"], kind] for kind in DIMENSIONS)
    pixels, classes_of = _array(images, "images"), _array(labels, "labels").astype(int)
    if len(pixels) != len(classes_of):
        counts = f"{images} has {len(pixels):,} images, and {labels} {len(classes_of):,} labels"
        raise ValueError(f"{counts}: copy both again.")
    first, classes = int(name == "emnist-letters-"), EMNIST.get(name, digits)
    last = first + len(classes) - 1
    outside = np.flatnonzero((classes_of < first) | (classes_of > last))
    if len(outside):
        raise ValueError(
            f"{labels} has label {classes_of[outside[0]]} (of image {outside[0]}), expected {first} to {last}: copy it "
            "again, or give images of your own in folders, train/<class>/ and validation/<class>/."
        )
    if name == "":
        digest = hashlib.sha256(classes_of.astype(np.uint8).tobytes()).hexdigest()
        classes = FASHION if digest in FASHION_LABELS else ()
    upright = pixels.transpose(0, 2, 1) if name else pixels

    def encoded(k: int) -> bytes:
        return encode_image(Image.fromarray(np.ascontiguousarray(upright[k])), "PNG")

    return Images((classes_of - first).tolist(), encoded, classes=tuple(classes))


def _array(path: Path, kind: str) -> np.ndarray:
    """Return the bytes of an IDX file in their shape. No more is read than its header announces."""
    magic, length = bytes([0, 0, 8, DIMENSIONS[kind]]), 4 + 4 * DIMENSIONS[kind]  # 8: unsigned bytes
    try:
        with open(path, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(b"\x1f\x8b") else raw
            head = file.read(length)
            if head[:4] != magic or len(head) < length:
                begin = head.hex() or "nothing"
                raise ValueError(f"it begins with {begin}, expected {magic.hex()} and {length - 4} more bytes")
            shape = struct.unpack_from(f">{DIMENSIONS[kind]}I", head, 4)
            size = math.prod(shape)
            if not 0 < size < LARGEST:
                raise ValueError(f"it announces {size:,} bytes, expected 1 to {LARGEST:,}")
            chunks = iter(functools.partial(file.read, CHUNK), b"")
            data = b"".join(itertools.islice(chunks, size // CHUNK + 1))  # to the end, or one chunk too far
            if len(data) != size:
                number = f"{len(data):,}" if len(data) < size else "more"
                raise ValueError(f"it announces {size:,} bytes, and has {number}")
    except (EOFError, gzip.BadGzipFile, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is no whole IDX file of {kind}, copy it again: {error}.") from error
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)
