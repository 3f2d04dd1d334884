"""ReaL labels: found by the image's name in folders and records, counted as timm counts them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import zoo._torchvision  # noqa: F401  (before timm)
from largebatch.data.imagenet_real import image_names, real_labels
from largebatch.data.index import Index
from largebatch.data.records import FILENAME, IMAGE, LABEL, encode_example, write_records
from largebatch.data.sources import open_source
from largebatch.evaluation import count_listed

CLASSES, IMAGES = 8, 40
ORDER = np.random.default_rng(0).permutation(IMAGES)  # which image of ImageNet's numbering comes when


def name_of(number: int) -> str:
    return f"ILSVRC2012_val_{number + 1:08d}.JPEG"


@pytest.fixture(scope="module")
def lists() -> list[list[int]]:
    draws = np.random.default_rng(1)
    return [sorted(draws.choice(CLASSES, size=draws.integers(0, 4), replace=False).tolist()) for _ in range(IMAGES)]


@pytest.fixture(scope="module")
def real_json(tmp_path_factory, lists):
    path = tmp_path_factory.mktemp("real") / "real.json"
    path.write_text(json.dumps(lists))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Image k of ImageNet's numbering in the folder of class k % 8."""
    root = tmp_path_factory.mktemp("folder")
    for number in range(IMAGES):
        place = root / "val" / f"n{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 8), (number, 0, 0)).save(place / name_of(number))
    return root


@pytest.fixture(scope="module")
def records(tmp_path_factory, folder):
    """The same images in records, in another order, over three files."""
    root = tmp_path_factory.mktemp("records")
    for shard, numbers in enumerate(np.array_split(ORDER, 3)):
        write_records(root / f"validation-{shard:05d}-of-00003", (example(folder, int(k)) for k in numbers))
    return root


def example(folder, number: int) -> bytes:
    encoded = (folder / "val" / f"n{number % CLASSES}" / name_of(number)).read_bytes()
    names = [name_of(number).encode()]
    return encode_example({IMAGE: [encoded], LABEL: [1 + number % CLASSES], FILENAME: names})


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def opened(root) -> Index:
    return open_source(str(root), split="validation").for_classes(CLASSES)


@pytest.mark.parametrize("kind", ["folder", "records"])
def test_each_image_gets_its_own_list(kind, request, real_json, lists):
    index = opened(request.getfixturevalue(kind))
    index = index.without([3, 17])  # in quarantine
    numbers = [int(name[15:23]) - 1 for name in image_names(index)]
    assert len(numbers) == IMAGES - 2 and numbers != sorted(numbers)
    assert np.array_equal(index.label, np.array(numbers) % CLASSES)  # they are the images' names
    rows = real_labels(str(real_json), index)
    assert [[one for one in row if one >= 0] for row in rows.tolist()] == [lists[number] for number in numbers]


def test_the_labels_follow_the_names_of_a_models_classes(folder, real_json, lists):
    names = [f"n{number:08d}" for number in range(CLASSES)]
    index, order = opened(folder), [names[k] for k in np.random.default_rng(2).permutation(CLASSES)]
    found = real_labels(str(real_json), index.by_names(names, order))
    for row, name in zip(found.tolist(), image_names(index)):
        assert [names.index(order[one]) for one in row if one >= 0] == lists[int(name[15:23]) - 1]


def test_counted_as_timm_does(folder, real_json, lists):
    from timm.data.real_labels import RealLabelsImagenet

    index = opened(folder)
    logits = torch.randn(IMAGES, CLASSES, generator=torch.Generator().manual_seed(2))
    theirs = RealLabelsImagenet(image_names(index), real_json=str(real_json), topk=(1, 5))
    counts = torch.zeros(3, dtype=torch.float64)
    listed = torch.from_numpy(real_labels(str(real_json), index))
    for part, rows in zip(logits.split(7), listed.split(7)):
        theirs.add_result(part)
        counts += count_listed(part, rows)
    assert counts[0] == sum(map(bool, lists)) < IMAGES
    assert [float(100 * hits / counts[0]) for hits in counts[1:]] == [theirs.get_accuracy(k) for k in (1, 5)]


def test_ties_and_nan():
    """The lower of equal classes is the prediction; NaN predicts nothing; the filling is no class."""
    logits = torch.tensor([[1.0, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [9, torch.nan, 0, 0, 0, 0, 0], [5.0] * 7])
    listed = torch.tensor([[0, -1], [1, -1], [0, -1], [-1, -1]])
    assert count_listed(logits, listed).tolist() == [3, 1, 2]
    assert count_listed(logits.bfloat16(), listed).tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    "text, sentence",
    [
        (json.dumps([[0]] * 10), "has no labels for the image 'ILSVRC2012_val_00000.*JPEG to ILSVRC2012_val_00000010"),
        (json.dumps([[CLASSES]] * IMAGES), "is not a list of ReaL labels: expected lists of classes from 0 to 7"),
        (json.dumps({"a": 1}), "is not a list of ReaL labels"),
        ("{", "cannot be read"),
    ],
)
def test_what_is_no_file_of_labels(tmp_path, folder, text, sentence):
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        real_labels(str(tmp_path / "real.json"), opened(folder))


def test_records_without_names(tmp_path, folder, real_json):
    encoded = next(folder.glob("val/*/*")).read_bytes()
    records = (encode_example({IMAGE: [encoded], LABEL: [1 + k]}) for k in range(CLASSES))
    write_records(tmp_path / "validation-00000-of-00001", records)
    with pytest.raises(ValueError, match="does not say which image is which: pack the images again"):
        real_labels(str(real_json), opened(tmp_path))
