"""Schedule-Free AdamW on several ranks: the average of the package on one, the same first z, the same bits resumed."""

import pytest
import torch
from parts import OddModel, serial_run, small_trainer, stopped_and_resumed
from schedulefree import AdamWScheduleFree

from largebatch.benchmark import resident
from largebatch.data.order import Plan
from largebatch.engine import Trainer
from largebatch.hooks import ScheduleFree
from largebatch.optim import param_groups
from largebatch.ranks.replicas import differences, named_tensors

STEPS = 5
PLAN = Plan(num_samples=50, global_batch_size=24, micro_batch_size=4, num_images=24 * 4 + 10, seed=0)


def build(comm) -> Trainer:
    model, options = OddModel(dropout=0.5), {"optimizer_name": "schedule_free_adamw", "dtype": torch.float64}
    trainer = small_trainer(comm, PLAN, passes=-(-6 // comm.size), model=model, **options)
    trainer.hooks = [hook := ScheduleFree(trainer.model)]
    trainer.average = hook.model
    return trainer


def held(trainer: Trainer) -> dict[str, torch.Tensor]:
    return named_tensors(trainer.model, trainer.optimizer, trainer.average)


def test_weights_and_average_are_those_of_the_package_on_one_rank(comm):
    """A short last step, and weights that are never used, frozen, tied or used twice."""
    trainer, model = build(comm), OddModel(dropout=0.5).double()
    trainer.fit()
    optimizer = AdamWScheduleFree(param_groups(model, weight_decay=0.1), lr=0.01)
    optimizer.train()
    serial_run(PLAN, model, optimizer=optimizer)
    for trained in (trainer.model, trainer.average):
        for ours, theirs in zip(trained.parameters(), model.parameters(), strict=True):
            assert (ours - theirs).norm() <= 1e-12 * theirs.norm()
        optimizer.eval()
    assert differences(comm, held(trainer)) == []


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(comm, tmp_path_factory):
    """After any step: weights, average and z; rank 0 alone finds the checkpoint."""
    folder = tmp_path_factory.mktemp("resumed")
    (whole := build(comm)).fit()
    for stop in range(1, STEPS):
        second = stopped_and_resumed(lambda: build(comm), stop, folder)
        ours, theirs = held(whole), held(second)
        assert ours.keys() == theirs.keys() and sum(name.endswith("/z") for name in ours) > 5
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == [], stop
        for one, other in zip(whole.optimizer.param_groups, second.optimizer.param_groups):
            assert all(one[key] == other[key] for key in ("k", "lr_max", "weight_sum", "train_mode"))


@pytest.mark.parametrize("name", ["schedule_free_adamw", "adamw"])
def test_what_begins_as_the_weights_begins_as_those_of_rank_0(comm, name):
    options = f"--model vit_nano32 --img-size 32 --run.precision fp32 --schedule.name constant --optim.name {name}"
    options += f" --data.micro_batch_size 2 --data.global_batch_size {2 * comm.size} --run.seed {comm.rank}"
    config = resident.read_config(options.split())
    trainer = resident.build_resident(config, comm, device=torch.device("cpu"))
    assert differences(comm, held(trainer)) == []
    for p, state in trainer.optimizer.state.items():
        assert torch.equal(p, state.get("z", p))
