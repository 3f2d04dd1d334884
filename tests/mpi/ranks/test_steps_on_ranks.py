"""The steps of a loop of one's own: the same samples, draws and gradients on any number of ranks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from largebatch.data.order import Plan
from largebatch.ranks import Stopped
from largebatch.steps import Steps

COUNT, EPOCHS, GLOBAL, MICRO = 22, 3, 10, 3  # 7 steps; of the last one's 6 samples, three ranks have two micro-batches
ORDER = {"global_batch_size": GLOBAL, "micro_batch_size": MICRO, "epochs": EPOCHS, "seed": 3}
PLAN = Plan(COUNT, GLOBAL, MICRO, COUNT * EPOCHS, 3)


class Images(Dataset):
    """Number, features float64 (5,), labels float64 (4,) and a draw of each sample."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor, Tensor]:
        own = torch.Generator().manual_seed(index)
        features = torch.randn(5, dtype=torch.float64, generator=own)
        return index, features, torch.rand(4, dtype=torch.float64, generator=own), torch.rand(())


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 4)).double()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_step_has_the_samples_and_draws_of_the_plan(comm, num_workers):
    """Each epoch has each sample once, on all ranks together."""
    seen = [[pair for numbers, _, _, draws, _ in micro_batches for pair in zip(numbers.tolist(), draws.tolist())]
            for micro_batches in Steps(comm, Images(), **ORDER, num_workers=num_workers)]  # fmt: skip
    everyone = comm.allgather_object(seen, name="test/seen")
    steps = [sorted(pair for one in everyone for pair in one[step]) for step in range(PLAN.num_steps)]
    expected = [PLAN.samples(PLAN.start(k), min(PLAN.start(k + 1), COUNT * EPOCHS))[1] for k in range(PLAN.num_steps)]
    assert [[number for number, _ in step] for step in steps] == [sorted(samples.tolist()) for samples in expected]
    of_samples = np.bincount(np.concatenate(expected))
    assert of_samples.tolist() == [EPOCHS] * COUNT
    alone = comm.broadcast_object(steps, name="test/steps")
    assert alone == steps and len({draw for step in steps for _, draw in step}) == COUNT * EPOCHS


def test_multi_label_training_is_that_of_whole_batches_in_float64(comm):
    """Binary cross entropy by its formula; the last step is short."""
    ours, serial = network(), network()
    steps = Steps(comm, Images(), **ORDER)
    optimizer = comm.wrap(torch.optim.SGD(ours.parameters(), lr=0.5, momentum=0.9), ours, passes=steps.passes)
    plain = torch.optim.SGD(serial.parameters(), lr=0.5, momentum=0.9)
    for number, micro_batches in enumerate(steps):
        for _, features, targets, _, weight in micro_batches:
            (weight * F.binary_cross_entropy_with_logits(ours(features), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
        _, samples = PLAN.samples(PLAN.start(number), min(PLAN.start(number + 1), COUNT * EPOCHS))
        _, features, targets, _ = zip(*(Images()[k] for k in samples.tolist()))
        share = serial(torch.stack(features)).sigmoid()
        right = torch.stack(targets)
        plain.zero_grad()
        (-(right * share.log() + (1 - right) * (1 - share).log()).sum() / right.numel()).backward()
        plain.step()
    for parameter, reference in zip(ours.parameters(), serial.parameters()):
        assert (parameter - reference).norm() <= 1e-12 * reference.norm()


def test_draws_of_a_model_do_not_depend_on_the_ranks(comm):
    """The first of a micro-batch; afterwards all ranks draw alike."""
    first = {}
    for step, micro_batches in enumerate(Steps(comm, Images(), **ORDER)):
        for numbers, *_ in micro_batches:
            first[step, numbers.tolist()[0]] = float(torch.rand(()))
    found = {place: draw for one in comm.allgather_object(first, name="test/first") for place, draw in one.items()}
    assert len(set(found.values())) == len(found) == sum(len(PLAN.micro_batches(k, 0, 1)) for k in range(7))
    after = comm.allgather_object(float(torch.rand(())), name="test/after")
    assert len(set(after)) == 1


def test_ranks_with_other_data_stop_together(comm):
    if comm.size == 1:
        pytest.skip("one rank has one dataset")
    with pytest.raises(Stopped, match="another order than on rank 0, num_samples 22, now 23: give all ranks the same"):
        Steps(comm, Images(COUNT + (comm.rank == 1)), **ORDER)
