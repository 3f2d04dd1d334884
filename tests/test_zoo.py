"""The zoo: structures, logits and preprocessing are timm's, and importing it costs torch and timm alone."""

import copy
import importlib.util
import inspect
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zoo._torchvision
from zoo import MODELS, create_model
from zoo.model import TokenLabelingModel, ZooModel
from zoo.norm import Float32Norm, norms_in_float32
from zoo.vit import PatchEmbed

import timm  # isort: skip  (after zoo, which makes it importable beside a CPU build of torch)
from timm import layers  # isort: skip
from timm.data import resolve_data_config  # isort: skip
from timm.models import get_pretrained_cfg  # isort: skip

TIMM_NAMES = {
    "vit_b32": "vit_base_patch32_224",
    "vit_b16": "vit_base_patch16_224",
    "vit_l32": "vit_large_patch32_224",
    "vit_l16": "vit_large_patch16_224",
    "vit_s16": "vit_small_patch16_224",
    "vit_ti16": "vit_tiny_patch16_224",
    "deit3_s16": "deit3_small_patch16_224",
    "deit3_b16": "deit3_base_patch16_224",
    "deit3_l16": "deit3_large_patch16_224",
}
BOUND = 0.01  # of ||difference|| / ||exact|| in bfloat16, whose numbers round by 2^-9
RATES = ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")


def on_meta(name: str, **options) -> nn.Module:
    """A model without memory: its structure alone."""
    with torch.device("meta"):
        return create_model(name, **options)


@pytest.mark.parametrize(
    "name, img_size, num_classes, expected",
    [
        ("vit_b32", 224, 1000, 88_224_232),
        ("vit_b16", 224, 1000, 86_567_656),
        ("vit_l32", 224, 1000, 306_535_400),
        ("vit_l16", 224, 1000, 304_326_632),
        ("vit_s16", 224, 1000, 22_050_664),
        ("vit_ti16", 224, 1000, 5_717_416),
        ("deit3_s16", 224, 1000, 22_059_496),  # 22.0 million, 86.6 and 304.4 are published
        ("deit3_b16", 224, 1000, 86_585_320),
        ("deit3_l16", 224, 1000, 304_374_760),
        ("plain_s16", 224, 1000, 22_049_896),  # of which 196 · 384 are fixed
        ("plain_b16", 224, 1000, 86_566_120),
        ("vit_nano32", 224, 1000, 158_440),
        ("vit_nano7", 28, 10, 46_474),
        ("vit_6b16", 224, 1000, 6_452_220_904),  # 32 blocks of 4,096 features: 12 h² + 13 h each
        ("vit_b32", 384, 1000, 88_297_192),
        ("vit_b16", 384, 1000, 86_859_496),
        ("vit_l32", 384, 1000, 306_632_680),
        ("vit_b16", 224, 10, 85_806_346),
    ],
)
def test_parameter_counts_are_the_published_ones(name, img_size, num_classes, expected):
    model = on_meta(name, img_size=img_size, num_classes=num_classes)
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_interface_of_the_zoo(name):
    model = on_meta(name)
    assert isinstance(model, ZooModel)
    assert isinstance(model, TokenLabelingModel) == name.startswith("volo")


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_logits_equal_timms(name):
    ours = on_meta(name, img_size=64, num_classes=10).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            size = parameter.numel()
            values = torch.randn(1000, generator=generator).mul_(0.05)  # repeated: 300 million draws take long
            parameter.copy_(values.repeat(size // 1000 + 1)[:size].view_as(parameter))
    with torch.device("meta"):
        theirs = timm.create_model(TIMM_NAMES[name], img_size=64, num_classes=10).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True, assign=True)
    images = torch.randn(2, 3, 64, 64, generator=generator)
    with torch.no_grad():
        logits = ours(images)
        assert torch.equal(logits, theirs(images))
    assert logits.shape == (2, 10) and logits.std() > 0.01


def test_initial_weights_are_timms():
    torch.manual_seed(3)
    ours = create_model("vit_ti16", img_size=64, num_classes=10).state_dict()
    torch.manual_seed(3)
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_deit3_begins_as_published():
    """The class token as large as positions, the layer scale 1e-4, and every block dropped at the same rate."""
    torch.manual_seed(3)
    model = create_model("deit3_s16", img_size=32, num_classes=10, drop_path_rate=0.3)
    scales = [getattr(block, name).gamma for block in model.blocks for name in ("ls1", "ls2")]
    assert len(scales) == 24 and all(torch.equal(gamma, torch.full((384,), 1e-4)) for gamma in scales)
    rates = {getattr(block, name).drop_prob for block in model.blocks for name in ("drop_path1", "drop_path2")}
    assert rates == {0.3}
    assert model.pos_embed.shape == (1, 4, 384) and model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.15)  # four standard errors of 384 numbers
    assert model.default_cfg["crop_pct"] == 1.0 and model.default_cfg["mean"] == (0.485, 0.456, 0.406)
    assert not any(isinstance(module, layers.DropPath) for module in on_meta("deit3_s16").modules())


