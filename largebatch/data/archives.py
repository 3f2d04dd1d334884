"""Reads data sets in their published files, ImageNet's tars and CIFAR-10, without unpacking them.

    ILSVRC2012_img_train.tar      1000 tars of JPEGs, nXXXXXXXX.tar
    ILSVRC2012_img_val.tar        50,000 JPEGs
    ILSVRC2012_devkit_t12.tar.gz  their classes, as numbers, and meta.mat, which maps the numbers to nXXXXXXXX
    cifar-10-batches-bin          the binary version: data_batch_1.bin ... test_batch.bin
    cifar-10-batches-py           the python version, which also has the names of the images
    cifar-10-{binary,python}.tar.gz

A tar is scanned once; then each image takes one read at its offset. CIFAR-10 becomes PNG, which keeps every pixel.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from largebatch.data.records import FILENAME, Values, read_span
from largebatch.data.shards import Images, encode_image, no_others

TARS = {"train": "ILSVRC2012_img_train.tar", "validation": "ILSVRC2012_img_val.tar"}
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
GROUND_TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
CIFAR_BATCHES = {"train": [f"data_batch_{k}" for k in range(1, 6)], "validation": ["test_batch"]}
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
LARGEST = 100_000_000  # bytes of a file that is read whole; a batch of CIFAR-10 has 31 million
CIFAR_ROW = 3 * 32 * 32  # bytes of an image: its red, green and blue plane
Member = tuple[str, int, int]  # name, offset and length in the tar


def named(names: Sequence[str]) -> Callable[[int], Mapping[str, Values]]:
    """Return a function from an image's number to a feature with the name of its file."""
    return lambda k: {FILENAME: [PurePosixPath(names[k]).name.encode("utf-8", "surrogateescape")]}


# -- ImageNet ----------------------------------------------------------------------------------------------------


def imagenet_splits(folder: Path) -> list[str]:
    return [split for split, name in TARS.items() if (folder / name).is_file()]


def imagenet(folder: Path, split: str) -> Images:
    """Return one split; JPEGs keep their bytes. Raise ValueError if a file is missing or does not fit."""
    path = folder / TARS[split]
    try:
        names = _class_names(folder)
        rows = sorted(_train_rows(path, names) if split == "train" else _validation_rows(folder, path, names))
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"A tar in {folder} is damaged, copy it again: {error}.") from error
    if not rows:
        raise ValueError(f"{path} holds no images.")
    members = [member for _, member in rows]

    def encoded(k: int) -> bytes:
        return read_span(path, *members[k][1:])

    names_in_tar = [name for name, _, _ in members]
    return Images([label for label, _ in rows], encoded, named(names_in_tar), names_in_tar, names)


def _files(tar: tarfile.TarFile, name: str) -> Iterator[tarfile.TarInfo]:
    """Yield the files in the tar `name`, whose own names are never used as paths; ValueError for a link or a device."""
    try:
        members = tar.getmembers()
    except (OverflowError, ValueError, OSError, MemoryError) as error:  # an absurd size
        raise ValueError(f"{name} is damaged, copy it again: {error}.") from error
    for member in members:
        if not member.isdir():
            if not member.isfile() or member.issparse():
                raise ValueError(f"{name} holds {member.name}, which is no ordinary file: expected the published tar.")
            yield member


def _members(file: Any, name: str) -> list[Member]:
    with tarfile.open(fileobj=file, mode="r:") as tar:
        return [(member.name, member.offset_data, member.size) for member in _files(tar, name)]


def _class_names(folder: Path) -> list[str]:
    if not (folder / TARS["train"]).is_file():
        return sorted(wnid for _, wnid, children in _synsets(folder) if not children)
    with open(folder / TARS["train"], "rb") as file:
        return sorted(PurePosixPath(name).stem for name, _, _ in _members(file, file.name))


def _train_rows(path: Path, names: Sequence[str]) -> list[tuple[int, Member]]:
    rows: list[tuple[int, Member]] = []
    labels = {name: label for label, name in enumerate(names)}
    with tarfile.open(path, mode="r:") as tar:
        for member in _files(tar, str(path)):
            inner = tar.extractfile(member)
            label, start = labels[PurePosixPath(member.name).stem], member.offset_data
            images = _members(inner, f"{path}: {member.name}")
            rows += [(label, (name, start + offset, length)) for name, offset, length in images]
    return rows


def _validation_rows(folder: Path, path: Path, names: Sequence[str]) -> list[tuple[int, Member]]:
    ids = [int(line) for line in _devkit(folder, GROUND_TRUTH).split()]
    by_number = {number: wnid for number, wnid, _ in _synsets(folder)}
    wnids = [by_number[number] for number in ids]
    labels = {name: label for label, name in enumerate(names)}
    with open(path, "rb") as file:
        members = _members(file, file.name)
    if len(members) != len(wnids):
        raise ValueError(f"{path} holds {len(members)} images, and {folder / DEVKIT} classes for {len(wnids)}.")
    unknown = sorted(set(wnids) - set(labels))
    if unknown:
        raise ValueError(f"{folder / DEVKIT} gives images to class {unknown[0]}, which {TARS['train']} does not have.")
    # ILSVRC2012_val_00000001.JPEG is the first line of the ground truth
    texts = [PurePosixPath(name).stem.rpartition("_")[2] for name, _, _ in members]
    numbers = [int(text) if text.isdecimal() else 0 for text in texts]
    if sorted(numbers) != list(range(1, len(wnids) + 1)):
        raise ValueError(f"The images in {path} are not numbered from 1 to {len(wnids)}.")
    return [(labels[wnids[number - 1]], member) for number, member in zip(numbers, members)]


