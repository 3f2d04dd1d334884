"""Apply the operations of a policy to bytes: with Pillow on a CPU, with torch to a batch on a GPU.

Both give the same bits, because equalize or posterize after a rotation would magnify a difference of one grey level.
torchvision's operators on tensors differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor
from torch.nn import functional

from largebatch.data.randaugment import AFFINE, NAMES, NONE, WARPS, Operations
from largebatch.native.copies import to_device


def fill_colour(mean: tuple[float, ...]) -> tuple[int, ...]:
    """Return the colour of pixels that a warp leaves empty: the mean, as bytes."""
    return tuple(min(255, round(255 * value)) for value in mean)


# -- one image, with Pillow --------------------------------------------------------------------------------------------

ADD_BELOW = 128  # solarize_add changes only darker pixels
GREY = 128  # of pixels that tf_warp leaves empty, and of cutout
_LEVELS = np.arange(256)


def _posterized(bits: float) -> np.ndarray:
    return _LEVELS & ~(2 ** (8 - int(bits)) - 1)  # black with 0 bits, which Pillow refuses


def _solarized_added(addend: float) -> np.ndarray:
    return np.where(_LEVELS < ADD_BELOW, np.minimum(255, _LEVELS + int(addend)), _LEVELS)


def _flat_level(side: int) -> int:
    return min(255, side**2 // 256)


def _pillow_tf_autocontrast(image: Image.Image, _: float) -> Image.Image:
    table: list[int] = []
    for channel in np.asarray(image).reshape(-1, 3).T:
        low, high = int(channel.min()), int(channel.max())
        scale = np.float32(255) / np.float32(max(high - low, 1))
        stretched = np.float32(_LEVELS) * scale + np.float32(-low) * scale
        table += (stretched.clip(0, 255).astype(int) if high > low else _LEVELS).tolist()
    return image.point(table)


def _pillow_tf_color(image: Image.Image, factor: float) -> Image.Image:
    grey = _tf_grey(*np.moveaxis(np.asarray(image, dtype=np.float32), -1, 0)).astype(np.uint8)
    return _pillow_blend(image, np.repeat(grey[..., None], 3, axis=-1), factor)


def _pillow_tf_sharpness(image: Image.Image, factor: float) -> Image.Image:
    pixels = np.asarray(image)
    smooth = pixels.copy()
    if image.width > 2:
        channels = np.moveaxis(pixels, -1, 0).astype(np.float64)
        smooth[1:-1, 1:-1] = np.moveaxis(_tf_smooth(channels, lambda sums: sums.astype(np.float32)), 0, -1)
    return _pillow_blend(image, smooth, factor)


def _pillow_blend(image: Image.Image, degenerate: np.ndarray, factor: float) -> Image.Image:
    return Image.blend(Image.fromarray(degenerate), image, factor)


def _tf_grey(red: Any, green: Any, blue: Any) -> Any:
    """Return the luma of levels in float32, as TensorFlow."""
    unit = 1 / 255
    return (red * unit * 0.2989 + green * unit * 0.587 + blue * unit * 0.114) * 255.5 // 1


def _tf_smooth(channels: Any, single: Callable[[Any], Any]) -> Any:
    """Smooth (..., S, S) float64 without the border, as TensorFlow's convolution: fused sums in float32."""
    side, sums = channels.shape[-1] - 2, 0.0
    for y in range(3):
        for x in range(3):
            weight = float(np.float32(5 if y == x == 1 else 1) / np.float32(13))
            sums = single(sums + weight * channels[..., y : y + side, x : x + side])
    return sums // 1


def _pillow_cutout(image: Image.Image, box: float) -> Image.Image:
    x, y, pad = _box(int(box), image.width)
    image.paste((GREY,) * 3, (x - pad, y - pad, x + pad, y + pad))
    return image


_PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "invert": lambda image, _: ImageOps.invert(image),
    "posterize": lambda image, bits: image.point(_posterized(bits).tolist() * 3),
    "solarize": lambda image, threshold: ImageOps.solarize(image, int(threshold)),
    "solarize_add": lambda image, addend: image.point(_solarized_added(addend).tolist() * 3),
    "color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    "blur": lambda image, radius: image.filter(ImageFilter.GaussianBlur(radius)),
    "cutout": _pillow_cutout,
    "tf_autocontrast": _pillow_tf_autocontrast,
    "tf_color": _pillow_tf_color,
    "tf_contrast": lambda image, factor: Image.blend(
        Image.new("RGB", image.size, (_flat_level(image.width),) * 3), image, factor
    ),
    "tf_sharpness": _pillow_tf_sharpness,
}


