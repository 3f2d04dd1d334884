"""VOLO: counts, timm's logits, and what `forward_train` gives against the architecture written out a second time."""

from copy import deepcopy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import create_model, load_weights, save_weights, set_fused_attn
from zoo.volo import STRUCTURES, Block, OutlookAttention, gather, mix, recognise, scatter

import timm  # isort: skip  (after zoo, which makes it importable beside a CPU build of torch)

PARAMETERS = {
    "volo_d1": 26_632_040,
    "volo_d2": 58_678_336,
    "volo_d3": 86_325_072,
    "volo_d4": 192_961_520,
    "volo_d5": 295_455_584,
    "volo_nano": 379_002,
}


@cache
def on_meta(name: str, **options) -> nn.Module:
    with torch.device("meta"):
        return create_model(name, **options)


def alike(peer: nn.Module, name: str, **options) -> nn.Module:
    """With the weights of `peer`; random ones of its own would take a second."""
    model = deepcopy(on_meta(name, **options))
    model.load_state_dict(peer.state_dict(), assign=True)
    return model


def small(**options) -> nn.Module:
    torch.manual_seed(0)
    return create_model("volo_d1", img_size=64, num_classes=7, **options)


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


# -- against what was published and timm ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRUCTURES)
def test_parameters_and_names_are_the_published_ones(name):
    assert sum(parameter.numel() for parameter in on_meta(name).parameters()) == PARAMETERS[name]
    if name == "volo_nano":  # ours alone
        return
    with torch.device("meta"):
        peer = timm.create_model(STRUCTURES[name].timm_name)
    assert shapes(on_meta(name)) == shapes(peer)


@pytest.mark.parametrize("size, millions", [("volo_d1-384", 26.78), ("volo_d3-448", 86.63), ("volo_d5-512", 296.09)])
def test_parameters_at_other_sizes(size, millions):
    name, _, img_size = size.partition("-")
    count = sum(parameter.numel() for parameter in on_meta(name, img_size=int(img_size)).parameters())
    assert round(count / 1e6, 2) == millions


@pytest.mark.parametrize("name, img_size", [("volo_d1", 224), ("volo_d1", 96), ("volo_d2", 48), ("volo_d3", 64)])
def test_logits_equal_timms(name, img_size):
    torch.manual_seed(1)
    peer = timm.create_model(STRUCTURES[name].timm_name, img_size=img_size).eval()
    for module in peer.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    model = alike(peer, name, img_size=img_size).eval()
    images = torch.randn(2, 3, img_size, img_size)
    with torch.inference_mode():
        assert (model(images) - peer(images)).abs().max() < 1e-5
        assert (set_fused_attn(model, False)(images) - peer(images)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["volo_d4", "volo_d5"])
def test_preprocessing_is_the_published_one(name):
    """timm has 0.96 for the two at 224 px, and 1.0 for the first three at higher ones."""
    assert on_meta(name).default_cfg["crop_pct"] == 1.15
    assert on_meta("volo_d3", img_size=448).default_cfg["crop_pct"] == 0.96
    cfg = on_meta("volo_d1").default_cfg
    assert (cfg["crop_pct"], cfg["interpolation"], cfg["mean"]) == (0.96, "bicubic", (0.485, 0.456, 0.406))


# -- against the architecture, written out --------------------------------------------------------------------------


