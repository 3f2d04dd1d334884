"""When Python searches for garbage in a command that trains or validates.

A search visits all objects that are not frozen, and the imports of torch, Horovod, DALI and timm leave half a million.
Without searches among them a short run takes a third less (benchmark/NOTES.md). One in training would take 0.2 s, and
all ranks would wait for it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Prevent searches from here to `gc_resume`, or to the end of the block; then they are as before."""
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
    """Let no search visit the objects that there are now: imports, which are hardly garbage."""
    gc.freeze()


def gc_resume() -> None:
    """Search once more, then only among objects that are made from now on."""
    gc.collect()  # or a copy of the model, on which compilation was tried, would keep its memory for good
    gc.freeze()
    gc.enable()
