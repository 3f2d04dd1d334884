"""From a decoded image to normalised floats on a CPU, as DALI does it on a GPU.

Called by several threads at once, an image at a time. Bytes stay bytes until the last step, as in PIL and timm.
"""

import numpy as np
import torch
from torch.nn import functional


def resize(image: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    """(H, W, 3) to (3, *size), all uint8. torch's kernel runs in one thread and lets go of the interpreter."""
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    return functional.interpolate(pixels, size=size, mode=interpolation, antialias=True)[0].numpy()


def square(pixels: np.ndarray, x: int, y: int, side: int) -> np.ndarray:
    """The square (3, side, side) whose corner is (x, y), black outside of `pixels` (3, H, W)."""
    left, top = max(x, 0), max(y, 0)
    inside = pixels[:, top : y + side, left : x + side]
    if inside.shape[1:] == (side, side):
        return inside
    square = np.zeros((3, side, side), dtype=np.uint8)
    square[:, top - y : top - y + inside.shape[1], left - x : left - x + inside.shape[2]] = inside
    return square


class Normalise:
    """Bytes (3, H, W) to normalised floats. NumPy, since torch would start a team of threads in each of ours."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self._mean = np.array([[[255 * value]] for value in mean], dtype=np.float32)
        self._scale = np.array([[[1 / (255 * value)]] for value in std], dtype=np.float32)

    def __call__(self, pixels: np.ndarray, out: np.ndarray) -> None:
        np.subtract(pixels, self._mean, out=out)
        np.multiply(out, self._scale, out=out)
