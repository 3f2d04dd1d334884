"""The four kinds of source, the two written into the cache, and the packing program."""

import dataclasses
import hashlib
import io
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from largebatch import pack
from largebatch.data import records, shards, sources

FIRST_HELD_OUT = [2, 4, 5, 4, 8, 2, 0, 6, 3, 3, 2, 6]  # the split must never change


def read(index, sample):
    with open(index.files[index.file[sample]], "rb") as file:
        return os.pread(file.fileno(), int(index.length[sample]), int(index.offset[sample]))


def picture(seed, mode="RGB"):
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((40 + seed, 30), Image.Resampling.BICUBIC).convert(mode)


def write(path, image, kind="JPEG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, kind)


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.fixture
def image_folder(tmp_path):
    """Three classes, one of them without validation images; a CMYK and a PNG file under JPEG names."""
    folder = tmp_path / "images"
    for number, name in enumerate(["n03", "n01", "n02"]):
        for k in range(4):
            write(folder / "train" / name / f"{name}_{k}.JPEG", picture(10 * number + k))
    write(folder / "train" / "n01" / "n01_9.JPEG", picture(50, "CMYK"))
    write(folder / "train" / "n02" / "n02_9.JPEG", picture(51), "PNG")
    write(folder / "val" / "n02" / "a.jpg", picture(60))
    write(folder / "val" / "n03" / "b.png", picture(61), "PNG")
    (folder / "train" / "n01" / "notes.txt").write_text("no image")
    return folder


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


# -- built-in sources ------------------------------------------------------------------------------------------------


def test_digits_are_all_there(tmp_path):
    from sklearn.datasets import load_digits

    data = load_digits()
    basis = [Image.fromarray(row.reshape(8, 8)).resize((64, 64), Image.Resampling.BICUBIC) for row in np.eye(64)]
    shrink = np.linalg.pinv(np.stack([np.asarray(image).ravel() for image in basis]))  # undoes the enlargement
    for split, count in (("train", 1437), ("validation", 360)):
        index = sources.open_source("digits", split=split).for_classes(10)
        assert len(index) == count and index.num_classes == 10
        assert sources.class_names(index) == tuple("0123456789")
        if split == "validation":
            assert np.bincount(index.label).tolist() == [36] * 10
        for sample in range(0, count, 30):
            image = Image.open(io.BytesIO(read(index, sample)))
            assert image.size == (64, 64) == (index.width[sample], index.height[sample])
            small = (np.asarray(image).ravel() @ shrink).reshape(8, 8) * (16 / 255)
            errors = np.abs(data.images - small).mean(axis=(1, 2))  # in grey levels, of 17
            assert errors.min() < 0.3 and data.target[errors.argmin()] == index.label[sample]
    assert sorted(os.listdir(tmp_path / "home" / "largebatch")) == [".digits-v2.lock", "digits-v2", "index"]


def test_digits_splits_are_fixed_and_disjoint():
    pairs = {split: sources.digits(split) for split in sources.SPLITS}
    assert [len(images.labels) for images in pairs.values()] == [1437, 360]
    first = [pairs[split].encoded(0) for split in sources.SPLITS]
    assert first == [sources.digits(split).encoded(0) for split in sources.SPLITS]
    assert pairs["validation"].labels[:12] == FIRST_HELD_OUT
    seen = [{hashlib.sha256(images.encoded(k)).digest() for k in range(0, 360)} for images in pairs.values()]
    assert not seen[0] & seen[1]


def test_synthetic_covers_its_classes(monkeypatch):
    monkeypatch.setattr(sources, "_SYNTHETIC_CLASSES", 12)
    for split in sources.SPLITS:
        index = sources.open_source("synthetic", split=split).for_classes(12)
        assert np.bincount(index.label).tolist() == [4 if split == "train" else 1] * 12
        assert len(index.files) == (48 if split == "train" else 4)
        assert 450 < index.width.mean() < 550 and 330 < index.height.mean() < 420
        assert 60_000 < index.length.mean() < 160_000  # as heavy as ImageNet's
        assert np.asarray(Image.open(io.BytesIO(read(index, 3)))).std() > 20
    train, validation = (sources.synthetic(split).encoded(5) for split in sources.SPLITS)
    assert train != validation and train == sources.synthetic("train").encoded(5)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_image_folder(image_folder):
    before = snapshot(image_folder)
    train = sources.open_source(str(image_folder), split="train")
    assert train.class_names == ("n01", "n02", "n03") and train.num_classes == 3
    assert train.label.tolist() == [0] * 5 + [1] * 5 + [2] * 4
    assert [os.path.basename(path) for path in train.files[:2]] == ["n01_0.JPEG", "n01_1.JPEG"]
    held_out = sources.open_source(str(image_folder), split="validation")
    assert held_out.label.tolist() == [1, 2] and held_out.num_classes == 3  # numbered as in training
    assert held_out.width.tolist() == [100, 101]
    assert train.for_classes(3) is train
    with pytest.raises(ValueError, match="/train has 3 classes, the model 1000: give images of 1000 classes, or train"):
        train.for_classes(1000)
    alone = dataclasses.replace(train, class_names=("n01",))
    with pytest.raises(ValueError, match="/train has one class, n01: expected two or more to tell apart"):
        alone.for_classes(1)
    assert snapshot(image_folder) == before  # nothing is written to the user's folder


def test_files_that_are_left_out_are_told(image_folder, caplog):
    """By their endings, wherever they lie; what systems hide is nobody's loss."""
    train = image_folder / "train"
    for name in ("n02/b.tiff", "n02/a.GIF", "n02/.DS_Store", "n02/._a.jpg", "n02/.b.jpg", "n02/0a", "c.jpg"):
        (train / name).write_bytes(b"")
    assert len(sources.open_source(str(image_folder), split="train")) == 14
    (warning,) = caplog.messages
    assert warning == (
        f"files in {train} that are left out: 6 (2 .jpg, 1 .txt, 1 without an ending, 1 .gif, 1 .tiff), the first is "
        f"{train}/c.jpg; only .jpg, .jpeg, .png, .webp, .bmp in class folders are read: convert, move or remove them."
    )


def test_deeper_folders_are_read_as_by_torchvision(image_folder, tmp_path):
    from torchvision.datasets import ImageFolder

    train = image_folder / "train"
    write(train / "n01" / "more" / "still.more" / "1.JPG", picture(1))
    write(train / "n03" / "0.jpg" / "2.jpeg", picture(2))
    write(tmp_path / "elsewhere" / "3.jpg", picture(3))
    (train / "n02" / "link").symlink_to(tmp_path / "elsewhere")
    (train / "n02" / "4.jpg").symlink_to(tmp_path / "elsewhere" / "3.jpg")
    index = sources.open_source(str(image_folder), split="train")
    expected = ImageFolder(train)
    assert sorted(zip(index.files, index.label)) == sorted(expected.samples) and len(index) == 18
    assert list(index.class_names) == expected.classes


def test_thumbnails_and_other_files_of_systems_are_no_data(image_folder, caplog):
    train = image_folder / "train"
    for name in ("@eaDir", "n01/@eaDir/n01_0.JPEG", "__MACOSX/n01", "n02/.ipynb_checkpoints"):
        write(train / name / "a.jpg", picture(1))
    (train / "lost+found").mkdir()
    (train / "n01" / ".#notes.txt").symlink_to("user@host.1:2")  # as Emacs makes them
    (train / "n01" / "notes.txt").unlink()
    index = sources.open_source(str(image_folder), split="train")
    assert len(index) == 14 and index.num_classes == 3 and not caplog.messages


def fifo(path):
    os.mkfifo(path)


def socket_at(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda path: path.symlink_to("/not/mounted/1.jpg"), "a link to /not/mounted/1.jpg"),
        (lambda path: path.symlink_to("/dev/zero"), "a link to /dev/zero"),
        (fifo, "a FIFO, a socket or a device"),
        (socket_at, "a FIFO, a socket or a device"),
    ],
    ids=["missing", "device", "fifo", "socket"],
)
@pytest.mark.parametrize("name", ["n02/x.jpg", "n02/y.PNG"])
def test_names_without_an_image_behind_them_are_refused(image_folder, monkeypatch, make, said, name):
    monkeypatch.chdir(image_folder / "train")  # a socket's path is short
    make(Path(name))
    Path("n03/z.jpg").symlink_to("/nowhere")
    first = f"{image_folder}/train has 2 images or folders that are not there, the first is {image_folder}/train/{name}"
    data = str(image_folder)
    for run in (lambda: sources.open_source(data, split="train"), lambda: pack.run([data, "/no"])):
        with pytest.raises(ValueError, match=f"{first}, {said}: put there what is missing, or remove the names"):
            run()


