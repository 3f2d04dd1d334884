"""DALI pipelines: encoded bytes in, normalised tensors out. DALI decodes, `order` decides.

DALI's own readers shuffle in a small buffer and keep an opaque position, so they are not used. The order,
crop window and flip of every sample come from `order`, the place of its bytes from the `Index`, and both
enter DALI through `external_source`. DALI calls that source in the thread that runs the pipeline, so the
source itself must never read: a few threads read whole batches ahead, and the source takes the next finished
one.

An error in a reading thread is raised where the batch is taken, one in DALI is traced to its file and record
by decoding the batch again with PIL; in both cases the consumer gets a ValueError, and nothing waits for
ever.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvidia.dali import Pipeline, fn, types
from PIL import Image

from largebatch.data import order
from largebatch.data.index import Index
from largebatch.data.order import MicroBatch, Plan

READ_THREADS = 4  # threads that read files
READ_AHEAD = 4  # batches being read or waiting for DALI
PREFETCH = 2  # batches inside DALI
INTERPOLATIONS = {
    "bilinear": types.DALIInterpType.INTERP_LINEAR,
    "bicubic": types.DALIInterpType.INTERP_CUBIC,
    "lanczos": types.DALIInterpType.INTERP_LANCZOS3,
}


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch: images float32 (B, 3, H, W) normalised and labels int64 (B,) on the loader's device.

    `samples` int64 (B,) are the numbers of the images in the index (on the host).
    """

    images: torch.Tensor
    labels: torch.Tensor
    step: int
    number: int
    samples: np.ndarray


@dataclass(frozen=True, eq=False)
class _Encoded:
    """A batch before decoding: arguments are per-sample arrays for the operators of the pipeline."""

    job: MicroBatch
    samples: np.ndarray
    encoded: list[np.ndarray]  # uint8 views of one buffer
    arguments: tuple[np.ndarray, ...]


class TrainLoader(Iterator[Batch]):
    """The micro-batches of shard `shard` of `num_shards`, from step `start_step` to the end of the plan.

    Order: that of `plan.micro_batches(step, shard, num_shards)`, step by step. Each image is cut to its
    random window while it is decoded, resized to `img_size` square with antialiasing, maybe flipped, then
    normalised with `mean` and `std` (of RGB in [0, 1]). `scale`, `ratio`, `hflip` are those of a random
    resized crop. `num_threads` decode.
    """

    def __init__(
        self,
        index: Index,
        plan: Plan,
        *,
        shard: int,
        num_shards: int,
        img_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        interpolation: str,
        scale: tuple[float, float],
        ratio: tuple[float, float],
        hflip: float,
        device: torch.device,
        num_threads: int,
        start_step: int = 0,
    ) -> None:
        if plan.num_samples != len(index):
            raise ValueError(f"The plan is for {plan.num_samples} samples, the index has {len(index)}.")
        reader, resize = _Reader(index), _resize(interpolation)

        def encode(job: MicroBatch) -> _Encoded:
            epochs, samples = plan.samples(job.start, job.stop)
            width, height = index.width[samples], index.height[samples]
            draws = order.draw(
                plan.seed, epochs, samples, width=width, height=height, scale=scale, ratio=ratio, hflip=hflip
            )
            corners = np.stack([draws.x, draws.y], axis=-1)
            sizes = np.stack([draws.width, draws.height], axis=-1)
            return _Encoded(job, samples, reader.read(samples), (corners, sizes, draws.flip.astype(np.int32)))

        def decode(jpegs: Any, corners: Any, sizes: Any, flips: Any) -> Any:  # nodes of DALI's graph
            pixels: dict[str, Any] = {"normalized_anchor": False, "normalized_shape": False}
            images = fn.decoders.image_slice(
                jpegs, corners, sizes, axis_names="WH", **pixels, **_decoder(device)
            )
            images = fn.resize(images, size=(img_size, img_size), **resize)
            return _normalise(images, mean, std, mirror=flips)

        steps = range(start_step, plan.num_steps)
        jobs = (job for step in steps for job in plan.micro_batches(step, shard, num_shards))
        self._stream = _Stream(
            index,
            jobs,
            encode=encode,
            decode=decode,
            num_arguments=3,
            max_batch_size=plan.micro_batch_size,
            device=device,
            num_threads=num_threads,
        )

    def __next__(self) -> Batch:
        return next(self._stream)

    def close(self) -> None:
        """Ends the threads and frees the pipeline; safe to call twice."""
        self._stream.close()


