"""The files of checkpoints.

    RUN/checkpoints/
        00000100/                 the step, in eight digits or more
            model.safetensors     the model's weights under its own names; zoo.create_model(weights=...) reads it
            model_ema.safetensors the average of the weights, in a run with optim.ema_half_life
            config.json           the model, its image size, crop and class names, for timm and the zoo (zoo/hub.py)
            state.pt              optimizer, loss scaler, TrainState, config and versions; weights_only is enough
            manifest.json         the step, and of these the size, SHA-256 and sums of the bits: written last
        best                      a link to the checkpoint of the best evaluation, which is kept beside the newest
        00000300.tmp/             an unfinished one; the next save removes it

A folder is renamed when every file is on the disk, so one without the suffix is complete. If a digest shows later
damage, the next older checkpoint is taken. A bit that flips on the way to the file would be part of its digest, so sums
of the tensors in training are compared with the file's, and again with those that are loaded. Only rank 0 reads and
writes. `save` may run in a thread, and does not read again what this process has read or written; `latest` and
`why_invalid` always read.
"""

import errno
import functools
import hashlib
import itertools
import json
import logging
import os
import shutil
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open

from largebatch.bit_sums import bit_sums, digest
from largebatch.checkpoint.snapshot import STATE, Snapshot, sums_of
from largebatch.engine import TrainState
from largebatch.files.run_folder import BEST, RunFolder
from zoo import hub, write_weights
from zoo.hub import AVERAGE
from zoo.hub import CONFIG as DESCRIPTION
from zoo.hub import MANIFEST, WEIGHTS
from zoo.weights import SUFFIXES, reason_of

logger = logging.getLogger(__name__)

PARTS = (WEIGHTS, AVERAGE, DESCRIPTION, STATE)
OPTIONAL = (AVERAGE, DESCRIPTION)  # older checkpoints have no description
UNFINISHED = ".tmp"
STAYS = "removed (%s): it stays, and the run goes on; remove it by hand"
SPARE_BYTES = 2**20  # names, headers and scalars beside the tensors


# -- write and find --------------------------------------------------------------------------------------------


def save(folder: str | Path, snapshot: Snapshot, *, keep: int = 2) -> Path:
    """Write a snapshot into run folder `folder`, which must exist, and return the checkpoint's path.

    The `keep` newest valid checkpoints and the best one are kept; while the training loss is above its lowest, also the
    newest one from before that rise. A valid checkpoint of this state is not written again. Raises OSError if it cannot
    be written.
    """
    assert keep >= 2, keep
    snapshot.wait()
    root = RunFolder(folder).checkpoints
    _make(root)
    for leftover in root.glob("*" + UNFINISHED):  # of saves that were killed
        _discard(leftover)
    path = root / f"{snapshot.step:08d}"
    if path.exists() and why_invalid(path) is None and read_state(path)["state"] == snapshot.state["state"]:
        _link_best(root, snapshot.state["state"])
        return path
    unfinished = _unused(path)
    try:
        check_space(root, snapshot.num_bytes())
        _write(unfinished, snapshot)
        _remove(path)  # there only if it is damaged, or if the evaluation of its step was still to be made
        unfinished.rename(path)
        _sync(root)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _link_best(root, snapshot.state["state"])
    smoothed = snapshot.state["state"].get("smoothed")
    _keep_newest(path, keep, sound_step=smoothed[2] if smoothed else None)
    return path


def adopt(folder: str | Path, complete: Sequence[Path]) -> None:
    """Move checkpoints into a run folder, the oldest first: after a kill the newest is still missing."""
    root = RunFolder(folder).checkpoints
    for path in complete:
        for file in (*path.iterdir(), path):
            _sync(file)
        _remove(root / path.name)
        path.rename(root / path.name)
        _sync(root)
    _link_best(root, read_state(root / complete[-1].name)["state"])


