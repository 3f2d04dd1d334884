"""Look-LayerSAM on its own: ten steps against the formulas, a state dict, and what it is refused with."""

import io
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
import torch
from test_config import parse
from test_optim import relative
from torch import Tensor, nn

from largebatch.assembly import build_sam
from largebatch.data.stream import Batch
from largebatch.data.token_labels import TokenLabels
from largebatch.optim import LookSam, build_optimizer, init_state
from largebatch.optim.look_sam import AGE, DIRECTION

NAMES = ["lamb", "lars", "adamw", "nadamw", "sgd", "muon"]
SAM = LookSam(rho=0.05, every=3, alpha=0.7)


def make(name: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    impl = {"impl": "plain"} if name == "lamb" else {}
    optimizer = build_optimizer(model, name=name, lr=0.02, weight_decay=0.1, **impl)
    init_state(optimizer)
    return model, optimizer


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(16, width, generator=generator, dtype=torch.float64) for width in (6, 3))
    return (model(inputs) - targets).square().mean()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """What the engine does, in one pass."""

    def compute(batches: Iterator[int], *, again: bool = False) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        (number,) = batches
        loss = loss_of(model, number)
        loss.backward()
        return loss.detach(), torch.zeros(())

    SAM.gradient(optimizer, compute, iter([step]))
    optimizer.step()
    SAM.complete_step(optimizer, applied=True)
    model.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_equal_the_formulas(name):
    (model, optimizer), (plain, base) = make(name), make(name)
    SAM.begin(optimizer)
    params = list(plain.parameters())
    for step in range(10):
        take_step(model, optimizer, step)
        g = torch.autograd.grad(loss_of(plain, step), params)
        used = [one.clone() for one in g]
        if step % SAM.every == 0:
            start = [p.detach().clone() for p in params]
            for p, one in zip(params, g):  # a bias of norm 0 stays
                p.data += SAM.rho * p.detach().norm() / one.norm() * one
            used = list(torch.autograd.grad(loss_of(plain, step), params))
            for p, before in zip(params, start):
                p.data.copy_(before)
            along = sum((s * one).sum() for s, one in zip(used, g)) / sum(one.square().sum() for one in g)
            d = [s - along * one for s, one in zip(used, g)]
        else:
            lengths = [torch.cat([t.flatten() for t in tensors]).norm() for tensors in (g, d)]
            used = [one + SAM.alpha * lengths[0] / lengths[1] * part for one, part in zip(g, d)]
        for p, one in zip(params, used):
            p.grad = one
        base.step()
        for ours, theirs in zip(model.parameters(), params):
            assert relative(ours, theirs) <= 1e-11, step


@pytest.mark.parametrize("name", NAMES)
def test_one_that_begins_late_has_its_whole_state(name):
    model, optimizer = make(name)
    late = next(model.parameters()).requires_grad_(False)
    optimizer.state.pop(late, None)  # as if it had been frozen from the beginning
    SAM.begin(optimizer)
    for step in range(2):
        take_step(model, optimizer, step)
    before = late.requires_grad_(True).detach().clone()
    take_step(model, optimizer, 2)
    assert DIRECTION in optimizer.state[late] and len(optimizer.state[late]) > 1 and not torch.equal(late, before)


def test_the_kept_part_is_orthogonal_to_the_gradient():
    model, optimizer = make("sgd")
    SAM.begin(optimizer)
    g = torch.cat([one.flatten() for one in torch.autograd.grad(loss_of(model, 0), list(model.parameters()))])
    take_step(model, optimizer, 0)
    d = torch.cat([optimizer.state[p][DIRECTION].flatten() for p in model.parameters()])
    assert d.norm() > 0 and abs(d.dot(g)) <= 1e-14 * d.norm() * g.norm()


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name):
    """In the middle of a cycle, through a file read with weights_only."""
    model, optimizer = make(name)
    SAM.begin(optimizer)
    for step in range(4):
        take_step(model, optimizer, step)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, resumed_optimizer = make(name)
    SAM.begin(resumed_optimizer)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    assert resumed_optimizer.param_groups[0][AGE] == 1
    for step in range(4, 9):
        take_step(model, optimizer, step)
        take_step(resumed, resumed_optimizer, step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters()))


