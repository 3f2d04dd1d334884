"""Small images in memory: decoded once for all trials of a process, then cut, resized and normalised batch by batch.

On a CPU the batches are those of `data.dali.TrainLoader` and `EvalLoader` to the bit, for images of one size with
`--data.crop_padding`. A loader's threads and pipeline take longer to start than such a trial takes for an epoch.
"""

import copy
import io
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from largebatch.assembly import model_geometry
from largebatch.benchmark.resident import Batch
from largebatch.config import TrainConfig
from largebatch.data import order
from largebatch.data.index import Index
from largebatch.data.order import Plan
from largebatch.data.pixels import Normalise


class Pixels:
    """The decoded images of an index, all of one size, with a black border: uint8 (N, H, W, 3); labels int64 (N,)."""

    def __init__(self, index: Index, border: int) -> None:
        sizes = {*zip(index.width.tolist(), index.height.tolist())}
        if len(sizes) > 1:
            found = f"{index.folder} has images of {len(sizes)} sizes"
            raise ValueError(f"{found}: expected one size, as the digits and CIFAR-10 have.")
        self.border = border
        self.bordered = np.pad(np.stack([*decoded(index)]), ((0, 0), (border, border), (border, border), (0, 0)))
        self.labels = torch.from_numpy(index.label.astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, samples: np.ndarray) -> "Pixels":
        chosen = copy.copy(self)
        chosen.bordered, chosen.labels = self.bordered[samples], self.labels[torch.from_numpy(samples)]
        return chosen

    def whole(self, start: int, stop: int) -> np.ndarray:
        height, width = self.size
        return self.bordered[start:stop, self.border : self.border + height, self.border : self.border + width]

    @property
    def size(self) -> tuple[int, int]:
        height, width = self.bordered.shape[1:3]
        return height - 2 * self.border, width - 2 * self.border


def decoded(index: Index) -> Iterator[np.ndarray]:
    """Yield the images of an index, (H, W, 3)."""
    for file, path in enumerate(index.files):
        data = Path(path).read_bytes()
        for sample in np.flatnonzero(index.file == file):
            start, size = int(index.offset[sample]), int(index.length[sample])
            yield np.asarray(Image.open(io.BytesIO(data[start : start + size])).convert("RGB"))


class Preparation:
    def __init__(self, config: TrainConfig, model: torch.nn.Module) -> None:
        self.side, self.geometry = config.model.img_size, model_geometry(config.data, model)
        self.filter = "random" if config.data.interpolation == "random" else self.geometry.interpolation
        self.normalise = Normalise(self.geometry.mean, self.geometry.std).batch

    def resize(self, images: np.ndarray, size: tuple[int, int], interpolation: str) -> torch.Tensor:
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
        if images.shape[1:3] == size:
            return pixels
        return functional.interpolate(pixels, size=size, mode=interpolation, antialias=True)

    def training(self, images: np.ndarray, flips: np.ndarray) -> torch.Tensor:
        """Return windows (B, H, W, 3) at the size of the model, mirrored where `flips` (B,) says so."""
        resized = self.resize(images, (self.side, self.side), self.filter)
        if flips.any():
            mirrored = torch.from_numpy(flips)[:, None, None, None]
            resized = torch.where(mirrored, resized.flip(-1), resized)
        return self.normalise(resized)

    def centre(self, images: np.ndarray) -> torch.Tensor:
        """Return the central crops of whole images (B, H, W, 3) at the size of the model."""
        size = np.array(images.shape[1:3])[:, None]
        crop_pct = self.geometry.crop_pct
        sizes, corners = order.centre_geometry(size[1], size[0], img_size=self.side, crop_pct=crop_pct)
        (height, width), (x, y) = sizes[0].tolist(), corners[0].tolist()
        resized = self.resize(images, (height, width), self.geometry.interpolation)
        return self.normalise(resized[:, :, y : y + self.side, x : x + self.side])


def training_batches(
    start_step: int, *, pixels: Pixels, plan: Plan, config: TrainConfig, preparation: Preparation
) -> Generator[Batch, None, None]:
    """Yield the micro-batches from step `start_step` on, in the order of the plan."""
    padding, (height, width) = pixels.border, pixels.size
    for step in range(start_step, plan.num_steps):
        for job in plan.micro_batches(step, 0, 1):
            epochs, samples = plan.samples(job.start, job.stop)
            sides = {"width": np.full(len(samples), width), "height": np.full(len(samples), height)}
            hflip = config.data.hflip
            draws = order.draw_padded(plan.seed, epochs, samples, padding=padding, hflip=hflip, **sides)
            corners = zip(samples.tolist(), (draws.x + padding).tolist(), (draws.y + padding).tolist())
            windows = np.stack([pixels.bordered[k, y : y + height, x : x + width] for k, x, y in corners])
            images = preparation.training(windows, draws.flip)
            yield Batch(images, pixels.labels[torch.from_numpy(samples)], step, job.number, None)


def evaluation_batches(pixels: Pixels, *, config: TrainConfig, preparation: Preparation) -> list[Batch]:
    """Return the numbered batches of an evaluation, prepared once."""
    size, batches = config.data.eval_batch_size, []
    for number, start in enumerate(range(0, len(pixels), size)):
        images = pixels.whole(start, start + size)
        batches.append(Batch(preparation.centre(images), pixels.labels[start : start + size], 0, number, None))
    return batches
