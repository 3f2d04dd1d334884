"""LAMB's Triton kernels beside `lamb_`, element for element: on a GPU, and without one in Triton's interpreter.

torch for CUDA brings Triton. Elsewhere, `.ci/run` shows how to install it for these tests alone.
"""

import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch
from test_engine import BATCH, make_trainer
from test_optim import VARIANTS
from torch import Tensor, nn

from largebatch.optim import Lamb, WeightCopies, fused_check, init_state, lamb, scale_gradients, why_not_fused
from zoo.linear import read_copies

triton = pytest.importorskip("triton", reason="there is no Triton; .ci/run installs it for these tests")
DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip("torch does not see the GPU of this host: set TRITON_INTERPRET=1", allow_module_level=True)

from largebatch.optim import lamb_triton  # noqa: E402

CHUNK, BLOCK = 64, 32  # small, because the interpreter takes as long for 32 elements as for 1,024
SIZES = ((7, 9), (1,), (), (3, 43), (0,), (128,), (0, 5))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(lamb_triton, "CHUNK", CHUNK)
    monkeypatch.setattr(lamb_triton, "BLOCK", BLOCK)
    lamb_triton.chunk_owners.cache_clear()
    yield
    lamb_triton.chunk_owners.cache_clear()


def parameters(dtype: torch.dtype, sizes=SIZES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(DEVICE, dtype)) for size in sizes]


def gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = 0.1 * torch.randn(p.shape, generator=generator).to(p)


def pair(make, dtype: torch.dtype = torch.float32) -> tuple[list[list[nn.Parameter]], list[Lamb]]:
    """The same parameters twice, in an optimizer with our kernels and in one with the specification."""
    params = [parameters(dtype), parameters(dtype)]
    return params, [make(some, impl) for some, impl in zip(params, ("triton", "plain"))]


def states(optimizer: Lamb, params: list[nn.Parameter]) -> list[Tensor]:
    return [optimizer.state[p][name] for p in params if p in optimizer.state for name in ("exp_avg", "exp_avg_sq")]


def the_same_bits(one: Tensor, other: Tensor) -> bool:
    whole = {4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().reshape(-1).view(whole), other.detach().reshape(-1).view(whole))


def assert_alike(params: list[list[nn.Parameter]], optimizers: list[Lamb]) -> None:
    """Moments have the same bits; a weight differs by roundings, as torch's root on CPUs is not IEEE's in all bits."""
    for one, other in zip(*(states(optimizer, some) for optimizer, some in zip(optimizers, params)), strict=True):
        assert the_same_bits(one, other)
    bound = 2e-15 if params[0][0].dtype == torch.float64 else 1e-6
    for one, other in zip(*params, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)
    ratios = [[optimizer.trust_ratios[p] for p in some if p.grad is not None]
              for optimizer, some in zip(optimizers, params)]  # fmt: skip
    torch.testing.assert_close(*map(torch.stack, ratios), rtol=bound, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_variant_equals_the_specification_in_three_launches(dtype, monkeypatch):
    """A group for each variant, with a tensor of odd length; rates, the clip factor and the steps change."""
    calls, launch = [], lamb_triton.launch
    monkeypatch.setattr(lamb_triton, "launch", lambda *tensors: calls.append(launch(*tensors)))

    def make(params: list[nn.Parameter], impl: str) -> Lamb:
        options = [ours for ours, _ in VARIANTS.values()]
        return Lamb([{"params": [p]} | more for p, more in zip(params, options, strict=True)], impl=impl)

    params, optimizers = pair(make, dtype)
    for step in range(3):
        for some, optimizer in zip(params, optimizers):
            gradients(some, step)
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.01 * (step + 1) * (number + 1)
            scale_gradients(optimizer, torch.tensor(1 / (step + 1), device=DEVICE))
            optimizer.step()
    assert_alike(params, optimizers)
    assert len(calls) == 3


def test_parameters_that_are_frozen_or_join_late():
    """Each has its own count of steps, and so its own bias correction; frozen ones stay as they are."""
    params, optimizers = pair(lambda some, impl: Lamb(some, lr=0.1, weight_decay=0.1, impl=impl))
    for step in range(3):
        for some, optimizer in zip(params, optimizers):
            gradients(some, step)
            for p in some[2 * step + 2 :]:
                p.grad = None
            optimizer.step()
    assert_alike(params, optimizers)
    assert [optimizers[0].state[p].get("step") for p in params[0]] == [3, 3, 2, 2, 1, 1, None]


def test_a_gradient_that_is_not_finite():
    """Without a flag, it goes where the formulas take it. With one that is False, nothing changes but the count."""
    params, optimizers = pair(lambda some, impl: Lamb(some, lr=0.1, weight_decay=0.1, impl=impl))
    for some, optimizer in zip(params, optimizers):
        init_state(optimizer)
        for p, value in zip(some, (math.inf, math.nan, -math.inf, 1.0, 1.0, math.nan, 1.0)):
            p.grad = torch.full_like(p, value)
        before = [t.detach().clone() for t in (*some, *states(optimizer, some))]
        optimizer.finite = torch.tensor(False, device=DEVICE)
        optimizer.step()
        optimizer.take_back()
        after = [*some, *states(optimizer, some)]
        assert all(the_same_bits(old, new) for old, new in zip(before, after, strict=True))
        optimizer.finite = torch.tensor(True, device=DEVICE)
        optimizer.step()
        assert [optimizer.state[p]["step"] for p in some] == [1] * len(some)
    for one, other in zip(*params):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)
    for p in params[0]:
        assert bool(p.isfinite().all()) == bool(p.grad.isfinite().all())


