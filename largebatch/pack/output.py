"""The folder that shards are written into, and its plan, by which an interrupted command goes on.

The same command finds the same plan, a small JSON file, and keeps the complete shards. Another command is refused,
because its shards would not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from largebatch.data import sources
from largebatch.files import atomic_file
from largebatch.pack.processes import World


def begin(file: Path, plan: Mapping[str, Any], *, has_shards: Callable[[], bool], world: World) -> None:
    """Write the plan into `file`: rank 0 first, so that the others find it, unless hosts do not share the folder.

    Raise ValueError if another plan made the folder's shards, or if this rank sees other images than rank 0.
    """
    if world.rank == 0:
        _begin(file, plan, has_shards)
    world.barrier()
    if world.rank > 0:
        if file.is_file() and (first := json.loads(file.read_text())) != plan:
            raise ValueError(
                f"The images of this rank are not those of rank 0 ({_differences(first, plan, file.name)}): give all "
                f"hosts the same images; if they do not share {file.parent}, delete {file} on each."
            )
        _begin(file, plan, has_shards)


def _begin(file: Path, plan: Mapping[str, Any], has_shards: Callable[[], bool]) -> None:
    begun = json.loads(file.read_text()) if file.is_file() else {}
    if begun == plan:
        return
    if has_shards():
        raise ValueError(
            f"{file.parent} already has shards that were made differently ({_differences(begun, plan, file.name)}): "
            "choose another folder, or delete them."
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as opened:
        opened.write(json.dumps(plan, indent=2).encode() + b"\n")


def _differences(begun: Mapping[str, Any], plan: Mapping[str, Any], name: str) -> str:
    if not begun:
        return f"there is no {name}"
    names = [name for name in dict.fromkeys([*plan, *begun]) if begun.get(name) != plan.get(name)]
    return "; ".join(f"{name} {begun.get(name)}, now {plan.get(name)}" for name in names)


def finish(folder: Path, splits: Iterable[str]) -> None:
    for split in splits:
        for unfinished in folder.glob(f".{split}-*"):
            unfinished.unlink()
        sources.open_everything(str(folder), split=split)
