"""Lamb against a float64 reference, timm's and the formula of the 32K run; what it survives; the builders."""

import copy
import ctypes
import functools
import io
import math
import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

import zoo  # noqa: F401  lets timm be imported beside torch's CPU build
from largebatch.config import OptimConfig
from largebatch.native import lamb as native_lamb
from largebatch.native.compile import compile_library
from largebatch.optim import (
    Lamb,
    Lars,
    Muon,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    init_state,
    lamb,
    param_groups,
    scale_gradients,
    trust_summary,
)

SHAPES = ((7, 5), (11,), (3, 2, 2), (1,), (12, 1), (), (700, 500))
COMPILE = pytest.param("compile", marks=pytest.mark.needs_compiler)


def make_params(dtype=torch.float64, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def set_grads(params, step, scale=0.1):
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


class Reference:
    """LAMB from the paper in numpy and float64, one object per tensor."""

    def __init__(self, x, *, wd=0, betas=(0.9, 0.999), eps=1e-6, debias=True, adapt=True, phi=None, cap=9e9, **variant):
        self.x, self.m, self.v, self.t = np.array(x, np.float64), 0.0, 0.0, 0
        self.wd, (self.b1, self.b2), self.eps = wd, betas, eps
        self.debias, self.adapt, self.phi, self.cap = debias, adapt, phi or (0, math.inf), cap
        self.decay, self.caution = variant.pop("decay", "coupled"), variant.pop("caution", False)
        assert not variant

    def step(self, g, lr):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        m, v = self.m, self.v
        if self.debias:
            m, v = m / (1 - self.b1**self.t), v / (1 - self.b2**self.t)
        u = m / (np.sqrt(v) + self.eps)
        if self.caution:
            same = u * g > 0
            u = u * same / max(same.mean(), 1e-3)
        if self.decay == "coupled":
            u = u + self.wd * self.x
        else:
            self.x = self.x * (1 - self.wd * (lr if self.decay == "decoupled" else lr**2 / 0.03))
        ratio = 1.0
        x_norm, u_norm = np.sqrt(np.sum(self.x**2)), np.sqrt(np.sum(u**2))
        if self.adapt and x_norm > 0 and u_norm > 0:
            ratio = min(np.clip(x_norm, *self.phi) / u_norm, self.cap)
        self.x = self.x - lr * ratio * u


def relative(ours, theirs):
    theirs = torch.as_tensor(theirs)
    return ((ours.detach().double() - theirs).norm() / theirs.norm()).item()


VARIANTS_OF_PAPER = ("decoupled", "corrected", "cautious")  # presets
VARIANTS = {
    "defaults": (dict(), dict()),
    "decay": (dict(weight_decay=0.1), dict(wd=0.1)),
    "no debias": (dict(weight_decay=0.1, bias_correction=False), dict(wd=0.1, debias=False)),
    "not adapted": (dict(weight_decay=0.1, adapt=False), dict(wd=0.1, adapt=False)),
    "phi": (dict(norm_range=(0.5, 2.0)), dict(phi=(0.5, 2.0))),
    "capped": (dict(max_trust_ratio=0.3), dict(cap=0.3)),
    "decoupled": (dict(weight_decay=0.1, decay="decoupled"), dict(wd=0.1, decay="decoupled")),
    "decoupled, phi": (
        dict(weight_decay=0.1, decay="decoupled", norm_range=(0.5, 2.0)),
        dict(wd=0.1, decay="decoupled", phi=(0.5, 2.0)),
    ),
    "corrected": (dict(lr=0.03, weight_decay=0.1, decay="corrected"), dict(wd=0.1, decay="corrected")),
    "cautious": (dict(weight_decay=0.1, caution=True), dict(wd=0.1, caution=True)),
    "betas, eps": (dict(betas=(0.8, 0.95), eps=1e-3), dict(betas=(0.8, 0.95), eps=1e-3)),
}


@pytest.mark.parametrize("impl", ["plain", "eager", COMPILE])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_float64_reference(variant, impl):
    ours_options, reference_options = VARIANTS[variant]
    params = make_params()
    references = [Reference(p.detach().numpy(), **reference_options) for p in params]
    optimizer = Lamb(params, impl=impl, **ours_options)
    for step in range(6):
        set_grads(params, step)
        factor, lr = 1.0 / (step + 1), 0.01 * (step + 1)
        optimizer.param_groups[0]["lr"] = lr
        scale_gradients(optimizer, torch.tensor(factor, dtype=torch.float64))
        for p, reference in zip(params, references):
            reference.step(p.grad.numpy() * factor, lr)
        optimizer.step()
    for p, reference in zip(params, references):
        assert relative(p, reference.x) <= 1e-12


@pytest.mark.parametrize("impl", ["plain", "eager"])
@pytest.mark.parametrize("preset", ["paper", "nvlamb", "lambc", "decoupled", "corrected", "cautious"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_equals_timm(preset, max_grad_norm, impl):
    from timm.optim.lamb import Lamb as TimmLamb

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(9, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    theirs = copy.deepcopy(ours)
    timm_options = dict(trust_clip=preset == "lambc", always_adapt=preset == "nvlamb", caution=preset == "cautious")
    timm_options |= dict(decoupled_decay=preset in ("decoupled", "corrected"))
    timm_options |= dict(corrected_weight_decay=preset == "corrected")
    reference = TimmLamb(
        param_groups(theirs, weight_decay=0.1), lr=0.02, max_grad_norm=max_grad_norm, **timm_options
    )
    optimizer = build_optimizer(ours, preset=preset, lr=0.02, weight_decay=0.1, impl=impl)
    for step in range(8):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 0.02 / (1 + step)
        set_grads(ours.parameters(), step, scale=1.0)
        set_grads(theirs.parameters(), step, scale=1.0)
        if max_grad_norm is not None:
            norm = torch.cat([p.grad.flatten() for p in ours.parameters()]).norm()
            assert norm > max_grad_norm  # else the clip is not tested
            scale_gradients(optimizer, max_grad_norm / norm)
        optimizer.step()
        reference.step()
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert relative(p, q) <= 1e-12, f"step {step}"


@pytest.mark.parametrize("impl", ["plain", "eager"])
def test_equals_the_formula_of_the_32k_run(impl):
    """No debiasing, one group, everything decayed and adapted, eps 1e-6: written out once more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)).double()
    optimizer = build_optimizer(model, preset="colossal", lr=0.018, weight_decay=0.1, impl=impl)
    assert len(optimizer.param_groups) == 1
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    for step in range(8):
        set_grads(model.parameters(), step)
        for i, p in enumerate(model.parameters()):
            m = 0.9 * moments[i][0] + 0.1 * p.grad
            v = 0.999 * moments[i][1] + 0.001 * p.grad**2
            adam_step = m / (v.sqrt() + 1e-6) + 0.1 * weights[i]
            weight_norm, adam_norm = weights[i].norm(), adam_step.norm()
            trust = 1.0 if weight_norm == 0 or adam_norm == 0 else weight_norm / adam_norm
            weights[i], moments[i] = weights[i] - 0.018 * trust * adam_step, (m, v)
        optimizer.step()
        for p, w in zip(model.parameters(), weights):
            assert relative(p, w) <= 1e-12, f"step {step}"


def scheduled_run(impl):
    """20 steps over every kind of tensor, one of them late, with a rate and a clip factor that change."""
    params = make_params(torch.float32)
    groups = [{"params": params[:4], "weight_decay": 0.1}, {"params": params[4:], "adapt": False}]
    optimizer = Lamb(groups, impl=impl)
    for step in range(20):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1) / 20
        set_grads(params if step > 4 else params[1:], step)
        if step % 3:
            scale_gradients(optimizer, torch.tensor(1.0 / (step + 1)))
        optimizer.step()
    return params, torch.stack([optimizer.trust_ratios[p] for p in params])


@pytest.mark.needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2, 3, 100])
def test_compiled_gives_the_plain_numbers_and_the_same_bits_at_any_number_of_threads(num_threads, threads):
    torch.set_num_threads(1)
    one_thread, _ = scheduled_run("compile")
    torch.set_num_threads(num_threads)
    params, ratios = scheduled_run("compile")
    expected_params, expected_ratios = scheduled_run("plain")
    for ours, again, theirs in zip(params, one_thread, expected_params):
        assert torch.equal(ours, again)
        assert relative(ours, theirs.detach().double()) <= 1e-6
    torch.testing.assert_close(ratios, expected_ratios, rtol=1e-5, atol=0)


@pytest.mark.needs_compiler
def test_threads_at_the_same_time_have_scratch_memory_of_their_own(threads):
    """Tensors that take a thread milliseconds each, so that the threads do work at the same time."""
    found = []
    for number in (1, 2):
        torch.set_num_threads(number)
        params = [nn.Parameter(torch.full((400_000,), 0.1 * (k + 1))) for k in range(8)]
        optimizer = Lamb(params, impl="compile")
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        found.append(params)
    assert all(torch.equal(alone, together) for alone, together in zip(*found))


@pytest.mark.needs_compiler
def test_scratch_memory_stays_for_the_next_step():
    """40 MB of new memory would be 10,000 page faults in each step, which take 5 % of it."""
    p = nn.Parameter(torch.zeros(10_000_000))
    p.grad = torch.ones_like(p)
    optimizer = Lamb([p], impl="compile")
    optimizer.step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    optimizer.step()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2000


def test_scratch_memory_grows_and_follows_the_dtype(monkeypatch):
    """Parameters are unfrozen, or are those of another model."""
    monkeypatch.setattr(native_lamb, "_kept", threading.local())
    single, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    for example, size in ((single, 10), (single, 100), (double, 100)):
        memory = native_lamb._scratch(example, size)
        assert memory.numel() == size and memory.dtype == example.dtype
    assert native_lamb._scratch(double, 50) is memory


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def start(tmp_path, count: int, **environment: str) -> list[str]:
    """What so many processes, started at once, print that each make a compiled step."""
    code = "import torch; from largebatch.optim import Lamb, can_compile; p = torch.ones(3); p.grad = torch.ones(3); "
    code += "Lamb([p]).step(); print(can_compile('cpu'), p.tolist())"
    settings = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | environment
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, env=settings, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(count)
    ]
    return [process.communicate(timeout=120)[0] for process in processes]


@pytest.mark.needs_compiler
def test_processes_that_start_together_compile_once_and_later_ones_never(tmp_path):
    calls, compiler = tmp_path / "calls", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho >> {calls}\nexec {os.environ.get("CXX", "g++")} "$@"\n')
    compiler.chmod(0o755)
    together = start(tmp_path, 2, CXX=str(compiler))
    assert calls.read_text() == "\n"
    assert start(tmp_path, 1, CXX=str(compiler)) == together[:1] and together[0].startswith("True [0.99")
    assert calls.read_text() == "\n" and len(set(together)) == 1


@pytest.mark.needs_compiler
def test_what_was_compiled_of_another_source_is_not_taken(tmp_path, monkeypatch):
    """And a library has its name when it is complete: it is the very file that the compiler wrote elsewhere."""
    source, compiler, inode = (tmp_path / name for name in ("answer.cpp", "compiler", "inode"))
    real = os.environ.get("CXX", "g++")
    compiler.write_text(f'#!/bin/sh\n{real} "$@" || exit 1\nfor out; do :; done\nstat -c %i "$out" >{inode}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for number in (1, 2):
        source.write_text(f'extern "C" int answer() {{ return {number}; }}')
        library = compile_library(source, (), tmp_path)
        assert ctypes.CDLL(str(library)).answer() == number
        assert library.stat().st_ino == int(inode.read_text())


@pytest.mark.needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").touch()
    assert start(tmp_path, 1, XDG_CACHE_HOME=str(tmp_path / "file"))[0].startswith("True [0.99")


def test_without_a_compiler_lamb_runs_eagerly_and_says_why(tmp_path):
    (output,) = start(tmp_path, 1, CXX="no-such-compiler")
    assert "LAMB could not be compiled: " in output and "no-such-compiler" in output and "False [0.99" in output


@pytest.mark.parametrize("way", ["eager", COMPILE, "foreach"])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_the_first_half_alone_is_that_of_the_whole(way, dtype, bound):
    """Moments, update and squares, by each way of them; foreach is a GPU's, which computes the same on a CPU."""
    params = make_params()
    set_grads(params, 0)
    generator = torch.Generator().manual_seed(1)
    made = [(p, p.grad, *(torch.rand(2, *p.shape, generator=generator))) for p in params]
    rows = [tuple(t.detach().flatten().to(dtype, copy=True) for t in (*row, row[0])) for row in made]
    options = Lamb(params, weight_decay=0.1).param_groups[0]
    s, factor = lamb.scalars(options, 3), torch.tensor(0.7, dtype=dtype)
    before = [[t.double().clone() for t in row] for row in rows]
    squares = lamb.moments_foreach_(rows, s, factor) if way == "foreach" else lamb.moments(way, rows, s, factor)
    for (x, g, m, v, _), row, two in zip(before, rows, squares.T):
        g = g * 0.7
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        u = m / (1 - 0.9**3) / ((v / (1 - 0.999**3)).sqrt() + 1e-6) + 0.1 * x
        expected = (x, m, v, u, (x**2).sum(), (u**2).sum())
        for found, wanted in zip((row[0], *row[2:], *two), expected):
            assert relative(found, wanted) < bound


@pytest.mark.parametrize("impl", ["plain", "eager", COMPILE])
class TestDegenerate:
    def test_zero_parameter_and_zero_gradient(self, impl):
        zero, still = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        optimizer = Lamb([zero, still], lr=0.1, impl=impl)
        zero.grad, still.grad = torch.full((4,), 0.5), torch.zeros(4)
        optimizer.step()
        assert optimizer.trust_ratios[zero] == 1 and optimizer.trust_ratios[still] == 1
        torch.testing.assert_close(zero.detach(), torch.full((4,), -0.1), rtol=1e-5, atol=0)  # lr * sign(g)
        assert torch.equal(still.detach(), torch.ones(4))

    def test_norm_that_overflows(self, impl):
        """Moments stay finite, the sum of squares does not, but for that of C++: ratio 1 or |x| / |u|, and no NaN."""
        p = nn.Parameter(torch.full((8,), 1e20))
        optimizer = Lamb([p], lr=0.1, impl=impl)
        p.grad = torch.ones(8)
        optimizer.step()
        expected = 1e20 if impl == "compile" else 1.0
        assert optimizer.trust_ratios[p].item() == pytest.approx(expected, rel=1e-5) and p.isfinite().all()

    def test_gradients_that_end(self, impl):
        """Without decay u falls to the smallest numbers, and the ratio would grow beyond the largest."""
        p = nn.Parameter(torch.ones(4))
        optimizer = Lamb([p], lr=1e-3, impl=impl)
        for step in range(1100):
            p.grad = torch.randn(4, generator=torch.Generator().manual_seed(step)) * (step < 20)
            optimizer.step()
            assert p.isfinite().all() and optimizer.trust_ratios[p] <= 1e30, step
        assert optimizer.trust_ratios[p] == 1

    def test_gradient_not_finite(self, impl):
        """The ratio is 1 and other tensors are untouched; skipping such a step is the caller's decision."""
        bad, good = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        optimizer = Lamb([bad, good], lr=0.1, impl=impl)
        bad.grad, good.grad = torch.tensor([1.0, math.nan, math.inf, 1.0]), torch.ones(4)
        optimizer.step()
        assert optimizer.trust_ratios[bad] == 1 and good.isfinite().all()

    def test_half_precision_gradient(self, impl):
        """Half gradients whose squares would underflow: read as float32 before any arithmetic."""
        half, full = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
        gradient = (1e-4 * torch.arange(1, 7).view(3, 2)).half()
        half.grad_dtype = None
        half.grad, full.grad = gradient, gradient.float()
        optimizer = Lamb([half, full], lr=0.1, impl=impl)
        for _ in range(3):
            scale_gradients(optimizer, torch.tensor(0.3))
            optimizer.step()
        assert torch.equal(half, full) and not torch.equal(half, torch.ones(3, 2))
        assert torch.equal(half.grad, gradient)  # read, not changed

    def test_absent_gradient(self, impl):
        absent, present = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = Lamb([absent, present], weight_decay=0.1, impl=impl)
        present.grad = torch.ones(2)
        optimizer.step()
        assert torch.equal(absent, torch.ones(2)) and absent not in optimizer.state
        assert optimizer.state[present]["step"] == 1


@pytest.mark.parametrize("impl", ["plain", "eager", COMPILE])
def test_gradient_with_strides(impl):
    p, q = make_params(shapes=((4, 3),)), make_params(shapes=((4, 3),))
    set_grads(q, 0)
    p[0].grad = q[0].grad.t().contiguous().t()
    for params in (p, q):
        Lamb(params, impl=impl).step()
    torch.testing.assert_close(p[0], q[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize("impl", ["plain", "eager", COMPILE])
def test_a_weight_whose_strides_change_later(impl):
    """By `model.to(memory_format=torch.channels_last)`, say; no element moves."""
    p, q = make_params(shapes=((4, 3), (4, 3)))
    optimizer = Lamb([p, q], impl=impl)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    p.data = p.detach().t().contiguous().t()
    before = p.detach().clone(), q.detach().clone()
    with pytest.raises(ValueError, match="contiguous, .* strides \\(1, 4\\) .*; use autocast"):
        optimizer.step()
    assert torch.equal(p, before[0]) and torch.equal(q, before[1])


def test_late_parameter_gets_its_own_bias_correction():
    """Unfrozen after 5 steps, a parameter moves as if it were new."""
    early, late = make_params(shapes=((3, 2), (3, 2)))
    late.requires_grad_(False)
    fresh = nn.Parameter(late.detach().clone())
    optimizer, alone = Lamb([early, late], impl="eager"), Lamb([fresh], impl="eager")
    for step in range(8):
        set_grads([early], step)
        if step >= 5:
            late.requires_grad_(True)
            late.grad = fresh.grad = torch.full((3, 2), 0.1 * step, dtype=torch.float64)
            alone.step()
        optimizer.step()
    assert torch.equal(late, fresh) and optimizer.state[late]["step"] == 3


def train(optimizer, params, steps, clip=None):
    for step in steps:
        set_grads(params, step)
        if clip is not None:
            scale_gradients(optimizer, torch.tensor(clip))
        optimizer.step()


def test_survives_horovod():
    """DistributedOptimizer: an instance of a new subclass, from the group dicts alone, with no state."""
    params = make_params(torch.float32)
    options = dict(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, bias_correction=False, adapt=False)
    options |= dict(norm_range=(0.1, 5.0), max_trust_ratio=3.0, impl="eager")
    given = Lamb([{"params": params[:3], **options}, {"params": params[3:]}], 0.02)
    wrapped = type("Lamb", (Lamb,), {})(given.param_groups)
    assert [g for g in wrapped.param_groups] == [g for g in given.param_groups]
    assert all(wrapped.param_groups[0][name] == value for name, value in options.items())
    twins = make_params(torch.float32)
    direct = Lamb([{"params": twins[:3], **options}, {"params": twins[3:], "impl": "eager"}], 0.02)
    wrapped.param_groups[1]["impl"] = "eager"
    train(wrapped, params, range(4), clip=0.5)
    train(direct, twins, range(4), clip=0.5)
    assert all(torch.equal(p, q) for p, q in zip(params, twins))


def test_clip_factor_is_used_once_and_not_saved():
    params = make_params(torch.float32, shapes=((4, 3),))
    optimizer = Lamb(params, impl="eager")
    set_grads(params, 0)
    before = params[0].grad.clone()
    scale_gradients(optimizer, torch.tensor(0.5))
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"} and set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.step()
    assert torch.equal(params[0].grad, before)
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], 0.1 * 0.5 * before)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], (0.9 * 0.05 + 0.1) * before)


@pytest.mark.parametrize("maker", [functools.partial(Lamb, impl="eager"), functools.partial(torch.optim.SGD, lr=0.1)])
def test_a_gradient_below_the_clip_stays_as_it_is(maker):
    """And one above has the norm of the clip afterwards."""
    for max_norm, norm in ((None, 5.0), (10.0, 5.0), (1.0, 1.0)):
        p = nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([3.0, 4.0])
        optimizer = maker([p])
        clip_gradients(optimizer, gradient_norm(optimizer), max_norm)
        factor = getattr(optimizer, "clip_factor", None)
        assert float((p.grad * (1.0 if factor is None else factor)).norm()) == pytest.approx(norm, rel=1e-5)


@pytest.mark.needs_compiler
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 6e-8), (torch.float64, 4e-16)])
def test_the_norm_is_exact_and_has_the_same_bits_at_any_number_of_threads(dtype, bound, monkeypatch):
    """A norm in single precision is wrong by 1e-5 for a model of 88 million parameters."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(*shape, dtype=dtype)) for shape in ((1,), (31,), (300, 7), (32,), (65,), (3, 2))]
    for p in params[:-1]:
        p.grad = torch.randn(p.shape, generator=generator, dtype=dtype)
    params[2].grad = torch.randn(300, 14, generator=generator, dtype=dtype)[:, ::2]  # not contiguous
    exact = math.sqrt(math.fsum(value**2 for p in params[:-1] for value in p.grad.flatten().tolist()))
    optimizer, threads, found = Lamb([{"params": params[:3]}, {"params": params[3:]}]), torch.get_num_threads(), []
    monkeypatch.setattr(nn.utils, "get_total_norm", None)
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(gradient_norm(optimizer))
    finally:
        torch.set_num_threads(threads)
    assert found[0].dtype == dtype and found[0].ndim == 0 and found[0] == found[1] == found[2]
    assert abs(float(found[0]) / exact - 1) < bound
    params[4].grad[64] = math.inf
    assert gradient_norm(optimizer) == math.inf


@pytest.mark.parametrize("impl, other", [("eager", torch.float32), ("auto", torch.float64)])
def test_the_norm_is_torchs_where_lamb_is_not_in_cpp(impl, other):
    """Ranks agree on `impl`, and only so on the bits of the norm. And gradients may be of several dtypes."""
    params = [nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(40, dtype=other))]
    for p in params:
        p.grad = torch.rand_like(p)
    optimizer = Lamb([{"params": params[:1]}, {"params": params[1:], "impl": impl}])
    assert optimizer.gradient_norm() is None
    assert torch.equal(gradient_norm(optimizer), nn.utils.get_total_norm([p.grad for p in params]))


def test_scale_gradients_of_another_optimizer():
    params = make_params(torch.float32, shapes=((4, 3), (2,), (5,)))
    set_grads(params[:2], 0)
    before = [p.grad.clone() for p in params[:2]]
    scale_gradients(torch.optim.SGD(params, lr=0.1), torch.tensor(0.25))
    assert all(torch.equal(p.grad, 0.25 * g) for p, g in zip(params, before)) and params[2].grad is None


def test_state_dict_round_trip():
    """Through a file read with weights_only: the continued run is bit for bit the uninterrupted one."""
    params = make_params(torch.float32)
    optimizer = Lamb(params, 0.02, weight_decay=0.1, max_trust_ratio=2.0, impl="eager")
    train(optimizer, params, range(3))
    file = io.BytesIO()
    torch.save({"model": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    copies = [nn.Parameter(p) for p in saved["model"]]
    resumed = Lamb(copies, impl="eager")
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[0]["max_trust_ratio"] == 2.0
    train(optimizer, params, range(3, 6))
    train(resumed, copies, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(params, copies))
    assert all(resumed.state[q]["step"] == 6 for q in copies)


def test_the_state_before_the_first_step_is_saved():
    """Else Horovod's broadcast of the state would take a step to create it, which decays the weights."""
    params = make_params(torch.float32)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer, prepared = (Lamb([*params, frozen], weight_decay=0.1) for _ in range(2))
    init_state(prepared)
    assert str(optimizer.state_dict()) == str(prepared.state_dict()) and len(optimizer.state) == len(params)


