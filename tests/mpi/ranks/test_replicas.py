"""A flipped bit of one rank's weights or moments is found, with the rank and the tensor; equal ranks raise no alarm."""

import copy
import random

import pytest
import torch
from parts import plan_for, small_trainer

from largebatch.comm import Stopped
from largebatch.engine import Hook
from largebatch.hooks import ReplicaCheck
from largebatch.hooks.replicas import bit_sum, check_replicas, named_tensors

FLIPS = 100
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element: its bits


@pytest.fixture
def trainer(comm):
    plan = plan_for(comm, steps=3)
    trainer = small_trainer(comm, plan, passes=2)
    batches = trainer.open_batches(0)
    for _ in range(3):
        trainer.train_step(batches)
    trainer.average = copy.deepcopy(trainer.model)
    return trainer


def all_tensors(trainer) -> dict[str, torch.Tensor]:
    return named_tensors(trainer.model, trainer.optimizer, trainer.average)


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    bits = tensor.detach().view(-1).view(INTEGERS[tensor.element_size()])
    bits[element] ^= torch.tensor(1, dtype=bits.dtype) << bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64])
def test_the_sum_sees_each_byte_of_each_type(dtype):
    for size in (0, 1, 2, 9, 16):
        tensor = torch.randn(size + 1).to(dtype)[1:]  # where no word begins
        before = bit_sum(tensor)
        for element in range(size):
            for bit in range(0, 1 if dtype == torch.bool else 8 * tensor.element_size(), 5):
                flip(tensor, element, bit)
                assert bit_sum(tensor) != before
                flip(tensor, element, bit)
        assert bit_sum(tensor) == before


def test_equal_ranks_raise_no_alarm(comm, trainer):
    for _ in range(20):
        check_replicas(comm, all_tensors(trainer), place="step 3")


def test_each_flipped_bit_is_found_with_its_rank_and_tensor(comm, trainer):
    tensors, draws = all_tensors(trainer), random.Random(0)
    moments, averaged = ([name for name in tensors if word in name] for word in ("/", "the average of "))
    assert moments and averaged and len(moments) + len(averaged) < len(tensors)
    for _ in range(FLIPS):
        rank, name = draws.randrange(comm.size), draws.choice(list(tensors))
        place = draws.randrange(tensors[name].numel()), draws.randrange(8 * tensors[name].element_size())
        if comm.rank == rank:
            flip(tensors[name], *place)
        with pytest.raises(Stopped) as stopped:
            check_replicas(comm, tensors, place="step 3")
        if comm.rank == rank:
            flip(tensors[name], *place)
        message = str(stopped.value)
        assert f"values of {name}" in message and "found after step 3" in message
        if comm.size > 2:
            assert message.startswith(f"rank {rank} (") and "than most ranks" in message
        else:
            assert "rank 1 (" in message and "either may be wrong" in message
    check_replicas(comm, tensors, place="step 3")


def test_without_the_optimizer_its_state_may_differ(comm, trainer):
    for name, tensor in named_tensors(trainer.model, trainer.optimizer).items():
        if "/" in name:
            tensor.add_(comm.rank)
    check_replicas(comm, named_tensors(trainer.model), place="step 3")


class Flip(Hook):
    """Flips a bit of the last rank's bias after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_train_step(self, trainer, output) -> None:
        if trainer.state.step == self.step and trainer.comm.rank == trainer.comm.size - 1:
            flip(trainer.model[5].bias, 3, 0)


@pytest.mark.parametrize("step, interval, found", [(1, 2, 2), (2, 2, 2), (3, 2, 4), (4, 9, 5)])
def test_a_run_ends_at_the_next_check(comm, step, interval, found):
    """One is due every so many steps and at the end of the run."""
    plan = plan_for(comm, steps=5)
    trainer = small_trainer(comm, plan, passes=2)
    check = ReplicaCheck(interval_images=interval * plan.global_batch_size, with_optimizer=True)
    trainer.hooks = [Flip(step), check]
    with pytest.raises(Stopped, match=f"values of 5.bias.*found after step {found}"):
        trainer.fit()
    assert trainer.state.step == found
