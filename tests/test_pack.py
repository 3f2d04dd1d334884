"""Packing from what data sets are published in, and going on after an interruption; sources.py has its own file."""

import io
import json
import os
import pickle
import shutil
import struct
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from largebatch import pack
from largebatch.data import archives, records, sources
from largebatch.data.dali import TrainLoader
from largebatch.data.order import Plan
from largebatch.data.records import FILENAME, IMAGE, LABEL
from largebatch.pack import inputs
from largebatch.process.progress import show_progress

WNIDS = ["n01440764", "n01443537", "n01484850"]
NUMBERS = {"n01440764": 7, "n01443537": 3, "n01484850": 9}  # ILSVRC2012_ID: in another order than the names
VALIDATION = [2, 0, 1, 2]  # the class of each validation image


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def encoded(seed, kind="JPEG", mode="RGB"):
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((40 + seed % 9, 30), Image.Resampling.BICUBIC).convert(mode).save(file, kind)
    return file.getvalue()


def payloads(folder, split):
    """The features of all records of a packed split."""
    files = sorted(folder.glob(f"{split}-*"))
    return [records.decode_example(payload) for file in files for _, payload, _ in records.scan_records(str(file))]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- ImageNet --------------------------------------------------------------------------------------------------------


@pytest.fixture
def image_folder(tmp_path):
    """As ImageNet is unpacked, with a PNG and a CMYK file under JPEG names."""
    folder, seed = tmp_path / "images", 0
    for wnid in WNIDS:
        for split in ("train", "val"):
            (folder / split / wnid).mkdir(parents=True)
        for k in (10, 9, 100):
            seed += 1
            kind, mode = {4: ("PNG", "RGB"), 5: ("JPEG", "CMYK")}.get(seed, ("JPEG", "RGB"))
            (folder / "train" / wnid / f"{wnid}_{k}.JPEG").write_bytes(encoded(seed, kind, mode))
    for number, label in enumerate(VALIDATION, start=1):
        name = f"ILSVRC2012_val_{number:08d}.JPEG"
        (folder / "val" / WNIDS[label] / name).write_bytes(encoded(100 + number))
    return folder


def test_packed_images_may_lack_the_last_class(tmp_path, image_folder):
    """As those of the folder do, whose empty class folder counts."""
    shutil.rmtree(image_folder / "train")
    for path in (image_folder / "val" / WNIDS[-1]).iterdir():
        path.unlink()
    expected = sources.open_source(str(image_folder), split="validation").for_classes(3)
    pack.pack(str(image_folder), str(tmp_path / "out"), num_shards={"validation": 1}, seed=0, threads=1)
    index = sources.open_source(str(tmp_path / "out"), split="validation").for_classes(3)
    assert sorted(index.label) == sorted(expected.label) and index.label.max() == 1


def add(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def synsets():
    """In the structure of the published meta.mat; above the three classes, one that has them as children."""
    names = "ILSVRC2012_ID WNID words gloss num_children children wordnet_height num_train_images".split()
    rows = [(NUMBERS[wnid], wnid, "fish", "a fish", 0.0, np.zeros((0, 0)), 0.0, 1300.0) for wnid in WNIDS]
    rows.append((1001, "n00001740", "entity", "all", 3.0, np.array([7.0, 3.0, 9.0]), 1.0, 0.0))
    table = np.empty((len(rows), 1), dtype=[(name, object) for name in names])
    table[:, 0] = rows
    return table


@pytest.fixture
def tar_folder(tmp_path, image_folder):
    """The same images as published: a tar of tars, a flat tar, and the classes of the second in a third."""
    folder = tmp_path / "tars"
    folder.mkdir()
    with tarfile.open(folder / "ILSVRC2012_img_train.tar", "w") as train:
        for wnid in WNIDS[::-1]:
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for path in (image_folder / "train" / wnid).iterdir():
                    add(tar, path.name, path.read_bytes())
            add(train, f"{wnid}.tar", inner.getvalue())
    with tarfile.open(folder / "ILSVRC2012_img_val.tar", "w") as tar:
        for path in sorted((image_folder / "val").rglob("*.JPEG"), key=lambda path: path.name)[::-1]:
            add(tar, path.name, path.read_bytes())
    write_devkit(folder, VALIDATION)
    return folder


def write_devkit(folder, labels):
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets()})
    lines = "".join(f"{NUMBERS[WNIDS[label]]}\n" for label in labels)
    with tarfile.open(folder / archives.DEVKIT, "w:gz") as tar:
        add(tar, "ILSVRC2012_devkit_t12/data/meta.mat", meta.getvalue())
        add(tar, f"ILSVRC2012_devkit_t12/data/{archives.GROUND_TRUTH}", lines.encode())


