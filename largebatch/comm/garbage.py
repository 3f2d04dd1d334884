"""When Python searches for garbage in a command that trains.

A search visits all objects that are not frozen. The imports of torch, Horovod, DALI and timm leave half a million, so
the searches took a fifth of a rank's start and end. One more takes 0.2 s; in training, all ranks would wait for it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_searches() -> Iterator[None]:
    """Prevent searches from here to `search_new_objects`, or to the end of the block."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        (gc.enable if searched else gc.disable)()


def search_new_objects() -> None:
    """Search again, but never visit the objects that there are now."""
    gc.freeze()
    gc.enable()
