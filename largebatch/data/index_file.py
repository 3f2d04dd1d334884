"""The file that keeps an index: save it, load it, and check it against itself and against the data.

A damaged index would silently give wrong bytes or labels, so `load` checks what can be checked cheaply.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from largebatch.data.index import COLUMNS, Index
from largebatch.files import atomic_file

VERSION = 2  # of the index files
SOME = 64  # files by which two hosts find out that they see the same file system
NAMES = ("utf-8", "surrogateescape")  # a file name is bytes, which need not be UTF-8


def save(index: Index, path: str | Path) -> None:
    assert not index.names and not index.counts_from_1, "these are known of the folder, not of its files"
    known = {"names", "counts_from_1"}
    arrays = {field.name: getattr(index, field.name) for field in dataclasses.fields(index) if field.name not in known}
    for name in ("files", "class_names"):  # as bytes: an array of strings would be as wide as its longest
        arrays[name] = np.frombuffer("\0".join(arrays[name]).encode(*NAMES), dtype=np.uint8)
    with atomic_file(path) as file:
        np.savez(file, version=np.int64(VERSION), **{f"index_{name}": arrays[name] for name in arrays})


def load(path: str | Path) -> Index:
    """Read what `save` wrote. Raises ValueError if the file is damaged."""
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
        index = Index(**arrays)
        reason = why_damaged(index) if version == VERSION else f"its version is {version}, not {VERSION}"
    except Exception as error:  # a damaged archive may raise anything
        reason = str(error)
    if reason:
        raise ValueError(f"The index {path} is damaged ({reason}): delete it, it is built again.")
    return index


def why_damaged(index: Index) -> str:
    if len({len(getattr(index, name)) for name in COLUMNS}) != 1 or not len(index.file):
        return "its columns have different lengths or are empty"
    if any(vars(index)[name].dtype.kind != "i" or vars(index)[name].ndim != 1 for name in (*COLUMNS, "file_size")):
        return "its columns are no whole numbers"
    if (len(index.map_offset), len(index.map_shape)) not in ((0, 0), (len(index), len(index))):
        return "its label maps are not those of its images"
    if len({len(index.files), len(index.file_size), len(index.file_mtime_ns)}) != 1:
        return "its list of files is incomplete"
    steps = np.diff(index.file)
    if (steps < 0).any() or index.file[0] < 0 or index.file[-1] >= len(index.files):
        return "its file numbers are out of order"
    ends, shortest, room = index.offset + index.length, index.width > 0, index.file_size[index.file] - index.offset
    if (index.offset < 0).any() or (index.length < shortest).any() or (index.length > room).any():
        return "an image lies outside its file"
    if (index.width < 0).any() or ((index.height > 0) != shortest).any():
        return "an image has no size"
    labels, (lowest, highest) = index.label[shortest] + index.label_base, index.label_range
    if len(labels) and not (lowest <= labels.min() and labels.max() <= highest):
        return "its labels are outside their range"
    if ((index.offset[1:] < ends[:-1]) & (steps == 0)).any():
        return "its offsets are not in order"
    return ""


def why_stale(index: Index, files: Sequence[str], class_names: Sequence[str] = ()) -> str:
    """Return why the index does not describe `files` and their classes as they are now, or ""."""
    if tuple(files) != index.files:
        listed, there = next((a, b) for a, b in zip_longest(index.files, files, fillvalue="none") if a != b)
        return f"of {len(index.files)} files that it lists and {len(files)} that are there, {listed} and {there} differ"
    if tuple(class_names) != index.class_names:
        return f"the class folders have changed: {len(index.class_names)} were there, and {len(class_names)} are now"
    for path, size, mtime in zip(index.files, index.file_size.tolist(), index.file_mtime_ns.tolist()):
        status = os.stat(path)
        if (status.st_size, status.st_mtime_ns) != (size, mtime):
            return f"{path} has changed"
    return ""


# -- on other hosts --------------------------------------------------------------------------------------------------


def file_numbers(index: Index) -> list[int]:
    return [os.stat(path).st_ino for path in index.files[:: max(1, len(index.files) // SOME)]]


def why_other_files(index: Index, numbers: Sequence[int]) -> str:
    """Return why the files on this host are not those of the index, or "".

    numbers: `file_numbers` of the host that made the index; the same ones mean one file system. A copy has the same
    sizes, and may have other times.
    """
    try:
        if file_numbers(index) == numbers:
            return ""
        for path, expected in zip(index.files, index.file_size.tolist()):
            if (size := os.stat(path).st_size) != expected:
                return f"{path} has {size:,} bytes here, and {expected:,} on the host of rank 0"
    except OSError as error:
        return f"{error.filename}, which the host of rank 0 has, cannot be read here: {error.strerror}"
    return ""
