"""RandAugment and AutoAugment: draws against the published distributions, operations against Pillow and timm.

The torch operations of the GPU path run on the CPU here. They give Pillow's levels to the last bit.
"""

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy import stats
from sklearn.datasets import load_sample_images

import zoo  # noqa: F401  # lets torchvision be imported beside any build of torch
from largebatch.data import order, randaugment
from largebatch.data.randaugment import AFFINE, CODES, NAMES, NONE, WARPS, Operations, RandAugment, parse
from largebatch.data.randaugment_ops import fill_colour, with_pillow, with_torch
from largebatch.data.token_labels import warps

FILL = fill_colour((0.485, 0.456, 0.406))
SIDE = 48
STANDARD = "rand-m9-mstd0.5-inc1"
FILTERS = ("bilinear", "bicubic", "random")
TWO_THOUSAND = np.zeros(2000, dtype=int), np.arange(2000)
GOLDEN_CODES = [[3, 10], [9, 12], [0, 12]]
GOLDEN_ARGUMENTS = [[0.0, 1.8226553340478402], [0.27206049350209704, -0.28763855965917223], [0.0, 0.25951120166059827]]
GOLDEN_3A_CODES = [[8, 8, 10, 9], [6, 9, 8, 10], [8, 9, 8, 10]]
GOLDEN_3A_ARGUMENTS = [
    [0.0, 0.9077414843807078, 0.9206098213534827, 1.0141562057956173],
    [128.0, 1.1066755981599217, 0.9225341630765067, 0.9926229799004308],
    [0.0, 0.8848300926777002, 1.2012912517335745, 1.2897149188510104],
]
TIMMS = {  # how timm calls the operations of its increasing set
    "autocontrast": "AutoContrast", "equalize": "Equalize", "invert": "Invert", "rotate": "Rotate",
    "posterize": "PosterizeIncreasing", "solarize": "SolarizeIncreasing", "solarize_add": "SolarizeAdd",
    "color": "ColorIncreasing", "contrast": "ContrastIncreasing", "brightness": "BrightnessIncreasing",
    "sharpness": "SharpnessIncreasing", "shear_x": "ShearX", "shear_y": "ShearY", "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}  # fmt: skip
SIGNED = {"rotate", "color", "contrast", "brightness", "sharpness", *AFFINE}


@pytest.fixture(scope="module")
def photographs():
    """Windows of two photographs, flat and dark ones, and noise: (24, SIDE, SIDE, 3) uint8."""
    rng, found = np.random.default_rng(0), []
    for photograph in load_sample_images().images:
        for _ in range(8):
            y, x = rng.integers(0, [photograph.shape[0] - 5 * SIDE, photograph.shape[1] - 5 * SIDE])
            window = photograph[y : y + 5 * SIDE, x : x + 5 * SIDE]
            found.append(np.asarray(Image.fromarray(window).resize((SIDE, SIDE))))
    flat, dark = np.full_like(found[0], 77), found[0] // 8
    few = np.where(rng.random((SIDE, SIDE, 3)) < 0.001, 200, 3).astype(np.uint8)
    one = flat.copy()
    one[5, 7] = (76, 80, 255)
    noise = [rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(4)]
    return np.stack([*found, flat, dark, few, one, *noise])


def operations(*arrays):
    """Codes, levels and signs (n, k)."""
    return randaugment._operations(*(np.asarray(array) for array in arrays), randaugment.RAND_INCREASING)


def one_by_one(images, ops, fill=FILL):
    return np.stack([with_pillow(i, fill, *drawn) for i, *drawn in zip(images, ops.codes, ops.arguments, ops.affine)])


def together(images, ops, fill=FILL):
    batch = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return with_torch(batch, fill, ops).permute(0, 2, 3, 1).numpy()


def timms(image, steps, fill=FILL, interpolation=Image.Resampling.BILINEAR):
    """timm's chain of operations at given strengths; it draws a sign by asking whether a uniform number is above .5."""
    from timm.data.auto_augment import AugmentOp

    for name, level, sign in steps:
        hparams = {"img_mean": fill, "interpolation": interpolation}
        operation = AugmentOp(TIMMS[name], prob=1.0, magnitude=10 * level, hparams=hparams)
        seed = next(s for s in range(100) if (random.Random(s).random() > 0.5) == (sign < 0))
        random.seed(seed)
        image = operation(image)
    return image


# -- operations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TIMMS)
def test_each_operation_equals_timms(photographs, name):
    """At strengths from nothing to nearly the scale's end, with both signs: to the bit."""
    for level, sign in ((0.0, 1.0), (0.05, -1.0), (0.37, 1.0), (0.37, -1.0), (0.99, 1.0), (0.99, -1.0)):
        ops = operations([[CODES[name]]] * len(photographs), [[level]] * len(photographs), [[sign]] * len(photographs))
        expected = np.stack([np.asarray(timms(Image.fromarray(i), [(name, level, sign)])) for i in photographs])
        pillow = one_by_one(photographs, ops)
        assert np.array_equal(pillow, expected), (level, np.abs(pillow.astype(int) - expected).max())
        assert np.array_equal(together(photographs, ops), pillow), level
        assert level < 0.1 or not np.array_equal(pillow, photographs)


@pytest.mark.parametrize("name", AFFINE)
def test_a_bicubic_warp_equals_timms(photographs, name):
    for level, sign in ((0.0, 1.0), (0.05, -1.0), (0.37, 1.0), (0.99, -1.0)):
        ops = operations([[CODES[name]]] * len(photographs), [[level]] * len(photographs), [[sign]] * len(photographs))
        steps, cubic = [(name, level, sign)], Image.Resampling.BICUBIC
        expected = np.stack([np.asarray(timms(Image.fromarray(i), steps, interpolation=cubic)) for i in photographs])
        pillow = one_by_one(photographs, ops.warped_by("bicubic_warp"))
        assert np.array_equal(pillow, expected)
        assert np.array_equal(together(photographs, ops.warped_by("bicubic_warp")), pillow)
        assert level < 0.1 or not np.array_equal(pillow, one_by_one(photographs, ops))


def test_warps_have_the_filter_of_the_resize():
    """As timm's: of a random filter, each warp by itself, independent of all else."""
    codes = {name: randaugment.draw(parse(STANDARD, interpolation=name), 0, *TWO_THOUSAND).codes for name in FILTERS}
    affine, cubic = np.isin(codes["bilinear"], [CODES[name] for name in AFFINE]), CODES["bicubic_warp"]
    assert affine.any() and (np.where(affine, cubic, codes["bilinear"]) == codes["bicubic"]).all()
    either = codes["random"][affine] == cubic
    assert (codes["random"] == np.where(codes["random"] == cubic, cubic, codes["bilinear"])).all()
    assert stats.binomtest(int(either.sum()), len(either)).pvalue > 0.001
    both = either[: len(either) // 2 * 2].reshape(-1, 2)
    assert stats.fisher_exact(np.histogram2d(*both.T, bins=2)[0]).pvalue > 0.001


def test_nothing_is_left_of_a_posterized_image_without_bits(photographs):
    ops = operations([[CODES["posterize"]]] * len(photographs), [[1.0]] * len(photographs), [[1.0]] * len(photographs))
    assert one_by_one(photographs, ops).max() == together(photographs, ops).max() == 0


def test_chains_of_two_equal_timms(photographs):
    """Fifty pairs in their order: timm's own chain, Pillow's and torch's images."""
    rng = np.random.default_rng(1)
    codes, levels = rng.integers(1, 16, (50, 2)), rng.uniform(0, 0.99, (50, 2))
    signs = rng.choice([-1.0, 1.0], (50, 2))
    images, ops = photographs[np.arange(50) % len(photographs)], operations(codes, levels, signs)
    expected = []
    for image, *steps in zip(images, codes, levels, signs):
        chain = [(NAMES[code], level, sign) for code, level, sign in zip(*steps)]
        expected.append(np.asarray(timms(Image.fromarray(image), chain)))
    ours = one_by_one(images, ops)
    assert np.array_equal(ours, np.stack(expected))
    assert np.array_equal(together(images, ops), ours)
    swapped = Operations(codes[:, ::-1], ops.arguments[:, ::-1], ops.affine[:, ::-1])
    assert not np.array_equal(one_by_one(images, swapped), ours)


def test_a_batch_that_draws_everything_at_once(photographs):
    images = photographs[np.arange(200) % len(photographs)]
    for text in (STANDARD, "rand-m20-n3-p0.9-mmax20-mstd3", "cifar10", "3a", "tf-m10-n2"):
        ops = randaugment.draw(parse(text, SIDE, "random"), 3, np.zeros(200, dtype=int), np.arange(200))
        untouched = (ops.codes == NONE).all(axis=1)
        ours = one_by_one(images, ops)
        assert np.array_equal(ours, together(images, ops))
        assert np.array_equal(ours[untouched], images[untouched]) and untouched.any() == (text in (STANDARD, "cifar10"))


@pytest.mark.parametrize("side", [1, 2, 3])
def test_tiny_images(side):
    images = np.random.default_rng(0).integers(0, 256, (45, side, side, 3), dtype=np.uint8)
    ops = operations(np.arange(45)[:, None] % 15 + 1, np.full((45, 1), 0.6), np.ones((45, 1)))
    assert np.array_equal(one_by_one(images, ops), together(images, ops))


# -- geometry ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [("rotate", "shear_x"), ("translate_y", "rotate"), ("shear_y", "color"),
                                  ("translate_x", "shear_y"), ("equalize", "invert")])  # fmt: skip