def test_a_plain_vit_begins_as_published():
    """Positions by the formula, in float64; each matrix by its own sides; no class token, and a head of zeros."""
    torch.manual_seed(3)
    model = create_model("plain_s16", img_size=48, num_classes=10)
    for place in range(9):
        row, column = divmod(place, 3)
        for k in range(96):
            frequency = 10_000 ** -(k / 95)
            expected = [wave(p * frequency) for p in (column, row) for wave in (math.sin, math.cos)]
            assert model.pos_embed[0, place, k::96].tolist() == pytest.approx(expected, abs=1e-6)
    assert not model.pos_embed.requires_grad and model.cls_token is None
    for block in model.blocks:
        matrices = [*block.attn.qkv.weight.chunk(3), block.attn.proj.weight, block.mlp.fc1.weight, block.mlp.fc2.weight]
        for matrix in matrices:  # uniform within ± sqrt(6 / (rows + columns))
            bound = math.sqrt(6 / sum(matrix.shape))
            assert 0.999 * bound < matrix.abs().max() <= bound
        assert 0 < block.mlp.fc1.bias.abs().max() < 1e-5 and block.attn.qkv.bias.abs().max() == 0
    assert model.head.weight.abs().max() == model.head.bias.abs().max() == 0
    patch = model.patch_embed.proj
    assert patch.bias.abs().max() == 0 and patch.weight.std().item() == pytest.approx(1 / math.sqrt(768), rel=0.01)


def test_a_plain_vit_computes_what_is_published():
    """The layers written out: no class token, tanh's GELU, and the norm before the mean."""
    torch.manual_seed(0)
    model = create_model("plain_s16", img_size=32, num_classes=5).double().eval()
    del model.blocks[2:]
    nn.init.normal_(model.head.weight)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    x = model.patch_embed.proj(images).flatten(2).mT + model.pos_embed
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        q, k, v = attn.qkv(block.norm1(x)).view(3, 4, 3, 6, 64).permute(2, 0, 3, 1, 4)
        x = x + attn.proj(((q @ k.mT / 8).softmax(-1) @ v).transpose(1, 2).flatten(2))
        hidden = mlp.fc1(block.norm2(x))
        gelu = hidden / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + mlp.fc2(gelu)
    torch.testing.assert_close(model(images), model.head(model.norm(x).mean(dim=1)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in TIMM_NAMES if name.startswith("vit")])
@pytest.mark.parametrize("img_size, tag", [(224, "_224"), (384, "_384")])
def test_preprocessing_is_timms(name, img_size, tag):
    # timm's ViTs with published weights; of the "orig" B/16 and L/32 it lists the same numbers
    theirs = get_pretrained_cfg(TIMM_NAMES[name].replace("_224", tag))
    ours = on_meta(name, img_size=img_size).default_cfg
    for key in ("input_size", "crop_pct", "interpolation", "mean", "std", "classifier", "first_conv"):
        assert ours[key] == getattr(theirs, key), key


