"""Fine-tuning in a loop of the user's own: parts of a model are frozen and unfrozen, replicas stay equal."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from parts import CLASSES, images, replicas_agree, small_model
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.optim import Lamb, Lars

PASSES, MICRO = 2, 3
KINDS = [
    partial(Lamb, lr=0.02, weight_decay=0.3, impl="eager"),
    partial(Lars, lr=0.5, weight_decay=0.3),
    partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3),
    partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.3),
]


def stem(model: nn.Module) -> list[nn.Parameter]:
    return [*model[0].parameters(), *model[3].parameters()]


def loss_of(model: nn.Module, samples: list[int], *, batch: int) -> Tensor:
    """This share of the mean loss of a global batch of so many images."""
    labels = torch.tensor(samples) % CLASSES
    return F.cross_entropy(model(images(samples, dtype=torch.float64)), labels, reduction="sum") / batch


def train(comm, model: nn.Module, optimizer: Optimizer, steps: range) -> Tensor:
    """Accumulated over passes and averaged over ranks; the last loss, with what autograd keeps alive for it."""
    batch = comm.size * PASSES * MICRO
    for step in steps:
        for k in range(PASSES):
            first = step * batch + (comm.rank * PASSES + k) * MICRO
            loss = loss_of(model, list(range(first, first + MICRO)), batch=batch) * comm.size
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def train_alone(model: nn.Module, optimizer: Optimizer, steps: range, *, batch: int) -> None:
    for step in steps:
        loss_of(model, list(range(step * batch, (step + 1) * batch)), batch=batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def close(one: nn.Module, other: nn.Module) -> bool:
    return all(bool((p - q).norm() <= 1e-12 * q.norm()) for p, q in zip(one.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_unfrozen_at_step_10_as_in_one_process(comm, kind):
    """Head alone, everything, then the stem alone, with a graph of the last step kept alive across each change."""
    model, reference = small_model().double(), small_model().double()
    for parameter in (*stem(model), *stem(reference)):
        parameter.requires_grad_(False)
    optimizer, alone = comm.wrap(kind(model.parameters()), model, passes=PASSES), kind(reference.parameters())
    batch = comm.size * PASSES * MICRO
    begun = [parameter.clone() for parameter in stem(model)]

    alive = [train(comm, model, optimizer, range(10))]
    train_alone(reference, alone, range(10), batch=batch)
    assert all(torch.equal(*pair) for pair in zip(begun, stem(model)))  # weight decay moves nothing either
    assert not any(optimizer.state.get(parameter) for parameter in stem(model)) and close(model, reference)

    optimizer.unfreeze(stem(model))
    reference.requires_grad_(True)
    alive.append(train(comm, model, optimizer, range(10, 20)))
    train_alone(reference, alone, range(10, 20), batch=batch)
    assert not any(torch.equal(*pair) for pair in zip(begun, stem(model)))
    assert replicas_agree(comm, model, "unfrozen") and close(model, reference)
    if isinstance(optimizer, Lamb):
        counts = [optimizer.state[parameter]["step"] for parameter in (model[0].weight, model[5].weight)]
        assert counts == [10, 20]

    head = [parameter.clone() for parameter in model[5].parameters()]
    for parameter in model[5].parameters():
        parameter.grad = torch.ones_like(parameter)  # left from a step
    optimizer.freeze(model[5].parameters())
    reference[5].requires_grad_(False)
    train(comm, model, optimizer, range(20, 25))
    train_alone(reference, alone, range(20, 25), batch=batch)
    assert all(torch.equal(*pair) for pair in zip(head, model[5].parameters()))

    optimizer.unfreeze(model.parameters())  # some of which are not frozen
    reference.requires_grad_(True)
    train(comm, model, optimizer, range(25, 30))
    train_alone(reference, alone, range(25, 30), batch=batch)
    assert replicas_agree(comm, model, "all") and close(model, reference)


def test_state_of_what_is_unfrozen_is_there_at_once(comm):
    """Zeros, so that it can be broadcast and saved before the first step."""
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = comm.wrap(Lamb(model.parameters(), lr=0.1), model)
    optimizer.unfreeze(model[0].parameters())
    state = optimizer.state[model[0].weight]
    assert state["step"] == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()


def test_a_second_optimizer_takes_over(comm):
    """One for the head, then a new one for the whole model: each gradient is reduced once, by the new one."""
    model, reference = small_model().double(), small_model().double()
    batch = comm.size * PASSES * MICRO
    first = comm.wrap(KINDS[0](model[5].parameters()), model, passes=PASSES)
    alive = train(comm, model, first, range(3))
    train_alone(reference, KINDS[0](reference[5].parameters()), range(3), batch=batch)
    model.zero_grad(), reference.zero_grad()
    second = comm.wrap(KINDS[0](model.parameters()), model, passes=PASSES)
    train(comm, model, second, range(3, 6))
    train_alone(reference, KINDS[0](reference.parameters()), range(3, 6), batch=batch)
    assert replicas_agree(comm, model, "second") and close(model, reference) and alive.requires_grad


def test_compression_is_kept(comm):
    model = small_model()
    optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, compression="fp16")
    optimizer.freeze(model[0].parameters())
    optimizer.unfreeze(model[0].parameters())
    for _ in range(2):
        model(torch.ones(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    assert (optimizer.sending.peak is None) == (comm.size == 1)
    assert not comm.size > 1 or len(optimizer.sending.peaks) == 0
    assert replicas_agree(comm, model, "compressed")


@pytest.mark.parametrize("trainable", [True, False])
def test_behind_our_back_raises_at_the_next_step(comm, trainable):
    model = small_model()
    model[0].requires_grad_(not trainable)
    optimizer = comm.wrap(KINDS[0](model.parameters()), model)
    model[0].requires_grad_(trainable)
    model(torch.ones(2, 3, 8, 8)).sum().backward()
    with pytest.raises(ValueError, match="2 parameters were .* unfrozen by requires_grad .* use optimizer.freeze"):
        optimizer.step()
    model[0].requires_grad_(not trainable)
    optimizer.step()  # what was begun is finished, so that nothing is left in flight


def test_mistakes(comm):
    model = small_model()
    plain = KINDS[0](model[5].parameters())
    optimizer = comm.wrap(plain, model)
    with pytest.raises(ValueError, match="wrapped already"):
        comm.wrap(optimizer, model)
    with pytest.raises(ValueError, match="2 of 2 parameters are not the optimizer's"):
        optimizer.unfreeze(model[0].parameters())
    model(torch.ones(2, 3, 8, 8)).sum().backward()
    with pytest.raises(ValueError, match="frozen or unfrozen inside a step"):
        optimizer.freeze(model[5].parameters())
    optimizer.step()
