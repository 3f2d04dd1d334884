"""Work in a thread that does not keep the process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], *, name: str) -> "Future[T]":
    """Begin `work` in a daemon thread of this name; return its future result.

    The threads of an executor are joined when the process ends, also one that hangs in a file system.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