def test_tars_give_the_very_shards_of_the_unpacked_folder(tmp_path, image_folder, tar_folder, capsys):
    for source, out in ((image_folder, "a"), (tar_folder, "b")):
        assert pack.run([str(source), str(tmp_path / out), "--shards", "2", "--threads", "2"]) == 0
    ours, theirs = contents(tmp_path / "b"), contents(tmp_path / "a")
    plans = [json.loads(content.pop(pack.PLAN)) for content in (ours, theirs)]
    assert ours == theirs and len(ours) == 4 and plans[0]["images"] == {"train": 9, "validation": 4}
    assert json.loads(ours["classes.json"]) == WNIDS
    assert capsys.readouterr().out == "train: 9 images\nvalidation: 4 images\n" * 2
    held_out = {features[FILENAME][0].decode(): features for features in payloads(tmp_path / "b", "validation")}
    for number, label in enumerate(VALIDATION, start=1):
        features = held_out[f"ILSVRC2012_val_{number:08d}.JPEG"]
        assert features[LABEL] == [label + 1] and features[IMAGE] == [encoded(100 + number)]
    for features in payloads(tmp_path / "b", "train"):
        assert WNIDS.index(features[FILENAME][0].decode().partition("_")[0]) + 1 == features[LABEL][0]


def test_validation_tar_alone_is_numbered_by_the_devkit(tmp_path, tar_folder):
    (tar_folder / "ILSVRC2012_img_train.tar").unlink()
    assert pack.run([str(tar_folder), str(tmp_path / "out")]) == 0
    assert sorted(features[LABEL][0] for features in payloads(tmp_path / "out", "validation")) == [1, 2, 3, 3]
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == WNIDS


def test_tars_that_do_not_fit_are_refused(tmp_path, tar_folder):
    def refused(message):
        with pytest.raises(ValueError, match=message):
            pack.run([str(tar_folder), str(tmp_path / "out")])
        assert not (tmp_path / "out").exists()

    write_devkit(tar_folder, VALIDATION[:3])
    refused("img_val.tar holds 4 images, and .*devkit_t12.tar.gz classes for 3")
    (tar_folder / archives.DEVKIT).unlink()
    refused("devkit_t12.tar.gz is missing: it has the classes of the images in ILSVRC2012_img_val.tar")
    write_devkit(tar_folder, VALIDATION)
    (tar_folder / archives.DEVKIT).write_bytes((tar_folder / archives.DEVKIT).read_bytes()[:200])
    refused("devkit_t12.tar.gz is damaged")
    write_devkit(tar_folder, VALIDATION)
    train = tar_folder / "ILSVRC2012_img_train.tar"
    whole = train.read_bytes()
    for size in ((2**62).to_bytes(12, "big"), (2**70).to_bytes(12, "big"), bytes(1) + b"\xff" * 11):
        header = bytearray(whole[:512])
        header[124:136] = bytes([0x80]) + size[1:]
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        train.write_bytes(bytes(header) + whole[512:])
        refused(f"{train} is damaged, copy it again|A tar in .* is damaged")
    train.write_bytes(whole[:2000])
    refused("A tar in .* is damaged")


def add_link(tar, name, target, kind=tarfile.SYMTYPE):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    tar.addfile(member)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("place", ["outer", "inner", "validation"])
def test_a_link_in_a_tar_is_refused(tmp_path, tar_folder, place, kind):
    name = "ILSVRC2012_img_val.tar" if place == "validation" else "ILSVRC2012_img_train.tar"
    with tarfile.open(tar_folder / name, "a") as tar:
        if place == "inner":
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as images:
                add_link(images, "n3_1.JPEG", "/etc/passwd", kind)
            add(tar, "n3.tar", inner.getvalue())
        else:
            add_link(tar, "n3.tar", "../../outside", kind)
    with pytest.raises(ValueError, match=f"{name}(: n3.tar)? holds n3.*, which is no ordinary file: expected the publ"):
        pack.run([str(tar_folder), str(tmp_path / "out")])


