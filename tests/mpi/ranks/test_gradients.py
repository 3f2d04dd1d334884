"""The gradient that the optimizer sees equals that of one big batch, for any ranks and passes."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parts import (
    CLASSES,
    OddModel,
    batch_of,
    images,
    seen_by_optimizer,
    serial_run,
    small_model,
    small_trainer,
    tiny_vit,
)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from largebatch.augment import Augment, Augmented, seed_for
from largebatch.config import accumulation_passes
from largebatch.data.order import Plan
from largebatch.losses import classification
from largebatch.optim import build_optimizer
from largebatch.optim.muon import cost, hidden_matrices
from largebatch.ranks import Stopped

MICRO = 4
BOUND = {torch.float64: 1e-12, torch.float32: 5e-6}  # of ||difference|| / ||gradient||, per tensor


def reference(plan: Plan, step: int, *, dtype: torch.dtype, model: nn.Module | None = None) -> list[Tensor]:
    """One backward pass over the whole global batch, mixed as its micro-batches are."""
    augment, model = Augment(CLASSES, mixup_alpha=0.2), model or small_model().to(dtype)
    mixed = []
    for micro in plan.micro_batches(step, 0, 1):
        batch = batch_of(plan, micro, dtype=dtype)
        mixed.append(
            augment(batch.images, batch.labels, torch.Generator().manual_seed(seed_for(3, step, micro.number)))
        )
    whole = Augmented(torch.cat([part.images for part in mixed]), torch.cat([part.targets for part in mixed]))
    (classification(model, whole) / plan.window_images(step)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("left_over", [0, 1, 5, 2 * MICRO + 3])  # images of a short last window
@pytest.mark.parametrize("passes", [1, 2, 3, 5])
def test_equal_to_one_big_batch(comm, passes, left_over, dtype):
    batch_size = comm.size * passes * MICRO
    if left_over >= batch_size:
        left_over = batch_size - 1  # unequal micro-batches all the same
    num_images = left_over or batch_size
    plan = Plan(num_samples=37, global_batch_size=batch_size, micro_batch_size=MICRO, num_images=num_images, seed=1)
    trainer = small_trainer(comm, plan, passes=passes, dtype=dtype)
    gradients, norm = seen_by_optimizer(trainer, trainer.open_batches(0))
    expected = reference(plan, 0, dtype=dtype)
    assert len(gradients) == len(expected)
    for ours, theirs in zip(gradients, expected):
        assert (ours - theirs).norm() <= BOUND[dtype] * theirs.norm()
    whole = torch.stack([gradient.norm() for gradient in expected]).norm()
    assert abs(norm - whole) <= BOUND[dtype] * whole  # logged and clipped: the reduced gradient's norm


@pytest.mark.parametrize("name", ["adamw", "schedule_free_adamw", "sgd", "lars", "muon"])
def test_every_optimizer_moves_as_on_one_big_batch(comm, name):
    """Three steps of two passes; then rank 0's state is given to ranks that have lost theirs, and the fourth step."""
    batch_size = comm.size * 2 * MICRO
    plan = Plan(num_samples=37, global_batch_size=batch_size, micro_batch_size=MICRO, num_images=4 * batch_size, seed=1)
    own, model = ((tiny_vit(depth=1) if name == "muon" else small_model()).double() for _ in range(2))
    options = {"optimizer_name": name, "clip_norm": 0.1, "dtype": torch.float64}
    trainer = small_trainer(comm, plan, passes=2, model=own, **options)
    batches = trainer.open_batches(0)
    optimizer = build_optimizer(model, name=name, lr=0.01, weight_decay=0.1)
    for step in range(4):
        if step == 3:
            if comm.rank:
                for state in trainer.optimizer.state.values():
                    for key, value in state.items():
                        state[key] = torch.full_like(value, 7.0)
                nn.init.ones_(next(trainer.model.parameters()))
                trainer.optimizer.param_groups[0]["weight_decay"] = 5.0
            comm.broadcast_state(trainer.model, trainer.optimizer)
        trainer.train_step(batches)
        reference(plan, step, dtype=torch.float64, model=model)
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()
        for ours, theirs in zip(trainer.model.parameters(), model.parameters()):
            assert (ours - theirs).norm() <= 1e-12 * theirs.norm(), f"step {step}"
    replicas = comm.allgather_object([p.tolist() for p in trainer.model.parameters()], name=f"replicas/{name}")
    assert all(one == replicas[0] for one in replicas)


