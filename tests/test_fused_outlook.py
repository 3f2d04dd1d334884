"""The Triton kernels of VOLO's outlook attention beside the plain layer: on a GPU, and without one in the interpreter.

torch for CUDA brings Triton. Elsewhere, `.ci/run` shows how to install it for these tests alone.
"""

import copy
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from test_blocks import forget_graphs, gradients, tiny_volo, without_kernels  # noqa: F401  (two of them are fixtures)
from torch import Tensor

from largebatch.native import attention
from largebatch.native.attention import outlook_difference, plain_outlook
from zoo.blocks import compile_blocks
from zoo.volo import OutlookAttention, fuse_outlook

triton = pytest.importorskip("triton", reason="there is no Triton; .ci/run installs it for these tests")
DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip("torch does not see the GPU of this host: set TRITON_INTERPRET=1", allow_module_level=True)

from zoo.outlook_triton import outlook  # noqa: E402

GRIDS = [(7, 7), (5, 8), (4, 3), (1, 6), (2, 1)]
EXACT = 1e-13 if DEVICE.type == "cpu" else 1e-12  # of a difference in float64, relative to the largest number


def inputs_for(height: int, width: int, heads: int, dim: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, values, and a gradient of the output; float64."""
    generator = torch.Generator().manual_seed(height + 10 * width)
    sizes = (-(-height // 2), -(-width // 2), 81 * heads), *[(height, width, heads * dim)] * 2
    logits, values, grad = (torch.randn(batch, *size, generator=generator, dtype=torch.float64) for size in sizes)
    return 5 * logits, values, grad


def computed(function, logits: Tensor, values: Tensor, grad: Tensor, *, scale: float = 0.3) -> tuple[Tensor, ...]:
    """The output, and the gradients of logits and values, on the host."""
    ours = [tensor.detach().clone().requires_grad_() for tensor in (logits, values)]
    out = function(*ours, scale)
    out.backward(grad)
    assert [tensor.grad.dtype for tensor in ours] == [tensor.dtype for tensor in ours] and out.dtype == values.dtype
    return out.detach().cpu(), *(tensor.grad.cpu() for tensor in ours)


def on_device(tensors: tuple[Tensor, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [tensor.to(DEVICE, dtype) for tensor in tensors]


# -- the numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads, dim", [(2, 32), (3, 24), (1, 5)])
@pytest.mark.parametrize("height, width", GRIDS)
def test_the_layer_has_the_output_and_gradients_of_the_plain_one(height, width, heads, dim):
    """Float64, gradients of all its parameters included. One program has several windows, or several have one."""
    torch.manual_seed(0)
    plain = OutlookAttention(heads * dim, heads, attn_drop=0.0).double().to(DEVICE)
    fused = fuse_outlook(copy.deepcopy(plain))
    x, grad = torch.randn(2, 2, height, width, heads * dim, dtype=torch.float64, device=DEVICE).unbind()
    found = []
    for layer in (plain, fused):
        own = x.clone().requires_grad_()
        out = layer(own)
        out.backward(grad)
        found.append([out, own.grad, *(parameter.grad for parameter in layer.parameters())])
    for ours, theirs in zip(*reversed(found), strict=True):
        assert (ours - theirs).abs().max() <= EXACT * theirs.abs().max() + 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("height, width", GRIDS[:3])
def test_half_precision_is_rounded_once(height, width, dtype):
    """Each number is the exact one, rounded to its type, within roundings of float32.

    A GPU rounds to the nearest bfloat16, and the interpreter cuts off bits.
    """
    inputs = on_device(inputs_for(height, width, 2, 32), dtype)
    found = computed(outlook, *inputs)
    expected = computed(plain_outlook, *(tensor.cpu().double() for tensor in inputs))
    cut = DEVICE.type == "cpu" and dtype == torch.bfloat16
    once = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / (1 if cut else 2)
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.double() - theirs).abs()
        assert (error <= once * theirs.abs() + 2e-6 * theirs.abs().max()).all()


def test_its_gradient_is_the_derivative_of_its_output():
    logits, values, _ = (tensor.requires_grad_() for tensor in on_device(inputs_for(3, 2, 1, 3, batch=1)))
    assert torch.autograd.gradcheck(partial(outlook, scale=0.3), (logits, values), fast_mode=True)


def test_logits_of_any_size():
    """exp of the largest would overflow; the softmax of equal ones, and of ones far apart, is exact."""
    logits, values, grad = inputs_for(5, 5, 1, 4)
    for change in (logits * 1e4, logits * 0, logits + 1e5):
        found = computed(outlook, *on_device((change, values, grad)))
        for ours, theirs in zip(found, computed(plain_outlook, change, values, grad), strict=True):
            assert (ours - theirs).abs().max() <= EXACT * theirs.abs().max()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which, place", [(0, (1, 1, 2, 100)), (1, (1, 3, 2, 5)), (1, (0, 6, 7, 0)), (2, (1, 4, 4, 6))])
def test_numbers_that_are_not_finite_reach_those_that_see_them_alone(which, place, value):
    """Where it changes nothing in the plain formulas, it changes no bit of ours."""
    inputs = inputs_for(7, 8, 2, 4)
    clean = computed(outlook, *on_device(inputs)), computed(plain_outlook, *inputs)
    inputs[which][place] = value
    found, expected = computed(outlook, *on_device(inputs)), computed(plain_outlook, *inputs)
    for ours, theirs, before, plain_before in zip(found, expected, *clean, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        unseen = theirs == plain_before
        assert unseen.double().mean() > 0.5 and torch.equal(ours[unseen], before[unseen])
    assert not torch.equal(found[0], clean[0][0]) or which == 2


def test_a_gradient_with_other_strides():
    logits, values, grad = on_device(inputs_for(4, 5, 2, 3))
    expected = computed(outlook, logits, values, grad)
    strided = logits.mT.contiguous().mT, values.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), grad.mT
    strided = *strided[:2], strided[2].contiguous().mT
    assert not any(tensor.is_contiguous() for tensor in strided)
    for ours, theirs in zip(computed(outlook, *strided), expected, strict=True):
        assert torch.equal(ours, theirs)


# -- a whole model -------------------------------------------------------------------------------------------------


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.usefixtures("forget_graphs", "without_kernels")
@pytest.mark.parametrize("compiled", ["", "blocks", "whole"])
@pytest.mark.parametrize("again", [False, True])
def test_a_model_recomputed_or_compiled_has_the_same_gradients(compiled, again):
    plain, ours = (tiny_volo().double().to(DEVICE).train() for _ in range(2))
    fuse_outlook(ours).set_grad_checkpointing(again)
    if compiled == "blocks":
        assert compile_blocks(ours) == 5
    if compiled == "whole":
        ours.forward_train = torch.compile(ours.forward_train)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64, device=DEVICE)
    assert distance(gradients(ours, images), gradients(plain, images)) <= 1e-11
    plain.load_state_dict(copy.deepcopy(ours).state_dict(), strict=True)


def test_under_autocast_it_is_as_exact_as_the_plain_layer():
    torch.manual_seed(0)
    layer = OutlookAttention(64, 2, attn_drop=0.0).to(DEVICE)
    fused, x, errors = fuse_outlook(copy.deepcopy(layer)), torch.randn(4, 7, 7, 64, device=DEVICE), []
    for one in (layer, fused):
        exact = layer(x)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            found = one(x)
        assert found.dtype == torch.bfloat16
        errors.append(((found - exact).norm() / exact.norm()).item())
    assert 0 < errors[1] <= 1.05 * errors[0]


# -- what is refused, and the trial at the start -------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    """A kernel would read beyond it."""
    logits, values, _ = on_device(inputs_for(4, 4, 2, 3))
    for wrong in (logits[:, :1], logits[..., :80], logits[:1], torch.cat([logits] * 2, dim=-1)):
        with pytest.raises(ValueError, match=r"^outlook got logits of shape .* expected \(2, 2, 2, heads · 81\), with"):
            outlook(wrong, values, 1.0)
    with pytest.raises(ValueError, match="^attn_drop_rate is 0.1: outlook attention in Triton has none, expected 0"):
        fuse_outlook(OutlookAttention(4, 2, attn_drop=0.1))


def test_in_python_they_are_not_for_cpus(monkeypatch):
    """A run with `--model.outlook triton` on CPUs warns, and takes the plain path."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    logits, values, _ = inputs_for(2, 2, 1, 1)
    with pytest.raises(ValueError, match="^outlook got logits on cpu and values on cpu: expected one GPU"):
        outlook(logits, values, 1.0)


def test_the_trial_finds_no_difference():
    assert outlook_difference(DEVICE) == ""


@pytest.mark.parametrize("part, found", [(0, "output"), (1, "gradient of logits"), (2, "gradient of values")])
@pytest.mark.parametrize("wrong", [1e-4, torch.nan])
def test_the_trial_finds_wrong_numbers(monkeypatch, part, found, wrong):
    true, first = attention._with_gradients, []

    def changed(function, scale, *inputs):
        parts = list(true(function, scale, *inputs))
        if function is outlook and not first:
            first.append(parts)
            parts[part].view(-1)[-1] += wrong * parts[part].abs().max()
        return parts

    monkeypatch.setattr(attention, "_with_gradients", changed)
    sentence = "gets other numbers from the kernels than from the formulas"
    assert outlook_difference(DEVICE) == f"{sentence} ({found}, torch.float32)"


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zoo import outlook_triton as kernels
tl = triton.language
pointers = dict.fromkeys(("logits", "values", "pixels", "grad", "out", "d_logits"), "*bf16") | {"sums": "*fp32"}
sizes = dict.fromkeys(("rows", "height", "width", "windows_high", "windows_wide"), "i32")
values = dict(scale=32**-0.5, heads=6, dim=32, padded=32, tile=kernels.TILE // 32, dtype=tl.float32)
for kernel, transposed in ((kernels.mix, False), (kernels.mix, True), (kernels.differentiate, None)):
    constants = values | ({} if transposed is None else {"transposed": transposed})
    signature = {name: (pointers | sizes).get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(kernel.arg_names) if name in pointers}
    source = ASTSource(kernel, signature, constants, aligned)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    words = "ld.global.v4.b32", "atom", "red.global", "ld.local"
    print(kernel.__name__, *(word in text for word in words))
"""


def test_they_compile_for_a_gpu_that_is_not_here(tmp_path):
    """For an H100: pixels in loads of 16 bytes, no atomics, nothing spilled."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, text=True, capture_output=True, timeout=300)
    kernels = "mix", "mix", "differentiate"
    assert done.stdout.splitlines() == [f"{name} True False False False" for name in kernels], done.stderr
