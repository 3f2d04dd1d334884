"""A stream of batches through a DALI pipeline: threads read ahead, DALI decodes, on a CPU threads finish the images.

DALI's own readers shuffle in a small buffer and do not tell their position, so the bytes enter through
`external_source`. Its callback must not wait for a disk: a pool of threads reads ahead, several per batch.

After an error in DALI the images of the batch are decoded one by one, to find the file and record. An error in a thread
is raised where the batch is taken. Either way the consumer gets a ValueError, and no thread is left waiting.
"""

from __future__ import annotations

import collections
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from largebatch.data import reader, remote
from largebatch.data.index import Index
from largebatch.data.label_maps import decode_maps
from largebatch.data.order import MicroBatch
from largebatch.data.quarantine import image_fault, remedy
from largebatch.data.scan import size_or_zero
from largebatch.data.sources import SPLITS
from largebatch.data.token_labels import TokenLabels
from largebatch.files import Damaged
from largebatch.files.cache import cache_folder
from largebatch.native.copies import to_device

if TYPE_CHECKING:
    from nvidia.dali import Pipeline

OUT_OF_MEMORY = ("CUDA allocation failed", "Can't allocate", "bad_alloc", "out of memory")  # in DALI's RuntimeErrors
READ_THREADS = 32  # threads that read files; most of them sleep
READ_IMAGES = 4  # images that a thread reads in one task
FAR_IMAGES = 1  # the same, if some are at an address, where each waits for an answer
READ_AHEAD = 256  # images being read or waiting for DALI, but at least two batches
FAR_AHEAD = 1024  # the same, if some are at an address
READ_FIRST = 64  # the same in the beginning: a run of few steps does not pay for hundreds of images
PREFETCH = 2  # batches inside DALI
FINISH_IMAGES = 8  # images that a thread finishes in one task
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # with which DALI writes its errors

Arrays = TypeVar("Arrays")  # a loader's own dataclass of arrays with one row per sample


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch: normalised images float32 (B, 3, H, W) and labels int64 (B,) on the loader's device.

    `samples` int64 (B,), on the host, are the numbers of the images in the index.
    """

    images: torch.Tensor
    labels: torch.Tensor
    step: int
    number: int
    samples: np.ndarray
    token_labels: TokenLabels | None = None


@dataclass(frozen=True, eq=False)
class Encoded(Generic[Arrays]):
    """A batch before it is decoded; placement and warp are those of `TokenLabels`."""

    job: MicroBatch
    samples: np.ndarray
    room: reader.Room
    arrays: Arrays
    placement: np.ndarray | None = None
    warp: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class _Decoded:
    """A batch whose `images` are complete as soon as `parts` are done."""

    batch: Encoded[Any]
    images: torch.Tensor
    parts: list[Future[None]]


class Preparation(Protocol[Arrays]):
    """The loader's part: how sample numbers become float images."""

    def encode(self, job: MicroBatch) -> Encoded[Arrays]:
        """Compute the arrays and reserve memory for the bytes, in a reading thread."""

    def decode(self, jpegs: Any, *args: Any, **arrays: Any) -> Any:
        """Build the graph inside DALI: from the bytes and the named arrays to images."""

    def finish(self, image: np.ndarray, out: np.ndarray, arrays: Arrays, k: int) -> None:
        """On a CPU, in a thread: turn the graph's output (H, W, 3) uint8 for sample k into `out` (3, S, S) float32."""

    def augment(self, images: torch.Tensor, batch: Encoded[Arrays]) -> torch.Tensor:
        """Apply the last operations to a finished batch, on its device."""


