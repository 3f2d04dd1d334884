"""Processes that train, one trial each at a time, on one thread.

They are forked from a server that has imported torch once. If this process ends, by whatever signal, they see the end
of their pipes, and leave their trials.
"""

import ctypes
import logging
import math
import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from largebatch.config import TrainConfig
from largebatch.reproduce.results import Result, Split

Work = tuple[TrainConfig, Split | None, Path]  # the config of a trial, the split of one that searches, its state


class Alone:
    """This process itself, in place of several. until: by time.perf_counter."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.done: list[tuple[Any, Result]] = []

    def idle(self) -> bool:
        return not self.done

    def start(self, key: Any, work: Work) -> None:
        from largebatch.reproduce import trial

        config, split, file = work
        result = trial.run(config, split=split, file=file, given_up=lambda: time.perf_counter() > self.until)
        self.done += [(key, result)] if result else []

    def wait(self) -> list[tuple[Any, Result]]:
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        pass


class Processes:
    def __init__(self, count: int, until: float) -> None:
        self.until = until
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["largebatch.reproduce.trial"])
        self.running: dict[Connection, Any] = {}
        self.free: list[Connection] = []
        for _ in range(count):
            mine, other = context.Pipe()
            context.Process(target=serve, args=(other,), daemon=True).start()
            other.close()
            self.free.append(mine)

    def idle(self) -> bool:
        return bool(self.free)

    def start(self, key: Any, work: Work) -> None:
        connection = self.free.pop()
        self.running[connection] = key
        connection.send(work)

    def wait(self) -> list[tuple[Any, Result]]:
        """Return the trials that are finished, none only at the end of the time; ValueError if one failed."""
        left = None if math.isinf(self.until) else max(0.0, self.until - time.perf_counter())
        ready: list[Any] = wait([*self.running], left)
        return [self._take(connection) for connection in ready]

    def _take(self, connection: Connection) -> tuple[Any, Result]:
        key = self.running.pop(connection)
        try:
            answer = connection.recv()
        except EOFError:
            raise ValueError(f"A process ended in {key}, perhaps for lack of memory: give the command again.") from None
        if isinstance(answer, str):
            raise ValueError(answer)
        self.free.append(connection)
        return key, answer

    def close(self) -> None:
        """End the processes; those at work leave their trial."""
        for connection in (*self.free, *self.running):
            connection.close()


Workers = Alone | Processes


def serve(connection: Connection) -> None:
    """Run the trials that come through a pipe until its other end is closed."""
    from largebatch.reproduce import trial

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the first one ends the others
    logging.disable(logging.WARNING)
    if keep := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc: the pages of a pass stay for the next one
        keep(-1, 2**31 - 1), keep(-3, 2**25)  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    closed: Callable[[], bool] = connection.poll  # nothing is sent during a trial, so only the end can be read
    while True:
        try:
            config, split, file = connection.recv()
        except EOFError:
            return
        try:
            answer: Result | str | None = trial.run(config, split=split, file=file, given_up=closed)
        except (ValueError, OSError, RuntimeError, SystemExit) as error:
            answer = f"{error}"
        if answer is None:
            return
        connection.send(answer)
