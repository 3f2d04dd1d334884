"""A rank that computes another gradient than the others of the same images is named; nothing of the run changes."""

import random
from dataclasses import replace

import pytest
import torch
from parts import CLASSES, plan_for, replicas_agree, small_trainer
from torch import nn

from largebatch.engine import Hook
from largebatch.hooks import RecomputeCheck
from largebatch.hooks.recompute import check_gradient
from largebatch.ranks import Stopped

FAULTS = 100


def model_with_everything() -> nn.Module:
    """Dropout draws, and batch normalisation has statistics: a check must leave both as they were."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4), nn.BatchNorm2d(8), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, CLASSES)
    )


def trained(comm, hooks) -> dict[str, torch.Tensor]:
    plan = plan_for(comm, steps=4, left_over=5)
    trainer = small_trainer(comm, plan, passes=2, model=model_with_everything())
    trainer.hooks = hooks
    trainer.fit()
    return trainer.model.state_dict()


class Counted(RecomputeCheck):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.steps: list[int] = []

    def at_first_batch(self, trainer, batch) -> None:
        due = self.due
        super().at_first_batch(trainer, batch)
        if due and not self.due:
            self.steps.append(trainer.state.step)


def test_a_run_with_checks_is_the_run_without(comm):
    """Checks before the steps that are due; the short last step has none, since a rank may have no micro-batch."""
    plain = trained(comm, [])
    for interval, steps in ((1, [0, 1, 2, 3]), (2, [0, 2]), (100, [0])):
        check = Counted(interval_images=interval * plan_for(comm).global_batch_size)
        checked = trained(comm, [check])
        assert check.steps == steps
        assert all(torch.equal(plain[name], checked[name]) for name in plain)


def test_no_check_where_a_rank_has_no_micro_batch(comm):
    """A run may be resumed on more ranks than a step has micro-batches."""
    whole = plan_for(comm, steps=4)
    plan = replace(whole, micro_batch_size=whole.global_batch_size // (comm.size - 1))
    check = Counted(interval_images=whole.global_batch_size)
    trainer = small_trainer(comm, plan, passes=1)
    trainer.hooks = [check]
    trainer.fit()
    assert not check.steps and trainer.state.step == 4


class Faulty(Hook):
    """On one rank, a bit of what a layer computes flips once."""

    def __init__(self, layer: nn.Module, draws: random.Random) -> None:
        self.left, self.draws = 1, draws
        self.handle = layer.register_forward_hook(self.flip)

    def flip(self, layer, inputs, output):
        if self.left == 0:
            return output
        self.left -= 1
        spoilt = output.clone()
        bits = spoilt.detach().view(-1).view(torch.int32)
        bits[self.draws.randrange(len(bits))] ^= 1 << self.draws.randrange(18, 23)
        return spoilt


def message_of_a_faulty_check(comm, trainer, batch, rank: int, draws: random.Random) -> str:
    """The message of a check in which this rank has a faulty layer."""
    layer = draws.choice([trainer.model[0], trainer.model[4]])  # no dropout can hide what these compute
    fault = Faulty(layer, draws) if comm.rank == rank else None
    with pytest.raises(Stopped) as stopped:
        check_gradient(trainer, batch)
    if fault:
        fault.handle.remove()
    return str(stopped.value)


def test_each_passing_fault_is_found_with_its_rank(comm):
    """Also by two ranks: the one whose second result is another one. Before and after each, gradients are equal."""
    draws = random.Random(1)
    trainer = small_trainer(comm, plan_for(comm), passes=2, model=model_with_everything())
    batch = trainer.prepare(next(trainer.open_batches(0)))
    check_gradient(trainer, batch)
    for number in range(FAULTS):
        rank = draws.randrange(comm.size)
        message = message_of_a_faulty_check(comm, trainer, batch, rank, random.Random(number))
        assert message.startswith(f"rank {rank} ") and "computes another gradient of" in message, message
        assert "each time" in message and "found before step 1. A processor or a memory of such a host" in message
        check_gradient(trainer, batch)
        assert replicas_agree(comm, trainer.model, "faulty")


class Wrong:
    """The same wrong result each time."""

    def __init__(self, model: nn.Module) -> None:
        self.handle = model[4].register_forward_hook(lambda layer, inputs, output: output * (1 + 2**-20))


def test_a_lasting_fault_is_told_from_the_majority(comm):
    """Two ranks alone cannot tell whose it is."""
    trainer = small_trainer(comm, plan_for(comm), passes=2, model=model_with_everything())
    batch = trainer.prepare(next(trainer.open_batches(0)))
    for rank in range(comm.size):
        fault = Wrong(trainer.model) if comm.rank == rank else None
        with pytest.raises(Stopped) as stopped:
            check_gradient(trainer, batch)
        if fault:
            fault.handle.remove()
        message = str(stopped.value)
        if comm.size > 2:
            assert message.startswith(f"rank {rank} (") and "another gradient of 0.weight than most ranks" in message
        else:
            assert "either may be wrong" in message
    check_gradient(trainer, batch)


def test_a_run_ends_before_the_step(comm):
    plan = plan_for(comm, steps=5)
    trainer = small_trainer(comm, plan, passes=2)

    class FaultyFromStep3(Hook):
        def after_step(self, trainer) -> None:
            if trainer.state.step == 3 and comm.rank == comm.size - 1:
                trainer.model[5].register_forward_hook(lambda layer, inputs, output: output * (1 + 2**-20))

    trainer.hooks = [FaultyFromStep3(), RecomputeCheck(interval_images=2 * plan.global_batch_size)]
    with pytest.raises(Stopped, match="found before step 5"):
        trainer.fit()
    assert trainer.state.step == 4
