"""The loaders for training and evaluation: from sample numbers to normalised tensors.

On a GPU, DALI decodes, crops, resizes and normalises images; torch runs RandAugment's operations on batches of bytes.
On a CPU, DALI decodes the window of an image, and threads of ours do the rest with torch's kernel for bytes and Pillow:
faster than DALI's resize there, and closer to PIL (benchmark/NOTES.md).
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, types

from largebatch.data import order, pixels, randaugment, reader, token_labels
from largebatch.data.decoder import AS_PIL
from largebatch.data.index import Index
from largebatch.data.order import MicroBatch, Plan
from largebatch.data.randaugment import Operations, Policy
from largebatch.data.randaugment_ops import fill_colour, with_pillow, with_torch
from largebatch.data.stream import Batch, Encoded, Stream

INTERPOLATIONS = {
    "bilinear": types.DALIInterpType.INTERP_LINEAR,
    "bicubic": types.DALIInterpType.INTERP_CUBIC,
    "lanczos": types.DALIInterpType.INTERP_LANCZOS3,
}
FILTERS = {kind.value: name for name, kind in INTERPOLATIONS.items()}  # by DALI's number
# The part of a batch that the JPEG unit of an A100 or newer GPU decodes; the GPU's other cores, which train, decode the
# rest. Older versions of DALI have other defaults, so it is set.
HARDWARE_SHARE = 0.9
USUAL_SIZE = 95  # percentile of the sizes, for which the JPEG unit reserves memory: it needs that for a whole batch


@dataclass(frozen=True, eq=False)
class Crops:
    corners: np.ndarray
    """(n, 2) int32: x and y of the window in the stored image"""
    sizes: np.ndarray
    """(n, 2) int32: width and height of the window"""
    filters: np.ndarray
    """(n,) int32: DALI's number of the resizing filter"""
    flips: np.ndarray
    """(n,) int32: 1 if the window is mirrored"""
    operations: Operations


@dataclass(frozen=True, eq=False)
class CentreCrops:
    sizes: np.ndarray
    """(n, 2) float32: height and width to resize the image to"""
    corners: np.ndarray
    """(n, 2) int32: x and y of the square in the resized image"""


