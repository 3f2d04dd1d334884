"""Waiting for Horovod's collectives without occupying a core.

Horovod's own blocking calls busy-wait: they starve the loader, Horovod's own thread, and the rank that everyone waits
for. The functions here poll and sleep.
"""

import time

from torch import Tensor

from largebatch.ranks.hvd import hvd

MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 200e-6  # between two polls; each pause is twice the one before


def wait(handle: int) -> None:
    """Sleep until a collective is done."""
    pause_s = MIN_PAUSE_S
    while not hvd.poll(handle):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def finish(handle: int) -> Tensor:
    """Wait for a collective and return its result."""
    wait(handle)
    return hvd.synchronize(handle)
