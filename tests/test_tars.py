"""WebDataset tars as training data: the same images, labels and order as from other files; damage is found."""

import io
import json
import os
import re
import tarfile

import numpy as np
import pytest
from PIL import Image

from largebatch import pack
from largebatch.data import sources, tars
from largebatch.data.records import read_span

NAMES = {"train": "imagenet1k-train-{:04}.tar", "validation": "imagenet1k-validation-{:02}.tar"}


def encoded(seed, kind="JPEG"):
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (30 + seed % 7, 41, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write(path, *members):
    """Each member is a name and its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def sample(key, label, seed):
    """Image before label, label before image, and a class in JSON, in turn; a file that nobody needs among them."""
    image, number = (f"{key}.jpg", encoded(seed)), (f"{key}.cls", str(label).encode())
    members = [(image, number), (number, image), (image, (f"{key}.json", json.dumps({"label": label}).encode()))]
    return [*members[seed % 3], (f"{key}.txt", b"a text")]


@pytest.fixture
def folder(tmp_path):
    """Two shards of 5 training images of three classes, and one of 3 held-out ones that lacks the first class."""
    for shard in range(2):
        members = [sample(f"s{shard}/{k:03}", (shard + k) % 3, 5 * shard + k) for k in range(5)]
        write(tmp_path / "data" / NAMES["train"].format(shard), *sum(members, []))
    held_out = [sample(f"{k:03}", 1 + k % 2, 20 + k) for k in range(3)]
    write(tmp_path / "data" / NAMES["validation"].format(0), *sum(held_out, []))
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def images(index):
    spans = zip(index.file.tolist(), index.offset.tolist(), index.length.tolist())
    return [read_span(index.files[file], offset, length) for file, offset, length in spans]


def test_images_sizes_and_labels_are_those_that_were_written(folder):
    train = sources.open_source(str(folder), split="train")
    assert images(train) == [encoded(seed) for seed in range(10)]
    assert train.label.tolist() == [0, 1, 2, 0, 1, 1, 2, 0, 1, 2] and train.shard_sizes == (5, 5)
    assert train.height.tolist() == [30 + seed % 7 for seed in range(10)] and set(train.width) == {41}
    assert train.for_classes(3).num_classes == 3
    held_out = sources.open_source(str(folder), split="validation")
    assert held_out.label.tolist() == [1, 2, 1]  # by the numbers of the training split
    assert sources.available_splits(str(folder)) == ["train", "validation"]


@pytest.mark.parametrize(
    "train, held_out", [("train-0.tar", "val-0.tar"), ("train.tar", "val.tar"), ("train/x.tar", "val/y.tar")]
)
def test_other_places_and_names(folder, tmp_path, train, held_out):
    for name, old in ((train, NAMES["train"]), (held_out, NAMES["validation"])):
        (tmp_path / "other" / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(folder / old.format(0), tmp_path / "other" / name)
    assert len(sources.open_source(str(tmp_path / "other"), split="train")) == 5
    assert len(sources.open_source(str(tmp_path / "other"), split="validation")) == 3


def test_tars_of_the_publisher_are_not_taken_for_shards(folder, tmp_path):
    os.link(folder / NAMES["train"].format(0), tmp_path / "ILSVRC2012_img_train.tar")
    assert sources.find_tars(tmp_path, "train") == []


@pytest.mark.parametrize("left", [0.3, 0.5, 0.95])
def test_a_tar_that_is_cut_off_is_refused(folder, left):
    """Wherever the cut is: tarfile itself takes a place between two files for the end."""
    path = folder / NAMES["train"].format(1)
    last = max(member.offset_data + -(-member.size // 512) * 512 for member in tarfile.open(path))
    for size in {int(last * left), last - 512 * 3, last}:
        whole = path.read_bytes()
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{path} is cut off, damaged or compressed .*: expected a whole .tar"):
            sources.open_source(str(folder), split="train")
        path.write_bytes(whole)


def test_faults_of_samples_are_named_and_can_be_left_out(folder, capsys):
    image = encoded(3)
    faults = {
        "no class: there is neither a .cls nor a .json": [("a.jpg", image)],
        "no class: b.cls says 'cat', expected a number": [("b.jpg", image), ("b.cls", b"cat")],
        "no class: c.json says 'None', expected a number": [("c.jpg", image), ("c.json", b"{}")],
        "has 0 images .*, expected one": [("d.cls", b"1")],
        "has 2 images .*, expected one": [("e.jpg", image), ("e.png", image), ("e.cls", b"1")],
        "cannot identify|is not a readable image": [("f.jpg", b"no image"), ("f.cls", b"1")],
        "truncated": [("g.jpg", image[:-200]), ("g.cls", b"1")],
    }
    good = sample("z", 2, 4)
    path = folder / NAMES["train"].format(2)
    write(path, *sum(faults.values(), []), *good)
    with pytest.raises(ValueError, match=f"{path}, record 0 .*neither a .cls nor a .json.*pack check {folder}"):
        sources.open_source(str(folder), split="train")
    assert pack.run(["check", str(folder)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if str(path) in line]
    assert len(lines) == len(faults)
    for line, fault in zip(lines, faults):
        assert re.search(fault, line), line
    train = sources.open_source(str(folder), split="train")
    assert images(train) == [*(encoded(seed) for seed in range(10)), encoded(4)] and train.label[-1] == 2


def test_a_compressed_tar_is_refused(folder):
    path = folder / NAMES["train"].format(2)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(__file__, arcname="x.jpg")
    with pytest.raises(ValueError, match="compressed"):
        sources.open_source(str(folder), split="train")


def test_packed_they_are_records_with_the_same_images(folder, tmp_path):
    pack.pack(str(folder), str(tmp_path / "out"), num_shards={"train": 2, "validation": 1}, seed=0, threads=1)
    train = sources.open_source(str(tmp_path / "out"), split="train")
    packed = sorted(zip(images(train), train.label.tolist()))
    from_tars = sources.open_source(str(folder), split="train")
    assert packed == sorted(zip(images(from_tars), from_tars.label.tolist()))


@pytest.mark.parametrize(
    "name, expected", [("a/b/01.JPG", ("a/b/01", "jpg")), ("01.seg.png", ("01", "seg.png")), ("README", ("README", ""))]
)
def test_names(name, expected):
    assert tars.split_name(name) == expected
