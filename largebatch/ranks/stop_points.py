"""Lets all ranks leave their work at the same place, soon after one of them asks for it.

The ranks pass the same points in the same order: before each pass of a step, before each evaluated batch. A message at
each point would make them wait for each other. So a thread of each rank asks the other threads a few times a second;
passing a point costs only a lock. The message also tells how many collectives each rank has begun.

After a request, each thread holds its main thread at the next point. The threads compare the numbers of the points
passed, and all leave at the one after the highest: no rank has passed it, and none waits for another before it. That
takes PERIOD_S, two short messages and at most one pass.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from largebatch.launch.parents import is_stopped

logger = logging.getLogger(__name__)

PERIOD_S = 0.2  # between two questions
SETTLED_S = 1.0  # until every rank that waits has told so
POLL_S = 0.005  # this thread is in no hurry, and leaves the core to the others


class StopPoints:
    """The points of this rank. All ranks make one, pass its points and close it."""

    def __init__(self, requests: Callable[[], Sequence[bool]], comm: Any) -> None:
        """requests: returns this rank's truth values, as many as on any rank; called in the thread."""
        self.counts: list[int] = []  # for each request the number of ranks that have it, once there is one
        self._requests, self._comm = requests, comm
        self._hosts = comm.allgather_object(socket.gethostname(), name="stop points/hosts")
        self._begun, self._asked = [0] * comm.size, 0.0  # collectives by rank, and when they were asked for
        self._lock = threading.Lock()  # of the next two
        self._passed = 0
        self._held = False
        self._last = 0  # the number of the point at which all leave
        self._decided, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._ask, name="largebatch-stop-points", daemon=True)
        self._thread.start()

    def leave(self) -> bool:
        """Pass a point; return whether all ranks are to leave their work here."""
        with self._lock:
            if not self._held:
                self._passed += 1
                return False
        with self._comm.waiting("stop points"):
            self._decided.wait()
        self._passed += 1
        return self._passed == self._last

    def close(self) -> None:
        """Wait until all ranks have passed their last point; the second call does nothing."""
        self._closing.set()
        with self._comm.waiting("end of the stop points"):
            self._thread.join()

    def compare(self, began: float) -> str:
        """Say who is behind, of the ranks with the same part of the model. began: when this rank began to wait."""
        if not self._thread.is_alive():
            return ""
        comm = self._comm
        if self._asked < began + SETTLED_S:
            stopped = [rank for rank, process in enumerate(comm.processes) if process and is_stopped(process)]
            named = [f"rank {rank} on {self._hosts[rank]} is stopped" for rank in stopped]
            return f"{', '.join(named) or 'a rank no longer answers: it is stopped or lost'}."
        begun = {rank: self._begun[rank] for rank in range(comm.model_rank, comm.size, comm.model_size)}
        return str(comm.record.compare(begun, self._hosts))

    def _ask(self) -> None:
        try:
            while True:
                self._closing.wait(PERIOD_S)
                asked = time.monotonic()
                begun = [0] * self._comm.size  # their sum over the ranks has the count of each
                begun[self._comm.rank] = self._comm.record.count
                found = self._reduce([*self._requests(), self._closing.is_set(), *begun])
                *counts, num_closing = found[: -len(begun)]
                self._begun, self._asked = found[-len(begun) :], asked
                if any(counts):
                    break
                if num_closing == self._comm.size:
                    return
            with self._lock:
                self._held, passed = True, self._passed
            (highest,) = self._reduce([passed], largest=True)
            self.counts, self._last = counts, highest + 1
        except (*self._comm.failures, ValueError) as error:  # a rank is lost, and the main thread will see it, too
            logger.debug("the ranks cannot ask each other whether to stop: %s", error)
        finally:
            self._decided.set()

    def _reduce(self, values: Sequence[int], *, largest: bool = False) -> list[int]:
        tensor, name = torch.tensor([int(value) for value in values]), f"stop points/{len(values)}"
        handle = self._comm.start_allreduce(tensor, name=name, largest=largest, among="aside")
        found: list[int] = self._comm.finish(handle, pause_s=POLL_S).tolist()
        return found