class TrainLoader(Iterator[Batch]):
    """The micro-batches of shard `shard` of `num_shards`, from step `start_step` to `stop_step` or the end of the plan.

    Each image is cut to its random window, resized to `img_size` square with antialiasing, flipped at random, augmented
    by `policy`, and normalised with `mean` and `std` (of RGB in [0, 1]). With `padding`, a window of the image's size
    is moved by up to that many pixels instead. `interpolation` "random": bilinear or bicubic for each sample.
    `num_threads` threads decode, and on a CPU as many more resize. with_maps: read label maps, which all images must
    have.
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
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        hflip: float,
        device: torch.device,
        num_threads: int,
        padding: int | None = None,
        policy: Policy | None = None,
        with_maps: bool = False,
        start_step: int = 0,
        stop_step: int | None = None,
        preadv: Callable[[int, list, int], int] = os.preadv,
    ) -> None:
        if plan.num_samples != len(index):
            raise ValueError(f"The plan is for {plan.num_samples} samples, the index has {len(index)}.")
        self._index, self._plan, self._device, self._size = index, plan, device, (img_size, img_size)
        self._padding, self._policy, self._with_maps, self._memory = padding, policy, with_maps, reader.Memory()
        self._to_floats, self._fill = pixels.Normalise(mean, std), fill_colour(mean)
        self._normalise = functools.partial(_normalise, mean=mean, std=std)
        self._filters_of, self._on_cpu = _filters(interpolation), _finishes_on_cpu(device)
        self._crops: Callable[..., order.Draws]
        if padding is None:
            self._crops = functools.partial(order.draw, scale=scale, ratio=ratio, hflip=hflip)
        else:
            self._crops = functools.partial(order.draw_padded, padding=padding, hflip=hflip)
        on_gpu, on_cpu = ("corners", "sizes", "filters", "flips"), () if padding is not None else ("corners", "sizes")
        steps = range(start_step, plan.num_steps if stop_step is None else stop_step)
        self._stream = Stream(
            index,
            (job for step in steps for job in plan.micro_batches(step, shard, num_shards)),
            self,
            graph_inputs=on_cpu if self._on_cpu else on_gpu,
            finishes=self._on_cpu,
            img_size=img_size,
            max_batch_size=plan.micro_batch_size,
            device=device,
            num_threads=num_threads,
            preadv=preadv,
            with_maps=with_maps,
        )

    def encode(self, job: MicroBatch) -> Encoded[Crops]:
        seed, (epochs, samples) = self._plan.seed, self._plan.samples(job.start, job.stop)
        shape = {"width": self._index.width[samples], "height": self._index.height[samples]}
        draws = self._crops(seed, epochs, samples, **shape)
        operations = randaugment.draw(self._policy, seed, epochs, samples)
        crops = Crops(
            corners=np.stack([draws.x, draws.y], axis=-1),
            sizes=np.stack([draws.width, draws.height], axis=-1),
            filters=self._filters_of(seed, epochs, samples),
            flips=draws.flip.astype(np.int32),
            operations=operations,
        )
        room = reader.room(self._index, samples, self._memory, with_maps=self._with_maps)
        if not self._with_maps:
            return Encoded(job, samples, room, crops)
        warp = token_labels.warps(operations.affine) if self._policy else None
        placement = token_labels.place(draws, **shape, warp=warp)
        return Encoded(job, samples, room, crops, placement, warp)

    def decode(self, jpegs: Any, corners: Any = None, sizes: Any = None, filters: Any = None, flips: Any = None) -> Any:
        """Decode the window. On a GPU, also resize, flip and, unless operations come first, normalise it."""
        if self._on_cpu and self._padding is None:
            return _decode_window(jpegs, corners, sizes)
        images = _decode(jpegs, self._device, self._index)
        if self._on_cpu:
            return images
        images = _slice(images, corners, sizes)
        by_sample = fn.cast(filters, dtype=types.DALIDataType.INTERP_TYPE)
        resized: Any = fn.resize(images, size=self._size, interp_type=by_sample, antialias=True)
        if not self._policy:
            return self._normalise(resized, mirror=flips)
        return fn.crop_mirror_normalize(resized, dtype=types.DALIDataType.UINT8, output_layout="CHW", mirror=flips)

    def finish(self, image: np.ndarray, out: np.ndarray, arrays: Crops, k: int) -> None:
        if self._padding is not None:
            image = pixels.window(image, *arrays.corners[k].tolist(), *arrays.sizes[k].tolist())
        resized, flip = pixels.resize(image, self._size, FILTERS[arrays.filters[k]]), arrays.flips[k]
        drawn = arrays.operations.codes[k], arrays.operations.arguments[k], arrays.operations.affine[k]
        self._to_floats(with_pillow(resized[:, ::-1] if flip else resized, self._fill, *drawn), out)

    def augment(self, images: torch.Tensor, batch: Encoded[Crops]) -> torch.Tensor:
        """On a GPU, apply a policy and normalise, which the graph then has not done."""
        if not self._policy:
            return images
        return self._to_floats.batch(with_torch(images, self._fill, batch.arrays.operations))

    def __next__(self) -> Batch:
        return next(self._stream)

    def close(self) -> None:
        self._stream.close()


class EvalLoader:
    """Every sample once over all shards, in the order of the index. It can be iterated several times.

    The pipeline, which takes seconds to build on a GPU, is kept until `close`. Shard r of R takes the batches r, r + R,
    ... of `batch_size` consecutive samples; `Batch.step` is 0. Images are cut as by timm's evaluation transform.
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
        self._new_stream = functools.partial(
            Stream,
            index,
            preparation=self,
            graph_inputs=() if self._on_cpu else ("sizes", "corners"),
            finishes=self._on_cpu,
            img_size=img_size,
            max_batch_size=plan.micro_batch_size,
            device=device,
            num_threads=num_threads,
        )
        self._paused: Stream | None = None  # between two iterations

    def encode(self, job: MicroBatch) -> Encoded[CentreCrops]:
        samples = np.arange(job.start, job.stop, dtype=np.int64)
        width, height = self._index.width[samples], self._index.height[samples]
        sizes, corners = order.centre_geometry(width, height, img_size=self._img_size, crop_pct=self._crop_pct)
        crops = CentreCrops(sizes.astype(np.float32), corners.astype(np.int32))
        return Encoded(job, samples, reader.room(self._index, samples, self._memory), crops)

    def decode(self, jpegs: Any, sizes: Any = None, corners: Any = None) -> Any:
        images = _decode(jpegs, self._device, self._index)
        if self._on_cpu:
            return images
        images = fn.resize(images, size=sizes, **self._resize)
        return self._normalise(_slice(images, corners, (self._img_size, self._img_size)))

    def finish(self, image: np.ndarray, out: np.ndarray, arrays: CentreCrops, k: int) -> None:
        height, width = arrays.sizes[k]
        resized = pixels.resize(image, (int(height), int(width)), self._interpolation)
        x, y = arrays.corners[k].tolist()
        self._to_floats(pixels.window(resized, x, y, self._img_size, self._img_size), out)

    def augment(self, images: torch.Tensor, batch: Encoded[CentreCrops]) -> torch.Tensor:
        return images

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Batch]:
        if not self._jobs:
            return
        stream, self._paused = self._paused, None
        if stream:
            stream.resume(iter(self._jobs))
        stream = stream or self._new_stream(iter(self._jobs))
        with contextlib.ExitStack() as failure:
            failure.callback(stream.close)  # also if the consumer stops early
            for job in self._jobs:
                batch = next(stream)
                if job is self._jobs[-1]:  # before it is handed out: the consumer may know that it is the last
                    failure.pop_all()
                    stream.pause()
                    self.close()
                    self._paused = stream
                yield batch

    def close(self) -> None:
        """Free the pipeline; safe to call twice. The next iteration builds another one."""
        if self._paused:
            self._paused.close()
            self._paused = None