@pytest.mark.parametrize("link", ["n02/deep", "n04"])
def test_a_link_to_a_folder_that_is_not_there_is_refused(image_folder, link):
    (image_folder / "train" / link).symlink_to("/not/mounted")
    with pytest.raises(ValueError, match=f"1 images or folders that are not there, the first is .*/{link}, a link to"):
        sources.open_source(str(image_folder), split="train")


@pytest.mark.parametrize("kind", ["images", "shards"])
def test_held_out_images_that_are_not_mounted_are_not_those_of_the_test(image_folder, kind):
    (image_folder / "val").rename(image_folder / "test")
    (image_folder / "val").symlink_to("/not/mounted")
    if kind == "shards":
        image = (image_folder / "test" / "n02" / "a.jpg").read_bytes()
        one = records.encode_example({"image": [image], "label": [0]})
        records.write_records(image_folder / "test" / "test-0", [one])
    data = str(image_folder)
    for run in (lambda: sources.open_source(data, split="validation"), lambda: pack.run([data, "/no"])):
        with pytest.raises(ValueError, match=f"{image_folder}/val is a link to /not/mounted, and no folder is there"):
            run()


@pytest.mark.parametrize("name", ["train-2.tfrecord", "train-2.tar"])
@pytest.mark.parametrize(
    "make, said",
    [(lambda path: path.symlink_to("/nowhere"), "cannot be read: No such file"), (fifo, "is no file, but a FIFO, a")],
)
def test_shards_that_are_no_files_are_named(image_folder, tmp_path, name, make, said):
    (tmp_path / "out").mkdir()
    image = (image_folder / "val" / "n02" / "a.jpg").read_bytes()
    assert list(shards.write_split(tmp_path / "out", "train", shards.Images([0, 1], lambda k: image), num_shards=1))
    if name.endswith(".tar"):
        (tmp_path / "out" / "train-00000-of-00001").rename(tmp_path / "out" / "train-1.tar")
    make(tmp_path / "out" / name)
    with pytest.raises(ValueError, match=f"{tmp_path}/out/{name} {said}"):
        sources.open_source(str(tmp_path / "out"), split="train")