def latest(folder: str | Path, *, last_step: int | None = None) -> Path | None:
    """Return the newest valid checkpoint of run folder `folder`, up to `last_step`; warn of newer, damaged ones.

    Raises ValueError if all are damaged: a new start in this folder would overwrite what may still be recoverable.
    """
    paths = [path for path in checkpoints(folder) if last_step is None or int(path.name) <= last_step]
    for path in _valid(paths):
        return path
    if paths:
        newest, reason = paths[0], why_invalid(paths[0])
        raise ValueError(
            f"None of the {len(paths)} checkpoints in {newest.parent} is valid ({newest.name}: {reason}): "
            "restore one, or choose another --run.folder to train from the beginning."
        )
    return None


def newest_weights(folder: str | Path, *, average: bool = False) -> Path:
    """Return the weights file (average: the averaged one) of the newest valid checkpoint; ValueError without one.

    folder: a run folder, or one of its checkpoints, such as RUN/checkpoints/best.
    """
    path = latest(folder)
    if is_checkpoint(folder):
        path = Path(folder).resolve()
        if reason := why_invalid(path):
            raise ValueError(f"Checkpoint {folder} cannot be used, as {reason}: choose another one.")
    if path is None:
        raise ValueError(f"{folder} has no valid checkpoint: expected one in {RunFolder(folder).checkpoints}.")
    return path / (AVERAGE if average else WEIGHTS)


