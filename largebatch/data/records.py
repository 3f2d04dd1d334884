"""TFRecord files without TensorFlow, and the index that says where each image lies.

A record is framed as length (u64), masked CRC-32C of the length (u32), payload, masked CRC-32C of the payload
(u32), all little-endian; the payload is a `tf.train.Example`, whose few protobuf messages are read and
written by hand. The field names are those of the published ImageNet records, `image/encoded` and
`image/class/label`; others are ignored.

The `Index` holds for every image the file, the offset and length of its encoded bytes (not of the record
around them), its label, and its size from the image's header, since crop windows are drawn before anything is
decoded. The same arrays describe a folder of image files (offset 0), so what reads images needs to know only
one kind of source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import numpy as np
from PIL import Image

logger = logging.getLogger(__name__)

IMAGE, LABEL = "image/encoded", "image/class/label"
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP")  # what the decoder reads, by PIL's names
_VERSION = 1  # of the index files
_CHUNK = 1000  # image files per task of the thread pool


# -- record framing ------------------------------------------------------------------------------------------


def masked_crc(data: bytes) -> int:
    """The CRC-32C of `data`, rotated and shifted as TFRecords store it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """One record as it stands in the file."""
    head = struct.pack("<Q", len(payload))
    crcs = [struct.pack("<I", masked_crc(part)) for part in (head, payload)]
    return b"".join((head, crcs[0], payload, crcs[1]))


def read_records(path: str) -> Iterator[tuple[int, bytes]]:
    """Offset in the file and bytes of each payload; both CRCs are checked. Errors name file and record."""
    with open(path, "rb") as file:
        size, number = os.fstat(file.fileno()).st_size, 0
        while head := file.read(12):
            where = f"{path}: record {number} (at byte {file.tell() - len(head)})"
            if len(head) < 12:
                raise ValueError(f"{where} is cut off: copy the file again.")
            length, crc = struct.unpack("<QI", head)
            if crc != masked_crc(head[:8]):
                raise ValueError(f"{where} has a wrong length CRC: the file is damaged or no TFRecord file.")
            start = file.tell()
            if start + length + 4 > size:
                raise ValueError(f"{where} is cut off: copy the file again.")
            payload = file.read(length)
            if struct.unpack("<I", file.read(4))[0] != masked_crc(payload):
                raise ValueError(f"{where} has a wrong CRC: the file is damaged, copy it again.")
            yield start, payload
            number += 1