@pytest.mark.parametrize("split_qkv", [False, True])
def test_the_products_that_ranks_share_are_those_of_one_process(comm, split_qkv):
    """To the bit, given the reduced gradients: shuffled, with dropout, a skipped step and a weight without gradient."""
    plan = Plan(num_samples=50, global_batch_size=48, micro_batch_size=4, num_images=48 * 4 + 10, seed=0)
    dropping = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.3}
    model, alone = (tiny_vit(depth=2, **dropping) for _ in range(2))
    options = {"optimizer_name": "muon", "split_qkv": split_qkv}
    trainer = small_trainer(comm, plan, passes=-(-12 // comm.size), model=model, **options)
    twin = build_optimizer(alone, name="muon", lr=0.01, weight_decay=0.1, split_qkv=split_qkv)
    healthy = trainer.objective
    trainer.objective = lambda model, batch: healthy(model, batch) * (math.nan if trainer.state.step == 2 else 1.0)

    def step_alone(*_) -> None:
        if trainer.state.step == 3:
            model.blocks[1].mlp.fc1.weight.grad = None
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        for group, other in zip(trainer.optimizer.param_groups, twin.param_groups, strict=True):
            other["lr"] = group["lr"]
        twin.step()

    trainer.optimizer.register_step_pre_hook(step_alone)
    trainer.fit()
    assert trainer.state.step == 5 and trainer.state.skipped == 1
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters()))
    states = zip(trainer.optimizer.state_dict()["state"].values(), twin.state_dict()["state"].values(), strict=True)
    assert all(torch.equal(one[key], other[key]) for one, other in states for key in other)


def test_one_rank_computes_each_product(comm):
    model = tiny_vit(depth=2)
    optimizer = comm.wrap(build_optimizer(model, name="muon", lr=0.01, weight_decay=0.1), model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    computed = comm.allgather_object(counter.get_total_flops(), name="computed")
    assert sum(computed) == sum(cost(p.shape) for p in hidden_matrices(model)) and max(computed) < 2 * min(computed)


def test_ranks_without_a_matrix_get_the_result_of_another(comm):
    model, alone = (nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2))
    twin = build_optimizer(alone, name="muon", lr=0.01, weight_decay=0.1)
    optimizer = comm.wrap(build_optimizer(model, name="muon", lr=0.01, weight_decay=0.1), model)
    alone.load_state_dict(model.state_dict())
    for one, other in zip(model.parameters(), alone.parameters()):
        one.grad, other.grad = (torch.arange(p.numel()).view_as(p) / 8 for p in (one, other))
    optimizer.step()
    twin.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), alone.parameters()))


def test_windows_of_unequal_passes_follow_each_other(comm):
    """A rank with nothing to do in the last window takes part in it, and the replicas stay equal."""
    batch_size = comm.size * 2 * MICRO
    plan = Plan(
        num_samples=37, global_batch_size=batch_size, micro_batch_size=MICRO, num_images=2 * batch_size + 3, seed=1
    )
    trainer = small_trainer(comm, plan, passes=2)
    trainer.fit()
    assert trainer.state.step == 3 and trainer.state.images == plan.num_images
    sums = comm.allgather_object(
        [float(parameter.double().sum()) for parameter in trainer.model.parameters()], name="sums"
    )
    assert all(one == sums[0] for one in sums)


@pytest.mark.parametrize("make", [small_model, OddModel])
@pytest.mark.parametrize("micro_batches", [2, 4, 7])
def test_any_number_of_ranks_shares_the_micro_batches(comm, micro_batches, make):
    """Also if they do not come out even, and if a rank has none in any step."""
    batch_size = micro_batches * MICRO
    plan = Plan(
        num_samples=37, global_batch_size=batch_size, micro_batch_size=MICRO, num_images=3 * batch_size + 2, seed=1
    )
    passes = accumulation_passes(
        global_batch_size=batch_size, micro_batch_size=MICRO, num_ranks=comm.size, resuming=True
    )
    trainer = small_trainer(comm, plan, passes=passes, model=make(), dtype=torch.float64)
    trainer.fit()
    for ours, theirs in zip(trainer.model.parameters(), serial_run(plan, make().double()).parameters()):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


def test_micro_batches_are_whole(comm):
    """The plan hands every image of a step to exactly one rank."""
    plan = Plan(num_samples=37, global_batch_size=40, micro_batch_size=4, num_images=93, seed=1)
    mine = [(m.number, m.start, m.stop) for step in range(3) for m in plan.micro_batches(step, comm.rank, comm.size)]
    everything = sorted(sum(comm.allgather_object(mine, name="micro"), []), key=lambda m: m[1])
    assert [m[1] for m in everything] == [0] + [m[2] for m in everything[:-1]] and everything[-1][2] == 93


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 5, 24])
def test_a_batch_shared_in_a_loop_of_your_own_has_the_gradient_of_the_whole(comm, length, passes):
    """Of its mean loss, also if parts are of unequal length, or if some ranks have fewer parts than others."""
    model, reference = (small_model().double() for _ in range(2))
    optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model, passes=passes)
    for step in range(2):
        samples = list(range(100 * step, 100 * step + length))
        labels = torch.tensor(samples) % CLASSES
        seen = []
        for part, targets, weight in comm.micro_batches(samples, labels, passes=passes):
            loss = F.cross_entropy(model(images(part, dtype=torch.float64)), targets)
            (weight * loss).backward()
            seen += part
        everything = sum(comm.allgather_object(seen, name="micro_batches/seen"), [])
        assert sorted(everything) == samples
        optimizer.synchronize()
        F.cross_entropy(reference(images(samples, dtype=torch.float64)), labels).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters()):
            assert (ours.grad - theirs.grad).norm() <= 1e-12 * theirs.grad.norm()
            theirs.grad = None
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        reference.load_state_dict(model.state_dict())


