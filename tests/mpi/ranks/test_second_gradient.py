"""Look-LayerSAM on ranks: the gradients are those of the global batch, and nothing of the run is lost or done twice."""

import copy
import logging
import math

import pytest
import torch
from parts import CLASSES, batch_of, plan_for, replicas_agree, small_model, small_trainer, stopped_and_resumed, tiny_vit
from torch import Tensor, nn

from largebatch.augment import Augment, seed_for
from largebatch.data.order import Plan
from largebatch.engine import Hook
from largebatch.hooks import Guards
from largebatch.hooks.noise_scale import NoiseScale
from largebatch.losses import classification
from largebatch.optim import LookSam, build_optimizer
from largebatch.optim.look_sam import AGE, DIRECTION

SAM = LookSam(rho=0.1, every=3, alpha=0.7)
RATES = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.2}


# -- one process, written out ------------------------------------------------------------------------------------


def gradients(plan: Plan, step: int, model: nn.Module) -> list[Tensor]:
    """Those of the global batch, with the draws of the trainer."""
    augment = Augment(CLASSES, mixup_alpha=0.2)
    model.zero_grad()
    for micro in plan.micro_batches(step, 0, 1):
        batch = batch_of(plan, micro, dtype=torch.float64)
        torch.manual_seed(seed_for(3, step, micro.number, purpose="model"))
        mixed = augment(batch.images, batch.labels, torch.Generator().manual_seed(seed_for(3, step, micro.number)))
        (classification(model, mixed) / plan.window_images(step)).backward()
    return [p.grad.clone() for p in model.parameters()]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def plain_run(plan: Plan, model: nn.Module, *, name: str, clip_norm: float) -> nn.Module:
    """The formulas once more, in one process and float64."""
    impl = {"impl": "plain"} if name == "lamb" else {}
    optimizer, params = build_optimizer(model, name=name, lr=0.01, weight_decay=0.1, **impl), list(model.parameters())
    for step in range(plan.num_steps):
        g = gradients(plan, step, model)
        if step % SAM.every == 0:
            start = [p.detach().clone() for p in params]
            with torch.no_grad():
                for p, one in zip(params, g):
                    if p.norm() > 0:
                        p += SAM.rho * p.norm() / one.norm() * one
            s = gradients(plan, step, model)
            with torch.no_grad():
                for p, before in zip(params, start):
                    p.copy_(before)
            d = flat(s) - flat(s).dot(flat(g)) / flat(g).dot(flat(g)) * flat(g)
            used = flat(s)
        else:
            used = flat(g) + SAM.alpha * flat(g).norm() / d.norm() * d
        used *= min(1.0, clip_norm / (used.norm() + 1e-6))
        for p, part in zip(params, used.split([p.numel() for p in params])):
            p.grad = part.view(p.shape).clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
    return model


@pytest.mark.parametrize(
    "name, passes", [("lamb", 1), ("lamb", 2), ("lamb", 3), ("lars", 2), ("adamw", 2), ("sgd", 2), ("muon", 2)]
)
def test_equal_to_one_process_written_out(comm, name, passes):
    """Seven steps of three cycles; the last has five images, so that ranks have fewer passes than others, or none."""

    def model() -> nn.Module:
        return (tiny_vit(depth=1, **RATES) if name == "muon" else small_model(dropout=0.3)).double()

    plan = plan_for(comm, passes=passes, steps=6, left_over=5 if comm.size > 1 or passes > 1 else 3)
    options = {"optimizer_name": name, "clip_norm": 0.05, "dtype": torch.float64}
    trainer = small_trainer(comm, plan, passes=passes, model=model(), sam=SAM, **options)
    trainer.fit()
    assert trainer.state.step == 7 and trainer.state.skipped == 0
    expected = plain_run(plan, model(), name=name, clip_norm=0.05)
    for ours, theirs in zip(trainer.model.parameters(), expected.parameters()):
        assert (ours - theirs).norm() <= 1e-11 * theirs.norm()
    assert replicas_agree(comm, trainer.model, f"look_sam/{name}/{passes}")


# -- what a step does to the run ---------------------------------------------------------------------------------