def plain_outlook(x: Tensor, w: dict[str, Tensor], at: str, heads: int) -> Tensor:
    """Outlook attention by torch's unfold and fold, as its paper has it."""
    batch, height, width, channels = x.shape
    d, h, v = channels // heads, -(-height // 2), F.linear(x, w[f"{at}v.weight"])
    unfolded = F.unfold(v.permute(0, 3, 1, 2), 3, padding=1, stride=2)  # (B, C * 9, cells)
    values = unfolded.view(batch, heads, d, 9, -1).permute(0, 1, 4, 3, 2)
    mean = F.avg_pool2d(x.permute(0, 3, 1, 2), 2, 2, ceil_mode=True).permute(0, 2, 3, 1)
    logits = F.linear(mean, w[f"{at}attn.weight"], w[f"{at}attn.bias"]).view(batch, -1, heads, 9, 9).transpose(1, 2)
    mixed = (logits * d**-0.5).softmax(-1) @ values
    assert mixed.shape[2] == h * -(-width // 2)
    mixed = mixed.permute(0, 1, 4, 3, 2).reshape(batch, channels * 9, -1)
    folded = F.fold(mixed, (height, width), 3, padding=1, stride=2)
    return F.linear(folded.permute(0, 2, 3, 1), w[f"{at}proj.weight"], w[f"{at}proj.bias"])


def plain_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Head by head; (B, M, C) and (B, N, C) -> (B, M, C)."""
    d, parts = q.shape[2] // heads, []
    for head in range(heads):
        part = slice(head * d, (head + 1) * d)
        parts.append((q[..., part] @ k[..., part].mT / d**0.5).softmax(-1) @ v[..., part])
    return torch.cat(parts, -1)


def plain_volo(images: Tensor, w: dict[str, Tensor], box: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """VOLO-D1 in training: class logits and token logits."""

    def norm(x: Tensor, at: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{at}.weight"], w[f"{at}.bias"])

    def linear(x: Tensor, at: str) -> Tensor:
        return F.linear(x, w[f"{at}.weight"], w.get(f"{at}.bias"))

    def mlp(x: Tensor, at: str) -> Tensor:
        return linear(F.gelu(linear(norm(x, f"{at}.norm2"), f"{at}.mlp.fc1")), f"{at}.mlp.fc2")

    x = images
    for number, (stride, padding) in zip((0, 3, 6), ((2, 3), (1, 1), (1, 1))):
        x = F.conv2d(x, w[f"patch_embed.conv.{number}.weight"], stride=stride, padding=padding)
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
        gain, shift = (w[f"patch_embed.conv.{number + 1}.{part}"][:, None, None] for part in ("weight", "bias"))
        x = ((x - mean) / (var + 1e-5).sqrt() * gain + shift).relu()
    x = F.conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=4).permute(0, 2, 3, 1)
    top, left, bottom, right = box
    x = torch.stack([
        torch.stack([
            torch.stack([
                x[len(x) - 1 - b if top <= r // 2 < bottom and left <= c // 2 < right else b, r, c]
                for c in range(x.shape[2])
            ]) for r in range(x.shape[1])
        ]) for b in range(len(x))
    ])  # fmt: skip
    for block in range(4):
        at = f"network.0.{block}"
        x = x + plain_outlook(norm(x, f"{at}.norm1"), w, f"{at}.attn.", heads=6)
        x = x + mlp(x, at)
    x = F.conv2d(x.permute(0, 3, 1, 2), w["network.1.proj.weight"], w["network.1.proj.bias"], stride=2)
    side = x.shape[-1]
    x = (x.permute(0, 2, 3, 1) + w["pos_embed"]).flatten(1, 2)
    for stage, depth in ((2, 4), (3, 8), (4, 2)):
        for block in range(depth):
            at = f"network.{stage}.{block}"
            q, k, v = linear(norm(x, f"{at}.norm1"), f"{at}.attn.qkv").chunk(3, -1)
            x = x + linear(plain_attention(q, k, v, heads=12), f"{at}.attn.proj")
            x = x + mlp(x, at)
    token = w["cls_token"].expand(len(x), -1, -1)
    for block in range(2):
        at = f"post_network.{block}"
        seen = norm(torch.cat([token, x], 1), f"{at}.norm1")
        k, v = linear(seen, f"{at}.attn.kv").chunk(2, -1)
        attended = plain_attention(linear(seen[:, :1], f"{at}.attn.q"), k, v, heads=12)
        token = token + linear(attended, f"{at}.attn.proj")
        token = token + mlp(token, at)
    cells = linear(norm(x, "norm"), "aux_head").unflatten(1, (side, side))
    unmixed = cells.clone()
    unmixed[:, top:bottom, left:right] = cells.flip(0)[:, top:bottom, left:right]
    return linear(norm(token, "norm"), "head")[:, 0], unmixed.flatten(1, 2)


@pytest.mark.parametrize("fused", [True, False])
def test_the_training_output_and_its_gradients(fused):
    model = set_fused_attn(small(), fused).double().train()
    with torch.no_grad():
        for parameter in model.parameters():  # away from zeros and ones, which hide mistakes
            parameter.add_(0.05 * torch.randn_like(parameter))
    images, box = torch.randn(3, 3, 64, 64, dtype=torch.float64), (1, 0, 3, 3)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    found, expected = model.forward_train(images, box), plain_volo(images, weights, box)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    directions = [torch.randn_like(part) for part in found]
    sum((part * direction).sum() for part, direction in zip(found, directions)).backward()
    sum((part * direction).sum() for part, direction in zip(expected, directions)).backward()
    for name, parameter in model.named_parameters():
        scale = weights[name].grad.abs().max()
        assert (parameter.grad - weights[name].grad).abs().max() <= 1e-10 * scale + 1e-12, name


@pytest.mark.parametrize("height, width", [(8, 8), (7, 10), (1, 3), (2, 2)])
def test_scattering_is_the_adjoint_of_gathering(height, width):
    """Also on odd grids: <gather(x), y> = <x, scatter(y)>, and the neighbourhoods are those of unfold."""
    x = torch.randn(2, height, width, 6, dtype=torch.float64)
    cells = gather(x, num_heads=3)
    unfolded = F.unfold(x.permute(0, 3, 1, 2), 3, padding=1, stride=2).view(2, 3, 2, 9, -1).permute(0, 4, 1, 3, 2)
    assert torch.equal(cells, unfolded.reshape(cells.shape))
    y = torch.randn_like(cells)
    torch.testing.assert_close((cells * y).sum(), (x * scatter(y, x.shape)).sum(), rtol=1e-12, atol=1e-12)


def test_outlook_attention_has_the_derivatives_of_its_value():
    torch.manual_seed(0)
    layer = OutlookAttention(8, 2, attn_drop=0.0).double()
    assert torch.autograd.gradcheck(layer, torch.randn(1, 3, 4, 8, dtype=torch.float64, requires_grad=True))


# -- training --------------------------------------------------------------------------------------------------------


def test_mixing_twice_gives_the_grid_back():
    grid = torch.randn(4, 5, 5, 2)
    mixed = mix(grid, (1, 2, 4, 5))
    assert torch.equal(mixed[0, 1:4, 2:5], grid[3, 1:4, 2:5]) and torch.equal(mixed[0, 0], grid[0, 0])
    assert torch.equal(mix(mixed, (1, 2, 4, 5)), grid)


def test_stochastic_depth_is_the_published_one():
    def rates(model: nn.Module) -> list[float]:
        blocks = [block for stage in model.network if isinstance(stage, nn.Sequential) for block in stage]
        return [block.drop_path for block in blocks]

    ramp = [0.1 * index / 17 for index in range(18)]
    assert rates(small(drop_path_rate=0.1)) == pytest.approx([0.0] * 4 + ramp[4:])
    assert rates(on_meta("volo_d5", drop_path_rate=0.75))[12] == pytest.approx(0.19, abs=0.005)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])  # samples skip hardly ever, often, all of them
def test_what_is_skipped_is_as_if_it_were_computed_and_masked(rate):
    """Value and gradients, float64, with the same draws; the mean of what a sample gets is the layer itself."""
    torch.manual_seed(0)
    block = Block(OutlookAttention(12, 2, attn_drop=0.0), 12, mlp_ratio=2.0, drop_path=rate).double().train()
    x = torch.randn(5, 4, 4, 12, dtype=torch.float64, requires_grad=True)
    for seed in range(12):
        torch.manual_seed(seed)
        found = block(x)
        torch.manual_seed(seed)
        masks = [(torch.rand(5) >= rate).double().view(5, 1, 1, 1) / (1 - rate) for _ in range(2)]
        middle = x + block.attn(block.norm1(x)) * masks[0]
        expected = middle + block.mlp(block.norm2(middle)) * masks[1]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        direction, places = torch.randn_like(x), [x, *block.parameters()]
        gradients = (torch.autograd.grad(y, places, direction) for y in (found, expected))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_recomputed_blocks_give_the_same_gradient():
    options = {"drop_path_rate": 0.5, "attn_drop_rate": 0.1, "pos_drop_rate": 0.1}
    images, gradients = torch.randn(2, 3, 64, 64), []
    for again in (False, True):
        model = small(**options, grad_checkpointing=again).train()
        torch.manual_seed(3)
        model.forward_train(images, (0, 1, 2, 3))[1].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@torch.no_grad()
def test_under_autocast_it_is_as_exact_as_timms():
    """In the mean of five random models: of one, either may be the better by a quarter."""
    errors = torch.zeros(2)
    for seed in range(5):
        torch.manual_seed(seed)
        peer = timm.create_model("volo_d1_224", img_size=64, num_classes=7).train()
        model = alike(peer, "volo_d1", img_size=64, num_classes=7).train()
        images = torch.randn(4, 3, 64, 64)
        for number, one in enumerate((set_fused_attn(model, False), peer)):
            exact = one(images)
            with torch.autocast("cpu", torch.bfloat16):
                errors[number] += (one(images) - exact).norm() / exact.norm()
    assert errors[0] < 1.2 * errors[1]


def test_norms_over_bfloat16_have_the_gradients_of_float64():
    """Under autocast the outlookers add up in bfloat16, over many cells: 2,048 here."""
    torch.manual_seed(0)
    model = set_fused_attn(create_model("volo_nano", img_size=128, num_classes=10), False).train()
    images, directions, found = torch.randn(8, 3, 128, 128), torch.randn(8, 10), []
    for precise in (True, False):
        peer = deepcopy(model).double() if precise else model
        with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            token, cells = peer.forward_train(images.double() if precise else images)
        ((token.double() + cells.double().mean(dim=1)) * directions).sum().backward()
        found.append({name: p.grad.double() for name, p in peer.named_parameters() if "norm" in name})
    exact, ours = found
    errors = {name: float((ours[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
    assert max(errors.values()) < 0.02, errors


# -- what is refused, and weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("volo_d1", {"proj_drop_rate": 0.1}, "proj_drop_rate of volo_d1 is 0.1, and volo_d1 has no use for it"),
        ("volo_d1", {"weight_init": "jax"}, "weight_init of volo_d1 is 'jax'"),
        ("timm/resnet18", {"weight_init": "jax"}, "weight_init of timm/resnet18 is 'jax', and"),
        ("vit_b32", {"global_pool": "max"}, "global_pool of vit_b32 is 'max', expected 'avg' or nothing"),
        ("volo_d1", {"img_size": 100}, "img_size 100 does not fit volo_d1: expected a multiple of 16"),
    ],
)
def test_an_option_without_effect_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **options)


def test_an_export_takes_batches_of_any_size():
    model = create_model("volo_d1", img_size=32, num_classes=5).eval()
    exported = torch.export.export(
        model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(exported.module()(images), model(images), rtol=1e-5, atol=1e-6)


def test_without_classes_there_are_features():
    model = small().eval()
    model.reset_classifier(0)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 384)
    with pytest.raises(ValueError, match="forward_train needs heads"):
        model.forward_train(torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_variant_is_recognised_by_its_shapes(name):
    assert recognise(shapes(on_meta(name, img_size=448, num_classes=10))) == name
    assert recognise(shapes(on_meta(name, num_classes=0))) == name


def test_weights_of_another_size_and_other_classes(tmp_path, caplog):
    """From timm's file: the position embedding is resized, both heads are new, and nothing else differs."""
    peer = timm.create_model("volo_d1_224", num_classes=10)
    torch.save({"state_dict": {f"module.{name}": w for name, w in peer.state_dict().items()}}, tmp_path / "d1.pth")
    caplog.set_level("INFO")
    model = create_model("volo_d1", img_size=384, num_classes=3, weights=tmp_path / "d1.pth")
    theirs, ours = peer.state_dict(), model.state_dict()
    changed = {name for name in ours if ours[name].shape != theirs[name].shape or not torch.equal(*(
        one[name] for one in (ours, theirs)))}  # fmt: skip
    assert changed == {"pos_embed", "head.weight", "head.bias", "aux_head.weight", "aux_head.bias"}
    expected = F.interpolate(
        theirs["pos_embed"].permute(0, 3, 1, 2), size=(24, 24), mode="bicubic", antialias=True, align_corners=False
    )
    torch.testing.assert_close(ours["pos_embed"], expected.permute(0, 2, 3, 1))
    for line in ("from 14 x 14 to 24 x 24", "head of 10 classes left out", "aux_head of 10 classes left out"):
        assert line in caplog.text


def test_weights_come_back_and_the_wrong_variant_is_named(tmp_path):
    model = small()
    save_weights(model, tmp_path / "d1.safetensors")
    again = create_model("volo_d1", img_size=64, num_classes=7, weights=tmp_path / "d1.safetensors")
    assert all(torch.equal(one, other) for one, other in zip(model.state_dict().values(), again.state_dict().values()))
    with pytest.raises(ValueError, match="does not fit volo_d2: it looks like volo_d1, ask for that"):
        load_weights(on_meta("volo_d2", img_size=64), tmp_path / "d1.safetensors")
