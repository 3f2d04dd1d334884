"""Images that cannot be decoded: found once by `find_bad`, kept in a list, left out of every training.

The list is a CSV file, quarantine.csv in the data folder unless told otherwise. An entry names a span of bytes (the
image, or its whole record where the image is not to be found in it) and their SHA-256. So a list tells when it is
no longer about the files beside it, and every process that reads the same list and files leaves out the same images.
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

import numpy as np
from PIL import Image

from largebatch.data.index import Index, find_image, image_size
from largebatch.data.records import WRONG_CRC, read_span, scan_records
from largebatch.files import atomic_file

NAME = "quarantine.csv"
IMAGES_PER_TASK = 256  # image files; a shard is one task


@dataclasses.dataclass(frozen=True)
class Entry:
    """One image of a split: its file as seen from the data folder, its record there, its bytes, and what is wrong."""

    split: str
    file: str
    record: int
    offset: int
    length: int
    sha256: str
    reason: str


# -- finding them ------------------------------------------------------------------------------------------------


def find_bad(index: Index, *, folder: Path, split: str, num_threads: int) -> Iterator[tuple[int, list[Entry]]]:
    """Decodes every image of `index`, which describes `split` of the data folder `folder`.

    Yields, file after file, how many images are done so far and the entries of those in the file that are bad.
    """
    sizes = index.shard_sizes
    firsts = np.cumsum((0, *sizes)).tolist()

    def examine(numbers: range) -> tuple[int, list[Entry]]:
        entries = []
        for number in numbers:
            faults = enumerate(_faults(index, number, firsts[number]), start=firsts[number])
            bad = [(sample, reason) for sample, reason in faults if reason]
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
    """What is wrong with each image of a file, the first of which is sample `first`; empty where nothing is."""
    path = index.files[number]
    if index.class_names:  # a file is an image
        yield _fault(lambda: read_span(path, 0, int(index.length[first])))
        return
    for _, payload, intact in scan_records(path):
        yield _fault(lambda: _image(payload)) if intact else WRONG_CRC


def _image(payload: bytes) -> bytes:
    start, stop, _ = find_image(payload)
    return payload[start:stop]


def _fault(read: Callable[[], bytes]) -> str:
    try:
        data = read()
        image_size(io.BytesIO(data))
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except Exception as error:  # a damaged image may raise nearly anything
        return str(error) or type(error).__name__
    return ""


def _entry(index: Index, sample: int, reason: str, *, folder: Path, split: str) -> Entry:
    path, offset, length = index.files[index.file[sample]], int(index.offset[sample]), int(index.length[sample])
    file = os.path.relpath(path, folder)
    sha256 = _sha256(path, offset, length)
    return Entry(split, file, index.record(sample), offset, length, sha256, " ".join(reason.split()))


def _sha256(path: str, offset: int, length: int) -> str:
    """Of the bytes, or nothing where they cannot be read."""
    try:
        return hashlib.sha256(read_span(path, offset, length)).hexdigest()
    except OSError:
        return ""


# -- the list ----------------------------------------------------------------------------------------------------


def save(path: Path, entries: Sequence[Entry]) -> None:
    """Writes the list, sorted, atomically."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Entry))
    writer.writerows(dataclasses.astuple(entry) for entry in sorted(entries, key=dataclasses.astuple))
    with atomic_file(path) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))


def load(path: Path) -> list[Entry]:
    """Reads what `save` wrote; ValueError naming the line that is none of it."""
    entries: list[Entry] = []
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        try:
            for row in csv.DictReader(file, strict=True):
                record, offset, length = (int(row[name]) for name in ("record", "offset", "length"))
                entries.append(
                    Entry(row["split"], row["file"], record, offset, length, row["sha256"], row["reason"])
                )
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            raise ValueError(
                f"{path}: entry {len(entries) + 1} is not as `largebatch.pack check` writes it ({error}): run it again."
            ) from error
    return entries


def leave_out(index: Index, entries: Sequence[Entry], *, folder: Path, split: str, listed_in: Path) -> Index:
    """`index` without what the entries of its split name.

    ValueError if they are about other files than these, if nothing is left, or if what is left has an image that
    could not be read when it was indexed.
    """
    listed = listed_spans(entries, folder=folder, split=split, listed_in=listed_in)
    numbers = {path: number for number, path in enumerate(index.files)} if listed else {}
    samples = []
    for path, offset, length in listed:
        found = _matching(index, numbers[path], offset, length) if path in numbers else []
        if len(found) != 1:
            raise ValueError(f"{listed_in} names byte {offset} of {path}, where no {split} image is: delete the list.")
        samples += found
    if samples and len(set(samples)) == len(index):
        raise ValueError(f"{listed_in} names all {len(index)} {split} images: nothing is left of them.")
    kept = index.without(samples) if samples else index
    damaged = np.flatnonzero(kept.width == 0)
    if len(damaged):
        _refuse(kept, int(damaged[0]), len(damaged), folder=folder)
    return kept


def listed_spans(
    entries: Sequence[Entry], *, folder: Path, split: str, listed_in: Path
) -> list[tuple[str, int, int]]:
    """File, offset and length of what the entries of a split name; ValueError if those bytes are not what they were."""
    spans = []
    for entry in entries:
        path = str(folder / entry.file)
        if entry.split == split:
            if not _is_as_listed(path, entry):
                raise ValueError(
                    f"{listed_in} names record {entry.record} of {entry.file}, which has changed since: run "
                    f"`python -m largebatch.pack check {folder}` again."
                )
            spans.append((path, entry.offset, entry.length))
    return spans


def _is_as_listed(path: str, entry: Entry) -> bool:
    """Whether the bytes are the same; an image file (records begin later) may also have grown."""
    whole = entry.offset > 0 or not os.path.exists(path) or os.path.getsize(path) == entry.length
    return whole and _sha256(path, entry.offset, entry.length) == entry.sha256


def _matching(index: Index, number: int, offset: int, length: int) -> list[int]:
    """The samples of a file at a span: the same bytes, or either is the whole record of the other."""
    first, stop = np.searchsorted(index.file, [number, number + 1]).tolist()
    starts, ends = index.offset[first:stop], index.offset[first:stop] + index.length[first:stop]
    inside = (offset <= starts) & (ends <= offset + length)
    around = (starts <= offset) & (offset + length <= ends) & (index.width[first:stop] == 0)
    return (first + np.flatnonzero(inside | around)).tolist()


def _refuse(index: Index, sample: int, count: int, *, folder: Path) -> None:
    """Says what is wrong with the first of `count` damaged samples."""
    number = int(index.file[sample])
    if index.class_names:
        (reason,) = _faults(index, number, sample)
    else:
        reason = list(_faults(index, number, 0))[index.record(sample)]
    if not reason:
        raise ValueError(
            f"{index.where(sample)} could not be read when it was indexed, and can be now: touch it, so that it is "
            "indexed again."
        )
    more = f" ({count - 1} more cannot be read)" if count > 1 else ""
    raise ValueError(
        f"{index.where(sample)} {reason}{more}; to train without what is bad, list it by `python -m largebatch.pack "
        f"check {folder}`."
    )
