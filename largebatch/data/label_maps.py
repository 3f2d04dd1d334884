"""Label maps in records: a teacher's highest scores and their classes, in each cell of a grid over an image.

The map is one more feature of the record, so the CRC covers it, too:

    token_labels/map     float16 scores (k, h, w), then uint16 classes (k, h, w), little-endian
    token_labels/shape   k, h, w

Scores are raw logits, the highest first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from largebatch.data.records import Values, bytes_spans, feature_spans, int64_values

MAP, SHAPE = "token_labels/map", "token_labels/shape"
MOST_CLASSES = 2**16  # a class is stored as uint16


def encode_map(scores: np.ndarray, ids: np.ndarray) -> Mapping[str, Values]:
    """Return the features of a map with these scores and classes (k, h, w); ValueError if they cannot be stored."""
    assert scores.shape == ids.shape and scores.ndim == 3, (scores.shape, ids.shape)
    halves = scores.astype("<f2")
    if not np.isfinite(halves).all():
        raise ValueError("the scores of its label map are not finite in half precision")
    if ids.min() < 0 or ids.max() >= MOST_CLASSES:
        raise ValueError(f"its label map has classes {ids.min()} to {ids.max()}, expected 0 to {MOST_CLASSES - 1}")
    return {MAP: [halves.tobytes() + ids.astype("<u2").tobytes()], SHAPE: list(scores.shape)}


class Found(NamedTuple):
    """The place and shape of a map in a record; all zero if there is none."""

    offset: int = 0
    k: int = 0
    height: int = 0
    width: int = 0
    num_classes: int = 0
    """the highest class in it, plus one"""


def find_map(payload: bytes) -> Found:
    """Locate the label map in a record; empty if there is none or its size does not match its shape."""
    if MAP.encode() not in payload:  # many times faster than parsing all fields
        return Found()
    try:
        spans = feature_spans(payload)
        ((start, stop),) = bytes_spans(payload, spans[MAP])
        k, height, width = int64_values(payload, spans[SHAPE])
    except (KeyError, ValueError):
        return Found()
    if min(k, height, width) < 1 or stop - start != map_bytes((k, height, width)):
        return Found()
    ids = np.frombuffer(payload, dtype="<u2", count=k * height * width, offset=(start + stop) // 2)
    return Found(start, k, height, width, int(ids.max()) + 1)


def map_bytes(shape: Sequence[int]) -> int:
    return 4 * math.prod(shape)


def decode_maps(encoded: Sequence[np.ndarray], shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return classes int32 and scores float16, both (n, k, h, w), of n maps, each in bytes."""
    maps = np.stack(encoded)
    half = maps.shape[1] // 2
    scores, ids = maps[:, :half].copy().view("<f2"), maps[:, half:].copy().view("<u2").astype(np.int32)
    return ids.reshape(-1, *shape), scores.reshape(-1, *shape)
