"""Tells if data are complete: no shard is missing, empty or doubled, no record is lost, and each class has images.

The names of the shards announce their number (train-00000-of-00004), and a file of `largebatch.pack` the number of
images. Without both, lost records cannot be noticed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from largebatch.data.index import Index
from largebatch.data.records import length_at, read_span
from largebatch.data.remote import open_file
from largebatch.data.shards import shard_images
from largebatch.files.names import SHOWN, listed

PLANS = ("packing.json", "token_labels.json")  # of `largebatch.pack` and of its token-labels
COMPARED_BYTES = 2**16  # at each end of two shards, before all of their bytes


class Recorded(NamedTuple):
    """The number of images of a split, in the file `name`, and of its shards; 0: they may be of any size."""

    name: str
    images: int
    shards: int


def why_incomplete(index: Index, *, folder: Path, split: str) -> str:
    """Return the first reason why a split is not complete, and the cure, or "".

    `index` has all records, those in quarantine included; `folder` holds the data.
    """
    if index.class_names:
        return empty_classes(index.label, index.class_names, folder=folder) if split == "train" else ""
    return next(filter(None, _faults(index, folder, split)), "")


def _faults(index: Index, folder: Path, split: str) -> Iterator[str]:
    places = list(dict.fromkeys((os.path.dirname(index.files[0]), str(folder))))
    recorded = next(_recorded(places, split), None)
    series = series_of(index.files)
    yield from (one.missing(split) for one in series)
    yield _doubled(index)
    yield from (one.spare(split) for one in series)
    yield _lost(index, recorded, split) if recorded else _empty(index, split)


def empty_classes(labels: Sequence[int] | np.ndarray, names: Sequence[str], *, folder: Path) -> str:
    """Return a sentence about classes without training images, or ""."""
    empty = [name for name, count in zip(names, np.bincount(labels, minlength=len(names))) if not count]
    clause = (
        f"{folder} has no training images of {len(empty)} of its {len(names)} classes ({listed(empty)}): "
        "copy them, or remove the folders that are no classes"
    )
    return clause if empty else ""


# -- the names ---------------------------------------------------------------------------------------------------


@dataclass
class Series:
    beginning: str
    announced: str
    suffix: str
    shards: list[tuple[Path, str]] = field(default_factory=list)
    """each with the digits of its number"""

    @property
    def expected(self) -> range:
        """The numbers of a complete series; some series count from 1."""
        numbers = {int(digits) for _, digits in self.shards}
        first = int(int(self.announced) in numbers and 0 not in numbers)
        return range(first, first + int(self.announced))

    def missing(self, split: str) -> str:
        there, expected = {int(digits) for _, digits in self.shards}, self.expected
        count, width = len(expected) - len(there.intersection(expected)), min(len(digits) for _, digits in self.shards)
        absent = itertools.islice((number for number in expected if number not in there), SHOWN)
        names = [f"{self.beginning}{number:0{width}}-of-{self.announced}{self.suffix}" for number in absent]
        clause = (
            f"{self.shards[0][0].parent} lacks {count} of the {len(expected)} {split} shards that their names "
            f"announce ({listed(names, count)}): copy what is missing"
        )
        return clause if count else ""

    def spare(self, split: str) -> str:
        """Return a clause about shards whose number is not announced or there twice, or ""."""
        expected, seen, spare = self.expected, set(), []
        for path, digits in self.shards:
            if int(digits) not in expected or int(digits) in seen:
                spare.append(path.name)
            seen.add(int(digits))
        clause = (
            f"{self.shards[0][0].parent} has {len(self.shards)} {split} shards where their names announce "
            f"{len(expected)} ({listed(spare)}): remove what does not belong there"
        )
        return clause if spare else ""


def series_of(files: Sequence[str]) -> list[Series]:
    found: dict[tuple[str, str], Series] = {}
    for path in map(Path, files):
        if match := re.fullmatch(r"(.*?)(\d+)-of-(\d+)(\.[^.]*)?", path.name):
            series = found.setdefault((match[1], match[3]), Series(match[1], match[3], match[4] or ""))
            series.shards.append((path, match[2]))
    return list(found.values())


# -- the records -------------------------------------------------------------------------------------------------


def _recorded(places: Sequence[str], split: str) -> Iterator[Recorded]:
    """Yield the numbers of images in the files beside the shards. Raise ValueError for a damaged file."""
    for file in (Path(place, name) for place in places for name in PLANS):
        if not file.is_file():
            continue
        try:
            plan = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{file} is damaged ({error}): copy it again, or remove it if the shards are whole."
            ) from error
        images, shards = ([plan.get(key) for key in ("images", "shards")]) if isinstance(plan, dict) else (None, None)
        if isinstance(images, dict) and isinstance(images.get(split), int):
            number = shards.get(split) if isinstance(shards, dict) else 0
            yield Recorded(file.name, images[split], number if isinstance(number, int) else 0)
        elif isinstance(images, int) and split == "train":
            yield Recorded(file.name, images, 0)


def _lost(index: Index, recorded: Recorded, split: str) -> str:
    """Compare the number of images with the recorded one, for each shard if its size is known.

    A gap counts as one image and may be several, so no shard with a gap is short.
    """
    sizes, counted = index.shard_sizes, len(index)
    if counted == recorded.images:
        return ""
    gaps = _files_with_gaps(index)
    expected = [0] * len(sizes)
    if recorded.shards == len(sizes):
        numbers = range(len(sizes))
        expected = [len(shard_images(k, count=recorded.images, num_shards=recorded.shards)) for k in numbers]
    wrong = [k for k, size in enumerate(sizes) if any(expected) and size != expected[k] and k not in gaps]
    if gaps and not wrong and counted < recorded.images:
        return ""
    which = [f"{os.path.basename(index.files[k])} has {sizes[k]:,} of {expected[k]:,}" for k in wrong]
    return (
        f"{Path(index.files[0]).parent} has {counted:,} {split} images, and {recorded.name} says {recorded.images:,}"
        f"{f' ({listed(which)})' if which else ''}: copy the shards again"
    )


def _files_with_gaps(index: Index) -> set[int]:
    """Return the files with a gap: an unreadable row without a record's length before it."""
    gaps = set()
    for k in np.flatnonzero(index.width == 0).tolist():
        number, offset = int(index.file[k]), int(index.offset[k])
        if offset < 12 or length_at(index.files[number], offset - 12) != index.length[k]:
            gaps.add(number)
    return gaps