def test_options_at_their_borders():
    """eps and weights of zero, no update, bounds of 0 and infinity: 0 / 0 beyond the end of a tensor is no number."""
    zeros = dict(eps=0.0, weight_decay=0.0)
    borders = (zeros, dict(norm_range=(0.0, 0.0)), dict(norm_range=(math.inf, math.inf)), dict(betas=(0.0, 0.0)))

    def make(some: list[nn.Parameter], impl: str) -> Lamb:
        return Lamb([{"params": [p]} | more for p, more in zip(some, borders)], lr=0.1, impl=impl)

    params, optimizers = pair(make)
    for some, optimizer in zip(params, optimizers):
        with torch.no_grad():
            some[1].zero_()
        gradients(some, 0)
        some[2].grad.zero_()
        optimizer.step()
    assert_alike([some[:4] for some in params], optimizers)


def rounded_like(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.bfloat16)


def bits(copy: Tensor) -> Tensor:
    return copy.reshape(-1).view(torch.int16)


def copies_for(params: list[nn.Parameter], *, odd: bool = False) -> list[Tensor]:
    """Copies of no number, each between two others that belong to nobody; odd: they begin at odd places of 2 bytes."""
    whole = [torch.full((p.numel() + 9,), 777.0, dtype=torch.bfloat16, device=DEVICE) for p in params]
    return [t[4 + odd :][: p.numel()].view_as(p) for t, p in zip(whole, params)]


def neighbours(copy: Tensor) -> Tensor:
    whole = copy._base
    places = torch.arange(len(whole), device=DEVICE) - copy.storage_offset()
    return whole[(places < 0) | (places >= copy.numel())]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_copy_is_the_new_weight_in_bfloat16(odd, shift):
    """To the bit, and nothing beside it: ties, both signs, no numbers, whole chunks and others, aligned and not."""
    base = parameters(torch.float32, (((4 * CHUNK + 8,),) + SIZES))
    params = [t.detach().new_zeros(t.numel() + 4)[shift : shift + t.numel()].view_as(t).copy_(t) for t in base]
    with torch.no_grad():
        words = (0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x00008000)
        ties = torch.tensor(words, dtype=torch.int32, device=DEVICE).view(torch.float32)
        # That of NVIDIA's arithmetic. Rounded as if it were a number, it would be -0.
        no_number = torch.tensor([0x7FFFFFFF], dtype=torch.int32, device=DEVICE).view(torch.float32)
        params[0][:13] = torch.cat([ties, -ties, no_number])
    scalars = lamb.scalars(Lamb([torch.zeros(1)], lr=0.0).param_groups[0], 1)
    part = [(x, torch.ones_like(x), torch.zeros_like(x), torch.zeros_like(x)) for x in params]
    copies = copies_for(params, odd=odd)
    lamb_triton.lamb_fused_([(part, scalars)], torch.ones((), device=DEVICE), None, copies)
    assert the_same_bits(params[0][:12], torch.cat([ties, -ties]))  # a rate of 0 moves nothing
    for x, copy in zip(params, copies, strict=True):
        number = ~x.reshape(-1).isnan()
        assert torch.equal(bits(copy)[number], bits(rounded_like(x))[number]) and copy.isnan().equal(x.isnan())
        assert (neighbours(copy) == 777.0).all()


