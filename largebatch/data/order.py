"""The order of the samples, and the crop, flip and resizing filter of each: pure functions of (seed, epoch, position).

So they are the same for any number of shards, on CPU and GPU, and after a resume. A run is an endless stream of epoch
permutations, cut into global batches, which are cut into numbered micro-batches. Shard r of R takes the numbers r, r +
R, ...: R changes who computes a micro-batch, never its content. Only raw words of a bit generator and integer
arithmetic are used: NumPy's Generator may change between versions.
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

ATTEMPTS = 10  # tries of a random resized crop before the centre crop, as torchvision and timm do
_FLIP = 4 * ATTEMPTS  # the draws of attempt a are numbered 4a .. 4a + 3
_INTERPOLATION = _FLIP + 1  # numbers from 64 up belong to randaugment


@dataclass(frozen=True)
class MicroBatch:
    """The stream positions [start, stop) of micro-batch `number` of step `step`."""

    step: int
    number: int
    start: int
    stop: int


class Phase(NamedTuple):
    """The steps from `step` on take `batch_size` images each, from stream position `start` on."""

    step: int
    start: int
    batch_size: int


@dataclass(frozen=True)
class Plan:
    """The batches of a run, cut from the stream of epoch permutations.

    `num_images` is the length of the whole run; only its last global batch may be short. With `shuffle_window` W > 0
    the files (with `shard_sizes` samples) are permuted, and samples are mixed only inside W consecutive files, which
    keeps reads sequential on slow storage. An epoch takes each sample `repeats` times in a row; the n micro-batches of
    a step then take every n-th of its images, as the ranks of timm's sampler do: no two repetitions meet in one if n is
    `repeats` or more, all of one size. `phases` of a batch ramp are its first stream positions, from 0, and global
    batches, at most `global_batch_size`; each is a whole number of steps.
    """

    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    num_images: int
    seed: int
    shard_sizes: tuple[int, ...] = ()
    shuffle_window: int = 0
    phases: tuple[tuple[int, int], ...] = ()
    repeats: int = 1
    epoch_batch_size: int = 0  # the batch of which repeated images fill whole ones in an epoch; 0: global_batch_size

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch_size", "micro_batch_size", "num_images"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1.")
        if self.micro_batch_size > self.global_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} is larger than global_batch_size "
                f"{self.global_batch_size}: lower the first or raise the second."
            )
        if self.shuffle_window < 0 or self.seed < 0:
            raise ValueError(f"shuffle_window ({self.shuffle_window}) and seed ({self.seed}) must not be negative.")
        if self.shuffle_window and sum(self.shard_sizes) != self.num_samples:
            raise ValueError(
                f"shuffle_window needs shard_sizes that add up to num_samples: they add up to "
                f"{sum(self.shard_sizes)}, num_samples is {self.num_samples}."
            )
        if not 1 <= self.repeats <= self.num_samples:
            raise ValueError(
                f"--augment.repeats is {self.repeats}, and there are {self.num_samples} training images: expected 1 up "
                "to their number."
            )
        self._check_phases()

    def _check_phases(self) -> None:
        starts, batches = zip(*self.phases or ((0, self.global_batch_size),))
        sane = starts[0] == 0 and 1 <= min(batches) and max(batches) <= self.global_batch_size
        lengths = (stop - start for start, stop in pairwise(starts))
        if not sane or any(length <= 0 or length % batch for length, batch in zip(lengths, batches)):
            raise ValueError(
                f"phases are {self.phases}: expected the first at 0, each a whole number of steps, and batches from 1 "
                f"to global_batch_size {self.global_batch_size}."
            )

    @property
    def epoch_images(self) -> int:
        return epoch_images(self.num_samples, self.repeats, self.epoch_batch_size or self.global_batch_size)

    @functools.cached_property
    def _phases(self) -> list[Phase]:
        found = [Phase(0, 0, self.global_batch_size)]
        for start, batch_size in self.phases:
            before = found[-1]
            found.append(Phase(before.step + (start - before.start) // before.batch_size, start, batch_size))
        return found[1:] or found

    def phase(self, step: int) -> Phase:
        """Return the phase of a step."""
        return self._phases[max(0, bisect.bisect_right(self._phases, step, key=lambda phase: phase.step) - 1)]

    def start(self, step: int) -> int:
        phase = self.phase(step)
        return phase.start + (step - phase.step) * phase.batch_size

    def first_step(self, start: int) -> int:
        """Return the first step that begins at stream position `start` or later."""
        return bisect.bisect_left(range(self.num_steps), start, key=self.start)

    def time(self, step: int) -> float:
        """Return the place of a step for the schedule, in steps of the first phase."""
        return self.start(step) / self._phases[0].batch_size

    def batch_size(self, step: int) -> int:
        """Return the global batch of a step's phase; the last step of the run may have fewer images."""
        return self.phase(step).batch_size

    def passes_in_phase(self, step: int, num_shards: int) -> int:
        """Return the most micro-batches of a shard in a full step."""
        return math.ceil(math.ceil(self.batch_size(step) / self.micro_batch_size) / num_shards)

    def passes_in_step(self, step: int, num_shards: int) -> int:
        """Return the most micro-batches of a shard in this step."""
        return len(self.micro_batches(step, 0, num_shards))

    @functools.cached_property
    def num_steps(self) -> int:
        last = [phase for phase in self._phases if phase.start < self.num_images][-1]
        return last.step + math.ceil((self.num_images - last.start) / last.batch_size)

    def window_images(self, step: int) -> int:
        """Return the number of images in this step."""
        return max(0, min(self.batch_size(step), self.num_images - self.start(step)))

    def micro_batches(self, step: int, shard: int, num_shards: int) -> list[MicroBatch]:
        """Return the micro-batches of a shard; a short step may have none."""
        assert step >= 0 and 0 <= shard < num_shards, (step, shard, num_shards)
        start = self.start(step)
        stop = start + self.window_images(step)
        count = math.ceil((stop - start) / self.micro_batch_size)
        cuts = [min(start + number * self.micro_batch_size, stop) for number in range(count + 1)]
        return [MicroBatch(step, k, cuts[k], cuts[k + 1]) for k in range(shard, count, num_shards)]

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return epochs and sample numbers (int64) at the stream positions [start, stop), which may span epochs.

        Each repetition counts as an epoch of its own, so that it has draws of its own.
        """
        epochs, places = np.divmod(self._places(start, stop), self.epoch_images)
        places, repetitions = np.divmod(places, self.repeats)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            if self.shuffle_window:
                order = _windowed_order(self.seed, epoch, self.shard_sizes, self.shuffle_window)
            else:
                order = epoch_order(self.seed, epoch, self.num_samples)
            chosen = epochs == epoch
            samples[chosen] = order[places[chosen]]
        return epochs * self.repeats + repetitions, samples

    def _places(self, start: int, stop: int) -> np.ndarray:
        """Return the places of stream positions among the repeated samples of all epochs, one behind the other."""
        places = np.arange(start, stop, dtype=np.int64)
        if self.repeats == 1:
            return places
        for step in range(self.first_step(start + 1) - 1, self.first_step(stop)):
            first, count = self.start(step), self.batch_size(step) // self.micro_batch_size
            if self.window_images(step) == count * self.micro_batch_size:
                own = places[max(0, first - start) : first + self.batch_size(step) - start]
                micro_batches, numbers = np.divmod(own - first, self.micro_batch_size)
                own[:] = first + numbers * count + micro_batches
        return places


def epoch_images(num_samples: int, repeats: int, batch_size: int) -> int:
    """Return the images of an epoch: all samples or, repeated, as many in whole 256s and batches, as in DeiT."""
    if repeats == 1:
        return num_samples
    images = num_samples // 256 * 256 or num_samples
    return images // batch_size * batch_size or images


@functools.lru_cache(maxsize=4)  # two epochs of the training plan and two of another one; each takes 8 bytes per sample
def epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    words = np.random.Philox(key=[seed, epoch]).random_raw(num_samples)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


@functools.lru_cache(maxsize=4)
def _windowed_order(seed: int, epoch: int, shard_sizes: tuple[int, ...], window: int) -> np.ndarray:
    sizes = np.asarray(shard_sizes, dtype=np.int64)
    words = np.random.Philox(key=[seed, epoch]).random_raw(len(sizes) + int(sizes.sum()))
    place = np.argsort(np.argsort(words[: len(sizes)], kind="stable"), kind="stable")  # of each file
    group = np.repeat(place // window, sizes)  # of each sample
    order = np.lexsort((words[len(sizes) :], group))
    order.flags.writeable = False
    return order


def uniform(seed: int, epochs: np.ndarray, samples: np.ndarray, draw: int) -> np.ndarray:
    """Return draw number `draw` of each (epoch, sample): independent float64 in [0, 1)."""
    state = _mix(np.full(1, seed, dtype=np.uint64))
    state = _mix(state + np.asarray(epochs).astype(np.uint64))
    state = _mix(state + np.asarray(samples).astype(np.uint64))
    bits = _mix(state + np.uint64(draw))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the output function of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class Draws:
    """Per sample: the crop window in pixels of the stored image (int32), black outside of it, and whether to flip."""

    x: np.ndarray
    y: np.ndarray
    width: np.ndarray
    height: np.ndarray
    flip: np.ndarray


def draw(
    seed: int,
    epochs: np.ndarray,
    samples: np.ndarray,
    *,
    width: np.ndarray,
    height: np.ndarray,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    hflip: float,
) -> Draws:
    """Draw torchvision's RandomResizedCrop, and the flip, of each stored image of `width` x `height`.

    The area is uniform in `scale`, the aspect ratio log-uniform in `ratio`. After ten attempts that do not fit it is
    the largest centre crop with an allowed ratio.
    """
    width, height = np.asarray(width, dtype=np.int64), np.asarray(height, dtype=np.int64)
    attempts = np.arange(ATTEMPTS)[:, None]
    u = np.stack([uniform(seed, epochs, samples, number) for number in range(4 * ATTEMPTS)])
    area = width * height * (scale[0] + (scale[1] - scale[0]) * u[0::4])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(low + (high - low) * u[1::4])
    widths, heights = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)

    chosen = np.argmax(fits, axis=0)  # the first attempt that fits
    pick = attempts == chosen
    w, h = (widths * pick).sum(axis=0), (heights * pick).sum(axis=0)
    x = np.floor((u[2::4] * pick).sum(axis=0) * (width - w + 1))
    y = np.floor((u[3::4] * pick).sum(axis=0) * (height - h + 1))
    centre = _centre_crop(width, height, ratio)
    x, y, w, h = (np.where(fits.any(axis=0), a, b).astype(np.int32) for a, b in zip((x, y, w, h), centre))
    return Draws(x, y, w, h, uniform(seed, epochs, samples, _FLIP) < hflip)


def draw_padded(
    seed: int,
    epochs: np.ndarray,
    samples: np.ndarray,
    *,
    width: np.ndarray,
    height: np.ndarray,
    padding: int,
    hflip: float,
) -> Draws:
    """Draw a window of the image's size, moved by up to `padding` pixels as by torchvision's RandomCrop, and a flip."""
    x, y = (
        np.floor(uniform(seed, epochs, samples, number) * (2 * padding + 1)).astype(np.int32) - padding
        for number in (2, 3)
    )
    w, h = (np.asarray(side).astype(np.int32) for side in (width, height))
    return Draws(x, y, w, h, uniform(seed, epochs, samples, _FLIP) < hflip)


def draw_bicubic(seed: int, epochs: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Draw True for bicubic, False for bilinear, with probability 1/2."""
    return uniform(seed, epochs, samples, _INTERPOLATION) < 0.5


