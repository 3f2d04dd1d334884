"""Build an index: scan TFRecord files or WebDataset tars, or read the headers of image files. No image is decoded."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import stat
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from largebatch.data import remote
from largebatch.data.index import Index
from largebatch.data.index_file import why_damaged
from largebatch.data.label_maps import Found, find_map
from largebatch.data.records import FIELDS, bytes_spans, feature_spans, int64_values, scan_records
from largebatch.data.tars import scan_samples
from largebatch.files import no_progress

logger = logging.getLogger(__name__)

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP")  # the formats that the decoder reads, by PIL's names
TAR = ".tar"  # the suffix of WebDataset's shards
MOST_NAMES = 10  # fields of a record in a message
_CHUNK = 1000  # image files per task of the thread pool
# Pillow warns of images above 89 megapixels, which a photo may have, and refuses those above 179.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

# Columns for the images of a file: offset, length, label, width, height. Then, in TFRecords, columns for their label
# maps: offset, k, h, w, number of classes.
Rows = tuple[np.ndarray, ...]


def index_shards(files: Sequence[str], progress: Callable[[], None] = no_progress) -> Index:
    """Scan TFRecord files or WebDataset tars; labels stay as they are. progress: called after each file.

    Raises ValueError if a file ends early or no record can be found in it.
    """
    status = _status(files)  # before reading: a change in between makes the index stale
    tables = _parallel(scan_tar if files[0].endswith(TAR) else scan_shard, files, progress, unit="shards")
    counts = [len(rows[0]) for rows in tables]
    if not sum(counts):
        raise ValueError(f"{os.path.dirname(files[0])}: the shards hold no records.")
    rows = tuple(np.concatenate(column) for column in zip(*tables))
    file = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    return _make_index(files, status, file, rows)


def index_images(
    files: Sequence[str],
    labels: Sequence[int],
    *,
    class_names: Sequence[str],
    progress: Callable[[], None] = no_progress,
) -> Index:
    """Read the headers of image files; `labels` are zero-based. progress: called after each thousand images."""
    status = _status(files)
    chunks = [files[at : at + _CHUNK] for at in range(0, len(files), _CHUNK)]

    sizes = _parallel(lambda chunk: [*map(size_or_zero, chunk)], chunks, progress, unit="thousand images")
    width, height = np.array([size for chunk in sizes for size in chunk], dtype=np.int64).T
    length = np.array([entry.st_size for entry in status], dtype=np.int64)
    rows = (np.zeros_like(length), length, np.asarray(labels, dtype=np.int64), width, height)
    file = np.arange(len(files), dtype=np.int32)
    return _make_index(files, status, file, rows, class_names)


def _status(files: Sequence[str]) -> list[os.stat_result]:
    try:
        found = [os.stat(path) for path in files]
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}.") from error
    if special := next((path for path, status in zip(files, found) if not stat.S_ISREG(status.st_mode)), ""):
        raise ValueError(f"{special} is no file, but a FIFO, a socket or a device: remove it.")
    return found


def scan_shard(path: str) -> Rows:
    """Return the rows of one TFRecord file, with its own labels; every CRC is checked."""
    rows = []
    for start, payload, fault in scan_records(path):
        row, found = (start, len(payload), 0, 0, 0), Found()
        with contextlib.suppress(ValueError):
            if not fault:
                a, b, label = find_image(payload)
                row = (start + a, b - a, label, *image_size(io.BytesIO(payload[a:b])))
                found = find_map(payload)
        rows.append((*row, found.offset and start + found.offset, *found[1:]))
    return tuple(np.array(rows, dtype=np.int64).reshape(-1, 10).T)


def scan_tar(path: str) -> Rows:
    """Return the rows of one WebDataset tar; it has no label maps."""
    rows = []
    with remote.open_file(path) as file:
        for sample in scan_samples(path):
            file.seek(sample.offset)
            size = (0, 0) if sample.fault else size_or_zero(io.BytesIO(file.read(sample.length)))
            rows.append((sample.offset, sample.length, sample.label, *size))
    return (*np.array(rows, dtype=np.int64).reshape(-1, 5).T, *np.zeros((5, len(rows)), dtype=np.int64))


def find_image(payload: bytes) -> tuple[int, int, int]:
    """Return start and stop of the image in a record, and its label. Raises ValueError if it lacks one."""
    spans = feature_spans(payload)
    image, label = next((pair for pair in FIELDS if spans.keys() >= {*pair}), ("", ""))
    if not image:
        names = ", ".join(sorted(spans)[:MOST_NAMES]) or "none"
        raise ValueError(f"has the fields {names}, expected {' or '.join(map(' and '.join, FIELDS))}")
    images, labels = bytes_spans(payload, spans[image]), int64_values(payload, spans[label])
    if (len(images), len(labels)) != (1, 1):
        raise ValueError(f"has {len(images)} images in {image} and {len(labels)} numbers in {label}, expected one each")
    return (*images[0], labels[0])


def image_size(file: io.BytesIO | str) -> tuple[int, int]:
    """Return width and height from the header, as stored; ValueError if the image cannot be read."""
    try:
        with Image.open(file) as image:
            kind, size = image.format, image.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # PIL has no common class
        reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
        raise ValueError(f"is not a readable image: {reason}") from error
    if kind not in FORMATS:
        raise ValueError(f"is a {kind} image, expected {', '.join(FORMATS)}: convert it first")
    return size


def size_or_zero(file: io.BytesIO | str) -> tuple[int, int]:
    try:
        return image_size(file)
    except ValueError:
        return 0, 0


def _make_index(
    files: Sequence[str],
    status: Sequence[os.stat_result],
    file: np.ndarray,
    rows: Rows,
    class_names: Sequence[str] = (),
) -> Index:
    offset, length, label, width, height, *maps = rows
    known = label[width > 0] if (width > 0).any() else label
    low, high = (0, len(class_names) - 1) if class_names else (int(known.min()), int(known.max()))
    found: dict[str, Any] = {}
    if maps and maps[0].any():
        shapes = np.stack(maps[1:4], axis=1).astype(np.int32)
        found = {"map_offset": maps[0], "map_shape": shapes, "map_classes": int(maps[4].max())}
    index = Index(
        files=tuple(files),
        file=file,
        offset=offset,
        length=length,
        label=np.where(width > 0, label, low) if not class_names else label,
        width=width.astype(np.int32),
        height=height.astype(np.int32),
        num_classes=high + 1,
        file_size=np.array([entry.st_size for entry in status], dtype=np.int64),
        file_mtime_ns=np.array([entry.st_mtime_ns for entry in status], dtype=np.int64),
        label_range=(low, high),
        class_names=tuple(class_names),
        **found,
    )
    assert not why_damaged(index), why_damaged(index)
    return index


def _parallel(function: Callable, items: Sequence, progress: Callable[[], None], *, unit: str) -> list:
    """Map a function over items in threads: reading and CRC release the interpreter."""
    results = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            for number, result in enumerate(pool.map(function, items), start=1):
                results.append(result)
                progress()
                if number % max(1, len(items) // 10) == 0 and len(items) >= 10:
                    logger.info("indexed %d of %d %s", number, len(items), unit)
        finally:
            pool.shutdown(cancel_futures=True)
    return results
