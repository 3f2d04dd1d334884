"""Reads Parquet files as they lie on the Hugging Face hub: a column of images, as bytes, and one of labels.

    train-00000-of-00040.parquet, validation-00000-of-00002.parquet, or test-..., in the folder or its folder data
    train/0000.parquet, validation/0000.parquet, ...

Images in compressed pages have no address, so they are written once as TFRecords, from one row group after another.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from largebatch.data.remote import open_file
from largebatch.data.shard_check import series_of
from largebatch.data.shards import Images

IMAGES, LABELS = ("image", "img"), ("label", "labels", "fine_label")  # the names that are taken among several columns
BLOCK = 2**20  # bytes of a request at an address
THREADS = min(8, os.cpu_count() or 1)


def split_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the sorted files of a split, of the first of its names that has some; of each folder one look."""
    found = _listed(folder)
    for inner in [name for name in ("data", *names) if name in found]:
        found += [f"{inner}/{name}" for name in _listed(folder / inner)]
    files = sorted(name for name in found if name.endswith(".parquet"))
    for name in names:
        for form in (f"{name}/.*", rf"{name}(-[^/]*)?\.parquet", rf"data/{name}(-[^/]*)?\.parquet"):
            if these := [folder / file for file in files if re.fullmatch(form, file)]:
                return these
    return []


def _listed(folder: Path) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


def parquet_images(folder: Path, names: Sequence[str], numbered: Sequence[Path]) -> Images:
    """Return one split. Raise ValueError, with one sentence, for a file that is none, or has other columns.

    numbered: the files of all splits, whose labels begin at 0 or 1 alike.
    """
    files = split_files(folder, names)
    for one in series_of([re.sub(r"(-of-\d+)-[0-9a-f]+(?=\.parquet$)", r"\1", str(file)) for file in files]):
        if reason := one.missing(names[0]):
            raise ValueError(f"{reason}.")
    tables = [_Table(file) for file in files]
    first = tables[0]
    for table in tables:
        if (table.image, table.label) != (first.image, first.label):
            raise ValueError(f"{table.path} and {first.path} have their images or labels in different columns.")
    labels = _labels(tables)
    if not len(labels) or labels.min() < 0:
        what = f"has label {labels.min()}, expected 0 or more" if len(labels) else "has no rows"
        raise ValueError(f"{folder} {what} in its {names[0]} split: take another one, or files with labels.")
    groups = [(table, group) for table in tables for group in range(len(table.starts) - 1)]
    starts = np.cumsum([0, *(table.starts[group + 1] - table.starts[group] for table, group in groups)])
    read = functools.lru_cache(THREADS)(_Table.images)  # a thread writes one row group after the other

    def encoded(k: int) -> bytes:
        number = int(np.searchsorted(starts, k, side="right")) - 1
        table, group = groups[number]
        image = read(table, group)[k - int(starts[number])].as_py()
        if isinstance(image, dict):
            image = image["bytes"]
        if not image:
            row = k - int(starts[number]) + table.starts[group]
            raise ValueError(f"{table.path} has no bytes in {table.image} of row {row}: write the images into it.")
        return image

    counts_from_1 = not first.classes and labels.min() >= 1 and _labels(map(_Table, numbered)).min() == 1
    return Images((labels - counts_from_1).tolist(), encoded, classes=first.classes)


def _labels(tables: Iterable[_Table]) -> np.ndarray:
    with ThreadPoolExecutor(THREADS) as pool:
        return np.concatenate(list(pool.map(_Table.labels, tables)))


class _Table:
    """A file: its columns of images and labels, and the first row of each row group, and the number of rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import pyarrow
        except ImportError:
            raise ValueError(f"{path} needs the package pyarrow: `pip install 'largebatch[parquet]'`.") from None
        with self._open() as file:
            self.metadata, schema = file.metadata, file.schema_arrow
        sizes = [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]
        self.starts = np.cumsum([0, *sizes]).tolist()
        kinds = pyarrow.types

        def has_bytes(kind: Any) -> bool:
            if kinds.is_struct(kind):
                return any(field.name == "bytes" and has_bytes(field.type) for field in kind)
            return kinds.is_binary(kind) or kinds.is_large_binary(kind)

        images = [field.name for field in schema if has_bytes(field.type)]
        numbers = [field.name for field in schema if kinds.is_integer(field.type)]
        classes = {name: _class_names(schema.metadata or {}, name) for name in numbers}
        self.image = self._choose("images", IMAGES, schema.names, images)
        # Other numbers may be an id, or the size of the image.
        self.label = self._choose("labels", LABELS, schema.names, [n for n in numbers if n in LABELS or classes[n]])
        self.classes = classes[self.label]

    @contextmanager
    def _open(self) -> Iterator[Any]:
        from pyarrow import ArrowException, parquet

        with open_file(self.path, block=BLOCK) as file:
            try:
                yield parquet.ParquetFile(file, metadata=getattr(self, "metadata", None))
            except (ArrowException, OSError) as error:
                reason = " ".join(str(error).split()).rstrip(".")
                raise ValueError(f"{self.path} cannot be read as Parquet ({reason:.200}): copy it again.") from None

    def _choose(self, what: str, names: Sequence[str], columns: Sequence[str], fitting: Sequence[str]) -> str:
        named = [name for name in names if name in columns]
        found = [name for name in named if name in fitting] if named else fitting
        if not found or len(found) > 1 and not named:
            has = f"columns that may be {what}: {', '.join(found)}" if found else f"no column of {what}"
            kind = "bytes, or a struct with bytes" if what == "images" else "whole numbers"
            raise ValueError(f"{self.path} has {has}; expected one of {kind} that is called {' or '.join(names)}.")
        return found[0]

    def labels(self) -> np.ndarray:
        with self._open() as file:
            column = file.read(columns=[self.label]).column(0)
        if column.null_count:
            raise ValueError(f"{self.path} has {column.null_count} rows without a {self.label}: remove them.")
        return column.to_numpy().astype(np.int64)

    def images(self, group: int) -> Any:
        with self._open() as file:
            return file.read_row_group(group, columns=[self.image]).column(0)


def _class_names(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...]:
    """Return the names of the classes as the hub writes them; () without."""
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()
