"""What a rank sends for a block of a ViT, counted, is what largebatch/parallel/README.md says."""

import pytest
import torch
from gloo import on_ranks

from largebatch.benchmark.parallel import counting
from largebatch.config.parallel import ParallelConfig, TensorConfig
from largebatch.parallel import vit
from largebatch.parallel.cuts import cuts_of, sum_partial_gradients
from largebatch.parallel.mesh import Mesh
from largebatch.plan.step import block_bytes
from zoo.vit import VisionTransformer

IMAGES, WIDTH = 16, 384
ACTIVATION = IMAGES * 2 * WIDTH * 4  # bytes of (images, 2 tokens, features)
WEIGHTS = 12 * WIDTH**2 * 4  # bytes of the matrices of a block


def _count(parallel: ParallelConfig, depth: int) -> int:
    with torch.device("meta"):  # for what it sends numbers do not count, and initial ones take seconds
        model = VisionTransformer(
            img_size=32, patch_size=32, num_classes=16, embed_dim=WIDTH, depth=depth, num_heads=12, weight_init="skip"
        )
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.zero_()
    mesh = Mesh(parallel.shape())
    vit.parallelize(model, mesh)
    with counting() as sent:
        model(torch.randn(IMAGES, 3, 32, 32)).square().sum().backward()
        sum_partial_gradients(model, cuts_of(model), mesh)
    return sent["bytes"]


def per_block(parallel: ParallelConfig) -> int:
    return _count(parallel, 2) - _count(parallel, 1)


@pytest.mark.parametrize(
    "tensor, expected",
    [
        (TensorConfig(size=2), 8 / 2 * ACTIVATION),
        (TensorConfig(size=4), 8 * 3 / 4 * ACTIVATION),
        (TensorConfig(mode="2d", size=4), 1 / 4 * (21 * ACTIVATION + 3 * WEIGHTS)),
        (TensorConfig(mode="2.5d", size=8, depth=2), 1 / 4 * (21 / 2 * ACTIVATION + 3 * WEIGHTS) + 1 / 4 * WEIGHTS),
        (TensorConfig(mode="3d", size=8), 1 / 8 * (39 * ACTIVATION + 3 * WEIGHTS)),
    ],
    ids=lambda value: f"{value.mode}-{value.size}" if isinstance(value, TensorConfig) else "",
)
def test_a_block(tensor, expected):
    """But for norms, biases and their gradients."""
    found = on_ranks(per_block, tensor.size, ParallelConfig(tensor=tensor))
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.01)
    assert block_bytes(ParallelConfig(tensor=tensor), ACTIVATION, WEIGHTS) == pytest.approx(expected)