COLUMNS = {  # given the rank, whether ranks differ
    "labels": lambda odd: (torch.zeros(6, 2), torch.arange(6) + odd),
    "labels of bool": lambda odd: (torch.arange(6) == odd,),
    "indices in a list": lambda odd: ([*range(5), 7 + odd],),
    "indices of numpy": lambda odd: (np.arange(6) + odd,),
    "names": lambda odd: ([f"{k + odd}.jpg" for k in range(6)],),
    "a dict": lambda odd: ({"image": torch.zeros(6), "label": torch.arange(6) + odd},),
    "images alone": lambda odd: (torch.arange(6.0) + odd,),
    "another length": lambda odd: (torch.zeros(6 + odd, dtype=torch.int64),),
}


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("columns", COLUMNS)
def test_ranks_with_other_columns_end_together_before_the_step(comm, columns, before):
    model = nn.Linear(1, 1)
    optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model)
    for step in range(before + 1):
        odd = int(step == before and comm.size > 1 and comm.rank == comm.size - 1)
        for *_, weight in comm.micro_batches(*COLUMNS[columns](odd)):
            (weight * model(torch.ones(1, 1)).sum()).backward()
        if step == before and comm.size > 1:
            with pytest.raises(Stopped, match=f"other columns on rank {comm.size - 1} than on rank 0.*shuffle alike"):
                optimizer.step()
        else:
            optimizer.step()


def test_images_may_be_augmented_on_each_rank_in_another_way(comm):
    model = nn.Linear(1, 1)
    optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model)
    for _ in range(3):
        for pixels, _, weight in comm.micro_batches(torch.full((6, 1), float(comm.rank)), torch.arange(6)):
            (weight * model(pixels).sum()).backward()
        optimizer.step()


def test_a_dict_is_shared_column_by_column(comm):
    batch = {"image": torch.arange(10.0).view(5, 2), "label": list(range(5))}
    parts = [(part["image"].tolist(), part["label"]) for part, _ in comm.micro_batches(batch, passes=2)]
    everything = [sample for one in comm.allgather_object(parts, name="dict") for part in one for sample in zip(*part)]
    assert sorted(everything) == [([2.0 * k, 2.0 * k + 1], k) for k in range(5)]


@pytest.mark.parametrize("length", [2, 7, 24])
def test_draws_follow_the_part_and_leave_all_ranks_with_the_same_numbers(comm, length):
    """Also if some ranks have fewer parts; and a loop that is left early."""
    torch.manual_seed(5)
    passes, drawn = 12 // comm.size, []
    for part, _ in comm.micro_batches(list(range(length)), passes=passes):
        drawn += [(part[0], float(torch.rand(())))]
    for _ in comm.micro_batches(list(range(length)), passes=passes):
        break
    after = comm.allgather_object(float(torch.rand(())), name="draws/after")
    assert len(set(after)) == 1
    everything = sorted(sum(comm.allgather_object(drawn, name="draws"), []))
    torch.manual_seed(5)
    seed, expected = int(torch.randint(2**62, ())), []
    for part in range(12):
        start, stop = length * part // 12, length * (part + 1) // 12
        if start < stop:
            expected.append((start, float(torch.rand((), generator=torch.Generator().manual_seed(seed + part)))))
    assert everything == expected


NO_COLUMNS = [{1, 2}, iter([1]), 5, torch.tensor(3), None, nn.Linear(1, 1), {"a": [1], "b": [1, 2]}, {}]


@pytest.mark.parametrize("column", NO_COLUMNS, ids=lambda column: type(column).__name__)
def test_what_is_no_column_is_refused_in_a_sentence(comm, column):
    with pytest.raises(ValueError, match="^micro_batches got a "):
        comm.micro_batches(column)


def test_columns_that_cannot_be_shared_are_refused(comm):
    for columns, passes in ((([1, 2], [1]), 1), ((), 1), (([1],), 0)):
        with pytest.raises(ValueError, match="expected one column or more, of the same length, and at least one pass"):
            list(comm.micro_batches(*columns, passes=passes))
