"""Gradients are handed over in buckets, each as soon as its last gradient is ready."""

import copy
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist
from horovod.torch import mpi_ops
from parts import CLASSES, OPTIONAL, TIED, TWICE, OddModel, begun, images, replicas_agree, small_model, tiny_vit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from largebatch.config import ModelConfig, TrainConfig
from largebatch.optim import build_optimizer
from largebatch.plan.planning import cluster_of
from largebatch.plan.step import Speed, backward_of
from largebatch.plan.trace import trace
from largebatch.ranks import buckets, torch_distributed
from zoo import create_model


def own_loss(comm, model: nn.Module, *, draw: int = 0) -> Tensor:
    """Of images of this rank alone."""
    generator = torch.Generator().manual_seed(10 * comm.rank + draw)
    return model(torch.randn(4, 3, 8, 8, generator=generator)).square().sum()


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def given(comm, monkeypatch, kind: str) -> list[list[Tensor]]:
    """What each call of Horovod, or of torch.distributed, is given to reduce. kind: that of the tensors."""
    calls: list[list[Tensor]] = []
    if comm.launcher == "torchrun":
        of_torch = dist.all_reduce

        def reduce(tensor: Tensor, **options: Any) -> Any:
            if any(options.get("group") is group for group in comm._groups):
                calls.append([tensor])
            return of_torch(tensor, **options)

        monkeypatch.setattr(dist, "all_reduce", reduce)
        return calls
    name = f"horovod_torch_grouped_allreduce_async_torch_{kind}Tensor"
    of_horovod = getattr(mpi_ops.mpi_lib, name)

    def hand_over(tensors: Any, *rest: Any) -> int:
        calls.append(list(tensors))
        return of_horovod(tensors, *rest)

    monkeypatch.setattr(mpi_ops.mpi_lib, name, hand_over)
    return calls


def test_a_bucket_is_one_call_with_the_sums_of_single_tensors(comm, monkeypatch):
    """To the last bit, since nothing is fused here. torch.distributed is given the tensors one by one."""
    if by_torch := comm.launcher == "torchrun":
        monkeypatch.setattr(torch_distributed, "SMALLEST", 1)  # else a bucket's small ones are one
    calls = given(comm, monkeypatch, "Float")
    model = tiny_vit()
    alone = copy.deepcopy(model)
    optimizer = comm.wrap(plain_sgd(model), model, passes=2)
    for draw in range(2):
        own_loss(comm, alone, draw=draw).backward()
        own_loss(comm, model, draw=draw).backward()
    optimizer.synchronize()
    sizes = [parameter.nbytes for parameter in model.parameters()][::-1]
    expected = [len(bucket) for bucket in buckets.buckets(sizes)]
    assert 8 < len(expected) < len(sizes) / 2
    expected = [1] * len(sizes) if by_torch else expected
    assert sorted(map(len, calls)) == sorted(expected) * (comm.size > 1)
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters()):
        if by_torch:
            other.grad = comm.allreduce(other.grad, name=f"alone/{name}") / comm.size
        elif comm.size > 1:
            other.grad = hvd.allreduce(other.grad, name=f"alone/{name}", op=hvd.Average)
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("compression, kind", [("none", "Float"), ("fp16", "Half")])
def test_the_planner_has_the_bytes_that_are_sent(comm, monkeypatch, compression, kind):
    calls = given(comm, monkeypatch, kind)
    config = TrainConfig(model=ModelConfig(name="vit_nano32", img_size=64, num_classes=10))
    config = replace(config, run=replace(config.run, compression=compression))
    model = create_model("vit_nano32", img_size=64, num_classes=10)
    optimizer = comm.wrap(plain_sgd(model), model, compression=compression)
    model(torch.zeros(2, 3, 64, 64)).square().sum().backward()
    optimizer.synchronize()
    counted = trace(config, device="cpu")
    planned = backward_of(counted, cluster_of(2, "cpu"), config, Speed()).sizes
    assert sum(tensor.nbytes for call in calls for tensor in call) == sum(planned) * (comm.size > 1)


