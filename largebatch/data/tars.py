"""WebDataset shards: tars in which the files of a sample lie side by side, such as 0001.jpg and 0001.cls.

The format: https://github.com/webdataset/webdataset. The class is the number in KEY.cls, or "label" in KEY.json.
"""

from __future__ import annotations

import itertools
import json
import posixpath
import tarfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from largebatch.data import remote
from largebatch.files import Damaged

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp")
HIDDEN = "._"  # how the names begin of files that a Mac adds
MOST_LABEL = 2**31 - 1
MOST_LABEL_BYTES = 2**20  # of a .cls or .json; a larger one is something else


class Sample(NamedTuple):
    """A sample: its key, the place of its image (else of its first file) in the tar, its label, and its fault or ""."""

    key: str
    offset: int
    length: int
    label: int
    fault: str


def scan_samples(path: str) -> Iterator[Sample]:
    """Yield the samples of a tar. Raises ValueError if it is no plain tar or is cut off."""
    try:
        with remote.open_file(path) as file, tarfile.open(path, "r:", fileobj=file) as tar:
            files = (m for m in tar if not m.isdir() and not posixpath.basename(m.name).startswith(HIDDEN))
            for key, members in itertools.groupby(files, key=lambda member: split_name(member.name)[0]):
                yield _sample(tar, key, list(members))
            file.seek(tar.offset)  # tarfile takes any place where no header begins for the end
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"byte {tar.offset:,} is neither a file nor the end of the tar")
    except (tarfile.TarError, OverflowError, ValueError, OSError, MemoryError) as error:  # also an absurd size
        if isinstance(error, Damaged) or getattr(error, "filename", None):  # it could not be opened, and says so
            raise
        raise ValueError(f"{path} is cut off, damaged or compressed ({error}): expected a whole .tar.") from None


def split_name(name: str) -> tuple[str, str]:
    """Return the key and the kind of a member: "a/0001.seg.PNG" is ("a/0001", "seg.png")."""
    folder, base = posixpath.split(name)
    stem, _, kind = base.partition(".")
    return posixpath.join(folder, stem), kind.lower()


def _sample(tar: tarfile.TarFile, key: str, members: Sequence[tarfile.TarInfo]) -> Sample:
    images = [member for member in members if split_name(member.name)[1] in IMAGES]
    place = (images or members)[0]
    fault, label = "", 0
    linked = next((member.name for member in members if not member.isreg()), "")
    if linked:
        fault = f"has {linked}, which is no ordinary file: pack what links lead to (tar --dereference)"
    elif len(images) != 1:
        fault = (
            f"has {len(images)} images ({', '.join(IMAGES)}) among the {len(members)} files of the key {key!r}, "
            "expected one; a key is the name up to its first dot"
        )
    try:
        label = 0 if linked else _label(tar, {split_name(member.name)[1]: member for member in members})
    except Damaged:  # the store, not the tar
        raise
    except (ValueError, RecursionError) as error:
        fault = fault or f"has no class: {error}"
    return Sample(key, place.offset_data, place.size, label, fault)


def _label(tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo]) -> int:
    """Return the class, or raise ValueError with the reason."""
    kind = next((kind for kind in ("cls", "json") if kind in members), None)
    if kind is None:
        raise ValueError("there is neither a .cls nor a .json with its key")
    if members[kind].size > MOST_LABEL_BYTES:
        raise ValueError(f"{members[kind].name} has {members[kind].size:,} bytes")
    content = tar.extractfile(members[kind]).read().strip()  # type: ignore[union-attr]  # a regular file
    found = content.decode("utf-8", "replace")
    if kind == "json":
        values = json.loads(content)  # raises a ValueError, or a RecursionError
        found = str(values.get("label") if isinstance(values, dict) else values)
    if not (found.isdecimal() and len(found) <= 20 and int(found) <= MOST_LABEL):
        raise ValueError(f"{members[kind].name} says {found[:40]!r}, expected a number from 0 to {MOST_LABEL}")
    return int(found)
