"""Losses and counts against torch and timm in float64, and what half precision, ties and NaN do to them."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo  # noqa: F401  (makes timm importable beside a CPU build of torch)
from largebatch.augment import Augmented, one_hot
from largebatch.evaluation import COUNTS, count_correct
from largebatch.losses import binary_classification, classification, soft_target_cross_entropy

from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy  # isort: skip
from timm.utils import accuracy  # isort: skip


class Counts(NamedTuple):
    images: float
    top1: float
    top5: float
    loss: float


def counts(logits: torch.Tensor, labels: list[int]) -> Counts:
    found = count_correct(logits, torch.tensor(labels))
    assert found.dtype == torch.float64 and found.shape == (len(COUNTS),)
    return Counts(*found.tolist())


def random_logits(size: int, num_classes: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(size, num_classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(num_classes, (size,), generator=generator)


# -- cross entropy -------------------------------------------------------------------------------------------


def test_soft_targets_by_the_formula_and_by_timm():
    logits, _ = random_logits(7, 11)
    targets = random_logits(7, 11, seed=1)[0].softmax(dim=1)
    loss = soft_target_cross_entropy(logits, targets)
    by_formula = (targets * (torch.logsumexp(logits, dim=1, keepdim=True) - logits)).sum()
    torch.testing.assert_close(loss, by_formula, rtol=1e-13, atol=0)
    torch.testing.assert_close(loss, 7 * SoftTargetCrossEntropy()(logits, targets), rtol=1e-13, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothed_labels_equal_torchs_and_timms(smoothing):
    logits, labels = random_logits(7, 11)
    loss = soft_target_cross_entropy(logits, one_hot(labels, 11, smoothing=smoothing))
    torchs = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(loss, torchs, rtol=1e-6, atol=0)  # the targets are float32
    timms = 7 * LabelSmoothingCrossEntropy(smoothing)(logits, labels)
    torch.testing.assert_close(loss, timms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    logits, labels = random_logits(512, 1000)
    logits = logits.to(dtype)
    loss = soft_target_cross_entropy(logits, one_hot(labels, 1000))
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(logits.double(), labels, reduction="sum").float()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("batch", ["plain", "mixed"])
def test_a_binary_loss_is_the_formula_and_timms_and_what_deit_computes(batch):
    logits, labels = random_logits(6, 5)
    targets = one_hot(labels, 5).double()
    if batch == "mixed":
        targets = 0.25 * targets + 0.75 * targets.flip(0)
    right = [[float(targets[i, k] > 0) for k in range(5)] for i in range(6)]
    assert sum(map(sum, right)) == (6 if batch == "plain" else 6 + sum(a != b for a, b in zip(labels, labels.flip(0))))
    sigmoid = [[1 / (1 + math.exp(-x)) for x in row] for row in logits.tolist()]
    terms = [-math.log(p if y else 1 - p) for ps, ys in zip(sigmoid, right) for p, y in zip(ps, ys)]
    loss = binary_classification(nn.Identity(), Augmented(logits, targets))
    assert loss.item() == pytest.approx(sum(terms) / 5, rel=1e-12)
    theirs = [
        BinaryCrossEntropy(smoothing=0, target_threshold=0.0)(logits, targets),
        nn.BCEWithLogitsLoss()(logits, targets.gt(0.0).type(targets.dtype)),  # as DeiT's engine.py
    ]
    for other in theirs:
        torch.testing.assert_close(loss, 6 * other, rtol=1e-12, atol=0)
    half = binary_classification(nn.Identity(), Augmented(logits.bfloat16(), targets.float()))
    assert half.dtype == torch.float32


def test_the_objective_is_a_sum_over_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    images, targets = torch.randn(6, 3, 2, 2, dtype=torch.float64), torch.rand(6, 5).softmax(dim=1)
    whole = classification(model, Augmented(images, targets))
    first = classification(model, Augmented(images[:1], targets[:1]))
    rest = classification(model, Augmented(images[1:], targets[1:]))
    torch.testing.assert_close(whole, first + rest, rtol=1e-13, atol=0)
    torch.testing.assert_close(whole, 6 * SoftTargetCrossEntropy()(model(images), targets), rtol=1e-6, atol=0)


def test_the_objective_under_autocast_gives_float32_and_gradients():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    batch = Augmented(torch.randn(6, 3, 2, 2), one_hot(torch.arange(6) % 5, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = classification(model, batch)
    loss.backward()
    assert loss.dtype == torch.float32 and model[1].weight.grad.dtype == torch.float32
    assert torch.isfinite(model[1].weight.grad).all()


# -- counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [5, 6, 1000])
def test_counts_equal_timms_accuracy_and_torchs_loss(num_classes):
    logits, labels = random_logits(300, num_classes)
    found = counts(logits, labels.tolist())
    top1, top5 = accuracy(logits, labels, topk=(1, 5))
    assert found.images == 300
    assert 100 * found.top1 / 300 == pytest.approx(float(top1)) and found.top1 > 0
    assert 100 * found.top5 / 300 == pytest.approx(float(top5)) and found.top5 > found.top1
    assert found.loss == pytest.approx(F.cross_entropy(logits, labels, reduction="sum").item(), rel=1e-13)


def test_counts_add_up_over_any_cut():
    logits, labels = random_logits(101, 20)
    logits = logits.float()
    whole = count_correct(logits, labels)
    for cut in ([50, 51], [1, 99, 1], [101, 0]):
        parts = sum(count_correct(*part) for part in zip(logits.split(cut), labels.split(cut)))
        assert torch.equal(parts[:3], whole[:3])
        torch.testing.assert_close(parts, whole, rtol=1e-14, atol=0)


def test_equal_logits_rank_by_class_number():
    assert counts(torch.zeros(1, 8), [0])[:3] == (1, 1, 1)
    assert counts(torch.zeros(1, 8), [4])[:3] == (1, 0, 1)
    assert counts(torch.zeros(1, 8), [5])[:3] == (1, 0, 0)
    assert counts(torch.zeros(8, 8), list(range(8)))[:3] == (8, 1, 5)  # who knows nothing scores 1 / K
    assert counts(torch.tensor([[1.0, 2.0, 2.0]]), [2])[:3] == (1, 0, 1)
    assert counts(torch.tensor([[1.0, 2.0, 2.0]]), [1])[:3] == (1, 1, 1)


def test_a_tie_in_half_precision_is_no_tie_in_float32():
    logits = torch.tensor([[1.0, 1.001]])
    assert counts(logits, [1]).top1 == 1
    assert counts(logits.bfloat16(), [1]).top1 == 0 and counts(logits.bfloat16(), [0]).top1 == 1


def test_fewer_than_five_classes_are_all_within_the_first_five():
    assert counts(torch.tensor([[3.0, 2.0, 1.0]]), [2])[:3] == (1, 0, 1)


@pytest.mark.parametrize("label", [0, 1, 2])
def test_a_sample_with_nan_is_wrong_and_seen_in_the_loss(label):
    logits = torch.tensor([[0.0, float("nan"), 1.0], [5.0, 0.0, 0.0]])
    found = counts(logits, [label, 0])
    assert found[:3] == (2, 1, 1) and found.loss != found.loss


def test_infinite_logits_are_ordered():
    found = counts(torch.tensor([[-float("inf"), 0.0, 1.0], [1.0, -float("inf"), 0.0]]), [2, 0])
    assert found[:3] == (2, 2, 2) and found.loss == pytest.approx(2 * math.log1p(math.exp(-1)))
