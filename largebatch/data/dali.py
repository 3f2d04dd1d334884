"""DALI pipelines: encoded bytes in, normalised tensors out. DALI decodes, `order` decides.

DALI's own readers shuffle in a small buffer and keep an opaque position, so they are not used. The order,
crop window and flip of every sample come from `order`, the place of its bytes from the `Index`, and both
enter DALI through `external_source`. DALI calls that source in the thread that runs the pipeline, so the
source itself must never read: many threads read ahead, several at one batch so that a slow file system is waited
for by all at once, and the source takes the next finished batch.

On a GPU, DALI also resizes and normalises. On a CPU its resize takes twice as long as its decoder, and six times
as long as torch's kernel for bytes, which is closer to PIL too. There DALI only decodes, and `num_threads`
threads of ours finish the images one batch behind it. RandAugment's operations, which `randaugment` draws, are
theirs too, with Pillow; on a GPU they are torch's, on batches of bytes that DALI leaves to be normalised after them.

An error in a reading thread is raised where the batch is taken, one in DALI is traced to its file and record
by decoding the batch again with PIL; in both cases the consumer gets a ValueError, and nothing waits for
ever.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvidia.dali import Pipeline, fn, types
from PIL import Image

from largebatch.data import order, pixels, randaugment, reader, token_labels
from largebatch.data.index import Index
from largebatch.data.label_maps import decode_maps
from largebatch.data.operations import fill_colour, with_pillow, with_torch
from largebatch.data.order import MicroBatch, Plan
from largebatch.data.randaugment import Operations, Policy
from largebatch.data.token_labels import Axes, TokenLabels

READ_THREADS = 32  # threads that read files, most of them asleep
READ_IMAGES = 4  # images that a thread reads in one go
READ_AHEAD = 256  # images being read or waiting for DALI; but at least two batches
PREFETCH = 2  # batches inside DALI
FINISH_IMAGES = 8  # images that a thread finishes in one go
INTERPOLATIONS = {
    "bilinear": types.DALIInterpType.INTERP_LINEAR,
    "bicubic": types.DALIInterpType.INTERP_CUBIC,
    "lanczos": types.DALIInterpType.INTERP_LANCZOS3,
}
FILTERS = {kind.value: name for name, kind in INTERPOLATIONS.items()}


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
class _Encoded:
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

    batch: _Encoded
    images: torch.Tensor
    parts: list[Future[None]]


class TrainLoader(Iterator[Batch]):
    """The micro-batches of shard `shard` of `num_shards`, from step `start_step` to the end of the plan.

    Order: that of `plan.micro_batches(step, shard, num_shards)`, step by step. Each image is cut to its
    random window while it is decoded, resized to `img_size` square with antialiasing, maybe flipped, put through
    what it draws from `policy`, then normalised with `mean` and `std` (of RGB in [0, 1]). `scale`, `ratio`, `hflip`
    are those of a random resized crop; with `padding`, a window of the image's own size is moved by up to so many
    pixels instead. `interpolation` may be random: bilinear or bicubic, drawn for each sample. `num_threads`
    decode, and on a CPU as many more resize. `preadv` reads, as os.preadv does.
    With `token_label_axes` (see `token_labels.place`) label maps are read, too, which all images must have.
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
        padding: int | None = None,
        policy: Policy | None = None,
        token_label_axes: Axes | None = None,
        start_step: int = 0,
        preadv: Callable[[int, list, int], int] = os.preadv,
    ) -> None:
        if plan.num_samples != len(index):
            raise ValueError(f"The plan is for {plan.num_samples} samples, the index has {len(index)}.")
        on_cpu, memory = _finishes_on_cpu(device), reader.Memory()
        to_floats, fill = pixels.Normalise(mean, std), fill_colour(mean)
        crops: Callable[..., order.Draws] = functools.partial(order.draw, scale=scale, ratio=ratio, hflip=hflip)
        if padding is not None:
            crops = functools.partial(order.draw_padded, padding=padding, hflip=hflip)
        filters_of = _filters(interpolation)

        def encode(job: MicroBatch) -> _Encoded:
            epochs, samples = plan.samples(job.start, job.stop)
            draws = crops(plan.seed, epochs, samples, width=index.width[samples], height=index.height[samples])
            operations = randaugment.draw(policy, plan.seed, epochs, samples)
            corners = np.stack([draws.x, draws.y], axis=-1)
            sizes = np.stack([draws.width, draws.height], axis=-1)
            filters, flips = filters_of(plan.seed, epochs, samples), draws.flip.astype(np.int32)
            arguments = (corners, sizes, filters, flips, operations.codes, operations.arguments, operations.affine)
            room = reader.room(index, samples, memory, with_maps=token_label_axes is not None)
            if token_label_axes is None:
                return _Encoded(job, samples, room, arguments)
            warp = token_labels.warps(operations.affine) if policy else None
            placement = token_labels.place(
                draws, width=index.width[samples], height=index.height[samples], axes=token_label_axes, warp=warp
            )
            return _Encoded(job, samples, room, arguments, placement, warp)

        def decode(jpegs: Any, corners: Any = None, sizes: Any = None, filters: Any = None, flips: Any = None) -> Any:
            images = _window(jpegs, corners, sizes, device) if padding is None else _decode(jpegs, device)
            if on_cpu:
                return images
            if padding is not None:
                images = _slice(images, corners, sizes)
            by_sample = fn.cast(filters, dtype=types.DALIDataType.INTERP_TYPE)
            images = fn.resize(images, size=(img_size, img_size), interp_type=by_sample, antialias=True)
            return _bytes(images, mirror=flips) if policy else _normalise(images, mean, std, mirror=flips)

        def augment(images: torch.Tensor, batch: _Encoded) -> torch.Tensor:
            return to_floats.batch(with_torch(images, fill, Operations(*batch.arguments[-3:])))

        def finish(
            image: np.ndarray, out: np.ndarray, corner: Any, size: Any, number: int, flip: int, *drawn: np.ndarray
        ) -> None:
            if padding is not None:
                image = pixels.window(image, *corner.tolist(), *size.tolist())
            resized = pixels.resize(image, (img_size, img_size), FILTERS[number])
            to_floats(with_pillow(resized[:, ::-1] if flip else resized, fill, *drawn), out)

        steps = range(start_step, plan.num_steps)
        jobs = (job for step in steps for job in plan.micro_batches(step, shard, num_shards))
        self._stream = _Stream(
            index,
            jobs,
            encode=encode,
            decode=decode,
            num_arguments=4 if not on_cpu else 2 if padding is None else 0,
            finish=finish if on_cpu else None,
            augment=augment if policy else None,
            img_size=img_size,
            with_maps=token_label_axes is not None,
            preadv=preadv,
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
        on_cpu, resize = _finishes_on_cpu(device), _resize(interpolation)
        to_floats, memory = pixels.Normalise(mean, std), reader.Memory()

        def encode(job: MicroBatch) -> _Encoded:
            samples = np.arange(job.start, job.stop, dtype=np.int64)
            sizes, corners = order.centre_geometry(
                index.width[samples], index.height[samples], img_size=img_size, crop_pct=crop_pct
            )
            arguments = (sizes.astype(np.float32), corners.astype(np.int32))
            return _Encoded(job, samples, reader.room(index, samples, memory), arguments)

        def decode(jpegs: Any, sizes: Any = None, corners: Any = None) -> Any:
            images = _decode(jpegs, device)
            if on_cpu:
                return images
            images = _slice(fn.resize(images, size=sizes, **resize), corners, (img_size, img_size))
            return _normalise(images, mean, std)

        def finish(image: np.ndarray, out: np.ndarray, size: np.ndarray, corner: np.ndarray) -> None:
            resized = pixels.resize(image, (int(size[0]), int(size[1])), interpolation)
            x, y = corner.tolist()
            to_floats(pixels.window(resized, x, y, img_size, img_size), out)

        self._stream = functools.partial(
            _Stream,
            index,
            encode=encode,
            decode=decode,
            num_arguments=0 if on_cpu else 2,
            finish=finish if on_cpu else None,
            augment=None,
            img_size=img_size,
            with_maps=False,
            preadv=os.preadv,
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


def _finishes_on_cpu(device: torch.device) -> bool:
    """Whether threads of ours make the images out of what DALI has decoded (`pixels`), or the graph does."""
    return device.type == "cpu"


def _decode(jpegs: Any, device: torch.device) -> Any:
    return fn.decoders.image(jpegs, **_decoder(device))


def _window(jpegs: Any, corners: Any, sizes: Any, device: torch.device) -> Any:
    """The window of an image that it is decoded for; inside of it."""
    in_pixels: dict[str, Any] = {"normalized_anchor": False, "normalized_shape": False}
    return fn.decoders.image_slice(jpegs, corners, sizes, axis_names="WH", **in_pixels, **_decoder(device))


def _decoder(device: torch.device) -> dict[str, Any]:
    # An EXIF orientation is ignored, as timm does, and as the sizes in the index assume.
    return {
        "device": "mixed" if device.type == "cuda" else "cpu",
        "output_type": types.DALIImageType.RGB,
        "adjust_orientation": False,
        "jpeg_fancy_upsampling": True,  # as libjpeg does by default, so as PIL
    }


def _slice(images: Any, corners: Any, sizes: Any) -> Any:
    """A window that may reach out of the image, where it is black."""
    outside: dict[str, Any] = {"out_of_bounds_policy": "pad", "fill_values": 0}
    return fn.slice(images, start=corners, shape=sizes, axis_names="WH", **outside)


def _filters(interpolation: str) -> Callable[[int, np.ndarray, np.ndarray], np.ndarray]:
    """What gives DALI's number of the filter of each (seed, epoch, sample)."""
    if interpolation == "random":
        either = np.array([INTERPOLATIONS[name].value for name in ("bilinear", "bicubic")], dtype=np.int32)
        return lambda *place: either[order.draw_bicubic(*place).astype(np.int32)]
    number = _resize(interpolation)["interp_type"].value
    return lambda _, epochs, samples: np.full(len(samples), number, dtype=np.int32)


def _resize(interpolation: str) -> dict[str, Any]:
    if interpolation not in INTERPOLATIONS:
        raise ValueError(f"interpolation is {interpolation!r}, expected one of {', '.join(INTERPOLATIONS)}.")
    return {"interp_type": INTERPOLATIONS[interpolation], "antialias": True}


def _bytes(images: Any, *, mirror: Any) -> Any:
    return fn.crop_mirror_normalize(images, dtype=types.DALIDataType.UINT8, output_layout="CHW", mirror=mirror)


def _normalise(images: Any, mean: tuple[float, ...], std: tuple[float, ...], *, mirror: Any = 0) -> Any:
    return fn.crop_mirror_normalize(
        images,
        dtype=types.DALIDataType.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in mean],
        std=[255 * value for value in std],
        mirror=mirror,
    )


# -- the stream -------------------------------------------------------------------------------------------------

Finish = Callable[..., None]  # of (image (H, W, 3) uint8, out (3, S, S) float32, *arguments of the sample)


class _Stream(Iterator[Batch]):
    """Runs one pipeline over `jobs`: `encode` in the reading threads, `decode` as the graph inside DALI.

    `encode` leaves room for the bytes, which other reading threads fill. The graph takes the bytes and the first
    `num_arguments` of the arguments. From what it gave, `finish`, if given, makes a sample of the batch, or else
    `augment`, if given, the batch on its device.
    """

    def __init__(
        self,
        index: Index,
        jobs: Iterator[MicroBatch],
        *,
        encode: Callable[[MicroBatch], _Encoded],
        decode: Callable,
        num_arguments: int,
        finish: Finish | None,
        augment: Callable[[torch.Tensor, _Encoded], torch.Tensor] | None,
        img_size: int,
        with_maps: bool,
        preadv: Callable[[int, list, int], int],
        max_batch_size: int,
        device: torch.device,
        num_threads: int,
    ) -> None:
        self._index, self._jobs, self._encode, self._device = index, jobs, encode, device
        self._num_arguments, self._finish, self._augment, self._img_size = num_arguments, finish, augment, img_size
        self._reader, self._floats = reader.Reader(index, preadv, with_maps=with_maps), reader.Memory()
        self._waiting: collections.deque[Future[tuple[_Encoded, list[Future[None]]]]] = collections.deque()
        self._inside: collections.deque[_Encoded] = collections.deque()  # what DALI holds, oldest first
        self._decoded: collections.deque[_Decoded] = collections.deque()
        self._end: Exception | None = None  # why DALI gives no more
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
        self._finishers = ThreadPoolExecutor(num_threads, thread_name_prefix="largebatch-resize")
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="largebatch-read")
        for _ in range(max(2, math.ceil(READ_AHEAD / max_batch_size))):
            self._submit()

    def _submit(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._waiting.append(self._readers.submit(self._start_reading, job))

    def _start_reading(self, job: MicroBatch) -> tuple[_Encoded, list[Future[None]]]:
        """The batch, and what fills its buffer: tasks of other threads, for which none of these threads waits."""
        batch = self._encode(job)
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
            behind = 1 if self._finish else 0  # while DALI decodes the next batch, this one is finished
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

    def _token_labels(self, batch: _Encoded) -> TokenLabels | None:
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
            self._decoded.append(self._finished(batch, images) if self._finish else self._whole(batch, images))

    def _finished(self, batch: _Encoded, images: Any) -> _Decoded:
        count, side = len(batch.samples), self._img_size
        out = torch.from_numpy(self._floats.take(4 * 3 * count * side * side)).view(torch.float32)
        out = out.view(count, 3, side, side)
        floats = out.numpy()

        def finish(part: range) -> None:
            assert self._finish is not None
            for k in part:
                self._finish(np.asarray(images[k]), floats[k], *(argument[k] for argument in batch.arguments))

        parts = [range(count)[at : at + FINISH_IMAGES] for at in range(0, count, FINISH_IMAGES)]
        return _Decoded(batch, out, [self._finishers.submit(finish, part) for part in parts])

    def _whole(self, batch: _Encoded, images: Any) -> _Decoded:
        tensor = torch.from_dlpack(images.as_tensor())
        return _Decoded(batch, self._augment(tensor, batch) if self._augment else tensor, [])

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