def test_a_copy_is_written_with_its_weight_alone():
    """Not that of a parameter without an update, and none in a step whose gradient is not finite."""
    params = parameters(torch.float32)
    copies = copies_for(params)
    kept, ones = [None if number % 3 == 1 else c for number, c in enumerate(copies)], torch.ones((), device=DEVICE)
    for step in range(3):
        gradients(params, step)
        scalars = lamb.scalars(Lamb([torch.zeros(1)], lr=0.1).param_groups[0], step + 1)
        part = [(p.detach(), p.grad, torch.zeros_like(p), torch.zeros_like(p)) for p in params]
        before, finite = [c.clone() for c in copies], torch.tensor(step != 1, device=DEVICE)
        lamb_triton.lamb_fused_([(part[:3], scalars), (part[3:5], scalars)], ones, finite, kept[:5])
        for number, (p, c, old) in enumerate(zip(params, copies, before)):
            written = step != 1 and number < 5 and number % 3 != 1
            assert torch.equal(bits(c), bits(rounded_like(p) if written else old)), (step, number)


def test_copies_that_do_not_fit_are_refused():
    x = torch.zeros(3, 4, device=DEVICE)
    right = torch.zeros(3, 4, dtype=torch.bfloat16, device=DEVICE)
    scalars = lamb.scalars(Lamb([torch.zeros(1)]).param_groups[0], 1)
    wrong = [right[:2], right.half(), right.T.contiguous().T, right.float()]
    for weight, copy in [*((x, copy) for copy in wrong), (x.double(), right)]:
        part = [(weight, *(torch.zeros_like(weight) for _ in range(3)))]
        with pytest.raises(ValueError, match=r"^LAMB in Triton got a copy in .* for a weight in .*, expected one in "):
            lamb_triton.lamb_fused_([(part, scalars)], weight.new_ones(()), None, [copy])


def layers_of(*params: Tensor) -> list[nn.Module]:
    layers = [nn.Module() for _ in params]
    for layer, p in zip(layers, params):
        layer.weight = p
    return layers


def test_a_step_keeps_copies_that_were_valid_and_makes_no_other_valid():
    """Parameters that join late or are frozen, a step that is not taken, weights that change between pass and step."""
    params = parameters(torch.float32)
    optimizer, copies = Lamb(params, lr=0.1, impl="triton"), WeightCopies(layers_of(*params[:5]))
    optimizer.copies = copies

    def step(*, frozen: int, finite: bool | None) -> set[int]:
        """Which copies are valid after a pass and a step. A copy that is valid is right."""
        with copies.reading():
            assert all(copies.of(p) is not None for p in params[:5])
            assert not any(copies.of(p) is not None for p in params[5:])
        gradients(params, 0)
        for p in params[:frozen]:
            p.grad = None
        with torch.no_grad():
            params[3].mul_(2.0)
        versions = [p._version for p in params]
        optimizer.finite = None if finite is None else torch.tensor(finite, device=DEVICE)
        optimizer.step()
        assert [p._version > old for p, old in zip(params, versions)] == [p.grad is not None for p in params]
        found = {n for n, p in enumerate(params) if copies.valid(p) is not None}
        assert all(torch.equal(bits(copies.valid(params[n])), bits(rounded_like(params[n]))) for n in found)
        return found

    with copies.over_steps():
        for frozen, finite in ((2, True), (0, False), (1, None), (5, True), (0, True)):
            assert step(frozen=frozen, finite=finite) == {0, 1, 2, 4}