def _centre_crop(width: np.ndarray, height: np.ndarray, ratio: tuple[float, float]) -> tuple[np.ndarray, ...]:
    """Return x, y, width and height of the largest centred window with an aspect ratio inside `ratio`."""
    aspect = width / height
    w = np.where(aspect > ratio[1], np.rint(height * ratio[1]), width)
    h = np.where(aspect < ratio[0], np.rint(width / ratio[0]), height)
    return (width - w) // 2, (height - h) // 2, w, h


def centre_geometry(
    width: np.ndarray, height: np.ndarray, *, img_size: int, crop_pct: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the crops of timm's evaluation: (height, width) to resize to and corners (x, y), both (n, 2).

    The shorter side becomes floor(img_size / crop_pct), then a centred square of side img_size is cut. With crop_pct >
    1 corners are negative, and the outside is black.
    """
    width, height = np.asarray(width, dtype=np.int64), np.asarray(height, dtype=np.int64)
    short = math.floor(img_size / crop_pct)
    shorter = np.minimum(width, height)
    sizes = np.stack([short * height / shorter, short * width / shorter], axis=-1).astype(np.int64)
    spare = sizes[:, ::-1] - img_size
    corners = np.where(spare < 0, -(-spare // 2), np.rint(spare / 2)).astype(np.int64)
    return sizes, corners