def test_timms_data_helper_understands_the_model():
    config = resolve_data_config(model=on_meta("vit_b32", img_size=256))
    assert config["input_size"] == (3, 256, 256) and config["mean"] == (0.5, 0.5, 0.5)
    assert config["interpolation"] == "bicubic" and config["crop_pct"] == 0.9


def test_every_rate_goes_to_its_own_place():
    model = on_meta("vit_b32", **dict(zip(RATES, (0.1, 0.2, 0.3, 0.4, 0.5))))
    block = model.blocks[-1]
    assert model.head_drop.p == 0.1 and model.pos_drop.p == 0.2
    assert block.attn.proj_drop.p == block.mlp.drop1.p == block.mlp.drop2.p == 0.3
    assert block.attn.attn_drop.p == 0.4
    assert block.drop_path1.drop_prob == pytest.approx(0.5)
    assert isinstance(model.blocks[0].drop_path1, nn.Identity)


def test_the_norm_of_tokens_in_bfloat16_adds_up_in_float32():
    """Over many tokens: torch's kernel on CPUs adds the gradient of the bias up in bfloat16, until nothing is added."""
    torch.manual_seed(0)
    norm, x, direction = Float32Norm(64), torch.randn(10_000, 64).bfloat16(), torch.rand(10_000, 64).bfloat16()
    nn.init.normal_(norm.weight)

    def results(norm: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = norm(x)
        y.backward(direction.to(y.dtype))
        return [y.detach(), x.grad, norm.weight.grad, norm.bias.grad]

    exact = copy.deepcopy(norm).double()
    found, expected = results(norm, x), results(exact, x.double())
    assert [tensor.dtype for tensor in found] == [torch.bfloat16] * 2 + [torch.float32] * 2
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, expected)]
    assert max(errors[:2]) < 2**-9 and max(errors[2:]) < 1e-5


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


NORMS = {
    "LayerNorm": nn.LayerNorm,
    "timm's LayerNorm": layers.LayerNorm,
    "timm's LayerNorm2d": layers.LayerNorm2d,
    "timm's LayerNormAct": layers.LayerNormAct,
    "timm's LayerNormAct2d": layers.LayerNormAct2d,
    "GroupNorm": lambda width: nn.GroupNorm(8, width),
    "timm's GroupNorm1": layers.GroupNorm1,
    "BatchNorm": nn.BatchNorm2d,
    "InstanceNorm": lambda width: nn.InstanceNorm2d(width, affine=True),
    "RMSNorm": nn.RMSNorm,
    "timm's RmsNorm2d": layers.RmsNorm2d,
}
OF_TOKENS = ("LayerNorm", "timm's LayerNorm", "timm's LayerNormAct", "RMSNorm")


