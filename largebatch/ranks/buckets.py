"""Buckets of gradients: tensors that are handed over to Horovod together, in the order of the backward pass.

Each tensor, and each bucket, costs the host two calls of Horovod, but a bucket begins only when its last gradient is
ready. So buckets are small at the beginning of the backward pass, when nothing is being reduced yet, and at its end,
when all ranks wait for the rest.
"""

from collections.abc import Iterator, Sequence

SMALLEST = 2**20  # bytes: smaller messages take no less time
PARTS = 12  # there are about as many large buckets


def buckets(sizes: Sequence[int]) -> Iterator[range]:
    """Divide consecutive gradients of these sizes, in bytes; yield the numbers of each bucket.

    A bucket is full when it has SMALLEST bytes and, in addition, a PARTS-th of all, or as many as all buckets before
    it, or as many as are left after it.
    """
    total, begun, done, start = sum(sizes), 0, 0, 0
    for number, size in enumerate(sizes):
        done += size
        if done - begun >= max(SMALLEST, min(total / PARTS, begun, total - done)):
            yield range(start, number + 1)
            begun, start = done, number + 1
    if start < len(sizes):
        yield range(start, len(sizes))
