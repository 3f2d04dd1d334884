"""Recipes from a user's file: `--recipe my.py:function`, whose function returns a `TrainConfig`.

The config that it returns is recorded in full, so a run goes on without the file: --config RUN/config.yaml. All ranks
call the function, and compare every option before the first step.
"""

import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from largebatch.config import TrainConfig


def is_one(name: str) -> bool:
    """Return whether the name of a recipe names a file."""
    return bool(re.search(r"\.py(:|$)", name))


def _parts(name: str) -> tuple[str, str]:
    """Return the file and the function, which may be missing."""
    file, _, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    return file, function


def load(name: str) -> TrainConfig:
    """Return the config of "file.py:function"; ValueError, with file and line, for a mistake in the file."""
    file, function = _parts(name)
    if not Path(file).is_file():
        raise ValueError(f"--recipe is {name}, and there is no file {file}.")
    if not function:
        raise ValueError(f"--recipe is {name}: expected {file}:FUNCTION, a function that returns a TrainConfig.")
    try:
        names: dict[str, Any] = {"__name__": Path(file).stem, "__file__": file}
        exec(compile(Path(file).read_bytes(), file, "exec"), names)
        make = names.get(function)
        config = make() if callable(make) else None
    except Exception as error:
        raise ValueError(f"--recipe is {name}: {_place(error, file)}: {type(error).__name__}: {error}") from None
    if not callable(make):
        raise ValueError(f"--recipe is {name}, and {file} has no function {function}.")
    if not isinstance(config, TrainConfig):
        raise ValueError(f"--recipe is {name}: it returns {type(config).__name__}, expected a TrainConfig.")
    return replace(config, recipe=name, run=replace(config.run, folder=config.run.folder or f"runs/{function}"))


def _place(error: Exception, file: str) -> str:
    """Return file and line of a mistake: the last line of the user's file on the way to it."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or file}, line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(sys.exc_info()[2]) if frame.filename == file]
    return f"{file}, line {lines[-1]}" if lines else file