def test_links_that_lead_in_a_circle_are_refused(image_folder):
    circle = image_folder / "train" / "n02" / "again"
    circle.symlink_to(image_folder / "train")
    with pytest.raises(ValueError, match=f"{circle}/n02 is a link to a folder around it|{circle}.* around it: remove"):
        sources.open_source(str(image_folder), split="train")
    circle.unlink()
    circle.symlink_to(circle)
    with pytest.raises(ValueError, match=f"{circle} cannot be read: Too many levels of symbolic links"):
        sources.open_source(str(image_folder), split="train")


OPEN = "import sys; from largebatch.data.sources import open_source as open; print(open(sys.argv[1], split='train'))"


@pytest.mark.parametrize("closed", ["n02", "n02/deep", "n02/n02_1.JPEG"])
def test_what_may_not_be_read_is_named(image_folder, closed):
    (image_folder / "train" / "n02" / "deep").mkdir()
    (image_folder / "train" / closed).chmod(0)
    command = [sys.executable, "-c", OPEN, str(image_folder)]
    if os.geteuid() == 0:  # root that may not read what it has closed
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert re.search(rf"ValueError: {image_folder}/train/{closed}.* cannot be read: Permission denied", done.stderr)


def test_classes_without_training_images_are_refused_unless_allowed(image_folder):
    for name in ("n00", "n05", "n06", "n07"):
        (image_folder / "train" / name).mkdir()
    said = f"{image_folder} has no training images of 4 of its 7 classes \\(n00, n05, n06 and 1 more\\): copy them"
    with pytest.raises(ValueError, match=f"{said}, or remove .* set --data.allow_incomplete true"):
        sources.open_source(str(image_folder), split="train")
    with pytest.raises(ValueError, match=said):
        pack.run([str(image_folder), str(image_folder / "out")])
    index = sources.open_source(str(image_folder), split="train", allow_incomplete=True)
    assert index.num_classes == 7 and set(index.label) == {1, 2, 3}