def test_buckets_are_reduced_while_the_backward_pass_goes_on(comm):
    """In the last pass of a step, and not before."""
    model = tiny_vit()
    optimizer = comm.wrap(plain_sgd(model), model, passes=2)
    parameters, shares = [*model.parameters()], []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: shares.append(len(begun(optimizer))))
    own_loss(comm, model).backward()
    assert shares == [0] * len(parameters)
    own_loss(comm, model).backward()
    middle = shares[len(parameters) + len(parameters) // 2]
    assert (len(parameters) / 3 < middle < len(parameters)) if comm.size > 1 else not middle
    optimizer.synchronize()


def test_a_step_that_would_reduce_once_more_warns(comm):
    model = small_model()
    optimizer = comm.wrap(plain_sgd(model), model)
    own_loss(comm, model).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="step inside `with optimizer.skip_synchronize"):
        optimizer.step()


def test_gradients_of_two_types_share_a_bucket(comm, monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 2**20)
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).double()])
    optimizer = comm.wrap(plain_sgd(layers), layers)
    x = torch.full((2, 3), comm.rank + 1.0)
    (layers[0](x).sum() + layers[1](x.double()).sum()).backward()
    optimizer.synchronize()
    for layer in layers:
        torch.testing.assert_close(layer.weight.grad, torch.full_like(layer.weight, comm.size + 1.0))