class EvalLoader:
    """Every sample once over all shards, in the order of the index; may be iterated again and again.

    Shard r of R takes the batches r, r + R, ... of `batch_size` consecutive samples; their numbers are in
    `Batch.number`, and `Batch.step` is 0. The geometry is that of timm's evaluation transform
    (`order.centre_geometry`). `len(loader)` is the number of batches of this shard; shards may differ by one.
    """

    def __init__(
        self,
        index: Index,
        *,
        shard: int,
        num_shards: int,
        batch_size: int,
        img_size: int,
        crop_pct: float,
        interpolation: str,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
        num_threads: int,
    ) -> None:
        plan = Plan(len(index), len(index), min(batch_size, len(index)), len(index), seed=0)
        self._jobs = plan.micro_batches(0, shard, num_shards)
        reader, resize = _Reader(index), _resize(interpolation)

        def encode(job: MicroBatch) -> _Encoded:
            samples = np.arange(job.start, job.stop, dtype=np.int64)
            sizes, corners = order.centre_geometry(
                index.width[samples], index.height[samples], img_size=img_size, crop_pct=crop_pct
            )
            arguments = (sizes.astype(np.float32), corners.astype(np.int32))
            return _Encoded(job, samples, reader.read(samples), arguments)

        def decode(jpegs: Any, sizes: Any, corners: Any) -> Any:
            images: Any = fn.decoders.image(jpegs, **_decoder(device))
            images = fn.resize(images, size=sizes, **resize)
            outside: dict[str, Any] = {"out_of_bounds_policy": "pad", "fill_values": 0}
            images = fn.slice(images, start=corners, shape=(img_size, img_size), axis_names="WH", **outside)
            return _normalise(images, mean, std)

        self._stream = functools.partial(
            _Stream,
            index,
            encode=encode,
            decode=decode,
            num_arguments=2,
            max_batch_size=plan.micro_batch_size,
            device=device,
            num_threads=num_threads,
        )

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Batch]:
        if not self._jobs:
            return
        stream = self._stream(iter(self._jobs))
        with contextlib.closing(stream):  # also when the consumer stops early
            yield from stream


# -- the graph -----------------------------------------------------------------------------------------------


def _decoder(device: torch.device) -> dict[str, Any]:
    # An EXIF orientation is ignored, as timm does, and as the sizes in the index assume.
    return {
        "device": "mixed" if device.type == "cuda" else "cpu",
        "output_type": types.DALIImageType.RGB,
        "adjust_orientation": False,
        "jpeg_fancy_upsampling": True,  # as libjpeg does by default, so as PIL
    }


def _resize(interpolation: str) -> dict[str, Any]:
    if interpolation not in INTERPOLATIONS:
        raise ValueError(f"interpolation is {interpolation!r}, expected one of {', '.join(INTERPOLATIONS)}.")
    return {"interp_type": INTERPOLATIONS[interpolation], "antialias": True}


def _normalise(images: Any, mean: tuple[float, ...], std: tuple[float, ...], *, mirror: Any = 0) -> Any:
    return fn.crop_mirror_normalize(
        images,
        dtype=types.DALIDataType.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in mean],
        std=[255 * value for value in std],
        mirror=mirror,
    )


# -- reading -------------------------------------------------------------------------------------------------


