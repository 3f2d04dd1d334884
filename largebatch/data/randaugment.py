"""RandAugment, AutoAugment, 3-Augment: draw the operations of each sample, pure functions of (seed, epoch, sample).

The draws are the arguments of Pillow's functions. One thing differs from timm's RandAugment: an operation that keeps no
bit of an image makes it black; timm with Pillow 13 ends in an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from largebatch.data.order import uniform

NAMES = (
    "none", "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "color",
    "contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y", "blur", "cutout",
    "tf_contrast", "tf_warp", "bicubic_warp", "tf_autocontrast", "tf_color", "tf_sharpness",
)  # fmt: skip
NUM_RAND = 15  # operations of timm's RandAugment: those after none, up to translate_y
NONE = 0
CODES = {name: code for code, name in enumerate(NAMES)}
AFFINE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
WARPS = (*AFFINE, "tf_warp", "bicubic_warp")
TF = (*(f"tf_{name}" if f"tf_{name}" in NAMES else name for name in NAMES[1 : 1 + NUM_RAND]), "cutout")

FIRST_DRAW = 64  # the draws of layer l are numbered FIRST_DRAW + 8l + 0 .. 7; lower numbers belong to `order`
_OPERATION, _APPLY, _RADIUS, _ANGLE, _SIGN, _FILTER, _DRAWS = 0, 1, 2, 3, 4, 5, 8


@dataclass(frozen=True, eq=False)
class Operations:
    """One operation per sample and layer, with its argument."""

    codes: np.ndarray
    """(n, k) int64, positions in NAMES"""
    arguments: np.ndarray
    """(n, k) float64: degrees for rotate, pixels per pixel for shears, fractions of the image's side for translations;
    a threshold, an addend or the number of bits to keep for operations on grey levels; a factor for blends; pixels for
    blur, the standard deviation; for cutout, a box of side 2p around (x, y) in an image of side S, (p · S + y) · S + x;
    else 0"""
    affine: np.ndarray
    """(n, k, 2, 3) float64: from points of an operation's output to points of its input, see `matrices`"""

    def warped_by(self, name: str, where: np.ndarray | bool = True) -> Operations:
        """Return the same operations, with `name` in place of the affine ones."""
        affine = np.isin(self.codes, [CODES[name] for name in AFFINE])
        return replace(self, codes=np.where(affine & where, CODES[name], self.codes))


# -- strength to argument ----------------------------------------------------------------------------------------------

# From the strength, which is 1 at the end of the scale, and a sign, +1 or -1, to the argument of an operation.
Level = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _signed(most: float) -> Level:
    return lambda level, sign: level * most * sign


_RAND_GEOMETRY: dict[str, Level] = {
    "rotate": _signed(30.0),
    "shear_x": _signed(0.3),
    "shear_y": _signed(0.3),
    "translate_x": _signed(0.45),
    "translate_y": _signed(0.45),
}
_BLENDS = ("color", "contrast", "brightness", "sharpness")
RAND_INCREASING: dict[str, Level] = {
    **_RAND_GEOMETRY,
    "posterize": lambda level, sign: np.maximum(0, 4 - np.trunc(level * 4)),
    "solarize": lambda level, sign: 256 - np.minimum(256, np.trunc(level * 256)),
    "solarize_add": lambda level, sign: np.minimum(128, np.trunc(level * 110)),
    **{name: lambda level, sign: np.maximum(0.1, 1.0 + sign * (level * 0.9)) for name in _BLENDS},
}
RAND_PLAIN: dict[str, Level] = RAND_INCREASING | {  # some operations get weaker with the level
    "posterize": lambda level, sign: np.minimum(8, np.trunc(level * 4)),
    "solarize": lambda level, sign: np.minimum(256, np.trunc(level * 256)),
    **{name: lambda level, sign: level * 1.8 + 0.1 for name in _BLENDS},
}
# TensorFlow takes numbers modulo 256 that exceed a byte, so solarize inverts at magnitude 10. Its shifts take at most 7
# bits, so posterize keeps one bit where the formula gives none, or more than 8.
TF_PLAIN: dict[str, Level] = RAND_PLAIN | {
    "posterize": lambda level, sign: np.where((level >= 0.25) & (level < 2.25), np.trunc(level * 4), 1),
    "solarize": lambda level, sign: np.trunc(level * 256) % 256,
    "solarize_add": lambda level, sign: np.minimum(255, np.trunc(level * 110)),
    **{f"tf_{name}": RAND_PLAIN[name] for name in ("color", "contrast", "sharpness")},
}
AUTO: dict[str, Level] = _RAND_GEOMETRY | {
    "translate_x": _signed(150 / 331),
    "translate_y": _signed(150 / 331),
    "posterize": lambda level, sign: 8 - np.rint(level * 4),
    "solarize": lambda level, sign: np.ceil(255 - level * 255 - 1e-6),  # rounded up: levels are whole
    **{name: lambda level, sign: 1.0 + sign * (level * 0.9) for name in _BLENDS},
}