def test_parameters_in_float64_have_no_copies():
    params = parameters(torch.float64)
    optimizer, copies = Lamb(params, lr=0.1, impl="triton"), WeightCopies(layers_of(*params))
    optimizer.copies = copies
    with copies.over_steps(), copies.reading():
        gradients(params, 0)
        optimizer.step()
        assert not any(copies.of(p) is not None for p in params)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the trainer of this test is on the CPU: for the interpreter")
def test_a_run_with_copies_has_the_bits_of_one_without():
    weights, rounds = [], []
    for has_copies in (False, True):
        torch.manual_seed(0)
        trainer = dataclasses.replace(make_trainer(4 * BATCH, eval_images=BATCH), precision="bf16")
        trainer.optimizer = Lamb(trainer.model.parameters(), lr=0.1, impl="triton")
        if has_copies:
            copies = trainer.replica.copies = trainer.optimizer.copies = WeightCopies(read_copies(trainer.model))
            renew = copies._renew
            copies._renew = lambda: (rounds.append(copies.valid(trainer.model[1].weight) is None), renew())
        trainer.fit()
        weights.append([p.detach() for p in trainer.model.parameters()])
    assert all(the_same_bits(one, other) for one, other in zip(*weights, strict=True))
    assert rounds == [True] + 7 * [False]


def test_a_gradient_with_other_strides_and_no_parameters_at_all():
    params, optimizers = pair(lambda some, impl: Lamb(some, lr=0.1, impl=impl))
    for some, optimizer in zip(params, optimizers):
        optimizer.step()  # no parameter has a gradient
        some[0].grad = torch.arange(63.0, device=DEVICE).view(9, 7).T
        some[4].grad = torch.zeros_like(some[4])  # it has no elements
        optimizer.step()
    assert_alike(params, optimizers)
    for some, optimizer in zip(params, optimizers):
        some[0].grad = None
        optimizer.step()  # there is no chunk
        assert float(optimizer.trust_ratios[some[4]]) == 1


def test_state_that_does_not_fit_is_refused():
    """A kernel would write beyond it."""
    (p, *_) = params = parameters(torch.float32)
    optimizer = Lamb(params, impl="triton")
    gradients(params, 0)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.zeros(7, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"float32, shape \(7, 8\) .* parameter of torch.float32, shape \(7, 9\)"):
        optimizer.step()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the numbers are in memory of the host: for the interpreter")
def test_elements_beyond_the_range_of_32_bits(tmp_path):
    """Their tensors are files of 8 GiB with nothing in them but the last two chunks."""
    size = 2**31 + 3 * CHUNK + 5
    four = [torch.from_file(str(tmp_path / name), shared=True, size=size) for name in "xgmv"]
    ends = [tensor[-CHUNK:] for tensor in four]
    for k, end in enumerate(ends):
        end.copy_(torch.linspace(0.5, 1.5, CHUNK) / 10**k)
    expected = [end.clone() for end in ends]
    scalars = lamb.scalars(Lamb([torch.zeros(1)], lr=0.1).param_groups[0], 1)
    # Chunk 0 of these launches is the last but one of the tensor, and chunk 1 the last.
    table = torch.tensor([*(tensor.data_ptr() for tensor in four), size, 1 - size // CHUNK, 0, 1, 0])
    numbers = torch.tensor(scalars, dtype=torch.float64)
    owners, squares, one = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.float64), torch.ones(())
    options = dict(dtype=lamb_triton.tl.float32, chunk_size=CHUNK, block_size=BLOCK)
    lamb_triton.moments[(2,)](table, owners, numbers, one, one.to(torch.uint8), squares, **options)
    lamb_triton.apply[(2,)](table, owners, numbers, one.to(torch.uint8), one, **options)
    lamb.lamb_(*expected, scalars._replace(adapt=0.0), one)
    for end, other in zip(ends, expected):
        torch.testing.assert_close(end, other, rtol=1e-6, atol=0)


# -- the trial at the start ----------------------------------------------------------------------------------------


def test_the_trial_finds_no_difference():
    assert fused_check.difference(DEVICE) == ""


def first(tensor: Tensor) -> Tensor:
    return tensor[:1]


def after(tensor: Tensor) -> Tensor:
    """The number behind a tensor, which belongs to nobody."""
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + len(tensor))


