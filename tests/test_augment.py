"""Soft targets, mixup, cutmix, erasing: arithmetic against timm and plain loops, draws by their statistics."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

import zoo  # noqa: F401  (makes timm importable beside a CPU build of torch)
from largebatch.augment import (
    Augment,
    Box,
    cutmix,
    draw_boxes,
    draw_cutmix,
    draw_mixup,
    draw_noise,
    erase,
    mixup,
    one_hot,
    seed_for,
)

from timm.data import Mixup  # isort: skip

PLACES = [(step, number) for step in range(40) for number in range(32)]


def generator_for(seed: int, step: int = 0, number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(seed, step, number))


def micro_batch(size: int, *, num_classes: int = 10, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 4, 4, generator=generator)
    return images, torch.randint(num_classes, (size,), generator=generator)


# -- arithmetic ----------------------------------------------------------------------------------------------


def test_one_hot_by_hand():
    targets = one_hot(torch.tensor([2, 0]), 4, smoothing=0.2)
    assert targets.dtype == torch.float32
    torch.testing.assert_close(targets, torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]]))
    assert torch.equal(one_hot(torch.tensor([1]), 3), torch.tensor([[0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.75, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixup_equals_timms(lam, smoothing):
    images, labels = micro_batch(6)
    images = images.double()
    timms = Mixup(mixup_alpha=1.0, label_smoothing=smoothing, num_classes=10)
    timms._params_per_batch = lambda: (lam, False)
    expected_images, expected_targets = timms(images.clone(), labels)
    targets = one_hot(labels, 10, smoothing=smoothing)
    mixed_images, mixed_targets = mixup(images, targets, lam=lam, partners=torch.arange(5, -1, -1))
    torch.testing.assert_close(mixed_images, expected_images, rtol=0, atol=1e-15)
    torch.testing.assert_close(mixed_targets, expected_targets, rtol=0, atol=1e-7)


def test_mixup_by_hand_leaves_its_input_alone():
    images, targets = torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1, 1), torch.eye(3)
    mixed_images, mixed_targets = mixup(images, targets, lam=0.75, partners=torch.tensor([1, 2, 0]))
    assert mixed_images.flatten().tolist() == [1.25, 2.5, 3.25]
    assert mixed_targets.tolist() == [[0.75, 0.25, 0.0], [0.0, 0.75, 0.25], [0.25, 0.0, 0.75]]
    assert images.flatten().tolist() == [1.0, 2.0, 4.0] and torch.equal(targets, torch.eye(3))


def test_the_loss_is_the_32k_recipes():
    """lam * CE(label) + (1 - lam) * CE(partner's label), for what `Augment` drew, in float64."""
    images, labels = micro_batch(64)
    augment = Augment(10, mixup_alpha=0.2)
    mixed, targets, *_ = augment(images, labels, generator_for(9))
    lam, partners = draw_mixup(64, 0.2, generator=generator_for(9))
    assert 0.01 < lam < 0.99, "this draw would prove nothing"
    torch.testing.assert_close(mixed, lam * images + (1 - lam) * images[partners])
    logits = mixed.flatten(1).double() @ torch.randn(48, 10, dtype=torch.float64)
    published = lam * F.cross_entropy(logits, labels) + (1 - lam) * F.cross_entropy(logits, labels[partners])
    torch.testing.assert_close(F.cross_entropy(logits, targets.double()), published, rtol=1e-6, atol=0)


def test_without_mixup_images_pass_through_and_nothing_is_drawn():
    images, labels = micro_batch(8)
    generator = generator_for(0)
    before = generator.get_state()
    augmented = Augment(10, label_smoothing=0.1)(images, labels, generator)
    assert augmented.images is images
    assert torch.equal(augmented.targets, one_hot(labels, 10, smoothing=0.1))
    assert torch.equal(before, generator.get_state())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_micro_batches(size):
    images, labels = micro_batch(size)
    augmented = Augment(10, mixup_alpha=0.2)(images, labels, generator_for(0))
    assert augmented.images.shape == images.shape and augmented.targets.shape == (size, 10)
    torch.testing.assert_close(augmented.targets.sum(dim=1), torch.ones(size))
    if size == 1:
        torch.testing.assert_close(augmented.images, images)


@pytest.mark.parametrize(
    "options",
    [{"mixup_alpha": -1}, {"mixup_alpha": float("inf")}, {"label_smoothing": 1.0}, {"label_smoothing": -0.1},
     {"cutmix_alpha": -1}, {"erase_prob": 1.5}, {"erase_prob": -0.1}],
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))} is "):
        Augment(10, **options)
    with pytest.raises(ValueError, match="^num_classes is 0"):
        Augment(0)


