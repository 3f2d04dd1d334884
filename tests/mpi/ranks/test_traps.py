"""What surprises in Horovod, shown not to be reachable through our API. Run on two and three ranks."""

import copy
import io
import math
import pickle
import time
from collections.abc import Iterator
from functools import partial

import horovod.torch as hvd
import pytest
import torch
from parts import OddModel, plan_for, replicas_agree, serial_run, small_model, small_trainer, tiny_vit
from torch import nn

from largebatch import checkpoint
from largebatch.config import RunConfig, TrainConfig, dump
from largebatch.data.order import Plan
from largebatch.engine import Hook
from largebatch.hooks.ema import Ema
from largebatch.optim import PRESETS, Lamb, Lars, Muon, build_optimizer, init_state
from largebatch.ranks import Stopped
from largebatch.ranks.reduction import Reduced


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_wrapping_keeps_every_option(comm, preset):
    """Horovod makes a new optimizer from the param groups alone."""
    model = small_model()
    plain = build_optimizer(model, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3, preset=preset)
    before = [
        {key: copy.copy(value) for key, value in group.items() if key != "params"} for group in plain.param_groups
    ]
    wrapped = comm.wrap(plain, model, passes=2)
    after = [{key: value for key, value in group.items() if key != "params"} for group in wrapped.param_groups]
    assert after == before
    assert isinstance(wrapped, Lamb)


@pytest.mark.parametrize("rest", ["adamw", "lamb"])
def test_wrapping_keeps_every_option_of_muon_and_of_the_rest(comm, rest):
    model = tiny_vit(depth=1)
    options = {"preset": "nvlamb", "impl": "eager"} if rest == "lamb" else {}
    options |= dict(betas=(0.8, 0.9), momentum=0.7)
    plain = build_optimizer(model, name="muon", rest=rest, lr=0.1, weight_decay=0.3, **options)
    before = [{key: copy.copy(value) for key, value in g.items() if key != "params"} for g in plain.param_groups]
    wrapped = comm.wrap(plain, model, passes=2)
    assert [{key: value for key, value in g.items() if key != "params"} for g in wrapped.param_groups] == before
    assert isinstance(wrapped, Muon)


def muon(parameters: Iterator[nn.Parameter], *, lr: float, weight_decay: float) -> Muon:
    """Both kinds, for a model whose only matrix is its classifier."""
    params, common = list(parameters), dict(lr=lr, weight_decay=weight_decay)
    matrices, rest = ([p for p in params if (p.ndim == 2) == wanted] for wanted in (True, False))
    return Muon([{"params": matrices, "kind": "muon", **common}, {"params": rest, "kind": "adamw", **common}])


def test_a_broadcast_tells_torch_which_tensors_changed(comm):
    """Horovod writes past torch. So whoever keeps something made of a weight would not know that it is old."""
    model = small_model(seed=comm.rank)
    model.register_buffer("count", torch.tensor(comm.rank))
    before = [tensor._version for tensor in model.state_dict().values()]
    comm.broadcast_model(model)
    after = [tensor._version for tensor in model.state_dict().values()]
    assert comm.size == 1 or all(version > old for version, old in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", [muon, Lamb, Lars, torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_broadcast_moves_nothing(comm, kind):
    """Resumed on rank 0 alone: everybody ends with rank 0's bits, and no step is taken anywhere."""
    model = small_model(seed=comm.rank)
    model.register_buffer("flag", torch.tensor([comm.rank == 0]))  # bool: not a type of Horovod's
    model.register_buffer("share", torch.full((2,), float(comm.rank), dtype=torch.bfloat16))
    model.register_buffer("count", torch.tensor(comm.rank))
    model.register_buffer("angles", torch.full((3,), 0.5 + comm.rank), persistent=False)  # each host computes its own
    optimizer = comm.wrap(kind(model.parameters(), lr=0.1 + comm.rank, weight_decay=0.5), model, passes=1)
    init_state(optimizer)
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                value.fill_(comm.rank + 1)
    roots = comm.broadcast_object([parameter.detach().clone() for parameter in model.parameters()], name="roots")
    comm.broadcast_state(model, optimizer)
    for parameter, root in zip(model.parameters(), roots):
        assert torch.equal(parameter, root)
    assert bool(model.flag) and model.share.tolist() == [0, 0] and int(model.count) == 0
    assert model.angles.tolist() == [0.5] * 3
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}
    for state in optimizer.state.values():
        assert all(bool((value == 1).all()) for value in state.values() if torch.is_tensor(value))