# -- the graph --------------------------------------------------------------------------------------------------------


def _finishes_on_cpu(device: torch.device) -> bool:
    """Tell whether threads of ours, and not DALI's graph, finish the images."""
    return device.type == "cpu"


def _decode(jpegs: Any, device: torch.device, index: Index) -> Any:
    """Decode whole images: on a GPU, DALI's `image_slice` would silently use CPU threads.

    The JPEG unit decodes whole images only, and nvJPEG 12 cannot do both a window and fancy upsampling. nvJPEG 13 needs
    a driver of CUDA 13.
    """
    width, height = (int(np.percentile(sizes, USUAL_SIZE)) for sizes in (index.width, index.height))
    return fn.decoders.image(
        jpegs,
        device="mixed" if device.type == "cuda" else "cpu",
        hw_decoder_load=HARDWARE_SHARE,
        preallocate_width_hint=width,
        preallocate_height_hint=height,
        **AS_PIL,
    )


def _decode_window(jpegs: Any, corners: Any, sizes: Any) -> Any:
    in_pixels: dict[str, Any] = {"normalized_anchor": False, "normalized_shape": False}
    return fn.decoders.image_slice(jpegs, corners, sizes, device="cpu", axis_names="WH", **in_pixels, **AS_PIL)


def _slice(images: Any, corners: Any, sizes: Any) -> Any:
    """Cut a window, which is black outside of the image."""
    outside: dict[str, Any] = {"out_of_bounds_policy": "pad", "fill_values": 0}
    return fn.slice(images, start=corners, shape=sizes, axis_names="WH", **outside)


def _filters(interpolation: str) -> Callable[[int, np.ndarray, np.ndarray], np.ndarray]:
    """Return a function from seed, epochs and samples to DALI's number of each sample's filter."""
    if interpolation == "random":
        either = np.array([INTERPOLATIONS[name].value for name in ("bilinear", "bicubic")], dtype=np.int32)
        return lambda *place: either[order.draw_bicubic(*place).astype(np.int32)]
    number = _resize(interpolation)["interp_type"].value
    return lambda _, epochs, samples: np.full(len(samples), number, dtype=np.int32)


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
