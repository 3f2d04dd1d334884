"""IDX files, as MNIST and EMNIST are published: every pixel and label, and one sentence for a file that is damaged."""

import gzip
import hashlib
import io
import json
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

from largebatch import pack
from largebatch.data import idx, sources
from largebatch.data.dali import TrainLoader
from largebatch.data.order import Plan
from largebatch.pack import inputs

COUNTS = {"train": 20, "validation": 7}
SIDES = 9, 6  # an image that is not square shows that it was transposed


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def content(array):
    """An IDX file, after the published description: two zeros, the type, the number of dimensions, their sizes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def names(split, *, of="", separator="-"):
    part = "train" if split == "train" else "test" if of else "t10k"
    return [f"{of}{part}-{kind}{separator}idx{n}-ubyte" for kind, n in (("images", 3), ("labels", 1))]


def write(folder, *, of="", classes=10, first=0, packed=True, separator="-", sides=SIDES):
    """Write four files; return the pixels and labels of each split."""
    rng, data = np.random.default_rng(0), {}
    folder.mkdir(exist_ok=True)
    for split, count in COUNTS.items():
        labels = rng.permutation(np.arange(count, dtype=np.uint8) % classes + first)
        data[split] = rng.integers(0, 256, (count, *sides), dtype=np.uint8), labels
        for name, array in zip(names(split, of=of, separator=separator), data[split]):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content(array)))
            else:
                (folder / name).write_bytes(content(array))
    return data


def stored(index):
    """The pixels in the cache, which must be those of grey PNGs."""
    images = [Image.open(io.BytesIO(index.read(k))) for k in range(len(index))]
    assert {(image.format, image.mode) for image in images} == {("PNG", "L")}
    return np.stack([np.asarray(image) for image in images])


@pytest.mark.parametrize("packed, separator", [(True, "-"), (False, "-"), (False, ".")])
def test_every_pixel_and_label_is_kept(tmp_path, packed, separator):
    data = write(tmp_path / "mnist", packed=packed, separator=separator)
    for split, (pixels, labels) in data.items():
        index = sources.open_source(str(tmp_path / "mnist"), split=split).for_classes(10)
        assert np.array_equal(stored(index), pixels) and index.label.tolist() == labels.tolist()
        assert sources.class_names(index) == (), "digits, clothes and kana have files of the same names"


def test_loader_gives_the_grey_level_in_each_channel(tmp_path):
    pixels, labels = write(tmp_path / "mnist", sides=(8, 8))["train"]
    index = sources.open_source(str(tmp_path / "mnist"), split="train").for_classes(10)
    loader = TrainLoader(
        index, Plan(20, 4, 4, 20, seed=0), shard=0, num_shards=1, img_size=8, mean=(0.0,) * 3, std=(1.0,) * 3,
        interpolation="bicubic", scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, num_threads=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    seen = []
    for batch in loader:
        for image, label, sample in zip(batch.images.numpy(), batch.labels.tolist(), batch.samples):
            assert np.abs(image * 255 - pixels[sample]).max() < 1e-3 and label == labels[sample]
            seen.append(sample)
    assert sorted(seen) == list(range(20))


@pytest.mark.parametrize(
    "name, classes", {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}.items()
)
def test_images_of_emnist_are_upright_and_its_classes_have_names(tmp_path, name, classes):
    first = int(name == "letters")
    data = write(tmp_path / "emnist", of=f"emnist-{name}-", classes=classes, first=first)
    for split, (pixels, labels) in data.items():
        index = sources.open_source(str(tmp_path / "emnist"), split=split)
        assert np.array_equal(stored(index), pixels.transpose(0, 2, 1))
        assert index.label.tolist() == (labels - first).tolist()
        assert len(set(sources.class_names(index))) == classes


def test_fashion_mnist_is_told_by_its_labels(tmp_path, monkeypatch):
    data = write(tmp_path / "fashion")
    digests = [hashlib.sha256(labels.tobytes()).hexdigest() for _, labels in data.values()]
    monkeypatch.setattr(idx, "FASHION_LABELS", tuple(digests))
    for split in data:
        names = sources.class_names(sources.open_source(str(tmp_path / "fashion"), split=split))
        assert names[0] == "T-shirt/top" and names[9] == "Ankle boot" and len(set(names)) == 10


def test_packed_images_are_those_of_the_folder(tmp_path, capsys):
    data = write(tmp_path / "emnist", of="emnist-digits-")
    out = str(tmp_path / "out")
    assert pack.run([str(tmp_path / "emnist"), out, "--shards", "3"]) == 0
    assert json.loads((tmp_path / "out" / sources.CLASSES).read_text()) == list("0123456789")
    for split, (pixels, labels) in data.items():
        index = sources.open_source(out, split=split).for_classes(10)
        given = sorted((pixels[k].T.tobytes(), int(labels[k])) for k in range(len(labels)))
        assert sorted(zip((image.tobytes() for image in stored(index)), index.label.tolist())) == given
    assert pack.run(["check", str(tmp_path / "emnist")]) == 0
    assert "train: 20 images, 0 bad\nvalidation: 7 images, 0 bad" in capsys.readouterr().out


def test_changed_files_are_read_again_and_the_unpacked_ones_first(tmp_path):
    pixels, name = write(tmp_path / "mnist")["validation"][0], names("validation")[0]
    for file, shown in ((f"{name}.gz", pixels), (f"{name}.gz", 255 - pixels), (name, pixels // 2)):
        packed = file.endswith(".gz")
        (tmp_path / "mnist" / file).write_bytes(gzip.compress(content(shown)) if packed else content(shown))
        assert np.array_equal(stored(sources.open_source(str(tmp_path / "mnist"), split="validation")), shown)


def test_folder_around_is_told_its_name(tmp_path):
    write(tmp_path / "raw")  # as torchvision's MNIST/raw
    with pytest.raises(ValueError, match=f"Its folder raw has one: give {tmp_path / 'raw'}.$"):
        sources.open_source(str(tmp_path), split="train")


IMAGES, LABELS = (f"{name}.gz" for name in names("train"))
HELD_OUT = f"{names('validation')[1]}.gz"
PIXELS = np.zeros((20, *SIDES), dtype=np.uint8)
PACKED = gzip.compress(content(PIXELS))
DAMAGED = {  # the file, its bytes if it is there, and what the sentence says of it
    "empty": (IMAGES, b"", "it begins with nothing, expected 00000803 and 12 more bytes."),
    "cut in the header": (IMAGES, content(PIXELS)[:6], "it begins with 000008030000, expected 00000803 and 12 more"),
    "a page": (IMAGES, b"<html><body>Not found", "it begins with 3c68746d"),
    "one image": (IMAGES, content(PIXELS[0]), "it begins with 00000802"),
    "floats": (IMAGES, b"\0\0\x0d" + content(PIXELS)[3:], "it begins with 00000d03"),
    "labels": (IMAGES, content(np.zeros(20, dtype=np.uint8)), "it begins with 00000801"),
    "images": (LABELS, content(PIXELS), "is no whole IDX file of labels, copy it again: it begins with 00000803"),
    "cut gzip": (IMAGES, PACKED[:-9], "Compressed file ended before the end-of-stream marker was reached."),
    "wrong checksum": (IMAGES, PACKED[:-8] + bytes(8), "CRC check failed"),
    "no deflate": (IMAGES, PACKED[:10] + b"\xff" * 30, "Error -3 while decompressing data"),
    "after gzip": (IMAGES, PACKED + b"more", "Not a gzipped file"),
    "short": (IMAGES, content(PIXELS)[:-1], "it announces 1,080 bytes, and has 1,079."),
    "long": (IMAGES, content(PIXELS) + b"x", "it announces 1,080 bytes, and has more."),
    "long gzip": (IMAGES, gzip.compress(content(PIXELS) + bytes(99)), "it announces 1,080 bytes, and has more."),
    "no images": (IMAGES, content(PIXELS[:0]), "it announces 0 bytes, expected 1 to 1,000,000,000."),
    "fewer images": (IMAGES, content(PIXELS[:19]), f"has 19 images, and .*{LABELS} 20 labels: copy both again."),
    "no class": (LABELS, content(np.full(20, 10, dtype=np.uint8)), "has label 10 .of image 0., expected 0 to 9: "),
    "missing": (IMAGES, None, "expected images and labels, for training and for testing."),
    "missing for testing": (HELD_OUT, None, "expected images and labels, for training and for testing."),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named_in_one_sentence(tmp_path, damage):
    name, data, message = DAMAGED[damage]
    folder = tmp_path / "mnist"
    write(folder)
    (folder / name).unlink()
    if data is not None:
        (folder / name).write_bytes(data)
    for call in (sources.open_source, inputs.open_images):
        with pytest.raises(ValueError, match=rf"^[^\n]*{name}[^\n]* {message}[^\n]*$"):
            call(str(folder), split="train")
    assert not list((tmp_path / "cache" / "largebatch").glob("idx-*")), "a half-written copy is left"


def test_letters_of_emnist_begin_with_1(tmp_path):
    write(tmp_path / "emnist", of="emnist-letters-", classes=26)
    with pytest.raises(ValueError, match="emnist-letters-train-labels-idx1-ubyte.gz has label 0 .*, expected 1 to 26"):
        sources.open_source(str(tmp_path / "emnist"), split="train")


def test_several_data_sets_in_one_folder_are_refused(tmp_path):
    for of in ("emnist-letters-", "emnist-digits-"):
        write(tmp_path / "gzip", of=of, first=1, classes=9)
    message = "of several data sets, emnist-digits-. and emnist-letters-.: give each a folder of its own.$"
    with pytest.raises(ValueError, match=message):
        sources.open_source(str(tmp_path / "gzip"), split="train")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [(2**32 - 1, 2**32 - 1, 2**32 - 1), (900, 1000, 1000)])
def test_no_memory_is_taken_for_what_a_header_announces(tmp_path, shape, packed):
    write(tmp_path / "mnist")
    data = struct.pack(">4B3I", 0, 0, 8, 3, *shape) + bytes(100)
    (tmp_path / "mnist" / IMAGES).write_bytes(gzip.compress(data) if packed else data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it announces [0-9,]* bytes, (and has 100|expected 1 to 1,000,000,000)"):
            idx.idx_images(tmp_path / "mnist", "train")
        assert tracemalloc.get_traced_memory()[1] < 8 * idx.CHUNK
    finally:
        tracemalloc.stop()
