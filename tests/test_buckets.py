"""Which gradients are handed over to Horovod together. The reduction itself: tests/mpi/ranks/test_handing_over.py."""

import random

import pytest
import torch
from torch import Tensor, nn

from largebatch.ranks import buckets
from largebatch.ranks.buckets import PARTS, SMALLEST
from largebatch.ranks.sending import Unchanged
from zoo import create_model


def divided(sizes: list[int]) -> list[list[int]]:
    """The sizes of each bucket."""
    return [[sizes[number] for number in bucket] for bucket in buckets.buckets(sizes)]


def test_every_gradient_is_in_one_bucket_in_order():
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.choice((4, 3_000, 9 * 2**20)) for _ in range(draw.randrange(60))]
        assert sum(map(list, buckets.buckets(sizes)), []) == [*range(len(sizes))]


def test_small_models_have_one_bucket():
    assert divided([]) == [] and divided([4]) == [[4]] and divided([4] * 100) == [[4] * 100]
    assert divided([SMALLEST - 4, 4, 4]) == [[SMALLEST - 4, 4], [4]]


def test_buckets_grow_from_both_ends(monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 1)
    found = [len(bucket) for bucket in divided([1] * 120)]
    assert found == [1, 1, 2, 4, 8, *[10] * 9, 7, 4, 2, 1]


def test_a_bucket_ends_with_the_tensor_that_fills_it():
    """No less than SMALLEST in any but the last, and without its last tensor no bucket is full."""
    draw = random.Random(1)
    for _ in range(50):
        sizes = [draw.choice((2**12, 2**20, 9 * 2**20)) for _ in range(100)]
        limit = sum(sizes) / PARTS
        *full, rest = divided(sizes)
        assert all(SMALLEST <= sum(bucket) and sum(bucket[:-1]) < max(limit, SMALLEST) for bucket in full)
        assert sum(rest) < limit


@pytest.mark.parametrize("name", ["vit_s16", "vit_b16", "vit_b32", "vit_l32", "volo_d1", "volo_d5"])
def test_models_have_few_buckets_and_small_ones_at_the_ends(name):
    with torch.device("meta"):
        sizes = [parameter.nbytes for parameter in create_model(name).parameters()]
    found = [sum(bucket) for bucket in divided(sizes[::-1])]
    assert len(found) <= 24 < len(sizes) / 6
    assert found[0] <= 4 * 2**20 and found[-1] <= 2**20


@pytest.mark.parametrize("name", ["vit_nano32", "volo_nano", "timm/deit3_small_patch16_224", "timm/convnext_atto"])
def test_a_backward_pass_computes_gradients_in_the_order_of_the_buckets(name):
    """Nearly: that of a bias and of its weight come in either order. One that comes early waits for its bucket."""
    model = create_model(name, img_size=64) if not name.endswith("atto") else create_model(name)
    parameters, ready = [*model.parameters()][::-1], list[nn.Parameter]()
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready.append)
    output = getattr(model, "forward_train", model)(torch.randn(2, 3, 64, 64))
    parts = output if isinstance(output, tuple) else (output,)
    sum(part.square().sum() for part in parts if isinstance(part, Tensor)).backward()
    place = {id(parameter): number for number, parameter in enumerate(ready)}
    assert len(place) == len(parameters)
    assert max(place[id(parameter)] - number for number, parameter in enumerate(parameters)) <= 3


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("odd", [0.0, float("inf"), float("nan")])
def test_the_peak_of_what_is_sent_is_the_largest_absolute_value(sign, odd):
    gradients = [torch.randn(50, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    gradients[2][7], gradients[1][3] = 9.0 * sign, odd * sign
    sending = Unchanged()
    sending.complete()
    assert sending.peak is None
    sending.measures = True
    for gradient in gradients:
        sending.compress(gradient)
    expected = torch.stack([gradient.double().abs().max() for gradient in gradients]).max()
    sending.complete()
    torch.testing.assert_close(sending.peak, expected, rtol=0, atol=0, equal_nan=True)
    sending.complete()
    assert sending.peak is None
