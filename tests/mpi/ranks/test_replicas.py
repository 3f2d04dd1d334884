"""A flipped bit of one rank's weights or moments is found, with the rank and the tensor; equal ranks raise no alarm."""

import contextlib
import copy
import random
import re

import pytest
import timm
import torch
from parts import OddModel, images, plan_for, replicas_agree, small_model, small_trainer
from torch import nn

from largebatch.engine import Hook
from largebatch.hooks import ReplicaCheck
from largebatch.optim import Lamb
from largebatch.ranks import Stopped
from largebatch.ranks.replicas import check_replicas, is_due, named_tensors

FLIPS = 100
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element: its bits


def test_all_ranks_compute_lamb_in_one_way(comm, monkeypatch):
    """One has no compiler."""
    monkeypatch.setattr("largebatch.optim.lamb.can_compile", lambda kind: comm.rank != comm.size - 1)
    model = small_model()
    optimizer = comm.wrap(Lamb.paper(model), model)
    impls = comm.allgather_object([group["impl"] for group in optimizer.param_groups], name="impls")
    assert {impl for found in impls for impl in found} == {"eager"}


@pytest.fixture
def trainer(comm):
    plan = plan_for(comm, steps=3)
    trainer = small_trainer(comm, plan, passes=2, model=OddModel())
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


def test_equal_ranks_raise_no_alarm(comm, trainer):
    for _ in range(20):
        check_replicas(comm, all_tensors(trainer), place="step 3", remedy="")


def test_each_flipped_bit_is_found_with_its_rank_and_tensor(comm, trainer):
    tensors, draws = all_tensors(trainer), random.Random(0)
    names = [*{id(tensor): name for name, tensor in reversed(tensors.items())}.values()]  # of tied weights the first
    moments, averaged = ([name for name in tensors if word in name] for word in ("/", "the average of "))
    assert moments and averaged and len(moments) + len(averaged) < len(tensors)
    for _ in range(FLIPS):
        rank, name = draws.randrange(comm.size), draws.choice(names)
        place = draws.randrange(tensors[name].numel()), draws.randrange(8 * tensors[name].element_size())
        if comm.rank == rank:
            flip(tensors[name], *place)
        with pytest.raises(Stopped) as stopped:
            check_replicas(comm, tensors, place="step 3", remedy="")
        if comm.rank == rank:
            flip(tensors[name], *place)
        message = str(stopped.value)
        assert f"values of {name}" in message and "found after step 3" in message
        if comm.size > 2:
            assert message.startswith(f"rank {rank} (") and "than most ranks" in message
        else:
            assert "rank 1 (" in message and "either may be wrong" in message
    check_replicas(comm, tensors, place="step 3", remedy="")


COMPUTED = {  # models with tensors that are computed when they are built, and in no checkpoint
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 1},
    "vit_small_patch16_dinov3": {"img_size": 32, "depth": 1},
    "swin_tiny_patch4_window7_224": {"depths": (2,), "num_heads": (1,), "embed_dim": 8},
    "maxvit_tiny_tf_224": {"img_size": 64},
    "beitv2_base_patch16_224": {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2},
}


