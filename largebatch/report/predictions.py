"""RUN/predictions.csv: the answer of a model to each held-out image; its worst errors, and classes that it confuses.

    python -m largebatch.validate RUN --predictions RUN/predictions.csv
"""

import base64
import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from PIL import Image

from largebatch.config import TrainConfig
from largebatch.data.index import Index
from largebatch.data.sources import class_names, open_source
from largebatch.files.table import write_table

MOST_CLASSES = 20  # of a matrix that can be read
SIDE = 112  # pixels of a small image


class Answer(NamedTuple):
    """The answer of a model to one image: the first class, its probability, and the loss."""

    prediction: int
    confidence: float
    loss: float


@dataclass(frozen=True)
class Prediction:
    """A row of the table. where: file and record of the image."""

    sample: int
    label: int
    prediction: int
    confidence: float
    loss: float
    label_name: str
    prediction_name: str
    where: str


def write(path: Path, index: Index, answers: Mapping[int, Answer]) -> None:
    """Write a row for each image of the index, in its order."""
    names = class_names(index) or tuple(map(str, range(index.num_classes)))
    rows = []
    for sample, answer in sorted(answers.items()):
        label, where = int(index.label[sample]), index.where(sample)
        rows.append(Prediction(sample, label, *answer, names[label], names[answer.prediction], where))
    write_table(path, [field.name for field in fields(Prediction)], map(asdict, rows))


def read(path: Path) -> list[Prediction]:
    """Return the rows of a table, none if there is no file; ValueError for another file."""
    if not path.is_file():
        return []
    kinds: dict[str, Any] = {field.name: field.type for field in fields(Prediction)}
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        reader = csv.DictReader(file)
        try:
            if reader.fieldnames == [*kinds]:
                return [Prediction(**{name: kind(cells[name]) for name, kind in kinds.items()}) for cells in reader]
        except (ValueError, TypeError, csv.Error):  # cells that are no numbers, or missing
            pass
    raise ValueError(f"{path} is not a table of predictions: make it with validate --predictions {quote(str(path))}.")


def confusion(rows: Sequence[Prediction]) -> tuple[list[str], list[list[int]]]:
    """Return the names of classes, and the number of images of each (row) that were taken for each (column).

    Of more than MOST_CLASSES, only those with the most errors.
    """
    errors = Counter[int]()
    for row in rows:
        if row.prediction != row.label:
            errors.update([row.label, row.prediction])
    names = {row.label: row.label_name for row in rows} | {row.prediction: row.prediction_name for row in rows}
    shown = sorted(names)
    if len(shown) > MOST_CLASSES:
        shown = sorted(label for label, _ in errors.most_common(MOST_CLASSES))
    counts = Counter((row.label, row.prediction) for row in rows)
    return [names[label] for label in shown], [[counts[true, said] for said in shown] for true in shown]


def worst(rows: Sequence[Prediction], count: int) -> list[Prediction]:
    """Return the wrong answers with the highest loss, the highest first."""
    wrong = [row for row in rows if row.prediction != row.label]
    return sorted(wrong, key=lambda row: -row.loss)[:count]


def small_images(config: TrainConfig, rows: Sequence[Prediction]) -> list[str]:
    """Return the images as small JPEGs in `data:` addresses; none if they are not here any more."""
    data = config.data
    try:
        index = open_source(
            data.path, split="validation", listed=data.quarantine, allow_incomplete=data.allow_incomplete
        )
        if any(row.sample >= len(index) or index.where(row.sample) != row.where for row in rows):
            return []
        return [_small(index, row.sample) for row in rows]
    except (OSError, ValueError):
        return []


def _small(index: Index, sample: int) -> str:
    image = Image.open(io.BytesIO(index.read(sample))).convert("RGB")
    image.thumbnail((SIDE, SIDE))
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(packed.getvalue()).decode()
