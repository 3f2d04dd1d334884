"""Recipes from a user's file: `--recipe my.py:function`, whose function returns a `TrainConfig`.

The config is recorded in full, so a run goes on without the file. All ranks call the function, and compare every option
before the first step.
"""

import functools
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from largebatch.config import TrainConfig


def is_one(name: str) -> bool:
    return bool(re.search(r"\.py(:|$)", name))


def _parts(name: str) -> tuple[str, str]:
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
        make = getattr(_run(Path(file).resolve(), Path(file).read_bytes()), function, None)
        config = make() if callable(make) else None
    except Exception as error:
        raise ValueError(f"--recipe is {name}: {_place(error, file)}: {type(error).__name__}: {error}") from None
    if not callable(make):
        raise ValueError(f"--recipe is {name}, and {file} has no function {function}.")
    if not isinstance(config, TrainConfig):
        raise ValueError(f"--recipe is {name}: it returns {type(config).__name__}, expected a TrainConfig.")
    return replace(config, recipe=name, run=replace(config.run, folder=config.run.folder or f"runs/{function}"))


def run(name: str) -> None:
    """Run a recipe's file for the models that it registers; ValueError, with the line, for a mistake in it."""
    file, _ = _parts(name)
    try:
        _run(Path(file).resolve(), Path(file).read_bytes())
    except Exception as error:
        raise ValueError(f"--recipe is {name}: {_place(error, file)}: {type(error).__name__}: {error}") from None


@functools.cache
def _run(path: Path, content: bytes) -> ModuleType:
    """Run a file once, until it changes, as a module that dataclasses, pickle and timm's `register_model` find."""
    module = ModuleType(f"recipe_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(content, path, "exec"), module.__dict__)
    return module


def _place(error: Exception, file: str) -> str:
    """Return file and line of a mistake: the last line of the user's file in the traceback."""
    here = str(Path(file).resolve())
    if isinstance(error, SyntaxError):
        return f"{file if error.filename in (None, here) else error.filename}, line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(sys.exc_info()[2]) if frame.filename == here]
    return f"{file}, line {lines[-1]}" if lines else file
