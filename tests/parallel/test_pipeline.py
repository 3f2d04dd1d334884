"""The pipeline against the model that is not cut: losses, logits, gradients, steps, masks; on real gloo ranks."""

import re

import pytest
import torch
from gloo import on_ranks

from largebatch.losses import soft_target_cross_entropy
from largebatch.parallel.mesh import Mesh
from largebatch.parallel.pipeline import Pipeline, check, num_stages
from largebatch.parallel.shape import ParallelConfig
from zoo.vit import VisionTransformer

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SCHEDULES = [
    ParallelConfig(pipeline=2),
    ParallelConfig(pipeline=4),
    ParallelConfig(pipeline=2, schedule="gpipe", micro_batches=6),
    ParallelConfig(pipeline=4, schedule="gpipe", micro_batches=2),
    ParallelConfig(pipeline=2, schedule="interleaved"),
    ParallelConfig(pipeline=2, schedule="interleaved", micro_batches=12),
    ParallelConfig(pipeline=4, schedule="interleaved", micro_batches=12),
    ParallelConfig(pipeline=2, cuts=[1], micro_batches=12),
    ParallelConfig(pipeline=4, cuts=[3, 4, 7]),
    ParallelConfig(pipeline=2, schedule="interleaved", cuts=[3, 4, 7]),
]


def build(*, grad_checkpointing=False, dtype=torch.float64, **rates):
    torch.manual_seed(1)
    options = {"img_size": 32, "patch_size": 16, "num_classes": 5, "embed_dim": 24, "depth": 8, "num_heads": 3}
    model = VisionTransformer(**options, **rates).to(dtype)
    model.set_grad_checkpointing(grad_checkpointing)
    return model


def batch(number, size=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + number)
    images = torch.randn(size, 3, 32, 32, dtype=dtype, generator=generator)
    return images, torch.rand(size, 5, dtype=dtype, generator=generator).softmax(dim=1)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def merged(dicts):
    """Of all ranks: every name is on exactly one."""
    whole = {}
    for part in dicts:
        assert not set(part) & set(whole)
        whole |= part
    return whole


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **EXACT, msg=lambda text: f"{name}: {text}")


# -- equal to the model that is not cut -----------------------------------------------------------------------------


def steps(model, run):
    """Three SGD steps of two accumulated batches each: losses, first gradients, last weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, first = [], None
    for step in range(3):
        losses += [run(*batch(2 * step), 0.01), run(*batch(2 * step + 1), 0.02)]
        first = gradients(model) if first is None else first
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _cut(config):
    model = build(drop_path_rate=0.3)
    model.eval()  # no masks, which could not be equal
    pipeline = Pipeline(model, Mesh(config.shape()), config, soft_target_cross_entropy)
    losses, first, last = steps(model, pipeline.run)
    logits = [pipeline.predict(batch(9, size)[0]) for size in (1, 2, 5, 12, 17)]
    rates = {name: module.drop_prob for name, module in model.named_modules() if hasattr(module, "drop_prob")}
    return [float(loss) for loss in losses], first, last, logits, rates, pipeline.log()


def _name(config):
    return f"{config.schedule}-{config.pipeline}-{config.micro_batches}-{config.cuts}"


@pytest.mark.parametrize("config", SCHEDULES, ids=_name)
def test_three_steps_equal_those_of_the_model_that_is_not_cut(config):
    model = build(drop_path_rate=0.3).eval()
    built = {name: module.drop_prob for name, module in model.named_modules() if hasattr(module, "drop_prob")}

    def run(images, targets, weight):
        loss = weight * soft_target_cross_entropy(model(images), targets)
        loss.backward()
        return loss.detach()

    expected_losses, expected_first, expected_last = steps(model, run)
    losses, first, last, logits, rates, logs = zip(*on_ranks(_cut, config.pipeline, config))
    for rank in range(config.pipeline):
        assert losses[rank] == pytest.approx([float(loss) for loss in expected_losses], rel=1e-12)
        for size, found in zip((1, 2, 5, 12, 17), logits[rank]):
            torch.testing.assert_close(found, model(batch(9, size)[0]).detach(), **EXACT)
    assert_equal(merged(first), expected_first)
    assert_equal(merged(last), expected_last)
    assert merged(rates) == built
    assert len(set(logs)) == 1 and len(logs[0].splitlines()) == num_stages(config)
    counts = [int(number.replace(",", "")) for number in re.findall("([0-9,]+) parameters", logs[0])]
    assert sum(counts) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "config, batch_size, sentence",
    [
        (ParallelConfig(pipeline=2), 7, r"of 7 images into 2 parts: .*--parallel.micro_batches or --data.micro_batch"),
        (ParallelConfig(pipeline=2, micro_batches=0), 8, "into 0 parts"),
        (ParallelConfig(pipeline=4, micro_batches=2), 8, "micro_batches is 2: schedule 1f1b expects at least .* its 4"),
        (
            ParallelConfig(pipeline=4, schedule="interleaved", micro_batches=13),
            26,
            "is 13: schedule interleaved expects a multiple of its 4 ranks, or fewer than twice as many, such as 12",
        ),
        (ParallelConfig(pipeline=9), 9, "pipeline is 9 .* 9 stages, and the model has 8 blocks"),
        (ParallelConfig(pipeline=5, schedule="interleaved"), 10, "10 stages, and the model has 8 blocks"),
        (ParallelConfig(pipeline=2, cuts=[0]), 8, r"cuts is \[0\]: .* each of 2 stages .* 1 ascending numbers from 1"),
        (ParallelConfig(pipeline=2, cuts=[8]), 8, r"cuts is \[8\]"),
        (ParallelConfig(pipeline=3, cuts=[4]), 9, r"cuts is \[4\]: .* 2 ascending"),
        (ParallelConfig(pipeline=3, cuts=[4, 4]), 9, r"cuts is \[4, 4\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(config, batch_size, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(config, depth=8, batch_size=batch_size)
