"""The encoded bytes of images: read side by side by many threads, into memory that is used again."""

import collections
import functools
import os
import resource
import weakref
from collections.abc import Callable

import numpy as np

from largebatch.data.index import Index

KEPT_BLOCKS = 32  # blocks of free memory


class Memory:
    """Memory that is used again when nobody holds it any more: on a CPU, fresh pages cost as much as the resize."""

    def __init__(self) -> None:
        self._free: collections.deque[np.ndarray] = collections.deque(maxlen=KEPT_BLOCKS)

    def take(self, size: int) -> np.ndarray:
        """`size` bytes, free again when this very array is gone, with what holds it: not a view, but a tensor of it."""
        try:
            block = self._free.popleft()
        except IndexError:
            block = np.empty(0, dtype=np.uint8)
        if len(block) < size:
            block = np.empty(size + size // 8, dtype=np.uint8)
        taken = block[:size]
        weakref.finalize(taken, self._free.append, block).atexit = False
        return taken


def buffers(index: Index, samples: np.ndarray, memory: Memory) -> tuple[np.ndarray, list[np.ndarray]]:
    """Room for the encoded bytes of each sample: a uint8 buffer and its views."""
    stops = np.cumsum(index.length[samples])
    buffer = memory.take(int(stops[-1]))
    return buffer, np.split(buffer, stops[:-1])


class _File:
    """A descriptor that closes when its last user lets go: a thread may still read what the cache dropped."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Reader:
    """Reads the encoded bytes of samples; used by several threads at once."""

    def __init__(self, index: Index, preadv: Callable[[int, list, int], int]) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        kept = min(len(index.files), 4096, limit // 4)  # a global shuffle visits all shards all the time
        self._index, self._preadv = index, preadv
        self._open = functools.lru_cache(maxsize=kept)(_File)

    def read(self, samples: np.ndarray, views: list[np.ndarray]) -> None:
        """Fills each view with the encoded bytes of its sample."""
        for sample, view in zip(samples.tolist(), views):
            try:
                self._fill(view, self._open(self._index.files[self._index.file[sample]]), sample)
            except OSError as error:
                raise ValueError(f"{self._index.where(sample)} cannot be read: {error}") from error

    def _fill(self, view: np.ndarray, file: _File, sample: int) -> None:
        offset, done = int(self._index.offset[sample]), 0
        while done < len(view):
            count = self._preadv(file.fd, [view[done:].data], offset + done)
            if not count:
                where = self._index.where(sample)
                raise ValueError(f"{where} is cut off: the file has changed since it was indexed.")
            done += count