def test_horovods_own_broadcast_of_the_state_moves_nothing(comm):
    """It takes a step with gradients of zero if there is no state, and decay would move the weights."""
    model = small_model()
    optimizer = comm.wrap(Lamb.paper(model, lr=0.1 + comm.rank, weight_decay=0.5), model)
    before, groups = copy.deepcopy(model.state_dict()), [dict(group, lr=0.1) for group in optimizer.param_groups]
    if comm.failures == (hvd.HorovodInternalError,):  # else there is no Horovod
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups == groups
    assert all(state["step"] == 0 and not state["exp_avg"].any() for state in optimizer.state.values())


def test_a_state_that_one_rank_lacks_ends_all(comm):
    """Rank 0 has loaded that of a bias that was unfrozen later; the others have never had it."""
    model = small_model()
    model[0].bias.requires_grad_(comm.rank == 0)
    optimizer = Lamb(model.parameters())
    init_state(optimizer)
    if comm.size == 1:
        comm.broadcast_state(model, optimizer)
        return
    with pytest.raises(Stopped, match="rank 1 has other optimizer state than rank 0, which differ in 0.bias/exp_avg:"):
        comm.broadcast_state(model, optimizer)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_takes_its_argument(comm, set_to_none):
    model = small_model()
    optimizer = comm.wrap(Lamb(model.parameters(), lr=0.1), model, passes=1)
    model(torch.ones(2, 3, 8, 8)).sum().backward()
    with pytest.raises(ValueError, match="would race with the reduction"):
        optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.synchronize()
    optimizer.zero_grad(set_to_none=set_to_none)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(g is None if set_to_none else not g.any() for g in gradients)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda model: model.bfloat16(), "torch.bfloat16, which is not reduced"),
        (lambda model: model.to(memory_format=torch.channels_last), "not contiguous"),
    ],
)
def test_what_cannot_be_reduced_is_refused(comm, spoil, reason):
    model = spoil(small_model())
    with pytest.raises(ValueError, match=reason):
        comm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, passes=1)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_overflow_on_one_rank_skips_the_step_on_all(comm, precision):
    trainer = small_trainer(comm, plan_for(comm, steps=4), passes=2, precision=precision, mixup_alpha=0.0)
    batches = list(trainer.open_batches(0))
    trainer.train_step(iter(batches[:2]))
    before = copy.deepcopy(trainer.model.state_dict()), copy.deepcopy(trainer.optimizer.state_dict())
    scale = trainer.scaler.get_scale()
    if comm.rank == comm.size - 1:
        batches[3].images.fill_(float("inf"))
    output = trainer.train_step(iter(batches[2:4]))
    assert not output.applied and trainer.state.skipped == 1 and trainer.state.step == 2
    after = trainer.model.state_dict(), trainer.optimizer.state_dict()
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    for old, new in zip(before[1]["state"].values(), after[1]["state"].values()):
        assert all(torch.equal(torch.as_tensor(old[key]), torch.as_tensor(new[key])) for key in old)
    steps = [[group.get("step") for group in one["param_groups"]] for one in (before[1], after[1])]
    assert str(steps[0]) == str(steps[1])  # Lamb's own count stands still
    assert trainer.scaler.get_scale() == (scale / 2 if precision == "fp16" else 1)
    assert trainer.train_step(iter(batches[4:6])).applied
    assert replicas_agree(comm, trainer.model, f"overflow/{precision}")


def test_repeats_to_the_last_bit(comm):
    """In deterministic mode, with three ranks too, where the order of a sum matters."""
    results = []
    for _ in range(2):
        trainer = small_trainer(comm, plan_for(comm, steps=4), passes=2, model=OddModel(dropout=0.3))
        trainer.fit()
        results.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*results))
    assert replicas_agree(comm, trainer.model, "repeat")


def test_each_tensor_is_reduced_by_itself(comm):
    """What is fused depends on timing, and the order of a fused sum on what is fused: here nothing is."""
    tensors = [torch.randn(5000, generator=torch.Generator().manual_seed(100 * comm.rank + k)) for k in range(50)]
    alone = [comm.allreduce(tensor, name=f"alone/{k}") for k, tensor in enumerate(tensors)]
    handles = [comm.start_allreduce(tensor, name=f"at once/{k}") for k, tensor in enumerate(tensors)]
    for one, handle in zip(alone, handles):
        assert torch.equal(one, comm.finish_allreduce(handle))