class Weights(Hook):
    """Keeps the weights at each pass."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def at_point(self, trainer) -> None:
        self.seen.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist())


def test_perturbed_weights_are_the_same_bits_on_all_ranks_and_are_taken_back(comm):
    trainer, weights = small_trainer(comm, plan_for(comm), passes=2, sam=SAM, lr=0.0, clip_norm=None), Weights()
    trainer.hooks = [weights]
    start = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.fit()
    first, second, third, fourth = weights.seen[:4]  # the fifth point is of the evaluation
    assert first == second and third == fourth and first != third
    assert all(seen == weights.seen for seen in comm.allgather_object(weights.seen, name="look_sam/perturbed"))
    moved = torch.tensor(third).split([p.numel() for p in start])
    for before, after, now in zip(start, moved, trainer.model.parameters()):
        assert torch.equal(before, now)
        length = (after.view_as(before) - before).norm()
        assert abs(length - SAM.rho * before.norm()) <= 1e-5 * before.norm()


def test_the_statistics_of_batch_norm_count_each_image_once(comm):
    def statistics(sam: LookSam | None) -> list[Tensor]:
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(8)
        model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), norm, nn.Flatten(), nn.Linear(32, CLASSES))
        small_trainer(comm, plan_for(comm), passes=2, model=model, sam=sam).fit()
        return [norm.running_mean, norm.running_var, norm.num_batches_tracked, torch.tensor(norm.momentum)]

    assert all(torch.equal(*pair) for pair in zip(statistics(SAM), statistics(None)))


@pytest.mark.parametrize("passes", [1, 2])
def test_the_noise_scale_is_that_of_the_first_gradient(comm, passes):
    found = []
    for sam in (SAM, None):
        plan = plan_for(comm, passes=passes)
        trainer = small_trainer(comm, plan, passes=passes, sam=sam)
        noise = NoiseScale(every_images=plan.global_batch_size)
        trainer.hooks = [noise]
        output = trainer.train_step(trainer.open_batches(0))
        found.append([*noise.measured(trainer).tolist(), float(output.grad_norm), float(output.loss_sum)])
    assert found[0] == found[1] and (found[0][1] == 1 or comm.size * passes == 1)


def test_a_loss_scale_changes_no_bit_and_grows_once_a_step(comm):
    """In float32, where powers of two are exact."""
    models = []
    for scale in (1.0, 1024.0):
        trainer = small_trainer(comm, plan_for(comm, steps=5), passes=2, sam=SAM)
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2, enabled=scale > 1)
        trainer.fit()
        assert trainer.state.skipped == 0 and trainer.scaler.get_scale() == (4096.0 if scale > 1 else 1.0)
        models.append(trainer.model)
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models)))


@pytest.mark.parametrize("moved", [False, True])
def test_a_gradient_that_is_not_finite_skips_the_step_and_the_next_is_at_moved_weights(comm, moved, caplog):
    """On one rank, at the weights of the run or at the moved ones."""
    caplog.set_level(logging.WARNING)
    trainer, calls = small_trainer(comm, plan_for(comm, steps=6), passes=2, sam=SAM), [0]
    trainer.hooks = [Guards(max_skipped_steps=9)]
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer.fit(max_steps=3)
    before = copy.deepcopy(trainer.model.state_dict()), copy.deepcopy(trainer.optimizer.state_dict()["state"])

    def objective(model, batch):
        calls[0] += trainer.state.step == 3
        spoilt = comm.rank == comm.size - 1 and trainer.state.step == 3 and calls[0] == (3 if moved else 2)
        return classification(model, batch) * (math.inf if spoilt else 1.0)

    trainer.objective = objective
    trainer.fit(max_steps=4)
    assert trainer.state.skipped == 1 and calls[0] == (4 if moved else 2)
    assert trainer.scaler.get_scale() == 32.0
    assert all(torch.equal(value, before[0][name]) for name, value in trainer.model.state_dict().items())
    for old, new in zip(before[1].values(), trainer.optimizer.state_dict()["state"].values()):
        assert all(torch.equal(torch.as_tensor(old[key]), torch.as_tensor(new[key])) for key in old if key != DIRECTION)
    if comm.rank == 0:
        named = "at the weights which Look-LayerSAM has moved is not finite" in caplog.messages[-1]
        assert named == moved and "step 4 skipped" in caplog.messages[-1]
    assert trainer.sam.due(trainer.optimizer)
    trainer.fit(max_steps=5)
    assert {group[AGE] for group in trainer.optimizer.param_groups} == {1}
    trainer.fit()
    assert trainer.state.skipped == 1 and replicas_agree(comm, trainer.model, f"look_sam/skipped/{moved}")


class LeaveAt(Hook):
    """Ends the run at a point, counted from 1."""

    def __init__(self, number: int) -> None:
        self.left = number

    def at_point(self, trainer) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.stop_reason = "the test says so"


def test_a_run_that_is_left_at_moved_weights_has_its_own_again(comm):
    trainer = small_trainer(comm, plan_for(comm, steps=2), passes=2, sam=SAM)
    start = copy.deepcopy(trainer.model.state_dict())
    trainer.hooks = [LeaveAt(4)]
    assert trainer.fit() == "the test says so" and trainer.state.step == 0
    assert all(torch.equal(value, start[name]) for name, value in trainer.model.state_dict().items())
    assert all(p.grad is None for p in trainer.model.parameters()) and trainer.sam.due(trainer.optimizer)


@pytest.mark.parametrize("name", ["lamb", "sgd"])
def test_a_resumed_run_goes_on_with_the_same_bits(comm, name, tmp_path_factory):
    """From any step of a cycle; rank 0 alone finds the checkpoint."""
    folder = tmp_path_factory.mktemp("resumed")

    def trainer():
        model = small_model(dropout=0.3)
        return small_trainer(comm, plan_for(comm, steps=6), passes=2, model=model, sam=SAM, optimizer_name=name)

    whole = trainer()
    whole.fit()
    for stop in (1, 3, 5):
        second = stopped_and_resumed(trainer, stop, folder)
        assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), second.model.parameters())), stop
        states = whole.optimizer.state_dict()["state"], second.optimizer.state_dict()["state"]
        for one, other in zip(*(state.values() for state in states)):
            assert DIRECTION in one and one.keys() == other.keys()
            assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)
        assert whole.optimizer.param_groups[0][AGE] == second.optimizer.param_groups[0][AGE]


def test_a_parameter_that_is_unfrozen_between_two_cycles_joins_them(comm):
    trainer = small_trainer(comm, plan_for(comm, steps=5), passes=2, sam=SAM)
    late = [trainer.model[0].weight]
    trainer.optimizer.freeze(late)
    frozen = late[0].detach().clone()
    trainer.fit(max_steps=2)
    assert torch.equal(late[0], frozen) and not trainer.optimizer.state[late[0]][DIRECTION].any()
    trainer.optimizer.unfreeze(late)
    trainer.fit()
    assert not torch.equal(late[0], frozen) and trainer.optimizer.state[late[0]][DIRECTION].any()
    assert replicas_agree(comm, trainer.model, "look_sam/unfrozen")
