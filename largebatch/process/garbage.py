"""When Python searches for garbage in a command that trains or validates.

A search visits all objects that are not frozen, and the imports of torch, Horovod, DALI and timm leave half a million.
Without searches among them a short run takes a third less (benchmark/NOTES.md). One in training would take 0.2 s, and
all ranks would wait for it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_searches() -> Iterator[None]:
    """Prevent searches from here to `search_new_objects`, or to the end of the block; then they are as before."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()
        else:
            gc.disable()


def spare_imports() -> None:
    """Let no search visit the objects that there are now: imports, which are hardly garbage."""
    gc.freeze()


def search_new_objects() -> None:
    """Search once more, then only among objects that are made from now on."""
    gc.collect()  # or a copy of the model, on which compilation was tried, would keep its memory for good
    gc.freeze()
    gc.enable()