def test_the_warp_says_where_pillow_took_a_pixel_from(pair):
    """Images whose levels are their own coordinates: what timm's operations leave is where each pixel came from."""
    side, level = 200, np.array([[0.5, 0.4]])
    ops = operations([[CODES[name] for name in pair]], level, [[1.0, -1.0]])
    ((*_, affine),) = warps(ops.affine)
    moves = [(name, strength, sign) for name, strength, sign in zip(pair, level[0], (1.0, -1.0)) if name in AFFINE]
    axis = np.arange(side, dtype=np.uint8)
    coordinates = np.stack([*np.meshgrid(axis, axis), np.full((side, side), 200, np.uint8)], axis=-1)
    moved = np.asarray(timms(Image.fromarray(coordinates), moves, fill=(0, 0, 0)))
    y, x = np.nonzero(moved[:, :, 2] == 200)  # inside at both operations
    points = np.stack([x + 0.5, y + 0.5, np.full(len(x), side)]) / side
    theirs = (moved[y, x, :2] + 0.5) / side
    assert len(x) > 0.3 * side**2
    assert np.abs((affine @ points).T - theirs).max() < 2.5 / side  # two cuts to whole levels, and the border's half
    assert np.abs((affine @ points).T - theirs).mean() < 1 / side
    assert any(name in AFFINE for name in pair) or np.array_equal(affine, np.eye(2, 3))


