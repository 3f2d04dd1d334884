"""Writes TFRecord shards, which appear when they are complete.

The bytes of a shard depend on its images alone: several processes can share the shards of a split, and an interrupted
process writes only the missing ones.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from largebatch.data import records
from largebatch.data.records import IMAGE, LABEL, Values


def no_others(k: int) -> Mapping[str, Values]:
    return {}


@dataclass(frozen=True, eq=False)
class Images:
    """Images that are not packed yet: `encoded(k)` returns the bytes of image k; `labels` are zero-based.

    `others(k)` returns further features of its record. `names` tell the images of one source from another's. `classes`
    names the classes 0, 1, ..., if known.
    """

    labels: Sequence[int]
    encoded: Callable[[int], bytes]
    others: Callable[[int], Mapping[str, Values]] = no_others
    names: Sequence[str] = ()
    classes: Sequence[str] = ()


def encode_image(image: Image.Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def shard_images(shard: int, *, count: int, num_shards: int) -> range:
    return range(count * shard // num_shards, count * (shard + 1) // num_shards)


class _Stopped(Exception):
    """Ends the writing of a shard, because another shard has failed."""


def write_split(
    folder: Path,
    split: str,
    images: Images,
    *,
    num_shards: int,
    num_threads: int = 1,
    mine: Iterable[int] | None = None,
) -> Iterator[int]:
    """Write <split>-00000-of-0000N ... into `folder`, or only the shards `mine`; keep those that are there.

    Labels count from 1, as in the published ImageNet records. Yields the number of images done so far after each shard;
    so iterate to the end.
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
                if isinstance(task.exception(), _Stopped):  # the task that failed comes later
                    continue
                done += task.result()
                yield done
        finally:  # also if the consumer stops early
            stopped.set()
            pool.shutdown(cancel_futures=True)
