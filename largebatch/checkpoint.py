"""Checkpoints that a kill, a full disk or a bad block cannot take away.

    RUN/checkpoints/
        00000100/                 the step, in eight digits or more
            model.safetensors     the model's weights under its own names; zoo.create_model(weights=...) reads it
            model_ema.safetensors the average of the weights, in a run with optim.ema_half_life
            state.pt              optimizer, loss scaler, TrainState, config and versions; weights_only is enough
            manifest.json         the step, and size and SHA-256 of these: written last
        00000200/
        00000300.tmp/             one being written, or what a kill left of it; removed by the next save

A folder without the suffix is complete: it is written under the other name, every file is on the disk before the
manifest is, and only then it is renamed. The digests show any later damage before a tensor is read, and the next older
checkpoint is taken then. Only rank 0 reads and writes. Of the data only the step is in here: the plan of the run is a
pure function of it.
"""

import errno
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch import config as configs
from largebatch.config import TrainConfig
from largebatch.engine import Trainer, TrainState
from zoo import load_weights, save_weights

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
WEIGHTS_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".tar")
WEIGHTS, AVERAGE, STATE = "model.safetensors", "model_ema.safetensors", "state.pt"
MANIFEST = "manifest.json"
PARTS = (WEIGHTS, AVERAGE, STATE)  # the second only where there is one
UNFINISHED = ".tmp"
SPARE_BYTES = 2**20  # names, headers and scalars beside the tensors

MAY_DIFFER = {  # options that change how a run is watched, not its numbers
    "run.max_steps",
    "run.end_time",
    "run.profile_steps",
    "run.folder",
    "run.eval_every",
    "run.check_replicas",
    "run.max_skipped_steps",
    "run.device",
    "model.grad_checkpointing",
    "data.num_threads",
    "data.quarantine",  # the images are compared by their digest
    "data.allow_incomplete",
    "data.eval_batch_size",
}
MAY_DIFFER_SECTIONS = ("horovod.", "log.", "checkpoint.", "parallel.")


# -- all ranks -------------------------------------------------------------------------------------------------


def resume(config: TrainConfig, trainer: Trainer) -> bool:
    """Bring `trainer` to the newest valid checkpoint in the run folder of `config`; False if there is none.

    Call it on every rank, with the optimizer's state created (`optim.init_state`). Rank 0 reads, and the others get its
    state, the average of the weights included if the run has one. Raises comm.Stopped, on every rank, if the checkpoint
    was made with other options.
    """
    comm = trainer.comm
    model, optimizer = trainer.replica.empty_whole()
    found: dict[str, Any] | None = None
    with comm.together("resume"):
        path = latest(config.folder) if comm.rank == 0 else None
        if path is not None:
            state = load(
                path,
                model=model,
                optimizer=optimizer,
                scaler=trainer.scaler,
                config=config,
                average=trainer.average,
            )
            found = {"path": str(path), "state": asdict(state), "scaler": trainer.scaler.state_dict()}
    found = comm.broadcast_object(found, name="resume/found")
    if found is None:
        return False
    present = trainer.state.data
    trainer.state = TrainState(**found["state"])
    if trainer.state.data != present and comm.rank == 0:
        logger.warning(
            "the training images are not those of %s any more, and %d now: epochs are drawn from these, so the present "
            "one has some images twice and misses others",
            found["path"],
            trainer.plan.num_samples,
        )
    trainer.state.data = present
    trainer.scaler.load_state_dict(found["scaler"])
    trainer.replica.scatter_whole(model, optimizer)
    if trainer.average is not None:
        comm.broadcast_model(trainer.average)
    if comm.rank == 0:
        logger.info("resumed at step %d from %s", trainer.state.step, found["path"])
    return True