@pytest.mark.parametrize("text", [STANDARD, "tf-m10-n2"])
def test_the_warp_is_exact(text):
    """Against products of 3 x 3 matrices, and Pillow's own matrix of a rotation."""
    policy = parse(text)
    ops = randaugment.draw(policy, 0, np.zeros(300, dtype=int), np.arange(300))
    whole = np.zeros((300, 2, 3, 3))
    whole[:, :, :2], whole[:, :, 2, 2] = ops.affine, 1
    warp = warps(ops.affine)[:, -1]
    assert np.abs(warp - (whole[:, 0] @ whole[:, 1])[:, :2]).max() < 1e-15
    resting = ~np.isin(ops.codes, [CODES[name] for name in WARPS]).any(axis=1)
    assert resting.any() and (warp[resting] == np.eye(2, 3)).all()
    corner = randaugment.matrices(np.array(CODES["rotate"]), np.array(90.0)) @ [0, 0, 1]
    assert corner == pytest.approx([1, 0])  # counter-clockwise: the upper right corner comes to the upper left


# -- draws -------------------------------------------------------------------------------------------------------------


def drawn(text, count=30_000, seed=0):
    return randaugment.draw(parse(text), seed, np.zeros(count, dtype=int), np.arange(count))


def test_operations_are_uniform_with_replacement_and_half_of_them_applied():
    codes = drawn(STANDARD).codes
    for layer in (0, 1):
        counts = np.bincount(codes[:, layer], minlength=16)
        assert stats.binomtest(int(counts[NONE]), len(codes), 0.5).pvalue > 1e-3
        assert stats.chisquare(counts[1:]).pvalue > 1e-3
    both = drawn("rand-p1").codes
    pairs = np.bincount(16 * both[:, 0] + both[:, 1], minlength=256).reshape(16, 16)
    assert (pairs[0] == 0).all() and stats.chisquare(pairs[1:, 1:].ravel()).pvalue > 1e-3