@pytest.mark.parametrize(
    "place, which, step, found",
    [(first, 0, 1, "weights of step 1"), (after, 2, 1, "first moments of step 1"),
     (first, 3, 3, "second moments of step 3"), (first, 4, 2, "copies of step 2"), (after, 4, 3, "copies of step 3"),
     (None, 0, 1, "trust ratios of step 1")],
)  # fmt: skip
def test_the_trial_finds_wrong_numbers(monkeypatch, place, which, step, found):
    true, steps = lamb_triton.lamb_fused_, []

    def wrong(parts, factor, finite, copies):
        ratios = true(parts, factor, finite, copies)
        steps.append(parts)
        if len(steps) == step and place:
            place((*parts[1][0][0], copies[2])[which]).add_(1e-4 if which < 4 else 0.1)
        return ratios if place else [ratio + 1e-4 for ratio in ratios]

    monkeypatch.setattr(lamb_triton, "lamb_fused_", wrong)
    sentence = "gets other numbers from the kernels than from the formulas"
    assert fused_check.difference(DEVICE) == f"{sentence} ({found})"


def test_a_device_that_cannot_run_them():
    """On a GPU an error of Triton, its compiler or the driver is a cause like any other."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    on_cpus = "computes on a device of type cpu, and the kernels are for GPUs"
    assert why_not_fused(cpu, fused_check.difference) == on_cpus
    for error, text in ((OSError("no gcc\nat all"), "no gcc"), (MemoryError(), "MemoryError()")):
        assert why_not_fused(cuda, failing(error)) == f"cannot run the kernels ({text})"


def failing(error: Exception):
    def fail(device: torch.device) -> str:
        raise error

    return fail


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from largebatch.optim import lamb_triton
kinds = dict(table="*i64", owners="*i64", numbers="*fp64", factor="*fp32", finite="*u8", squares="*fp64", ratio="*fp32")
kinds |= dict(results="*fp32", dtype="constexpr", chunk_size="constexpr", block_size="constexpr")
values = dict(dtype=triton.language.float32, chunk_size=lamb_triton.CHUNK, block_size=lamb_triton.BLOCK)
words = "ld.global.v4.b32", "st.global.v4.b32", "st.global.v2.b32", "fma.", "atom", "ld.local"
for kernel in (lamb_triton.moments, lamb_triton.ratios, lamb_triton.apply):
    signature = {name: kinds[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {name: value for name, value in values.items() if name in signature})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=lamb_triton.EXACT).asm["ptx"]
    print(kernel.__name__, *(word in text for word in words))
"""


def test_they_compile_for_a_gpu_that_is_not_here(tmp_path):
    """For an H100: whole chunks in loads and stores of 16 bytes, no fused rounding, no atomics, nothing spilled.

    The copy is stored in 8 bytes, the same four numbers: with 16, numbers would change threads through shared memory.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, text=True, capture_output=True, timeout=120)
    assert done.stdout.splitlines() == [
        "moments True True False False False False", "ratios False False False False False False",
        "apply True True True False False False",
    ], done.stderr  # fmt: skip


def test_in_python_they_are_not_for_cpus(monkeypatch):
    """A run with `--optim.impl triton` on CPUs warns, and takes the default."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="impl is triton, and the parameters are on cpu: choose compile, or use a GPU"):
        Lamb([p], impl="triton").step()
