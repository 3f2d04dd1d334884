"""Soft targets and mixup: arithmetic against timm and the published formula, draws by their statistics."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

import zoo  # noqa: F401  (makes timm importable beside a CPU build of torch)
from largebatch.augment import Augment, draw_mixup, mixup, one_hot, seed_for

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
    [{"mixup_alpha": -1}, {"mixup_alpha": float("inf")}, {"label_smoothing": 1.0}, {"label_smoothing": -0.1}],
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))} is "):
        Augment(10, **options)
    with pytest.raises(ValueError, match="^num_classes is 0"):
        Augment(0)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU: there is no GPU")
def test_a_gpu_gets_the_same_draw():
    images, labels = micro_batch(16)
    augment = Augment(10, mixup_alpha=0.2, label_smoothing=0.1)
    expected = augment(images, labels, generator_for(3))
    found = augment(images.cuda(), labels.cuda(), generator_for(3))
    torch.testing.assert_close(found.images.cpu(), expected.images)
    torch.testing.assert_close(found.targets.cpu(), expected.targets)


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