def test_loading_leaves_impl_to_this_machine():
    params = make_params(torch.float32)
    saved = Lamb(params, impl="compile").state_dict()
    here = Lamb([{"params": params[:3]}, {"params": params[3:], "impl": "plain"}], impl="eager")
    saved["param_groups"] = [saved["param_groups"][0] | {"params": [*range(3)]}]
    saved["param_groups"] += [saved["param_groups"][0] | {"params": [*range(3, len(params))]}]
    here.load_state_dict(saved)
    assert [group["impl"] for group in here.param_groups] == ["eager", "plain"]


def test_deepcopy():
    params = make_params(torch.float32, shapes=((4, 3), (5,)))
    optimizer = Lamb(params, 0.02, weight_decay=0.1, impl="eager")
    train(optimizer, params, range(2), clip=0.5)
    params_copy, optimizer_copy = copy.deepcopy((params, optimizer))
    train(optimizer, params, range(2, 4))
    train(optimizer_copy, params_copy, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(params, params_copy))


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_trust_summary_is_of_the_adapted_tensors_of_the_last_step(name):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(5, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    optimizer = build_optimizer(model, name=name, lr=0.01, weight_decay=0.1)
    assert trust_summary(optimizer) is None
    for step in range(2):
        set_grads(model.parameters(), step)
        model[4].weight.grad = None
        optimizer.step()
        ratios = sorted(float(optimizer.trust_ratios[model[layer].weight]) for layer in range(3))
        assert len(set(ratios)) == 3 and 1.0 not in ratios  # as those of biases and norms are
        assert trust_summary(optimizer).tolist() == ratios
    assert trust_summary(build_optimizer(model, name="sgd", lr=0.1, weight_decay=0.1)) is None


def test_closure():
    p = nn.Parameter(torch.ones(3))
    optimizer = Lamb([p], impl="eager")

    def closure():
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3 and optimizer.state[p]["step"] == 1


MAKERS = {
    "lamb": lambda params: Lamb(params, weight_decay=0.1, impl="eager"),
    "adamw": lambda params: torch.optim.AdamW(params),
    "adamw fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "lars": lambda params: Lars(params, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_init_state_is_what_the_optimizer_would_make(maker):
    """Nothing moves, and k steps later everything is bit for bit what it is without it."""
    ours, theirs = make_params(torch.float32), make_params(torch.float32)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    prepared, lazy = MAKERS[maker]([*ours, frozen]), MAKERS[maker]([*theirs, nn.Parameter(torch.ones(2))])
    init_state(prepared)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs)) and not prepared.state.get(frozen)
    for steps in (range(1), range(1, 4)):
        train(prepared, ours, steps)
        train(lazy, theirs, steps)
        init_state(prepared)  # changes nothing that exists
        for p, q in zip(ours, theirs):
            assert torch.equal(p, q)
            assert prepared.state[p].keys() == lazy.state[q].keys()
            for key, value in lazy.state[q].items():
                assert type(prepared.state[p][key]) is type(value)
                assert torch.equal(torch.as_tensor(prepared.state[p][key]), torch.as_tensor(value))
                assert getattr(value, "dtype", None) == getattr(prepared.state[p][key], "dtype", None)


