"""LAMB's Triton kernels beside `lamb_`, in Triton's interpreter, and compiled for a GPU that is not here.

A torch for CPUs has no Triton. `.ci/run` installs it for these tests alone. tests/gpu runs the kernels on a GPU.
"""

import math
import os
import subprocess
import sys

import pytest
import torch
from test_optim import VARIANTS
from torch import Tensor, nn
from waits import Waits

from largebatch.native.lamb import same_kind
from largebatch.optim import Lamb, lamb, scale_gradients

triton = pytest.importorskip("triton", reason="there is no Triton; .ci/run installs it for these tests")
if not triton.knobs.runtime.interpret:
    pytest.skip("set TRITON_INTERPRET=1, as .ci/run does", allow_module_level=True)

from largebatch.optim import lamb_triton  # noqa: E402

CHUNK, BLOCK = 64, 32  # small, because the interpreter takes as long for 32 elements as for 1,024
SIZES = ((7, 9), (1,), (), (3, 43), (0,), (128,), (0, 5), (64,), (2, 33), (31,))
BOUND = {torch.float32: 1e-6, torch.float64: 2e-15}  # torch's root on CPUs is not IEEE's in all bits


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(lamb_triton, "CHUNK", CHUNK)
    monkeypatch.setattr(lamb_triton, "BLOCK", BLOCK)
    lamb_triton.chunk_owners.cache_clear()
    yield
    lamb_triton.chunk_owners.cache_clear()


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters of a prime number of places, each behind a place that belongs to nobody: addresses are odd."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    odd = [torch.full((t.numel() + 2,), 777.0, dtype=dtype)[1:-1].view_as(t).copy_(t) for t in made[::2]]
    return [nn.Parameter(t) for pair in zip(odd, [*made[1::2], None]) for t in pair if t is not None]


def gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = 0.1 * torch.randn(p.shape, generator=generator).to(p)


@pytest.fixture
def pair(monkeypatch):
    """Return the same parameters twice, with an optimizer that takes our kernels and one of the specification."""

    def kernels(rows, s, factor):
        return lamb_triton.lamb_triton_([same_kind(row) for row in rows], s, rows[0][0].new_tensor(factor))

    def make(groups, dtype: torch.dtype = torch.float32):
        monkeypatch.setattr(lamb.cpp_lamb, "lamb_native_", kernels)
        params = [parameters(dtype), parameters(dtype)]
        return params, [Lamb(groups(some), lr=0.1, impl=impl) for some, impl in zip(params, ("compile", "plain"))]

    return make


def states(optimizer: Lamb, params: list[nn.Parameter]) -> list[Tensor]:
    return [optimizer.state[p][name] for p in params if p in optimizer.state for name in ("exp_avg", "exp_avg_sq")]


def the_same_bits(one: Tensor, other: Tensor) -> bool:
    whole = {4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().reshape(-1).view(whole), other.detach().reshape(-1).view(whole))


def assert_alike(params: list[list[nn.Parameter]], optimizers: list[Lamb]) -> None:
    for one, other in zip(*(states(optimizer, some) for optimizer, some in zip(optimizers, params)), strict=True):
        assert the_same_bits(one, other)
    bound = BOUND[params[0][0].dtype]
    for one, other in zip(*params, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)
    ratios = [[optimizer.trust_ratios[p] for p in some if p.grad is not None]
              for optimizer, some in zip(optimizers, params)]  # fmt: skip
    torch.testing.assert_close(*map(torch.stack, ratios), rtol=bound, atol=0)
    for p in params[0]:
        if p._base is not None:
            assert p._base[0] == p._base[-1] == 777.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_variant_equals_the_specification(pair, dtype):
    """A group for each variant, with a tensor of odd length; rates, the clip factor and the steps change."""
    options = [ours for ours, _ in VARIANTS.values() if not ours.get("caution")]  # which is computed eagerly
    assert len(options) == len(SIZES)
    params, optimizers = pair(lambda some: [{"params": [p]} | more for p, more in zip(some, options)], dtype)
    for step in range(3):
        for some, optimizer in zip(params, optimizers):
            gradients(some, step)
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.01 * (step + 1) * (number + 1)
            scale_gradients(optimizer, torch.tensor(1 / (step + 1), dtype=dtype))
            optimizer.step()
        assert_alike(params, optimizers)


def test_parameters_that_are_frozen_or_join_late(pair):
    params, optimizers = pair(lambda some: [{"params": some, "weight_decay": 0.1}])
    for step in range(3):
        for some, optimizer in zip(params, optimizers):
            gradients(some, step)
            for p in some[2 * step + 2 :]:
                p.grad = None
            optimizer.step()
    assert_alike(params, optimizers)


def test_options_at_their_borders(pair):
    """eps and weights of zero, no update, bounds of 0 and infinity: 0 / 0 beyond the end of a tensor is no number."""
    zeros = dict(eps=0.0, weight_decay=0.0)
    borders = (zeros, dict(norm_range=(0.0, 0.0)), dict(norm_range=(math.inf, math.inf)), dict(betas=(0.0, 0.0)))
    params, optimizers = pair(lambda some: [{"params": [p]} | more for p, more in zip(some, borders)])
    for some, optimizer in zip(params, optimizers):
        with torch.no_grad():
            some[1].zero_()
        gradients(some, 0)
        some[2].grad.zero_()
        some[0].grad = torch.arange(63.0).view(9, 7).T  # with other strides
        optimizer.step()
    assert_alike([some[:4] for some in params], optimizers)