def _uniform(seed: int, epochs: np.ndarray, samples: np.ndarray, layers: int) -> Callable[[int], np.ndarray]:
    firsts = range(FIRST_DRAW, FIRST_DRAW + _DRAWS * layers, _DRAWS)
    return lambda number: np.stack([uniform(seed, epochs, samples, first + number) for first in firsts], axis=-1)


def _operations(codes: np.ndarray, levels: np.ndarray, signs: np.ndarray, scales: dict[str, Level]) -> Operations:
    arguments = np.zeros(codes.shape)
    for name, scale in scales.items():
        chosen = codes == CODES[name]
        arguments[chosen] = scale(levels[chosen], signs[chosen])
    return Operations(codes, arguments, matrices(codes, arguments))


# -- policies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandAugment:
    """Apply `num_ops` of the 15 operations, drawn independently, each with probability `prob`, as in timm.

    The strength is drawn from N(magnitude, magnitude_std) and clipped to 0 .. magnitude_max, on a scale of 10. With
    `increasing`, more strength always changes an image more (https://arxiv.org/abs/1909.13719). `bicubic` is the
    probability of a shear, shift or rotation to be bicubic, not bilinear.
    """

    magnitude: float = 10.0
    num_ops: int = 2
    prob: float = 0.5
    magnitude_std: float = 0.0
    magnitude_max: float = 10.0
    increasing: bool = False
    bicubic: float = 0.0

    def draw(self, seed: int, epochs: np.ndarray, samples: np.ndarray) -> Operations:
        u = _uniform(seed, epochs, samples, self.num_ops)
        codes = 1 + np.floor(u(_OPERATION) * NUM_RAND).astype(np.int64)
        normal = np.sqrt(-2 * np.log1p(-u(_RADIUS))) * np.cos(2 * np.pi * u(_ANGLE))  # Box and Muller, 1958
        magnitudes = np.clip(self.magnitude + self.magnitude_std * normal, 0.0, self.magnitude_max)
        codes = np.where(u(_APPLY) < self.prob, codes, NONE)
        scales = RAND_INCREASING if self.increasing else RAND_PLAIN
        drawn = _operations(codes, magnitudes / 10, np.where(u(_SIGN) < 0.5, -1.0, 1.0), scales)
        return drawn.warped_by("bicubic_warp", where=u(_FILTER) < self.bicubic)


@dataclass(frozen=True)
class TensorFlowRandAugment:
    """Always apply `num_ops` of 16 operations, drawn independently, as google-research/big_vision does in TensorFlow.

    Warps take the nearest pixel and fill with 128. Translations and cutout are in pixels, whatever `img_size` is.
    Contrast blends with the grey level img_size² / 256 in place of the mean. All operations round as TensorFlow's.
    """

    magnitude: float = 10.0
    num_ops: int = 2
    img_size: int = 224

    def draw(self, seed: int, epochs: np.ndarray, samples: np.ndarray) -> Operations:
        u, level, side = _uniform(seed, epochs, samples, self.num_ops), self.magnitude / 10, self.img_size
        codes = np.array([CODES[name] for name in TF])[np.floor(u(_OPERATION) * len(TF)).astype(np.int64)]
        scales = TF_PLAIN | dict.fromkeys(("translate_x", "translate_y"), _signed(100 / side))
        drawn = _operations(codes, np.full(codes.shape, level), np.where(u(_SIGN) < 0.5, -1.0, 1.0), scales)
        y, x = np.floor(u(_RADIUS) * side), np.floor(u(_ANGLE) * side)
        boxes = (np.trunc(level * 40) * side + y) * side + x
        arguments = np.where(codes == CODES["cutout"], boxes, drawn.arguments)
        drawn.affine[codes == CODES["rotate"], :, 2] *= 1 - 1 / side  # pixels have whole numbers, from 0 to side - 1
        return Operations(codes, arguments, drawn.affine).warped_by("tf_warp")