def with_pillow(
    pixels: np.ndarray, fill: tuple[int, ...], codes: np.ndarray, arguments: np.ndarray, affine: np.ndarray
) -> np.ndarray:
    """Apply operations to an image (S, S, 3) uint8: codes and arguments (k,), affine (k, 2, 3)."""
    drawn = np.flatnonzero(codes != NONE)
    if not len(drawn):
        return pixels
    image, size = _image(pixels), (len(pixels), len(pixels))
    for k in drawn:
        name = NAMES[codes[k]]
        matrix = tuple(_in_pixels(affine[k], len(pixels)).ravel().tolist())
        if name in AFFINE or name == "bicubic_warp":
            smooth = Image.Resampling.BILINEAR if name in AFFINE else Image.Resampling.BICUBIC
            image = image.transform(size, Image.Transform.AFFINE, matrix, smooth, fillcolor=fill)
        elif name == "tf_warp":
            image = _pillow_nearest(image, matrix)
        else:
            image = _PILLOW[name](image, float(arguments[k]))
    return np.asarray(image)


def _image(pixels: np.ndarray) -> Image.Image:
    """Return a Pillow image. Pillow's flip of a mirrored view takes a fifth of the time of a copy."""
    if pixels.strides[1] > 0:
        return Image.fromarray(pixels)
    return Image.fromarray(pixels[:, ::-1]).transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _pillow_nearest(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    x, y, empty = _sources(np.array(matrix, np.float32), np.arange(image.width, dtype=np.float32))
    warped = np.asarray(image)[y.astype(np.int64), x.astype(np.int64)]
    warped[empty] = GREY
    return Image.fromarray(warped)


def _sources(a: Any, places: Any) -> tuple[Any, Any, Any]:
    """Return x and y of each pixel's nearest source, and if it is outside. As in TensorFlow: float32, pixel 0 at 0."""
    most = len(places) - 1
    x, y = (a[k] * places + a[k + 1] * places[:, None] + a[k + 2] for k in (0, 3))
    inside = (x > -0.5) & (x < most + 0.5) & (y > -0.5) & (y < most + 0.5)
    return ((x + 0.5) // 1).clip(0, most), ((y + 0.5) // 1).clip(0, most), ~inside


def _box(box: Any, side: int) -> tuple[Any, Any, Any]:
    """Return x, y and p of cutout, see `Operations.arguments`."""
    return box % side, box // side % side, box // side**2


def _in_pixels(affine: np.ndarray, side: int) -> np.ndarray:
    """Turn maps (..., 2, 3) of the unit square into maps of an image of `side` pixels."""
    return affine * np.array([1, 1, side])


# -- a batch, with torch -----------------------------------------------------------------------------------------------
# Images are uint8 (n, 3, S, S), arguments float64 (n,), both on the device.


def _by_table(images: Tensor, tables: Tensor) -> Tensor:
    """Replace each level by its entry in `tables` (n, 1 or 3, 256)."""
    n, channels = images.shape[:2]
    tables = tables.clamp(0, 255).to(torch.uint8).expand(n, channels, 256)
    return tables.gather(2, images.flatten(2).long()).view_as(images)


def _levels(images: Tensor) -> Tensor:
    return torch.arange(256, device=images.device).view(1, 1, 256)


def _autocontrast(images: Tensor, dtype: torch.dtype) -> Tensor:
    flat, levels = images.flatten(2).to(dtype), _levels(images)
    low, high = flat.amin(dim=2, keepdim=True), flat.amax(dim=2, keepdim=True)
    scale = torch.full_like(low, 255.0) / (high - low)  # 255.0 / tensor would multiply by a rounded reciprocal
    stretched = (levels * scale + -low * scale).trunc()
    return _by_table(images, torch.where(high > low, stretched, levels))


def _equalize(images: Tensor, _: Tensor) -> Tensor:
    flat, levels = images.flatten(2).long(), _levels(images)
    counts = levels.new_zeros(*flat.shape[:2], 256).scatter_add_(2, flat, levels.new_ones(()).expand_as(flat))
    below = counts.cumsum(dim=2) - counts
    brightest = counts.gather(2, images.flatten(2).amax(dim=2, keepdim=True).long())
    step = (images[0, 0].numel() - brightest) // 255
    spread = (step // 2 + below) // step.clamp(min=1)
    return _by_table(images, torch.where(step > 0, spread, levels))


def _as_pixel(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _solarize_add(images: Tensor, addends: Tensor) -> Tensor:
    brighter = (images + _as_pixel(addends.to(torch.int16))).clamp(max=255).to(torch.uint8)
    return torch.where(images < ADD_BELOW, brighter, images)


def _blend(images: Tensor, degenerate: Tensor, factors: Tensor) -> Tensor:
    """Blend from `degenerate` (factor 0) to the images (1) and beyond, truncating as Pillow does."""
    from_, factor = degenerate.float(), _as_pixel(factors.float())
    return ((images.float() - from_) * factor + from_).clamp(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Return the luma of ITU-R 601-2 in Pillow's fixed point: (n, 1, S, S) int32."""
    red, green, blue = images.int().split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _contrast(images: Tensor, factors: Tensor) -> Tensor:
    sums, count = _grey(images).sum(dim=(1, 2, 3), keepdim=True), images[0, 0].numel()
    return _blend(images, (2 * sums + count) // (2 * count), factors)  # from the rounded mean


def _sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend away from a smoothed image, whose border is not smoothed."""
    wide, size = images.float(), images.shape[-1]
    smooth = wide.clone()
    if size > 2:
        sums = functional.avg_pool2d(wide, 3, stride=1, divisor_override=1) + 4 * wide[:, :, 1:-1, 1:-1]
        smooth[:, :, 1:-1, 1:-1] = ((2 * sums + 13) / 26).floor()  # sums / 13, rounded; it is never halfway
    return _blend(images, smooth, factors)


def _tf_color(images: Tensor, factors: Tensor) -> Tensor:
    return _blend(images, _tf_grey(*images.float().split(1, dim=1)), factors)


def _tf_sharpness(images: Tensor, factors: Tensor) -> Tensor:
    smooth = images.float()
    if images.shape[-1] > 2:
        smooth[:, :, 1:-1, 1:-1] = _tf_smooth(images.double(), lambda sums: sums.float().double())
    return _blend(images, smooth, factors)


def _box_weights(radii: np.ndarray) -> np.ndarray:
    """Return the weights (n, 3), in 2^-24, of pixels 0, 1 and 2 apart, of the box that Pillow blurs with three times.

    Up to a standard deviation of 2 pixels its half-width, which is a fraction, is below 2. float32 as in Pillow.
    """
    variance = radii.astype(np.float32) ** 2 / np.float32(3)
    whole = np.floor((np.sqrt(12.0 * variance + 1.0).astype(np.float32) - 1) / 2).astype(np.float32)
    part = ((2 * whole + 1) * (whole * (whole + 1) - 3.0 * variance.astype(np.float64))).astype(np.float32)
    part /= 6 * (variance - (whole + 1) * (whole + 1))
    inner = (np.float32(2**24) / ((whole + part) * 2 + 1)).astype(np.int64)
    half = (whole + part).astype(np.int64)
    edge = (2**24 - (2 * half + 1) * inner) // 2
    return np.stack([inner, np.where(half > 0, inner, edge), np.where(half > 0, edge, 0)], axis=-1)


def _blur(images: Tensor, weights: Tensor) -> Tensor:
    """Blur as Pillow does: three boxes along the rows, then three along the columns, each rounded to bytes."""
    w = weights.view(-1, 3, 1, 1, 1).unbind(dim=1)
    wide, place = images.long(), torch.arange(images.shape[-1], device=images.device)
    for dim in (3, 3, 3, 2, 2, 2):
        near = [wide.index_select(dim, (place + k).clamp(0, len(place) - 1)) for k in (-2, -1, 1, 2)]
        wide = (w[0] * wide + w[1] * (near[1] + near[2]) + w[2] * (near[0] + near[3]) + 2**23) >> 24
    return wide.to(torch.uint8)


def _warp(images: Tensor, affine: Tensor, fill: Tensor, *, bicubic: bool) -> Tensor:
    """Warp in float64, as Pillow. `affine` (n, 2, 3) is in pixels, `fill` (1, 3, 1, 1) is the outside."""
    n, channels, size = images.shape[:3]
    centres = torch.arange(size, dtype=torch.float64, device=images.device) + 0.5
    column, row = centres.view(1, 1, size), centres.view(1, size, 1)
    a = affine.view(n, 6, 1, 1).unbind(dim=1)
    x, y = (a[k] * column + a[k + 1] * row + a[k + 2] for k in (0, 3))  # (n, S, S)
    inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
    left, top = (x - 0.5).floor(), (y - 0.5).floor()
    dx, dy = (x - 0.5 - left)[:, None], (y - 0.5 - top)[:, None]
    flat = images.flatten(2)
    near: Sequence[int] = (-1, 0, 1, 2) if bicubic else (0, 1)
    between: Callable[..., Tensor] = _cubic if bicubic else _linear

    def at(row: Tensor, column: Tensor) -> Tensor:
        place = (row.clamp(0, size - 1) * size + column.clamp(0, size - 1)).long()
        return flat.gather(2, place.view(n, 1, -1).expand(n, channels, -1)).view_as(images).double()

    rows = [between(*(at(top + j, left + i) for i in near), dx) for j in near]
    return torch.where(inside[:, None], between(*rows, dy).clamp(0, 255).to(torch.uint8), fill)


def _linear(a: Tensor, b: Tensor, at: Tensor) -> Tensor:
    return a + (b - a) * at


def _cubic(a: Tensor, b: Tensor, c: Tensor, d: Tensor, at: Tensor) -> Tensor:
    """Interpolate between b and c, with the slopes of c - a and d - b there, which is Pillow's cubic for warps."""
    return b + at * ((c - a) + at * (2 * (a - b) + c - d + at * (b - a - c + d)))


def _torch_nearest(images: Tensor, affine: Tensor) -> Tensor:
    n, channels, size = images.shape[:3]
    places = torch.arange(size, dtype=torch.float32, device=images.device)
    x, y, empty = _sources(affine.float().view(n, 6, 1, 1).unbind(dim=1), places)
    sources = (y.long() * size + x.long()).view(n, 1, -1).expand(n, channels, -1)
    return images.flatten(2).gather(2, sources).view_as(images).masked_fill(empty[:, None], GREY)


def _torch_cutout(images: Tensor, boxes: Tensor) -> Tensor:
    places = torch.arange(images.shape[-1], device=images.device)
    x, y, pad = _box(_as_pixel(boxes.long()), images.shape[-1])
    columns, rows = ((places >= centre - pad) & (places < centre + pad) for centre in (x, y))
    return images.masked_fill(columns & rows.mT, GREY)


_TORCH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": lambda images, _: _autocontrast(images, torch.float64),
    "equalize": _equalize,
    "invert": lambda images, _: 255 - images,
    "posterize": lambda images, bits: (images & 256 - 2 ** (8 - _as_pixel(bits.to(torch.int16)))).to(torch.uint8),
    "solarize": lambda images, thresholds: torch.where(images < _as_pixel(thresholds), images, 255 - images),
    "solarize_add": _solarize_add,
    "color": lambda images, factors: _blend(images, _grey(images), factors),
    "contrast": _contrast,
    "brightness": lambda images, factors: _blend(images, torch.zeros_like(images), factors),
    "sharpness": _sharpness,
    "blur": _blur,
    "cutout": _torch_cutout,
    "tf_autocontrast": lambda images, _: _autocontrast(images, torch.float32),
    "tf_color": _tf_color,
    "tf_contrast": lambda images, factors: _blend(
        images, torch.full_like(images, _flat_level(images.shape[-1])), factors
    ),
    "tf_sharpness": _tf_sharpness,
    "tf_warp": _torch_nearest,
}


def with_torch(images: Tensor, fill: tuple[int, ...], operations: Operations) -> Tensor:
    """Apply operations to a batch uint8 (n, 3, S, S), on its device and in place, without waiting for a GPU."""
    names: list[str] = []
    arrays: list[np.ndarray] = [np.array(fill, dtype=np.uint8)]
    affine = _in_pixels(operations.affine, images.shape[-1])
    for layer, codes in enumerate(operations.codes.T):
        for name in sorted({NAMES[code] for code in codes} - {NAMES[NONE]}):
            chosen = np.flatnonzero(codes == NAMES.index(name))
            names.append(name)
            drawn = (affine if name in WARPS else operations.arguments)[chosen, layer]
            arrays += [chosen, _box_weights(drawn) if name == "blur" else drawn]
    colour, *pairs = to_device(*map(torch.from_numpy, arrays), device=images.device)
    for name, samples, values in zip(names, pairs[::2], pairs[1::2]):
        old = images[samples]
        if name in AFFINE or name == "bicubic_warp":
            new = _warp(old, values, colour.view(1, 3, 1, 1), bicubic=name not in AFFINE)
        else:
            new = _TORCH[name](old, values)
        images[samples] = new
    return images
