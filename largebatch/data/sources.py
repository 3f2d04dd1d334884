"""The sources that `--data` can name: digits, synthetic images, folders of shards or images, CIFAR-10's and IDX files.

`open_source` turns each into an `Index`. The built-in sources, CIFAR-10, IDX and Parquet files are written once as
TFRecords into the user's cache. The user's data folder is never written to.

    digits      scikit-learn's 1,797 handwritten digits of 8 x 8 pixels: 1,437 for training, 36 of each digit held out.
                Stored as grey JPEGs of 64 x 64 (bicubic, quality 95), which lose nothing.
    synthetic   4,000 training and 1,000 held-out images of 1,000 classes, as heavy as ImageNet's (about 500 x 375,
                110 KB): cut from scikit-learn's two photographs, for measuring speed.
    TFRecords   train-* and validation-* in the folder or its folders train and validation, or of TensorFlow Datasets
    WebDataset  tars of a split, such as imagenet1k-train-0000.tar, in the folder or its split's folder: KEY.jpg (or
                .png ...) beside KEY.cls or KEY.json
    images      train/<class>/*.JPEG and validation/<class>/* (or val/, valid/, or else test/), and deeper folders:
                sorted class names are the labels 0, 1, ...
    CIFAR-10    the folder or tar.gz of its binary or python version, as PNG
    IDX         the four files of MNIST, Fashion-MNIST, KMNIST or a data set of EMNIST, as grey PNG
    Parquet     train-* and validation-* (or test-*) of the Hugging Face hub, in the folder or its folder data
    an address  of a folder of TFRecords, WebDataset tars or Parquet files, such as s3://bucket/imagenet: see `remote`

`largebatch.pack` writes quarantine.csv, whose images are left out, and classes.json, which names TFRecords' classes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from largebatch.data import archives, idx, index_file, parquet, quarantine, remote, shard_check
from largebatch.data.index import Index
from largebatch.data.order import epoch_order
from largebatch.data.scan import index_images, index_shards
from largebatch.data.shards import Images, encode_image, write_split
from largebatch.files import atomic_file, cache_folder, locked, no_progress, safe_cache, temporary_cache, written_once

logger = logging.getLogger(__name__)

# The splits and the names of their folders. The first that is there is taken: test is for data without another one.
SPLITS = {"train": ("train",), "validation": ("validation", "val", "valid", "test")}
_SPLIT_FOLDERS = {name for names in SPLITS.values() for name in names}
BUILT_IN = ("digits", "synthetic")
WITHOUT = " To train without held-out images set --run.eval_every never."
CLASSES = "classes.json"  # the names of the classes 0, 1, ..., as a JSON list
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
COMPRESSED = (".bz2", ".gz", ".tgz", ".xz", ".zip", ".zst")
JUNK = {"@eaDir", "#recycle", "$RECYCLE.BIN", "__MACOSX", "lost+found"}  # folders of systems, some with small copies
_SHARDS = {"train": 40, "validation": 8}  # of what is written into the cache
_DIGITS_SIZE, _DIGITS_HELD_OUT = 64, 36  # pixels; images of each class
_SYNTHETIC_CLASSES, _SYNTHETIC_SHARDS = 1000, {"train": 64, "validation": 4}
_SYNTHETIC_IMAGES = {"train": 4, "validation": 1}  # of each class


Progress = Callable[[], None]  # called now and then while a long piece of work goes on


def open_source(
    path: str,
    *,
    split: str,
    listed: str = "",
    allow_incomplete: bool = False,
    cache: int | None = None,
    progress: Progress = no_progress,
) -> Index:
    """Return the index of one split of a source, without the images in quarantine.

    The index is kept in the user's cache and built again when a file has changed. Labels of TFRecords are numbered as
    in the training split, if there is one. `listed` is the quarantine list, if it is not in the data folder; `cache` is
    that of `find_folder`. Raise ValueError if there are no images, a file or image is damaged, or, unless
    `allow_incomplete`, shards are missing, empty or doubled or have lost records.
    """
    folder, index = open_everything(path, split=split, cache=cache, progress=progress)
    reason = shard_check.why_incomplete(index, folder=folder, split=split)
    if reason and not allow_incomplete:
        cure = "to train or validate with the images that are there, set --data.allow_incomplete true"
        raise ValueError(f"{reason}; {cure}.")
    if reason:
        logger.warning("%s; this goes on with the %d %s images that are there.", reason, len(index), split)
    file = Path(listed).expanduser() if listed else folder / quarantine.NAME
    if listed and not file.is_file():
        raise ValueError(f"There is no quarantine list {listed}: expected one from `largebatch.pack check --out`.")
    entries = quarantine.load(file) if file.is_file() else []
    kept = quarantine.leave_out(index, entries, folder=folder, split=split, listed_in=file)
    if len(kept) < len(index):
        logger.info("%d of %d %s images are left out: %s", len(index) - len(kept), len(index), split, file)
    return kept


def open_everything(
    path: str, *, split: str, cache: int | None = None, progress: Progress = no_progress
) -> tuple[Path, Index]:
    """Return the folder that holds the data, and its index, with the images that cannot be read."""
    folder = find_folder(path, split=split, cache=cache, progress=progress)
    return folder, _open_folder(folder, split, progress)


def class_names(index: Index) -> tuple[str, ...]:
    """Return the names of the classes, as the model, the folders or classes.json give them; () if unknown."""
    if index.names or index.class_names:
        return index.names or index.class_names
    folder = Path(index.files[0]).parent
    file = (folder if folder.name not in _SPLIT_FOLDERS or (folder / CLASSES).is_file() else folder.parent) / CLASSES
    if not file.is_file():
        return ()
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{file} is not a list of class names, such as ["cat", "dog"]: correct it, or remove it.')
    return tuple(names)


def number_classes(index: Index, *, num_classes: int, names: Sequence[str] = ()) -> Index:
    """Return the same index for a model with `num_classes` outputs, by the names of classes if both have them."""
    own = class_names(index)
    if not own or not names or num_classes not in (0, len(names)) or own == tuple(names):
        return index.for_classes(num_classes)
    return (index if index.class_names else index.number_labels(num_classes=len(own))).by_names(own, names)


def write_class_names(folder: Path, names: Sequence[str]) -> None:
    if names:
        with atomic_file(folder / CLASSES) as file:
            file.write(json.dumps(list(names), indent=0).encode() + b"\n")


def find_folder(path: str, *, split: str, cache: int | None = None, progress: Progress = no_progress) -> Path:
    """Return the folder that holds the data; built-in images are first written into this host's cache.

    Shards at an address are copied there while all that the cache has of addresses stays within `cache` bytes. None:
    what is there stays as it is.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected train or validation.")
    folder = place(path, progress)
    name, shards = "", {"train": 4, "validation": 1}
    images: Callable[[str], Images] = digits
    if path == "digits":
        name = "digits-v2"
    elif path == "synthetic":
        name, images, shards = f"synthetic-v2-{split}", synthetic, {split: _SYNTHETIC_SHARDS[split]}
    elif not (remote.is_address(path) and not parquet_files(folder)) and (found := published(folder)):
        name, images = found
        shards = {split: most for split, most in _SHARDS.items() if split in available_splits(path, folder)}
    if name and split not in shards:
        hint = WITHOUT * (split == "validation")
        raise ValueError(f"{path} has no {split} split: looked for {split}-*.parquet in it and its folder data.{hint}")
    if name:
        write = functools.partial(_write, images, shards, path)
        folder = written_once(safe_cache(cache_folder()) / name, write, progress)
    if not folder.is_dir():
        raise ValueError(
            f"{why_no_folder(path)}: expected digits, synthetic, CIFAR-10's files, or a folder of TFRecords, "
            "WebDataset tars, images, IDX or Parquet files."
        )
    if remote.is_address(path) and not name:
        files = _find_shards(folder, split)
        if not files:
            raise ValueError(
                f"{path} has no TFRecords, WebDataset tars or Parquet files of a {split} split, and no others are read "
                "at an address: pack images with `python -m largebatch.pack FOLDER SHARDS`, and copy SHARDS there."
                + WITHOUT * (split == "validation")
            )
        if cache is not None:
            remote.keep(folder, files, cache, progress)
    return folder.resolve()  # an index has one place, whatever links lead to the folder


