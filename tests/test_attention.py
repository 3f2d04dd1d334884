"""VOLO's attention in C++ against float64, beside torch's products in bfloat16."""

import copy

import pytest
import torch
from torch import Tensor

from largebatch.native import attention
from zoo import create_model, set_fused_attn

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16"), reason="this processor has no AVX-512 BF16"
)


def products(qkv: Tensor, scale: float) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return ((q * scale @ k.mT).softmax(dim=-1) @ v).transpose(1, 2)


def attended(way, qkv: Tensor, direction: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output and the gradient of qkv."""
    qkv = qkv.clone().requires_grad_()
    out = way(qkv, scale)
    out.backward(direction.to(out.dtype))
    return out.detach(), qkv.grad


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.needs_compiler
@pytest.mark.parametrize(
    "batch, tokens, heads, dim",
    [(2, 196, 12, 32), (1, 784, 2, 32), (2, 197, 3, 64), (1, 33, 2, 48), (3, 16, 1, 16), (1, 5, 2, 80), (1, 1, 1, 16)],
)
def test_it_errs_no_more_than_products_do(batch, tokens, heads, dim):
    """Of each image and head apart, so that none is in another's place; scores of up to 20, whose weights differ."""
    torch.manual_seed(tokens)
    qkv = (2 * torch.randn(batch, tokens, 3, heads, dim)).bfloat16()
    direction, scale = torch.randn(batch, tokens, heads, dim).bfloat16(), dim**-0.5
    expected = attended(products, qkv.double(), direction, scale)
    peers = attended(products, qkv, direction, scale)
    for found, peer, exact in zip(attended(attention.attend, qkv, direction, scale), peers, expected, strict=True):
        bound = max(1.05 * error(peer, exact), 2.0**-8)
        for image in range(batch):
            for head in range(heads):
                place = (image, ..., head, slice(None))
                assert error(found[place], exact[place]) <= 1.5 * bound, place
        assert error(found, exact) <= bound


@pytest.mark.needs_compiler
def test_large_scores_and_strides():
    """Scores of hundreds, which exp alone would not survive; not contiguous; as many threads as one likes."""
    qkv = (40 * torch.randn(2, 50, 3, 4, 32)).bfloat16().transpose(1, 2).contiguous().transpose(1, 2)
    out = attention.attend(qkv, 32**-0.5)
    expected = products(qkv.double(), 32**-0.5)
    assert torch.isfinite(out).all() and error(out, expected) < 2.0**-7
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    assert torch.equal(attention.attend(qkv, 32**-0.5), out)
    torch.set_num_threads(threads)


@pytest.mark.needs_compiler
def test_what_is_not_finite_stays_so():
    qkv = torch.zeros(1, 20, 3, 1, 16, dtype=torch.bfloat16)
    qkv[0, 7, 0, 0, 3] = torch.nan
    assert attention.attend(qkv, 0.25).isnan().any(dim=-1)[0, :, 0].tolist() == [row == 7 for row in range(20)]


@pytest.mark.parametrize(
    "qkv",
    [
        torch.zeros(1, 4, 3, 1, 24).bfloat16(),
        torch.zeros(1, 4, 3, 1, 32),
        torch.zeros(1, 4, 2, 1, 32).bfloat16(),
        torch.zeros(4, 3, 1, 32).bfloat16(),
        torch.zeros(1, 4, 3, 1, 32, device="meta").bfloat16(),
    ],
)
def test_what_it_does_not_know_is_refused(qkv):
    with pytest.raises(ValueError, match="expected bfloat16 of shape .* a multiple of 16"):
        attention.attend(qkv, 1.0)


@pytest.mark.needs_compiler
def test_a_volo_trains_with_it_as_with_products(monkeypatch):
    """Loss and gradients in bf16 are as near to those in float64 as they are with products."""
    torch.manual_seed(0)
    images, calls = torch.randn(4, 3, 96, 96), []
    real = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *arguments: calls.append(1) or real(*arguments))

    def gradients(model, precision):
        torch.manual_seed(1)  # of stochastic depth
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            model(images.double() if precision == "fp64" else images).float().square().mean().backward()
        return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])

    model = create_model("volo_d1", img_size=96, num_classes=10, drop_path_rate=0.1).train()
    exact = gradients(set_fused_attn(copy.deepcopy(model), False).double(), "fp64")
    peer = gradients(set_fused_attn(copy.deepcopy(model), False), "bf16")
    assert not calls
    found = gradients(attention.choose_attention(model, CPU), "bf16")
    assert len(calls) == 14 and error(found, exact) <= 1.05 * error(peer, exact)


def test_dropout_of_weights_and_other_types_are_left_to_products():
    model = attention.choose_attention(create_model("volo_d1", img_size=32, num_classes=2, attn_drop_rate=0.1), CPU)
    assert {module.native for module in model.modules() if hasattr(module, "native")} == {None}
    model = attention.choose_attention(create_model("volo_d1", img_size=32, num_classes=2).eval(), CPU)
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        native = model(images)
        assert torch.equal(native, set_fused_attn(model, False)(images))