class _File:
    """A descriptor that closes when its last user lets go: a thread may still read what the cache dropped."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class _Reader:
    """Reads the encoded bytes of samples; used by several threads at once."""

    def __init__(self, index: Index) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        kept = min(len(index.files), 4096, limit // 4)  # a global shuffle visits all shards all the time
        self._index = index
        self._open = functools.lru_cache(maxsize=kept)(_File)

    def read(self, samples: np.ndarray) -> list[np.ndarray]:
        """One uint8 view per sample, all of one new buffer."""
        stops = np.cumsum(self._index.length[samples])
        buffer = np.empty(int(stops[-1]), dtype=np.uint8)
        views = np.split(buffer, stops[:-1])
        for sample, view in zip(samples.tolist(), views):
            try:
                self._fill(view, self._open(self._index.files[self._index.file[sample]]), sample)
            except OSError as error:
                raise ValueError(f"{self._index.where(sample)} cannot be read: {error}") from error
        return views

    def _fill(self, view: np.ndarray, file: _File, sample: int) -> None:
        offset, done = int(self._index.offset[sample]), 0
        while done < len(view):
            count = os.preadv(file.fd, [view[done:].data], offset + done)
            if not count:
                where = self._index.where(sample)
                raise ValueError(f"{where} is cut off: the file has changed since it was indexed.")
            done += count


class _Stream(Iterator[Batch]):
    """Runs one pipeline over `jobs`: `encode` in the reading threads, `decode` as the graph inside DALI."""

    def __init__(
        self,
        index: Index,
        jobs: Iterator[MicroBatch],
        *,
        encode: Callable[[MicroBatch], _Encoded],
        decode: Callable,
        num_arguments: int,
        max_batch_size: int,
        device: torch.device,
        num_threads: int,
    ) -> None:
        self._index, self._jobs, self._encode, self._device = index, jobs, encode, device
        self._waiting: collections.deque[Future[_Encoded]] = collections.deque()
        self._inside: collections.deque[_Encoded] = collections.deque()  # what DALI holds, oldest first
        # On a GPU the copies of a batch may still be running when its images are handed out.
        self._used: collections.deque[_Encoded] = collections.deque(maxlen=PREFETCH)
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
            self._pipe.set_outputs(decode(*inputs))
        self._pipe.build()
        self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="largebatch-read")
        for _ in range(READ_AHEAD):
            self._submit()

    def _submit(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._waiting.append(self._pool.submit(self._encode, job))

    def _take(self) -> tuple:
        """DALI's source: the next finished batch. Raises what went wrong while it was read."""
        if not self._waiting:
            raise StopIteration
        batch = self._waiting.popleft().result()
        self._submit()
        self._inside.append(batch)  # no_copy: the bytes must live until DALI has used them
        return (batch.encoded, *batch.arguments)

    def __next__(self) -> Batch:
        if self._pipe is None:
            raise StopIteration
        try:
            stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
            (images,) = self._pipe.run(stream)
        except StopIteration:
            self.close()
            raise
        except RuntimeError as error:
            message = self._explain(error)
            self.close()
            raise ValueError(message) from error
        except BaseException:
            self.close()
            raise
        done = self._inside.popleft()
        self._used.append(done)
        labels = torch.from_numpy(self._index.label[done.samples]).to(self._device, non_blocking=True)
        tensor = torch.from_dlpack(images.as_tensor())
        return Batch(tensor, labels, done.job.step, done.job.number, done.samples)

    def _explain(self, error: RuntimeError) -> str:
        """Names the first image that PIL cannot decode in the batches that DALI was working on."""
        for batch in self._inside:
            for sample, data in zip(batch.samples.tolist(), batch.encoded):
                try:
                    Image.open(io.BytesIO(data.tobytes())).load()
                except Exception as reason:
                    return f"{self._index.where(sample)} cannot be decoded: {reason}"
        first = self._inside[0].job if self._inside else None
        return f"The pipeline failed at {first}, although PIL can decode its images: {error}"

    def close(self) -> None:
        """Ends the threads and frees the pipeline; safe to call twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
        self._pipe = None
        self._inside.clear()
        self._used.clear()