def place(path: str, progress: Progress = no_progress) -> Path:
    """Return the folder that was given, or the one that stands for an address."""
    return remote.mirror(path, progress) if remote.is_address(path) else Path(path).expanduser()


def published(folder: Path) -> tuple[str, Callable[[str], Images]] | None:
    """Return the name in the cache, and the reader of a split, of CIFAR-10's, IDX or Parquet files; None for others.

    OSError for a folder that may not be listed.
    """
    if archives.is_cifar10(folder):
        files = [file for split in SPLITS for file in archives.cifar10_files(folder, split) if file.is_file()]
        return f"cifar10-v2-{_state(files)}", functools.partial(archives.cifar10, folder)
    if idx.is_idx(folder):
        return f"idx-v1-{_state(idx.idx_files(folder).values())}", functools.partial(idx.idx_images, folder)
    if files := parquet_files(folder):
        return f"parquet-v1-{_state(files)}", lambda split: parquet.parquet_images(folder, SPLITS[split], files)
    return None


def parquet_files(folder: Path) -> list[Path]:
    files = [file for split in SPLITS for file in _split_parquet(folder, split)]
    return [] if files and any(_find_shards(folder, split) for split in SPLITS) else files


def _split_parquet(folder: Path, split: str) -> list[Path]:
    return parquet.split_files(folder, SPLITS[split])