# -- rank 0 ----------------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    state: TrainState,
    config_text: str,
    keep: int = 2,
    average: nn.Module | None = None,
) -> Path:
    """Write the checkpoint of `state.step` into run folder `folder`, keep the `keep` newest valid ones.

    Returns its path. A valid checkpoint of this state is not written again. Raises OSError if it cannot be written; the
    older ones are then untouched.
    """
    assert keep >= 2, keep
    root = Path(folder) / FOLDER
    root.mkdir(parents=True, exist_ok=True)
    _clean(root)
    path = root / f"{state.step:08d}"
    if path.exists() and why_invalid(path) is None and read_state(path)["state"] == asdict(state):
        return path
    content = {
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "state": asdict(state),
        "config": config_text,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }
    models = {WEIGHTS: model} | ({} if average is None else {AVERAGE: average})
    unfinished = root / (path.name + UNFINISHED)
    try:
        _check_space(root, models, optimizer)
        _write(unfinished, models, content, step=state.step)
        _remove(path)  # there only if it is damaged, or if the evaluation of its step was still to be made
        unfinished.rename(path)
        _sync(root)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _keep_newest(path, keep)
    return path


def latest(folder: str | Path) -> Path | None:
    """Return the newest valid checkpoint of run folder `folder`, None if it has none; warn of newer, damaged ones.

    Raises ValueError if all are damaged: starting over in this folder would overwrite checkpoints that may still be
    recoverable.
    """
    paths = checkpoints(folder)
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
    """Return the weights file (average: the averaged one) of the newest valid checkpoint; ValueError without one."""
    path = latest(folder)
    if path is None:
        raise ValueError(f"{folder} has no valid checkpoint: expected one in {Path(folder) / FOLDER}.")
    return path / (AVERAGE if average else WEIGHTS)


