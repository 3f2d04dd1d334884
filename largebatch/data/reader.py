"""Read the encoded bytes of images with many threads, into memory that is used again."""

import collections
import functools
import os
import resource
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from largebatch.data import remote
from largebatch.data.index import Index
from largebatch.data.label_maps import map_bytes
from largebatch.files import Damaged

KEPT_BLOCKS = 32  # free blocks of memory that are kept


class Memory:
    """Memory that is used again when nobody holds it: on a CPU, fresh pages cost as much as the resize."""

    def __init__(self) -> None:
        self._free: collections.deque[np.ndarray] = collections.deque(maxlen=KEPT_BLOCKS)

    def take(self, size: int) -> np.ndarray:
        """Return an array of `size` bytes, whose memory is used again when the array and every tensor of it are gone.

        A NumPy view does not keep it: it refers to the block behind the array.
        """
        try:
            block = self._free.popleft()
        except IndexError:
            block = np.empty(0, dtype=np.uint8)
        if len(block) < size:
            block = np.empty(size + size // 8, dtype=np.uint8)
        taken = block[:size]
        weakref.finalize(taken, self._free.append, block).atexit = False
        return taken


@dataclass(frozen=True, eq=False)
class Room:
    """Memory for the bytes of some samples: a uint8 buffer, and views of it for each sample.

    A span is read at once: the image, or the image with its label map beside it.
    """

    buffer: np.ndarray
    spans: list[np.ndarray]
    images: list[np.ndarray]
    maps: list[np.ndarray]


def room(index: Index, samples: np.ndarray, memory: Memory, *, with_maps: bool = False) -> Room:
    starts, stops = index.spans(samples, with_maps=with_maps)
    ends = np.cumsum(stops - starts)
    buffer = memory.take(int(ends[-1]))
    spans = np.split(buffer, ends[:-1])
    if not with_maps:
        return Room(buffer, spans, spans, [])
    at, size = (index.offset[samples] - starts).tolist(), index.length[samples].tolist()
    map_at, map_size = (index.map_offset[samples] - starts).tolist(), map_bytes(index.map_shape[0].tolist())
    images = [span[a : a + n] for span, a, n in zip(spans, at, size)]
    return Room(buffer, spans, images, [span[a : a + map_size] for span, a in zip(spans, map_at)])


class _File:
    """A file descriptor that closes with its last user: a thread may read a file that the cache has dropped."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.address = remote.address_of(path, self.fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Reader:
    def __init__(self, index: Index, preadv: Callable[[int, list, int], int], *, with_maps: bool = False) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        kept = min(len(index.files), 4096, limit // 4)  # a global shuffle needs all shards all the time
        self._index, self._preadv, self._with_maps = index, preadv, with_maps
        self._open = functools.lru_cache(maxsize=kept)(_File)

    def read(self, samples: np.ndarray, views: list[np.ndarray]) -> None:
        """Fill each view, a span of `room`, with the bytes of its sample."""
        starts, _ = self._index.spans(samples, with_maps=self._with_maps)
        for sample, start, view in zip(samples.tolist(), starts.tolist(), views):
            try:
                self._fill(view, self._open(self._index.files[self._index.file[sample]]), sample, start)
            except OSError as error:
                raise Damaged(f"{self._index.where(sample)} cannot be read: {error.strerror or error}.") from error

    def _fill(self, view: np.ndarray, file: _File, sample: int, offset: int) -> None:
        if file.address:
            view[:] = np.frombuffer(remote.read_range(file.address, offset, len(view)), dtype=np.uint8)
            return
        done = 0
        while done < len(view):
            count = self._preadv(file.fd, [view[done:].data], offset + done)
            if not count:
                where = self._index.where(sample)
                raise Damaged(f"{where} is cut off: the file has changed since it was indexed.")
            done += count
