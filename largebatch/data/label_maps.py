"""Label maps in records: a teacher's highest scores, and their classes, in each cell of a grid over an image.

The map is one more feature beside the image, so that both are read at once and one CRC covers both:

    token_labels/map     float16 scores (k, h, w), then uint16 classes (k, h, w), little-endian
    token_labels/shape   k, h, w

Scores are raw logits, the highest first. What a map means for a training image is in `token_labels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from largebatch.data.records import Values, bytes_spans, feature_spans, int64_values

MAP, SHAPE = "token_labels/map", "token_labels/shape"
MOST_CLASSES = 2**16  # that uint16 numbers


def encode_map(scores: np.ndarray, ids: np.ndarray) -> Mapping[str, Values]:
    """The features of a map: scores and classes (k, h, w). ValueError if they are not finite or not classes."""
    assert scores.shape == ids.shape and scores.ndim == 3, (scores.shape, ids.shape)
    halves = scores.astype("<f2")
    if not np.isfinite(halves).all():
        raise ValueError("the scores of its label map are not finite in half precision")
    if ids.min() < 0 or ids.max() >= MOST_CLASSES:
        raise ValueError(f"its label map has classes {ids.min()} to {ids.max()}, expected 0 to {MOST_CLASSES - 1}")
    return {MAP: [halves.tobytes() + ids.astype("<u2").tobytes()], SHAPE: list(scores.shape)}


class Found(NamedTuple):
    """A map in a record; all zero where there is none."""

    offset: int = 0
    k: int = 0
    height: int = 0
    width: int = 0
    num_classes: int = 0
    """the highest class in it, plus one"""


def find_map(payload: bytes) -> Found:
    """Where the map lies in a record. One that does not fit its shape is none."""
    if MAP.encode() not in payload:  # many times faster than reading all fields
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
    """The bytes of a map of shape (k, h, w)."""
    return 4 * math.prod(shape)


def decode_maps(encoded: Sequence[np.ndarray], shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Classes int32 and scores float16 (n, k, h, w) of n maps, each uint8, of shape (k, h, w)."""
    maps = np.stack(encoded)
    half = maps.shape[1] // 2
    scores, ids = maps[:, :half].copy().view("<f2"), maps[:, half:].copy().view("<u2").astype(np.int32)
    return ids.reshape(-1, *shape), scores.reshape(-1, *shape)