def _valid(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the valid checkpoints; warn of the others."""
    for path in paths:
        reason = why_invalid(path)
        if reason is None:
            yield path
        else:
            logger.warning("checkpoint %s is refused: %s", path, reason)


def find_weights(path: str | Path, *, average: bool = False, every: bool = False) -> list[Path]:
    """Return a weights file itself, or the one of the newest valid checkpoint in a run folder.

    every: the weights of all valid checkpoints of a run folder, oldest first, or all weights files in another folder,
    in alphabetical order. average: the averages of a run folder. Raises ValueError if there are none.
    """
    path = Path(path)
    if not every:
        return [newest_weights(path, average=average) if path.is_dir() else path]
    kept = [kept / (AVERAGE if average else WEIGHTS) for kept in _valid(reversed(checkpoints(path)))]
    if kept:
        return kept
    files = sorted(file for file in path.glob("*") if file.suffix in WEIGHTS_SUFFIXES and file.is_file())
    if not files:
        raise ValueError(
            f"{path} has nothing to validate: expected a run folder with a valid checkpoint, or a folder of weights "
            f"files ({', '.join(WEIGHTS_SUFFIXES)})."
        )
    return files


def load(
    path: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    config: TrainConfig | None = None,
    average: nn.Module | None = None,
) -> TrainState:
    """Load a checkpoint that `latest` found; return the state it was saved with.

    Raises ValueError, and loads nothing, if it was made with other options than `config`, which change the numbers.
    """
    content = read_state(path)
    if config is not None:
        check_config(content["config"], config, path=path)
    load_weights(model, path / WEIGHTS)
    if average is not None:
        load_weights(average, path / AVERAGE)
    optimizer.load_state_dict(content["optimizer"])
    scaler.load_state_dict(content["scaler"])
    return TrainState(**content["state"])


def read_state(path: Path) -> dict[str, Any]:
    """Read state.pt: optimizer, scaler, state, config (YAML text), versions; tensors on the CPU."""
    return torch.load(path / STATE, map_location="cpu", weights_only=True)


def checkpoints(folder: str | Path) -> list[Path]:
    """List every complete checkpoint of run folder `folder`, newest first, damaged ones included."""
    found = [path for path in (Path(folder) / FOLDER).glob("*") if re.fullmatch(r"\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def why_invalid(path: Path) -> str | None:
    """Return the reason why a checkpoint cannot be used, or None; checks every byte of it and reads no tensor."""
    try:
        text = (path / MANIFEST).read_text(encoding="ascii")
        recorded = json.loads(text)["parts"]
        for name in _parts(recorded):
            num_bytes, sha256 = recorded[name]["bytes"], recorded[name]["sha256"]
            if (path / name).stat().st_size != num_bytes:
                return f"{name} has {(path / name).stat().st_size} of {num_bytes} bytes"
            if _sha256(path / name) != sha256:
                return f"{name} has changed since it was written"
        if text != _manifest(recorded, step=int(path.name)):
            return f"{MANIFEST} has changed since it was written"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read ({error.strerror or error})"
    except (ValueError, KeyError, TypeError):  # not ASCII, not JSON, not ours
        return f"{MANIFEST} is not readable as one"
    return None


def check_config(text: str, config: TrainConfig, *, path: Path) -> None:
    """Raise ValueError, with options and both values, if a checkpoint's YAML `text` is another run than `config`."""
    parser = configs.make_parser(prog="largebatch.train")
    try:
        saved = configs.to_config(parser, parser.parse_string(text))
    except Exception as error:  # jsonargparse raises argparse's, YAML's and its own
        reason = configs.explain(error, parser)
        raise ValueError(f"The config in checkpoint {path} is of another version: {reason}") from None
    differing = [
        f"--{option} {was}, now {now}"
        for option, (was, now) in configs.differences(saved, config).items()
        if option not in MAY_DIFFER and not option.startswith(MAY_DIFFER_SECTIONS)
    ]
    if differing:
        raise ValueError(
            f"Checkpoint {path} was made with {'; '.join(differing)}: give the options it was made with to continue "
            "that run, or another --run.folder to start a new one."
        )


# -- the disk --------------------------------------------------------------------------------------------------


def _write(folder: Path, models: dict[str, nn.Module], content: dict[str, Any], *, step: int) -> None:
    """Write a complete checkpoint into `folder`; it is on the disk when this returns."""
    folder.mkdir()
    try:
        for name, model in models.items():
            save_weights(model, folder / name)
        torch.save(content, folder / STATE)
    except (SafetensorError, RuntimeError) as error:  # how the two libraries report a failed write
        raise OSError(errno.EIO, f"writing failed, is the disk full? ({error})") from error
    parts = {}
    for name in (*models, STATE):
        _sync(folder / name)
        parts[name] = {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
    (folder / MANIFEST).write_text(_manifest(parts, step=step), encoding="ascii")
    _sync(folder / MANIFEST)
    _sync(folder)


def _manifest(parts: dict[str, dict[str, Any]], *, step: int) -> str:
    """Return the one possible text of manifest.json for these parts, so that a change anywhere in it shows."""
    known = {name: {"bytes": parts[name]["bytes"], "sha256": parts[name]["sha256"]} for name in _parts(parts)}
    return json.dumps({"step": step, "parts": known}, indent=2) + "\n"


def _parts(recorded: Collection[str]) -> list[str]:
    """List the files that a checkpoint must have whose manifest has these names."""
    return [name for name in PARTS if name != AVERAGE or name in recorded]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_space(root: Path, models: dict[str, nn.Module], optimizer: Optimizer) -> None:
    """Raise OSError before anything is written, if it cannot fit."""
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    weights = [tensor for model in models.values() for tensor in model.state_dict().values()]
    needed = sum(tensor.nbytes for tensor in (*weights, *moments)) + SPARE_BYTES
    free = shutil.disk_usage(root).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{root} has {free / 1e9:.3g} GB free, a checkpoint needs {needed / 1e9:.3g} GB")


def _keep_newest(written: Path, keep: int) -> None:
    """Remove all but the `keep` newest valid checkpoints, if there are that many."""
    paths = checkpoints(written.parent.parent)
    valid: list[Path] = []
    if len(paths) > keep:  # else there is nothing to remove
        newest_valid = (path for path in paths if path == written or why_invalid(path) is None)
        valid = list(itertools.islice(newest_valid, keep))
    if len(valid) == keep:
        for path in paths:
            if path not in valid:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint, never leaving part of one under its name."""
    if path.exists():
        doomed = path.with_name(f"{path.name}.removed{UNFINISHED}")
        path.rename(doomed)
        shutil.rmtree(doomed)


def _clean(root: Path) -> None:
    """Remove the unfinished folders of saves that were killed."""
    for path in root.glob("*" + UNFINISHED):
        shutil.rmtree(path)
