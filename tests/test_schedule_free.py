"""Schedule-Free AdamW: the package's own loop is the reference, of weights, average and first state; and mistakes."""

import copy
import sys

import pytest
import torch
from schedulefree import AdamWScheduleFree
from test_optim import set_grads
from torch import Tensor, nn

from largebatch import assembly
from largebatch.benchmark import resident
from largebatch.config import TrainConfig, apply
from largebatch.data.order import Plan
from largebatch.hooks import ScheduleFree
from largebatch.optim import build_optimizer, init_state, param_groups
from largebatch.ranks.single import Single

NAME = ["--optim.name", "schedule_free_adamw"]
RUN = "--model vit_nano32 --img-size 32 --data.micro_batch_size 2 --data.global_batch_size 4 --run.precision fp32 "
RUN += "--horovod.hang_limit_s 0 --schedule.name constant --schedule.warmup 3steps "
RUN += "--optim.lr 0.0078125 --optim.weight_decay 0.05 --optim.layer_decay 0.75"


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_a_run_is_the_loop_of_the_package_to_the_bit():
    """Five steps of two passes with the package's own warm-up, clipped; then two that are not finite, and skipped."""
    config = resident.read_config([*RUN.split(), *NAME])
    trainer = resident.build_resident(config, Single(), device=torch.device("cpu"))
    (hook,) = trainer.hooks
    assert isinstance(hook, ScheduleFree) and hook.model is trainer.average and trainer.clip_norm == 1.0
    plain = copy.deepcopy(trainer.model)
    groups = param_groups(plain, weight_decay=0.05, layer_decay=0.75)
    for group in groups:  # our warm-up of three steps is the package's of four: 1/4, 2/4, 3/4, 1
        group["lr"] = config.optim.lr * group["lr_scale"]
    reference = AdamWScheduleFree(groups, warmup_steps=4)
    reference.train()
    batches, again = trainer.open_batches(0), trainer.open_batches(0)
    hook.before_fit(trainer)
    assert same(weights(trainer.average), weights(plain))
    for step in range(7):
        if step == 5:
            trainer.objective = lambda model, batch, healthy=trainer.objective: healthy(model, batch) * torch.nan
        output = trainer.train_step(batches)
        hook.after_train_step(trainer, output)
        assert output.applied == (step < 5)
        if output.applied:
            for _ in range(2):
                (trainer.objective(plain, trainer.prepare(next(again))) * (1 / 4)).backward()
            norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
            assert torch.equal(norm, output.grad_norm) and norm > 1
            torch._foreach_mul_([p.grad for p in plain.parameters()], 1 / (norm + 1e-6))
            reference.step()
            reference.zero_grad()
        assert same(weights(trainer.model), weights(plain)), step
        evaluated, optimizer = copy.deepcopy((plain, reference))
        optimizer.eval()
        assert same(weights(trainer.average), weights(evaluated)), step
        assert not same(weights(trainer.average), weights(plain)) or step == 0
    assert [group["k"] for group in trainer.optimizer.param_groups] == [5] * len(groups)


def test_frozen_weights_and_buffers_are_those_of_the_model():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model.register_buffer("count", torch.tensor(1))
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model, name="schedule_free_adamw", lr=0.1, weight_decay=0.1, betas=(0.8, 0.9))
    init_state(optimizer)
    hook = ScheduleFree(model)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    model.count.fill_(7)
    for step in range(2):
        set_grads(model[1].parameters(), step)
        optimizer.step()
    z = optimizer.state[model[1].weight]["z"]
    trainer, output = type("", (), {"model": model, "optimizer": optimizer}), type("", (), {"applied": True})
    hook.after_train_step(trainer, output)
    assert torch.equal(hook.model[0].weight, model[0].weight) and int(hook.model.count) == 7
    torch.testing.assert_close(model[1].weight.detach(), 0.8 * hook.model[1].weight + 0.2 * z, rtol=1e-6, atol=0)


def test_the_first_state_is_the_packages():
    models = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = [build_optimizer(model, name="schedule_free_adamw", lr=0.0, weight_decay=0.0) for model in models]
    init_state(optimizers[0])
    set_grads(models[1].parameters(), 0, scale=0.0)
    optimizers[1].step()
    for ours, theirs, p in zip(*(one.state.values() for one in optimizers), models[0].parameters()):
        assert ours.keys() == theirs.keys() and torch.equal(ours["z"], p) and not ours["exp_avg_sq"].any()
        assert all(ours[key].dtype == theirs[key].dtype and not ours[key].requires_grad for key in ours)
        assert ours["z"].data_ptr() != p.data_ptr()


def test_options_that_the_package_would_take():
    def build(**options):
        return build_optimizer(nn.Linear(2, 2), name="schedule_free_adamw", lr=0.1, weight_decay=0.0, **options)

    for options, sentence in (
        ({"betas": (0.0, 0.9)}, "must begin above 0, for its average, got .0.0, 0.9."),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build(**options)
    assert type(build()) is AdamWScheduleFree and build().param_groups[0]["warmup_steps"] == 0


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(ValueError, match=r"needs the package schedulefree: pip install 'largebatch\[schedulefree\]'"):
        build_optimizer(nn.Linear(2, 2), name="schedule_free_adamw", lr=0.1, weight_decay=0.0)


@pytest.mark.parametrize(
    "given, sentence, remedy",
    [
        (["--schedule.name", "cosine"], "a decay, so set --schedule.name constant", ["--schedule.name", "constant"]),
        (["--schedule.cooldown", "5 %"], "set --schedule.cooldown '0 epochs'", ["--schedule.cooldown", "0 epochs"]),
        (["--optim.ema_half_life", "5 %"], "so set --optim.ema_half_life ''", ["--optim.ema_half_life", ""]),
        (["--optim.sam_rho", "0.1"], "with Look-LayerSAM, so set --optim.sam_rho null", ["--optim.sam_rho", "null"]),
        (["--optim.second_moment_half_life", "5 %"], "whose bias correction expects one rate", []),
        (["--parallel.tensor.size", "2"], "needs whole tensors on every rank or was never tried with --parallel: ", []),
        (["--parallel.zero", "1"], "ZeRO divides lamb's state only", []),
    ],
)
def test_what_is_refused(given, sentence, remedy):
    options = [*NAME, "--schedule.name", "constant", "--checkpoint.best", "ema_top1", *given]
    with pytest.raises(ValueError) as caught:
        apply(TrainConfig(), options)
    assert sentence in str(caught.value)
    if remedy:
        assert apply(TrainConfig(), [*options, *remedy]).optim.averages


def test_batch_norm_is_refused():
    config = apply(TrainConfig(), [*NAME, "--schedule.name", "constant"])
    plan = Plan(num_samples=100, global_batch_size=16, micro_batch_size=8, num_images=1000, seed=0)
    with pytest.raises(ValueError, match="has batch norm, whose statistics would not be those of the average: choose"):
        assembly.build_average(config, plan, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert isinstance(assembly.build_average(config, plan, nn.Linear(2, 2)), ScheduleFree)
