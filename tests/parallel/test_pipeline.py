"""The pipeline against the model that is not cut: losses, logits, gradients, steps, masks; on real gloo ranks."""

import re

import pytest
import torch
from gloo import on_ranks
from torch.multiprocessing.reductions import StorageWeakRef

from largebatch.config.parallel import ParallelConfig
from largebatch.losses import soft_target_cross_entropy
from largebatch.parallel.mesh import Mesh
from largebatch.parallel.pipeline import Pipeline, check, num_stages
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


def build(*, grad_checkpointing=False, dtype=torch.float64, kind=VisionTransformer, **rates):
    torch.manual_seed(1)
    options = {"img_size": 32, "patch_size": 16, "num_classes": 5, "embed_dim": 24, "depth": 8, "num_heads": 3}
    model = kind(**options, **rates).to(dtype)
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


# -- what the schedules are for --------------------------------------------------------------------------------------


def _alive(config):
    """The most micro-batches whose activations this rank holds at once."""
    model = build()
    pipeline = Pipeline(model, Mesh(config.shape()), config, soft_target_cross_entropy)
    pipeline.run(*batch(0), 1.0)  # from here on shapes are known, so hooks see real passes alone
    activations, most = [], [0]

    def count(module, inputs, output):
        activations.append(StorageWeakRef(output.untyped_storage()))
        most.append(sum(not storage.expired() for storage in activations))

    model.blocks[pipeline.stages[0].blocks[0]].mlp.fc1.register_forward_hook(count)
    pipeline.run(*batch(0), 1.0)
    assert len(activations) == config.micro_batches
    return max(most)


@pytest.mark.parametrize("schedule, expected", [("1f1b", [4, 3, 2, 1]), ("gpipe", [12, 12, 12, 12])])
def test_a_stage_keeps_no_more_micro_batches_than_its_schedule_needs(schedule, expected):
    """What 1F1B is for: the first stage holds as many as there are stages, the last one a single one; GPipe all."""
    config = ParallelConfig(pipeline=4, schedule=schedule, micro_batches=12)
    assert on_ranks(_alive, 4, config) == expected


# -- what is drawn, checkpointing, autocast, a head in parts --------------------------------------------------------


class Half(torch.nn.Linear):
    """A head of which a rank gives the loss a part."""

    def own_logits(self, x):
        return self(x)[:, :2]


def _drawn(config):
    """Gradients and masks with and without checkpointing, twice from one seed; the generator's next number."""
    mesh = Mesh(config.shape())
    found = []
    for grad_checkpointing in (False, True):
        model = build(proj_drop_rate=0.2, attn_drop_rate=0.2, grad_checkpointing=grad_checkpointing)
        pipeline = Pipeline(model, mesh, config, soft_target_cross_entropy)
        pipeline.run(*batch(0), 1.0)  # from here on shapes are known, so hooks see real passes alone
        masks = []
        module = model.blocks[pipeline.stages[0].blocks[0]].mlp.drop1
        module.register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
        for seed in (7, 7, 8):
            model.zero_grad()
            torch.manual_seed(seed)
            loss = float(pipeline.run(*batch(0), 1.0))
            found.append((loss, gradients(model), masks[:], int(torch.randint(2**62, ()))))
            masks.clear()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_draw_masks_of_their_own_and_the_same_when_recomputing(schedule):
    first, second = on_ranks(_drawn, 2, ParallelConfig(pipeline=2, schedule=schedule, micro_batches=4))
    for plain, again, other, checkpointed, *_ in (first, second):
        for run in (again, checkpointed):
            assert run[0] == plain[0] and run[3] == plain[3]
            assert all(torch.equal(run[1][name], gradient) for name, gradient in plain[1].items())
        assert other[0] != plain[0]
        assert len(plain[2]) == 4 and len(checkpointed[2]) == 8  # each part's, and again
        assert not torch.equal(plain[2][0], plain[2][1])
    for one, two in zip(first, second):
        assert one[0] == two[0] and one[3] == two[3]
        assert 0.15 < one[2][0].double().mean() < 0.25
        assert not torch.equal(one[2][0], two[2][0])


def _autocast(config):
    model = build(dtype=torch.float32)
    kinds = set()
    pipeline = Pipeline(model, Mesh(config.shape()), config, soft_target_cross_entropy)
    for stage in pipeline.stages:
        model.blocks[stage.blocks[0]].mlp.fc1.register_full_backward_hook(
            lambda module, before, after: kinds.add((after[0].dtype, torch.is_autocast_enabled("cpu")))
        )
    with torch.autocast("cpu", torch.bfloat16):
        loss = float(pipeline.run(*batch(0, dtype=torch.float32), 1.0))
        logits = pipeline.predict(batch(0, dtype=torch.float32)[0])
    return loss, gradients(model), logits, kinds


def test_autocast_is_that_of_the_model_that_is_not_cut():
    config = ParallelConfig(pipeline=2, micro_batches=4)
    model = build(dtype=torch.float32)
    images, targets = batch(0, dtype=torch.float32)
    expected = 0.0
    for part, target in zip(images.chunk(4), targets.chunk(4)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = soft_target_cross_entropy(model(part), target)
        loss.backward()
        expected += loss.item()
    losses, found, logits, kinds = zip(*on_ranks(_autocast, 2, config))
    assert losses == pytest.approx([expected] * 2, rel=1e-6)
    assert all(dtypes == {(torch.bfloat16, False)} for dtypes in kinds) and logits[0].dtype == torch.bfloat16
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(merged(found)[name], gradient, rtol=1e-5, atol=1e-6)


def _in_parts(config):
    model = build()
    model.head = Half(24, 5, dtype=torch.float64)
    torch.nn.init.ones_(model.head.weight)
    shapes = []

    def loss(logits, targets):
        shapes.append((tuple(logits.shape), tuple(targets.shape)))
        return logits.sum()

    pipeline = Pipeline(model, Mesh(config.shape()), config, loss)
    return float(pipeline.run(*batch(0), 0.5)), pipeline.predict(batch(0)[0]), set(shapes)


def test_the_loss_gets_a_rank_s_part_of_the_logits_and_evaluation_all_of_them():
    found = on_ranks(_in_parts, 2, ParallelConfig(pipeline=2, micro_batches=3, schedule="gpipe"))
    for loss, logits, shapes in found:
        assert logits.shape == (12, 5) and loss == pytest.approx(0.5 * float(logits[:, :2].sum()), rel=1e-12)
    assert found[0][2] == set() and found[1][2] == {((4, 2), (4, 5))}


# -- what cannot be -------------------------------------------------------------------------------------------------


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
