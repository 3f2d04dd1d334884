"""Data at an address, such as s3://bucket/imagenet: a folder of the cache stands for it, which all other code reads.

    ~/.cache/largebatch/remote/s3/bucket/imagenet/train-00000-of-01024

Each object has a file there of its size, and a time that changes with the object. The file is whole and read-only, or
hollow: without bytes, which are then read at the address, range by range. Whole files appear at once, so a crash leaves
none with wrong bytes. `keep` decides which are whole. Under a shuffle without repetition a cache that is too small
serves the same share of the images whatever it keeps, so shards stay, and what goes are data that no job uses.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import logging
import os
import random
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from largebatch.files import Damaged, cache_folder, locked, no_progress, safe_cache
from largebatch.files.names import printable, refuse_secret

logger = logging.getLogger(__name__)

REMOTE = "remote"  # the folder in the cache
FOLDERS = ("data", "train", "validation", "val", "valid", "test")  # that are looked into
COPIED = (".json", ".csv")  # lists beside the shards, always whole
WHOLE, HOLLOW = 0o400, 0o600  # where modes are not stored, all are hollow: slower, and right
USED = ".used"  # its time is that of the last use, and jobs that use the data lock it
BLOCK = 8 * 2**20  # bytes of a request when a file is read from end to end
COPIERS = 16  # requests at the same time, then
READERS = 128  # and when single images are read
SPARE = 10**9  # bytes of the disk that are left free
ANSWER_S = 60.0  # for one request, with the tries of the store's own package
PATIENCE_S = 120.0  # after that there is no further try
WAITS_S = (0.5, 1, 2, 4, 8, 16)  # before each further try, or up to half less
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and perhaps AWS_SESSION_TOKEN, or AWS_PROFILE; for a public bucket "
    "FSSPEC_S3_ANON=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS; for a public bucket FSSPEC_GS_TOKEN=anon",
    "hf": "HF_TOKEN",
}


def is_address(path: str) -> bool:
    return "://" in path


# -- the store -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _store(place: str, process: int) -> Any:
    """Return the file system of an address; one for all threads, whose connections it shares."""
    import fsspec

    pool = {"config_kwargs": {"max_pool_connections": READERS}} if place.startswith("s3") else {}
    return fsspec.core.url_to_fs(place, **pool)[0]


def _ask(address: str, method: str, *, length: int | None = None, **given: Any) -> Any:
    """Call a method of the store with an address.

    Try again after an error that may pass. Damaged, with one sentence, for one that does not.
    """
    from fsspec.asyn import sync

    place = re.match(r"[^/]*//[^/]*", address)[0]  # type: ignore[index]  # `mirror` has looked at it
    end = time.monotonic() + PATIENCE_S
    for number, wait in enumerate((*WAITS_S, 0), start=1):
        try:
            store = _store(place, os.getpid())
            path = store._strip_protocol(address)
            if method == "ls":
                store.invalidate_cache()
            if store.async_impl:
                found = sync(store.loop, getattr(store, f"_{method}"), path, timeout=ANSWER_S, **given)
            else:
                found = getattr(store, method)(path, **given)
            if length is not None and len(found) != length:
                raise OSError(f"{len(found):,} of {length:,} bytes arrived")
            return found
        except Exception as error:  # each store has errors of its own
            sentence = _why_lasting(address, error)
            if number > len(WAITS_S) or time.monotonic() > end:
                sentence = sentence or (
                    f"{printable(address)} could not be read in {number} tries ({_reason(error)}): check the network "
                    "and the store, and give the same command again."
                )
            if sentence:
                raise Damaged(sentence) from error
            logger.info("%s: %s; asking again", address, _reason(error))
        time.sleep(random.uniform(wait / 2, wait))


def _why_lasting(address: str, error: Exception) -> str:
    """Return a sentence about an error that further tries would meet again; else ""."""
    status, kind = _status(error), type(error).__name__
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return f"{printable(address)} is not there: check the address, and that nobody has removed the data."
    if isinstance(error, PermissionError) or status in (401, 403) or "Credential" in kind or "Profile" in kind:
        names = CREDENTIALS.get(address.partition(":")[0], "those of its store")
        return f"{printable(address)} may not be read ({_reason(error)}): renew or set the credentials, {names}."
    if isinstance(error, ImportError):
        extra = "; `pip install 'largebatch[remote]'` has s3fs" if address.startswith("s3") else ""
        return f"{printable(address)} needs a package that is not installed: {_reason(error).rstrip('.')}{extra}."
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return f"{printable(address)} cannot be read ({_reason(error)}): give s3://, gs://, hf:// or https://."
    if "Validation" in kind or status and 400 <= status < 500 and status not in (408, 429):
        return f"{printable(address)} cannot be read ({_reason(error)}): check the address and the credentials."
    return ""


def _status(error: Exception) -> int:
    """Return the HTTP status that an error tells; 0 for none."""
    response = getattr(error, "response", None)
    of_boto = getattr(error.__cause__, "response", None)  # the cause of errors of s3fs
    if isinstance(of_boto, dict):
        return of_boto.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    found = [getattr(error, name, 0) for name in ("status", "status_code", "code")]
    return next((one for one in (getattr(response, "status_code", 0), *found) if isinstance(one, int) and one > 99), 0)


def _reason(error: Exception) -> str:
    """Return an error in one line without addresses: those of a redirection may be signed."""
    text = printable(re.sub(r"\S*(://|\?)\S*", "...", " ".join(str(error).split())))
    return text[:200].rstrip(".") or type(error).__name__


def read_range(address: str, offset: int, length: int) -> bytes:
    return _ask(address, "cat_file", start=offset, end=offset + length, length=length) if length else b""


# -- its folder ------------------------------------------------------------------------------------------------------


def mirror(address: str, progress: Callable[[], None] = no_progress) -> Path:
    """Return the folder that stands for an address, with the objects that are there now; none has bytes for that.

    ValueError, with one sentence, if the address cannot be listed.
    """
    refuse_secret(address)
    protocol, _, rest = address.partition("://")
    parts = [part for part in rest.split("/") if part]
    if not parts or {".", ".."} & {*parts}:
        raise ValueError(f"{printable(address)} is no folder of a store: give an address such as s3://bucket/imagenet.")
    address = f"{protocol}://{'/'.join(parts)}"
    found, folder = _list(address), _root().joinpath(protocol, *parts)
    with locked(_root() / "folders", progress) as go_on:
        _use(folder)
        for name, (size, stamp) in found.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                status = path.stat()
                if (status.st_size, status.st_mtime_ns) == (size, stamp * 10**9):
                    continue
            _put(path, size, stamp)
        for path in _files(folder):
            if str(path.relative_to(folder)) not in found:  # removed there, or left by a process that was killed
                path.unlink()
            elif path.suffix in COPIED and not _is_whole(path.stat()):
                _copy(path, go_on)
    return folder


def _list(address: str) -> dict[str, tuple[int, int]]:
    """Return size and stamp of each file at an address and in its FOLDERS, by its name there."""
    entries: dict[str, dict] = {}
    for place in ("", *FOLDERS):
        if place and entries.get(place, {}).get("type") != "directory":
            continue
        for entry in _ask(f"{address}/{place}".rstrip("/"), "ls", detail=True):
            name = os.path.join(place, entry["name"].rstrip("/").rpartition("/")[2])
            if not os.path.basename(name).startswith(".") and "?" not in name:
                entries[name] = entry
    if not entries:
        raise ValueError(f"There is nothing at {printable(address)}: check the address.")
    files = [name for name, entry in entries.items() if entry["type"] == "file"]
    if files == [address.rpartition("/")[2]]:
        raise ValueError(f"{printable(address)} is a file: give the address of the folder around it.")

    def look(name: str) -> tuple[int, int]:
        entry = entries[name]
        if entry.get("size") is None:  # a list of links
            entry = _ask(f"{address}/{name}", "info")
        if entry.get("size") is None:
            raise ValueError(f"{printable(address)}/{printable(name)} has no size: take another server.")
        return entry["size"], int(hashlib.sha256(repr(sorted(entry.items())).encode()).hexdigest()[:8], 16) // 2

    return dict(zip(files, _parallel(look, files)))


def _root() -> Path:
    return safe_cache(safe_cache(cache_folder()), REMOTE).resolve()


def _files(folder: Path) -> list[Path]:
    places = (folder, *(folder / name for name in FOLDERS))
    entries = (entry for place in places if place.is_dir() for entry in os.scandir(place))
    return sorted(Path(entry.path) for entry in entries if entry.is_file() and entry.name != USED)


def _is_whole(status: os.stat_result) -> bool:
    return stat.S_IMODE(status.st_mode) == WHOLE


def _put(path: Path, size: int, stamp: int, fill: Callable[[int], None] | None = None) -> None:
    """Put a hollow file there, or, with `fill`, a whole one; it appears at once."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.truncate(size)
            if fill:
                fill(file.fileno())
                os.fsync(file.fileno())
            os.fchmod(file.fileno(), WHOLE if fill else HOLLOW)
        os.utime(temporary, (stamp, stamp))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _empty(path: Path) -> None:
    _put(path, path.stat().st_size, int(path.stat().st_mtime))


