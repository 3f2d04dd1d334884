"""When Python searches for garbage in a command that trains or validates.

A search visits all objects that are not frozen, and imports leave half a million (benchmark/NOTES.md). All ranks would
wait for a search in training.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Prevent searches up to `gc_resume` or to the end of the block."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()
        else:
            gc.disable()


def gc_freeze() -> None:
    """Let no search visit the present objects: imports are hardly garbage."""
    gc.freeze()


def gc_resume() -> None:
    """Search once more, then only among new objects."""
    gc.collect()  # or a copy of the model, on which compilation was tried, would keep its memory for good
    gc.freeze()
    gc.enable()
