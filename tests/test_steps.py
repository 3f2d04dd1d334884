"""The steps of a loop of one's own, on one rank; tests/mpi/ranks/test_steps_on_ranks.py has more ranks."""

import itertools
import os
import random
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from largebatch import Lamb, Steps
from largebatch.checkpoint import checkpoints
from largebatch.ranks import Stopped, StoppedEarly
from largebatch.ranks.mistakes import Mistake
from largebatch.ranks.signals import SIGNALS
from largebatch.ranks.single import Single

ORDER = {"global_batch_size": 8, "micro_batch_size": 3, "epochs": 3}  # of 22 samples: 9 steps, the last of 2


class Noisy(Dataset):
    """Sample k is k, and a draw of each generator."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([torch.rand(()), np.random.rand(), random.random()])


def of_torch(name):
    return lambda model, lr: getattr(torch.optim, name)(model.parameters(), lr=lr)


class Killed(Exception):
    pass


def train(
    folder, *, until: int | None = None, told: bool = False, width: int = 4, kind=Lamb.paper, **order
) -> dict[str, torch.Tensor]:
    """Train with dropout and noise; after `until` steps end by an error, or by a signal."""
    comm = Single()
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.BatchNorm1d(width), nn.Linear(width, 1))
        steps = Steps(comm, Noisy(), **ORDER | order)
        optimizer = comm.wrap(kind(model, lr=0.1), model, passes=steps.passes)
        steps.checkpoint(folder, model, optimizer, every=2)
        for micro_batches in steps:
            for indices, draws, weight in micro_batches:
                (weight * F.mse_loss(model(draws)[:, 0], indices / 22)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if steps.step + 1 == until and not told:
                raise Killed
            if told:
                os.kill(os.getpid(), signal.SIGTERM)
        return model.state_dict()
    finally:
        comm.shutdown()


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    whole = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "cut", until=5)
    assert [path.name for path in checkpoints(tmp_path / "cut")] == ["00000004", "00000002"]
    resumed = train(tmp_path / "cut")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    again = train(tmp_path / "cut")  # there is nothing left to do
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_signal_ends_the_run_with_a_checkpoint_and_code_75(tmp_path):
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.raises(StoppedEarly, match=r"^stopped after step (\d+) of 523, because SIGTERM reached 1 of 1") as stop:
        train(tmp_path, told=True, epochs=190, num_workers=1)
    assert stop.value.exit_code == 75
    assert f"step {int(checkpoints(tmp_path)[0].name)} of" in str(stop.value)
    for number, handler in before.items():  # the process was to end
        signal.signal(number, handler)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_draws_follow_from_seed_epoch_and_sample(num_workers):
    comm = Single()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    steps = Steps(comm, Noisy(), **ORDER, seed=7, num_workers=num_workers)
    found = [(indices, draws) for micro_batches in steps for indices, draws, _ in micro_batches]
    after = torch.rand(()), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert after == (torch.rand(()), np.random.rand(), random.random())  # a program's own numbers stay
    indices, draws = (torch.cat(column) for column in zip(*found))
    epochs, samples = steps.plan.samples(0, 66)
    assert indices.tolist() == samples.tolist()
    assert len(draws.unique()) == draws.numel()
    reversed_order = Steps(comm, Noisy(), **ORDER | {"global_batch_size": 22, "micro_batch_size": 22}, seed=7)
    again = {(epoch, int(index)): row for epoch, parts in enumerate(reversed_order) for part in parts
             for index, row in zip(*part[:2])}
    assert all(torch.equal(row, again[place]) for row, place in zip(draws, zip(epochs.tolist(), samples.tolist())))
    comm.shutdown()


def test_draws_for_a_micro_batch_follow_from_seed_and_step():
    """Also where worker processes, and no samples of this process, draw before."""
    comm, found = Single(), []
    for num_workers in (0, 2):
        steps = Steps(comm, Noisy(), **ORDER, num_workers=num_workers)
        found += [[(torch.rand(()).item(), np.random.rand(), random.random()) for _ in part] for part in steps]
    assert found[:9] == found[9:] and len({draw for part in found for draws in part for draw in draws}) == 3 * 25
    comm.shutdown()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"global_batch_size": 6}, "was made with global_batch_size 8, now 6: give what it was made with"),
        ({"epochs": 4}, "was made with num_images 66, now 88"),
        ({"width": 5}, r"was made with the model's 0.weight \[4, 3\], now \[5, 3\]"),
        ({"kind": of_torch("AdamW")}, "was made with the optimizer Lamb, now AdamW: give what it was made with"),
        ({"kind": of_torch("SGD")}, "was made with the optimizer Lamb, now SGD"),
    ],
)
def test_a_checkpoint_of_another_order_optimizer_or_model_is_refused(tmp_path, change, sentence):
    train(tmp_path)
    saved = [path.name for path in checkpoints(tmp_path)]
    with pytest.raises(Stopped, match=sentence):
        train(tmp_path, **change)
    assert [path.name for path in checkpoints(tmp_path)] == saved


class Endless(IterableDataset):
    def __iter__(self):
        yield from range(9)


DATA = TensorDataset(torch.arange(9.0))


@pytest.mark.parametrize(
    "data, options, sentence",
    [
        (Endless(), {}, "got a Endless as dataset: expected one with __getitem__ and __len__"),
        (DATA, {"epochs": 0}, "epochs is 0, expected at least 1"),
        (DATA, {"shuffle": True}, "got shuffle, which follow from its own order: leave them out"),
        (DATA, {"micro_batch_size": 9}, "micro_batch_size 9 is larger than global_batch_size 8"),
        (TensorDataset(torch.arange(0)), {}, "got a dataset without samples"),
    ],
)
def test_a_mistake_is_one_sentence(data, options, sentence):
    with pytest.raises((Mistake, Stopped), match=sentence):
        Steps(Single(), data, **ORDER | options)


def test_micro_batches_that_were_left_are_a_mistake():
    with pytest.raises(Mistake, match="step 1 has micro-batches left: take all before the next step"):
        for micro_batches in Steps(Single(), DATA, **ORDER):
            next(micro_batches)


def test_a_loop_that_was_left_goes_on_with_its_iterator_alone():
    """A new one would begin with the step that was left, which is not counted yet."""
    steps, seen = Steps(Single(), DATA, **ORDER), []
    left = iter(steps)
    for micro_batches in itertools.chain(itertools.islice(left, 2), left):
        seen += [values.tolist() for values, _ in micro_batches]
    assert sorted(sum(seen, [])) == sorted(3 * [*range(9)]) and steps.step == steps.num_steps
    steps = Steps(Single(), DATA, **ORDER)
    for micro_batches in itertools.islice(steps, 2):
        [*micro_batches]
    with pytest.raises(Mistake, match="the loop was left in step 2: keep one iter.steps., and go on with that"):
        next(iter(steps))


def test_a_folder_at_an_address_is_a_mistake():
    comm = Single()
    with pytest.raises(Mistake, match="got the address s3://bucket/run as folder: expected a folder of this host"):
        Steps(comm, Noisy(), **ORDER).checkpoint("s3://bucket/run", nn.Linear(1, 1), None, every=1)
    comm.shutdown()


def test_two_runs_in_one_folder_are_refused(tmp_path):
    model = nn.Linear(1, 1)
    first, second = Single(), Single()
    Steps(first, DATA, **ORDER).checkpoint(tmp_path, model, Lamb.paper(model, lr=0.1), every=1)
    with pytest.raises(Stopped, match="or choose another folder.$"):
        Steps(second, DATA, **ORDER).checkpoint(tmp_path, model, Lamb.paper(model, lr=0.1), every=1)
    first.shutdown(), second.shutdown()