def _valid(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        reason = why_invalid(path)
        if reason is None:
            yield path
        else:
            logger.warning("checkpoint %s is refused: %s", path, reason)


def find_weights(path: str | Path, *, average: bool = False, every: bool = False) -> list[Path]:
    """Return a weights file itself, or that of a checkpoint, an exported folder or a run's newest valid checkpoint.

    every: the weights of all valid checkpoints of a run, oldest first, or all weights files of another folder, sorted.
    average: the averaged ones. Raises ValueError if there are none.
    """
    path, name = Path(path), AVERAGE if average else WEIGHTS
    if not every or is_checkpoint(path):
        exported = path / name
        if exported.is_file():
            if reason := hub.why_changed(exported):
                raise ValueError(f"{exported} {reason}: restore it, or give another checkpoint.")
            return [exported]
        return [newest_weights(path, average=average) if path.is_dir() else path]
    if kept := [checkpoint / name for checkpoint in _valid(reversed(checkpoints(path)))]:
        return kept
    files = sorted(file for file in path.glob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise ValueError(
            f"{path} has nothing to validate: expected a run folder with a valid checkpoint, or a folder of weights "
            f"files ({', '.join(SUFFIXES)})."
        )
    return files


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a folder is a complete checkpoint, perhaps damaged, or a link to one."""
    return Path(path, MANIFEST).is_file()


def read_state(path: Path) -> dict[str, Any]:
    """Read state.pt, with tensors on the CPU; ValueError if it is not the state of that step."""
    content = torch.load(path / STATE, map_location="cpu", weights_only=True)
    with suppress(LookupError, TypeError, AttributeError):  # raised if another program wrote the file
        optimizer, state = content["optimizer"], TrainState(**content["state"])
        dicts = content["scaler"], optimizer["state"], *optimizer["state"].values(), *optimizer["param_groups"]
        typed = all(_is_of(getattr(state, name), hint) for name, hint in get_type_hints(TrainState).items())
        typed = typed and all(isinstance(one, dict) for one in dicts) and isinstance(content["config"], str)
        if typed and state.step == int(path.name) and state.images >= 0:
            return content
    raise ValueError(f"{path / STATE} is not the state of a run at that step: remove {path}, or choose another folder.")


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of an annotation: a class, a tuple or a union."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is types.UnionType:
        return any(_is_of(value, part) for part in parts)
    if kind is not tuple:
        return type(value) in ((int, float) if hint is float else (hint,))
    wanted = parts[:1] * len(value) if ... in parts else parts  # tuple[int, ...] has any number
    return isinstance(value, (tuple, list)) and len(value) == len(wanted) and all(map(_is_of, value, wanted))


def checkpoints(folder: str | Path) -> list[Path]:
    """List the complete checkpoints of a run, newest first, damaged ones included."""
    return hub.saved(RunFolder(folder).checkpoints)


def why_invalid(path: Path, *, sha256: Callable[[Path], str] | None = None) -> str | None:
    """Return why a checkpoint cannot be used, or None.

    sha256: returns a file's digest; by default every byte is read, and the tensors are compared as well.
    """
    try:
        text = "" if (path / MANIFEST).is_fifo() else (path / MANIFEST).read_text(encoding="ascii")
        recorded = json.loads(text)["parts"]
        for name in _parts(recorded):
            num_bytes, sums = recorded[name]["bytes"], recorded[name].get("sums")
            if (path / name).stat().st_size != num_bytes:
                return f"{name} has {(path / name).stat().st_size} of {num_bytes} bytes"
            if (sha256 or _sha256)(path / name) != recorded[name]["sha256"]:
                return f"{name} has changed since it was written"
            if sha256 is None and sums is not None and sums != _digest_in(path / name):
                return f"{name} holds other numbers than were trained"
        if text != _manifest(recorded, step=int(path.name)):
            return f"{MANIFEST} has changed since it was written"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read ({error.strerror or error})"
    except (ValueError, KeyError, TypeError, RecursionError):  # not ASCII, not JSON, not ours
        return f"{MANIFEST} is not readable as one"
    return None


# -- the disk --------------------------------------------------------------------------------------------------


def _make(root: Path) -> None:
    try:
        root.mkdir(exist_ok=True)
    except FileNotFoundError:
        reason = "the run folder was removed while the run went on"
        raise FileNotFoundError(errno.ENOENT, reason, str(root.parent)) from None


def _write(folder: Path, snapshot: Snapshot) -> None:
    folder.mkdir()
    try:
        for name, weights in snapshot.weights.items():
            write_weights(weights, folder / name)
        if snapshot.description:
            (folder / DESCRIPTION).write_text(snapshot.description, encoding="ascii")
        torch.save(snapshot.state, folder / STATE)
    except (SafetensorError, RuntimeError) as error:  # how the two libraries report a failed write
        full = ", and the disk is full" if shutil.disk_usage(folder).free < SPARE_BYTES else ""
        code = errno.ENOSPC if full else errno.EIO
        raise OSError(code, f"writing failed{full}: {reason_of(error)}") from error
    parts: dict[str, dict[str, Any]] = {}
    for name in (*snapshot.weights, *([DESCRIPTION] if snapshot.description else []), STATE):
        _sync(folder / name)
        parts[name] = {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
    for name, sums in snapshot.sums.items():
        parts[name]["sums"] = digest(sums)
        if _digest_in(folder / name) != parts[name]["sums"]:
            reason = f"{name} holds other numbers than the training: a bit has flipped on the way to the disk"
            raise OSError(errno.EIO, reason)
    (folder / MANIFEST).write_text(_manifest(parts, step=snapshot.step), encoding="ascii")
    _sync(folder / MANIFEST)
    _sync(folder)


def _digest_in(path: Path) -> str:
    """Return the digest of the sums of a file's tensors, read one by one; "" if it cannot be read."""
    try:
        if path.name == STATE:
            return digest(sums_of(torch.load(path, map_location="cpu", weights_only=True, mmap=True)))
        with safe_open(path, framework="pt") as file:
            return digest(bit_sums(file.get_tensor(name) for name in sorted(file.keys())))
    except (SafetensorError, RuntimeError, UnpicklingError, ValueError, EOFError, LookupError, TypeError):
        return ""


def recorded_sums(path: Path) -> dict[str, str]:
    """Return the digests of a valid checkpoint's tensors, by file name; older checkpoints have none."""
    parts = json.loads((path / MANIFEST).read_text(encoding="ascii"))["parts"]
    return {name: part["sums"] for name, part in parts.items() if "sums" in part}


def _manifest(parts: dict[str, dict[str, Any]], *, step: int) -> str:
    """Return the one possible text of manifest.json, so that a change anywhere in it shows."""
    known = {
        name: {key: parts[name][key] for key in ("bytes", "sha256", "sums") if key != "sums" or key in parts[name]}
        for name in _parts(parts)
    }
    return json.dumps({"step": step, "parts": known}, indent=2) + "\n"


def _parts(recorded: Collection[str]) -> list[str]:
    return [name for name in PARTS if name not in OPTIONAL or name in recorded]


# The SHA-256 of files that this process has read, by their device, inode, size and time of the last change.
_digests: dict[tuple[int, ...], str] = {}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        key = _identity(os.fstat(file.fileno()))
        _digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _digests[key]


def remembered_sha256(path: Path) -> str:
    return _digests.get(_identity(path.stat())) or _sha256(path)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(root: Path, num_bytes: int) -> None:
    needed, free = num_bytes + SPARE_BYTES, shutil.disk_usage(root).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{root} has {free / 1e9:.3g} GB free, a checkpoint needs {needed / 1e9:.3g} GB")


def _link_best(root: Path, state: dict[str, Any]) -> None:
    """Let `best` name the checkpoint that a state calls the best. After a kill the next save does it."""
    if not state.get("best"):
        return
    link, name = root / BEST, f"{state['best'][2]:08d}"
    if not (root / name).is_dir() or _target(link) == name:
        return
    try:
        unfinished = _unused(link)
        unfinished.symlink_to(name)
        os.replace(unfinished, link)
        _sync(root)
    except OSError as error:  # a file system without links
        _warn("made (%s): the best checkpoint is not kept; the run goes on", link, str(error))


def _target(link: Path) -> str:
    return os.readlink(link) if link.is_symlink() else ""


def discard_after(folder: str | Path, step: int, best: tuple[str, float, int] | None) -> tuple[str, float, int] | None:
    """Remove the checkpoints of a run that are newer than `step`.

    Returns `best`, the best evaluation by the state of that step, if its checkpoint is still there; else None, without
    the link to the best.
    """
    root = RunFolder(folder).checkpoints
    for path in checkpoints(folder):
        if int(path.name) > step:
            _remove(path)
    if best is not None and (root / f"{best[2]:08d}").is_dir():
        return best
    (root / BEST).unlink(missing_ok=True)
    return None


def _keep_newest(written: Path, keep: int, *, sound_step: int | None) -> None:
    """Keep the best, the `keep` newest valid checkpoints, and the newest valid one up to `sound_step`."""
    paths = checkpoints(written.parent.parent)
    if len(paths) <= keep:
        return
    checked = partial(why_invalid, sha256=remembered_sha256)
    valid = list(itertools.islice((path for path in paths if path == written or checked(path) is None), keep))
    if len(valid) < keep:
        return
    best = _target(written.parent / BEST)
    older = (path for path in paths if sound_step is not None and int(path.name) <= sound_step)
    sound = next((path for path in older if path in valid or checked(path) is None), None)
    for path in paths:
        if path not in valid and path != sound and path.name != best:
            try:
                _remove(path)
            except OSError as error:
                _warn(STAYS, path, str(error))


def _remove(path: Path) -> None:
    """Remove a checkpoint, never leaving part of one under its name."""
    if path.exists():
        doomed = _unused(path.with_name(path.name + ".removed"))
        path.rename(doomed)
        _discard(doomed)


def _unused(path: Path) -> Path:
    """Return the first free name of path.tmp, path.1.tmp, path.2.tmp, ..."""
    suffixes = itertools.chain([""], (f".{number}" for number in itertools.count(1)))
    names = (path.with_name(f"{path.name}{suffix}{UNFINISHED}") for suffix in suffixes)
    return next(name for name in names if not os.path.lexists(name))


def _discard(path: Path) -> None:
    """Remove an unfinished folder; if that fails, it costs space, not the checkpoint."""
    try:
        if path.is_symlink():  # a link to the best that was not made whole
            return path.unlink()
        shutil.rmtree(path)
    except OSError as error:
        _warn(STAYS, path, str(error))


@functools.cache
def _warn(what: str, path: Path, reason: str) -> None:
    logger.warning("%s cannot be " + what, path, reason)
