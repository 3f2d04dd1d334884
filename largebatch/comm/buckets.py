"""Buckets of gradients: tensors that are handed over to Horovod together, in the order of the backward pass.

Each tensor costs the host a call of Horovod, and one to receive the result, hundreds of times in a step. A bucket costs
one of each, but begins only when its last gradient is ready. So buckets are small where time would be lost: at the
beginning of the backward pass, when nothing is being reduced yet, and at its end, when all ranks wait for the rest.
"""

from collections.abc import Iterator, Sequence

SMALLEST = 2**20  # bytes that a bucket has at least: smaller messages take no less time
LARGEST = 12  # a bucket has this part of all bytes at most, and one tensor more


def buckets(sizes: Sequence[int]) -> Iterator[range]:
    """Divide consecutive gradients of these sizes, in bytes; yield which belong together, as their numbers.

    A bucket has no more bytes than those before it, and no more than are left after it.
    """
    total, begun, done, start = sum(sizes), 0, 0, 0
    for number, size in enumerate(sizes):
        done += size
        if done - begun >= max(SMALLEST, min(total / LARGEST, begun, total - done)):
            yield range(start, number + 1)
            begun, start = done, number + 1
    if start < len(sizes):
        yield range(start, len(sizes))