def test_a_gradient_that_is_not_finite():
    """With a flag that is False, nothing changes. With one that is True, the formulas have the word."""
    values = (math.inf, math.nan, -math.inf, 1.0, 1.0, math.nan, 1.0)
    rows = [
        same_kind((p.detach(), torch.full_like(p, value), torch.rand_like(p), torch.rand_like(p)))
        for p, value in zip(parameters(), values)
    ]
    s = lamb.scalars(Lamb([torch.zeros(1)], lr=0.1, weight_decay=0.1).param_groups[0], 1)
    before = [[t.clone() for t in row] for row in rows]
    lamb_triton.lamb_triton_(rows, s, torch.ones(()), torch.tensor(False))
    assert all(the_same_bits(old, new) for one, other in zip(before, rows) for old, new in zip(one, other))
    lamb_triton.lamb_triton_(rows, s, torch.ones(()), torch.tensor(True))
    for row, old in zip(rows, before):
        lamb.lamb_(*lamb.flat(tuple(old)), s, torch.ones(()))
        for one, other in zip(row, old):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_elements_beyond_the_range_of_32_bits(tmp_path):
    """Their tensors are files of 8 GiB with nothing in them but the last two chunks."""
    size = 2**31 + 3 * CHUNK + 5
    four = [torch.from_file(str(tmp_path / name), shared=True, size=size) for name in "xgmv"]
    ends = [tensor[-CHUNK:] for tensor in four]
    for k, end in enumerate(ends):
        end.copy_(torch.linspace(0.5, 1.5, CHUNK) / 10**k)
    expected = [end.clone() for end in ends]
    s = lamb.scalars(Lamb([torch.zeros(1)], lr=0.1).param_groups[0], 1)
    # Chunk 0 of these launches is the last but one of the tensor, and chunk 1 the last.
    table = torch.tensor([*(tensor.data_ptr() for tensor in four), size, 1 - size // CHUNK, 0])
    numbers = torch.tensor(s, dtype=torch.float64)
    owners, squares, one = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.float64), torch.ones(())
    options = dict(dtype=lamb_triton.tl.float32, chunk_size=CHUNK, block_size=BLOCK)
    lamb_triton.moments[(2,)](table, owners, numbers, one, one.to(torch.uint8), squares, **options)
    lamb_triton.apply[(2,)](table, owners, numbers, one.to(torch.uint8), one, **options)
    lamb.lamb_(*expected, s._replace(adapt=0.0), one)
    for end, other in zip(ends, expected):
        torch.testing.assert_close(end, other, rtol=1e-6, atol=0)


def test_the_host_does_not_wait_for_the_device(monkeypatch):
    monkeypatch.setattr(lamb_triton, "launch", lambda *tensors: None)
    monkeypatch.setattr(lamb, "can_compile", lambda device_type: True)
    model = nn.Linear(5, 3, device="meta")
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    with Waits() as found:
        Lamb(model.parameters(), lr=0.1).step()
    assert found.reads == set() and found.copies == {"largebatch/native/copies.py: to_device"}


COMPILE = """
import subprocess, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from largebatch.optim import lamb_triton
kinds = dict(table="*i64", owners="*i64", numbers="*fp64", factor="*fp32", finite="*u8", squares="*fp64", ratio="*fp32")
kinds |= dict(results="*fp32", dtype="constexpr", chunk_size="constexpr", block_size="constexpr")
values = dict(dtype=triton.language.float32, chunk_size=lamb_triton.CHUNK, block_size=lamb_triton.BLOCK)
words = "ld.global.v4.b32", "st.global.v4.b32", "fma.", "atom"
assembler = {100: triton.knobs.nvidia.ptxas_blackwell.path}
for kernel in (lamb_triton.moments, lamb_triton.ratios, lamb_triton.apply):
    signature = {name: kinds[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {name: value for name, value in values.items() if name in signature})
    for capability in (80, 90, 100):
        text = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=lamb_triton.EXACT).asm["ptx"]
        open(f"{sys.argv[1]}/kernel.ptx", "w").write(text)
        program, target = assembler.get(capability, triton.knobs.nvidia.ptxas.path), {90: "90a", 100: "100a"}
        command = [program, "-v", f"-arch=sm_{target.get(capability, capability)}", "kernel.ptx"]
        done = subprocess.run(command, cwd=sys.argv[1], text=True, capture_output=True, check=True)
        spills = "0 bytes spill stores, 0 bytes spill loads" not in done.stderr
        print(kernel.__name__, *(word in text for word in words), spills)
"""


def test_they_compile_for_gpus_that_are_not_here(tmp_path):
    """A100, H100, B200: whole chunks in loads and stores of 16 bytes; no fused rounding, no atomics, no spills."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)
    found = {"moments": "True True", "ratios": "False False", "apply": "True True"}
    lines = [f"{name} {words} False False False" for name, words in found.items()]
    assert done.stdout.splitlines() == [line for line in lines for _ in range(3)], done.stderr