def test_magnitudes_are_normal_and_cut():
    ops = drawn(STANDARD, 60_000)
    angles = ops.arguments[ops.codes == CODES["rotate"]]
    magnitudes = np.abs(angles) / 3
    uncut = magnitudes[magnitudes < 10 - 1e-9]
    assert stats.kstest(uncut, stats.truncnorm(-18, 2, 9, 0.5).cdf).pvalue > 1e-3
    assert stats.binomtest(int(len(magnitudes) - len(uncut)), len(magnitudes), stats.norm.sf(2)).pvalue > 1e-3
    assert stats.binomtest(int((angles < 0).sum()), len(angles), 0.5).pvalue > 1e-3
    factors = ops.arguments[ops.codes == CODES["color"]]
    assert factors.min() == pytest.approx(0.1) and 1.89 < factors.max() <= 1.9
    low = drawn("rand-m1-mstd1-inc1", 60_000)
    angles, bits = (low.arguments[low.codes == CODES[name]] for name in ("rotate", "posterize"))
    assert stats.binomtest(int((angles == 0).sum()), len(angles), stats.norm.cdf(-1)).pvalue > 1e-3  # none below 0
    assert bits.max() == 4
    beyond = drawn("rand-m30-mmax40-mstd3-inc1")
    assert np.abs(beyond.arguments[beyond.codes == CODES["rotate"]]).max() > 100


def test_what_is_drawn_is_a_function_of_seed_epoch_and_sample():
    samples, epochs = np.arange(500), np.arange(500) % 3
    for policy in (parse(STANDARD), randaugment.CIFAR10, parse("3a"), parse("tf")):
        whole = randaugment.draw(policy, 5, epochs, samples)
        part = randaugment.draw(policy, 5, epochs[77:99], samples[77:99])
        assert np.array_equal(part.codes, whole.codes[77:99]) and np.array_equal(part.affine, whole.affine[77:99])
        for other in (randaugment.draw(policy, 6, epochs, samples), randaugment.draw(policy, 5, epochs + 1, samples)):
            assert 0.2 < (other.codes != whole.codes).mean() < 0.9


def test_draws_are_fixed_for_good_and_apart_from_the_crops():
    # a resumed run needs what it began with: these numbers may never change
    ops = randaugment.draw(parse(STANDARD), 7, np.array([0, 3, 3]), np.array([5, 5, 8]))
    assert ops.codes.tolist() == GOLDEN_CODES
    assert ops.arguments == pytest.approx(np.array(GOLDEN_ARGUMENTS))
    ops = randaugment.draw(parse("3a"), 7, np.array([0, 3, 3]), np.array([5, 5, 8]))
    assert (ops.codes.tolist(), ops.arguments.tolist()) == (GOLDEN_3A_CODES, GOLDEN_3A_ARGUMENTS)
    assert randaugment.FIRST_DRAW > order._INTERPOLATION > order._FLIP


def test_strengths_that_do_not_increase_are_timms():
    from timm.data.auto_augment import LEVEL_TO_ARG

    for name in ("posterize", "solarize", "solarize_add", "color", "sharpness"):
        call = LEVEL_TO_ARG["SolarizeAdd" if name == "solarize_add" else name.capitalize()]
        for magnitude in (0, 1, 4.7, 9, 10):
            ours = randaugment.RAND_PLAIN[name](np.array([magnitude / 10]), np.array([1.0]))
            assert ours.tolist() == pytest.approx(call(magnitude, {})), (name, magnitude)


# -- AutoAugment -------------------------------------------------------------------------------------------------------


def test_cifar10_is_torchvisions_table():
    """Operations, probabilities and arguments; torchvision cuts shifts to whole pixels later."""
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy

    theirs = AutoAugment(AutoAugmentPolicy.CIFAR10)
    space = theirs._augmentation_space(10, (331, 331))
    names = {"".join(part.capitalize() for part in name.split("_")): name for name in NAMES} | {
        "AutoContrast": "autocontrast"
    }
    assert len(randaugment.CIFAR10.sub_policies) == len(theirs.policies) == 25
    for ours, steps in zip(randaugment.CIFAR10.sub_policies, theirs.policies):
        assert [step[:2] for step in ours] == [(names[name], prob) for name, prob, _ in steps]
        for (name, _, level), (their_name, _, their_level) in zip(ours, steps):
            assert level == (their_level or 0)
            magnitudes, signed = space[their_name]
            assert signed == (name in SIGNED)
            for sign in (1.0, -1.0):
                ops = randaugment._operations(
                    np.array([CODES[name]]), np.array([level / 9]), np.array([sign]), randaugment.AUTO
                )
                expected = float(magnitudes[their_level]) if their_level is not None else 0.0
                expected *= sign if signed else 1
                expected = 1 + expected if name in randaugment._BLENDS else expected
                expected /= 331 if name.startswith("translate") else 1
                expected = np.ceil(expected) if name == "solarize" else expected
                assert ops.arguments[0] == pytest.approx(expected, abs=1e-6), (name, level)