def _empty(index: Index, split: str) -> str:
    sizes = index.shard_sizes
    empty = [os.path.basename(path) for path, size in zip(index.files, sizes) if not size]
    clause = (
        f"{Path(index.files[0]).parent} has {len(empty)} of {len(sizes)} {split} shards without a record "
        f"({listed(empty)}): copy what is empty again"
    )
    return clause if empty else ""


def _doubled(index: Index) -> str:
    """Compare shards byte by byte if lengths and labels of their images, and their ends, are the same."""
    alike: dict[bytes, list[int]] = defaultdict(list)
    starts = np.searchsorted(index.file, np.arange(len(index.files) + 1)).tolist()
    for number, (start, stop) in enumerate(zip(starts, starts[1:])):
        if start < stop:
            rows = (index.offset[start:stop], index.length[start:stop], index.label[start:stop])
            alike[hashlib.sha256(b"".join(column.tobytes() for column in rows)).digest()].append(number)
    for numbers in alike.values():
        seen: dict[tuple[bytes, ...], str] = {}
        for number in numbers if len(numbers) > 1 else []:
            path = index.files[number]
            size = int(index.file_size[number])
            count = min(size, COMPARED_BYTES)
            ends = tuple(hashlib.sha256(read_span(path, offset, count)).digest() for offset in (0, size - count))
            other = seen.setdefault(ends, path)
            if other != path and _same_bytes(path, other):
                return f"{path} holds the same images as {os.path.basename(other)}: remove one of them"
    return ""


def _same_bytes(one: str, other: str) -> bool:
    with open_file(one) as a, open_file(other) as b:
        parts = (iter(functools.partial(file.read, COMPARED_BYTES), b"") for file in (a, b))
        return all(x == y for x, y in itertools.zip_longest(*parts))