def _state(files: Iterable[Path]) -> str:
    """Return twelve digits that change when a file does."""
    seen = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:12]


def _write(
    images: Callable[[str], Images], shards: dict[str, int], source: str, folder: Path, progress: Progress
) -> None:
    """Write splits as TFRecords into `folder`; shards: the most of each split."""
    for split, most in shards.items():
        logger.info("writing the %s split of %s as TFRecords into the cache, once", split, source)
        here, num_threads = images(split), min(8, os.cpu_count() or 1)
        for _ in write_split(folder, split, here, num_shards=min(most, len(here.labels)), num_threads=num_threads):
            progress()
        write_class_names(folder, here.classes)
    for unfinished in folder.glob(".*"):  # of a process that was killed
        unfinished.unlink()


def why_no_folder(path: str) -> str:
    return f"{path} is a file" if Path(path).expanduser().exists() else f"There is no folder {path}"


def _open_folder(folder: Path, split: str, progress: Progress) -> Index:
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    # The version is in the name, so that an older installation keeps its own index.
    name = f"{folder.name}-{split}-{key}-v{index_file.VERSION}.npz"
    saved = safe_cache(safe_cache(cache_folder()), "index") / name
    _split_folder(folder, split)  # a link that leads to nothing must not lead to another folder
    if shards := _find_shards(folder, split):
        _warn_of_compressed(Path(shards[0]).parent, split)
        index = _cached_index(saved, shards, functools.partial(index_shards, shards), progress)
        if _is_ours(folder):  # which tells the classes, also of a part in which the first or the last does not occur
            index = dataclasses.replace(index, counts_from_1=True, names=class_names(index))
        known = split == "train" or index.label_range[0] == 0 or not _find_shards(folder, "train")
        return index.number_labels(like=None if known else _open_folder(folder, "train", progress))
    files, labels, names = find_images(folder, split)
    build = functools.partial(index_images, files, labels, class_names=names)
    return _cached_index(saved, files, build, progress, class_names=names)


def _is_ours(folder: Path) -> bool:
    """Return whether this package wrote the records of a folder, by `pack` or into the cache."""
    caches = (cache_folder(), temporary_cache())
    return (folder / shard_check.PLANS[0]).is_file() or folder.parent in [cache.resolve() for cache in caches]


def _cached_index(
    path: Path, files: Sequence[str], build: Callable[..., Index], progress: Progress, class_names: Sequence[str] = ()
) -> Index:
    index, _ = _saved_index(path, files, class_names)
    if index is not None:
        return index
    with locked(path, progress) as go_on:
        index, reason = _saved_index(path, files, class_names)  # another process may have built it meanwhile
        if reason:
            logger.info("building the index %s again: %s", path, reason)
        if index is None:
            index = build(progress=go_on)
            index_file.save(index, path)
    return index


def _saved_index(path: Path, files: Sequence[str], class_names: Sequence[str]) -> tuple[Index | None, str]:
    """Return the index at `path`, or, if it does not describe `files` any more, None and the reason."""
    if not path.exists():
        return None, ""
    index = index_file.load(path)
    reason = index_file.why_stale(index, files, class_names)
    return (None, reason) if reason else (index, "")


# -- folders -------------------------------------------------------------------------------------------------


def _find_shards(folder: Path, split: str) -> list[str]:
    return find_shards(folder, split) or find_tars(folder, split)


