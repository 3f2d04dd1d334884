"""The loaders: numbers of samples in, normalised tensors out. DALI decodes, `order` decides.

The order, crop window and flip of every sample come from `order`, the place of its bytes from the `Index`. What is done
to an image is told to a `Stream`, which runs it.

On a GPU, DALI also resizes and normalises. On a CPU its resize takes twice as long as its decoder, and six times
as long as torch's kernel for bytes, which is closer to PIL too. There DALI only decodes, and `num_threads`
threads of ours finish the images. RandAugment's operations, which `randaugment` draws, are
theirs too, with Pillow; on a GPU they are torch's, on batches of bytes that DALI leaves to be normalised after them.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, types

from largebatch.data import order, pixels, randaugment, reader, token_labels
from largebatch.data.index import Index
from largebatch.data.order import MicroBatch, Plan
from largebatch.data.randaugment import Operations, Policy
from largebatch.data.randaugment_ops import fill_colour, with_pillow, with_torch
from largebatch.data.stream import Batch, Encoded, Stream
from largebatch.data.token_labels import Axes

INTERPOLATIONS = {
    "bilinear": types.DALIInterpType.INTERP_LINEAR,
    "bicubic": types.DALIInterpType.INTERP_CUBIC,
    "lanczos": types.DALIInterpType.INTERP_LANCZOS3,
}
FILTERS = {kind.value: name for name, kind in INTERPOLATIONS.items()}


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
        self._index, self._plan, self._device, self._size = index, plan, device, (img_size, img_size)
        self._padding, self._policy, self._axes, self._memory = padding, policy, token_label_axes, reader.Memory()
        self._to_floats, self._fill = pixels.Normalise(mean, std), fill_colour(mean)
        self._normalise = functools.partial(_normalise, mean=mean, std=std)
        self._filters_of, self._on_cpu = _filters(interpolation), _finishes_on_cpu(device)
        self._crops: Callable[..., order.Draws]
        if padding is None:
            self._crops = functools.partial(order.draw, scale=scale, ratio=ratio, hflip=hflip)
        else:
            self._crops = functools.partial(order.draw_padded, padding=padding, hflip=hflip)
        steps = range(start_step, plan.num_steps)
        self._stream = Stream(
            index,
            (job for step in steps for job in plan.micro_batches(step, shard, num_shards)),
            self,
            num_arguments=4 if not self._on_cpu else 2 if padding is None else 0,
            finishes=self._on_cpu,
            img_size=img_size,
            max_batch_size=plan.micro_batch_size,
            device=device,
            num_threads=num_threads,
            preadv=preadv,
            with_maps=token_label_axes is not None,
        )

    def encode(self, job: MicroBatch) -> Encoded:
        """Corners, sizes, filters and flips, RandAugment's operations, and where the label maps go."""
        seed, (epochs, samples) = self._plan.seed, self._plan.samples(job.start, job.stop)
        shape = {"width": self._index.width[samples], "height": self._index.height[samples]}
        draws = self._crops(seed, epochs, samples, **shape)
        operations = randaugment.draw(self._policy, seed, epochs, samples)
        corners = np.stack([draws.x, draws.y], axis=-1)
        sizes = np.stack([draws.width, draws.height], axis=-1)
        filters, flips = self._filters_of(seed, epochs, samples), draws.flip.astype(np.int32)
        arguments = (corners, sizes, filters, flips, operations.codes, operations.arguments, operations.affine)
        room = reader.room(self._index, samples, self._memory, with_maps=self._axes is not None)
        if self._axes is None:
            return Encoded(job, samples, room, arguments)
        warp = token_labels.warps(operations.affine) if self._policy else None
        placement = token_labels.place(draws, **shape, axes=self._axes, warp=warp)
        return Encoded(job, samples, room, arguments, placement, warp)

    def decode(self, jpegs: Any, corners: Any = None, sizes: Any = None, filters: Any = None, flips: Any = None) -> Any:
        """The window; on a GPU resized, flipped and, unless operations come in between, normalised."""
        padded = self._padding is not None
        images = _decode(jpegs, self._device) if padded else _window(jpegs, corners, sizes, self._device)
        if self._on_cpu:
            return images
        if padded:
            images = _slice(images, corners, sizes)
        by_sample = fn.cast(filters, dtype=types.DALIDataType.INTERP_TYPE)
        images = fn.resize(images, size=self._size, interp_type=by_sample, antialias=True)
        return _bytes(images, mirror=flips) if self._policy else self._normalise(images, mirror=flips)

    def finish(
        self, image: np.ndarray, out: np.ndarray, corner: Any, size: Any, number: int, flip: int, *drawn: np.ndarray
    ) -> None:
        """The same on a CPU, RandAugment included."""
        if self._padding is not None:
            image = pixels.window(image, *corner.tolist(), *size.tolist())
        resized = pixels.resize(image, self._size, FILTERS[number])
        self._to_floats(with_pillow(resized[:, ::-1] if flip else resized, self._fill, *drawn), out)

    def augment(self, images: torch.Tensor, batch: Encoded) -> torch.Tensor:
        """RandAugment on a GPU, and what was put off for it."""
        if not self._policy:
            return images
        return self._to_floats.batch(with_torch(images, self._fill, Operations(*batch.arguments[-3:])))

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
        self._index, self._device, self._on_cpu = index, device, _finishes_on_cpu(device)
        self._img_size, self._crop_pct, self._interpolation = img_size, crop_pct, interpolation
        self._to_floats, self._memory = pixels.Normalise(mean, std), reader.Memory()
        self._normalise, self._resize = functools.partial(_normalise, mean=mean, std=std), _resize(interpolation)
        self._max_batch_size, self._num_threads = plan.micro_batch_size, num_threads

    def encode(self, job: MicroBatch) -> Encoded:
        """Sizes and corners."""
        samples = np.arange(job.start, job.stop, dtype=np.int64)
        width, height = self._index.width[samples], self._index.height[samples]
        sizes, corners = order.centre_geometry(width, height, img_size=self._img_size, crop_pct=self._crop_pct)
        arguments = (sizes.astype(np.float32), corners.astype(np.int32))
        return Encoded(job, samples, reader.room(self._index, samples, self._memory), arguments)

    def decode(self, jpegs: Any, sizes: Any = None, corners: Any = None) -> Any:
        """The image; on a GPU resized, cut and normalised."""
        images = _decode(jpegs, self._device)
        if self._on_cpu:
            return images
        images = fn.resize(images, size=sizes, **self._resize)
        return self._normalise(_slice(images, corners, (self._img_size, self._img_size)))

    def finish(self, image: np.ndarray, out: np.ndarray, size: np.ndarray, corner: np.ndarray) -> None:
        """The same on a CPU."""
        resized = pixels.resize(image, (int(size[0]), int(size[1])), self._interpolation)
        x, y = corner.tolist()
        self._to_floats(pixels.window(resized, x, y, self._img_size, self._img_size), out)

    def augment(self, images: torch.Tensor, batch: Encoded) -> torch.Tensor:
        """Nothing."""
        return images

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Batch]:
        if not self._jobs:
            return
        stream = Stream(
            self._index,
            iter(self._jobs),
            self,
            num_arguments=0 if self._on_cpu else 2,
            finishes=self._on_cpu,
            img_size=self._img_size,
            max_batch_size=self._max_batch_size,
            device=self._device,
            num_threads=self._num_threads,
            preadv=os.preadv,
        )
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
