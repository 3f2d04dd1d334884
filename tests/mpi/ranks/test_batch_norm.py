"""Running statistics: one run, whoever computes its micro-batches, and what torch does where there is only one."""

import copy

import torch
from parts import CLASSES, images, plan_for, small_trainer
from torch import nn

from largebatch.data.order import Plan

STEPS, PASSES, MOMENTUM = 3, 2, 0.1


def normalised_model() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8, momentum=MOMENTUM)
    with torch.no_grad():
        norm.running_mean.normal_()  # as in a resumed run: not those of a new layer
        norm.running_var.uniform_(1, 2)
    return nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), norm, nn.Flatten(), nn.Linear(32, CLASSES))


def expected_statistics(plan: Plan, trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64 from the definition, for the images and the convolution, whose weights do not move."""
    convolution, norm = copy.deepcopy(trainer.model[0]).double(), trainer.model[1]
    mean, variance = norm.running_mean.double(), norm.running_var.double()
    for step in range(plan.num_steps):
        found = []
        for micro in plan.micro_batches(step, 0, 1):
            samples = plan.samples(micro.start, micro.stop)[1].tolist()
            inner = convolution(images(samples, dtype=torch.float32).double()).transpose(0, 1).flatten(1)
            found.append((inner.mean(1), inner.var(1)))
        means, variances = (torch.stack(column).mean(0) for column in zip(*found))
        mean, variance = mean + MOMENTUM * (means - mean), variance + MOMENTUM * (variances - variance)
    return mean.detach(), variance.detach()


def test_the_statistics_are_those_of_all_micro_batches(comm):
    plan = plan_for(comm, steps=STEPS, left_over=3)  # most ranks have nothing in the last step
    trainer = small_trainer(comm, plan, passes=PASSES, model=normalised_model(), mixup_alpha=0.0, lr=0.0)
    expected = expected_statistics(plan, trainer)
    trainer.fit()
    norm = trainer.model[1]
    torch.testing.assert_close(norm.running_mean.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.running_var.double(), expected[1], rtol=1e-5, atol=1e-6)
    assert norm.momentum == MOMENTUM
    everywhere = comm.allgather_object(norm.running_var.tolist(), name="everywhere")
    assert all(values == everywhere[0] for values in everywhere)


def test_a_first_layer_in_evaluation_keeps_its_statistics(comm):
    """As a frozen stem, whose train() leaves it so."""
    plan, model = plan_for(comm, steps=STEPS, left_over=3), normalised_model()
    stem = nn.BatchNorm2d(3)
    stem.train = lambda mode=True: nn.BatchNorm2d.train(stem, False)
    model.insert(0, stem)
    trainer = small_trainer(comm, plan, passes=PASSES, model=model, mixup_alpha=0.0, lr=0.0)
    kept, before = stem.running_var.clone(), model[2].running_mean.clone()
    trainer.fit()
    assert torch.equal(stem.running_var, kept) and not stem.running_mean.any()
    assert model[2].running_mean.isfinite().all() and not torch.equal(model[2].running_mean, before)


def test_a_skipped_step_leaves_them_alone(comm):
    plan = plan_for(comm, steps=STEPS, left_over=3)  # most ranks have nothing in the last step
    trainer = small_trainer(comm, plan, passes=PASSES, model=normalised_model(), mixup_alpha=0.0)
    before = trainer.model[1].running_mean.clone()
    with torch.no_grad():
        trainer.model[0].bias[comm.size % 8] = torch.inf  # on every rank
    trainer.fit(max_steps=1)
    assert trainer.state.skipped == 1
    assert torch.equal(trainer.model[1].running_mean, before)
