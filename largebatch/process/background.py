"""Work in a thread that does not keep the process from ending for long.

A thread waits for the next work of its name: libraries keep caches by thread, such as matplotlib its fonts, so a new
thread for each work would need more memory and descriptors each time.
"""

import atexit
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent import futures
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Works = SimpleQueue[tuple[Callable[[], Any], futures.Future[Any]]]
GRACE_S = 5.0
_begun: set[futures.Future[Any]] = set()  # and not done
_idle: defaultdict[str, list[Works]] = defaultdict(list)  # of the threads that wait for work, by their name


def in_background(work: Callable[[], T], *, name: str) -> futures.Future[T]:
    """Begin `work` in a daemon thread of this name; return its future result.

    The process would wait for a thread of an executor at its end, even if that hangs in a file system.
    """
    future: futures.Future[T] = futures.Future()
    _begun.add(future)
    future.add_done_callback(_begun.discard)
    if _idle[name]:
        works = _idle[name].pop()
    else:
        works = SimpleQueue()
        threading.Thread(target=_serve, args=(works, name), name=name, daemon=True).start()
    works.put((work, future))
    return future


def _serve(works: Works, name: str) -> None:
    while True:
        _do(works, name)


def _do(works: Works, name: str) -> None:
    """Do the next work; keep no reference to it."""
    work, future = works.get()
    try:
        result = work()
    except BaseException as error:
        _idle[name].append(works)
        future.set_exception(error)
    else:
        _idle[name].append(works)  # before the caller can begin the next work
        future.set_result(result)


@atexit.register
def _wait() -> None:
    """Let the work end: a thread inside a library of C may crash an interpreter that ends."""
    futures.wait(list(_begun), GRACE_S)
