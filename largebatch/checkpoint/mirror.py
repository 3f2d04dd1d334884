"""A copy of a run's checkpoints and records in another file system, from which an empty machine resumes.

    MIRROR/RUN/                    RUN is the name of the run folder
        checkpoints/00000100/      the files of a checkpoint; manifest.json is written last and removed first
        config.yaml, steps.csv ... the records of the run, written before that manifest

So a checkpoint without its manifest is not there. MIRROR is a folder, or an address of fsspec, such as
s3://bucket/runs; credentials come from the environment. Only rank 0 reads and writes. File systems raise errors of
their own kinds, so whoever calls them catches Exception.
"""

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from largebatch.checkpoint import store
from largebatch.checkpoint.resume import describe_differences
from largebatch.config import TrainConfig, load_text
from largebatch.files.atomic import atomic_file
from largebatch.files.names import without_password
from largebatch.files.run_folder import CHECKPOINTS, RunFolder
from zoo.hub import MANIFEST

logger = logging.getLogger(__name__)

DOWNLOADS = "mirror" + store.UNFINISHED  # the next save removes what a killed download has left
PROBE = ".probe"
Tell = Callable[[int], None]  # is told of bytes
T = TypeVar("T")


class Mirror:
    """The mirror of one run. Its file system is opened when it is first used."""

    def __init__(self, address: str, folder: str | Path) -> None:
        self.address, self.run = address, RunFolder(folder)
        self._lock = threading.Lock()
        self._rollbacks = 0
        self._discarded_after: int | None = None  # a step; newer checkpoints are still to be removed
        self._sent: dict[Path, tuple[int, int]] = {}  # records: size and time of the last change

    @cached_property
    def files(self) -> Any:
        from fsspec.core import url_to_fs  # torch needs fsspec; the package of a protocol may be missing

        files, _ = url_to_fs(self.address)
        if files.async_impl:  # its loop would print the tracebacks of errors that the call has raised
            files.loop.set_exception_handler(lambda loop, context: None)
        return files

    @cached_property
    def root(self) -> str:
        return f"{self.files._strip_protocol(self.address).rstrip('/')}/{self.run.path.resolve().name}"

    def place(self, *names: str) -> str:
        return "/".join([self.root, CHECKPOINTS, *names])

    # -- before a run ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ValueError, a sentence, if the mirror cannot be listed, written and cleared."""
        remedy = "give a place that exists, and in which this user may list, write and delete, or leave the option out"
        with self._explaining("cannot be used", remedy):
            if self.root.startswith("/") and Path(self.root).resolve() == self.run.path.resolve():
                raise OSError(f"{self.root} is the run folder itself, and a copy must be elsewhere")
            self._write(f"{self.root}/{PROBE}", b"")
            self._checkpoints()
            self.files.rm_file(f"{self.root}/{PROBE}")

    def refuse_other(self, config: TrainConfig) -> None:
        """Raise ValueError if the mirror has another run of this name, whose only copies might be replaced."""
        file = f"{self.root}/{self.run.config.name}"
        with self._explaining("cannot be read", "give the same command again, or leave the option out"):
            text = self.files.cat_file(file).decode() if self.files.exists(file) else ""
        if text and (other := describe_differences(load_text(text, place=file), config, same_images=True)):
            raise ValueError(
                f"--checkpoint.mirror is {self.address}, where {self.root} is of a run with {other}: give another "
                "place, or rename the run folder."
            )

    def restore(self, tell: Tell) -> None:
        """Bring the run folder to the state of the mirror, if the newest whole checkpoint there is newer.

        All whole checkpoints are fetched, the best one among them, then the records. A damaged one is passed over.
        Raises ValueError if this fails, and the next start begins again; or if the mirror has another run than the
        folder.
        """
        what, remedy = "cannot be fetched", "give the same command again, or leave the option out"
        own = next((path for path in store.checkpoints(self.run.path) if store.why_invalid(path) is None), None)
        with self._explaining(what, remedy):
            whole = [step for step, is_whole in self._checkpoints().items() if is_whole]
        if max(whole, default=-1) <= (int(own.name) if own else -1):
            return
        if own:
            self.refuse_other(load_text(store.read_state(own)["config"], place=str(own)))
        with self._explaining(what, remedy):
            self._restore(own, whole, tell)

    def _restore(self, own: Path | None, whole: Sequence[int], tell: Tell) -> None:
        own_step = int(own.name) if own else -1
        downloads = self.run.checkpoints / DOWNLOADS
        shutil.rmtree(downloads, ignore_errors=True)
        try:
            found = [path for step in sorted(whole) if (path := self._fetch(step, downloads, tell))]
            if not found and own is None:  # a new run would take their place
                raise OSError(f"none of the {len(whole)} checkpoints there is sound")
            newest = int(found[-1].name) if found else -1
            if own and (newest <= own_step or _halvings(found[-1]) < _halvings(own)):  # it has gone back from there
                newest = own_step
            else:
                for file in self.files.find(self.root):
                    if not file.startswith(self.place("")) and not file.endswith(f"/{PROBE}"):
                        self._fetch_record(file)
                store.adopt(self.run.path, found)
                logger.info("step %s was fetched from the mirror %s", newest, self.address)
            self._remove(lambda step: step > newest)  # they are damaged or discarded, and trained anew
        finally:
            shutil.rmtree(downloads, ignore_errors=True)
            with suppress(OSError):  # it is empty, or there
                self.run.checkpoints.rmdir()

    def _fetch(self, step: int, downloads: Path, tell: Tell) -> Path | None:
        """Download a checkpoint; None, with a warning, if it is damaged."""
        path = downloads / f"{step:08d}"
        path.mkdir(parents=True)
        sizes = {file: self.files.size(file) for file in self.files.find(self.place(path.name))}
        store.check_space(downloads, sum(sizes.values()))
        for file in sizes:
            self.files.get_file(file, str(path / file.rpartition("/")[2]), callback=_callback(tell))
        reason = store.why_invalid(path)
        if reason:
            logger.warning("checkpoint %s in the mirror %s is refused: %s", path.name, self.address, reason)
        return None if reason else path

    def _fetch_record(self, file: str) -> None:
        path, content = self.run.path / file.removeprefix(f"{self.root}/"), self.files.cat_file(file)
        if path == self.run.log and path.exists():  # it is open: its lines go behind those of the mirror
            with open(path, "rb+") as log:
                content += log.read()
                log.seek(0)
                log.write(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as record:
            record.write(content)

    # -- while a run goes on -----------------------------------------------------------------------------------

    def update(self, tell: Tell) -> None:
        """Bring the mirror to the state of the run folder, the newest checkpoint first."""
        if self._discarded_after is not None:
            self._remove(lambda step: step > (self._discarded_after or 0))
            self._discarded_after = None
        kept = self._kept()
        while path := self._missing():
            self._put(path, tell)
            kept = self._kept()  # before the next look, so that the mirror has the newest of them
        self._put_records()
        if kept and max(self._checkpoints()) <= max(kept):  # nobody is removing the run folder
            self._remove(lambda step: step not in kept)

    def _kept(self) -> set[int]:
        return {int(path.name) for path in store.checkpoints(self.run.path)}

    def discard_after(self, step: int, discard: Callable[[], T]) -> T:
        """Remove checkpoints newer than `step`, then those of the run folder by `discard`, whose result is returned.

        No upload under way brings them back. If the mirror does not answer, `update` removes them later.
        """
        with self._lock:
            self._discarded_after = step
            try:
                self._remove(lambda other: other > step)
            except Exception as error:
                told = "the mirror %s keeps checkpoints after step %d for now (%s)"
                logger.warning(told, self.address, step, reason_of(error))
            result = discard()
            self._rollbacks += 1
            return result

    def _missing(self) -> Path | None:
        """Return the newest sound checkpoint of the run folder that the mirror lacks."""
        there = self._checkpoints()
        for path in store.checkpoints(self.run.path):
            with suppress(FileNotFoundError):  # removed by a save
                text = (path / MANIFEST).read_bytes()
                if there.get(int(path.name)) and self.files.cat_file(self.place(path.name, MANIFEST)) == text:
                    continue
                if store.why_invalid(path, sha256=store.remembered_sha256) is None:
                    return path
        return None

    def _put(self, path: Path, tell: Tell) -> None:
        """Copy a checkpoint, also one that a save removes meanwhile: its files are open."""
        rollbacks, text = self._rollbacks, (path / MANIFEST).read_bytes()
        parts = json.loads(text)["parts"]
        with ExitStack() as opened:
            try:
                open_files = {name: opened.enter_context(open(path / name, "rb")) for name in parts}
                if (path / MANIFEST).read_bytes() != text:  # another evaluation of this step
                    return
            except FileNotFoundError:
                return
            self._remove(lambda step: step == int(path.name))
            self._make(self.place(path.name))
            for name, file in open_files.items():
                target, expected = self.place(path.name, name), parts[name]["bytes"]
                try:
                    self.files.put_file(f"/proc/self/fd/{file.fileno()}", target, callback=_callback(tell))
                    size = self.files.size(target)
                except FileNotFoundError:
                    with self._lock:
                        if rollbacks == self._rollbacks:
                            raise
                    return  # `discard_after` has removed it
                if size != expected:
                    raise OSError(f"{target} has {size} of {expected} bytes")
        self._put_records()
        with self._lock:
            if rollbacks == self._rollbacks:
                self._write(self.place(path.name, MANIFEST), text)

    def _put_records(self) -> None:
        for path in self.run.records():
            found = path.stat()
            key = found.st_size, found.st_mtime_ns
            if self._sent.get(path) != key:
                self._write(f"{self.root}/{path.relative_to(self.run.path)}", path.read_bytes())
                self._sent[path] = key

    def _remove(self, doomed: Callable[[int], bool]) -> None:
        for step, is_whole in self._checkpoints().items():
            if doomed(step):
                name = f"{step:08d}"
                with suppress(FileNotFoundError):  # removed by the other thread
                    if is_whole:
                        self.files.rm_file(self.place(name, MANIFEST))
                    if self.root.startswith("/"):
                        self.files.rm(self.place(name), recursive=True)
                    for file in self.files.find(self.place(name)):  # a store's `rm` takes a [ in a name for a pattern
                        self.files.rm_file(file)

    def _checkpoints(self) -> dict[int, bool]:
        """Return the steps of the mirror, and of each whether its checkpoint is whole."""
        self.files.invalidate_cache()
        found: dict[int, bool] = {}
        for file in self.files.find(self.place()):
            name, _, part = file.removeprefix(self.place("")).partition("/")
            if name.isdecimal():
                found[int(name)] = found.get(int(name), False) or part == MANIFEST
        return found

    def _write(self, place: str, content: bytes) -> None:
        self._make(place.rpartition("/")[0])
        self.files.pipe_file(place, content)

    def _make(self, folder: str) -> None:
        if folder.startswith("/"):  # an object store has no folders, and would make the bucket
            self.files.makedirs(folder, exist_ok=True)

    @contextmanager
    def _explaining(self, what: str, remedy: str) -> Iterator[None]:
        given = f"--checkpoint.mirror is {self.address}, which"
        try:
            yield
        except ImportError as error:
            raise ValueError(
                f"{given} needs a package that is not installed ({error}): install it, for s3:// by `python -m pip "
                "install s3fs`, or leave the option out."
            ) from error
        except Exception as error:
            raise ValueError(f"{given} {what} ({reason_of(error)}): {remedy}.") from error


def reason_of(error: Exception) -> str:
    return isinstance(error, OSError) and error.strerror or without_password(error)


def _halvings(path: Path) -> int:
    return store.read_state(path)["state"]["halvings"]


def _callback(tell: Tell) -> Any:
    from fsspec.callbacks import Callback

    before = 0

    def called(size: int, value: int, **_: Any) -> None:
        nonlocal before
        tell(value - before)
        before = value

    return Callback(hooks={"bytes": called})