@pytest.mark.parametrize("tokens", [100, 50_000])
@pytest.mark.parametrize("kind", NORMS)
def test_the_gradients_of_norms_in_bfloat16_on_a_cpu_are_right(kind, tokens):
    """torch's own layer norm errs by 1 % and by 35 %."""
    torch.manual_seed(0)
    shape = (tokens, 32) if kind in OF_TOKENS else (tokens // 25, 32, 5, 5)
    x, direction = torch.randn(shape).bfloat16(), (torch.randn(shape) + 0.05).bfloat16()
    norm = norms_in_float32(nn.Sequential(NORMS[kind](32)))
    exact = copy.deepcopy(norm).double()
    inputs = x.clone().requires_grad_(), x.double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(inputs[0])
    y.backward(direction.to(y.dtype))
    exact(inputs[1]).backward(direction.double())
    for found, expected in zip((inputs[0], *norm.parameters()), (inputs[1], *exact.parameters()), strict=True):
        assert relative(found.grad, expected.grad) < 0.005


@pytest.mark.parametrize(
    "name, img_size",
    [
        ("timm/swin_tiny_patch4_window7_224", 224),
        ("timm/convnext_atto", 96),
        ("timm/deit_tiny_patch16_224", 96),
        ("timm/mvitv2_tiny", 96),
        ("timm/poolformer_s12", 96),
        ("volo_d1", 96),
    ],
)
def test_the_norms_of_a_model_err_in_bfloat16_no_more_than_its_products(name, img_size):
    """Of all models: their gradients on a CPU beside float64."""
    torch.manual_seed(0)
    model = create_model(name, img_size=img_size, num_classes=10).eval()  # without stochastic depth
    exact, images, direction = copy.deepcopy(model).double(), torch.randn(4, 3, img_size, img_size), torch.randn(4, 10)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    (logits[0] if isinstance(logits, tuple) else logits).float().mul(direction).sum().backward()
    logits = exact(images.double())
    (logits[0] if isinstance(logits, tuple) else logits).mul(direction.double()).sum().backward()
    norms = {id(p) for m in model.modules() if "Norm" in type(m).__name__ for p in m.parameters(recurse=False)}
    errors: dict[bool, list[float]] = {True: [], False: []}
    for found, expected in zip(model.parameters(), exact.parameters(), strict=True):
        if found.grad is not None and expected.grad.norm() > 1e-9:
            errors[id(found) in norms].append(relative(found.grad, expected.grad))
    assert max(errors[True]) < 2 * max(errors[False]) and sorted(errors[True])[len(errors[True]) // 2] < 0.05


def test_the_patch_embedding_is_timms_convolution():
    """Output and gradients beside float64: no further away than the convolution, but for rounding; odd grids."""
    torch.manual_seed(0)
    options = {"img_size": (48, 80), "patch_size": 16, "embed_dim": 24}
    theirs, ours = layers.PatchEmbed(**options), PatchEmbed(**options)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images, direction = torch.randn(3, 3, 48, 80), torch.randn(3, 15, 24)

    def results(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        x = images.to(dtype).requires_grad_()
        y = model.to(dtype)(x)
        y.backward(direction.to(dtype))
        return [y.detach(), x.grad, model.proj.weight.grad, model.proj.bias.grad]

    exact = results(copy.deepcopy(theirs), torch.float64)
    for one, other, reference in zip(results(ours), results(theirs), exact, strict=True):
        scale = reference.norm()
        assert (one - reference).norm() / scale <= max(2 * (other - reference).norm() / scale, 3e-7)
    with pytest.raises(RuntimeError, match=r"unflatten: Provided sizes \[5, 16\] don't multiply up"):
        ours.train()(images.mT)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.float().eval()(images), theirs.float()(images))  # the very bits, as published weights need


def test_timms_interface_is_there():
    model = create_model("vit_ti16", img_size=32, num_classes=10, drop_path_rate=0.1)
    model.set_grad_checkpointing(True)
    features = model.forward_features(torch.zeros(1, 3, 32, 32))
    assert features.shape == (1, 5, 192)
    model.forward_head(features).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.reset_classifier(7)
    assert model.forward_head(features).shape == (1, 7)
    assert {"pos_embed", "cls_token"} <= model.no_weight_decay()


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_recomputed_blocks_draw_what_they_drew(compute):
    """With every kind of dropout the loss and each gradient keep their bits."""
    rates = dict.fromkeys(RATES, 0.1)
    results = []
    for grad_checkpointing in (False, True):
        torch.manual_seed(0)
        options = {"img_size": 32, "num_classes": 5, "grad_checkpointing": grad_checkpointing, **rates}
        model = create_model("vit_ti16", **options).train()
        nn.init.normal_(model.head.weight)
        assert model.grad_checkpointing == grad_checkpointing
        runs = count_forwards(model.blocks[3])
        torch.manual_seed(1)
        with torch.autocast("cpu", compute, enabled=compute != torch.float32):
            loss = model(torch.randn(6, 3, 32, 32)).square().sum()
        drawn_before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), drawn_before)  # the next micro-batch draws as it would
        assert len(runs) == 1 + grad_checkpointing
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(kept, recomputed) and kept.any() for kept, recomputed in zip(*results))