# -- cutmix --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.8, 1.0])
def test_cutmix_equals_timms(lam, monkeypatch):
    """Its corrected lambda and its images; the partner is the flipped batch there. The box is that of timm 0.3.2."""

    def even_box(shape, lam, **_):
        cuts = [int(side * np.sqrt(1 - lam)) for side in shape[-2:]]
        centres = [np.random.randint(0, side) for side in shape[-2:]]
        edges = zip(shape[-2:], cuts, centres)
        return tuple(int(np.clip(c + sign * (cut // 2), 0, side)) for side, cut, c in edges for sign in (-1, 1))

    monkeypatch.setattr("timm.data.mixup.rand_bbox", even_box)
    images, labels = torch.randn(6, 3, 13, 10), torch.tensor([0, 1, 2, 3, 4, 5])
    for seed in range(8):
        generator = generator_for(seed)
        monkeypatch.setattr("largebatch.augment.draw_mixup", lambda n, *_, generator: (lam, torch.arange(n)))
        box, _ = draw_cutmix(6, 1.0, (13, 10), generator=generator)
        again, centres = generator_for(seed), []
        for side in (13, 10):
            centres.append(int(torch.randint(side, (), generator=again)))
        timms = Mixup(mixup_alpha=0.0, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
        timms._params_per_batch = lambda: (lam, True)
        monkeypatch.setattr("numpy.random.randint", lambda low, high, size=None, c=iter(centres): next(c))
        expected_images, expected_targets = timms(images.clone(), labels)
        targets = one_hot(labels, 10, smoothing=0.1)
        mixed, mixed_targets = cutmix(images, targets, box=box, partners=torch.arange(5, -1, -1))
        assert torch.equal(mixed, expected_images)
        torch.testing.assert_close(mixed_targets, expected_targets, rtol=0, atol=1e-6)


def test_cutmix_is_a_plain_loop_and_leaves_its_input_alone():
    images, partners = torch.randn(5, 3, 6, 7), torch.tensor([3, 1, 0, 4, 2])
    before, targets = images.clone(), torch.eye(5)
    mixed, soft = cutmix(images, targets, box=Box(1, 4, 0, 5), partners=partners)
    for i, y, x in np.ndindex(5, 6, 7):
        source = partners[i] if 1 <= y < 4 and x < 5 else i
        assert torch.equal(mixed[i, :, y, x], images[source, :, y, x])
    assert torch.equal(images, before)
    torch.testing.assert_close(soft, targets * (27 / 42) + targets[partners] * (15 / 42))


def test_cutmix_boxes_lie_inside_and_have_the_area_of_lambda():
    boxes = np.array([draw_cutmix(2, 1.0, (40, 60), generator=generator_for(1, *p))[0] for p in PLACES])
    top, bottom, left, right = boxes.T
    assert (0 <= boxes).all() and (top <= bottom).all() and (bottom <= 40).all() and (right <= 60).all()
    whole = (top > 0) & (bottom < 40) & (left > 0) & (right < 60)  # what was not cut off keeps the image's form
    assert whole.sum() > 200 and np.abs(60 * (bottom - top) - 40 * (right - left))[whole].max() <= 120  # sides are even
    centre = ((top + bottom) // 2)[whole & (bottom - top < 4)]
    assert stats.kstest(centre / 40, "uniform").pvalue > 1e-3


def test_cutmix_and_mixup_take_turns():
    images, labels = torch.randn(4, 3, 8, 8), torch.arange(4)
    augment = Augment(4, mixup_alpha=0.8, cutmix_alpha=1.0)
    cut = []
    for place in PLACES:
        mixed, targets, *_ = augment(images, labels, generator_for(2, *place))
        known = (mixed.flatten(2)[:, None] == images.flatten(2)[None]).all(dim=2).any(dim=1)  # pixels of one image
        cut.append(known.all().item())
        torch.testing.assert_close(targets.sum(dim=1), torch.ones(4))
    assert stats.binomtest(sum(cut), len(cut), 0.5).pvalue > 1e-3
    alone = Augment(4, cutmix_alpha=1.0)(images, labels, generator_for(0))
    box, partners = draw_cutmix(4, 1.0, (8, 8), generator=generator_for(0))
    expected = cutmix(images, torch.eye(4), box=box, partners=partners)
    assert torch.equal(alone.images, expected[0]) and torch.equal(alone.targets, expected[1])


# -- erasing -------------------------------------------------------------------------------------------------


def test_erasing_is_a_plain_loop():
    images, labels = torch.randn(64, 3, 20, 30), torch.zeros(64, dtype=torch.int64)
    before = images.clone()
    erased, targets, *_ = Augment(2, erase_prob=0.5)(images, labels, generator_for(3))
    generator = generator_for(3)
    boxes = draw_boxes(64, (20, 30), 0.5, generator=generator)
    expected, noise = images.clone(), iter(draw_noise(boxes, 3, generator=generator).tolist())
    for i, (top, bottom, left, right) in enumerate(boxes.tolist()):
        for channel in range(3):
            for y in range(top, bottom):
                for x in range(left, right):
                    expected[i, channel, y, x] = next(noise)
    assert next(noise, None) is None
    assert torch.equal(erased, expected) and torch.equal(images, before)
    assert torch.equal(targets, one_hot(labels, 2))
    changed = (erased != images).flatten(1).any(dim=1)
    assert torch.equal(changed, boxes[:, 1] > boxes[:, 0]) and 16 < changed.sum() < 48


def test_nothing_to_erase():
    images, generator = torch.randn(3, 3, 8, 8), generator_for(0)
    boxes = draw_boxes(3, (8, 8), 0.0, generator=generator)
    assert not boxes.any() and draw_noise(boxes, 3, generator=generator).shape == (0,)
    assert torch.equal(erase(images, boxes=boxes, noise=torch.zeros(0)), images)
    top, bottom, left, right = draw_boxes(500, (1, 1), 1.0, generator=generator).T
    assert not ((bottom - top) * (right - left)).any()  # no box is smaller than one pixel
    assert not draw_boxes(200, (1, 1000), 1.0, generator=generator).any()  # each would be two rows or more


def timms_boxes(count, size):
    """Height, width, top and left of what timm erases."""
    from timm.data.random_erasing import RandomErasing

    random.seed(0)
    found, erasing = [], RandomErasing(probability=1.0, mode="const", device="cpu")
    for _ in range(count):
        image = torch.ones(1, *size)
        erasing(image)
        rows, columns = torch.nonzero(image[0] == 0).unbind(dim=1)
        top, left = rows.min(), columns.min()
        found.append([rows.max() - top + 1, columns.max() - left + 1, top, left])
    return np.array(found)


def test_boxes_have_timms_distribution():
    size = (90, 140)
    boxes = draw_boxes(20_000, size, 0.3, generator=generator_for(0)).numpy()
    top, bottom, left, right = boxes[boxes[:, 1] > boxes[:, 0]].T
    assert stats.binomtest(len(top), 20_000, 0.3).pvalue > 1e-3
    assert (top >= 0).all() and (left >= 0).all() and (bottom <= size[0]).all() and (right <= size[1]).all()
    ours = np.stack([bottom - top, right - left, top, left], axis=-1)
    theirs = timms_boxes(3000, size)
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3, column
    areas = [columns[:, 0] * columns[:, 1] / (size[0] * size[1]) for columns in (ours, theirs)]
    assert stats.ks_2samp(*areas).pvalue > 1e-3 and 0.015 < areas[0].min() and areas[0].max() < 0.345
    aspects = [np.log(columns[:, 0] / columns[:, 1]) for columns in (ours, theirs)]
    assert stats.ks_2samp(*aspects).pvalue > 1e-3
    assert np.exp([aspects[0].min(), aspects[0].max()]) == pytest.approx([0.3, 1 / 0.3], rel=0.1)
    small = ours[:, 0] * ours[:, 1] < 0.1 * size[0] * size[1]  # all of them fit, so nothing is drawn again
    logs = np.log(ours[small, 0] / ours[small, 1])
    assert stats.kstest(logs, stats.uniform(np.log(0.3), 2 * np.log(1 / 0.3)).cdf).statistic < 0.04


def test_noise_is_normal():
    noise = draw_noise(torch.tensor([[3, 53, 0, 50], [0, 0, 0, 0]]), 3, generator=generator_for(0))
    assert len(noise) == 7500 and stats.kstest(noise.numpy(), "norm").pvalue > 1e-3


# -- draws ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_lambda_is_beta_distributed_over_steps_and_micro_batches(alpha):
    lams = [draw_mixup(2, alpha, generator=generator_for(7, *place))[0] for place in PLACES]
    assert np.isfinite(lams).all()
    assert np.mean(lams) == pytest.approx(0.5, abs=0.05)
    assert np.var(lams) == pytest.approx(0.25 / (2 * alpha + 1), rel=0.1)
    assert stats.kstest(lams, stats.beta(alpha, alpha).cdf).pvalue > 0.01


def test_a_tiny_alpha_gives_no_nan():
    lams = np.array([draw_mixup(2, 1e-3, generator=generator_for(7, *place))[0] for place in PLACES])
    assert ((lams < 0.01) | (lams > 0.99)).mean() > 0.95
    assert lams.mean() == pytest.approx(0.5, abs=0.06)


def test_lambdas_of_neighbours_are_independent():
    lams = np.array([draw_mixup(2, 1.0, generator=generator_for(7, *place))[0] for place in PLACES])
    other_seed = np.array([draw_mixup(2, 1.0, generator=generator_for(8, *place))[0] for place in PLACES])
    lams = lams.reshape(40, 32)
    bound = 4 / np.sqrt(len(PLACES))
    assert abs(np.corrcoef(lams[1:].ravel(), lams[:-1].ravel())[0, 1]) < bound
    assert abs(np.corrcoef(lams[:, 1:].ravel(), lams[:, :-1].ravel())[0, 1]) < bound
    assert abs(np.corrcoef(lams.ravel(), other_seed)[0, 1]) < bound
    assert len(set(lams.ravel()) | set(other_seed)) == 2 * len(PLACES)


def test_partners_are_uniform_permutations():
    partners = torch.stack([draw_mixup(4, 0.2, generator=generator_for(7, *place))[1] for place in PLACES])
    assert torch.equal(partners.sort(dim=1).values, torch.arange(4).expand(len(PLACES), 4))
    counts = torch.stack([(partners == j).sum(dim=0) for j in range(4)])
    assert stats.chisquare(counts.numpy().ravel()).pvalue > 0.01


def test_a_draw_depends_on_its_place_alone():
    images, labels = micro_batch(16)
    augment = Augment(10, mixup_alpha=0.2)
    alone = augment(images, labels, generator_for(3, 5, 2))
    torch.manual_seed(99)
    for number in range(5):  # as a rank does that computes all micro-batches
        again = augment(images, labels, generator_for(3, 5, number))
        assert torch.equal(again.images, alone.images) == (number == 2)


# -- seeds ---------------------------------------------------------------------------------------------------


def test_seeds_are_fixed_for_good():
    # a resumed run needs the seeds that it began with: these numbers may never change
    assert seed_for(0, 0, 0) == 934378164339193602
    assert seed_for(1, 2, 3) == 3786177085423240503
    assert seed_for(1, 2, 3, purpose="model") == 6552200688316372642


def test_seeds_differ_in_every_argument_and_fit_into_63_bits():
    purposes = ("augment", "model")
    seeds = {seed_for(s, *place, purpose=p) for s in range(8) for place in PLACES for p in purposes}
    assert len(seeds) == 16 * len(PLACES)
    assert all(0 <= seed < 2**63 for seed in seeds)
    low_bits = {seed % 2**32 for seed in seeds}  # all that torch's CPU generator uses
    assert len(low_bits) > 0.999 * len(seeds)


def test_every_bit_of_a_seed_is_mixed():
    seeds = np.array([seed_for(0, *place) for place in PLACES])
    ones = [(seeds >> bit & 1).mean() for bit in range(63)]
    assert np.abs(np.array(ones) - 0.5).max() < 4 * 0.5 / np.sqrt(len(PLACES))
