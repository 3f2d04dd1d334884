"""The index of a data set: where the bytes of every image lie, its size and its label.

It describes TFRecords, tars and image files (offset 0) alike. `scan` builds it, `index_file` saves and loads it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Sequence

import numpy as np

from largebatch.data.label_maps import map_bytes
from largebatch.data.records import read_span
from largebatch.files.names import listed

COLUMNS = ("file", "offset", "length", "label", "width", "height")  # of each image
MAP_COLUMNS = ("map_offset", "map_shape")  # of each label map, if there are any


def label_base(low: int, high: int, *, num_classes: int, name: str, highest: str) -> int:
    """Return 0 if labels from `low` to `high` count `num_classes` classes from 0, and 1 if they count from 1.

    Raises ValueError if they fit neither or could be either.
    """
    if (low == 0 and high < num_classes) or (low == 1 and high == num_classes):
        return low
    reason = f"the first {'or the last ' * (low == 1)}class never occurs"
    if high - min(low, 1) >= num_classes:
        reason = f"label {high} is too large (in {highest})"
    raise ValueError(
        f"The labels of {name} run from {low} to {high}, expected 0 to {num_classes - 1} or 1 to "
        f"{num_classes} for {num_classes} classes: {reason}. Check the data, or change --model.num_classes."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """The place, size and label of each of N images, in the order of the files and inside each file.

    Per image: the number of its file, width and height (int32), offset and length of its encoded bytes, label (int64).
    An image that cannot be read is 0 pixels wide and spans its record or file. Labels are zero-based after
    `number_labels` has subtracted `label_base`; `label_range` has the lowest and highest label in the files.
    With `counts_from_1` this package wrote the labels, which begin at 1, whatever occurs. `class_names` are those of
    image folders, `names` those of a model or of such records. `left_out` (M, 2) holds file and offset of the images
    that `without` removed.

    Of label maps (`label_maps`), if there are any: the offset of each (int64, 0 for an image without one), its shape k,
    h, w (int32, (N, 3)), and the highest class in any map, plus one.
    """

    files: tuple[str, ...]
    file: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    label: np.ndarray
    width: np.ndarray
    height: np.ndarray
    num_classes: int
    file_size: np.ndarray
    file_mtime_ns: np.ndarray
    label_range: tuple[int, int]
    label_base: int = 0
    counts_from_1: bool = False
    class_names: tuple[str, ...] = ()
    left_out: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    map_offset: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    map_shape: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 3), dtype=np.int32))
    map_classes: int = 0
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.file)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        return tuple(np.bincount(self.file, minlength=len(self.files)).tolist())

    @property
    def folder(self) -> str:
        shared = os.path.commonpath([os.path.dirname(path) for path in (self.files[0], self.files[-1])])
        return os.path.dirname(shared) if self.class_names and self.label[0] == self.label[-1] else shared

    def read(self, sample: int) -> bytes:
        """Return the encoded bytes of an image. Raises OSError if its file ends before them."""
        return read_span(self.files[self.file[sample]], int(self.offset[sample]), int(self.length[sample]))

    def where(self, sample: int) -> str:
        return f"{self.files[self.file[sample]]}, record {self.record(sample)} (at byte {self.offset[sample]})"

    def record(self, sample: int) -> int:
        """Return the number of a sample in its file, in which images that were left out count."""
        file, offset = self.file[sample], self.offset[sample]
        before = (self.left_out[:, 0] == file) & (self.left_out[:, 1] < offset)
        return sample - int(np.searchsorted(self.file, file)) + int(before.sum())

    def without(self, samples: Sequence[int]) -> Index:
        kept = np.ones(len(self), dtype=bool)
        kept[np.asarray(samples, dtype=np.int64)] = False
        names = COLUMNS + MAP_COLUMNS * bool(len(self.map_offset))
        columns = {name: getattr(self, name)[kept] for name in names}
        removed = np.stack([self.file[~kept], self.offset[~kept]], axis=1).astype(np.int64)
        return dataclasses.replace(self, **columns, left_out=np.concatenate([self.left_out, removed]))

    def check_maps(self, num_classes: int) -> None:
        """Raise ValueError unless each image has a label map, of one shape, with at most `num_classes` classes."""
        missing = np.flatnonzero(self.map_offset == 0) if len(self.map_offset) else np.arange(len(self))
        if len(missing):
            raise ValueError(
                f"--data.token_labels is true: labels for {len(self):,} images expected, "
                f"{len(self) - len(missing):,} found, first missing {self.where(int(missing[0]))}; "
                "`python -m largebatch.pack token-labels` adds them."
            )
        other = np.flatnonzero((self.map_shape != self.map_shape[0]).any(axis=1))
        if len(other):
            raise ValueError(
                f"The label maps have different shapes: {self.map_shape[0].tolist()} in {self.where(0)}, "
                f"{self.map_shape[other[0]].tolist()} in {self.where(int(other[0]))}: make all with one teacher."
            )
        if self.map_classes > num_classes:
            raise ValueError(
                f"The label maps have class {self.map_classes - 1}, the model {num_classes} classes: set "
                "--model.num_classes to those of the teacher."
            )

    def spans(self, samples: np.ndarray, *, with_maps: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return start and stop of the image, or of the image with its map, in the files of samples."""
        start, stop = self.offset[samples], self.offset[samples] + self.length[samples]
        if with_maps:
            start = np.minimum(start, self.map_offset[samples])
            stop = np.maximum(stop, self.map_offset[samples] + map_bytes(self.map_shape[0].tolist()))
        return start, stop

    def moved(self, old: str, new: str) -> Index:
        files = tuple(os.path.join(new, os.path.relpath(path, old)) for path in self.files)
        return dataclasses.replace(self, files=files) if old != new else self

    def digest(self) -> str:
        """Return sixteen digits that identify the images, their order and their labels."""
        digest = hashlib.sha256()
        for column in (self.file, self.offset, self.length, self.label):
            digest.update(column.tobytes())
        return digest.hexdigest()[:16]

    def number_labels(self, *, num_classes: int = 0, like: Index | None = None) -> Index:
        """Return the index with zero-based labels; ValueError if they do not fit `num_classes`. 0: the labels decide.

        The labels of the training split, `like`, tell whether they count from 0 or 1, because a held-out split may lack
        the first class.
        """
        low, high = span = (like or self).label_range
        if self.counts_from_1:
            num_classes = num_classes or max(high, len(self.names))
            low, high = 1, max(high, num_classes)
        num_classes = num_classes or (high if low else high + 1)
        name = self.folder
        base = label_base(low, high, num_classes=num_classes, name=name, highest=(like or self)._highest())
        label = self.label + (self.label_base - base)
        if label.min() < 0 or label.max() >= num_classes:
            raise ValueError(
                f"{name} has labels that the training split has not, which run from {low} to {high}; the highest is in "
                f"{self._highest()}."
            )
        return dataclasses.replace(self, label=label, label_base=base, label_range=span, num_classes=num_classes)

    def _highest(self) -> str:
        return self.where(int(self.label.argmax()))

    def _refuse_gaps(self) -> None:
        """Raise ValueError if most labels up to the highest, which is then probably a mistake, do not occur."""
        seen = len(np.unique(self.label))
        if 2 * seen < self.num_classes:
            raise ValueError(
                f"{self.folder} has {seen} labels, and the highest, {self.label_range[1]} in {self._highest()}, would "
                f"make {self.num_classes} classes of them: correct it, or, if it is right, set --model.num_classes "
                f"{self.num_classes}."
            )

    def by_names(self, own: Sequence[str], names: Sequence[str]) -> Index:
        """Return the index with labels that number a model's classes, `names`, instead of `own`.

        Raises ValueError if the model does not know a class that has images, or has two of that name.
        """
        present, known, ours = {own[label] for label in np.unique(self.label)}, Counter(names), Counter(own)
        wrong = sorted(name for name in present if known[name] != 1 or ours[name] != 1)
        if wrong:
            what = "two classes of one name" if known[wrong[0]] else "classes that the model does not know"
            raise ValueError(
                f"{self.folder} has {what}: {listed(wrong)}; the model has "
                f"{listed(names)}. Leave their images out, or give their folders, or their entries in classes.json, "
                "the names of the model's classes."
            )
        number = {name: k for k, name in enumerate(names)}
        label = np.array([number.get(name, -1) for name in own], dtype=self.label.dtype)[self.label]
        span, names = (0, len(names) - 1), tuple(names)
        numbered = dataclasses.replace(self, label=label, label_base=0, counts_from_1=False, label_range=span)
        return dataclasses.replace(numbered, num_classes=len(names), names=names)

    def for_classes(self, num_classes: int) -> Index:
        """Return the index for a model with `num_classes` outputs; 0: as many as the images have, two or more."""
        named = len(self.class_names)
        index = self if named else self.number_labels(num_classes=num_classes)
        if named == 1 or not num_classes and index.num_classes == 1:
            only = self.class_names[0] if named else f"label {self.label_range[0]}"
            raise ValueError(f"{self.folder} has one class, {only}: expected two or more to tell apart.")
        if not named and not num_classes and not self.names:
            index._refuse_gaps()
        if named and num_classes not in (0, named):
            raise ValueError(
                f"{self.folder} has {named} classes, the model {num_classes}: give images of {num_classes} classes, or "
                f"train a new model with --model.num_classes {named}."
            )
        return index
