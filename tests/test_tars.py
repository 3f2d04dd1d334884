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
        "has 0 images .* among the 1 files of the key 'd', expected one": [("d.cls", b"1")],
        "has 2 images .*, expected one": [("e.jpg", image), ("e.png", image), ("e.cls", b"1")],
        "no class: h.cls says '99999999999999999999', expected a number from 0 to 2147483647": [
            ("h.jpg", image),
            ("h.cls", b"9" * 20),
        ],
        "no class: i.json says '2147483648', expected a number": [("i.jpg", image), ("i.json", b"2147483648")],
        f"no class: j.cls says '{'1' * 40}', expected a number": [("j.jpg", image), ("j.cls", b"1" * 5000)],
        "cannot identify|is not a readable image": [("f.jpg", b"no image"), ("f.cls", b"1")],
        "truncated": [("g.jpg", image[:-200]), ("g.cls", b"1")],
    }
    good = [*sample("z", 2, 4), ("._z.jpg", b"of a Mac")]
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


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_in_a_tar_is_named(folder, kind, number):
    """tar writes a file that has two names once, and then a link: of an image, or of its class."""
    path, names = folder / NAMES["train"].format(2), ["a.jpg", "a.cls"]
    with tarfile.open(path, "w") as tar:
        for k, (name, content) in enumerate(zip(names, (encoded(3), b"1"))):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if k == number:
                info.type, info.linkname, info.size = kind, "other", 0
            tar.addfile(info, io.BytesIO(content))
    with pytest.raises(ValueError, match=f"{path}, record 0 .* has {names[number]}, which is no ordinary file"):
        sources.open_source(str(folder), split="train")


def test_a_key_with_a_dot_is_named_with_the_rule(tmp_path):
    pairs = [[(f"shot 22.{k:02}.jpg", encoded(k)), (f"shot 22.{k:02}.cls", b"1")] for k in range(24)]
    write(tmp_path / "data" / NAMES["train"].format(0), *sum(pairs, []))
    rule = "among the 48 files of the key 'shot 22', expected one; a key is the name up to its first dot.$"
    with pytest.raises(ValueError, match=rule):
        sources.open_source(str(tmp_path / "data"), split="train")


def raw(path, size):
    """Write a size into the header of the second file of a tar, with its check sum."""
    with tarfile.open(path) as tar:
        start = tar.getmembers()[1].offset
    data = bytearray(path.read_bytes())
    data[start + 124 : start + 136] = size
    data[start + 148 : start + 156] = b" " * 8
    data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    path.write_bytes(data)


SIZES = [bytes([0x80]) + (2**bits).to_bytes(11, "big") for bits in (40, 62, 63, 70)]


@pytest.mark.parametrize("size", [*SIZES, b"\xff" * 12, b"77777777777\0", b"not a size!\0"])
def test_a_size_that_no_file_has_is_named(folder, size):
    path = folder / NAMES["train"].format(1)
    raw(path, size)
    with pytest.raises(ValueError, match=f"{path} is cut off, damaged or compressed|{path}, record .* has "):
        sources.open_source(str(folder), split="train")


@pytest.mark.parametrize("label, refused", [(4, False), (6, False), (7, True), (1_000_000, True)])
def test_a_label_far_above_the_others_is_refused_with_its_place(folder, label, refused):
    """Four labels: up to eight classes are believed. A number of classes that is given is taken."""
    path = folder / NAMES["train"].format(2)
    write(path, *sample("a", 0, 1), *sample("b", label + 1, 2))
    index = sources.open_source(str(folder), split="train")
    assert index.for_classes(label + 2).num_classes == label + 2
    if not refused:
        assert index.for_classes(0).num_classes == label + 2
        return
    place = f"the highest, {label + 1} in {path}, record 1 .at byte [0-9]*., would make {label + 2} classes"
    with pytest.raises(ValueError, match=f"has 4 labels, and {place}.* set --model.num_classes {label + 2}"):
        index.for_classes(0)
    with pytest.raises(ValueError, match=f"label {label + 1} is too large .in {path}, record 1 .at byte"):
        index.for_classes(label)


def test_compressed_shards_beside_others_are_told(folder, caplog):
    for name in ("imagenet1k-train-0002.tar.gz", "x.tgz", "imagenet1k-validation-03.tar.zst"):
        (folder / name).write_bytes(b"")
    assert len(sources.open_source(str(folder), split="train")) == 10
    (warning,) = caplog.messages
    first = f"files in {folder} that are left out: 1 (1 .gz), the first is {folder}/imagenet1k-train-0002.tar.gz; "
    assert warning == f"{first}shards are read only as they are: convert, move or remove them."


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
