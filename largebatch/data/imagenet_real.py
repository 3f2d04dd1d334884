"""ReaL labels (https://arxiv.org/abs/2006.07159): all classes that people see in each held-out image of ImageNet.

The published real.json is a list of 50,000 lists of zero-based classes, in the order of the images' numbers. 3,163 are
empty: these images do not count. Images are found by name, because a folder and TFRecords have other orders.
"""

from __future__ import annotations

import bisect
import json
import os
import re
from collections.abc import Sequence

import numpy as np

from largebatch.data.index import Index
from largebatch.data.records import FILENAME, bytes_spans, feature_spans, read_span, record_spans
from largebatch.data.scan import TAR
from largebatch.data.tars import scan_samples

WNID = re.compile(r"n\d{8}")
NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+")


def real_labels(path: str, index: Index) -> np.ndarray:
    """Return the classes of each image, filled up with -1: int64 (N, L).

    ValueError if the file is no such list, or has no image of that name.
    """
    lists = _read(path, num_classes=index.num_classes)
    order: Sequence[int] = range(index.num_classes)
    if all(map(WNID.fullmatch, index.names)) and index.names:  # ReaL numbers them in their sorted order
        order = sorted(order, key=index.names.__getitem__)
    rows = []
    for name in image_names(index):
        match = NAME.fullmatch(name)
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(lists):
            raise ValueError(
                f"{path} has no labels for the image {name!r}: expected names from ILSVRC2012_val_00000001.JPEG to "
                f"ILSVRC2012_val_{len(lists):08d}.JPEG, those of ImageNet's validation split."
            )
        rows.append([order[one] for one in lists[number - 1]])
    filled = np.full((len(rows), max(map(len, rows)) or 1), -1, dtype=np.int64)
    for row, classes in zip(filled, rows):
        row[: len(classes)] = classes
    return filled


def image_names(index: Index) -> list[str]:
    """Return the file name of each image. Raise ValueError if the records have none."""
    if index.class_names:  # image files
        return [os.path.basename(index.files[number]) for number in index.file]
    names = []
    for number, path in enumerate(index.files):
        if path.endswith(TAR):
            named = {sample.offset: f"{os.path.basename(sample.key)}.JPEG" for sample in scan_samples(path)}
            names += [named[offset] for offset in index.offset[index.file == number].tolist()]
            continue
        spans = record_spans(path)
        starts = [start for start, _ in spans]
        for offset in index.offset[index.file == number]:  # not every record: some may be in quarantine
            span = spans[bisect.bisect_right(starts, offset) - 1]
            names.append(_record_name(read_span(path, *span), path))
    return names


def _record_name(payload: bytes, path: str) -> str:
    span = feature_spans(payload).get(FILENAME)
    names = bytes_spans(payload, span) if span else []
    if len(names) != 1:
        raise ValueError(
            f"{path} does not say which image is which: pack the images again, with the feature {FILENAME}, or give "
            "the image folder as --data."
        )
    ((start, stop),) = names
    return os.path.basename(payload[start:stop].decode())


def _read(path: str, *, num_classes: int) -> list[list[int]]:
    try:
        with open(path, encoding="utf-8") as file:
            lists = json.load(file)
        is_real = isinstance(lists, list) and all(
            isinstance(classes, list) and all(isinstance(one, int) and 0 <= one < num_classes for one in classes)
            for classes in lists
        )
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"The ReaL labels {path} cannot be read: {error}.") from None
    if not is_real:
        raise ValueError(f"{path} is not a list of ReaL labels: expected lists of classes from 0 to {num_classes - 1}.")
    return lists
