"""The program of the ranks for the doctor: messages between every two ranks, or sums over all. network.py starts it.

    mpirun -np 3 -H a,b,c python -m largebatch.doctor.exchange pairs 10
    mpirun -np 6 -H a:2,b:2,c:2 python -m largebatch.doctor.exchange sums

Rank 0 tells two ranks at a time to measure, by a message to each: a barrier would itself use the connection that is
cut. So every pair is measured, except with ranks that rank 0 does not reach. Each step prints a line before it begins;
lines that start with "doctor " are for network.py.
"""

import json
import os
import socket
import statistics
import sys
import time
from typing import Any

import numpy as np

ORDER, REPORT, DATA = 1, 2, 3  # message tags: measure this pair; the result; the measured data
TRIPS, WARM_UP_TRIPS, TRIPS_LIMIT_S = 200, 20, 2.0
FIRST_BYTES, LARGE_BYTES = 2**20, 2**24
SLOW_S = 0.25  # if the first large message takes longer, a larger one is not needed
SUMS = {"small": 1, "large": 2**22}  # float32 values
REPEATS = 5


def say(**what: Any) -> None:
    """Print a line in one write, so that lines of several ranks do not mix."""
    os.write(1, f"doctor {json.dumps(what)}\n".encode())


def finish(request: Any, deadline: float, *, idle: bool = False) -> None:
    """Wait for a message. An idle rank sleeps, and so leaves its core to the ranks that measure."""
    while not request.Test():
        if time.monotonic() > deadline:
            raise TimeoutError
        if idle:
            time.sleep(0.001)


class Line:
    """The connection to one other rank, with a time limit for each message."""

    def __init__(self, comm: Any, peer: int, limit_s: float) -> None:
        self.comm, self.peer, self.limit_s = comm, peer, limit_s

    def send(self, values: np.ndarray) -> None:
        finish(self.comm.Isend(values, dest=self.peer, tag=DATA), time.monotonic() + self.limit_s)

    def receive(self, values: np.ndarray) -> None:
        finish(self.comm.Irecv(values, source=self.peer, tag=DATA), time.monotonic() + self.limit_s)

    def trip(self, num_bytes: int) -> float:
        """Return the seconds of a round trip; for 0 bytes those of the message that announces the size."""
        size, values = np.array([num_bytes]), np.zeros(num_bytes, dtype=np.uint8)
        back = np.empty_like(values)
        began = time.perf_counter()
        self.send(size)
        self.receive(size)
        if num_bytes:
            began = time.perf_counter()
            self.send(values)
            self.receive(back)
        return time.perf_counter() - began

    def echo(self) -> None:
        """Answer the messages of `trip` until a negative size comes."""
        size = np.empty(1, dtype=np.int64)
        while True:
            self.receive(size)
            self.send(size)
            if size[0] < 0:
                return
            if size[0] > 0:
                values = np.empty(size[0], dtype=np.uint8)
                self.receive(values)
                self.send(values)

    def measure(self) -> dict[str, Any]:
        """Return the latency of small messages in seconds and the bytes per second of large ones, or the error."""
        stage = "no message"
        try:
            self.trip(0)
            stage = "some small messages pass, but not all"
            latency_s = statistics.median(self.small_trips()) / 2
            stage = f"small messages pass, but one of {FIRST_BYTES // 2**20} MiB did not"
            num_bytes = FIRST_BYTES
            took_s = self.trip(num_bytes)
            if took_s < SLOW_S:
                num_bytes = LARGE_BYTES
                took_s = min(self.trip(num_bytes) for _ in range(3))
            self.send(np.array([-1]))  # ends the echo
            self.receive(np.empty(1, dtype=np.int64))
        except TimeoutError:
            return {"error": stage}
        return {"latency_s": latency_s, "bytes_per_s": 2 * num_bytes / took_s}

    def small_trips(self) -> list[float]:
        began = time.monotonic()
        trips: list[float] = []
        while len(trips) < WARM_UP_TRIPS + TRIPS and time.monotonic() < began + TRIPS_LIMIT_S:
            trips.append(self.trip(0))
        return trips[WARM_UP_TRIPS:] or trips


