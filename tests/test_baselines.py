"""The optimizers beside LAMB: Lars against a plain reference and timm's, SGD by one field."""

import copy
import io
import math

import pytest
import torch
from test_optim import make_params, relative, set_grads, train
from torch import nn

import zoo  # noqa: F401  lets timm be imported beside torch's CPU build
from largebatch.optim import Lars, build_optimizer, init_state, param_groups, scale_gradients

# -- lars --------------------------------------------------------------------------------------------------------


def plain_lars(xs, gradients, *, lrs, wd, momentum=0.9, trust=1e-3, eps=1e-8, nesterov=False, adapt=True):
    """The formulas once more, out of place: the tensors after all steps."""
    sums = [torch.zeros_like(x) for x in xs]
    for lr, grads in zip(lrs, gradients):
        for i, g in enumerate(grads):
            x_norm, g_norm = xs[i].norm(), g.norm()
            ratio = trust * x_norm / (g_norm + wd * x_norm + eps) if adapt and x_norm > 0 and g_norm > 0 else 1.0
            d = ratio * (g + wd * xs[i])
            sums[i] = momentum * sums[i] + d
            xs[i] = xs[i] - lr * (d + momentum * sums[i] if nesterov else sums[i])
    return xs


VARIANTS = {
    "defaults": (dict(), dict(wd=0.0)),
    "decay": (dict(weight_decay=0.1), dict(wd=0.1)),
    "nesterov": (dict(weight_decay=0.1, nesterov=True, momentum=0.8), dict(wd=0.1, nesterov=True, momentum=0.8)),
    "no momentum": (dict(momentum=0.0), dict(wd=0.0, momentum=0.0)),
    "not adapted": (dict(weight_decay=0.1, adapt=False), dict(wd=0.1, adapt=False)),
    "coefficient, eps": (dict(trust_coefficient=0.02, eps=0.1), dict(wd=0.0, trust=0.02, eps=0.1)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_lars_equals_the_formulas(variant):
    ours_options, plain_options = VARIANTS[variant]
    params, gradients, lrs = make_params(), [], [0.5 * (step + 1) for step in range(6)]
    start = [p.detach().clone() for p in params]
    optimizer = Lars(params, **ours_options)
    for step, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        set_grads(params, step)
        scale_gradients(optimizer, torch.tensor(0.5, dtype=torch.float64))
        gradients.append([p.grad.clone() for p in params])
        optimizer.step()
    for p, g in zip(params, gradients[-1]):
        assert torch.equal(p.grad, g)  # read, not changed
    for p, expected in zip(params, plain_lars(start, gradients, lrs=lrs, **plain_options)):
        assert relative(p, expected) <= 1e-12


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_equals_timm(nesterov):
    """timm adapts what is decayed: our two groups say the same by `adapt`."""
    from timm.optim import Lars as TimmLars

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(9, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    theirs = copy.deepcopy(ours)
    optimizer = build_optimizer(ours, name="lars", lr=0.7, weight_decay=0.1, trust_coefficient=0.01)
    assert [(g["weight_decay"], g["adapt"], g["momentum"]) for g in optimizer.param_groups] == [
        (0.1, True, 0.9),
        (0.0, False, 0.9),
    ]
    for group in optimizer.param_groups:
        group["nesterov"] = nesterov
    groups = param_groups(theirs, weight_decay=0.1)
    reference = TimmLars(groups, lr=0.7, momentum=0.9, trust_coeff=0.01, eps=1e-8, nesterov=nesterov)
    for step in range(8):
        for model, one in ((ours, optimizer), (theirs, reference)):
            set_grads(model.parameters(), step, scale=1.0)
            one.step()
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert relative(p, q) <= 1e-12, f"step {step}"


def test_lars_where_a_norm_is_of_no_use():
    zero, still, huge, bad, absent = (nn.Parameter(torch.full((4,), x)) for x in (0.0, 1.0, 1e30, 1.0, 1.0))
    optimizer = Lars([zero, still, huge, bad, absent], lr=0.1, weight_decay=0.1)
    zero.grad, still.grad, huge.grad, bad.grad = torch.ones(4), torch.zeros(4), torch.ones(4), torch.ones(4)
    bad.grad[0] = math.inf
    optimizer.step()
    ratios = optimizer.trust_ratios
    assert [float(ratios[p]) for p in (zero, still, bad)] == [1, 1, 1] and absent not in ratios
    assert float(ratios[huge]) == pytest.approx(1e-3 / 0.1)  # a sum of squares that float32 cannot hold
    torch.testing.assert_close(zero.detach(), torch.full((4,), -0.1))
    torch.testing.assert_close(still.detach(), torch.full((4,), 1 - 0.1 * 0.1))
    assert torch.equal(absent, torch.ones(4)) and absent not in optimizer.state
    assert Lars([nn.Parameter(torch.ones(1))]).trust_ratios == {}


def test_lars_survives_horovod():
    """DistributedOptimizer: an instance of a new subclass, from the group dicts alone, with no state."""
    params, twins = make_params(torch.float32), make_params(torch.float32)
    options = dict(momentum=0.7, weight_decay=0.2, trust_coefficient=0.3, eps=1e-3, nesterov=True)
    given = Lars([{"params": params[:3], **options}, {"params": params[3:], "adapt": False}], 0.02)
    wrapped = type("Lars", (Lars,), {})(given.param_groups)
    assert all(wrapped.param_groups[0][name] == value for name, value in options.items())
    assert wrapped.param_groups[1]["adapt"] is False
    direct = Lars([{"params": twins[:3], **options}, {"params": twins[3:], "adapt": False}], 0.02)
    train(wrapped, params, range(4), clip=0.5)
    train(direct, twins, range(4), clip=0.5)
    assert all(torch.equal(p, q) for p, q in zip(params, twins))


def test_lars_refuses():
    for options, sentence in (
        (dict(lr=-1), "Lars's lr must be a number >= 0, got -1"),
        (dict(eps=-1.0), "Lars's eps must be"),
        (dict(weight_decay=-1.0), "Lars's weight_decay must be"),
        (dict(momentum=0.0, nesterov=True), "Lars's nesterov must be false without momentum, got True"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Lars(make_params(), **options)


# -- nadamw --------------------------------------------------------------------------------------------------------


def test_nadamw_by_one_field():
    """The formula of Dozat with the same beta1 in every step, and decoupled decay, in float64."""
    model = nn.Linear(3, 2).double()
    optimizer = build_optimizer(model, name="nadamw", lr=0.1, weight_decay=0.5, betas=(0.8, 0.9))
    init_state(optimizer)
    x, m, v = model.weight.detach().clone(), torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
    for step in range(1, 5):
        set_grads(model.parameters(), step)
        g = model.weight.grad
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        ahead = 0.8 * m / (1 - 0.8 ** (step + 1)) + 0.2 * g / (1 - 0.8**step)
        x = x * (1 - 0.1 * 0.5) - 0.1 * ahead / ((v / (1 - 0.9**step)).sqrt() + 1e-8)
        optimizer.step()
    assert relative(model.weight, x) <= 1e-14
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]


def test_the_first_state_of_nadamw_is_torchs():
    optimizers = [build_optimizer(nn.Linear(3, 2), name="nadamw", lr=0.0, weight_decay=0.0) for _ in range(2)]
    init_state(optimizers[0])
    for optimizer in optimizers:
        (group,) = [group for group in optimizer.param_groups if group["params"][0].ndim == 2]
        set_grads(group["params"], 0)
        optimizer.step()
    ours, theirs = (next(iter(optimizer.state.values())) for optimizer in optimizers)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(ours[key].dtype == theirs[key].dtype for key in ours)


# -- sgd, and what all have in common ----------------------------------------------------------------------------


def test_sgd_by_one_field():
    """Nesterov, and coupled decay: of the gradient, so with momentum."""
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.bias.fill_(1.0)
    x, m = model.weight.detach().clone(), torch.zeros(2, 3, dtype=torch.float64)
    optimizer = build_optimizer(model, name="sgd", lr=0.1, weight_decay=0.5, momentum=0.8)
    assert type(optimizer) is torch.optim.SGD and all(g["fused"] and g["nesterov"] for g in optimizer.param_groups)
    for step in range(3):
        set_grads(model.parameters(), step)
        g = model.weight.grad + 0.5 * x
        m = 0.8 * m + g
        x = x - 0.1 * (g + 0.8 * m)
        optimizer.step()
    assert relative(model.weight, x) <= 1e-14
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]
    plain = build_optimizer(model, name="sgd", lr=0.1, weight_decay=0.0, momentum=0.0)
    assert not plain.param_groups[0]["nesterov"]
    init_state(plain)
    assert not any(plain.state.values())


@pytest.mark.parametrize("name", ["adamw", "nadamw", "schedule_free_adamw", "sgd", "lars"])
def test_state_dict_round_trip(name):
    """Through a file read with weights_only: the continued run is bit for bit the uninterrupted one."""

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
        optimizer = build_optimizer(model, name=name, lr=0.02, weight_decay=0.1)
        init_state(optimizer)
        return model, optimizer

    model, optimizer = build()
    train(optimizer, list(model.parameters()), range(3), clip=0.5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, resumed_optimizer = build()
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    for one, other in ((model, optimizer), (resumed, resumed_optimizer)):
        train(other, list(one.parameters()), range(3, 6), clip=0.5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters()))
