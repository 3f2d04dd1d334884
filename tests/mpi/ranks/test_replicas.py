"""A flipped bit of one rank's weights or moments is found, with the rank and the tensor; equal ranks raise no alarm."""

import random

import pytest
import torch
from parts import plan_for, small_trainer

from largebatch.comm import Stopped
from largebatch.hooks.replicas import INTEGERS, check_replicas, named_tensors

FLIPS = 100


@pytest.fixture
def trainer(comm):
    plan = plan_for(comm, steps=3)
    trainer = small_trainer(comm, plan, passes=2)
    batches = trainer.open_batches(0)
    for _ in range(3):
        trainer.train_step(batches)
    return trainer


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    bits = tensor.detach().view(-1).view(INTEGERS[tensor.element_size()])
    bits[element] ^= torch.tensor(1, dtype=bits.dtype) << bit


def test_equal_ranks_raise_no_alarm(comm, trainer):
    for _ in range(20):
        check_replicas(comm, trainer.model, trainer.optimizer, place="step 3")


def test_each_flipped_bit_is_found_with_its_rank_and_tensor(comm, trainer):
    tensors, draws = named_tensors(trainer.model, trainer.optimizer), random.Random(0)
    moments = [name for name in tensors if "/" in name]
    assert moments and len(moments) < len(tensors)
    for _ in range(FLIPS):
        rank, name = draws.randrange(comm.size), draws.choice(list(tensors))
        place = draws.randrange(tensors[name].numel()), draws.randrange(8 * tensors[name].element_size())
        if comm.rank == rank:
            flip(tensors[name], *place)
        with pytest.raises(Stopped) as stopped:
            check_replicas(comm, trainer.model, trainer.optimizer, place="step 3")
        if comm.rank == rank:
            flip(tensors[name], *place)
        message = str(stopped.value)
        assert f"values of {name}" in message and "found after step 3" in message
        if comm.size > 2:
            assert message.startswith(f"rank {rank} (") and "than most ranks" in message
        else:
            assert "rank 1 (" in message and "either may be wrong" in message
    check_replicas(comm, trainer.model, trainer.optimizer, place="step 3")


def test_without_the_optimizer_its_state_may_differ(comm, trainer):
    for name, tensor in named_tensors(trainer.model, trainer.optimizer).items():
        if "/" in name:
            tensor.add_(comm.rank)
    check_replicas(comm, trainer.model, None, place="step 3")