class Stream(Iterator[Batch]):
    """Runs one DALI pipeline over `jobs`.

    `graph_inputs` names the arrays that the graph takes beside the bytes. With `finishes` the graph gives decoded
    images, for `preparation.finish` in threads; else whole batches, for `preparation.augment`.
    """

    def __init__(
        self,
        index: Index,
        jobs: Iterator[MicroBatch],
        preparation: Preparation[Any],
        *,
        graph_inputs: Sequence[str],
        finishes: bool,
        img_size: int,
        max_batch_size: int,
        device: torch.device,
        num_threads: int,
        preadv: Callable[[int, list, int], int] = os.preadv,
        with_maps: bool = False,
    ) -> None:
        self._index, self._preparation, self._device = index, preparation, device
        self._graph_inputs = tuple(graph_inputs)
        self._compares_sizes = finishes
        self._inside: collections.deque[Encoded[Any]] = collections.deque()  # the batches in DALI, oldest first
        self._decoded: collections.deque[_Decoded] = collections.deque()
        self._end: Exception | None = None  # the reason why DALI gives no more batches
        # Batches whose bytes the device may still copy, and a function that tells if it has gone past them.
        self._used: collections.deque[tuple[Encoded[Any], Callable[[], bool]]] = collections.deque()
        self._pipe: Pipeline | None = self._build_pipeline(max_batch_size, num_threads)
        self._new_finishers = partial(_Finishers, preparation.finish, img_size, num_threads) if finishes else None
        far = not index.class_names and any(map(remote.address_of, index.files))
        self._read_ahead = partial(
            _ReadAhead,
            encode=preparation.encode,
            read=reader.Reader(index, preadv, with_maps=with_maps).read,
            num_batches=max(2, math.ceil((FAR_AHEAD if far else READ_AHEAD) / max_batch_size)),
            first=max(2, math.ceil(READ_FIRST / max_batch_size)),
            num_threads=remote.READERS if far else READ_THREADS,
            images=FAR_IMAGES if far else READ_IMAGES,
        )
        self._start_threads(jobs)

    def _start_threads(self, jobs: Iterator[MicroBatch]) -> None:
        self._finishers = self._new_finishers() if self._new_finishers else None
        self._ahead = self._read_ahead(jobs)

    def _build_pipeline(self, max_batch_size: int, num_threads: int) -> Pipeline:
        from nvidia.dali import Pipeline, fn  # here, so that batches have a type where there is no DALI

        device_id = None  # DALI then touches no GPU
        if self._device.type == "cuda":
            device_id = torch.cuda.current_device() if self._device.index is None else self._device.index
        pipe = Pipeline(
            batch_size=max_batch_size,
            num_threads=num_threads,
            device_id=device_id,
            prefetch_queue_depth=PREFETCH,
            exec_dynamic=True,  # outputs belong to us; the other executors overwrite them
        )
        with pipe:
            num_outputs = 1 + len(self._graph_inputs)
            jpegs, *arrays = fn.external_source(self._take, num_outputs=num_outputs, batch=True, no_copy=True)
            pipe.set_outputs(self._preparation.decode(jpegs, **dict(zip(self._graph_inputs, arrays))))
        pipe.build()
        return pipe

    def _take(self) -> tuple:
        """Give DALI the bytes and arrays of the next batch. Raises the error of a reading thread.

        DALI 2.4 crashes on CPUs if a window lies outside its image, so sizes are compared before.
        """
        batch = next(self._ahead)
        if self._compares_sizes:
            for sample, data in zip(batch.samples.tolist(), batch.room.images):
                if error := _of_another_size(self._index, sample, data):
                    raise error
        self._inside.append(batch)  # because of no_copy, the bytes must live until DALI has used them
        return (batch.room.images, *(getattr(batch.arrays, name) for name in self._graph_inputs))

    def __next__(self) -> Batch:
        if self._pipe is None:
            raise StopIteration
        try:
            behind = 1 if self._finishers else 0  # threads finish this batch while DALI decodes the next
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
        return labelled(done.batch, done.images, self._index, self._device)

    def _advance(self, pipe: Pipeline) -> None:
        """Take the next batch from DALI and have it finished, or remember why there is none."""
        try:
            stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
            (images,) = pipe.run(stream)
        except RuntimeError as error:
            self._end = _explain(error, self._inside, self._index)
            self._end.__cause__ = error
        except Exception as error:  # StopIteration at the end, or an error of a reading thread
            self._end = error
        else:
            batch = self._inside.popleft()
            while self._used and self._used[0][1]():
                self._used.popleft()
            self._used.append((batch, reached(stream)))
            finish = self._finishers.start if self._finishers else self._finish_whole
            self._decoded.append(finish(batch, images))

    def _finish_whole(self, batch: Encoded[Any], images: Any) -> _Decoded:
        tensor = torch.from_dlpack(images.as_tensor())
        return _Decoded(batch, self._preparation.augment(tensor, batch), [])

    def pause(self) -> None:
        """End the threads and keep the pipeline, after the batches of all jobs have been taken."""
        assert self._pipe is not None and not self._inside and not self._decoded
        while self._end is None:  # DALI, too, must have seen that there are no more
            self._advance(self._pipe)
        self._end_threads()

    def resume(self, jobs: Iterator[MicroBatch]) -> None:
        assert self._pipe is not None
        self._pipe.reset()
        self._end = None
        self._start_threads(jobs)

    def _end_threads(self) -> None:
        self._ahead.close()
        if self._finishers:
            self._finishers.close()

    def close(self) -> None:
        """End the threads and free the pipeline; safe to call twice."""
        self._end_threads()
        self._decoded.clear()
        self._pipe = None
        self._inside.clear()
        self._used.clear()


def reached(stream: torch.cuda.Stream | None) -> Callable[[], bool]:
    """Return a function that tells if a GPU's stream, which may be far behind the host, has come to this point."""
    if stream is None:
        return lambda: True
    return stream.record_event().query