def count_forwards(module: nn.Module) -> list[None]:
    """A list that grows with every forward pass of a module."""
    runs: list[None] = []
    module.register_forward_pre_hook(lambda *_: runs.append(None))
    return runs


@pytest.mark.parametrize("img_size, nearest", [(250, "224 or 256"), (20, "32"), (0, "32"), (-32, "32")])
def test_an_img_size_between_patches_is_refused(img_size, nearest):
    with pytest.raises(ValueError, match=f"img_size {img_size} .*vit_b32.*size 32.*nearest being {nearest}$"):
        create_model("vit_b32", img_size=img_size)


def test_an_unknown_name_is_refused_with_the_nearest_and_all_names():
    with pytest.raises(ValueError, match=r"'vit-b32': did you mean vit_b32\? .*vit_b32, vit_b16, vit_l32"):
        create_model("vit-b32")
    with pytest.raises(ValueError, match="no model 'resnet50': the zoo has"):
        create_model("resnet50")


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_rate_outside_its_range_is_refused(rate, value):
    with pytest.raises(ValueError, match=f"^{rate} of vit_b32"):
        create_model("vit_b32", **{rate: value})


def test_a_negative_number_of_classes_is_refused():
    with pytest.raises(ValueError, match="num_classes of vit_b32 is -1"):
        create_model("vit_b32", num_classes=-1)


@pytest.mark.parametrize("function", [create_model, *MODELS.values()])
def test_no_option_is_swallowed(function):
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}


def test_a_plain_script_imports_torch_and_timm_only():
    script = (
        "import sys\n"
        "from zoo import create_model\n"
        "import timm, torchvision\n"
        "others = {'horovod', 'nvidia.dali', 'mpi4py', 'largebatch', 'tensorboard'}\n"
        "print(sorted(others & set(sys.modules)))\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


DEFINES = f'torch.library.define("torchvision::{{name}}", "{zoo._torchvision.SCHEMA}")'
NEEDS = 'torch.library.register_fake("torchvision::{name}")(print)'


@pytest.mark.parametrize("name, lines, executed", [("own", [DEFINES, NEEDS], 1), ("missing", [NEEDS], 2)])
def test_operators_are_declared_only_if_torchvision_has_none(tmp_path, monkeypatch, name, lines, executed):
    """However its library is called: a second declaration of a compiled operator would end the process."""
    write_torchvision(tmp_path, "import torch", *lines, name=name)
    monkeypatch.setattr(zoo._torchvision, "OPERATORS", (name,))
    import_torchvision(tmp_path)
    assert len((tmp_path / "executed").read_text()) == executed
    assert hasattr(torch.ops.torchvision, name)


def test_other_failures_of_torchvision_are_its_own(tmp_path, monkeypatch):
    write_torchvision(tmp_path, "raise RuntimeError('compiled with different CUDA major versions')", name="")
    monkeypatch.setattr(zoo._torchvision, "OPERATORS", ("not_declared",))
    with pytest.raises(RuntimeError, match="different CUDA"):
        import_torchvision(tmp_path)
    assert not hasattr(torch.ops.torchvision, "not_declared")


def write_torchvision(folder: Path, *lines: str, name: str) -> None:
    """A package that counts how often it is executed, and then does what the lines say."""
    package = folder / "torchvision" / "__init__.py"
    package.parent.mkdir()
    count = f"with open({str(folder / 'executed')!r}, 'a') as file: file.write('x')"
    package.write_text("\n".join([count, *lines]).format(name=name))


def import_torchvision(folder: Path) -> None:
    spec = zoo._torchvision.TorchvisionFinder.find_spec("torchvision", [str(folder)])
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
