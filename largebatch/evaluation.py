"""Evaluation: the counts of a batch, their sums over batches and ranks, and smaller batches if memory is short.

If one rank runs out of memory, all ranks begin again with half of --data.eval_batch_size; the result has the same bits
as with that size from the start.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largebatch.precision import at_least_float32, autocast
from largebatch.ranks import Ranks, Stopped

logger = logging.getLogger(__name__)

COUNTS = ("images", "top1", "top5", "loss")
LISTED_COUNTS = ("real_images", "real_top1", "real_top5")
CHECK_EVERY = 16  # batches; most often the first one fails
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")  # a CPU's, CUDA's, its libraries'

# -- one batch -------------------------------------------------------------------------------------------------


def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the `COUNTS` of a batch, float64 (4,), from logits (B, K) and labels int64 (B,).

    In float64 no printed digit of the loss shows the order of adding. Of equal logits, the lower class comes first:
    half-precision logits do tie, and no library's top-k promises an order. A sample with a NaN logit is wrong and
    makes the loss NaN.
    """
    logits = at_least_float32(logits)
    own = logits.gather(1, labels[:, None])
    before = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    rank = ((logits > own) | ((logits == own) & before)).sum(dim=1)  # of the true class, from 0
    valid = ~logits.isnan().any(dim=1)
    loss = F.cross_entropy(logits, labels, reduction="none").double().sum()
    hits = [((rank < k) & valid).sum().double() for k in (1, 5)]
    return torch.stack([torch.full_like(loss, len(labels)), *hits, loss])


def count_listed(logits: Tensor, listed: Tensor) -> Tensor:
    """Return the `LISTED_COUNTS` of a batch, float64 (3,): an image is right with any class of its list.

    logits: (B, K). listed: int64 (B, L), filled up with -1; a row of -1 does not count. Ties and NaN: `count_correct`.
    """
    first = at_least_float32(logits).sort(dim=1, descending=True, stable=True).indices[:, :5]
    valid = ~logits.isnan().any(dim=1, keepdim=True)
    found = (first[:, :, None] == listed[:, None, :]).any(dim=2) & valid
    hits = [found[:, :k].any(dim=1).sum().double() for k in (1, 5)]
    return torch.stack([(listed >= 0).any(dim=1).sum().double(), *hits])


# -- all batches -----------------------------------------------------------------------------------------------


def evaluate(
    model: nn.Module, batches: Iterable[Any], *, comm: Ranks, device: torch.device, precision: str
) -> dict[str, float]:
    """Return top1 and top5 in percent, the mean loss in nats and the number of images, over all ranks."""
    totals = tally(model, batches, device=device, precision=precision)
    sums = dict(zip(COUNTS, comm.allreduce(totals, name="evaluate").tolist()))
    return means(sums) | {"images": sums["images"] / comm.model_size}  # each rank of a replica counts its images


def means(sums: dict[str, float]) -> dict[str, float]:
    images = sums["images"]
    return {"top1": 100 * sums["top1"] / images, "top5": 100 * sums["top5"] / images, "loss": sums["loss"] / images}


@torch.inference_mode()
def tally(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device,
    precision: str,
    count: Callable[[Tensor, Any], Tensor] = lambda logits, batch: count_correct(logits, batch.labels),
    num_counts: int = len(COUNTS),
) -> Tensor:
    """Return the sum of `count(logits, batch)` over the batches: float64 (num_counts,), on the host."""
    model.eval()
    totals = torch.zeros(num_counts, dtype=torch.float64, device=device)
    for batch in batches:
        with autocast(device, precision):
            logits = model(batch.images)
        totals += count(logits, batch)
    return totals.cpu()


# -- if memory is short ----------------------------------------------------------------------------------------


class _AnotherFailed(Exception):
    """Raised on each rank that did not run out of memory itself."""


def tally_fitting(
    tally: Callable[[Iterable[Any]], Tensor],
    open_batches: Callable[[int], Iterable[Any]],
    *,
    num_images: int,
    batch_size: int,
    comm: Ranks,
) -> tuple[Tensor, int]:
    """Tally this rank's batches; return the totals and the size that fitted: `batch_size`, or a half, a quarter, ...

    open_batches(size) returns the batches of this rank. The ranks ask one another every few batches, because they would
    wait for a rank that begins again alone. All ranks raise Stopped if memory does not suffice for one image.
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
    tally: Callable[[Iterable[Any]], Tensor], batches: Iterable[Any], *, rounds: int, comm: Ranks
) -> Tensor | None:
    """Tally the batches; return None, on all ranks, if one ran out of memory."""
    try:
        with closing(_watched(iter(batches), rounds, comm)) as watched:
            return tally(watched)
    except _AnotherFailed:
        return None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    _any_failed(comm, True)  # the others hear it when they ask next
    return None


def _watched(batches: Iterator[Any], rounds: int, comm: Ranks) -> Generator[Any, None, None]:
    """Yield the batches of this rank, and ask the other ranks between them; all ranks have `rounds` rounds."""
    for number in range(rounds):
        comm.progress(f"evaluation, batch {number}")
        batch = next(batches, None)
        if batch is not None:  # the last round may have fewer batches than ranks
            yield batch
        if (number % CHECK_EVERY == 0 or number == rounds - 1) and _any_failed(comm, False):
            raise _AnotherFailed


def _any_failed(comm: Ranks, failed: bool) -> bool:
    return bool(comm.allreduce(torch.tensor([float(failed)]), name="evaluation/memory"))


def is_out_of_memory(error: Exception) -> bool:
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(words in str(error) for words in OUT_OF_MEMORY)