def test_held_out_images_are_numbered_anew_if_the_classes_of_training_change(image_folder):
    """Their own files stay as they are."""
    expected = {"n02": 1, "n03": 2}
    for _ in range(3):
        for split in sources.SPLITS:
            index = sources.open_source(str(image_folder), split=split)
        assert [expected[Path(path).parent.name] for path in index.files] == index.label.tolist()
        assert [index.class_names[label] for label in index.label] == ["n02", "n03"]
        write(image_folder / "train" / f"a{expected['n02']}" / "a.jpg", picture(1))
        expected = {name: label + 1 for name, label in expected.items()}


def test_one_folder_has_one_index_whatever_links_lead_to_it(image_folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "link").symlink_to(image_folder)
    for path in (image_folder, tmp_path / "link", image_folder, image_folder / ".." / "images"):
        assert len(sources.open_source(str(path), split="train")) == 14
    assert "building the index" not in caplog.text
    (image_folder / "train" / "n01" / "n01_0.JPEG").rename(image_folder / "train" / "n01" / "a.JPEG")
    sources.open_source(str(tmp_path / "link"), split="train")
    assert "of 14 files that it lists and 14 that are there, " in caplog.text and "n01/n01_0.JPEG and " in caplog.text


def test_a_photo_of_a_hundred_megapixels_is_no_attack(image_folder):
    Image.new("L", (12_000, 9_000)).save(image_folder / "train" / "n01" / "large.png")
    program = (
        "import sys; from largebatch.data.sources import open_source\n"
        "print(open_source(sys.argv[1], split='train').width.max())"
    )
    command = [sys.executable, "-c", program, str(image_folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert done.stdout == "12000\n" and "Decompression" not in done.stderr


def test_the_folder_of_one_split(image_folder):
    with pytest.raises(ValueError, match=f"It looks like one split: give {image_folder}, the folder around it."):
        sources.open_source(str(image_folder / "train"), split="train")


def test_a_file_name_that_is_not_utf_8(image_folder):
    path = image_folder / "train" / "n01" / "caf\udce9.jpg"  # Python's way to write the byte E9
    write(path, picture(3))
    first, second = (sources.open_source(str(image_folder), split="train") for _ in range(2))
    assert str(path) in first.files and second.files == first.files


def test_index_is_kept_and_built_again(image_folder, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    built = []
    real = sources.index_images
    monkeypatch.setattr(sources, "index_images", lambda *a, **k: built.append(1) or real(*a, **k))

    def open_again():
        return sources.open_source(str(image_folder), split="train")

    assert len(open_again()) == len(open_again()) == 14 and len(built) == 1
    write(image_folder / "train" / "n01" / "n01_0.JPEG", picture(77))
    assert open_again().width[0] == 117 and len(built) == 2
    assert "building the index" in caplog.text and "n01_0.JPEG has changed" in caplog.text
    write(image_folder / "train" / "n01" / "new.jpeg", picture(1))
    assert len(open_again()) == 15 and len(built) == 3
    (saved,) = (tmp_path / "home" / "largebatch" / "index").glob("*.npz")
    saved.write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"The index {saved} is damaged"):
        open_again()


def test_ranks_that_find_the_index_do_not_wait_for_each_other(image_folder, monkeypatch):
    first = sources.open_source(str(image_folder), split="train")
    monkeypatch.setattr(sources, "locked", lambda *_: pytest.fail("the lock was taken"))
    again = sources.open_source(str(image_folder), split="train")
    assert again.files == first.files and again.digest() == first.digest()


@pytest.mark.parametrize("folders", [("", ""), ("train", "validation"), ("train", "val")])
def test_record_folder(image_folder, tmp_path, folders):
    out = tmp_path / "out"
    for split, name, labels in zip(sources.SPLITS, folders, ([0, 1, 2, 1, 2], [2, 0])):
        (out / name).mkdir(parents=True, exist_ok=True)
        images = shards.Images(labels, lambda k: (image_folder / "val" / "n02" / "a.jpg").read_bytes())
        assert list(shards.write_split(out / name, split, images, num_shards=2))[-1] == len(labels)
        (out / name / f"{split}-00000-of-00002.idx").write_text("0 100")  # other people's index files
    train = sources.open_source(str(out), split="train")
    assert train.label.tolist() == [0, 1, 2, 1, 2] and train.shard_sizes == (2, 3)
    assert train.for_classes(3).label_base == 1  # published records count from 1
    held_out = sources.open_source(str(out), split="validation")
    assert held_out.label.tolist() == [2, 0]
    with open(train.files[1], "r+b") as file:
        file.truncate(os.path.getsize(train.files[1]) - 5)
    with pytest.raises(ValueError, match=f"{train.files[1]}: record 2 .* is cut off"):
        sources.open_source(str(out), split="train")


def test_records_of_tensorflow_datasets(image_folder, tmp_path):
    """Their names of files and fields; packed, they have those of ImageNet."""
    data, jpegs = tmp_path / "3.0.2", [path.read_bytes() for path in sorted(image_folder.rglob("n03_*.JPEG"))]
    data.mkdir()
    for split, labels in (("train", [0, 1, 2, 1]), ("test", [2, 0])):
        for shard in range(2):
            rows = range(shard, len(labels), 2)
            features = [{"image": [jpegs[k]], "label": [labels[k]], "file_name": [b"%d.jpg" % k]} for k in rows]
            path = data / f"cifar10-{split}.tfrecord-0000{shard}-of-00002"
            records.write_records(path, [records.encode_example(values) for values in features])
    train = sources.open_source(str(data), split="train").for_classes(0)
    assert [read(train, k) for k in range(4)] == [jpegs[k] for k in (0, 2, 1, 3)]
    assert train.label.tolist() == [0, 2, 1, 1] and train.num_classes == 3
    assert sources.open_source(str(data), split="validation").for_classes(3).label.tolist() == [2, 0]
    pack.pack(str(data), str(tmp_path / "out"), num_shards={"train": 1, "validation": 1}, seed=0, threads=1)
    packed = sources.open_source(str(tmp_path / "out"), split="train").for_classes(3)
    assert sorted((read(packed, k), label) for k, label in enumerate(packed.label)) == sorted(
        (read(train, k), label) for k, label in enumerate(train.label)
    )
    (_, payload, _), *_ = records.scan_records(packed.files[0])
    assert set(records.decode_example(payload)) == {"image/encoded", "image/class/label", "file_name"}
    (data / "cifar10-train.tfrecord-00001-of-00002").unlink()
    with pytest.raises(ValueError, match="lacks 1 of the 2 train shards .*cifar10-train.tfrecord-00001-of-00002"):
        sources.open_source(str(data), split="train")


def test_wrong_folders_say_what_was_looked_for(tmp_path, image_folder):
    with pytest.raises(ValueError, match="There is no folder /no/where: expected digits, synthetic, .* or a folder"):
        sources.open_source("/no/where", split="train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"looked for TFRecords validation-\* .*in validation/<class>/ or val/"):
        sources.open_source(str(tmp_path / "empty"), split="validation")
    with pytest.raises(ValueError, match="split is 'test', expected train or validation"):
        sources.open_source("digits", split="test")
    write(image_folder / "val" / "n99" / "a.jpg", picture(1))
    with pytest.raises(ValueError, match="val has the class folder n99, which the training split does not have"):
        sources.open_source(str(image_folder), split="validation")
    for path, said in (
        (str(image_folder / "val" / "n02" / "a.jpg"), "is a file"),
    ):
        for call in (lambda: sources.open_source(path, split="train"), lambda: pack.run([path, str(tmp_path / "out")])):
            with pytest.raises(ValueError, match=f"^{path} {said}.*: expected "):
                call()
    with pytest.raises(ValueError, match=f"Its folder images has one: give {image_folder}."):
        sources.open_source(str(tmp_path), split="train")
    (tmp_path / "hollow" / "train" / "n01").mkdir(parents=True)
    with pytest.raises(ValueError, match="train holds no images: looked for <class>/"):
        sources.open_source(str(tmp_path / "hollow"), split="train")
    write(tmp_path / "hollow" / "train" / "7.png", picture(1), "PNG")
    with pytest.raises(ValueError, match="train holds images in no class folder, such as 7.png: looked for <class>/"):
        sources.open_source(str(tmp_path / "hollow"), split="train")


# -- pack ------------------------------------------------------------------------------------------------------------


def test_pack_an_image_folder(image_folder, tmp_path, capsys):
    out = tmp_path / "shards"
    assert pack.run([str(image_folder), str(out), "--shards", "3", "--threads", "2"]) == 0
    assert capsys.readouterr().out == "train: 14 images\nvalidation: 2 images\n"
    assert sorted(os.listdir(out)) == [
        "classes.json",
        "packing.json",
        *(f"train-0000{k}-of-00003" for k in range(3)),
        "validation-00000-of-00001",
    ]

    index = sources.open_source(str(out), split="train").for_classes(3)
    original = sources.open_source(str(image_folder), split="train")
    assert sources.class_names(index) == sources.class_names(original) == ("n01", "n02", "n03")
    packed = {read(index, k): int(index.label[k]) for k in range(14)}
    converted = 0
    for k, path in enumerate(original.files):
        data = read(original, k)
        if data not in packed:
            converted += 1
            assert os.path.basename(path) in ("n01_9.JPEG", "n02_9.JPEG")  # CMYK, PNG
        else:
            assert packed[data] == original.label[k]
    assert converted == 2
    for data in packed:
        image = Image.open(io.BytesIO(data))
        assert (image.format, image.mode) == ("JPEG", "RGB")
        if image.width == 91:
            reference = np.asarray(picture(51), dtype=int)  # was a PNG, now a JPEG of high quality
            assert np.abs(np.asarray(image, dtype=int) - reference).mean() < 1.0
    assert index.label.tolist() != sorted(index.label.tolist())  # shuffled
    with pytest.raises(ValueError, match="already has shards that .*: 3.*, now .*: 1.*choose another"):
        pack.run([str(image_folder), str(out)])


@pytest.mark.parametrize("packed", [False, True])
def test_a_models_classes_are_numbered_by_their_names(image_folder, tmp_path, packed):
    """Images of n02 and n03, held out; in a folder, or in records with classes.json."""
    source = str(image_folder)
    if packed:
        source = str(tmp_path / "records")
        pack.pack(str(image_folder), source, num_shards={"train": 2, "validation": 1}, seed=0, threads=1)
    index = sources.open_source(source, split="validation")
    assert {0, *sources.number_classes(index, num_classes=3, names=("n01", "n02", "n03")).label.tolist()} == {0, 1, 2}
    file_of = {"n02": index.label.tolist().index(1), "n03": index.label.tolist().index(2)}
    for names in (("n03", "n02", "n01"), ("n02", "n03"), ("a", "n03", "b", "n02")):
        found = sources.number_classes(index, num_classes=len(names), names=names)
        assert {name: int(found.label[sample]) for name, sample in file_of.items()} == {
            "n02": names.index("n02"), "n03": names.index("n03")
        }  # fmt: skip
        assert found.num_classes == len(names) and sources.class_names(found) == names
        assert found.files == index.files and (found.offset == index.offset).all()
    named = "the model has n02, a, b and 1 more. Leave their images out"
    with pytest.raises(ValueError, match=f"has classes that the model does not know: n03; {named}"):
        sources.number_classes(index, num_classes=4, names=("n02", "a", "b", "\x1b[2J"))
    with pytest.raises(ValueError, match="has two classes of one name: n03; the model has n03, n02, n03"):
        sources.number_classes(index, num_classes=3, names=("n03", "n02", "n03"))
    for names in ((), ("n03", "n02")):  # not known, or not those of this model
        found = sources.number_classes(index, num_classes=3, names=names)
        assert found.label.tolist() == index.label.tolist() and found.num_classes == 3


def test_records_without_names_are_numbered_as_they_are(image_folder, tmp_path):
    pack.pack(str(image_folder), str(tmp_path / "records"), num_shards={"train": 2, "validation": 1}, seed=0, threads=1)
    (tmp_path / "records" / "classes.json").unlink()
    index = sources.open_source(str(tmp_path / "records"), split="validation")
    found = sources.number_classes(index, num_classes=3, names=("n03", "n02", "n01"))
    assert found.label.tolist() == index.label.tolist() and sorted(found.label.tolist()) == [1, 2]


def test_names_of_classes_stay_with_the_records(image_folder, tmp_path):
    """Packed again, in the folder of a split, or written by hand; a damaged list is an error, and none is no name."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    for source, out in ((image_folder, once), (once, twice)):
        pack.pack(str(source), str(out), num_shards={"train": 2, "validation": 1}, seed=0, threads=1)
    index = sources.open_source(str(twice), split="validation")
    assert sources.class_names(index) == ("n01", "n02", "n03")
    (twice / "train").mkdir()
    for shard in twice.glob("train-*"):
        shard.rename(twice / "train" / shard.name)
    (twice / "packing.json").unlink()
    (twice / "classes.json").write_text('["cat", "dog", "\u00e9l\u00e9phant"]')
    index = sources.open_source(str(twice), split="train")
    assert sources.class_names(index) == ("cat", "dog", "éléphant")
    for text in ("{}", "[1]", "cat\ndog"):
        (twice / "classes.json").write_text(text)
        with pytest.raises(ValueError, match=f"{twice}/classes.json is not a list of class names.*correct it"):
            sources.class_names(index)
    (twice / "classes.json").unlink()
    assert sources.class_names(index) == ()


def test_packing_twice_gives_the_same_files(image_folder, tmp_path):
    contents = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        options = {"num_shards": {"train": 2, "validation": 0}, "seed": seed, "threads": 3}
        assert pack.pack(str(image_folder), str(tmp_path / name), **options) == {"train": 14, "validation": 2}
        contents.append([path.read_bytes() for path in sorted((tmp_path / name).glob("*-of-*"))])
    assert contents[0] == contents[1] and contents[0][2] == contents[2][2]  # validation is not shuffled
    assert contents[0][0] != contents[2][0]


def test_bad_image_stops_packing_with_its_name(image_folder, tmp_path):
    bad = image_folder / "train" / "n02" / "n02_2.JPEG"
    bad.write_bytes(bad.read_bytes()[:300])
    with pytest.raises(ValueError, match=f"{bad} cannot be decoded"):
        pack.run([str(image_folder), str(tmp_path / "out"), "--shards", "1"])
    assert os.listdir(tmp_path / "out") == ["packing.json"]
    with pytest.raises(ValueError, match="14 train images cannot fill 15 shards"):
        pack.run([str(image_folder), str(tmp_path / "out"), "--shards", "15"])
    with pytest.raises(ValueError, match="There is no folder|has no train split"):
        pack.run([str(tmp_path / "nothing"), str(tmp_path / "out")])


def test_check_lists_exactly_the_bad_images(image_folder, capsys):
    assert pack.run(["check", str(image_folder)]) == 0
    assert capsys.readouterr().out == "train: 14 images, 0 bad\nvalidation: 2 images, 0 bad\n"
    bad = [image_folder / "train" / f"n0{k}" / f"n0{k}_1.JPEG" for k in (1, 2, 3)]
    for path in bad:
        path.write_bytes(path.read_bytes()[:-200])
    assert pack.run(["check", str(image_folder), "--threads", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train: 14 images, 3 bad" and len(lines) == 6
    assert all(line.startswith(f"{path}, record 0") for line, path in zip(lines[2:], bad))
    assert lines[5] == f"listed in {image_folder}/quarantine.csv: training leaves them out"


def test_pack_digits(tmp_path):
    options = {"num_shards": {"train": 0, "validation": 3}, "seed": 0, "threads": 1}
    assert pack.pack("digits", str(tmp_path / "out"), **options) == {"train": 1437, "validation": 360}
    assert sources.open_source(str(tmp_path / "out"), split="train").shard_sizes == (718, 719)
    held_out = sources.open_source(str(tmp_path / "out"), split="validation").for_classes(10)
    assert held_out.shard_sizes == (120, 120, 120) and held_out.label[:12].tolist() == FIRST_HELD_OUT


# -- classes and splits that are not given ---------------------------------------------------------------------------


def test_the_number_of_classes_follows_from_the_images(image_folder, tmp_path):
    """From class folders and from records, which count from 0 or from 1."""
    train = sources.open_source(str(image_folder), split="train").for_classes(0)
    assert train.num_classes == 3
    for base in (0, -1):  # written labels are higher by one, as in the published records
        out = tmp_path / f"records{base}"
        out.mkdir()
        image = (image_folder / "val" / "n02" / "a.jpg").read_bytes()
        images = shards.Images([base, base + 1, base + 3], lambda k: image)
        assert list(shards.write_split(out, "train", images, num_shards=1))[-1] == 3
        index = sources.open_source(str(out), split="train").for_classes(0)
        assert (index.num_classes, index.label.tolist(), index.label_base) == (4, [0, 1, 3], base + 1)


def test_one_label_is_nothing_to_tell_apart(image_folder, tmp_path):
    image = (image_folder / "val" / "n02" / "a.jpg").read_bytes()
    (tmp_path / "out").mkdir()
    assert list(shards.write_split(tmp_path / "out", "train", shards.Images([0, 0], lambda k: image), num_shards=1))
    with pytest.raises(ValueError, match="/out has one class, label 1: expected two or more to tell apart"):
        sources.open_source(str(tmp_path / "out"), split="train").for_classes(0)


def test_a_test_folder_holds_images_out_if_there_is_no_other(image_folder):
    (image_folder / "val").rename(image_folder / "test")
    assert len(sources.open_source(str(image_folder), split="validation")) == 2
    for k in range(3):
        write(image_folder / "valid" / "n01" / f"{k}.jpg", picture(60))
    assert len(sources.open_source(str(image_folder), split="validation")) == 3, "not those of the test"
    write(image_folder / "validation" / "n01" / "a.jpg", picture(60))
    assert len(sources.open_source(str(image_folder), split="validation")) == 1
    with pytest.raises(ValueError, match=f"It looks like one split: give {image_folder}, the folder around it."):
        sources.open_source(str(image_folder / "test"), split="train")


def test_who_has_no_held_out_images_is_told_how_to_do_without(image_folder, tmp_path):
    (image_folder / "val").rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"has no validation split: .* set --run.eval_every never\.$"):
        sources.open_source(str(image_folder), split="validation")
    (image_folder / "test").mkdir()  # images without labels, as competitions give them
    picture(1).save(image_folder / "test" / "1.jpg")
    with pytest.raises(ValueError, match=r"/test holds images in no class folder, such as 1.jpg: .* never\.$"):
        sources.open_source(str(image_folder), split="validation")