def _copy(path: Path, go_on: Callable[[], None]) -> None:
    status, address = path.stat(), _address(path)

    def fill(file: int) -> None:
        def copy(at: int) -> None:
            os.pwrite(file, read_range(address, at, min(BLOCK, status.st_size - at)), at)
            go_on()

        _parallel(copy, range(0, status.st_size, BLOCK))

    _put(path, status.st_size, int(status.st_mtime), fill)


def _parallel(function: Callable, items: Sequence) -> list:
    with ThreadPoolExecutor(COPIERS) as pool:
        try:
            return list(pool.map(function, items))
        finally:
            pool.shutdown(cancel_futures=True)


# -- which files are whole -------------------------------------------------------------------------------------------

_held: dict[Path, int] = {}  # the folders that this process uses


def _use(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if folder not in _held:
        _held[folder] = os.open(folder / USED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # without locks nothing is in use
            fcntl.flock(_held[folder], fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.utime(folder / USED)


def _in_use(folder: Path) -> bool:
    with open(folder / USED) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def keep(folder: Path, files: Sequence[str], most: int, progress: Callable[[], None] = no_progress) -> None:
    """Make files of a mirror whole, in their order, while all whole files of the cache have at most `most` bytes.

    Those of other data go first, the longest unused before, but not of data that a job uses.
    """
    if lacking := [os.stat(file).st_size for file in files if not _is_whole(os.stat(file))]:  # one process copies
        logger.info("copying up to %d shards (%s) of %s into the cache", len(lacking), _gb(sum(lacking)), folder)
    with locked(_root() / "folders", progress) as go_on:
        folders = sorted((used.parent for used in _root().rglob(USED)), key=lambda one: (one / USED).stat().st_mtime_ns)
        whole = {one: [f for f in _files(one) if f.suffix not in COPIED and _is_whole(f.stat())] for one in folders}
        hollow = [Path(file) for file in files if not _is_whole(os.stat(file))]
        sizes = [path.stat().st_size for path in hollow]
        total = sum(path.stat().st_size for one in whole.values() for path in one)
        free = shutil.disk_usage(folder).free - SPARE
        for one in sorted(folders, key=folder.__eq__):  # its own, from the last, only if they alone are too many
            while whole[one] and (total > most or one != folder and sum(sizes) > min(most - total, free)):
                if one != folder and _in_use(one):
                    break
                size = (path := whole[one].pop()).stat().st_size
                _empty(path)
                total, free = total - size, free + size
        done = 0
        for path, size in zip(hollow, sizes):
            if size > min(most - total, free):
                break
            _copy(path, go_on)
            total, free, done = total + size, free - size, done + 1
        if left := sum(sizes[done:]):
            logger.info(
                "%s of %s at %s stay there, and are read anew in each epoch: --data.cache is %s, of which %s are "
                "taken, and %s has %s free",
                *(_gb(left), _gb(sum(os.stat(file).st_size for file in files)), _address(folder)),
                *(_gb(most), _gb(total), _root(), _gb(max(0, free))),
            )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


# -- their bytes -----------------------------------------------------------------------------------------------------


def _address(path: Path) -> str:
    protocol, *parts = path.relative_to(_root()).parts
    return f"{protocol}://{'/'.join(parts)}"


def address(folder: Path) -> str:
    """Return the address that a folder or file of the cache stands for; "" for any other."""
    if f"/{REMOTE}/" not in str(folder) or not folder.is_relative_to(_root()):
        return ""
    return _address(folder)


def address_of(path: str | Path, file: int | None = None) -> str:
    """Return the address that has the bytes of a hollow file; "" for any other file. file: its descriptor, if open."""
    found = address(Path(path))
    return "" if found and _is_whole(os.stat(path if file is None else file)) else found


def open_file(path: str | Path, *, block: int = BLOCK) -> BinaryIO:
    """Open a file for reading; the bytes of a hollow one come from its address, `block` at a time."""
    file = open(path, "rb")
    if address := address_of(path, file.fileno()):
        with file:
            return io.BufferedReader(_Ranges(address, os.fstat(file.fileno()).st_size), block)
    return file


class _Ranges(io.RawIOBase):
    def __init__(self, address: str, size: int) -> None:
        self._address, self._size, self._at = address, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = read_range(self._address, self._at, max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
