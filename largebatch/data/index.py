"""The index of a data set: where the bytes of every image lie, its size and its label.

Per image it holds the file, the offset and length of the encoded bytes (not of the record around them), the
label, and the size from the image's header, since crop windows are drawn before anything is decoded. The same
arrays describe TFRecords and a folder of image files (offset 0), so what reads images knows one kind of
source.

What cannot be read has its row too, with the size 0 x 0, so that `quarantine` can say what is wrong with it, or
leave it out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from largebatch.data.label_maps import Found, find_map, map_bytes
from largebatch.data.records import (
    IMAGE,
    LABEL,
    bytes_spans,
    feature_spans,
    int64_values,
    scan_records,
)
from largebatch.files import atomic_file

logger = logging.getLogger(__name__)

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP")  # what the decoder reads, by PIL's names
COLUMNS = ("file", "offset", "length", "label", "width", "height")  # what an index has of each image
MAP_COLUMNS = ("map_offset", "map_shape")  # and of each label map, if there are any
VERSION = 2  # of the index files
NAMES = ("utf-8", "surrogateescape")  # a file name is bytes, which need not be UTF-8
_CHUNK = 1000  # image files per task of the thread pool


def label_base(low: int, high: int, *, num_classes: int, name: str) -> int:
    """0 if labels from `low` to `high` are those of `num_classes` classes counted from 0, 1 if from 1.

    Raises ValueError, naming the data `name`, if they are neither, or might be both: 1 to num_classes - 1.
    """
    if (low == 0 and high < num_classes) or (low == 1 and high == num_classes):
        return low
    reason = "the first class never occurs"
    if high - min(low, 1) >= num_classes:
        reason = f"label {high} is too large"
    raise ValueError(
        f"The labels of {name} run from {low} to {high}, expected 0 to {num_classes - 1} or 1 to "
        f"{num_classes} for {num_classes} classes: {reason}. Check the data or the model's num_classes."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """Where each of N images lies and what it shows; samples are in the order of the files and inside each file.

    Per image: the number of its file, width and height (int32), offset and length of its encoded bytes, label
    (int64). Labels are zero-based once `number_labels` has subtracted `label_base`; `label_range` are the lowest
    and highest as they stand in the files. Per file: size and modification time when the index was built.
    `class_names` are known for image folders only. `left_out` (M, 2) are file and offset of what `without` removed.
    What could not be read is 0 pixels wide, and spans its record or file; its label means nothing.

    Where records have label maps (`label_maps`): the offset of each (int64, 0 for none) and its shape k, h, w (int32,
    (N, 3)), and the highest class in any, plus one; else these are empty and 0.
    """

    files: tuple[str, ...]
    file: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    label: np.ndarray
    width: np.ndarray
    height: np.ndarray
    num_classes: int
    file_size: np.ndarray
    file_mtime_ns: np.ndarray
    label_range: tuple[int, int]
    label_base: int = 0
    class_names: tuple[str, ...] = ()
    left_out: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    map_offset: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    map_shape: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 3), dtype=np.int32))
    map_classes: int = 0

    def __len__(self) -> int:
        return len(self.file)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Images per file."""
        return tuple(np.bincount(self.file, minlength=len(self.files)).tolist())

    def where(self, sample: int) -> str:
        """File and record of a sample, for messages."""
        return f"{self.files[self.file[sample]]}, record {self.record(sample)} (at byte {self.offset[sample]})"

    def record(self, sample: int) -> int:
        """The number of a sample in its file, counting what was left out."""
        file, offset = self.file[sample], self.offset[sample]
        before = (self.left_out[:, 0] == file) & (self.left_out[:, 1] < offset)
        return sample - int(np.searchsorted(self.file, file)) + int(before.sum())

    def without(self, samples: Sequence[int]) -> Index:
        """The same index without these samples."""
        kept = np.ones(len(self), dtype=bool)
        kept[np.asarray(samples, dtype=np.int64)] = False
        columns = {name: getattr(self, name)[kept] for name in (*COLUMNS, *self._map_columns)}
        removed = np.stack([self.file[~kept], self.offset[~kept]], axis=1).astype(np.int64)
        return dataclasses.replace(self, **columns, left_out=np.concatenate([self.left_out, removed]))

    @property
    def _map_columns(self) -> tuple[str, ...]:
        return MAP_COLUMNS if len(self.map_offset) else ()

    def check_maps(self, num_classes: int) -> None:
        """ValueError unless each image has a label map, all of one shape, of a teacher with `num_classes` classes."""
        missing = np.flatnonzero(self.map_offset == 0) if len(self.map_offset) else np.arange(len(self))
        if len(missing):
            raise ValueError(
                f"--data.token_labels is true: labels for {len(self):,} images expected, "
                f"{len(self) - len(missing):,} found, first missing {self.where(int(missing[0]))}; "
                "`python -m largebatch.pack token-labels` adds them."
            )
        other = np.flatnonzero((self.map_shape != self.map_shape[0]).any(axis=1))
        if len(other):
            raise ValueError(
                f"The label maps have different shapes: {self.map_shape[0].tolist()} in {self.where(0)}, "
                f"{self.map_shape[other[0]].tolist()} in {self.where(int(other[0]))}: make all with one teacher."
            )
        if self.map_classes > num_classes:
            raise ValueError(
                f"The label maps have class {self.map_classes - 1}, the model {num_classes} classes: set "
                "--model.num_classes to those of the teacher."
            )

    def spans(self, samples: np.ndarray, *, with_maps: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Where the bytes of samples start and stop in their files: those of the image, or of it and its map."""
        start, stop = self.offset[samples], self.offset[samples] + self.length[samples]
        if with_maps:
            start = np.minimum(start, self.map_offset[samples])
            stop = np.maximum(stop, self.map_offset[samples] + map_bytes(self.map_shape[0].tolist()))
        return start, stop

    def digest(self) -> str:
        """Sixteen digits for which images these are, in which order and with which labels, wherever they lie."""
        digest = hashlib.sha256()
        for column in (self.file, self.offset, self.length, self.label):
            digest.update(column.tobytes())
        return digest.hexdigest()[:16]

    def number_labels(self, *, num_classes: int = 0, like: Index | None = None) -> Index:
        """The same index with zero-based labels; ValueError if they do not fit `num_classes` (0: as many as seen).

        Labels of records may count from 0 or from 1. The lowest and highest label of the data set decide; those of
        `like`, the training split, if they are known, since a small held-out split may lack the first class.
        """
        low, high = (like or self).label_range
        num_classes = num_classes or (high if low else high + 1)
        name = os.path.dirname(self.files[0])
        base = label_base(low, high, num_classes=num_classes, name=name)
        label = self.label + (self.label_base - base)
        if label.min() < 0 or label.max() >= num_classes:
            raise ValueError(f"{name} has labels that the training split has not, which run from {low} to {high}.")
        return dataclasses.replace(
            self, label=label, label_base=base, label_range=(low, high), num_classes=num_classes
        )

    def for_classes(self, num_classes: int) -> Index:
        """The same index for a model with `num_classes` outputs; ValueError if its labels do not fit."""
        if not self.class_names:
            return self.number_labels(num_classes=num_classes)
        if len(self.class_names) != num_classes:
            raise ValueError(
                f"{os.path.dirname(os.path.dirname(self.files[0]))} has {len(self.class_names)} classes, the "
                f"model {num_classes}: set the model's num_classes to {len(self.class_names)}."
            )
        return self

    def stale(self, files: Sequence[str]) -> str:
        """Why this index does not describe `files` as they are now; empty if it does."""
        if tuple(files) != self.files:
            return f"it lists {len(self.files)} files, there are {len(files)}, or their names differ"
        for path, size, mtime in zip(self.files, self.file_size.tolist(), self.file_mtime_ns.tolist()):
            status = os.stat(path)
            if (status.st_size, status.st_mtime_ns) != (size, mtime):
                return f"{path} has changed"
        return ""

    def verify(self) -> None:
        """Raises ValueError if the index is damaged or a file has changed since it was built."""
        reason = self._damage() or self.stale(self.files)
        if reason:
            raise ValueError(f"The index of {os.path.dirname(self.files[0])} is out of date: {reason}.")

    def _damage(self) -> str:
        if len({len(getattr(self, name)) for name in COLUMNS}) != 1 or not len(self.file):
            return "its columns have different lengths or are empty"
        if (len(self.map_offset), len(self.map_shape)) not in ((0, 0), (len(self), len(self))):
            return "its label maps are not those of its images"
        if len({len(self.files), len(self.file_size), len(self.file_mtime_ns)}) != 1:
            return "its list of files is incomplete"
        steps = np.diff(self.file)
        if (steps < 0).any() or self.file[0] < 0 or self.file[-1] >= len(self.files):
            return "its file numbers are out of order"
        ends, shortest = self.offset + self.length, self.width > 0
        if (self.offset < 0).any() or (self.length < shortest).any() or (ends > self.file_size[self.file]).any():
            return "an image lies outside its file"
        if ((self.offset[1:] < ends[:-1]) & (steps == 0)).any():
            return "its offsets are not in order"
        return ""

    def save(self, path: str | Path) -> None:
        """Writes the index as .npz, atomically."""
        arrays = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("files", "class_names"):  # as bytes: an array of strings would be as wide as its longest
            arrays[name] = np.frombuffer("\0".join(arrays[name]).encode(*NAMES), dtype=np.uint8)
        with atomic_file(path) as file:
            np.savez(file, version=np.int64(VERSION), **{f"index_{name}": arrays[name] for name in arrays})

    @classmethod
    def load(cls, path: str | Path) -> Index:
        """Reads what `save` wrote; ValueError naming the file if it is truncated or damaged."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:
                arrays = {name.removeprefix("index_"): data[name] for name in data.files}
            version = int(arrays.pop("version"))
            for name in ("files", "class_names"):
                text = arrays[name].tobytes().decode(*NAMES)
                arrays[name] = tuple(text.split("\0")) if text else ()
            for name in ("num_classes", "label_base", "map_classes"):
                arrays[name] = int(arrays[name])
            arrays["label_range"] = tuple(arrays["label_range"].tolist())
            index = cls(**arrays)
            reason = index._damage() if version == VERSION else f"its version is {version}, not {VERSION}"
        except Exception as error:  # whatever a damaged archive may raise
            reason = str(error)
        if reason:
            raise ValueError(f"The index {path} is damaged ({reason}): delete it, it is built again.")
        return index


# Of the images of a file: offset, length, label, width, height; then of their maps: offset, k, h, w, classes
Rows = tuple[np.ndarray, ...]


def image_size(file: io.BytesIO | str) -> tuple[int, int]:
    """Width and height from the header, as stored: an EXIF orientation is not applied. ValueError saying why not."""
    try:
        with Image.open(file) as image:
            kind, size = image.format, image.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # by what is damaged
        reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
        raise ValueError(f"is not a readable image: {reason}") from error
    if kind not in FORMATS:
        raise ValueError(f"is a {kind} image, expected {', '.join(FORMATS)}: convert it first")
    return size


def find_image(payload: bytes) -> tuple[int, int, int]:
    """Start and stop of the image in a record, and the label as it stands there. ValueError if it lacks one."""
    try:
        spans = feature_spans(payload)
        ((start, stop),) = bytes_spans(payload, spans[IMAGE])
        (label,) = int64_values(payload, spans[LABEL])
    except (KeyError, ValueError) as error:
        raise ValueError(f"lacks one {IMAGE} and one {LABEL}: {error}") from error
    return start, stop, label


def scan_shard(path: str) -> Rows:
    """The rows of one TFRecord file, with labels as they stand there; every CRC is checked."""
    rows = []
    for start, payload, intact in scan_records(path):
        row, found = (start, len(payload), 0, 0, 0), Found()
        with contextlib.suppress(ValueError):
            if intact:
                a, b, label = find_image(payload)
                row = (start + a, b - a, label, *image_size(io.BytesIO(payload[a:b])))
                found = find_map(payload)
        rows.append((*row, found.offset and start + found.offset, *found[1:]))
    return tuple(np.array(rows, dtype=np.int64).reshape(-1, 10).T)


def index_shards(files: Sequence[str]) -> Index:
    """Scans TFRecord files; ValueError where a file ends early or its records cannot be told apart.

    Labels are as they stand there: `number_labels` makes them zero-based.
    """
    status = [os.stat(path) for path in files]  # before reading: a change in between makes the index stale
    tables = _parallel(scan_shard, files, unit="shards")
    counts = [len(rows[0]) for rows in tables]
    if not sum(counts):
        raise ValueError(f"{os.path.dirname(files[0])}: the TFRecord files hold no records.")
    rows = tuple(np.concatenate(column) for column in zip(*tables))
    file = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    return _make_index(files, status, file, rows)


def index_images(files: Sequence[str], labels: Sequence[int], *, class_names: Sequence[str]) -> Index:
    """Reads the headers of image files; `labels` are zero-based and `class_names` lists all classes."""
    status = [os.stat(path) for path in files]
    chunks = [files[at : at + _CHUNK] for at in range(0, len(files), _CHUNK)]

    def image_sizes(chunk: Sequence[str]) -> list[tuple[int, int]]:
        sizes = []
        for path in chunk:
            size = (0, 0)
            with contextlib.suppress(ValueError):
                size = image_size(path)
            sizes.append(size)
        return sizes

    sizes = _parallel(image_sizes, chunks, unit="thousand images")
    width, height = np.array([size for chunk in sizes for size in chunk], dtype=np.int64).T
    length = np.array([entry.st_size for entry in status], dtype=np.int64)
    rows = (np.zeros_like(length), length, np.asarray(labels, dtype=np.int64), width, height)
    file = np.arange(len(files), dtype=np.int32)
    return _make_index(files, status, file, rows, class_names)


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
        **_map_columns(*maps),
    )
    assert not index._damage(), index._damage()
    return index


def _map_columns(offset: np.ndarray | None = None, *others: np.ndarray) -> dict[str, Any]:
    """The fields of an index about label maps, where there are any."""
    if offset is None or not offset.any():
        return {}
    *shape, classes = others
    shapes = np.stack(shape, axis=1).astype(np.int32)
    return {"map_offset": offset, "map_shape": shapes, "map_classes": int(classes.max())}


def _parallel(function: Callable, items: Sequence, *, unit: str) -> list:
    """[function(item) for item in items], in threads: reading and CRC release the interpreter."""
    results = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for number, future in enumerate(futures, start=1):
                results.append(future.result())
                if number % max(1, len(items) // 10) == 0 and len(items) >= 10:
                    logger.info("indexed %d of %d %s", number, len(items), unit)
        finally:
            for future in futures:
                future.cancel()
    return results