class Switched(nn.Module):
    """Two layers, of which each rank and pass may leave out one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return sum((self.layers[number](x).sum() for number in used), torch.zeros((), requires_grad=True))


@pytest.mark.parametrize("used", [[[0], [1]], [[0], [0]], [[], [0]], [[0, 1], [0]], [[], []]], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["one_bucket", "buckets"])
def test_what_a_rank_does_not_compute_counts_as_zero(comm, monkeypatch, used, whole):
    """Rank 0 uses these layers in its two passes, the last rank both in each."""
    monkeypatch.setattr(buckets, "SMALLEST", 2**20 if whole else 1)
    model = Switched()
    optimizer = comm.wrap(plain_sgd(model), model, passes=2)
    used = used if comm.rank == 0 else [[0, 1], [0, 1]]
    x = torch.full((2, 3), comm.rank + 1.0)
    for step in range(2):  # what is left of the first would break the second
        for layers in used:
            model(x, layers).backward()
        optimizer.synchronize()
        everything = comm.allgather_object(used, name="used")
        for number, layer in enumerate(model.layers):
            counts = [sum(number in layers for layers in one) for one in everything]
            mean = sum(2 * (rank + 1) * count for rank, count in enumerate(counts)) / comm.size
            if comm.size == 1 and not counts[0]:
                assert layer.weight.grad is None
            else:
                torch.testing.assert_close(layer.weight.grad, torch.full((3, 3), mean))
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


def test_a_gradient_in_another_order_of_memory_is_refused(comm):
    """Horovod looks at the first of a bucket alone, and adds up the memory of the rest."""
    model = small_model()
    optimizer = comm.wrap(plain_sgd(model), model)
    own_loss(comm, model).backward()
    optimizer.synchronize()
    weight, bias = model[5].weight, model[5].bias
    expected, weight.grad, bias.grad = weight.grad.clone(), weight.grad.t().contiguous().t(), None
    with pytest.raises(ValueError, match="The gradient of 5.weight is not contiguous: give it the strides of"):
        optimizer.synchronize()
    weight.grad = weight.grad.contiguous()
    optimizer.synchronize()
    torch.testing.assert_close(weight.grad, expected)  # the average of equal ones


LEFT_OUT = {  # which layers a rank (of so many) leaves out in a pass of a step
    "nothing": lambda step, rank, size, number: set(),
    "one rank": lambda step, rank, size, number: {OPTIONAL} if rank == size - 1 else set(),
    "in turns": lambda step, rank, size, number: {(TWICE, TIED, OPTIONAL)[(step + rank + number) % 3]},
    "one pass": lambda step, rank, size, number: {TWICE, TIED} if number == 0 else set(),
    "first step, rank 0": lambda step, rank, size, number: {TWICE, OPTIONAL} if step == rank == 0 else set(),
    "all ranks in a step": lambda step, rank, size, number: {TWICE, TIED, OPTIONAL} if step == 1 else set(),
}


@pytest.mark.parametrize("thawed", [False, True])
@pytest.mark.parametrize("whole", [True, False], ids=["one_bucket", "buckets"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("pattern", LEFT_OUT)
def test_layers_that_some_leave_out_are_trained_as_in_one_process(comm, monkeypatch, pattern, passes, whole, thawed):
    """Four steps of LAMB with weight decay; what nobody uses in a step does not move, nor does its step count."""
    monkeypatch.setattr(buckets, "SMALLEST", 2**20 if whole else 1)
    model, reference = OddModel().double(), OddModel().double()
    options = {"name": "lamb", "lr": 0.02, "weight_decay": 0.1, "impl": "eager"}
    optimizer = comm.wrap(build_optimizer(model, **options), model, passes=passes)
    alone = build_optimizer(reference, **options)
    samples = list(range(comm.size * passes * 2))
    labels = torch.tensor(samples) % CLASSES

    def compute(net: nn.Module, step: int, rank: int, number: int) -> None:
        net.left_out = LEFT_OUT[pattern](step, rank, comm.size, number)
        mine = slice(2 * (passes * rank + number), 2 * (passes * rank + number) + 2)
        loss = cross_entropy(net(images(samples[mine], dtype=torch.float64)), labels[mine]) / passes
        (loss if net is model else loss / comm.size).backward()

    for step in range(4):
        if thawed and step in (1, 3):
            (optimizer.freeze if step == 1 else optimizer.unfreeze)(model[TWICE].parameters())
            reference[TWICE].requires_grad_(step == 3)
        for number in range(passes):
            compute(model, step, comm.rank, number)
            for rank in range(comm.size):
                compute(reference, step, rank, number)
        optimizer.step()
        alone.step()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            assert (ours - theirs).norm() <= 1e-12 * theirs.norm(), (step, name)
            assert optimizer.state[ours].get("step", 0) == alone.state[theirs].get("step", 0), (step, name)
        optimizer.zero_grad()
        alone.zero_grad()
    assert replicas_agree(comm, model, "left out")


@pytest.mark.parametrize("unequal", ["passes", "layers"])
def test_two_optimizers_do_not_mix_their_gradients(comm, unequal):
    """As in a GAN; rank 0 has fewer passes than the others, or leaves out a layer of the first model."""
    nets = [Switched(), Switched()]
    optimizers = [comm.wrap(plain_sgd(net), net, passes=2) for net in nets]
    for factor, net in zip((1.0, 1000.0), nets):
        for number in range(1 if unequal == "passes" and comm.rank == 0 else 2):
            used = [0] if unequal == "layers" and comm.rank == 0 and factor == 1 else [0, 1]
            (factor * net(torch.ones(2, 3), used)).backward()
    for optimizer in reversed(optimizers):
        optimizer.synchronize()
    all_ranks, others = 2 * comm.size - (unequal == "passes"), 2 * comm.size - (1 if unequal == "passes" else 2)
    for factor, net in zip((1.0, 1000.0), nets):
        last = others if factor == 1 else all_ranks
        for layer, passes in zip(net.layers, (all_ranks, last)):
            grad = layer.weight.grad if layer.weight.grad is not None else torch.zeros(3, 3)
            torch.testing.assert_close(grad, torch.full((3, 3), 2 * factor * passes / comm.size))
    for optimizer in optimizers:
        optimizer.zero_grad()