def test_a_link_in_the_devkit_is_not_followed(tmp_path, tar_folder):
    with tarfile.open(tar_folder / archives.DEVKIT, "w:gz") as tar:
        add_link(tar, f"data/{archives.GROUND_TRUTH}", "/etc/passwd")
        add_link(tar, "elsewhere", "../../outside")
    with pytest.raises(ValueError, match=f"devkit_t12.tar.gz has no file {archives.GROUND_TRUTH}"):
        pack.run([str(tar_folder), str(tmp_path / "out")])
    with tarfile.open(tar_folder / archives.DEVKIT, "w:gz") as tar:
        add(tar, archives.GROUND_TRUTH, b"7\n" * 4)
        add(tar, archives.META, b"MATLAB 5.0 MAT-file" * 20)
    with pytest.raises(ValueError, match="devkit_t12.tar.gz: meta.mat is damaged, copy it again"):
        pack.run([str(tar_folder), str(tmp_path / "out")])


def test_names_in_a_tar_lead_nowhere(tmp_path, tar_folder, image_folder):
    images = sorted((image_folder / "val").rglob("*.JPEG"), key=lambda path: path.name)
    with tarfile.open(tar_folder / "ILSVRC2012_img_val.tar", "w") as tar:
        for path, parent in zip(images, ("..", "../../x", "/", str(tmp_path))):
            add(tar, f"{parent}/{path.name}", path.read_bytes())
    before = set(tmp_path.rglob("*.JPEG"))
    assert pack.run([str(tar_folder), str(tmp_path / "out")]) == 0
    assert set(tmp_path.rglob("*.JPEG")) == before
    held_out = sorted(features[FILENAME][0].decode() for features in payloads(tmp_path / "out", "validation"))
    assert held_out == [path.name for path in images]


# -- CIFAR-10 --------------------------------------------------------------------------------------------------------