def write_records(path: str | Path, payloads: Iterable[bytes]) -> int:
    """Writes a TFRecord file, which appears when it is whole; returns the number of records."""
    number = 0
    with atomic_file(path) as file:
        for payload in payloads:
            file.write(frame(payload))
            number += 1
    return number


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[io.BufferedWriter]:
    """A file that appears under its name only when it is whole; its temporary name starts with a dot."""
    temporary = Path(path).with_name(f".{Path(path).name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# -- tf.train.Example ----------------------------------------------------------------------------------------
# Example {1: Features}, Features {1: map entry {1: name, 2: Feature}}, Feature {1: bytes, 2: floats, 3:
# ints}, and each of these lists {1: values}; numbers packed into one field or one by one.

Values = Sequence[bytes] | Sequence[int] | Sequence[float]


def encode_example(features: Mapping[str, Values]) -> bytes:
    """Serialises non-empty lists of bytes, ints or floats (told apart by the first), in sorted order."""
    entries = []
    for name, values in sorted(features.items()):
        assert len(values) > 0, name
        entries.append(_field(1, _field(1, name.encode()) + _field(2, _encode_feature(values))))
    return _field(1, b"".join(entries))


def _encode_feature(values: Values) -> bytes:
    if isinstance(values[0], bytes):
        return _field(1, b"".join(_field(1, value) for value in values))  # type: ignore[arg-type]
    if isinstance(values[0], float):
        return _field(2, _field(1, struct.pack(f"<{len(values)}f", *values)))
    return _field(3, _field(1, b"".join(_encode_varint(int(value)) for value in values)))


def _field(number: int, data: bytes) -> bytes:
    return _encode_varint(number << 3 | 2) + _encode_varint(len(data)) + data


def _encode_varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF  # negative numbers take ten bytes, as protobuf's int64 does
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_example(data: bytes) -> dict[str, list]:
    """All features by name, as lists of bytes, floats or ints. ValueError if `data` is not an Example."""
    decoded: dict[str, list] = {}
    for name, span in feature_spans(data).items():
        decoded[name] = [data[a:b] for a, b in bytes_spans(data, span)] or int64_values(data, span)
        decoded[name] = decoded[name] or _float_values(data, span)
    return decoded


Span = tuple[int, int]


def feature_spans(data: bytes) -> dict[str, Span]:
    """Start and stop of each Feature message in `data`, by name."""
    spans = {}
    for features in _children(data, (0, len(data)), 1):
        for entry in _children(data, features, 1):
            for a, b in _children(data, entry, 1):
                for span in _children(data, entry, 2):
                    spans[data[a:b].decode()] = span
    return spans


def bytes_spans(data: bytes, feature: Span) -> list[Span]:
    """Start and stop in `data` of each value of a bytes feature."""
    return [span for values in _children(data, feature, 1) for span in _children(data, values, 1)]


def int64_values(data: bytes, feature: Span) -> list[int]:
    """The values of an int64 feature, packed or not."""
    numbers = []
    for values in _children(data, feature, 3):
        for at, stop in _children(data, values, 1):
            while at < stop:
                value, at = _varint(data, at)
                numbers.append(value - (1 << 64) if value >> 63 else value)
    return numbers


def _float_values(data: bytes, feature: Span) -> list[float]:
    spans = [span for values in _children(data, feature, 2) for span in _children(data, values, 1)]
    return [value for a, b in spans for (value,) in struct.iter_unpack("<f", data[a:b])]


def _children(data: bytes, span: Span, wanted: int) -> Iterator[Span]:
    """Start and stop of the content of each field number `wanted` of the message at `span`."""
    at, stop = span
    while at < stop:
        key, at = _varint(data, at)
        start, wire = at, key & 7
        if wire == 2:
            length, start = _varint(data, at)
            at = start + length
        elif wire == 0:
            _, at = _varint(data, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError(f"not a tf.train.Example: wire type {wire} at byte {start}.")
        if at > stop:
            raise ValueError(f"not a tf.train.Example: the field at byte {start} ends outside its message.")
        if key >> 3 == wanted:
            yield start, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError(f"not a tf.train.Example: no number ends at byte {at}.")


# -- the index -----------------------------------------------------------------------------------------------


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
    `class_names` are known for image folders only.
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

    def __len__(self) -> int:
        return len(self.file)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Images per file."""
        return tuple(np.bincount(self.file, minlength=len(self.files)).tolist())

    def where(self, sample: int) -> str:
        """File and record of a sample, for messages."""
        first = int(np.searchsorted(self.file, self.file[sample]))
        return f"{self.files[self.file[sample]]}, record {sample - first} (at byte {self.offset[sample]})"

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
        arrays = (self.file, self.offset, self.length, self.label, self.width, self.height)
        if len({len(array) for array in arrays}) != 1 or not len(self.file):
            return "its columns have different lengths or are empty"
        if len({len(self.files), len(self.file_size), len(self.file_mtime_ns)}) != 1:
            return "its list of files is incomplete"
        steps = np.diff(self.file)
        if (steps < 0).any() or self.file[0] < 0 or self.file[-1] >= len(self.files):
            return "its file numbers are out of order"
        ends = self.offset + self.length
        if (self.offset < 0).any() or (self.length < 1).any() or (ends > self.file_size[self.file]).any():
            return "an image lies outside its file"
        if ((self.offset[1:] < ends[:-1]) & (steps == 0)).any():
            return "its offsets are not in order"
        return ""

    def save(self, path: str | Path) -> None:
        """Writes the index as .npz, atomically."""
        arrays = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("files", "class_names"):  # as bytes: an array of strings would be as wide as its longest
            arrays[name] = np.frombuffer("\0".join(arrays[name]).encode(), dtype=np.uint8)
        with atomic_file(path) as file:
            np.savez(file, version=np.int64(_VERSION), **{f"index_{name}": arrays[name] for name in arrays})

    @classmethod
    def load(cls, path: str | Path) -> Index:
        """Reads what `save` wrote; ValueError naming the file if it is truncated or damaged."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:
                arrays = {name.removeprefix("index_"): data[name] for name in data.files}
            version = int(arrays.pop("version"))
            for name in ("files", "class_names"):
                text = arrays[name].tobytes().decode()
                arrays[name] = tuple(text.split("\0")) if text else ()
            for name in ("num_classes", "label_base"):
                arrays[name] = int(arrays[name])
            arrays["label_range"] = tuple(arrays["label_range"].tolist())
            index = cls(**arrays)
            reason = index._damage() if version == _VERSION else f"its version is {version}, not {_VERSION}"
        except Exception as error:  # whatever a damaged archive may raise
            reason = str(error)
        if reason:
            raise ValueError(f"The index {path} is damaged ({reason}): delete it, it is built again.")
        return index


Rows = tuple[np.ndarray, ...]  # offset, length, label, width, height of the images of a file


def image_size(file: io.BytesIO | str, *, where: str) -> tuple[int, int]:
    """Width and height from the header, as stored: an EXIF orientation is not applied."""
    try:
        with Image.open(file) as image:
            kind, size = image.format, image.size
    except (OSError, SyntaxError, ValueError) as error:  # a damaged header may raise any of these
        raise ValueError(f"{where} is not a readable image: {error}") from error
    if kind not in FORMATS:
        raise ValueError(f"{where} is a {kind} image, expected {', '.join(FORMATS)}: convert it first.")
    return size


def scan_shard(path: str) -> Rows:
    """The rows of one TFRecord file, with labels as they stand there; every CRC is checked."""
    rows = []
    for number, (start, payload) in enumerate(read_records(path)):
        where = f"{path}: record {number} (at byte {start - 12})"
        try:
            spans = feature_spans(payload)
            ((a, b),) = bytes_spans(payload, spans[IMAGE])
            (label,) = int64_values(payload, spans[LABEL])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{where} lacks one {IMAGE} and one {LABEL}: {error}") from error
        rows.append((start + a, b - a, label, *image_size(io.BytesIO(payload[a:b]), where=where)))
    return tuple(np.array(rows, dtype=np.int64).reshape(-1, 5).T)


def index_shards(files: Sequence[str]) -> Index:
    """Scans TFRecord files. Labels are as they stand there: `number_labels` makes them zero-based."""
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
        return [image_size(path, where=path) for path in chunk]

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
    offset, length, label, width, height = rows
    low, high = (0, len(class_names) - 1) if class_names else (int(label.min()), int(label.max()))
    index = Index(
        files=tuple(files),
        file=file,
        offset=offset,
        length=length,
        label=label,
        width=width.astype(np.int32),
        height=height.astype(np.int32),
        num_classes=high + 1,
        file_size=np.array([entry.st_size for entry in status], dtype=np.int64),
        file_mtime_ns=np.array([entry.st_mtime_ns for entry in status], dtype=np.int64),
        label_range=(low, high),
        class_names=tuple(class_names),
    )
    assert not index._damage(), index._damage()
    return index


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
