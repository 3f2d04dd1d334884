"""An evaluation that takes smaller batches where memory does not suffice, on all ranks alike.

A batch only says what is computed together, so any size gives the same counts. A rank that ran out of memory cannot
go on alone: the others would wait for it at the end, and Horovod takes a long wait for a stall. So the ranks look
after one another every few batches; if one has failed, all begin again with batches of half the size. What comes out
is then what `--data.eval_batch_size` of that size gives, to the last bit.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from largebatch.comm import Communicator, Stopped

logger = logging.getLogger(__name__)

LOOK_EVERY = 16  # batches; the first one fails where one does, mostly
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")  # a CPU's, CUDA's, its libraries'


class _AnotherFailed(Exception):
    """On each rank that did not run out of memory itself."""


def tally_fitting(
    tally: Callable[[Iterable[Any]], Tensor],
    open_batches: Callable[[int], Iterable[Any]],
    *,
    num_images: int,
    batch_size: int,
    comm: Communicator,
) -> tuple[Tensor, int]:
    """`tally` of this rank's batches, and the size at which they fitted: `batch_size`, or a half, a quarter, ...

    open_batches(size) gives the batches of this rank, of all `num_images` in batches of that size dealt out in turn.
    Stopped, on all ranks, if memory does not suffice for one image at a time.
    """
    batch_size = min(batch_size, num_images)
    while True:
        rounds = -(-num_images // (batch_size * comm.size))
        totals = _attempt(tally, open_batches(batch_size), rounds=rounds, comm=comm)
        if totals is not None:
            return totals, batch_size
        if batch_size == 1:
            raise Stopped("Memory does not suffice to evaluate one image at a time: take a smaller model or image.")
        batch_size //= 2
        if comm.rank == 0:
            logger.warning("out of memory: all ranks begin again with --data.eval_batch_size %d", batch_size)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _attempt(
    tally: Callable[[Iterable[Any]], Tensor], batches: Iterable[Any], *, rounds: int, comm: Communicator
) -> Tensor | None:
    """None, on all ranks, if one of them ran out of memory."""
    try:
        with closing(_watched(iter(batches), rounds, comm)) as watched:
            return tally(watched)
    except _AnotherFailed:
        return None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    _any_failed(comm, True)  # the others are told when they look next
    return None


def _watched(batches: Iterator[Any], rounds: int, comm: Communicator) -> Generator[Any, None, None]:
    """The batches of this rank, a look at the others between them; as many rounds on each rank."""
    for number in range(rounds):
        batch = next(batches, None)
        if batch is not None:  # the last round may have fewer batches than ranks
            yield batch
        if (number % LOOK_EVERY == 0 or number == rounds - 1) and _any_failed(comm, False):
            raise _AnotherFailed


def _any_failed(comm: Communicator, failed: bool) -> bool:
    return bool(comm.allreduce(torch.tensor([float(failed)]), name="evaluation/memory"))


def is_out_of_memory(error: Exception) -> bool:
    """Whether this is how torch or Python report that memory could not be had, on a GPU or a CPU."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(words in str(error) for words in OUT_OF_MEMORY)
