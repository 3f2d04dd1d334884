"""Turn a decoded image into normalised floats on a CPU, as DALI does on a GPU.

Several threads call these functions. Pixels stay bytes until the last step, as in PIL and timm.
"""

import numpy as np
import torch
from torch.nn import functional

from largebatch.native.copies import to_device


def resize(image: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    """Resize (H, W, 3) to (*size, 3), both uint8; torch's kernel takes one thread and releases the interpreter."""
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    resized = functional.interpolate(pixels, size=size, mode=interpolation, antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def window(image: np.ndarray, x: int, y: int, width: int, height: int) -> np.ndarray:
    """Cut the window (height, width, 3) at (x, y), which is black outside of `image` (H, W, 3)."""
    left, top = max(x, 0), max(y, 0)
    inside = image[top : max(y + height, 0), left : max(x + width, 0)]
    if inside.shape[:2] == (height, width):
        return inside
    padded = np.zeros((height, width, 3), dtype=np.uint8)
    padded[top - y : top - y + inside.shape[0], left - x : left - x + inside.shape[1]] = inside
    return padded


class Normalise:
    """Normalises bytes to floats: an image (H, W, 3) to (3, H, W) if called, a batch (n, 3, H, W) with `batch`.

    One image is left to NumPy, because torch would start a team of threads in each of ours.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self._mean = np.array([[[255 * value]] for value in mean], dtype=np.float32)
        self._scale = np.array([[[1 / (255 * value)]] for value in std], dtype=np.float32)
        self._sent: dict[torch.device, list[torch.Tensor]] = {}  # both, on the device of the batches

    def __call__(self, pixels: np.ndarray, out: np.ndarray) -> None:
        np.subtract(pixels.transpose(2, 0, 1), self._mean, out=out)
        np.multiply(out, self._scale, out=out)

    def batch(self, images: torch.Tensor) -> torch.Tensor:
        if images.device not in self._sent:
            both = map(torch.from_numpy, (self._mean, self._scale))
            self._sent[images.device] = to_device(*both, device=images.device)
        mean, scale = self._sent[images.device]
        return images.float().sub_(mean).mul_(scale)