class Python2Pickler(pickle._Pickler):
    """Writes every text and bytes as Python 2 wrote its str, like the published batches."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_str(self, text):
        data = text if isinstance(text, bytes) else text.encode("latin1")
        self.write(b"T" + struct.pack("<i", len(data)) + data)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_str


def python2(value):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue().replace(b"numpy._core", b"numpy.core")


@pytest.fixture
def cifar(tmp_path):
    """Six batches of eight images: the pixels (6, 8, 3, 32, 32), labels (6, 8), and the files in both versions."""
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (6, 8, 3, 32, 32), dtype=np.uint8), rng.permuted([list(range(8))] * 6, axis=1)
    labels[:, 3] += 2  # up to 9
    binary, python = tmp_path / "cifar-10-batches-bin", tmp_path / "cifar-10-batches-py"
    binary.mkdir(), python.mkdir()
    for k, name in enumerate([*archives.CIFAR_BATCHES["train"], *archives.CIFAR_BATCHES["validation"]]):
        rows = pixels[k].reshape(8, -1)
        (binary / f"{name}.bin").write_bytes(np.c_[labels[k].astype(np.uint8), rows].tobytes())
        batch = {"data": rows, "labels": labels[k].tolist(), "filenames": [f"cat_s_{k}{n}.png" for n in range(8)]}
        (python / name).write_bytes(python2(batch | {"batch_label": "batch"}))
    for folder, name in ((binary, "cifar-10-binary.tar.gz"), (python, "cifar-10-python.tar.gz")):
        with tarfile.open(tmp_path / name, "w:gz") as tar:
            tar.add(folder, folder.name)
    return pixels, labels, tmp_path


FORMS = ["cifar-10-batches-bin", "cifar-10-batches-py", "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"]


@pytest.mark.parametrize("form", FORMS)
def test_cifar10_keeps_every_pixel(tmp_path, cifar, form):
    pixels, labels, folder = cifar
    assert pack.run([str(folder / form), str(tmp_path / "out"), "--shards", "3", "--seed", "5"]) == 0
    for split, batches in (("train", slice(0, 5)), ("validation", slice(5, 6))):
        rows = pixels[batches].reshape(-1, 3072)
        expected = {image.tobytes(): label for image, label in zip(rows, labels[batches].flat)}
        packed = payloads(tmp_path / "out", split)
        for features in packed:
            image = Image.open(io.BytesIO(features[IMAGE][0]))
            assert image.format == "PNG" and image.mode == "RGB"
            planes = np.asarray(image).transpose(2, 0, 1)
            assert expected.pop(planes.tobytes()) + 1 == features[LABEL][0]
            if "bin" in form:
                assert FILENAME not in features
            else:
                name = features[FILENAME][0].decode()
                assert np.array_equal(pixels[int(name[6]), int(name[7])], planes)
        assert not expected


def test_loader_gives_the_exact_pixels_of_cifar10(cifar):
    pixels, labels, folder = cifar
    index = sources.open_source(str(folder / "cifar-10-batches-bin"), split="train").for_classes(10)
    assert index.label.tolist() == labels[:5].ravel().tolist()  # in the order of the files
    loader = TrainLoader(
        index, Plan(40, 8, 8, 40, seed=0), shard=0, num_shards=1, img_size=32, mean=(0.0,) * 3, std=(1.0,) * 3,
        interpolation="bicubic", scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, num_threads=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    flat = pixels.reshape(-1, 3, 32, 32)
    for batch in loader:
        for image, sample in zip(batch.images.numpy(), batch.samples):
            assert np.abs(image * 255 - flat[sample]).max() < 1e-3
    held_out = sources.open_source(str(folder / "cifar-10-batches-bin"), split="validation")
    assert len(held_out) == 8
    assert sources.class_names(held_out) == archives.CIFAR_CLASSES


def test_cifar10_of_python_3_and_what_is_no_batch(cifar, tmp_path):
    pixels, _, folder = cifar
    file = folder / "cifar-10-batches-py" / "data_batch_2"
    batch = {b"data": pixels[1].reshape(8, -1), b"labels": list(range(8)), b"filenames": [b"a.png"] * 8}

    def opened():
        return archives.cifar10(folder / "cifar-10-batches-py", "train")

    file.write_bytes(pickle.dumps(batch, protocol=2))  # with NumPy's present names
    assert opened().labels[8:16] == list(range(8))

    class Malicious:
        def __init__(self, *call):
            self.call = call

        def __reduce__(self):
            return self.call

    array = np.empty(0).__reduce__()[0]
    for bad, message in [
        (batch | {b"data": Malicious(os.system, ("echo harm",))}, "asks for (posix|nt).system, which no batch needs"),
        (batch | {b"labels": [1, 2]}, "it has 2 labels, 8 names, and pixels of shape .8, 3072."),
        (batch | {b"data": Malicious(array, (np.ndarray, (1 << 40,), b"b"))}, "an array of shape .1099511627776,"),
        (batch | {b"data": Malicious(np.ndarray, ((1 << 40,),))}, "data_batch_2 is not a batch of CIFAR-10: "),
        ({b"data": 1}, "data_batch_2 is not a batch of CIFAR-10"),
    ]:
        file.write_bytes(pickle.dumps(bad, protocol=2))
        with pytest.raises(ValueError, match=f"{message}"):
            opened()
    long_text, far_memo = b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40), b"\x80\x02Nr" + struct.pack("<I", 1 << 31)
    for bad, message in [(long_text, "expected 1099511627776 bytes"), (far_memo, "it asks for more memory")]:
        file.write_bytes(bad + b"xy.")
        with pytest.raises(ValueError, match=f"data_batch_2 is not a batch of CIFAR-10: {message}"):
            opened()
    with open(file, "wb") as hole:
        hole.truncate(1 << 40)
    with pytest.raises(ValueError, match="data_batch_2 has 1,099,511,627,776 bytes, and the published file less than"):
        opened()
    file.unlink()
    with pytest.raises(ValueError, match="data_batch_2 is missing"):
        opened()
    binary = folder / "cifar-10-batches-bin" / "data_batch_3.bin"
    binary.write_bytes(binary.read_bytes()[:-1])
    with pytest.raises(ValueError, match="data_batch_3.bin is not a batch of CIFAR-10"):
        archives.cifar10(folder / "cifar-10-batches-bin", "train")


# -- TFRecords -------------------------------------------------------------------------------------------------------


def write_records(path, labels):
    extra = {"image/object/bbox/xmin": [0.5, 0.25], "image/height": [30], FILENAME: [b"n1_7.JPEG"], "map": [b"\0\1"]}
    kinds = ("JPEG", "PNG")
    features = [{IMAGE: [encoded(k, kinds[k % 2])], LABEL: [label], **extra} for k, label in enumerate(labels)]
    records.write_records(path, [records.encode_example(one) for one in features])
    return features


def larger(seed, width, height, mode="RGB", kind="JPEG"):
    """A picture of smooth colours with grain, in the bytes of a file."""
    rng, file = np.random.default_rng(seed), io.BytesIO()
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels += rng.integers(-6, 7, pixels.shape, dtype=np.int16)
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert(mode).save(file, kind)
    return file.getvalue()


SMALL_SIDE = 48
ORIGINALS = [
    larger(0, 90, 61),
    larger(1, 61, 90, "L"),
    larger(2, 200, 49, "CMYK"),
    larger(3, 75, 75, kind="PNG"),
    larger(4, 99, SMALL_SIDE),  # this one and the next are small enough
    larger(5, 20, 30, kind="PNG"),
]


def shrink_by_pil(data):
    image = Image.open(io.BytesIO(data))
    if min(image.size) > SMALL_SIDE:
        image = image if image.mode == "L" else image.convert("RGB")
        size = [SMALL_SIDE * length // min(image.size) for length in image.size]
        file = io.BytesIO()
        image.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        image = Image.open(file)
    return image


def test_a_copy_of_small_images(tmp_path):
    """To the bit what PIL makes of the large ones; small ones keep their bytes."""
    (tmp_path / "in").mkdir()
    kept = {"image/object/bbox/xmin": [0.5], FILENAME: [b"n1_7.JPEG"]}
    features = [{IMAGE: [data], LABEL: [k + 1], "image/height": [90], **kept} for k, data in enumerate(ORIGINALS)]
    records.write_records(tmp_path / "in" / "train-0.tfrecord", [records.encode_example(one) for one in features])
    command = [str(tmp_path / "in"), str(tmp_path / "out"), "--shards", "2"]
    assert pack.run([*command, "--shorter-side", str(SMALL_SIDE)]) == 0
    assert json.loads((tmp_path / "out" / "packing.json").read_text())["shorter_side"] == SMALL_SIDE
    packed = {one[LABEL][0] - 1: one for one in payloads(tmp_path / "out", "train")}
    assert sorted(packed) == list(range(6))
    for k, one in packed.items():
        assert {name: one[name] for name in one if name not in (IMAGE, LABEL)} == kept
        ours, theirs = Image.open(io.BytesIO(one[IMAGE][0])), shrink_by_pil(ORIGINALS[k])
        assert (one[IMAGE][0] == ORIGINALS[k]) == (k >= 4)
        assert ours.mode == theirs.mode and np.array_equal(np.asarray(ours), np.asarray(theirs))
    index = sources.open_source(str(tmp_path / "out"), split="train")
    assert np.minimum(index.width, index.height).max() == SMALL_SIDE
    with pytest.raises(ValueError, match="made differently .shorter_side 48, now None.: choose another folder"):
        pack.run(command)
    with pytest.raises(ValueError, match="--shorter-side is -1: expected a number of pixels"):
        pack.run([*command, "--shorter-side", "-1"])


@pytest.mark.parametrize("base", [0, 1])
def test_records_are_packed_again_with_all_they_have(tmp_path, base):
    (tmp_path / "in").mkdir()
    written = write_records(tmp_path / "in" / "train-0.tfrecord", [base + k % 3 for k in range(6)])
    written += write_records(tmp_path / "in" / "train-1.tfrecord", [base + 2])
    assert pack.run([str(tmp_path / "in"), str(tmp_path / "out"), "--shards", "3"]) == 0
    packed = payloads(tmp_path / "out", "train")
    assert packed != [features | {LABEL: [features[LABEL][0] + 1 - base]} for features in written]  # shuffled
    for features in written:
        packed.remove(features | {LABEL: [features[LABEL][0] + 1 - base]})
    assert packed == []
    sizes = sources.open_source(str(tmp_path / "out"), split="train").shard_sizes
    assert sizes == (2, 2, 3)


def test_record_that_went_bad_after_it_was_indexed_is_not_packed(tmp_path):
    path = tmp_path / "in" / "train-0.tfrecord"
    path.parent.mkdir()
    write_records(path, [1, 2, 3])
    index = sources.open_source(str(path.parent), split="train")
    status = os.stat(path)
    data = bytearray(path.read_bytes())
    data[index.offset[1] - 4] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ValueError, match=f"{path}, record 1 .* has a wrong CRC"):
        pack.run([str(path.parent), str(tmp_path / "out")])


def test_levels_of_16_bits_are_scaled_as_the_decoder_does():
    ramp, file = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16, io.BytesIO()
    Image.fromarray(ramp).save(file, "PNG")
    packed = Image.open(io.BytesIO(inputs.as_jpeg(file.getvalue(), where="")))
    levels = np.asarray(packed).astype(float)
    assert levels.shape == (64, 64, 3) and np.abs(levels - ramp[..., None] / 257).max() <= 2


# -- going on --------------------------------------------------------------------------------------------------------


def test_interrupted_packing_goes_on_and_gives_the_same_bytes(tmp_path, image_folder, capsys):
    command = [str(image_folder), str(tmp_path / "out"), "--shards", "4", "--threads", "1"]
    assert pack.run([str(image_folder), str(tmp_path / "whole"), *command[2:]]) == 0
    order = [features[FILENAME][0].decode() for features in payloads(tmp_path / "whole", "train")]
    stumble = next((image_folder / "train").rglob(order[5]))  # in the third shard
    data = stumble.read_bytes()
    stumble.write_bytes(data[:100])
    with pytest.raises(ValueError, match=f"{order[5]} cannot be decoded"):
        pack.run(command)
    assert sorted(os.listdir(tmp_path / "out")) == [pack.PLAN, "train-00000-of-00004", "train-00001-of-00004"]
    kept = (tmp_path / "out" / "train-00001-of-00004").stat()
    (tmp_path / "out" / ".train-00002-of-00004.0123").write_bytes(b"what a kill leaves")
    stumble.write_bytes(data)
    assert pack.run(command) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert (tmp_path / "out" / "train-00001-of-00004").stat().st_mtime_ns == kept.st_mtime_ns
    assert pack.run(command) == 0  # nothing is left to do
    (tmp_path / "out" / "validation-00000-of-00001").unlink()
    assert pack.run(command) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    capsys.readouterr()


def test_a_source_that_is_not_there_and_a_file_that_is_no_image(tmp_path, image_folder):
    with pytest.raises(ValueError, match="There is no folder .*nowhere: expected one with images, digits"):
        pack.run([str(tmp_path / "nowhere"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    next((image_folder / "train").rglob("*.JPEG")).write_text("no image")
    sentence = f"JPEG cannot be decoded .is not a readable .*format.; .*pack check {image_folder}` lists all such, and"
    with pytest.raises(ValueError, match=sentence):
        pack.run([str(image_folder), str(tmp_path / "out"), "--shards", "1"])


def test_images_are_not_packed_into_their_own_folder(image_folder):
    before = sorted(image_folder.rglob("*"))
    with pytest.raises(ValueError, match="would be written into .* itself, among the images: give them a folder"):
        pack.run([str(image_folder), f"{image_folder}/../{image_folder.name}"])
    assert sorted(image_folder.rglob("*")) == before


def test_folder_of_another_packing_is_refused(tmp_path, image_folder):
    command = [str(image_folder), str(tmp_path / "out"), "--shards", "2"]
    assert pack.run(command) == 0
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="already has shards that were made differently .seed 0, now 1.: choose"):
        pack.run([*command, "--seed", "1"])
    (image_folder / "train" / WNIDS[0] / "more.JPEG").write_bytes(encoded(1))
    with pytest.raises(ValueError, match="images .*'train': 9.*, now .*'train': 10.*digest"):
        pack.run(command)
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / pack.PLAN).unlink()
    with pytest.raises(ValueError, match="already has shards .*there is no packing.json"):
        pack.run(command)


def test_a_failed_shard_stops_the_others(tmp_path, image_folder):
    """All threads are at work when one finds a bad image; what is not whole is not there."""
    for path in (image_folder / "train").rglob("*.JPEG"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be decoded"):
        pack.run([str(image_folder), str(tmp_path / "out"), "--shards", "9", "--threads", "4"])
    assert os.listdir(tmp_path / "out") == [pack.PLAN]


def test_progress_fills_a_terminal_line_and_not_a_log(monkeypatch):
    for terminal, lines in ((False, 10), (True, 1)):
        stream = io.StringIO()
        stream.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with show_progress("packing", 1000) as show:
            for done in range(1, 1001):
                show(done)
        assert stream.getvalue().count("\n") == lines and "packing: 1000 of 1000 images" in stream.getvalue()
        assert terminal == ("\N{BOX DRAWINGS HEAVY HORIZONTAL}" in stream.getvalue())


def test_shares_of_several_processes_are_disjoint(tmp_path, image_folder):
    options = {"num_shards": {"train": 5, "validation": 2}, "seed": 0, "threads": 1}
    seen = []
    for rank in (1, 2, 0):
        before = set(tmp_path.glob("out/*-of-*"))
        pack.pack(str(image_folder), str(tmp_path / "out"), **options, world=pack.World(rank, 3))
        new = sorted(path.name for path in set(tmp_path.glob("out/*-of-*")) - before)
        seen.append([int(name.split("-")[1]) for name in new])
    assert seen == [[1, 4, 1], [2], [0, 3, 0]]
