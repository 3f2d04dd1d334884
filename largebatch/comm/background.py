"""Work in a thread that does not keep the process from ending for long."""

import atexit
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")
GRACE_S = 5.0
_begun: set[futures.Future[Any]] = set()  # and not done


def in_background(work: Callable[[], T], *, name: str) -> futures.Future[T]:
    """Begin `work` in a daemon thread of this name; return its future result.

    The threads of an executor are joined when the process ends, also one that hangs in a file system.
    """
    future: futures.Future[T] = futures.Future()
    _begun.add(future)
    future.add_done_callback(_begun.discard)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


@atexit.register
def _wait() -> None:
    """Let the work come to its end: a thread inside a library of C may crash an interpreter that ends."""
    futures.wait(list(_begun), GRACE_S)
