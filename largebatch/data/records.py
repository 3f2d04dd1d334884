"""TFRecord files without TensorFlow: framing, check sums and the protobuf message inside.

A record is framed as length (u64), masked CRC-32C of the length (u32), payload, masked CRC-32C of the payload (u32),
all little-endian. The payload is a `tf.train.Example`, read by hand because a protobuf library does not tell the place
of the image's bytes.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from largebatch.data import remote
from largebatch.files import atomic_file

IMAGE, LABEL, FILENAME = "image/encoded", "image/class/label", "image/filename"
FIELDS = ((IMAGE, LABEL), ("image", "label"))  # the second are those of TensorFlow Datasets
WRONG_CRC = "has a wrong CRC: the file is damaged, copy it again"
MOST_GAPS = 100  # in one file; more of them, and the file is not worth reading
SEARCH_BYTES = 2**20  # read at once to find the next record behind a gap


# -- record framing ----------------------------------------------------------------------------------------------------


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    import google_crc32c  # not at the start: --help needs no package

    return google_crc32c.value


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of `data`, rotated and shifted as TFRecords store it."""
    crc = _crc32c()(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    head = struct.pack("<Q", len(payload))
    crcs = [struct.pack("<I", masked_crc(part)) for part in (head, payload)]
    return b"".join((head, crcs[0], payload, crcs[1]))


def scan_records(path: str) -> Iterator[tuple[int, bytes, str]]:
    """Yield the offset and the bytes of each payload, and its fault or "".

    A record whose length has a wrong CRC is a gap: its bytes, up to the next record, come with their own fault. Raises
    ValueError, naming file and record, if the file is cut off, has too many gaps, or has no records.
    """
    with remote.open_file(path) as file:
        for start, length, is_payload in _spans(file, path):
            file.seek(start)
            payload = file.read(length)
            if not is_payload:
                yield start, payload, (
                    f"has a wrong length CRC, and its {length} bytes, up to the next record that is found, are lost: "
                    "the file is damaged, copy it again"
                )
            elif struct.unpack("<I", file.read(4))[0] != masked_crc(payload):
                yield start, payload, WRONG_CRC
            else:
                yield start, payload, ""


def record_spans(path: str) -> list[tuple[int, int]]:
    """Return offset and length of each payload and gap, by the framing alone."""
    with remote.open_file(path) as file:
        return [(start, length) for start, length, _ in _spans(file, path)]


def length_at(path: str, offset: int) -> int | None:
    """Return the length of the record at byte `offset`, or None."""
    with remote.open_file(path, block=12) as file:
        file.seek(offset)
        return _length(file.read(12))


def _spans(file: BinaryIO, path: str) -> Iterator[tuple[int, int, bool]]:
    """Yield offset and length of each payload, with True, and of each gap, with False."""
    size, at, number, gaps = file.seek(0, os.SEEK_END), 0, 0, 0
    while at < size:
        where = f"{path}: record {number} (at byte {at})"
        file.seek(at)
        head = file.read(12)
        length = _length(head)
        if len(head) < 12 or (length is not None and at + 16 + length > size):
            raise ValueError(f"{where} is cut off: copy the file again.")
        if length is None:
            stop, gaps = _find_record(file, at + 1, size), gaps + 1
            if stop - at == size or gaps > MOST_GAPS:
                others = "no record can be found" if stop - at == size else f"so have {MOST_GAPS} records before it"
                raise ValueError(
                    f"{where} has a wrong length CRC, and {others}: the file is damaged or no TFRecord file, copy it "
                    "again."
                )
            yield at, stop - at, False
            at = stop
        else:
            yield at + 12, length, True
            at += length + 16
        number += 1


def _length(head: bytes) -> int | None:
    """Return the length in the first 12 bytes of a record, or None if its CRC is wrong."""
    if len(head) < 12 or struct.unpack("<I", head[8:])[0] != masked_crc(head[:8]):
        return None
    return struct.unpack("<Q", head[:8])[0]


def _find_record(file: BinaryIO, at: int, size: int) -> int:
    """Return where the next record that fits into the file begins, from `at` on, or the file's size."""
    while at + 16 <= size:
        file.seek(at)
        block = file.read(SEARCH_BYTES + 11)  # a record may begin at each of the first SEARCH_BYTES
        for place in _headers(block, longest=size - at - 16):
            if at + place + 16 + struct.unpack_from("<Q", block, place)[0] <= size:
                return at + place
        at += SEARCH_BYTES
    return size


def _headers(block: bytes, *, longest: int) -> list[int]:
    """Return the places in `block` where a length of at most `longest` bytes is followed by its CRC.

    Few eight bytes are such a length, so few CRCs are computed.
    """
    if len(block) < 12:
        return []
    heads = np.lib.stride_tricks.sliding_window_view(np.frombuffer(block, dtype=np.uint8), 12)
    lengths, crcs = heads[:, :8].copy().view("<u8")[:, 0], heads[:, 8:].copy().view("<u4")[:, 0]
    places = np.flatnonzero(lengths <= longest)
    values, which = np.unique(lengths[places], return_inverse=True)
    expected = np.array([masked_crc(value.tobytes()) for value in values], dtype=np.uint32)
    return places[crcs[places] == expected[which]].tolist()


def read_span(path: str | Path, offset: int, length: int) -> bytes:
    """Read `length` bytes of a file. Raises OSError if it ends before them."""
    with open(path, "rb", buffering=0) as file:
        address = remote.address_of(path, file.fileno())
        data = remote.read_range(address, offset, length) if address else os.pread(file.fileno(), length, offset)
    if len(data) < length:
        raise OSError(f"{path} ends before byte {offset + length}")
    return data


def write_records(path: str | Path, payloads: Iterable[bytes]) -> int:
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
    """Serialise non-empty lists, sorted by name; the type of the first value is that of the list."""
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
    """Return all features by name, as lists. Raises ValueError if `data` is not an Example."""
    decoded: dict[str, list] = {}
    for name, span in feature_spans(data).items():
        decoded[name] = [data[a:b] for a, b in bytes_spans(data, span)] or int64_values(data, span)
        decoded[name] = decoded[name] or _float_values(data, span)
    return decoded


Span = tuple[int, int]


def feature_spans(data: bytes) -> dict[str, Span]:
    spans = {}
    for features in _children(data, (0, len(data)), 1):
        for entry in _children(data, features, 1):
            for a, b in _children(data, entry, 1):
                for span in _children(data, entry, 2):
                    spans[data[a:b].decode()] = span
    return spans


def bytes_spans(data: bytes, feature: Span) -> list[Span]:
    return [span for values in _children(data, feature, 1) for span in _children(data, values, 1)]


def int64_values(data: bytes, feature: Span) -> list[int]:
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
    """Yield start and stop of the content of each field `wanted` in the message at `span`."""
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
