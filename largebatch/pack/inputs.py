"""The sources that can be packed: image folders, ImageNet's tars, CIFAR-10's and IDX files, TFRecords, built-in ones.

JPEGs and records keep their bytes; other files become RGB JPEGs. Every image is decoded when it is read, so that no bad
image is packed.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

import numpy as np
from PIL import Image

from largebatch.config import DataConfig, byte_size
from largebatch.data import archives, quarantine, records, remote, shard_check, sources
from largebatch.data.imagenet_real import image_names
from largebatch.data.order import epoch_order
from largebatch.data.shards import Images, encode_image

SHRUNK_QUALITY = 90
SIZES = ("image/height", "image/width")  # features of published records, which would be those of the larger image


def splits(source: str) -> list[str]:
    return archives.imagenet_splits(Path(source)) or sources.available_splits(source) or ["train"]


def open_images(source: str, split: str) -> Images:
    """Return one split of a source, in its order, without the images in quarantine.

    Raise ValueError if there are none, and when a bad image is read.
    """
    folder = sources.place(source)
    if source in sources.BUILT_IN:
        return {"digits": sources.digits, "synthetic": sources.synthetic}[source](split)
    if remote.is_address(source) or sources.parquet_files(folder):  # an image is read by itself only as a record
        folder = sources.find_folder(source, split=split, cache=byte_size(DataConfig().cache))
    elif found := sources.published(folder):
        return found[1](split)
    if not folder.is_dir():
        raise ValueError(f"{sources.why_no_folder(source)}: expected one with images, {', '.join(sources.BUILT_IN)}.")
    if split in archives.imagenet_splits(folder):
        images = archives.imagenet(folder, split)
        return _as_jpegs(images, where=f"{folder / archives.TARS[split]}, ")
    if sources.find_shards(folder, split):
        return _records(source, split)
    remedy = f"; `python -m largebatch.pack check {quote(source)}` lists all such, and packing then leaves them out."
    if sources.find_tars(folder, split):
        return _as_jpegs(_tars(source, split), where=f"{source}/", remedy=remedy)
    return _as_jpegs(_image_folder(folder, split), where=f"{folder}/", remedy=remedy)


def _image_folder(folder: Path, split: str) -> Images:
    files, labels, classes = sources.find_images(folder, split)
    if split == "train" and (reason := shard_check.empty_classes(labels, classes, folder=folder)):
        raise ValueError(f"{reason}.")
    listed_in = folder / quarantine.NAME
    entries = quarantine.load(listed_in) if listed_in.is_file() else []
    spans = quarantine.listed_spans(entries, folder=folder, split=split, listed_in=listed_in)
    bad = {path for path, _, _ in spans}
    labels = [label for file, label in zip(files, labels) if file not in bad]
    names = [os.path.relpath(file, folder) for file in files if file not in bad]
    return Images(labels, lambda k: (folder / names[k]).read_bytes(), archives.named(names), names, classes)


def _records(source: str, split: str) -> Images:
    """Return records with all their features; their labels are renumbered from 0."""
    index = sources.open_source(source, split=split)
    spans = functools.cache(records.record_spans)
    places = [f"{os.path.basename(index.files[index.file[k]])} {index.offset[k]}" for k in range(len(index))]

    def others(k: int) -> Mapping[str, records.Values]:
        path = index.files[index.file[k]]
        start, length = spans(path)[index.record(k)]
        payload, crc = records.read_span(path, start, length), records.read_span(path, start + length, 4)
        if int.from_bytes(crc, "little") != records.masked_crc(payload):
            raise ValueError(f"{index.where(k)} {records.WRONG_CRC}.")
        features = records.decode_example(payload)
        written = () if records.IMAGE in features else records.FIELDS[1]  # under other names
        return {name: values for name, values in features.items() if values and name not in written}

    def encoded(k: int) -> bytes:
        data = index.read(k)
        as_jpeg(data, where=index.where(k))  # raises ValueError if it cannot be decoded
        return data

    return Images(index.label.tolist(), encoded, others, places, sources.class_names(index))


def _tars(source: str, split: str) -> Images:
    index = sources.open_source(source, split=split)
    names = image_names(index)
    return Images(index.label.tolist(), index.read, archives.named(names), names, sources.class_names(index))


def _as_jpegs(images: Images, *, where: str, remedy: str = "") -> Images:
    return dataclasses.replace(
        images, encoded=lambda k: as_jpeg(images.encoded(k), where=where + images.names[k], remedy=remedy)
    )


def shuffled(images: Images, seed: int) -> Images:
    order = epoch_order(seed, 0, len(images.labels)).tolist()
    labels = [images.labels[k] for k in order]
    return Images(labels, lambda k: images.encoded(order[k]), lambda k: images.others(order[k]))


def shrunk(images: Images, side: int) -> Images:
    def others(k: int) -> Mapping[str, records.Values]:
        return {name: values for name, values in images.others(k).items() if name not in SIZES}

    return dataclasses.replace(images, encoded=lambda k: shrink(images.encoded(k), side), others=others)


def shrink(data: bytes, side: int) -> bytes:
    """Return an image with a shorter side of `side` pixels, as a JPEG, or `data` itself if that side is not longer.

    An evaluation whose img_size / crop_pct is `side` then resizes no more.
    """
    with Image.open(io.BytesIO(data)) as image:
        shorter = min(image.size)
        if shorter <= side:
            return data
        width, height = (side * length // shorter for length in image.size)
        pixels = eight_bits(image) if image.mode in ("L", "I;16") else image.convert("RGB")
        resized = pixels.resize((width, height), Image.Resampling.BICUBIC)
        return encode_image(resized, "JPEG", quality=SHRUNK_QUALITY)


def as_jpeg(data: bytes, *, where: str, remedy: str = "") -> bytes:
    """Return `data` itself if it is an RGB or grey JPEG, else an RGB JPEG; ValueError for a bad image."""
    if fault := quarantine.image_fault(lambda: data):
        raise ValueError(f"{where} cannot be decoded ({fault}){remedy}")
    with Image.open(io.BytesIO(data)) as image:
        if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
            return data
        return encode_image(eight_bits(image).convert("RGB"), "JPEG", quality=100, subsampling=0)


def eight_bits(image: Image.Image) -> Image.Image:
    """Scale a grey PNG of 16 bits as DALI does; Pillow would make all levels above 255 white."""
    if image.mode != "I;16":
        return image
    return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
