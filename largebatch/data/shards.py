"""Writing TFRecord shards: whole or not at all, the same bytes whoever writes them and however often it is begun.

A shard is a pure function of its images and its number and appears under its name when it is whole. So several
processes may share the shards of a split, and one that was interrupted goes on with those that are missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from largebatch.data import records
from largebatch.data.records import IMAGE, LABEL, Values


def _nothing(k: int) -> Mapping[str, Values]:
    return {}


@dataclass(frozen=True, eq=False)
class Images:
    """Images that are not packed yet: `encoded(k)` gives the bytes of image k, `labels` are zero-based.

    `others(k)` gives further features for its record. `names` tell the images of one source from those of another.
    """

    labels: Sequence[int]
    encoded: Callable[[int], bytes]
    others: Callable[[int], Mapping[str, Values]] = _nothing
    names: Sequence[str] = ()


def shard_images(shard: int, *, count: int, num_shards: int) -> range:
    """Which of `count` images a shard holds."""
    return range(count * shard // num_shards, count * (shard + 1) // num_shards)


class _Stopped(Exception):
    """Ends a shard because another one has failed."""


def write_split(
    folder: Path,
    split: str,
    images: Images,
    *,
    num_shards: int,
    num_threads: int = 1,
    mine: Iterable[int] | None = None,
) -> Iterator[int]:
    """Writes <split>-00000-of-0000N ... into `folder`, with labels from 1 as in the published ImageNet
    records; of them only `mine`, if given. A shard that is there is kept.

    Each thread writes a shard of its own. Yields the number of images done so far after each shard, so it must be
    iterated to the end.
    """
    count = len(images.labels)
    assert 1 <= num_shards <= count, (num_shards, count)
    stopped = threading.Event()

    def payloads(share: range) -> Iterator[bytes]:
        for k in share:
            if stopped.is_set():
                raise _Stopped
            features = {**images.others(k), IMAGE: [images.encoded(k)], LABEL: [images.labels[k] + 1]}
            yield records.encode_example(features)

    def write(shard: int) -> int:
        share = shard_images(shard, count=count, num_shards=num_shards)
        path = folder / f"{split}-{shard:05d}-of-{num_shards:05d}"
        try:
            if not path.exists():
                records.write_records(path, payloads(share))
        except BaseException:
            stopped.set()
            raise
        return len(share)

    done = 0
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            tasks = [pool.submit(write, shard) for shard in (range(num_shards) if mine is None else mine)]
            for task in as_completed(tasks):
                if isinstance(task.exception(), _Stopped):  # the cause is still to come
                    continue
                done += task.result()
                yield done
        finally:  # also where the consumer stops early
            stopped.set()
            pool.shutdown(cancel_futures=True)