def test_tensors_of_norm_0_and_without_a_gradient_are_not_moved():
    still, zero, absent, moved = (nn.Parameter(torch.full((4,), value)) for value in (1.0, 0.0, 1.0, 1.0))
    optimizer = torch.optim.SGD([still, zero, absent, moved], lr=0.1, momentum=0.9)
    init_state(optimizer)
    SAM.begin(optimizer)
    still.grad, zero.grad, moved.grad = torch.zeros(4), torch.ones(4), torch.full((4,), 3.0)
    with SAM.perturbed(optimizer):
        assert [p.detach()[0].item() for p in (still, zero, absent)] == [1.0, 0.0, 1.0]
        torch.testing.assert_close(moved.detach(), torch.full((4,), 1.0 + SAM.rho))
    assert torch.equal(moved, torch.ones(4))
    with pytest.raises(ZeroDivisionError), SAM.perturbed(optimizer):
        raise ZeroDivisionError
    assert torch.equal(moved, torch.ones(4))


def test_without_a_kept_part_the_gradient_is_what_it_was():
    model, optimizer = make("sgd")
    SAM.begin(optimizer)
    loss_of(model, 0).backward()
    before = [p.grad.clone() for p in model.parameters()]
    SAM.reuse(optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before))


def test_a_skipped_step_is_tried_again_and_the_cycle_begins_then():
    model, optimizer = make("sgd")
    SAM.begin(optimizer)
    ages = []
    for due, applied in ((True, False), (True, True), (False, True), (False, False), (True, True)):
        assert SAM.due(optimizer) == due
        SAM.complete_step(optimizer, applied=applied)
        ages.append(optimizer.param_groups[0][AGE])
    assert ages == [3, 1, 2, 3, 1]


def test_batches_are_given_once_more_in_their_order():
    _, optimizer = make("sgd")
    SAM.begin(optimizer)
    maps = TokenLabels(*(torch.full((1,), float(value)) for value in range(3)))
    batches = [Batch(torch.ones(1), torch.zeros(1), 3, number, np.arange(2), maps) for number in (4, 5)]
    taken: list[list[Batch]] = []

    def compute(batches: Iterator[Batch], *, again: bool = False) -> tuple[Tensor, Tensor]:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            parameter.grad = torch.ones_like(parameter)
        assert again == bool(taken)
        taken.append(list(batches))
        return torch.zeros(()), torch.ones(())

    SAM.gradient(optimizer, compute, iter(batches))
    first, second = taken
    assert all(one is other for one, other in zip(batches, first, strict=True))
    for given, again in zip(first, second, strict=True):
        assert type(again) is Batch and type(again.token_labels) is TokenLabels
        assert all(getattr(again, field.name) is getattr(given, field.name) for field in fields(Batch)[:5])
        assert all(one is other for one, other in zip(again.token_labels, maps))


def test_a_config_with_a_radius_has_it():
    _, optimizer = make("lamb")
    assert build_sam(parse(), optimizer) is None and AGE not in optimizer.param_groups[0]
    config = parse("--optim.sam_rho", "0.01")
    assert build_sam(config, optimizer) == LookSam(rho=0.01, every=5, alpha=0.1)
    assert {group[AGE] for group in optimizer.param_groups} == {5}
    assert all(not state[DIRECTION].any() for state in optimizer.state.values())


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("--optim.sam_rho 0", "--optim.sam_rho is 0.0: expected a fraction above 0, such as 0.005, or null."),
        ("--optim.sam_rho 0.1 --parallel.zero 1", "and --parallel.zero 1: Look-LayerSAM needs whole tensors"),
        ("--optim.sam_rho 0.1 --parallel.tensor.size 2", "Look-LayerSAM needs whole tensors and their state on every"),
        ("--optim.name muon --parallel.tensor.size 2", "--optim.name is muon, which needs whole tensors on every rank"),
        ("--optim.name muon --parallel.zero 1", "--optim.name muon: ZeRO divides lamb's state only"),
    ],
)
def test_mistakes_are_refused_before_the_first_step(line, sentence):
    with pytest.raises(ValueError) as error:
        parse(*line.split())
    assert sentence in str(error.value) and "\n" not in str(error.value)