@dataclass(frozen=True)
class AutoAugment:
    """Draw one of the sub-policies for each sample, and apply each of its operations with its own probability.

    `sub_policies` hold operation, probability and strength from 0 to 9, as torchvision's: ten even steps over the
    ranges of https://arxiv.org/abs/1805.09501, with a random sign; shifts are at most 150/331 of the side.
    """

    sub_policies: tuple[tuple[tuple[str, float, int], ...], ...]

    def draw(self, seed: int, epochs: np.ndarray, samples: np.ndarray) -> Operations:
        table = self.sub_policies
        codes = np.array([[CODES[name] for name, _, _ in steps] for steps in table])
        probs = np.array([[prob for _, prob, _ in steps] for steps in table])
        levels = np.array([[level / 9 for _, _, level in steps] for steps in table])
        u = _uniform(seed, epochs, samples, codes.shape[1])
        chosen = np.floor(uniform(seed, epochs, samples, FIRST_DRAW + _OPERATION) * len(table)).astype(np.int64)
        applied = np.where(u(_APPLY) < probs[chosen], codes[chosen], NONE)
        signs = np.where(u(_SIGN) < 0.5, -1.0, 1.0)
        return _operations(applied, levels[chosen], signs, AUTO)


CIFAR10 = AutoAugment(
    (
        (("invert", 0.1, 0), ("contrast", 0.2, 6)),
        (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
        (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
        (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
        (("autocontrast", 0.5, 0), ("equalize", 0.9, 0)),
        (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
        (("color", 0.4, 3), ("brightness", 0.6, 7)),
        (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
        (("equalize", 0.6, 0), ("equalize", 0.5, 0)),
        (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
        (("color", 0.7, 7), ("translate_x", 0.5, 8)),
        (("equalize", 0.3, 0), ("autocontrast", 0.4, 0)),
        (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
        (("brightness", 0.9, 6), ("color", 0.2, 8)),
        (("solarize", 0.5, 2), ("invert", 0.0, 0)),
        (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
        (("equalize", 0.2, 0), ("equalize", 0.6, 0)),
        (("color", 0.9, 9), ("equalize", 0.6, 0)),
        (("autocontrast", 0.8, 0), ("solarize", 0.2, 8)),
        (("brightness", 0.1, 3), ("color", 0.7, 0)),
        (("solarize", 0.4, 5), ("autocontrast", 0.9, 0)),
        (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
        (("autocontrast", 0.9, 0), ("solarize", 0.8, 3)),
        (("equalize", 0.8, 0), ("invert", 0.1, 0)),
        (("translate_y", 0.7, 9), ("autocontrast", 0.9, 0)),
    )
)


@dataclass(frozen=True)
class ThreeAugment:
    """Make each image grey, solarised or blurred, then jitter its colours (https://arxiv.org/abs/2204.07118).

    Blur has a standard deviation of 0.1 to 2 pixels. Brightness, contrast and saturation get factors of 1 - `jitter` to
    1 + `jitter`, in a random order, as torchvision's.
    """

    jitter: float = 0.3

    def draw(self, seed: int, epochs: np.ndarray, samples: np.ndarray) -> Operations:
        u = _uniform(seed, epochs, samples, 4)
        pick, amount = u(_OPERATION), u(_RADIUS)
        codes = np.array([CODES[name] for name in ("color", "solarize", "blur")])[np.floor(3 * pick[:, 0]).astype(int)]
        argument = np.select([codes == CODES["solarize"], codes == CODES["blur"]], [128.0, 0.1 + 1.9 * amount[:, 0]])
        jitters = np.array([CODES[name] for name in ("brightness", "contrast", "color")])[pick[:, 1:].argsort(axis=1)]
        codes = np.column_stack([codes, jitters])
        arguments = np.column_stack([argument, 1 + self.jitter * (2 * amount[:, 1:] - 1)])
        return Operations(codes, arguments, matrices(codes, arguments))


Policy = RandAugment | TensorFlowRandAugment | AutoAugment | ThreeAugment
NAMED: dict[str, Policy | None] = {"": None, "cifar10": CIFAR10, "3a": ThreeAugment()}


BICUBIC = {"bilinear": 0.0, "bicubic": 1.0, "random": 0.5}  # the part of warps, by the filter that resizes images


def parse(text: str, img_size: int = 224, interpolation: str = "bilinear") -> Policy | None:
    """Return the policy for "cifar10", "3a", "tf-m10-n2" or timm's "rand-m9-mstd0.5-inc1", None for ""; or ValueError.

    m: magnitude (default 10), n: number of operations (2), p: probability of each (0.5), mstd: standard deviation of
    the magnitude (0), mmax: its upper bound (10), inc1: increasing.
    """
    if text in NAMED:
        return NAMED[text]
    keys = {"m": "magnitude", "n": "num_ops", "p": "prob", "mstd": "magnitude_std", "mmax": "magnitude_max"}
    name, *parts = text.split("-")
    letters = {"rand": "m|n|p|mstd|mmax|inc", "tf": "m|n"}.get(name, "")
    matches = [re.fullmatch(rf"({letters})(\d+\.?\d*)", part) for part in parts]
    given = {match[1]: float(match[2]) for match in matches if match}
    known = letters and all(matches) and len(given) == len(parts)
    whole = all(given.get(key, 1) % 1 == 0 for key in ("m", "n", "mmax", "inc"))  # timm truncates or refuses others
    small = given.get("p", 0) <= 1 and given.get("mstd", 0) <= 100 and given.get("inc", 0) <= 1
    if not (known and whole and small and given.get("n", 1) and given.get("mmax", 1)):
        raise ValueError(
            f"--augment.auto_augment is {text!r}: expected cifar10, 3a, tf and any of m and n once, such as "
            "tf-m10-n2, or rand and any of m, n, p, mstd, mmax and inc once, such as rand-m9-mstd0.5-inc1 (m, n, mmax "
            "whole, n and mmax above 0, p 0 to 1, mstd up to 100, inc 0 or 1)."
        )
    increasing, num_ops = bool(given.pop("inc", 0)), int(given.pop("n", 2))
    if name == "tf":
        return TensorFlowRandAugment(given.get("m", 10), num_ops, img_size)
    numbers = {keys[key]: value for key, value in given.items()} | {"bicubic": BICUBIC[interpolation]}
    return RandAugment(increasing=increasing, num_ops=num_ops, **numbers)


def draw(policy: Policy | None, seed: int, epochs: np.ndarray, samples: np.ndarray) -> Operations:
    """Draw the operations of each sample; without a policy the arrays are (n, 0)."""
    if policy is None:
        no_layers = np.zeros((len(samples), 0))
        return _operations(no_layers.astype(np.int64), no_layers, no_layers, {})
    return policy.draw(seed, epochs, samples)


# -- geometry ----------------------------------------------------------------------------------------------------------


def matrices(codes: np.ndarray, arguments: np.ndarray) -> np.ndarray:
    """Return affine maps (..., 2, 3) from points of the output to points of the input, as Pillow's, on the unit square.

    A map times (x, y, 1) of the output is (x, y) of the input; y goes down.
    """
    a, angle = arguments, np.radians(arguments)
    affine = np.zeros((*codes.shape, 2, 3))
    affine[..., 0, 0] = affine[..., 1, 1] = 1
    for name, row, column in (("shear_x", 0, 1), ("shear_y", 1, 0), ("translate_x", 0, 2), ("translate_y", 1, 2)):
        affine[..., row, column] += np.where(codes == CODES[name], a, 0)
    turned, cos, sin = codes == CODES["rotate"], np.cos(angle), np.sin(angle)
    turn = np.stack([cos, -sin, (1 - cos + sin) / 2, sin, cos, (1 - cos - sin) / 2], axis=-1)  # about the centre
    affine[turned] = turn[turned].reshape(-1, 2, 3)
    return affine
