"""Parquet files as on the hub: every image and label, their classes, and one sentence for columns that are none."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from store import open_store

from largebatch import pack
from largebatch.data import parquet as ours
from largebatch.data import records, sources

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
from pyarrow import parquet  # noqa: E402

NAMES = ("cat", "dog", "eel")


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def encoded(seed):
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (20 + seed % 5, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG" if seed % 2 else "JPEG")
    return file.getvalue()


def write(path, images, labels, *, image="image", label="label", names=NAMES, nested=True, kind=None, **others):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [{"bytes": data, "path": None} for data in images] if nested else images
    table = pyarrow.table({image: values, label: pyarrow.array(labels, type=kind or pyarrow.int64()), **others})
    features = {label: {"names": names, "_type": "ClassLabel"}} if names else {}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, path, row_group_size=4)


def hub(folder, *, place="data", suffix="-0123456789abcdef", validation="validation", first=0, **options):
    """Two files of 10 and 7 training images, in row groups of 4, and one of 5 held-out ones.

    Return images and labels of each split. first: the lowest label in the files.
    """
    data = {}
    for split, counts in (("train", (10, 7)), (validation, (5,))):
        images, labels = [], []
        for number, count in enumerate(counts):
            some = [encoded(100 * len(counts) + 20 * number + k) for k in range(count)]
            which = [(k + number) % 3 for k in range(count)]
            path = folder / place / f"{split}-{number:05d}-of-{len(counts):05d}{suffix}.parquet"
            write(path, some, [first + label for label in which], **options)
            images, labels = images + some, labels + which
        data["train" if split == "train" else "validation"] = images, labels
    return data


def check(path, data, names=NAMES):
    for split, (images, labels) in data.items():
        index = sources.open_source(path, split=split).for_classes(3)
        assert [index.read(k) for k in range(len(index))] == images and index.label.tolist() == labels
        assert sources.class_names(index) == names


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"place": "", "suffix": "", "validation": "test"},
        {"nested": False, "image": "img", "label": "labels", "kind": pyarrow.int8()},
        {"label": "fine_label", "names": None, "first": 1},
    ],
)
def test_every_image_and_label_of_the_hub(tmp_path, options):
    data = hub(tmp_path / "hub", **options)
    if "first" in options:  # another column of numbers, as CIFAR-100 has
        for path in (tmp_path / "hub/data").glob("*"):
            table = parquet.read_table(path)
            parquet.write_table(table.append_column("coarse_label", pyarrow.array([0] * len(table))), path)
    check(str(tmp_path / "hub"), data, options.get("names", NAMES) or ())


def test_held_out_images_are_numbered_as_those_of_training(tmp_path):
    images = [encoded(k) for k in range(4)]
    data = {"train": (images, [0, 1, 2, 1]), "validation": (images, [1, 2, 2, 1])}
    for split, (_, labels) in data.items():
        write(tmp_path / f"hub/{split}.parquet", images, labels, names=None)
    check(str(tmp_path / "hub"), data, ())


def test_a_split_may_lack_the_first_class_or_the_last(tmp_path):
    images = [encoded(k) for k in range(4)]
    for split, labels in (("train", [1, 2, 3, 1]), ("validation", [2, 3, 3, 2])):
        write(tmp_path / f"numbers/{split}.parquet", images, labels, names=None)
    check(str(tmp_path / "numbers"), {"train": (images, [0, 1, 2, 0]), "validation": (images, [1, 2, 2, 1])}, ())
    data, names = {"train": [1, 3, 1, 3], "validation": [0, 1, 2, 3]}, ("cat", "dog", "eel", "fox", "gnu")
    for split, labels in data.items():
        write(tmp_path / f"named/{split}.parquet", images, labels, names=names)
        index = sources.open_source(str(tmp_path / "named"), split=split)
        for classes in (0, 5):
            same = sources.number_classes(index, num_classes=classes)
            assert (same.label.tolist(), same.num_classes, sources.class_names(same)) == (labels, 5, names)
        turned = sources.number_classes(index, num_classes=5, names=names[::-1])
        assert turned.label.tolist() == [4 - label for label in labels]


def test_a_folder_for_each_split_and_another_version_of_the_files(tmp_path):
    folder, images = tmp_path / "two", [encoded(k) for k in range(6)]
    for split in ("train", "validation"):
        write(folder / split / "0000.parquet", images, [0, 1, 2] * 2)
    check(str(folder), dict.fromkeys(("train", "validation"), (images, [0, 1, 2] * 2)))
    write(folder / "train" / "0000.parquet", images[::-1], [2, 1, 0] * 2)
    check(str(folder), {"train": (images[::-1], [2, 1, 0] * 2), "validation": (images, [0, 1, 2] * 2)})


def test_shards_of_tfrecords_are_read_before_parquet(tmp_path):
    hub(tmp_path / "hub")
    pack.pack("digits", str(tmp_path / "hub"), num_shards={"train": 1, "validation": 1}, seed=0, threads=1)
    assert len(sources.open_source(str(tmp_path / "hub"), split="train")) == 1437


def test_pack_and_check(tmp_path, capsys):
    data = hub(tmp_path / "hub")
    assert pack.run([str(tmp_path / "hub"), str(tmp_path / "out"), "--threads", "1"]) == 0
    assert "train: 17 images\nvalidation: 5 images" in capsys.readouterr().out
    found = []
    for path in sorted((tmp_path / "out").glob("validation-*")):
        found += [records.decode_example(payload) for _, payload, _ in records.scan_records(str(path))]
    packed = [one[records.IMAGE][0] for one in found], [one[records.LABEL][0] - 1 for one in found]
    assert packed == data["validation"]
    assert pack.run(["check", str(tmp_path / "hub")]) == 0


@pytest.mark.parametrize(
    "change, said",
    [
        ({"image": "x", "extra": [b"bytes"] * 4}, "has columns that may be images: x, extra; expected one of bytes"),
        ({"names": None, "label": "id"}, "has no column of labels; expected one of whole numbers that is called label"),
        ({"labels": ["a"] * 4, "kind": pyarrow.string(), "id": [1] * 4}, "has no column of labels; expected one of"),
        ({"images": ["a"] * 4, "nested": False, "mask": [b"bytes"] * 4}, "has no column of images; expected one of"),
        ({"images": ["a"] * 4, "nested": False}, "has no column of images; expected one of bytes, or a struct with"),
        ({"labels": ["a"] * 4, "kind": pyarrow.string()}, "has no column of labels; expected one of whole numbers"),
        ({"labels": [0, -1, 2, 1]}, "has label -1, expected 0 or more in its train split"),
        ({"labels": [0, None, 2, 1]}, "train-00000-of-00001.parquet has 1 rows without a label: remove them"),
        ({"images": [b"", b"x", b"y", b"z"]}, "has no bytes in image of row 0: write the images into it"),
        ({"images": pyarrow.array([], pyarrow.binary()), "labels": [], "nested": False}, "has no rows in its train"),
        ({"name": "train-00000-of-00002.parquet"}, "lacks 1 of the 2 train shards that their names announce"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, change, said):
    options = {"images": [encoded(k) for k in range(4)], "labels": [0, 1, 2, 1]} | change
    options = {"name": "train-00000-of-00001.parquet"} | options
    write(tmp_path / "hub" / options.pop("name"), options.pop("images"), options.pop("labels"), **options)
    for call in (sources.open_source, lambda path, split: pack.run([path, str(tmp_path / "out")])):
        with pytest.raises(ValueError, match=said) as error:
            call(str(tmp_path / "hub"), split="train")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    assert [path.suffix for path in (tmp_path / "cache/largebatch").glob("*parquet*")] == [".lock"]


def test_a_split_that_is_not_there_is_one_sentence(tmp_path):
    write(tmp_path / "train.parquet", [encoded(k) for k in range(4)], [0, 1, 2, 1])
    with pytest.raises(ValueError, match="has no validation split: looked for validation-.*parquet in it and its"):
        sources.open_source(str(tmp_path), split="validation")


def test_a_file_that_is_cut_off_or_no_parquet_is_one_sentence(tmp_path):
    hub(tmp_path / "hub")
    path = sorted((tmp_path / "hub/data").glob("train-*"))[1]
    for content in (path.read_bytes()[:-20], b"not parquet at all", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} cannot be read as Parquet .*: copy it again.$"):
            sources.open_source(str(tmp_path / "hub"), split="train")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    hub(tmp_path / "hub")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs the package pyarrow: `pip install 'largebatch\[parquet\]'`"):
        sources.open_source(str(tmp_path / "hub"), split="train")


def test_parquet_at_an_address_is_that_of_the_folder(tmp_path, monkeypatch):
    data = hub(tmp_path / "hub")
    monkeypatch.setattr(ours, "BLOCK", 1000)
    with open_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        address = store.put(tmp_path / "hub", "bucket/of/parquet")
        check(address, data)
        asked = len(store.reads(".parquet"))
        check(address, data)
        assert asked > 5 and len(store.reads(".parquet")) == asked, "it is written once"
