"""Batches on their way through a DALI pipeline: read ahead by many threads, decoded by DALI, finished behind it.

DALI's own readers shuffle in a small buffer and keep an opaque position, so they are not used: the place of an image's
bytes comes from the `Index`, and they enter DALI through `external_source`. DALI calls that source in the thread that
runs the pipeline, so the source itself must never read: many threads read ahead, several at one batch so that a slow
file system is waited for by all at once, and the source takes the next finished batch. Where threads of ours finish
the images, they do so one batch behind DALI.

An error in a reading thread is raised where the batch is taken, one in DALI is traced to its file and record
by decoding the batch again with PIL; in both cases the consumer gets a ValueError, and nothing waits for
ever.
"""

from __future__ import annotations

import collections
import io
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from nvidia.dali import Pipeline, fn
from PIL import Image

from largebatch.data import reader
from largebatch.data.index import Index
from largebatch.data.label_maps import decode_maps
from largebatch.data.order import MicroBatch
from largebatch.data.token_labels import TokenLabels

READ_THREADS = 32  # threads that read files, most of them asleep
READ_IMAGES = 4  # images that a thread reads in one go
READ_AHEAD = 256  # images being read or waiting for DALI; but at least two batches
PREFETCH = 2  # batches inside DALI
FINISH_IMAGES = 8  # images that a thread finishes in one go


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch: images float32 (B, 3, H, W) normalised and labels int64 (B,) on the loader's device.

    `samples` int64 (B,) are the numbers of the images in the index (on the host). `token_labels` are there if they were
    asked for.
    """

    images: torch.Tensor
    labels: torch.Tensor
    step: int
    number: int
    samples: np.ndarray
    token_labels: TokenLabels | None = None


@dataclass(frozen=True, eq=False)
class Encoded:
    """A batch before decoding: arguments are per-sample arrays for the operators of the pipeline.

    `placement` and `warp` are those of `TokenLabels`.
    """

    job: MicroBatch
    samples: np.ndarray
    room: reader.Room
    arguments: tuple[np.ndarray, ...]
    placement: np.ndarray | None = None
    warp: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class _Decoded:
    """A batch of which `images` is filled as soon as `parts` are done."""

    batch: Encoded
    images: torch.Tensor
    parts: list[Future[None]]


class Preparation(Protocol):
    """What a loader does to its images, from the numbers of samples to floats."""

    def encode(self, job: MicroBatch) -> Encoded:
        """Room for the bytes, which other threads fill, and what is drawn for the samples. In a reading thread."""

    def decode(self, jpegs: Any, *arguments: Any) -> Any:
        """The graph inside DALI: bytes and the first of the arguments -> images."""

    def finish(self, image: np.ndarray, out: np.ndarray, *arguments: Any) -> None:
        """Make a sample of what the graph gave: (H, W, 3) uint8 -> `out` (3, S, S) float32. In a thread of ours."""

    def augment(self, images: torch.Tensor, batch: Encoded) -> torch.Tensor:
        """What is left to do to a batch that the graph has finished, on its device."""


class Stream(Iterator[Batch]):
    """Runs one pipeline over `jobs` as `preparation` says.

    The graph takes the bytes and the first `num_arguments` of the arguments. If the loader `finishes` images, threads
    do that with each sample of what it gave; if not, the graph gave floats, or what `augment` makes them of. `preadv`
    reads, as os.preadv does; `with_maps`: label maps, too.
    """

    def __init__(
        self,
        index: Index,
        jobs: Iterator[MicroBatch],
        preparation: Preparation,
        *,
        num_arguments: int,
        finishes: bool,
        img_size: int,
        max_batch_size: int,
        device: torch.device,
        num_threads: int,
        preadv: Callable[[int, list, int], int],
        with_maps: bool = False,
    ) -> None:
        self._index, self._jobs, self._preparation, self._device = index, jobs, preparation, device
        self._num_arguments, self._finishes, self._img_size = num_arguments, finishes, img_size
        self._reader, self._floats = reader.Reader(index, preadv, with_maps=with_maps), reader.Memory()
        self._waiting: collections.deque[Future[tuple[Encoded, list[Future[None]]]]] = collections.deque()
        self._inside: collections.deque[Encoded] = collections.deque()  # what DALI holds, oldest first
        self._decoded: collections.deque[_Decoded] = collections.deque()
        self._end: Exception | None = None  # why DALI gives no more
        # On a GPU the copies of a batch may still be running when its images are handed out.
        self._used: collections.deque[Encoded] = collections.deque(maxlen=PREFETCH)
        device_id = None  # no GPU is touched
        if device.type == "cuda":
            device_id = torch.cuda.current_device() if device.index is None else device.index
        self._pipe: Pipeline | None = Pipeline(
            batch_size=max_batch_size,
            num_threads=num_threads,
            device_id=device_id,
            prefetch_queue_depth=PREFETCH,
            exec_dynamic=True,  # outputs belong to us; the other executors overwrite them
        )
        with self._pipe:
            inputs = fn.external_source(self._take, num_outputs=1 + num_arguments, batch=True, no_copy=True)
            self._pipe.set_outputs(preparation.decode(*inputs))
        self._pipe.build()
        self._finishers = ThreadPoolExecutor(num_threads, thread_name_prefix="largebatch-resize")
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="largebatch-read")
        for _ in range(max(2, math.ceil(READ_AHEAD / max_batch_size))):
            self._submit()

    def _submit(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._waiting.append(self._readers.submit(self._start_reading, job))

    def _start_reading(self, job: MicroBatch) -> tuple[Encoded, list[Future[None]]]:
        """The batch, and what fills its buffer: tasks of other threads, for which none of these threads waits."""
        batch = self._preparation.encode(job)
        parts = [slice(at, at + READ_IMAGES) for at in range(0, len(batch.samples), READ_IMAGES)]
        read, submit = self._reader.read, self._readers.submit
        return batch, [submit(read, batch.samples[part], batch.room.spans[part]) for part in parts]

    def _take(self) -> tuple:
        """DALI's source: the next finished batch. Raises what went wrong while it was read."""
        if not self._waiting:
            raise StopIteration
        batch, parts = self._waiting.popleft().result()
        for part in parts:
            part.result()
        self._submit()
        self._inside.append(batch)  # no_copy: the bytes must live until DALI has used them
        return (batch.room.images, *batch.arguments[: self._num_arguments])

    def __next__(self) -> Batch:
        if self._pipe is None:
            raise StopIteration
        try:
            behind = 1 if self._finishes else 0  # while DALI decodes the next batch, this one is finished
            while self._end is None and len(self._decoded) <= behind:
                self._advance(self._pipe)
            if not self._decoded:
                assert self._end is not None
                raise self._end
            done = self._decoded.popleft()
            for part in done.parts:
                part.result()
        except BaseException:
            self.close()
            raise
        batch = done.batch
        labels = self._on_device(self._index.label[batch.samples])
        token_labels = self._token_labels(batch)
        return Batch(done.images, labels, batch.job.step, batch.job.number, batch.samples, token_labels)

    def _token_labels(self, batch: Encoded) -> TokenLabels | None:
        if batch.placement is None:
            return None
        ids, scores = decode_maps(batch.room.maps, self._index.map_shape[0].tolist())
        warp = None if batch.warp is None else self._on_device(batch.warp)
        return TokenLabels(self._on_device(ids), self._on_device(scores), self._on_device(batch.placement), warp)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _advance(self, pipe: Pipeline) -> None:
        """Takes the next batch from DALI and lets the threads finish it, or remembers why there is none."""
        try:
            stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
            (images,) = pipe.run(stream)
        except RuntimeError as error:
            self._end = ValueError(self._explain(error))
            self._end.__cause__ = error
        except Exception as error:  # StopIteration, or what the source raised
            self._end = error
        else:
            batch = self._inside.popleft()
            self._used.append(batch)
            done = self._finished(batch, images) if self._finishes else self._whole(batch, images)
            self._decoded.append(done)

    def _finished(self, batch: Encoded, images: Any) -> _Decoded:
        count, side = len(batch.samples), self._img_size
        out = torch.from_numpy(self._floats.take(4 * 3 * count * side * side)).view(torch.float32)
        out = out.view(count, 3, side, side)
        floats = out.numpy()

        def finish(part: range) -> None:
            for k in part:
                arguments = (argument[k] for argument in batch.arguments)
                self._preparation.finish(np.asarray(images[k]), floats[k], *arguments)

        parts = [range(count)[at : at + FINISH_IMAGES] for at in range(0, count, FINISH_IMAGES)]
        return _Decoded(batch, out, [self._finishers.submit(finish, part) for part in parts])

    def _whole(self, batch: Encoded, images: Any) -> _Decoded:
        tensor = torch.from_dlpack(images.as_tensor())
        return _Decoded(batch, self._preparation.augment(tensor, batch), [])

    def _explain(self, error: RuntimeError) -> str:
        """Names the first image that PIL cannot decode in the batches that DALI was working on."""
        for batch in self._inside:
            for sample, data in zip(batch.samples.tolist(), batch.room.images):
                try:
                    Image.open(io.BytesIO(data.tobytes())).load()
                except Exception as reason:
                    where = self._index.where(sample)
                    return f"{where} cannot be decoded: {reason}; `python -m largebatch.pack check` lists all such"
        first = self._inside[0].job if self._inside else None
        return f"The pipeline failed at {first}, although PIL can decode its images: {error}"

    def close(self) -> None:
        """Ends the threads and frees the pipeline; safe to call twice."""
        for pool in (self._readers, self._finishers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
        self._decoded.clear()
        self._pipe = None
        self._inside.clear()
        self._used.clear()
