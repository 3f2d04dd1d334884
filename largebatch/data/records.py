"""TFRecord files without TensorFlow: framing, check sums and the protobuf message inside.

A record is framed as length (u64), masked CRC-32C of the length (u32), payload, masked CRC-32C of the payload (u32),
all little-endian. The payload is a `tf.train.Example`. Its few protobuf messages are read and written by hand, because
the place of the image's bytes in the file is needed, which a protobuf library does not tell. The field names are those
of the published ImageNet records: `image/encoded`, `image/class/label` and `image/filename`, the file that the image
comes from. Other fields are ignored.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import google_crc32c

from largebatch.files import atomic_file

IMAGE, LABEL, FILENAME = "image/encoded", "image/class/label", "image/filename"
WRONG_CRC = "has a wrong CRC: the file is damaged, copy it again"


# -- record framing ----------------------------------------------------------------------------------------------------


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of `data`, rotated and shifted as TFRecords store it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Return one record as it is in the file: the payload with its length and CRCs."""
    head = struct.pack("<Q", len(payload))
    crcs = [struct.pack("<I", masked_crc(part)) for part in (head, payload)]
    return b"".join((head, crcs[0], payload, crcs[1]))


def scan_records(path: str) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the offset and the bytes of each payload, and True if its CRC is right.

    Raises ValueError, naming file and record, if the place of the next record is not known.
    """
    with open(path, "rb") as file:
        size, number = os.fstat(file.fileno()).st_size, 0
        while head := file.read(12):
            where = f"{path}: record {number} (at byte {file.tell() - len(head)})"
            if len(head) < 12:
                raise ValueError(f"{where} is cut off: copy the file again.")
            length, crc = struct.unpack("<QI", head)
            if crc != masked_crc(head[:8]):
                raise ValueError(
                    f"{where} has a wrong length CRC, so what follows cannot be found or left out: the file is damaged "
                    "or no TFRecord file, copy it again."
                )
            start = file.tell()
            if start + length + 4 > size:
                raise ValueError(f"{where} is cut off: copy the file again.")
            payload = file.read(length)
            yield start, payload, struct.unpack("<I", file.read(4))[0] == masked_crc(payload)
            number += 1


def record_spans(path: str) -> list[tuple[int, int]]:
    """Return offset and length of each payload; only the framing is read."""
    spans = []
    with open(path, "rb") as file:
        while head := file.read(8):
            spans.append((file.tell() + 4, struct.unpack("<Q", head)[0]))
            file.seek(4 + spans[-1][1] + 4, os.SEEK_CUR)
    return spans


def read_span(path: str | Path, offset: int, length: int) -> bytes:
    """Read `length` bytes of a file. Raises OSError if it ends before them."""
    with open(path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), length, offset)
    if len(data) < length:
        raise OSError(f"{path} ends before byte {offset + length}")
    return data


def write_records(path: str | Path, payloads: Iterable[bytes]) -> int:
    """Write a TFRecord file, which appears under its name when it is complete. Returns the number of records."""
    number = 0
    with atomic_file(path) as file:
        for payload in payloads:
            file.write(frame(payload))
            number += 1
    return number


# -- tf.train.Example --------------------------------------------------------------------------------------------------
# Example {1: Features}, Features {1: map entry {1: name, 2: Feature}}, Feature {1: bytes, 2: floats, 3: ints}, and each
# of these lists {1: values}. Numbers are packed into one field, or stored one by one.

Values = Sequence[bytes] | Sequence[int] | Sequence[float]


def encode_example(features: Mapping[str, Values]) -> bytes:
    """Serialise non-empty lists of bytes, ints or floats, sorted by name; the first value decides the type."""
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
    """Return all features by name, as lists of bytes, floats or ints. Raises ValueError if `data` is not an Example."""
    decoded: dict[str, list] = {}
    for name, span in feature_spans(data).items():
        decoded[name] = [data[a:b] for a, b in bytes_spans(data, span)] or int64_values(data, span)
        decoded[name] = decoded[name] or _float_values(data, span)
    return decoded


Span = tuple[int, int]


def feature_spans(data: bytes) -> dict[str, Span]:
    """Return start and stop of each Feature message in `data`, by name."""
    spans = {}
    for features in _children(data, (0, len(data)), 1):
        for entry in _children(data, features, 1):
            for a, b in _children(data, entry, 1):
                for span in _children(data, entry, 2):
                    spans[data[a:b].decode()] = span
    return spans


def bytes_spans(data: bytes, feature: Span) -> list[Span]:
    """Return start and stop in `data` of each value of a bytes feature."""
    return [span for values in _children(data, feature, 1) for span in _children(data, values, 1)]


def int64_values(data: bytes, feature: Span) -> list[int]:
    """Return the values of an int64 feature, packed or not."""
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
    """Yield start and stop of the content of each field with number `wanted` in the message at `span`."""
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