def test_who_waits_for_a_rank_leaves_its_core_to_others(comm):
    """Rank 0 is late by 0.3 s: Horovod's own waits would compute for as long."""
    model = small_model()
    optimizer = comm.wrap(Lamb(model.parameters()), model)
    waits = {
        "barrier": partial(comm.barrier, name="late"),
        "objects": partial(comm.allgather_object, comm.rank, name="late/objects"),
        "object": partial(comm.broadcast_object, comm.rank, name="late/object"),
        "gradients": optimizer.synchronize,
    }
    for name, wait in waits.items():
        comm.barrier(name=f"late/before {name}")
        if comm.rank == 0:
            time.sleep(0.3)
        began = time.thread_time()
        wait()
        assert time.thread_time() - began < 0.1, name


def test_dropout_follows_the_micro_batch_not_the_rank(comm):
    """With dropout and mixup on, the ranks together compute what one rank alone would."""
    plan = Plan(num_samples=50, global_batch_size=48, micro_batch_size=4, num_images=48 * 3, seed=0)
    trainer = small_trainer(comm, plan, passes=12 // comm.size, model=OddModel(dropout=0.5), dtype=torch.float64)
    trainer.fit()
    for ours, theirs in zip(
        trainer.model.parameters(), serial_run(plan, OddModel(dropout=0.5).double()).parameters()
    ):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


def test_the_average_does_not_depend_on_ranks(comm):
    """A short last step and a skipped one included: the weights after each step, weighted by the images since."""
    plan = Plan(num_samples=50, global_batch_size=48, micro_batch_size=4, num_images=48 * 4 + 10, seed=0)
    model = small_model(dropout=0.5)
    trainer = small_trainer(comm, plan, passes=12 // comm.size, model=model, dtype=torch.float64)
    ema = Ema(small_model(seed=7 + comm.rank).double(), half_life_images=30)  # begins with the weights of the run
    recorded: list[tuple[int, bool, list[torch.Tensor]]] = []

    class Record(Hook):
        def after_train_step(self, trainer, output):
            weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
            recorded.append((output.images, output.applied, weights))

    healthy = trainer.objective
    trainer.objective = lambda model, batch: healthy(model, batch) * (math.nan if trainer.state.step == 2 else 1.0)
    trainer.hooks = [ema, Record()]
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.fit()
    assert [images for images, *_ in recorded] == [48, 48, 48, 48, 10]
    assert [applied for _, applied, _ in recorded] == [True, True, False, True, True]
    for images, applied, weights in recorded:
        decay = 0.5 ** (images / 30) if applied else 1.0
        expected = [decay * one + (1 - decay) * other for one, other in zip(expected, weights)]
    for ours, theirs in zip(ema.model.parameters(), expected):
        assert (ours - theirs).norm() <= 1e-14 * theirs.norm() and not ours.requires_grad
    assert replicas_agree(comm, ema.model, "average")
    metrics = {"top1": 1.0}
    ema.after_evaluate(trainer, metrics)
    own = trainer.evaluate(ema.model)
    assert metrics == {"top1": 1.0, "ema_top1": own["top1"], "ema_loss": own["loss"]}
    assert own["loss"] != trainer.evaluate()["loss"]


def test_the_average_that_rank_0_found_is_given_to_all(comm, tmp_path):
    """Resumed on every rank alike, from a file that only rank 0 can see; and so is the loss scale."""
    config = TrainConfig(run=RunConfig(folder=str(tmp_path)))  # a folder for each rank
    averages = []
    for seed, saving in ((1, True), (2, False)):
        trainer = small_trainer(comm, plan_for(comm, steps=4), passes=2)
        averages.append(small_model(seed=seed + comm.rank))
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=512.0 if saving and comm.rank == 0 else 64.0)
        if saving and comm.rank == 0:
            snapshot = checkpoint.take_snapshot(
                model=trainer.model, optimizer=trainer.optimizer, scaler=trainer.scaler,
                state=trainer.state, config_text=dump(config), average=averages[0],
            )  # fmt: skip
            checkpoint.save(tmp_path, snapshot)
    trainer.average = averages[1]
    assert checkpoint.resume(config, trainer)
    assert replicas_agree(comm, averages[1], "resumed average") and trainer.scaler.get_scale() == 512.0
    if comm.rank == 0:
        assert all(torch.equal(p, q) for p, q in zip(averages[0].parameters(), averages[1].parameters()))


def test_a_step_without_its_reduction_leaves_each_rank_its_own_gradient(comm):
    """The other half of the benchmark's exposed communication; the optimizer that is reduced sees nothing of it."""
    model, own = small_model(), small_model()
    optimizer = comm.wrap(torch.optim.SGD(own.parameters(), lr=0.0), own, passes=1)
    optimizer.sends = False
    wrapped = comm.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, passes=1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for trained, stepped, expected in ((own, optimizer, comm.rank + 1), (model, wrapped, (comm.size + 1) / 2)):
        ((comm.rank + 1) * sum(parameter.sum() for parameter in trained.parameters())).backward()
        stepped.synchronize()
        for parameter in trained.parameters():
            assert torch.allclose(parameter.grad, torch.full_like(parameter, expected))
        assert stepped.step_if_finite(scaler, torch.ones(()))


def test_failures_of_setting_up_stop_all_ranks_with_the_cause(comm):
    with pytest.raises(Stopped) as stopped:
        with comm.together("reading"):
            if comm.rank == comm.size - 1:
                raise ValueError("no such folder")
    where = f"rank {comm.rank if comm.size == 1 else comm.size - 1} of {comm.size}, reading: "
    assert str(stopped.value) == ("" if comm.size == 1 else where) + "no such folder"


# -- mistakes of a loop of one's own, on one rank as on several ------------------------------------------------------


def sgd(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def loss_of(model: nn.Module, number: int = 0) -> torch.Tensor:
    """The same on all ranks, so that the reduced gradient is that of one process."""
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return model(pixels).square().mean()


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all((p - q).norm() <= 1e-12 * q.norm() for p, q in zip(ours.parameters(), theirs.parameters()))


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_pass_more_than_announced_is_one_sentence_whose_remedy_works(comm, passes):
    model, reference = small_model().double(), small_model().double()
    optimizer = comm.wrap(sgd(model), model, passes=passes)
    for number in range(passes):
        loss_of(model, number).backward()
    sentence = rf"was computed {passes + 1} times in a step of {passes} pass.* passes={passes + 1},"
    with pytest.raises(ValueError, match=sentence):
        loss_of(model, passes).backward()
    with pytest.raises(ValueError, match="was changed or dropped between"):  # and nothing is left under way
        optimizer.synchronize()
    model.zero_grad()
    optimizer, alone = comm.wrap(sgd(model), model, passes=passes + 1), sgd(reference)
    for number in range(passes + 1):
        loss_of(model, number).backward()
        loss_of(reference, number).backward()
    optimizer.step(), alone.step()
    assert same(model, reference)


@pytest.mark.parametrize("computed", [0, 1, 2])
def test_a_pass_fewer_than_announced_gives_the_gradients_of_those_there_were(comm, computed):
    """And without any pass nothing moves, whatever the weight decay."""
    model, reference = small_model().double(), small_model().double()
    optimizer, alone = comm.wrap(sgd(model, weight_decay=0.1), model, passes=3), sgd(reference, weight_decay=0.1)
    for _ in range(2):
        for number in range(computed):
            loss_of(model, number).backward()
            loss_of(reference, number).backward()
        optimizer.step(), alone.step()
        optimizer.zero_grad(), alone.zero_grad()
    assert same(model, reference)


def test_a_step_may_be_left_out_and_a_second_one_needs_no_backward(comm):
    """After the first of two passes; and both steps without zero_grad, as in one process."""
    model, reference = small_model().double(), small_model().double()
    optimizer, alone = comm.wrap(sgd(model), model, passes=2), sgd(reference)
    loss_of(model, 7).backward()
    optimizer.zero_grad()
    for number in range(2):
        loss_of(model, number).backward()
        loss_of(reference, number).backward()
    for _ in range(2):
        optimizer.step(), alone.step()
    assert same(model, reference)


SPOIL = {
    "clip": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "zero": lambda model, optimizer: model.zero_grad(),
    "replace": lambda model, optimizer: setattr(model[5].weight, "grad", model[5].weight.grad * 2),
}


@pytest.mark.parametrize("spoil", SPOIL)
def test_gradients_are_not_touched_while_they_are_reduced(comm, spoil):
    """With the remedy of the sentence the step is that of one process."""
    model, reference = small_model().double(), small_model().double()
    optimizer, alone = comm.wrap(sgd(model), model), sgd(reference)
    loss_of(model).backward()
    SPOIL[spoil](model, optimizer)
    with pytest.raises(ValueError, match="call optimizer.synchronize\\(\\) before you clip, unscale or change"):
        optimizer.step()
    model.zero_grad()
    loss_of(model).backward()
    loss_of(reference).backward()
    optimizer.synchronize()
    for net, stepped in ((model, optimizer), (reference, alone)):
        SPOIL[spoil](net, stepped)
    with optimizer.skip_synchronize():
        optimizer.step()
    alone.step()
    assert same(model, reference)


def test_a_step_without_its_reduction_is_refused(comm):
    model = small_model().double()
    optimizer = comm.wrap(sgd(model), model)
    loss_of(model).backward()
    with pytest.raises(ValueError, match="gradients that are not reduced: call optimizer.synchronize"):
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")


@pytest.mark.parametrize("kind", [sgd, lbfgs])
def test_a_closure_computes_what_the_ranks_reduce(comm, kind):
    """Each rank has a part of the mean loss; LBFGS decides by that mean, and calls the closure many times."""
    model, reference = small_model().double(), small_model().double()
    optimizer, alone = comm.wrap(kind(model), model), kind(reference)

    def closure_of(net, stepped, parts):
        def closure():
            stepped.zero_grad()
            loss = torch.stack([loss_of(net, number) for number in parts]).mean()
            loss.backward()
            return loss

        return closure

    for _ in range(2):
        ours = optimizer.step(closure_of(model, optimizer, [comm.rank]))
        theirs = alone.step(closure_of(reference, alone, range(comm.size)))
        assert abs(ours - theirs) <= 1e-9 * theirs
    assert all((p - q).norm() <= 1e-9 * q.norm() for p, q in zip(model.parameters(), reference.parameters()))
    assert replicas_agree(comm, model, "closure")


@pytest.mark.parametrize("number", [float, torch.as_tensor])
def test_a_closure_of_a_rank_without_images_takes_part(comm, number):
    """It returns the sum of nothing, or a plain number; all ranks get the mean."""
    model = small_model().double()
    optimizer = comm.wrap(sgd(model), model)
    losses = [3.0] if comm.rank == 0 else []

    def closure():
        optimizer.zero_grad()
        (loss_of(model) * len(losses)).backward()
        return sum(map(number, losses))

    assert float(optimizer.step(closure)) == pytest.approx(3.0 / comm.size, rel=1e-12)

    def silent():
        optimizer.zero_grad()
        loss_of(model).backward()

    assert optimizer.step(silent) is None


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """GradScaler calls its step by another way."""
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


@pytest.mark.parametrize("kind", [sgd, fused])
def test_a_scaler_before_the_reduction_is_refused(comm, kind):
    """Not one that is disabled: it leaves the gradients alone."""
    model = small_model().double()
    optimizer = comm.wrap(kind(model), model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # puts a function around the step
    loss_of(model).backward()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    schedule.step()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(ValueError, match="unscales gradients while they are being reduced: call optimizer.synchronize"):
        scaler.step(optimizer)
    optimizer.synchronize()


@pytest.mark.parametrize("kind", [sgd, fused])
def test_a_scaler_steps_as_in_one_process(comm, kind):
    model, reference = small_model().double(), small_model().double()
    optimizer, alone = comm.wrap(kind(model), model), kind(reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        scale = math.inf if step == 1 and comm.rank == comm.size - 1 else 1.0
        (scaler.scale(loss_of(model, step)) * scale).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 1:
            loss_of(reference, step).backward()
            alone.step()
            alone.zero_grad()
    assert same(model, reference) and scaler.get_scale() == 32.0


def test_wrapping_keeps_hooks_state_and_defaults(comm):
    """Also the hooks of parameters, which come before the reduction; and a scheduler of the given instance."""
    model, reference, called = small_model().double(), small_model().double(), []
    plains = [torch.optim.AdamW(net.parameters(), lr=0.05, betas=(0.7, 0.8)) for net in (model, reference)]

    def thrice(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(3)

    for net, plain in zip((model, reference), plains):
        loss_of(net, 9).backward()
        plain.step()  # moments, which the wrapped one takes over
        plain.zero_grad()
        net[5].bias.register_post_accumulate_grad_hook(thrice)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(plain, 0.5) for plain in plains]
    plains[0].register_step_pre_hook(lambda *_: called.append("before"))
    plains[0].register_step_post_hook(lambda *_: called.append("after"))
    plains[0].register_state_dict_post_hook(lambda _, state: state | {"mine": 1})
    optimizer = comm.wrap(plains[0], model)
    assert optimizer.defaults == plains[0].defaults and optimizer.state_dict()["mine"] == 1
    for step in range(3):
        for net, stepped, scheduler in zip((model, reference), (optimizer, plains[1]), schedulers):
            loss_of(net, step).backward()
            stepped.step()
            stepped.zero_grad()
            scheduler.step()
        if step == 0:  # as a run that resumes
            optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before", "after"] * 3 and same(model, reference)
    assert optimizer.param_groups[0]["lr"] == plains[1].param_groups[0]["lr"] == 0.05 / 8


def test_users_treat_a_wrapped_optimizer_as_their_own(comm):
    """A scheduler of it, hooks added to it, its state in a file, and copies, which reduce nothing."""
    model, reference, called = small_model().double(), small_model().double(), []
    optimizer, alone = comm.wrap(Lamb.paper(model, lr=0.05), model), Lamb.paper(reference, lr=0.05)
    assert isinstance(optimizer, Lamb) and isinstance(optimizer, Reduced) and type(optimizer).__name__ == "Lamb"
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, alone)]
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    handle = optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for step in range(4):
        for net, stepped, scheduler in zip((model, reference), (optimizer, alone), schedulers):
            loss_of(net, step).backward()
            stepped.step()
            stepped.zero_grad()
            scheduler.step()
        if step == 1:  # as a run that resumes
            file = io.BytesIO()
            torch.save([optimizer.state_dict(), schedulers[0].state_dict()], file)
            file.seek(0)
            for part, state in zip((optimizer, schedulers[0]), torch.load(file)):
                part.load_state_dict(state)
        if step == 2:
            handle.remove()
    assert called == ["before", "after"] * 3 + ["before"] and same(model, reference)
    assert optimizer.param_groups[0]["lr"] == alone.param_groups[0]["lr"] == 0.05 / 16
    for other in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        assert type(other[1]) is Lamb and other[1].param_groups[0]["params"][0] is [*other[0].parameters()][0]
        loss_of(other[0], 5).backward()
        other[1].step()
    loss_of(reference, 5).backward()
    alone.step()
    assert same(other[0], reference) and not same(model, reference)


class Needs(torch.optim.SGD):
    def __init__(self, params, rate):
        super().__init__(params, lr=rate)
        self.mine = rate


def test_an_optimizer_may_need_arguments(comm):
    """Horovod makes one anew, from the param groups alone."""
    model, reference = small_model().double(), small_model().double()
    optimizer, alone = comm.wrap(Needs(model.parameters(), 0.1), model), Needs(reference.parameters(), 0.1)
    for net, stepped in ((model, optimizer), (reference, alone)):
        loss_of(net).backward()
        stepped.step()
    assert same(model, reference) and optimizer.mine == 0.1 and isinstance(optimizer, Needs)


REFUSED = {
    "another model": (lambda comm, model, o: comm.wrap(sgd(small_model()), model), "6 of 6 .* are not the model's"),
    "no passes": (lambda comm, model, o: comm.wrap(sgd(model), model, passes=0), "passes=0: expected at least one"),
    "a group": (lambda comm, model, o: o.add_param_group({"params": []}), "added after comm.wrap.* add it before"),
    "passes": (lambda comm, model, o: o.expect_passes(2), "number of passes was changed inside a step"),
    "state": (lambda comm, model, o: o.load_state_dict(o.state_dict()), "A state was loaded inside a step"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_go_wrong_later_is_refused(comm, what):
    model = small_model().double()
    optimizer = comm.wrap(sgd(model), model)
    loss_of(model).backward()
    call, sentence = REFUSED[what]
    with pytest.raises(ValueError, match=sentence):
        call(comm, model, optimizer)
    optimizer.step()


def test_a_sparse_gradient_is_refused(comm):
    model = nn.Embedding(4, 3, sparse=True)
    optimizer = comm.wrap(sgd(model), model)
    with pytest.raises(ValueError, match="gradient of weight is not contiguous: .* leave sparse=True out"):
        model(torch.tensor([1])).sum().backward()
    assert not optimizer.so_far.sent