@pytest.mark.parametrize("name, options", COMPUTED.items(), ids=COMPUTED)
def test_tensors_that_are_in_no_checkpoint_are_compared(comm, name, options):
    model = timm.create_model(name, **options)
    computed = {name: buffer for name, buffer in model.named_buffers() if name not in model.state_dict()}
    assert computed
    comm.broadcast_model(model)
    check_replicas(comm, named_tensors(model, average=copy.deepcopy(model)), place="step 3", remedy="")
    for name, buffer in [*computed.items()][:: max(1, len(computed) // 4)]:
        if comm.rank == comm.size - 1:
            flip(buffer, buffer.numel() // 2, 3)
        with pytest.raises(Stopped, match=re.escape(f"values of {name}")):
            check_replicas(comm, named_tensors(model), place="step 3", remedy="")
        if comm.rank == comm.size - 1:
            flip(buffer, buffer.numel() // 2, 3)


def test_without_the_optimizer_its_state_may_differ(comm, trainer):
    for name, tensor in named_tensors(trainer.model, trainer.optimizer).items():
        if "/" in name:
            tensor.add_(comm.rank)
    check_replicas(comm, named_tensors(trainer.model), place="step 3", remedy="")


class Flip(Hook):
    """Flips a bit of the last rank's bias after a step, one that the next update does not round away."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_train_step(self, trainer, output) -> None:
        if trainer.state.step == self.step and trainer.comm.rank == trainer.comm.size - 1:
            flip(trainer.model[5].bias, 3, 6)


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


# -- a loop of one's own ---------------------------------------------------------------------------------------------


def adamw(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def step(comm, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    samples = list(range(2 * comm.rank, 2 * comm.rank + 2))
    model(images(samples, dtype=torch.float32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", [adamw, sgd, lambda model: Lamb.paper(model, lr=0.01)])
@pytest.mark.parametrize("loaded", ["nowhere", "on rank 0", "everywhere"])
def test_wrapping_gives_all_ranks_what_rank_0_has(comm, kind, loaded):
    """Weights, buffers, options, and a state that need not be there on the other ranks."""
    model = OddModel(seed=comm.rank)
    model.register_buffer("count", torch.tensor(comm.rank))
    model.register_buffer("turned", torch.full((2, 3), float(comm.rank)).t(), persistent=False)
    model.register_buffer("waves", torch.full((2,), comm.rank * 1j))
    model.register_buffer("nothing", torch.empty(0))
    optimizer = kind(model)
    if loaded == "everywhere" or loaded == "on rank 0" and comm.rank == 0:
        model(images([comm.rank], dtype=torch.float32)).sum().backward()
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (comm.rank + 1)
    weights = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    before = comm.broadcast_object((weights, optimizer.state_dict()), name="alike/before")
    wrapped = comm.wrap(optimizer, model)
    state = wrapped.state_dict()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, before[0][name]), name
    assert str(state["param_groups"]) == str(before[1]["param_groups"])
    assert state["state"].keys() == before[1]["state"].keys()
    for number, values in state["state"].items():
        expected = before[1]["state"][number]
        assert values.keys() == expected.keys()
        assert all(torch.equal(torch.as_tensor(values[key]), torch.as_tensor(expected[key])) for key in values)
    del model.waves
    for _ in range(5):
        step(comm, model, wrapped)
    assert replicas_agree(comm, model, "alike/after")


def test_wrapping_other_models_ends_all_ranks(comm):
    model = small_model() if comm.rank == 0 else nn.Sequential(*small_model()[:5])
    with pytest.raises(Stopped, match="rank 1.*comm.wrap got another model or optimizer"):
        comm.wrap(sgd(model), model)
    model = small_model()
    model[3].weight.requires_grad_(comm.rank == 0)
    with pytest.raises(Stopped, match="another order, there 3.weight is trained"):
        comm.wrap(sgd(model), model)


@pytest.mark.parametrize("key, value", [("lr", 0.5), ("weight_decay", 0.1), ("betas", (0.5, 0.6)), ("mine", "x")])
@pytest.mark.parametrize("odd", [0, -1])
def test_options_that_differ_end_all_ranks_before_the_step(comm, key, value, odd):
    model = small_model()
    optimizer = comm.wrap(adamw(model), model)
    step(comm, model, optimizer)
    step(comm, model, optimizer)
    if comm.rank == odd % comm.size:
        optimizer.param_groups[0][key] = value
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Stopped, match=rf"param group 0 has {key} .* on rank \d and .* on rank 0, so the weights would"):
        step(comm, model, optimizer)
    assert all(torch.equal(*pair) for pair in zip(before.values(), model.state_dict().values()))


def test_a_scheduler_that_follows_the_loss_of_all_ranks_keeps_them_alike(comm):
    """The remedy of the sentence, to the letter; with the loss of each rank it ends them."""
    for alike in (False, True):
        model = small_model()
        optimizer = comm.wrap(sgd(model), model)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        with pytest.raises(Stopped, match="has lr .* that of all ranks") if not alike else contextlib.nullcontext():
            for number in range(4):
                step(comm, model, optimizer)
                loss = torch.tensor(1.0 + (number if comm.rank else -number))
                scheduler.step(comm.allreduce(loss, name="loss") / comm.size if alike else loss)
    assert replicas_agree(comm, model, "alike/scheduler") and optimizer.param_groups[0]["lr"] < 0.01


@pytest.mark.parametrize("drifts", [1, 3, 4, 7])
def test_weights_that_drift_apart_end_all_ranks_soon(comm, drifts):
    """A program that changes them on one rank after so many steps; they are compared after 1, 2, 4, 8 ... steps."""
    model = small_model()
    optimizer = comm.wrap(Lamb.paper(model, lr=0.01), model)
    for number in range(drifts):
        step(comm, model, optimizer)
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            model[5].bias[0] += 1e-6
    found = 1 << (drifts - 1).bit_length()
    with pytest.raises(Stopped, match=f"values of 5.bias.* after step {found}.*comm.broadcast_state"):
        for _ in range(9):
            step(comm, model, optimizer)
    comm.broadcast_state(model, optimizer)
    for _ in range(3):
        step(comm, model, optimizer)
    assert replicas_agree(comm, model, "alike/mended")


def test_weights_are_compared_often_at_first():
    assert [number for number in range(1, 4000) if is_due(number)] == [*(2**k for k in range(11)), 2048, 3072]


def test_buffers_of_a_rank_may_differ_and_statistics_of_batch_norm_are_averaged(comm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 2))
    optimizer = comm.wrap(sgd(model), model)
    model.register_buffer("queue", torch.full((2,), float(comm.rank)))
    fresh, alone = copy.deepcopy(model), copy.deepcopy(model)
    for _ in range(2):
        step(comm, model, optimizer)
    means = comm.allgather_object(model[1].running_mean.tolist(), name="alike/means")
    assert all(mean == means[0] for mean in means) and model.queue.tolist() == [comm.rank] * 2
    step(comm, fresh, comm.wrap(sgd(fresh), fresh))
    alone(images([2 * comm.rank, 2 * comm.rank + 1], dtype=torch.float32))
    mean = comm.allreduce(alone[1].running_mean, name="alike/alone") / comm.size
    torch.testing.assert_close(fresh[1].running_mean, mean)


def test_a_caller_that_compares_by_itself_is_left_alone(comm):
    """`watch=False`: weights are neither shared nor compared."""
    model = small_model(seed=comm.rank)
    optimizer = comm.wrap(sgd(model), model, watch=False)
    for _ in range(3):
        step(comm, model, optimizer)
    assert not replicas_agree(comm, model, "alike/alone")