def test_sub_policies_are_uniform_and_operations_have_their_probabilities():
    count, table = 50_000, randaugment.CIFAR10.sub_policies
    codes = drawn("cifar10", count).codes
    expected = np.zeros((16, 16))
    for (first, p, _), (second, q, _) in table:
        for code, weight in ((CODES[first], p), (NONE, 1 - p)):
            expected[code, CODES[second]] += weight * q / len(table)
            expected[code, NONE] += weight * (1 - q) / len(table)
    found = np.zeros((16, 16))
    np.add.at(found, (codes[:, 0], codes[:, 1]), 1)
    assert (found[expected == 0] == 0).all()
    assert stats.chisquare(found[expected > 0], count * expected[expected > 0]).pvalue > 1e-3


# -- 3-Augment ---------------------------------------------------------------------------------------------------------


def deits(image, codes, arguments):
    """What DeiT III's transforms make of an image, with torchvision and Pillow, by the draws given."""
    import torchvision.transforms.functional as F
    from torchvision.transforms import Grayscale

    first, radius = NAMES[codes[0]], float(arguments[0])
    if first == "blur":
        image = image.filter(ImageFilter.GaussianBlur(radius=radius))
    else:
        assert radius == (0 if first == "color" else 128)
        image = Grayscale(3)(image) if first == "color" else ImageOps.solarize(image)
    jitters = {"brightness": F.adjust_brightness, "contrast": F.adjust_contrast, "color": F.adjust_saturation}
    for code, factor in zip(codes[1:], arguments[1:]):
        image = jitters[NAMES[code]](image, float(factor))
    return image


def test_three_augment_equals_deits_to_the_bit(photographs):
    """Of 300 images, so a hundred of each kind, one by one and as a batch."""
    images = photographs[np.arange(300) % len(photographs)]
    ops = randaugment.draw(parse("3a"), 3, np.zeros(300, dtype=int), np.arange(300))
    drawn = zip(images, ops.codes, ops.arguments)
    expected = np.stack([np.asarray(deits(Image.fromarray(image), *steps)) for image, *steps in drawn])
    assert np.array_equal(one_by_one(images, ops), expected)
    assert np.array_equal(together(images, ops), expected)


def test_three_augment_has_the_published_chances():
    ops = drawn("3a")
    kinds = [CODES[name] for name in ("color", "solarize", "blur")]
    counts = [(ops.codes[:, 0] == kind).sum() for kind in kinds]
    assert sum(counts) == 30_000 and stats.chisquare(counts).pvalue > 1e-3
    radii = ops.arguments[ops.codes[:, 0] == CODES["blur"], 0]
    assert stats.kstest(radii, stats.uniform(0.1, 1.9).cdf).pvalue > 1e-3
    orders, counts = np.unique(ops.codes[:, 1:], axis=0, return_counts=True)
    assert {*orders[0].tolist()} == {CODES[name] for name in ("brightness", "contrast", "color")}
    assert len(orders) == 6 and stats.chisquare(counts).pvalue > 1e-3
    for name in ("brightness", "contrast", "color"):
        factors = ops.arguments[:, 1:][ops.codes[:, 1:] == CODES[name]]
        assert len(factors) == 30_000 and stats.kstest(factors, stats.uniform(0.7, 0.6).cdf).pvalue > 1e-3
    assert np.abs(np.corrcoef(np.column_stack([ops.arguments[:, 1:], ops.codes[:, 0]]).T) - np.eye(4)).max() < 0.03


@pytest.mark.parametrize("side", [1, 2, 3, 48])
def test_blur_in_torch_has_pillows_bits(side):
    """At a thousand standard deviations up to 2, where the box changes its width at 1.41."""
    images = np.random.default_rng(0).integers(0, 256, (1000, side, side, 3), dtype=np.uint8)
    codes, radii = np.full((1000, 1), CODES["blur"]), np.linspace(0.1, 2, 1000)[:, None]
    ops = Operations(codes, radii, randaugment.matrices(codes, radii))
    assert np.array_equal(one_by_one(images, ops), together(images, ops))