def find_shards(folder: Path, split: str) -> list[str]:
    """Return the sorted TFRecord files of a split in `folder` or its split folder.

    They are called train-00000-of-01024, perhaps with .tfrecord(s), or, as TensorFlow Datasets writes them,
    cifar10-train.tfrecord-00000-of-00001.
    """
    for place in (folder, *(folder / name for name in SPLITS[split])):
        for name in SPLITS[split]:
            files = (file for file in place.glob(f"{name}-*") if file.suffix in ("", ".tfrecord", ".tfrecords"))
            of_tfds = place.glob(f"*-{name}.tfrecord-*-of-*")
            if found := sorted(str(file) for file in (*files, *of_tfds) if not file.is_dir()):
                return found
    return []


def find_tars(folder: Path, split: str) -> list[str]:
    """Return the sorted WebDataset tars of a split: all in its folder, or train.tar, imagenet1k-train-0000.tar, ..."""
    for name in SPLITS[split]:
        numbered = re.compile(rf"(.*[-_.])?{name}([-_.]\d+(-of-\d+)?)\.tar|{name}\.tar")
        inside = [str(file) for file in (folder / name).glob("*.tar")]
        if found := inside or [str(file) for file in folder.glob("*.tar") if numbered.fullmatch(file.name)]:
            return sorted(found)
    return []


def find_images(folder: Path, split: str) -> tuple[list[str], list[int], list[str]]:
    """Return the sorted files, labels and class names of a split; the training split's folders number the classes."""
    place = _split_folder(folder, split)
    if place is None:
        raise ValueError(
            f"{folder} has no {split} split: looked for TFRecords {split}-* and WebDataset tars *-{split}-0000.tar in "
            f"it and in its folder {split}, and for images in "
            f"{' or '.join(f'{name}/<class>/' for name in SPLITS[split])}."
            + (_other_folder_hint(folder) or WITHOUT * (split == "validation"))
        )
    names = _class_names(_split_folder(folder, "train") or place)
    unknown = sorted(set(_class_names(place)) - set(names))
    if unknown:
        raise ValueError(f"{place} has the class folder {unknown[0]}, which the training split does not have.")
    files, labels, rest, lost = [], [], [], []
    for label, entry in _entries_of_classes(place, names):
        if not entry.is_file() and (is_image(entry.name) or entry.is_symlink() and entry.name[0] != "."):
            lost.append(entry)
        elif label is None or not is_image(entry.name):
            rest.append(entry)
        else:
            files.append(entry.path)
            labels.append(label)
    if lost:
        raise ValueError(_names_without_files(place, lost))
    if not files:
        hint = WITHOUT * (split == "validation")
        has = next((f"images in no class folder, such as {e.name}" for e in rest if is_image(e.name)), "no images")
        raise ValueError(f"{place} holds {has}: looked for <class>/*{', <class>/*'.join(EXTENSIONS)}.{hint}")
    _warn_of_rest(place, rest, f"only {', '.join(EXTENSIONS)} in class folders are read")
    return files, labels, names


def _entries_of_classes(place: Path, names: Sequence[str]) -> Iterator[tuple[int | None, os.DirEntry]]:
    """Yield the entries of a split with their labels; first those in no class, with None."""
    yield from ((None, entry) for entry in _entries(place) if not entry.is_dir())
    for label, name in enumerate(names):
        if (place / name).is_dir():
            yield from ((label, entry) for entry in entries_below(place / name))


def _entries(folder: Path | str) -> list[os.DirEntry]:
    """Return the sorted entries, without folders that are hidden or of a system."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        return [e for e in entries if not e.is_dir() or not (e.name in JUNK or e.name.startswith("."))]
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}.") from error


def entries_below(folder: Path | str, around: frozenset[tuple[int, int]] = frozenset()) -> Iterator[os.DirEntry]:
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
    if here in around:
        raise ValueError(f"{folder} is a link to a folder around it: remove it.")
    for entry in _entries(folder):
        if entry.is_dir():
            yield from entries_below(entry.path, around | {here})
        else:
            yield entry


def _names_without_files(place: Path, lost: Sequence[os.DirEntry]) -> str:
    first = lost[0].path
    what = f"a link to {os.readlink(first)}" if lost[0].is_symlink() else "a FIFO, a socket or a device"
    return (
        f"{place} has {len(lost)} images or folders that are not there, the first is {first}, {what}: put there what "
        "is missing, or remove the names."
    )


def _warn_of_rest(place: Path, entries: Sequence[os.DirEntry], why: str) -> None:
    """Warn of files that are left out, except a Mac's hidden ones and the like."""
    rest = [e for e in entries if not e.name.startswith(".") or e.name[1] != "_" and is_image(e.name[1:])]
    if rest:
        endings = Counter(os.path.splitext(entry.name)[1].lower() or "without an ending" for entry in rest)
        logger.warning(
            "files in %s that are left out: %d (%s), the first is %s; %s: convert, move or remove them.",
            *(place, len(rest), ", ".join(f"{n} {ending}" for ending, n in endings.most_common(5)), rest[0].path, why),
        )


