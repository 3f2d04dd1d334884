"""The zoo: structures, logits and preprocessing are timm's, and importing it costs torch and timm alone."""

import inspect
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import zoo._torchvision
from zoo import MODELS, create_model
from zoo.model import TokenLabelingModel, ZooModel

import timm  # isort: skip  (after zoo, which makes it importable beside a CPU build of torch)
from timm.data import resolve_data_config  # isort: skip
from timm.models import get_pretrained_cfg  # isort: skip

TIMM_NAMES = {
    "vit_b32": "vit_base_patch32_224",
    "vit_b16": "vit_base_patch16_224",
    "vit_l32": "vit_large_patch32_224",
    "vit_l16": "vit_large_patch16_224",
    "vit_s16": "vit_small_patch16_224",
    "vit_ti16": "vit_tiny_patch16_224",
}
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
        ("vit_nano32", 224, 1000, 158_440),
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


@pytest.mark.parametrize("name", TIMM_NAMES)
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


@pytest.mark.parametrize(
    "installed, loads, declared",
    [(True, True, ()), (True, False, ("not_there_1", "not_there_2")), (False, False, ())],
)
def test_operators_are_declared_only_where_torchvision_does_not_load(monkeypatch, installed, loads, declared):
    defined = []
    if not installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(zoo._torchvision, "OPERATORS", ("not_there_1", "not_there_2"))
    monkeypatch.setattr(zoo._torchvision, "_library_loads", lambda folders: loads)
    monkeypatch.setattr(torch.library, "define", lambda name, schema: defined.append(name))
    assert zoo._torchvision.declare_missing_operators() == declared
    assert defined == [f"torchvision::{name}" for name in declared]


def test_operators_that_exist_are_not_declared_again():
    assert zoo._torchvision.declare_missing_operators() == ()
    assert hasattr(torch.ops.torchvision, "nms") and hasattr(torch.ops.torchvision, "qnms")


def test_a_library_that_does_not_load_is_noticed(tmp_path):
    assert not zoo._torchvision._library_loads([str(tmp_path)])
    (tmp_path / "_C.so").write_bytes(b"no library")
    assert not zoo._torchvision._library_loads([str(tmp_path)])