def labelled(encoded: Encoded[Any], images: torch.Tensor, index: Index, device: torch.device) -> Batch:
    """Return a batch of finished images; labels and label maps reach the device in one copy."""
    arrays = [index.label[encoded.samples]]
    if encoded.placement is not None:
        maps = decode_maps(encoded.room.maps, index.map_shape[0].tolist())
        arrays += [*maps, encoded.placement] + ([] if encoded.warp is None else [encoded.warp])
    labels, *teachers = to_device(*map(torch.from_numpy, arrays), device=device)
    token_labels = TokenLabels(*teachers) if teachers else None
    return Batch(images, labels, encoded.job.step, encoded.job.number, encoded.samples, token_labels)


class _ReadAhead(Iterator[Encoded[Any]]):
    """The batches of `jobs` with their bytes, in order; threads read `num_batches` of them ahead.

    They begin with `first`; each batch that is taken makes room for two more.
    """

    def __init__(
        self,
        jobs: Iterator[MicroBatch],
        encode: Callable[[MicroBatch], Encoded[Any]],
        read: Callable[[np.ndarray, list[np.ndarray]], None],
        *,
        num_batches: int,
        first: int,
        num_threads: int = READ_THREADS,
        images: int = READ_IMAGES,
    ) -> None:
        self._jobs, self._encode, self._read, self._images = jobs, encode, read, images
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="largebatch-read")
        self._waiting: collections.deque[Future[tuple[Encoded[Any], list[Future[None]]]]] = collections.deque()
        self._num_batches = num_batches
        for _ in range(first):
            self._submit()

    def _submit(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._waiting.append(self._threads.submit(self._start, job))

    def _start(self, job: MicroBatch) -> tuple[Encoded[Any], list[Future[None]]]:
        """Encode a batch and submit the tasks that read its bytes. No thread waits for another one here."""
        batch = self._encode(job)
        parts = [slice(at, at + self._images) for at in range(0, len(batch.samples), self._images)]
        read, submit = self._read, self._threads.submit
        return batch, [submit(read, batch.samples[part], batch.room.spans[part]) for part in parts]

    def __next__(self) -> Encoded[Any]:
        if not self._waiting:
            raise StopIteration
        batch, parts = self._waiting.popleft().result()
        for part in parts:
            part.result()
        for _ in range(min(2, self._num_batches - len(self._waiting))):
            self._submit()
        return batch

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()


class _Finishers:
    """Threads that turn decoded images into float tensors of `img_size` x `img_size` pixels."""

    def __init__(self, finish: Callable[[np.ndarray, np.ndarray, Any, int], None], img_size: int, num_threads: int):
        self._finish, self._img_size, self._memory = finish, img_size, reader.Memory()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="largebatch-resize")

    def start(self, batch: Encoded[Any], images: Any) -> _Decoded:
        count, side = len(batch.samples), self._img_size
        out = torch.from_numpy(self._memory.take(4 * 3 * count * side * side)).view(torch.float32)
        out = out.view(count, 3, side, side)
        floats = out.numpy()

        def finish(part: range) -> None:
            for k in part:
                self._finish(np.asarray(images[k]), floats[k], batch.arrays, k)

        parts = [range(count)[at : at + FINISH_IMAGES] for at in range(0, count, FINISH_IMAGES)]
        return _Decoded(batch, out, [self._threads.submit(finish, part) for part in parts])

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def _of_another_size(index: Index, sample: int, data: np.ndarray) -> Damaged | None:
    """Return an error if the header of an encoded image has another size than the index; None also without a header."""
    size, known = size_or_zero(io.BytesIO(data.data)), (int(index.width[sample]), int(index.height[sample]))
    if size in (known, (0, 0)):
        return None
    return Damaged(
        f"{index.where(sample)} has {size[0]} x {size[1]} pixels, and {known[0]} x {known[1]} in the index: delete the "
        f"file of these images in {cache_folder() / 'index'}, it is built again."
    )


def _explain(error: RuntimeError, batches: Iterable[Encoded[Any]], index: Index) -> Exception:
    """Return an error with the first image that cannot be decoded, or has another size than its index says."""
    for batch in batches:
        for sample, data in zip(batch.samples.tolist(), batch.room.images):
            if fault := image_fault(data.tobytes):
                folder = Path(index.folder)
                whole = folder.parent if any(folder.name in names for names in SPLITS.values()) else folder
                return Damaged(f"{index.where(sample)} cannot be decoded ({fault}); {remedy(whole)}.")
            if other := _of_another_size(index, sample, data):
                return other
    if any(words in str(error) for words in OUT_OF_MEMORY):
        return MemoryError(str(error))  # a validation then tries smaller batches
    first = next((batch.job for batch in batches), None)
    why = f"The pipeline failed at {first}, although each of its images can be decoded"
    return ValueError(f"{why}: {COLOURS.sub('', str(error))}")