# -- RandAugment of big_vision -----------------------------------------------------------------------------------------

TENSORFLOWS = (*list(TIMMS), "cutout")


def big_visions(image, name, magnitude, sign, centre):
    """An operation of big_vision, whose code under TensorFlow 2.21 gave our bits for 50 images of 224 and 160 px."""
    side, level, (y, x) = len(image), magnitude / 10, centre
    if name in AFFINE:
        turn, shear, shift = np.radians(sign * level * 30), sign * level * 0.3, sign * level * 100
        cos, sin, most = np.cos(turn), np.sin(turn), side - 1
        matrices = {
            "rotate": [cos, -sin, (most - (cos - sin) * most) / 2, sin, cos, (most - (sin + cos) * most) / 2],
            "shear_x": [1, shear, 0, 0, 1, 0],
            "shear_y": [1, 0, 0, shear, 1, 0],
            "translate_x": [1, 0, shift, 0, 1, 0],
            "translate_y": [1, 0, 0, 0, 1, shift],
        }
        a, result, (row, column) = np.float32(matrices[name]), np.full_like(image, 128), np.indices((side, side))
        # Halves are rounded away from zero, as by C++'s std::round.
        places = [a[k] * np.float32(column) + a[k + 1] * np.float32(row) + a[k + 2] for k in (0, 3)]
        x, y = (np.copysign(np.floor(np.abs(place) + 0.5), place).astype(int) for place in places)
        inside = (x >= 0) & (x < side) & (y >= 0) & (y < side)
        result[inside] = image[y[inside], x[inside]]
        return result
    if name == "cutout":
        pad, result = int(level * 40), image.copy()
        result[max(0, y - pad) : y + pad, max(0, x - pad) : x + pad] = 128
        return result
    factor = np.float32(level * 1.8 + 0.1)
    if name == "contrast":
        flat = np.float32(min(255, side**2 // 256))
        return ((image - flat) * factor + flat).clip(0, 255).astype(np.uint8)
    if name == "brightness":
        return np.asarray(ImageEnhance.Brightness(Image.fromarray(image)).enhance(float(factor)))
    if name in ("color", "sharpness"):
        degenerate, ones = image.copy(), np.ones(3, np.float32)
        if name == "color":
            parts = np.split(np.float32(image) * np.float32(1 / 255) * np.float32([0.2989, 0.587, 0.114]), 3, axis=-1)
            degenerate[:] = ((parts[0] + parts[1]) + parts[2]) * np.float32(255.5) * ones
        else:
            kernel = np.float32([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / np.float32(13)
            for y, x in np.ndindex(side - 2, side - 2):
                sums = np.zeros(3, np.float32)
                for j, i in np.ndindex(3, 3):  # fused: the product is not rounded
                    sums = np.float32(np.float64(sums) + np.float64(kernel[j, i]) * image[y + j, x + i])
                degenerate[y + 1, x + 1] = sums
        return (degenerate + factor * (np.float32(image) - degenerate)).clip(0, 255).astype(np.uint8)
    if name == "autocontrast":
        low, high = np.float32(image.min(axis=(0, 1))), np.float32(image.max(axis=(0, 1)))
        scale = np.float32(255) / np.maximum(high - low, np.float32(1))
        return np.where(high > low, (image * scale + -low * scale).clip(0, 255), image).astype(np.uint8)
    if name == "posterize":
        dropped = min((8 - int(level * 4)) % 256, 7)
        return image >> dropped << dropped
    if name == "solarize":
        return np.where(image < int(level * 256) % 256, image, 255 - image)
    if name == "solarize_add":
        return np.where(image < 128, np.minimum(255, image + float(int(level * 110))), image).astype(np.uint8)
    return np.asarray(getattr(ImageOps, name)(Image.fromarray(image)))


@pytest.mark.parametrize("magnitude", [0, 3, 10, 15, 25])
def test_the_operations_of_big_vision(photographs, magnitude):
    """To the bit, one by one and as a batch; 200 draws have each operation, and warps of both signs."""
    photographs = photographs[:, 8:40, 8:40]
    images, samples, none = photographs[np.arange(200) % len(photographs)], np.arange(200), np.zeros(200, dtype=int)
    ops = randaugment.draw(parse(f"tf-m{magnitude}-n1", 32), 3, none, samples)
    kind, row, column, sign = (order.uniform(3, none, samples, randaugment.FIRST_DRAW + k) for k in (0, 2, 3, 4))
    names = [TENSORFLOWS[int(16 * u)] for u in kind]
    signs, centres = np.where(sign < 0.5, -1, 1), np.stack([32 * row, 32 * column], axis=-1).astype(int)
    assert {*zip(names, signs)} >= {(name, sign) for name in AFFINE for sign in (-1, 1)} and {*names} == {*TENSORFLOWS}
    expected = [big_visions(*drawn) for drawn in zip(images, names, [magnitude] * 200, signs, centres)]
    found = one_by_one(images, ops)
    wrong = [name for name, ours, theirs in zip(names, found, expected) if not np.array_equal(ours, theirs)]
    assert not wrong
    assert np.array_equal(together(images, ops), found)


def test_big_vision_draws_each_operation_alike_and_always():
    ops = drawn("tf-m10-n2")
    counts = np.bincount(ops.codes.ravel(), minlength=len(NAMES))
    rounded = ("autocontrast", "color", "contrast", "sharpness")
    shares = np.array([name in TENSORFLOWS and name not in (*AFFINE, *rounded) for name in NAMES], dtype=float)
    shares[[CODES[f"tf_{name}"] for name in (*rounded, "warp")]] = *[1] * len(rounded), len(AFFINE)
    assert (counts[shares == 0] == 0).all()
    assert stats.chisquare(counts[shares > 0], 60_000 / 16 * shares[shares > 0]).pvalue > 1e-3
    assert stats.chi2_contingency(stats.contingency.crosstab(*ops.codes.T).count).pvalue > 1e-3
    moves = (ops.affine - np.eye(2, 3))[ops.codes == CODES["tf_warp"]].reshape(-1, 6)
    kinds, counts = np.unique(moves.round(9), axis=0, return_counts=True)
    assert len(kinds) == 10 and stats.chisquare(counts).pvalue > 1e-3  # five warps, of either sign
    boxes = ops.arguments[ops.codes == CODES["cutout"]]
    assert (boxes // 224**2 == 40).all()
    for places in (boxes % 224, boxes // 224 % 224):
        assert stats.chisquare(np.bincount(places.astype(int), minlength=224)).pvalue > 1e-3


# -- spelling ----------------------------------------------------------------------------------------------------------


def test_timms_spelling():
    from timm.data.auto_augment import rand_augment_transform

    assert parse("") is None and parse("cifar10") is randaugment.CIFAR10
    assert parse(STANDARD) == RandAugment(magnitude=9, magnitude_std=0.5, increasing=True)
    assert parse("tf") == randaugment.TensorFlowRandAugment(magnitude=10, num_ops=2)
    assert parse("tf-n3-m15", 96) == randaugment.TensorFlowRandAugment(magnitude=15, num_ops=3, img_size=96)
    for text in ("rand", STANDARD, "rand-m7-n3-p0.3-mmax12", "rand-inc0-mstd1"):
        theirs, ours = rand_augment_transform(text, {}), parse(text)
        operation = theirs.ops[0]
        assert (ours.num_ops, ours.prob, ours.magnitude) == (theirs.num_layers, operation.prob, operation.magnitude)
        assert ours.magnitude_std == operation.magnitude_std
        assert ours.magnitude_max == (operation.magnitude_max or 10)
        assert ours.increasing == any(op.name == "ColorIncreasing" for op in theirs.ops)


@pytest.mark.parametrize(
    "text",
    ["rnd-m9", "rand-m9-m8", "rand-x3", "rand-m", "rand-m9.5", "rand-p2", "rand-n0", "rand-mstd101", "rand-inc2",
     "cifar", "cifar10-m9", "3a-m9", "v0", "rand-mmax0", "rand-tweights", "rand-",
     "tf-m9-m8", "tf-p1", "tf-n0", "tf-m9.5", "tf10", "tf-"],
)  # fmt: skip
def test_other_spellings_are_refused(text):
    with pytest.raises(ValueError, match=f"^--augment.auto_augment is '{text}': expected cifar10, 3a, tf and any of "):
        parse(text)
