"""Quarantine: images that cannot be decoded are found once by `find_bad`, listed, and left out of every training.

An entry of the CSV file has the SHA-256 of the image, or of its record if no image can be found in it, so a list whose
files have changed is noticed.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from shlex import quote

import numpy as np
from PIL import Image

from largebatch.data import remote
from largebatch.data.index import Index
from largebatch.data.records import length_at, read_span, scan_records
from largebatch.data.scan import TAR, find_image, image_size
from largebatch.data.tars import scan_samples
from largebatch.files import Damaged
from largebatch.files.table import write_table

NAME = "quarantine.csv"
IMAGES_PER_TASK = 256  # for image files; a shard is always one task
_CHANGED = "has other records than when it was indexed: touch the file, so that it is indexed again."


@dataclasses.dataclass(frozen=True)
class Entry:
    """A bad image of a split: its file, relative to the data folder, its record, its bytes, and the reason."""

    split: str
    file: str
    record: int
    offset: int
    length: int
    sha256: str
    reason: str


# -- finding them ------------------------------------------------------------------------------------------------


def find_bad(index: Index, *, folder: Path, split: str, num_threads: int) -> Iterator[tuple[int, list[Entry]]]:
    """Decode every image; after each task, yield the number of images done so far and the new entries."""
    sizes = index.shard_sizes
    firsts = np.cumsum((0, *sizes)).tolist()

    def examine(numbers: range) -> tuple[int, list[Entry]]:
        entries = []
        for number in numbers:
            faults = list(_faults(index, number, firsts[number]))
            if len(faults) != sizes[number]:
                raise ValueError(f"{index.files[number]} {_CHANGED}")
            bad = [(sample, reason) for sample, reason in enumerate(faults, start=firsts[number]) if reason]
            entries += [_entry(index, sample, reason, folder=folder, split=split) for sample, reason in bad]
        return sum(sizes[number] for number in numbers), entries

    step, done = max(1, IMAGES_PER_TASK * len(sizes) // len(index)), 0
    tasks = [range(at, min(at + step, len(sizes))) for at in range(0, len(sizes), step)]
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for task in as_completed([pool.submit(examine, numbers) for numbers in tasks]):
                count, entries = task.result()
                done += count
                yield done, entries
        finally:
            pool.shutdown(cancel_futures=True)


def _faults(index: Index, number: int, first: int) -> Iterator[str]:
    """Yield the fault, or "", of each image of a file, whose first image is sample `first`."""
    path = index.files[number]
    if index.class_names:  # a file is an image
        yield image_fault(lambda: read_span(path, 0, int(index.length[first])))
        return
    if path.endswith(TAR):
        for sample in scan_samples(path):
            yield sample.fault or image_fault(lambda: read_span(path, sample.offset, sample.length))
        return
    for _, payload, fault in scan_records(path):
        yield fault or image_fault(lambda: payload[slice(*find_image(payload)[:2])])


def image_fault(read: Callable[[], bytes]) -> str:
    """Return why Pillow or DALI cannot decode the bytes that `read` returns, or ""."""
    try:
        data = read()
        image_size(io.BytesIO(data))
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except Damaged:  # the store, not the image
        raise
    except Exception as error:  # a damaged image may raise nearly anything
        of_disk = getattr(error, "strerror", None)
        return f"cannot be read: {of_disk}" if of_disk else str(error).partition(" <_io.")[0] or type(error).__name__
    try:
        from largebatch.data.decoder import decoder_fault
    except ImportError:  # DALI is not installed
        return ""
    return decoder_fault(data)


def _entry(index: Index, sample: int, reason: str, *, folder: Path, split: str) -> Entry:
    path, offset, length = index.files[index.file[sample]], int(index.offset[sample]), int(index.length[sample])
    place = index.record(sample), offset, length, _sha256(path, offset, length)
    return Entry(split, os.path.relpath(path, folder), *place, " ".join(reason.split()))


def _sha256(path: str, offset: int, length: int) -> str:
    try:
        return hashlib.sha256(read_span(path, offset, length)).hexdigest()
    except OSError:
        return ""


# -- the list ----------------------------------------------------------------------------------------------------


def save(path: Path, entries: Sequence[Entry]) -> None:
    rows = map(dataclasses.asdict, sorted(entries, key=dataclasses.astuple))
    write_table(path, [field.name for field in dataclasses.fields(Entry)], rows)


def load(path: Path) -> list[Entry]:
    """Read a list that `save` wrote. Raise ValueError with the number of the first malformed entry."""
    entries: list[Entry] = []
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        try:
            for row in csv.DictReader(file, strict=True):
                record, offset, length = numbers = [int(row[name]) for name in ("record", "offset", "length")]
                if min(numbers) < 0 or max(numbers) >= 2**63 or "\0" in row["file"]:
                    raise ValueError(f"{row['file']!r} has no place {numbers}")
                entries.append(Entry(row["split"], row["file"], record, offset, length, row["sha256"], row["reason"]))
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            raise ValueError(
                f"{path}: entry {len(entries) + 1} is not as `largebatch.pack check` writes it ({error}): run it again."
            ) from error
    return entries


def leave_out(index: Index, entries: Sequence[Entry], *, folder: Path, split: str, listed_in: Path) -> Index:
    """Return `index` without the images that the entries of its split name.

    Raise ValueError if the files have changed since, if nothing is left, or if an image that is left could not be read.
    """
    listed = listed_spans(entries, folder=folder, split=split, listed_in=listed_in)
    numbers = {path: number for number, path in enumerate(index.files)} if listed else {}
    samples = []
    for path, offset, length in listed:
        found = _matching(index, numbers[path], offset, length) if path in numbers else []
        if not found:
            raise ValueError(
                f"{listed_in} names byte {offset} of {path}, but there is no {split} image: delete the list."
            )
        samples += found
    if samples and len(set(samples)) == len(index):
        raise ValueError(f"{listed_in} names all {len(index)} {split} images: nothing is left.")
    kept = index.without(samples) if samples else index
    damaged = np.flatnonzero(kept.width == 0)
    if len(damaged):
        _refuse(kept, int(damaged[0]), len(damaged), folder=folder)
    return kept


def listed_spans(entries: Sequence[Entry], *, folder: Path, split: str, listed_in: Path) -> list[tuple[str, int, int]]:
    """Return file, offset and length of each entry of a split. Raise ValueError if those bytes have changed."""
    spans = []
    again = f"python -m largebatch.pack check {quote(remote.address(folder) or str(folder))}"
    again += f" --out {quote(str(listed_in))}" * (listed_in != folder / NAME)
    for entry in entries:
        path = str(folder / entry.file)
        if entry.split == split:
            if not _is_as_listed(path, entry):
                raise ValueError(
                    f"{listed_in} names record {entry.record} of {entry.file}, which has changed since: run `{again}` "
                    "again."
                )
            spans.append((path, entry.offset, entry.length))
    return spans


def _is_as_listed(path: str, entry: Entry) -> bool:
    """Return whether the bytes are the same; an image file must not have grown, but a gap may be at byte 0."""
    whole = entry.offset > 0 or not os.path.exists(path) or os.path.getsize(path) == entry.length
    whole = whole or length_at(path, entry.length) is not None
    return whole and _sha256(path, entry.offset, entry.length) == entry.sha256


def _matching(index: Index, number: int, offset: int, length: int) -> list[int]:
    """Return the samples at a span: the same bytes, bytes inside of it, or a gap around it."""
    first, stop = np.searchsorted(index.file, [number, number + 1]).tolist()
    starts, ends = index.offset[first:stop], index.offset[first:stop] + index.length[first:stop]
    inside = (offset <= starts) & (ends <= offset + length)
    around = (starts <= offset) & (offset + length <= ends) & (index.width[first:stop] == 0)
    return (first + np.flatnonzero(inside | around)).tolist()


def _refuse(index: Index, sample: int, count: int, *, folder: Path) -> None:
    number = int(index.file[sample])
    if index.class_names:
        (reason,) = _faults(index, number, sample)
    else:
        faults = list(_faults(index, number, 0))
        reason = faults[index.record(sample)] if index.record(sample) < len(faults) else ""
    if not reason:
        raise ValueError(
            f"{index.where(sample)} could not be read when it was indexed, and can be read now: touch the file, so "
            "that it is indexed again."
        )
    if count == len(index):
        raise ValueError(f"None of the {count} images can be read. The first is {index.where(sample)}: it {reason}.")
    more = f" ({count - 1} more cannot be read)" if count > 1 else ""
    raise ValueError(f"{index.where(sample)} {reason}{more}; {remedy(folder)}.")


def remedy(folder: Path) -> str:
    """Return how to train without the bad images of a folder; where one stands for an address, no list stays."""
    address = remote.address(folder)
    command = f"python -m largebatch.pack check {quote(address or str(folder))}" + " --out bad.csv" * bool(address)
    more = ", and give --data.quarantine bad.csv" if address else ""
    return f"to train without the bad images, list them by `{command}`{more}"