def test_init_state_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="initial state of Adagrad is not known"):
        init_state(torch.optim.Adagrad(make_params()))
    with pytest.raises(ValueError, match="dampening=0.1 has no initial state"):
        init_state(torch.optim.SGD(make_params(), lr=0.1, momentum=0.9, dampening=0.1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.ones(1, 3, 4))
        self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.fc.weight.requires_grad_(False)

    def no_weight_decay(self):
        return {"pos_embed"}


def test_param_groups():
    model = Net()
    decayed, excluded = param_groups(model, weight_decay=0.1)
    assert decayed == {"params": [model.fc.weight], "weight_decay": 0.1}  # frozen, and yet there
    assert {id(p) for p in excluded["params"]} == {
        id(p) for p in (model.pos_embed, model.fc.bias, model.norm.weight, model.norm.bias)
    }
    assert excluded["weight_decay"] == 0 and "adapt" not in excluded
    (everything,) = param_groups(model, weight_decay=0.1, exclude=False)
    assert [id(p) for p in everything["params"]] == [id(p) for p in model.parameters()]
    (only,) = param_groups(nn.LayerNorm(3), weight_decay=0.1, adapt_excluded=False)
    assert only["weight_decay"] == 0 and only["adapt"] is False


@pytest.mark.parametrize(
    "preset, expected",
    [
        # per group: weight_decay, adapt, bias_correction, max_trust_ratio
        ("paper", [(0.1, True, True, math.inf), (0.0, False, True, math.inf)]),
        (None, [(0.1, True, True, math.inf), (0.0, False, True, math.inf)]),
        ("colossal", [(0.1, True, False, math.inf)]),
        ("nvlamb", [(0.1, True, True, math.inf), (0.0, True, True, math.inf)]),
        ("lambc", [(0.1, True, True, 1.0), (0.0, False, True, 1.0)]),
        *((name, [(0.1, True, True, math.inf), (0.0, False, True, math.inf)]) for name in VARIANTS_OF_PAPER),
    ],
)
def test_presets(preset, expected):
    optimizer = build_optimizer(Net(), lr=0.01, weight_decay=0.1, preset=preset)
    keys = ("weight_decay", "adapt", "bias_correction", "max_trust_ratio")
    assert [tuple(g[key] for key in keys) for g in optimizer.param_groups] == expected
    assert all(g["eps"] == 1e-6 and g["lr"] == 0.01 for g in optimizer.param_groups)


def test_corrected_decay_knows_the_peak_of_each_layer():
    model = zoo.create_model("vit_nano32", img_size=64, num_classes=3)
    groups = build_optimizer(model, lr=0.02, weight_decay=0.1, layer_decay=0.5, preset="corrected").param_groups
    assert len({group["lr"] for group in groups}) > 2 and all(group["max_lr"] == group["lr"] for group in groups)


@pytest.mark.parametrize("preset", ["paper", "colossal", "nvlamb", "lambc"])
def test_a_preset_is_one_call(preset):
    """With the options of --optim.preset, and the default decay of --optim.weight_decay."""
    model, options = Net(), dict(lr=0.02, betas=(0.8, 0.9), eps=1e-3, impl="eager")
    ours = getattr(Lamb, preset)(model, **options)
    theirs = build_optimizer(model, preset=preset, weight_decay=OptimConfig().weight_decay, **options)
    assert ours.param_groups == theirs.param_groups and ours.defaults == theirs.defaults
    decayed, *_ = getattr(Lamb, preset)(model, 0.02, weight_decay=0.3, max_trust_ratio=2.0).param_groups
    assert (decayed["lr"], decayed["weight_decay"], decayed["max_trust_ratio"]) == (0.02, 0.3, 2.0)


def test_a_model_or_its_parameters_in_the_place_of_the_other():
    for model in (Net(), nn.Sequential(nn.Linear(2, 2))):
        remedies = {Lamb: "call Lamb.paper", Lars: "give Lars model.parameters", Muon: "call .*build_optimizer"}
        for make, remedy in remedies.items():
            with pytest.raises(TypeError, match=f"expected parameters, got the model {type(model).__name__}: {remedy}"):
                make(model)
        sgd = functools.partial(build_optimizer, lr=0.1, weight_decay=0.1, name="sgd")
        for make in (Lamb.paper, Lamb.colossal, sgd):
            for given in (model.parameters(), [*model.parameters()], [{"params": [*model.parameters()]}]):
                with pytest.raises(TypeError, match="give the model, not its parameters, got (generator|list)"):
                    make(given)


def test_options_may_stand_in_the_order_of_torch():
    adamw = torch.optim.AdamW(make_params(), 1e-3, (0.8, 0.9), 1e-4, 0.1).param_groups[0]
    ours = Lamb(make_params(), 1e-3, (0.8, 0.9), 1e-4, 0.1).param_groups[0]
    assert [ours[key] for key in ("lr", "betas", "eps", "weight_decay")] == [1e-3, (0.8, 0.9), 1e-4, 0.1]
    assert all(adamw[key] == ours[key] for key in ("lr", "betas", "eps", "weight_decay"))


def test_adamw_by_one_field():
    optimizer = build_optimizer(Net(), name="adamw", lr=0.01, weight_decay=0.1)
    assert type(optimizer) is torch.optim.AdamW
    assert [(g["weight_decay"], g["eps"], g["fused"]) for g in optimizer.param_groups] == [
        (0.1, 1e-8, True),
        (0.0, 1e-8, True),
    ]
    assert "adapt" not in optimizer.param_groups[1]


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(name="adam"), "unknown optimizer 'adam'; choose one of lamb, adamw, nadamw, sch"),
        (dict(preset="apex"), "unknown LAMB preset 'apex'; choose one of paper, colossal"),
        (dict(preset=""), "unknown LAMB preset ''"),
        (dict(name="adamw", preset="paper"), "preset='paper' has no effect on adamw; .* or choose lamb"),
        (dict(name="sgd", impl="eager"), "impl='eager' has no effect on sgd; remove it or choose lamb or adamw"),
        (dict(name="adamw", momentum=0.9), "momentum=0.9 has no effect on adamw; .* choose sgd or lars"),
        (dict(trust_coefficient=1e-3), "trust_coefficient=0.001 has no effect on lamb; .* choose lars"),
        (dict(name="sgd", betas=(0.9, 0.999)), "betas=.* has no effect on sgd; .* choose lamb or adamw or nadamw"),
        (dict(name="lars", betas=(0.9, 0.999)), "betas=.* has no effect on lars"),
        (dict(name="sgd", eps=1e-8), "eps=1e-08 has no effect on sgd"),
        (dict(name="sgd", trust_coefficient=1e-3), "trust_coefficient=0.001 has no effect on sgd"),
        (dict(name="lars", preset="paper"), "preset='paper' has no effect on lars"),
        (dict(name="sgd", momentum=1.0), "momentum must be a number in \\[0, 1\\), got 1.0"),
        (dict(name="lars", momentum=-0.1), "momentum must be a number in"),
        (dict(name="lars", trust_coefficient=0.0), "Lars's trust_coefficient must be a number above 0, got 0.0"),
        (dict(impl="fast"), "Lamb's impl must be one of auto, compile, eager, plain, got 'fast'"),
        (dict(lr=-1.0), "Lamb's lr must be a number >= 0, got -1.0"),
        (dict(betas=(0.9, 1.0)), "Lamb's betas must be two numbers in \\[0, 1\\)"),
        (dict(eps=-1e-6), "Lamb's eps must be"),
        (dict(weight_decay=-0.1), "Lamb's weight_decay must be"),
    ],
)
def test_build_refuses(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_optimizer(Net(), **(dict(lr=0.01, weight_decay=0.1) | options))


def test_lamb_refuses():
    with pytest.raises(ValueError, match="norm_range must be two numbers with 0 <= low <= high"):
        Lamb(make_params(), norm_range=(2.0, 1.0))
    with pytest.raises(ValueError, match="max_grad_norm is 1.0, and Lamb does not clip: .* torch.nn.utils.clip_grad_"):
        Lamb(make_params(), max_grad_norm=1.0)
    with pytest.raises(ValueError, match="betas must be two numbers in .*, got True"):
        Lamb(make_params(), 1e-3, True)  # in timm's order
    with pytest.raises(ValueError, match="max_trust_ratio must be a number above 0, got 0"):
        Lamb([{"params": make_params(), "max_trust_ratio": 0}])
    for given in ({"lr": "1e-3"}, {"lr": None}, {"norm_range": None}, {"norm_range": (1.0,)}, {"eps": "0"}):
        with pytest.raises(ValueError, match=f"Lamb's {[*given][0]} must be .*, got "):
            Lamb(make_params(), **given)
    for maker in (Lamb, Lars):
        with pytest.raises(ValueError, match="maximize must be left out, and the loss negated, got True"):
            maker([{"params": make_params(), "maximize": True}])
    optimizer = Lamb(make_params())
    with pytest.raises(ValueError, match="float32 or float64 parameters"):
        optimizer.add_param_group({"params": [torch.ones(2).half()]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="got torch.float16 .* use autocast"):
        Lamb([nn.Parameter(torch.ones(2).half())])
    with pytest.raises(ValueError, match="contiguous .* strides \\(1, 3\\)"):
        Lamb([nn.Parameter(torch.ones(2, 3).t().clone(memory_format=torch.preserve_format))])
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="needs dense gradients"):
        Lamb(embedding.parameters()).step()


def test_broken_compiler_names_the_way_out(tmp_path):
    code = "import torch; from largebatch.optim import Lamb; p = torch.ones(3); p.grad = torch.ones(3); "
    code += "Lamb([p], impl='compile').step()"
    settings = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXX": "false"}
    done = subprocess.run([sys.executable, "-c", code], env=settings, text=True, capture_output=True, timeout=120)
    assert done.returncode == 1
    assert "RuntimeError: LAMB could not be compiled here: give Lamb impl='eager'" in done.stderr


@pytest.mark.parametrize(
    "error, warning",
    [(None, []), ("Failed to find C compiler.\nSet CC.", ["Failed to find C compiler."]), ("", ["RuntimeError('')"])],
)
def test_a_compiler_for_a_gpu_is_tried(monkeypatch, caplog, error, warning):
    def compiled(x):
        if error is not None:
            raise RuntimeError(error)

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: compiled)
    assert lamb.can_compile.__wrapped__("cuda") is (error is None)
    assert caplog.messages == [f"torch.compile fails on this GPU: {text}" for text in warning]


@pytest.mark.parametrize("impl", ["plain", "eager", COMPILE])
def test_a_backward_pass_notices_that_a_step_changed_its_weights(impl):
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    late = layer(torch.ones(1, 3, requires_grad=True)).sum()
    Lamb(layer.parameters(), impl=impl).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_auto_without_a_compiler(monkeypatch):
    monkeypatch.setattr(lamb, "can_compile", lambda device_type: False)
    params, twins = make_params(), make_params()
    train(Lamb(params), params, range(2))
    train(Lamb(twins, impl="eager"), twins, range(2))
    assert all(torch.equal(p, q) for p, q in zip(params, twins))