def _synsets(folder: Path) -> list[tuple[int, str, int]]:
    """Return number, name and count of children of every synset; those without children have images."""
    from scipy.io import loadmat  # a slow import, needed only to pack

    data = _devkit(folder, META)
    try:
        synsets = loadmat(io.BytesIO(data), squeeze_me=True)["synsets"]
        rows = zip(synsets["ILSVRC2012_ID"], synsets["WNID"], synsets["num_children"])
        return [(int(number), str(wnid), int(children)) for number, wnid, children in rows]
    except Exception as error:  # a damaged file makes loadmat raise almost any
        raise ValueError(f"{folder / DEVKIT}: {META} is damaged, copy it again: {error!r}.") from error


def _devkit(folder: Path, name: str) -> bytes:
    path = folder / DEVKIT
    if not path.is_file():
        raise ValueError(f"{path} is missing: it has the classes of the images in {TARS['validation']}.")
    return _read_compressed(path, [name])[name]


# -- CIFAR-10 ----------------------------------------------------------------------------------------------------


def is_cifar10(path: Path) -> bool:
    if path.name in ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"):
        return path.is_file()
    return (path / "data_batch_1.bin").is_file() or (path / "data_batch_1").is_file()


def cifar10_files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    suffix = ".bin" if (path / "data_batch_1.bin").is_file() else ""
    return [path / (name + suffix) for name in CIFAR_BATCHES[split]]


def cifar10(path: Path, split: str) -> Images:
    """Return one split, as PNGs. Raise ValueError with the name of a file that is not as published."""
    files = cifar10_files(path, split)
    if path.is_file():
        suffix = ".bin" if path.name == "cifar-10-binary.tar.gz" else ""
        contents = _read_compressed(path, [name + suffix for name in CIFAR_BATCHES[split]])
    else:
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{missing[0]} is missing: expected all batches of CIFAR-10, because {path} has some.")
        for file in files:
            _refuse_large(str(file), file.stat().st_size)
        contents = {file.name: file.read_bytes() for file in files}
    rows: list[np.ndarray] = []
    labels: list[int] = []
    names: list[str] = []
    for name, data in contents.items():
        try:
            batch = _binary_batch(data) if name.endswith(".bin") else _python_batch(data)
        except Exception as error:  # a pickle may end in any
            raise ValueError(f"{path}: {name} is not a batch of CIFAR-10: {error or type(error).__name__}.") from error
        rows.append(batch[0])
        labels += batch[1]
        names += batch[2]
    planes = np.concatenate(rows).reshape(-1, 3, 32, 32)

    def encoded(k: int) -> bytes:
        return encode_image(Image.fromarray(np.ascontiguousarray(planes[k].transpose(1, 2, 0))), "PNG")

    others = named(names) if names else no_others
    return Images(labels, encoded, others, names, CIFAR_CLASSES)


Batch = tuple[np.ndarray, list[int], list[str]]  # rows of CIFAR_ROW bytes, labels from 0, names if there are any


def _binary_batch(data: bytes) -> Batch:
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, 1 + CIFAR_ROW)
    if rows[:, 0].max() > 9:
        raise ValueError(f"there is a label {rows[:, 0].max()}")
    return rows[:, 1:], rows[:, 0].tolist(), []


def _python_batch(data: bytes) -> Batch:
    for opcode, value, _ in pickletools.genops(data):  # raises ValueError if a text is shorter than announced
        if "PUT" in opcode.name and int(value or 0) > len(data):
            raise ValueError("it asks for more memory than it needs")
    batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    rows, labels = np.asarray(batch[b"data"], dtype=np.uint8), [int(label) for label in batch[b"labels"]]
    names = [name.decode() for name in batch[b"filenames"]]
    if rows.shape != (len(labels), CIFAR_ROW) or len(names) != len(labels):
        raise ValueError(f"it has {len(labels)} labels, {len(names)} names, and pixels of shape {rows.shape}")
    return rows, labels, names


class _Unpickler(pickle.Unpickler):
    """Builds arrays and Python's own types only, because a pickle can call any function."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy", "ndarray"): None,  # only passed to `_reconstruct`; a call would make an array of any size
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): _empty_array,
            ("numpy._core.multiarray", "_reconstruct"): _empty_array,
            ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # bytes that Python 3 wrote for Python 2
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch needs")
        return allowed[module, name]


def _empty_array(kind: None, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    """Return an empty array, which the pickle then fills."""
    if shape != (0,):
        raise pickle.UnpicklingError(f"it asks for an array of shape {shape} before its pixels")
    return np.empty(0, dtype=np.int8)


def _refuse_large(name: str, size: int) -> None:
    if size > LARGEST:
        raise ValueError(f"{name} has {size:,} bytes, and the published file less than {LARGEST:,}.")


def _read_compressed(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return files of a tar.gz; `names` are the last parts of their paths."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, mode="r:gz") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name in names and member.isfile() and (file := tar.extractfile(member)):
                    _refuse_large(f"{path}: {member.name}", member.size)
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, OverflowError) as error:
        raise ValueError(f"{path} is damaged, copy it again: {error}.") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path} has no file {missing[0]}.")
    return {name: found[name] for name in names}