def lead(comm: Any, limit_s: float) -> bool:
    """Measure every pair in turn, first those of rank 0, to know which ranks it reaches; return whether all passed."""
    unreached: set[int] = set()
    passed = True
    for first in range(comm.size):
        for second in range(first + 1, comm.size):
            if {first, second} & unreached:
                continue
            say(pair=[first, second])
            if first == 0:
                found = order_and_measure(comm, second, limit_s)
                if "error" in found:
                    unreached.add(second)
            else:
                found = order_others(comm, first, second, limit_s)
            passed &= "error" not in found
            say(pair=[first, second], found=found)
    for rank in set(range(1, comm.size)) - unreached:
        comm.Send(np.array([-1, 0]), dest=rank, tag=ORDER)
    say(done=True, unreached=sorted(unreached))
    return passed


def order_and_measure(comm: Any, peer: int, limit_s: float) -> dict[str, Any]:
    try:
        finish(comm.Isend(np.array([0, 0]), dest=peer, tag=ORDER), time.monotonic() + limit_s)
    except TimeoutError:
        return {"error": "no message"}
    return Line(comm, peer, limit_s).measure()


def order_others(comm: Any, first: int, second: int, limit_s: float) -> dict[str, Any]:
    """Let two other ranks measure; return the report of the first, whose messages the second echoes."""
    comm.Send(np.array([first, 0]), dest=second, tag=ORDER)
    comm.Send(np.array([second, 1]), dest=first, tag=ORDER)
    deadline = time.monotonic() + 4 * limit_s + TRIPS_LIMIT_S
    reports = []
    for rank in (first, second):
        report = np.zeros(4096, dtype=np.uint8)
        try:
            finish(comm.Irecv(report, source=rank, tag=REPORT), deadline, idle=True)
        except TimeoutError:
            return {"error": "no message"}
        reports.append(json.loads(report.tobytes().rstrip(b"\0")))
    return reports[0]


def follow(comm: Any, limit_s: float) -> bool:
    """Obey rank 0 until it says stop; return whether all pairs of this rank passed."""
    passed = True
    while True:
        order = np.empty(2, dtype=np.int64)
        finish(comm.Irecv(order, source=0, tag=ORDER), time.monotonic() + 3600, idle=True)
        peer, is_first = (int(value) for value in order)
        if peer < 0:
            return passed
        line, found = Line(comm, peer, limit_s), {}
        if is_first:
            found = line.measure()
        else:
            try:
                line.echo()
            except TimeoutError:
                found = {"error": "no message"}
        passed &= "error" not in found
        if peer != 0:
            comm.Send(np.frombuffer(json.dumps(found).encode(), dtype=np.uint8).copy(), dest=0, tag=REPORT)


def sums(comm: Any) -> None:
    """Compute a small and a large sum over all ranks, several times. Each rank checks that its sum is exact."""
    for name, count in SUMS.items():
        if comm.rank == 0:
            say(sum=name)
        mine, total = np.full(count, comm.rank + 1, dtype=np.float32), np.empty(count, dtype=np.float32)
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            comm.Allreduce(mine, total)
            times.append(time.perf_counter() - began)
        exact = bool((total == comm.size * (comm.size + 1) // 2).all())
        if comm.rank == 0 or not exact:
            say(sum=name, took_s=statistics.median(times), bytes=mine.nbytes, exact=exact, rank=comm.rank)
    comm.Barrier()
    if comm.rank == 0:
        say(done=True)


def main(arguments: list[str]) -> None:
    say(started=socket.gethostname())
    from mpi4py import MPI  # this import starts MPI and may hang, so the rank has reported first

    comm = MPI.COMM_WORLD
    say(ready=comm.rank, size=comm.size, host=socket.gethostname())
    if arguments[0] == "sums":
        sums(comm)
        return
    limit_s = float(arguments[1])
    passed = lead(comm, limit_s) if comm.rank == 0 else follow(comm, limit_s)
    if not passed:  # MPI_Finalize would wait for messages that never come
        sys.stdout.flush()
        if comm.rank == 0:
            comm.Abort(1)
        finish(comm.Irecv(np.empty(1), source=0, tag=REPORT), time.monotonic() + 60, idle=True)


if __name__ == "__main__":
    main(sys.argv[1:])
