"""Lamb's state from elsewhere: exchanged between two steps, of another model, of another optimizer."""

import copy
import functools
import io
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zoo  # noqa: F401  lets timm be imported beside torch's CPU build
from largebatch.optim import Lamb, build_optimizer, init_state, param_groups
from largebatch.optim.look_sam import LookSam

SHAPES = ((), (1,), (3, 2), (0, 2), (40, 7), (600, 500))
COMPILE = pytest.param("compile", marks=pytest.mark.needs_compiler)

# What a program may put into the place of a tensor.
TENSORS = {
    "longer": lambda t: torch.ones(2 * t.numel() + 1, dtype=t.dtype),
    "shorter": lambda t: torch.ones(max(t.numel() // 2, 1), dtype=t.dtype),
    "of one element": lambda t: torch.ones((), dtype=t.dtype),
    "empty": lambda t: t.new_empty(0),
    "flat": lambda t: t.flatten(),
    "half": lambda t: t.bfloat16(),
    "double": lambda t: t.double(),
    "single": lambda t: t.float(),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t.new_ones(()).expand(t.shape),
    "transposed": lambda t: t.T.contiguous().T if t.ndim == 2 else t,
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "negated": lambda t: torch._neg_view(t.clone()),
    "the same": lambda t: t.clone(),
}


def of_state(key, make):
    return lambda p, state: state.update({key: make(state[key])})


def of_data(make):
    return lambda p, state: setattr(p, "data", make(p.data))


def of_gradient(make):
    def change(p, state):
        p.grad_dtype = None
        p.grad = make(p.grad)

    return change


def resize(t, *shape):
    with torch.no_grad():
        t.set_(torch.ones(shape, dtype=t.dtype))


def keep(t, share):
    t.untyped_storage().resize_(int(share * t.nbytes))


CHANGES = {
    **{f"moment {name}": of_state("exp_avg", make) for name, make in TENSORS.items()},
    **{f"second moment {name}": of_state("exp_avg_sq", make) for name, make in TENSORS.items()},
    **{f"data {name}": of_data(make) for name, make in TENSORS.items()},
    **{f"gradient {name}": of_gradient(make) for name, make in TENSORS.items()},
    "parameter grown": lambda p, state: resize(p, 1000),
    "parameter shrunk": lambda p, state: resize(p, 1),
    "moment grown": lambda p, state: resize(state["exp_avg"], 1000),
    "step of AdamW": lambda p, state: state.update(step=torch.tensor(float(state["step"]))),
    "parameter freed": lambda p, state: keep(p, 0),
    "gradient freed": lambda p, state: keep(p.grad, 0),
    "moment freed": lambda p, state: keep(state["exp_avg"], 0),
    "moment cut": lambda p, state: keep(state["exp_avg_sq"], 0.5),
}
BEYOND = ("freed", "cut")  # in other code than ours, too, these end the process


def expected_of(p, state):
    """The weight after the step, in float64; None if its tensors do not belong together."""
    row = p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"]
    if any(t.shape != p.shape or t.is_meta for t in row):
        return None
    x, g, m, v = (t.to_dense().double() for t in row)
    step = int(state["step"]) + 1
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    u = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + 0.1 * x
    usable = 0 < x.norm() < torch.inf and 0 < u.norm() < torch.inf
    return x - 1e-2 * (x.norm() / u.norm() if usable else 1) * u


def exchange(seed: int, impl: str, trials: int = 60) -> int:
    """Make a step after each of many changes; return how many steps were made. Other steps end in a Python error."""
    draw, made = random.Random(seed), 0
    torch.manual_seed(seed)
    for trial in range(trials):
        dtype = draw.choice((torch.float32, torch.float64))
        params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
        optimizer = Lamb([{"params": params[:2]}, {"params": params[2:]}], 1e-2, weight_decay=0.1, impl=impl)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        victim, name = draw.choice(params), draw.choice(list(CHANGES))
        try:
            CHANGES[name](victim, optimizer.state[victim])
        except (RuntimeError, TypeError):  # torch lets nobody do that
            continue
        beyond = victim.numel() and name.endswith(BEYOND)
        expected = None if beyond else expected_of(victim, optimizer.state[victim])
        print(trial, name, tuple(victim.shape), dtype, flush=True)  # so that a crash tells where
        try:
            optimizer.gradient_norm()
            optimizer.step()
        except (ValueError, RuntimeError):
            continue
        assert expected is not None, f"{name}: a step was made"
        torch.testing.assert_close(victim.detach().double(), expected, rtol=1e-5, atol=1e-6, msg=name)
        made += 1
    return made


@pytest.mark.parametrize("impl", ["plain", "eager", COMPILE])
def test_what_is_exchanged_between_steps_gives_the_right_numbers_or_an_error(impl):
    """In a process of its own, because what C++ reads beyond a tensor may end it."""
    code = f"from test_lamb_state import exchange; assert exchange(1, {impl!r}) + exchange(2, {impl!r}) > 10"
    here = Path(__file__).parent
    settings = os.environ | {"PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], cwd=here, env=settings, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]


# -- states that are loaded -----------------------------------------------------------------------------------------


def trained(make, classes=3, steps=3, seed=0):
    """A model and its optimizer after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, classes)).double()
    optimizer = make(model)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def go_on(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        optimizer.step()


def built(name, **options):
    return lambda model: build_optimizer(model, name=name, lr=0.01, weight_decay=0.1, **options)


def timm_lamb(model, **options):
    from timm.optim.lamb import Lamb as TimmLamb

    return TimmLamb(param_groups(model, weight_decay=0.1), lr=0.02, max_grad_norm=None, **options)


def apex_lamb(model):
    """timm's formulas, with the step as apex keeps it and without timm's options."""
    optimizer = timm_lamb(model)
    original = optimizer.state_dict

    def state_dict():
        state = original()
        for group in state["param_groups"]:
            group["step"] = int(group["step"])
            for key in ("caution", "decoupled_decay", "trust_clip", "always_adapt", "foreach"):
                del group[key]
        return state

    optimizer.state_dict = state_dict
    return optimizer


def timm_lars(model):
    from timm.optim.lars import Lars as TimmLars

    return TimmLars(param_groups(model, weight_decay=0.1), lr=0.02, momentum=0.9)


def lamb_as_adamw(model):
    return Lamb([group | {"adapt": False} for group in param_groups(model, weight_decay=0.1)], impl="eager")


def adamw(model, **options):
    return torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=0.02, **options)


@pytest.mark.parametrize(
    "theirs, ours",
    [
        (timm_lamb, built("lamb", preset="paper")),
        (apex_lamb, built("lamb", preset="paper")),
        (adamw, lamb_as_adamw),
        (lambda model: adamw(model, fused=True), lamb_as_adamw),
        (timm_lars, built("lars")),
    ],
)
def test_a_state_of_others_goes_on_as_it_would_there(theirs, ours):
    """With the moments and the options that both have; the others are those that ours was built with."""
    model, optimizer = trained(theirs)
    twin = copy.deepcopy(model)
    loaded = ours(twin)
    own = [set(group) for group in loaded.param_groups]
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the moments otherwise
    assert all(keys <= set(group) for keys, group in zip(own, loaded.param_groups))
    assert [group["lr"] for group in loaded.param_groups] == [0.02, 0.02]
    for step in range(3, 6):
        go_on(model, optimizer, [step])
        go_on(twin, loaded, [step])
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def with_sam(make):
    def start(model):
        optimizer = make(model)
        init_state(optimizer)
        LookSam(0.1, 5, 0.7).begin(optimizer)
        return optimizer

    return start


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(built("lamb", impl="eager"), id="eager"),
        pytest.param(built("lamb", impl="compile"), id="compile", marks=pytest.mark.needs_compiler),
        pytest.param(built("lars"), id="lars"),
        pytest.param(built("muon"), id="muon"),
        pytest.param(built("muon", rest="lamb"), id="muon and lamb"),
        pytest.param(with_sam(built("lamb")), id="sam"),
    ],
)
@pytest.mark.parametrize("now, before", [(1000, 3), (3, 1000)])
def test_a_state_of_another_head_is_refused_with_both_shapes(make, before, now):
    """And the optimizer has the state that it had."""
    _, saved = trained(make, before)
    model, optimizer = trained(make, now, steps=1)
    had = copy.deepcopy(optimizer.state_dict())
    shapes = f"has shape \\({before}, 4\\), expected \\({now}, 4\\)"
    with pytest.raises(ValueError, match=f"of another model: .* of parameter \\d {shapes}. Load it for the model"):
        optimizer.load_state_dict(saved.state_dict())
    assert str(optimizer.state_dict()) == str(had)
    go_on(model, optimizer, [1])


def sgd(model):
    return torch.optim.SGD(param_groups(model, weight_decay=0.1), lr=0.02, momentum=0.9)


@pytest.mark.parametrize(
    "theirs, ours, sentence",
    [
        (sgd, built("lamb"), "for parameter 0 it has no step and no exp_avg and no exp_avg_sq"),
        (built("lars"), built("lamb"), "another optimizer: for parameter 0 it has no step"),
        (adamw, built("lars"), "without trust ratios, such as SGD, whose momentum is not that of LARS"),
        (sgd, built("lars"), "without trust ratios"),
        (lambda model: adamw(model, maximize=True), built("lamb"), "with maximize=True, .* those of maximize=False"),
        (lambda model: timm_lamb(model, grad_averaging=False), built("lamb"), "with grad_averaging=False"),
        (
            lambda model: torch.optim.Adam(param_groups(model, weight_decay=0.1)),
            built("lamb"),
            "decoupled_weight_decay=False, and its moments are not those of decoupled_weight_decay=True",
        ),
        (built("muon"), built("muon", rest="lamb"), "adamw made that of group 1, and here that group is of lamb"),
    ],
)
def test_a_state_that_means_something_else_is_refused(theirs, ours, sentence):
    _, saved = trained(theirs)
    model, optimizer = trained(ours, steps=0)
    with pytest.raises(ValueError, match=sentence):
        optimizer.load_state_dict(saved.state_dict())
    assert not any(optimizer.state.values())
    go_on(model, optimizer, range(2))  # "begin without a state"


@pytest.mark.parametrize(
    "name, option, value", [("lamb", "betas", (2.0, 2.0)), ("lamb", "eps", "1e-6"), ("lars", "momentum", 1.5)]
)
def test_an_option_that_is_out_of_range_is_refused_in_a_state_as_well(name, option, value):
    _, saved = trained(built(name))
    model, optimizer = trained(built(name), steps=0)
    state = saved.state_dict()
    state["param_groups"][1][option] = value
    with pytest.raises(ValueError, match=f"{option} must be .*, got {re.escape(repr(value))}"):
        optimizer.load_state_dict(state)
    go_on(model, optimizer, range(2))


SCHEDULERS = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12),  # which moves betas, too
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step),
    "in turn": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, 1, 3), lr_scheduler.CosineAnnealingLR(optimizer, 5)], [3]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("ours", [lamb_as_adamw, built("lars")])
def test_a_program_with_a_scheduler_goes_on_from_its_file(ours, scheduler):
    """What is saved and loaded with weights_only takes the steps of the uninterrupted program; Lamb's are AdamW's."""

    def start(make):
        model, optimizer = trained(make, steps=0)
        schedule = SCHEDULERS[scheduler](optimizer)
        return model, optimizer, schedule

    def some(model, optimizer, schedule, steps):
        for step in steps:
            go_on(model, optimizer, [step])
            schedule.step()

    model, optimizer, schedule = start(ours)
    some(model, optimizer, schedule, range(4))
    file = io.BytesIO()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, loaded, other = start(ours)
    again.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    other.load_state_dict(saved["schedule"])
    programs = [(model, optimizer, schedule), (again, loaded, other)]
    if ours is lamb_as_adamw:
        programs.append(start(lambda model: torch.optim.AdamW(param_groups(model, weight_decay=0.1), eps=1e-6)))
        some(*programs[-1], range(4))
    for program in programs:
        some(*program, range(4, 6))
    for program in programs[1:]:
        for p, q in zip(model.parameters(), program[0].parameters()):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_group_that_is_added_later_takes_the_steps_that_adamw_takes():
    """With options and a key of its own, which a state dict keeps."""
    options = {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    found = []
    for make in (torch.optim.AdamW, functools.partial(Lamb, adapt=False)):
        model, optimizer = trained(lambda model: make(model.parameters(), **options))
        torch.manual_seed(1)
        head = nn.Linear(3, 2).double()
        optimizer.add_param_group({"params": head.parameters(), "lr": 0.03, "weight_decay": 0.2, "part": "head"})
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        go_on(nn.Sequential(model, head), optimizer, [3, 4])
        assert optimizer.param_groups[1]["part"] == "head"
        found.append([*model.parameters(), *head.parameters()])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_moments_of_adam_without_decay_are_taken():
    model, saved = trained(lambda model: torch.optim.Adam(model.parameters(), lr=0.01))
    optimizer = Lamb(model.parameters(), impl="eager")
    optimizer.load_state_dict(saved.state_dict())
    go_on(model, optimizer, [3])
    assert all(optimizer.state[p]["step"] == 4 for p in model.parameters())


def test_moments_with_strides_are_made_contiguous():
    """Those of a model in channels_last, say; the numbers are the same."""
    model, optimizer = trained(built("lamb"))
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].T.contiguous().T
    optimizer.load_state_dict(state)
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"])
    go_on(model, optimizer, [3])


def test_a_hook_may_adapt_the_state_before_it_is_checked():
    """As torch advises for states with other names or shapes."""

    def rename(optimizer, state):
        entries = state["state"].items()
        kept = {number: {"step": 3, "exp_avg": one["m"], "exp_avg_sq": one["v"]} for number, one in entries}
        return state | {"state": kept}

    model, optimizer = trained(built("lamb"))
    state = copy.deepcopy(optimizer.state_dict())
    other = {number: {"m": one["exp_avg"], "v": one["exp_avg_sq"]} for number, one in state["state"].items()}
    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.load_state_dict(state | {"state": other})
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"])