def _warn_of_compressed(place: Path, split: str) -> None:
    here = [entry for entry in _entries(place) if entry.name.lower().endswith(COMPRESSED)]
    shards = [e for e in here if place.name in SPLITS[split] or any(name in e.name for name in SPLITS[split])]
    _warn_of_rest(place, shards, "shards are read only as they are")


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def _other_folder_hint(folder: Path) -> str:
    """Advise a user who named the folder of one split, or the folder around that of the data."""
    if folder.name in _SPLIT_FOLDERS:
        return f" It looks like one split: give {folder.parent}, the folder around it."
    inside = [] if available_splits(str(folder)) else _class_names(folder)
    data = next((folder / name for name in inside if available_splits(str(folder / name))), None)
    return f" Its folder {data.name} has one: give {data}." if data else ""


def available_splits(path: str, folder: Path | None = None) -> list[str]:
    folder = folder or place(path)
    if path in BUILT_IN or published(folder) and not parquet_files(folder):
        return list(SPLITS)
    finders = _find_shards, _split_folder, _split_parquet
    return [split for split in SPLITS if any(find(folder, split) for find in finders)]


def _split_folder(folder: Path, split: str) -> Path | None:
    for place in (folder / name for name in SPLITS[split]):
        if place.is_dir():
            return place
        if place.is_symlink():
            raise ValueError(f"{place} is a link to {os.readlink(place)}, and no folder is there: remove or mend it.")
    return None


def _class_names(folder: Path) -> list[str]:
    return [entry.name for entry in _entries(folder) if entry.is_dir()]


# -- digits --------------------------------------------------------------------------------------------------


def digits(split: str) -> Images:
    from sklearn.datasets import load_digits  # a slow import, needed only to write the images

    data = load_digits()
    order = epoch_order(0, 0, len(data.target))
    held_out = np.concatenate([order[data.target[order] == label][:_DIGITS_HELD_OUT] for label in range(10)])
    chosen = order[np.isin(order, held_out) == (split == "validation")]

    def encoded(k: int) -> bytes:
        pixels = np.rint(data.images[chosen[k]] * (255 / 16)).astype(np.uint8)  # stored as 0 .. 16
        image = Image.fromarray(pixels).resize((_DIGITS_SIZE, _DIGITS_SIZE), Image.Resampling.BICUBIC)
        return encode_image(image, "JPEG", quality=95)

    return Images(data.target[chosen].tolist(), encoded, classes=[str(digit) for digit in range(10)])


# -- synthetic -----------------------------------------------------------------------------------------------


def synthetic(split: str) -> Images:
    """Return windows of two photographs, tinted by class.

    Grain and JPEG quality give an image as many bytes as one of ImageNet, which decides how long decoding takes.
    """
    from sklearn.datasets import load_sample_images  # a slow import, needed only to write the images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]

    def encoded(k: int) -> bytes:
        label = k % _SYNTHETIC_CLASSES
        tint = np.random.Generator(np.random.Philox(key=[0, label])).uniform(0.7, 1.3, 3).astype(np.float32)
        draws = np.random.Generator(np.random.Philox(key=[1 + list(SPLITS).index(split), k]))
        photograph = photographs[label % 2]
        width, height = int(draws.integers(420, 581)), int(draws.integers(310, 441))
        zoom = max(draws.uniform(0.85, 1.15), width / photograph.width, height / photograph.height)
        x = draws.uniform(0, photograph.width - width / zoom)
        y = draws.uniform(0, photograph.height - height / zoom)
        window = (x, y, x + width / zoom, y + height / zoom)
        pixels = np.asarray(photograph.resize((width, height), Image.Resampling.BICUBIC, box=window)) * tint
        pixels += draws.integers(-12, 13, pixels.shape, dtype=np.int8)
        return encode_image(Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)), "JPEG", quality=95)

    return Images(list(range(_SYNTHETIC_CLASSES)) * _SYNTHETIC_IMAGES[split], encoded)
