"""The gradient noise scale: equal to its formulas by gradients of single images, and without bias for known noise."""

import math
from pathlib import Path

import pytest
import torch
from parts import batch_of, plan_for, small_model, small_trainer
from torch import Tensor, nn

from largebatch import hooks
from largebatch.augment import Augment, Augmented
from largebatch.data.order import Plan
from largebatch.files.run_folder import read_rows
from largebatch.hooks.noise_scale import HORIZON, NoiseScale
from largebatch.report.tables import NOISE

MICRO = 4


class Single(NoiseScale):
    """Keeps the estimates of each step beside the averages."""

    def __init__(self, *, every_images: int = 1) -> None:
        super().__init__(every_images=every_images)
        self.found: list[tuple[float, ...]] = []

    def row(self, trainer, output, total):
        trainer.state.noise = None  # the weight of the next step is 1
        row = super().row(trainer, output, total)
        self.found.append(tuple(row[name] for name in NOISE[:2]))
        return row


class Pixels(nn.Module):
    """3,072 numbers: their squares average out, so few steps tell the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Parameter(torch.zeros(3, 32, 32))


def measured(trainer, noise: NoiseScale | None = None) -> list[tuple[float, ...]]:
    noise = noise or Single()
    trainer.hooks = [noise, hooks.Log([], every_images=noise.every_images, noise=noise)]
    trainer.eval_images = 0
    trainer.fit()
    return noise.found


def gradient(model, batch: Augmented, *, weight: float) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch.images), batch.targets, reduction="sum") * weight
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])


def reference(plan: Plan, step: int, ranks: int, model) -> tuple[float, float]:
    """By the gradients of the whole batch, and of the first micro-batch of each rank, each computed by itself."""
    mixed = []
    for micro in plan.micro_batches(step, 0, 1):
        batch = batch_of(plan, micro, dtype=torch.float64)
        mixed.append(Augment(7)(batch.images, batch.labels, torch.Generator()))
    large = sum(gradient(model, batch, weight=1 / plan.global_batch_size) for batch in mixed)
    small = [gradient(model, batch, weight=1 / MICRO).square().sum() for batch in mixed[:ranks]]
    b, B, one, whole = MICRO, plan.global_batch_size, float(sum(small)) / len(small), float(large.square().sum())
    return (B * whole - b * one) / (B - b), (one - whole) / (1 / b - 1 / B)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_the_estimates_are_those_of_the_formulas(comm, passes, compression):
    """With a loss scale in fp16, whose reduced gradient is rounded."""
    passes = max(passes, 2 // comm.size)  # a single micro-batch has no noise scale
    plan = plan_for(comm, passes=passes, steps=1)
    trainer = small_trainer(
        comm, plan, passes=passes, dtype=torch.float64, mixup_alpha=0.0, clip_norm=0.01, compression=compression
    )
    (found,) = measured(trainer)
    expected = reference(plan, 0, comm.size, small_model().double())
    assert found == pytest.approx(expected, rel=1e-5 if compression == "none" else 5e-3)


def test_more_ranks_than_micro_batches(comm):
    """A run that is resumed on more ranks: those without a micro-batch count for nothing."""
    plan = Plan(num_samples=50, global_batch_size=2 * MICRO, micro_batch_size=MICRO, num_images=2 * MICRO, seed=0)
    trainer = small_trainer(comm, plan, passes=math.ceil(2 / comm.size), dtype=torch.float64, mixup_alpha=0.0)
    (found,) = measured(trainer)
    assert found == pytest.approx(reference(plan, 0, min(comm.size, 2), small_model().double()), rel=1e-5)


@pytest.mark.parametrize("passes", [1, 4])
def test_known_noise_is_found_without_bias(comm, passes):
    """The gradients of images are drawn: |G|^2 = 3072 · 0.25^2 = 192 and tr(Sigma) = 3072, so B_simple is 16."""
    passes = max(passes, 2 // comm.size)  # a single micro-batch has no noise scale
    plan = plan_for(comm, passes=passes, steps=30)
    model = Pixels()
    trainer = small_trainer(comm, plan, passes=passes, model=model, mixup_alpha=0.0, optimizer_name="sgd")
    draw = torch.Generator().manual_seed(comm.rank)

    def objective(model: Pixels, batch: Augmented) -> Tensor:
        drawn = torch.randn(len(batch.images), *model.pixels.shape, generator=draw)
        return ((drawn + 0.25) * model.pixels).sum()

    trainer.objective = objective
    found = torch.tensor(measured(trainer), dtype=torch.float64)
    error = found.std(dim=0) / math.sqrt(len(found))
    assert ((found.mean(dim=0) - torch.tensor([192.0, 3072.0])).abs() < 4 * error).all(), found.mean(dim=0)
    assert (error < torch.tensor([9.6, 64.0])).all(), error


def test_a_run_with_the_measurement_is_the_run_without(comm):
    """Steps that write no row, and a short last one, are not measured."""
    plan = plan_for(comm, steps=4, left_over=5)
    trainer = small_trainer(comm, plan, passes=2)
    trainer.fit()
    observed = small_trainer(comm, plan, passes=2)
    found = measured(observed, Single(every_images=2 * plan.global_batch_size))
    assert [math.isfinite(signal) for signal, _ in found] == [True, True, False]
    plain, other = trainer.model.state_dict(), observed.model.state_dict()
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_a_resumed_run_goes_on_with_the_same_bits(comm, tmp_path_factory):
    """The averages are in the state; rows after the checkpoint are written again."""
    folder = comm.broadcast_object(str(tmp_path_factory.mktemp("noise")), name="noise/folder")
    plan, written = plan_for(comm, steps=2 * HORIZON), []
    for name, stops in (("whole", (0,)), ("resumed", (HORIZON + 5, 0))):
        trainer = small_trainer(comm, plan, passes=2)
        for max_steps in stops:
            noise = NoiseScale(every_images=1)
            Path(folder, name).mkdir(exist_ok=True)
            trainer.hooks = [noise, hooks.Log([hooks.Csv(Path(folder, name))], every_images=1, noise=noise)]
            trainer.fit(max_steps=max_steps)
        comm.barrier(name="noise/written")
        written.append([[row[column] for column in NOISE[:2]] for row in read_rows(Path(folder, name, "steps.csv"))])
    assert len(written[0]) == 2 * HORIZON and written[0] == written[1]
