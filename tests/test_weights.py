"""Weights files: containers, wrappers, other image sizes and class counts, and every way not to fit."""

import copy
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from zoo import create_model, load_weights, named_weights, save_weights, vit
from zoo.weights import identify, reason_of

import timm  # isort: skip  (after zoo, which makes it importable beside a CPU build of torch)
from timm.models.vision_transformer import VisionTransformer  # isort: skip
from timm.utils import ModelEmaV3  # isort: skip

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def small_vit(*, img_size: int = 32, num_classes: int = 5, seed: int = 0) -> VisionTransformer:
    """A ViT of 9,000 parameters; every one random, so that no two of them agree by chance."""
    model = VisionTransformer(
        img_size=img_size, patch_size=8, num_classes=num_classes, embed_dim=16, depth=2, num_heads=2
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def fake_weights(name: str, **options) -> dict[str, torch.Tensor]:
    """Weights of the shapes of a zoo model, without its memory."""
    with torch.device("meta"):
        model = create_model(name, **options)
    return {key: torch.zeros(1).expand(value.shape) for key, value in model.state_dict().items()}


def on_meta(name: str, **options) -> nn.Module:
    with torch.device("meta"):
        return create_model(name, **options)


def assert_same(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


class Wrapper(nn.Module):
    """Names its content as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


# -- round trips, containers, wrappers -----------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_saved_is_loaded(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    model, other = small_vit(), small_vit(seed=1)
    save_weights(model, path)
    load_weights(other, str(path))
    assert_same(model, other)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_is_an_oserror_that_names_the_file_and_leaves_nothing(tmp_path, suffix):
    path, limits = tmp_path / f"weights{suffix}", resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="writing failed: .*: .*weights") as error:
            save_weights(small_vit(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert error.value.filename == str(path) and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_others_may_read_what_the_umask_lets_them(tmp_path, suffix):
    before = os.umask(0o027)
    try:
        save_weights(small_vit(), tmp_path / f"weights{suffix}")
    finally:
        os.umask(before)
    assert (tmp_path / f"weights{suffix}").stat().st_mode & 0o777 == 0o640


def test_a_part_of_a_model_that_is_called_module_keeps_its_name(tmp_path):
    """The prefixes of wrappers around it go all the same, and a model reads its own file."""
    model = nn.Sequential(Wrapper(nn.Linear(2, 3)), nn.DataParallel(nn.Linear(3, 3)), nn.Linear(3, 1))
    names = [f"{path}.{name}" for path in ("0.module", "1", "2") for name in ("weight", "bias")]
    for wrapped in (model, nn.DataParallel(model), AveragedModel(model), torch.compile(Wrapper(model))):
        assert [*named_weights(wrapped)] == names
    save_weights(model, tmp_path / "weights.pt")
    other = copy.deepcopy(model)
    other[0].module.reset_parameters()
    load_weights(other, tmp_path / "weights.pt")
    assert_same(model, other)


class Scaled(Wrapper):
    """Has a bias beside that of the part in it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3))
        self.bias = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("build", [Scaled, lambda: nn.Sequential(Scaled(), nn.Linear(3, 1))])
@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
def test_names_that_differ_only_in_a_part_called_module_stay_apart(tmp_path, build, wrap):
    model, other = wrap(build()), wrap(build())
    save_weights(model, tmp_path / "weights.safetensors")
    assert [*named_weights(model)] == [*build().state_dict()]
    assert load_weights(other, tmp_path / "weights.safetensors") == []
    assert_same(model, other)
    build().load_state_dict(load_file(tmp_path / "weights.safetensors"))


@pytest.mark.parametrize("whole", [False, True])
def test_an_averaged_model_saves_and_takes_weights(tmp_path, whole):
    """As `save_weights` writes it, or torch.save its whole state with the counter."""
    average, other = AveragedModel(small_vit()), AveragedModel(small_vit(seed=1))
    if whole:
        torch.save(average.state_dict(), tmp_path / "weights.pt")
    else:
        save_weights(average, tmp_path / "weights.pt")
    for model in (small_vit(seed=2), other):
        assert load_weights(model, tmp_path / "weights.pt") == []
    assert_same(other.module, small_vit())


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, ModelEmaV3])
def test_a_wrapped_model_of_timm_gets_a_new_head_as_well(tmp_path, wrap):
    save_weights(create_model("timm/test_resnet", img_size=64, num_classes=4), tmp_path / "weights.pt")
    model = create_model("timm/test_resnet", img_size=64, num_classes=3)
    assert load_weights(wrap(model), tmp_path / "weights.pt") == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize("wrap", [torch.compile, Wrapper, lambda model: torch.compile(Wrapper(model))])
def test_wrappers_leave_no_trace_in_the_file_and_take_plain_files(tmp_path, wrap):
    model, plain = small_vit(), small_vit(seed=1)
    wrapped = wrap(model)
    assert any("_orig_mod" in name or "module" in name for name in wrapped.state_dict())
    save_weights(wrapped, tmp_path / "weights.pt")
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
    assert_same(model, plain)

    save_weights(small_vit(seed=2), tmp_path / "plain.pt")
    load_weights(wrapped, tmp_path / "plain.pt")
    assert_same(model, small_vit(seed=2))


def test_a_compiled_block_leaves_no_trace_either(tmp_path):
    model = small_vit()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.blocks[1] = torch.compile(model.blocks[1])
    save_weights(model, tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(saved) == list(expected)
    load_weights(small_vit(seed=1), tmp_path / "weights.pt")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize(
    "containers", [(), ("state_dict",), ("model",), ("state_dict_ema",), ("model", "state_dict")]
)
def test_containers_and_prefixes_are_taken_off(tmp_path, prefix, containers):
    content = {prefix + name: tensor for name, tensor in small_vit().state_dict().items()}
    for container in containers:
        content = {container: content, "epoch": 3, "args": Namespace(lr=0.1), "arch": "vit"}
    torch.save(content, tmp_path / "checkpoint.pth")
    other = small_vit(seed=1)
    load_weights(other, tmp_path / "checkpoint.pth")
    assert_same(other, small_vit())


@pytest.mark.parametrize("prefix", ["model.", "net.backbone.", "model.module."])
@pytest.mark.parametrize("suffix", [".ckpt", ".pth", ".safetensors"])
def test_a_prefix_that_all_names_share_is_taken_off(tmp_path, caplog, prefix, suffix):
    content = {prefix + name: tensor for name, tensor in small_vit().state_dict().items()}
    path, other = tmp_path / f"last{suffix}", small_vit(seed=1)
    if suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save({"epoch": 3, "state_dict": content}, path)
    with caplog.at_level(logging.INFO):
        assert load_weights(other, path) == []
    assert_same(other, small_vit())
    assert f"the prefix '{prefix.partition('.')[0]}.' of all names in the file is taken off" in caplog.text


def test_a_prefix_that_the_model_has_as_well_stays(tmp_path):
    save_weights(nn.Sequential(small_vit()), tmp_path / "weights.pt")
    other = nn.Sequential(small_vit(seed=1))
    load_weights(other, tmp_path / "weights.pt")
    assert_same(other[0], small_vit())


def test_a_prefix_that_a_part_of_the_model_has_as_well_is_taken_off(tmp_path):
    model, other = (create_model("volo_nano", img_size=32, num_classes=3) for _ in range(2))
    content = {f"network.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": content}, tmp_path / "last.ckpt")
    assert load_weights(other, tmp_path / "last.ckpt") == []
    assert_same(other, model)


def test_weights_without_an_embedding_of_places_are_no_model_of_the_zoo():
    """BEiT's have the blocks of DeiT III."""
    shapes = {name: tensor.shape for name, tensor in create_model("deit3_s16").state_dict().items()}
    assert vit.recognise(shapes) == "deit3_s16"
    assert vit.recognise({name: shape for name, shape in shapes.items() if name != "pos_embed"}) is None
    assert vit.recognise({name: shape for name, shape in shapes.items() if not name.endswith("qkv.bias")}) is None


def test_a_model_is_recognised_behind_a_prefix(tmp_path):
    model = create_model("vit_nano32", img_size=64, num_classes=3)
    torch.save({"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "last.ckpt")
    assert_same(create_model(weights=tmp_path / "last.ckpt"), model)


@pytest.mark.parametrize("kind", ["f8", "f4", "f2", "i8", "u1", "b1", "M8[s]"])
def test_numbers_of_numpy_beside_the_weights_are_plain_data(tmp_path, kind):
    number = np.zeros(1, dtype=kind)[0]
    torch.save({"model": small_vit().state_dict(), "best": number, "all": {"accuracies": [number]}}, tmp_path / "x.pth")
    other = small_vit(seed=1)
    load_weights(other, tmp_path / "x.pth")
    assert_same(other, small_vit())


def test_a_number_of_numpy_1_is_read_as_well(tmp_path):
    """numpy 1 called the module of its scalars numpy.core; the file is a zip that keeps the name as it was written."""
    torch.save({"model": small_vit().state_dict(), "best": np.float64(81.2)}, tmp_path / "new.pth")
    with zipfile.ZipFile(tmp_path / "new.pth") as new, zipfile.ZipFile(tmp_path / "old.pth", "w") as old:
        for name in new.namelist():
            old.writestr(name, new.read(name).replace(b"numpy._core", b"numpy.core"))
        assert any(b"numpy.core" in old.read(name) for name in old.namelist())
    other = small_vit(seed=1)
    load_weights(other, tmp_path / "old.pth")
    assert_same(other, small_vit())


def test_plain_weights_go_before_averaged_ones(tmp_path):
    ema, plain = (small_vit(seed=seed).state_dict() for seed in (1, 2))
    torch.save({"state_dict_ema": ema, "state_dict": plain}, tmp_path / "checkpoint.pt")
    model = small_vit()
    load_weights(model, tmp_path / "checkpoint.pt")
    assert_same(model, small_vit(seed=2))


def test_loading_keeps_the_models_tensors_and_their_type(tmp_path):
    save_weights(small_vit().bfloat16(), tmp_path / "weights.safetensors")
    model = small_vit(seed=1)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    load_weights(model, tmp_path / "weights.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name] and parameter.dtype == torch.float32
        assert torch.equal(parameter, small_vit().get_parameter(name).bfloat16().float())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_view_does_not_drag_its_storage_into_the_file(tmp_path, suffix):
    model = small_vit()
    storage = torch.randn(1_000_000)
    model.head.weight.data = storage[:80].view(5, 16)
    model.head.bias.data = storage[80:85]
    save_weights(model, tmp_path / f"weights{suffix}")
    assert (tmp_path / f"weights{suffix}").stat().st_size < 200_000
    other = small_vit(seed=1)
    load_weights(other, tmp_path / f"weights{suffix}")
    assert_same(model, other)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tied_weights_are_saved_under_both_names(tmp_path, suffix):
    model, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    for tied in (model, other):
        tied[1].weight = tied[0].weight
    save_weights(model, tmp_path / f"weights{suffix}")
    load_weights(other, tmp_path / f"weights{suffix}")
    assert_same(model, other)
    assert other[1].weight is other[0].weight


def test_create_model_takes_weights(tmp_path):
    torch.manual_seed(0)
    model = create_model("vit_ti16", img_size=64, num_classes=10)
    save_weights(model, tmp_path / "vit.safetensors")
    other = create_model("vit_ti16", img_size=32, num_classes=10, weights=tmp_path / "vit.safetensors")
    assert torch.equal(model.blocks[11].mlp.fc2.weight, other.blocks[11].mlp.fc2.weight)
    assert torch.equal(model.head.weight, other.head.weight)
    assert other.pos_embed.shape == (1, 5, 192)


# -- another image size, another number of classes -----------------------------------------------------------


def test_position_embedding_is_resized_in_fp32_bicubic_antialiased(tmp_path, caplog):
    source, target = small_vit(img_size=48).bfloat16(), small_vit(img_size=32, seed=1)
    save_weights(source, tmp_path / "weights.pt")
    with caplog.at_level(logging.INFO, logger="zoo.weights"):
        load_weights(target, tmp_path / "weights.pt")
    cls, grid = source.pos_embed.detach().float().split([1, 36], dim=1)
    grid = grid.reshape(1, 6, 6, 16).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(4, 4), mode="bicubic", antialias=True)
    expected = torch.cat([cls, grid.permute(0, 2, 3, 1).reshape(1, 16, 16)], dim=1)
    assert torch.equal(target.pos_embed, expected)
    assert "position embedding resized from 6 x 6 to 4 x 4" in caplog.text


def test_weights_under_the_names_of_deit3s_authors_give_timms_model(tmp_path):
    torch.manual_seed(0)
    options = {"num_classes": 5, "depth": 1}
    theirs = timm.create_model("deit3_small_patch16_224", **options).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    names = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}
    published = {name: tensor for name, tensor in theirs.state_dict().items()}
    for of_timm, of_authors in names.items():
        published[f"blocks.0.{of_authors}"] = published.pop(f"blocks.0.{of_timm}")
    torch.save({"model": published}, tmp_path / "deit_3.pth")
    images = torch.randn(2, 3, 224, 224)
    ours = create_model("deit3_s16", num_classes=5).eval()
    del ours.blocks[1:]
    load_weights(ours, tmp_path / "deit_3.pth")
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-5)
    resized = create_model("deit3_s16", num_classes=5, img_size=96)
    del resized.blocks[1:]
    load_weights(resized, tmp_path / "deit_3.pth")
    overlay = {"file": str(tmp_path / "deit_3.pth"), "num_classes": 5}
    peer = timm.create_model(
        "deit3_small_patch16_224", img_size=96, pretrained=True, pretrained_cfg_overlay=overlay, **options
    )
    assert_same(resized, peer)


@pytest.mark.parametrize("scales", [("ls1.gamma", "ls2.gamma"), ("gamma_1", "gamma_2")])
def test_a_layer_scale_tells_deit3_from_a_plain_vit(tmp_path, scales):
    for name in ("deit3_s16", "plain_s16", "vit_s16"):
        weights = fake_weights(name, img_size=192)
        weights = {key.replace("ls1.gamma", scales[0]).replace("ls2.gamma", scales[1]): weights[key] for key in weights}
        torch.save(weights, tmp_path / "some.pt")
        assert identify(tmp_path / "some.pt") == (name, 192, 1000, "")
    with pytest.raises(ValueError, match="does not fit deit3_s16: it looks like vit_s16, ask for that$"):
        load_weights(on_meta("deit3_s16"), tmp_path / "some.pt")


def test_a_larger_image_gives_timms_model(tmp_path):
    source = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    options = {"img_size": 96, "num_classes": 10}
    published = {"file": str(tmp_path / "weights.pth"), "num_classes": 10}
    theirs = timm.create_model(
        "vit_tiny_patch16_224", pretrained=True, pretrained_cfg_overlay=published, **options
    )
    ours = VisionTransformer(patch_size=16, embed_dim=192, depth=12, num_heads=3, **options)
    load_weights(ours, tmp_path / "weights.pth")
    assert_same(ours, theirs)


@pytest.mark.parametrize("num_classes", [0, 1, 4, 6])
def test_a_head_for_other_classes_is_initialised_anew(tmp_path, caplog, num_classes):
    save_weights(small_vit(num_classes=num_classes), tmp_path / "weights.safetensors")
    model = small_vit(num_classes=5, seed=1)
    load_weights(model, tmp_path / "weights.safetensors")
    was = f"head of {num_classes} classes left out" if num_classes else "it has no head"
    assert f"{was}, one of 5 classes initialised anew" in caplog.text
    assert torch.equal(model.blocks[1].mlp.fc2.weight, small_vit().blocks[1].mlp.fc2.weight)
    assert 0.01 < model.head.weight.std() < 0.03 and torch.count_nonzero(model.head.bias) == 0
    assert model.head.weight.requires_grad
    head = f"has a head of {num_classes} classes, the model one of 5"
    why = head if num_classes else "missing head.weight, head.bias"
    with pytest.raises(ValueError, match=why):
        load_weights(model, tmp_path / "weights.safetensors", new_heads=False)


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [1, 2, 3, 4, 0]])
def test_the_rows_of_a_head_are_brought_into_another_order(tmp_path, caplog, order):
    source, model = small_vit(), small_vit(seed=1)
    save_weights(source, tmp_path / "weights.pt")
    with caplog.at_level(logging.INFO, logger="zoo.weights"):
        changed = load_weights(model, tmp_path / "weights.pt", new_heads=False, rows=order)
    assert changed == ["head.weight", "head.bias"] and "rows of head brought into the order of the model" in caplog.text
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(images), source(images)[:, order])


def test_a_head_for_other_classes_of_the_same_number_is_new(tmp_path, caplog):
    save_weights(small_vit(), tmp_path / "weights.pt")
    model = small_vit(seed=1)
    assert load_weights(model, tmp_path / "weights.pt", rows=[]) == ["head.weight", "head.bias"]
    assert "head of 5 classes, whose names are others, left out, one of 5 classes initialised anew" in caplog.text
    assert model.head.weight.std() < 0.03 and torch.equal(model.norm.weight, small_vit().norm.weight)


def test_a_model_without_head_leaves_the_files_head_out(tmp_path, caplog):
    save_weights(small_vit(), tmp_path / "weights.pt")
    model = small_vit(num_classes=0, seed=1)
    load_weights(model, tmp_path / "weights.pt")
    assert "head of 5 classes left out" in caplog.text
    assert torch.equal(model.norm.weight, small_vit().norm.weight)


def test_a_head_that_fits_is_kept_without_a_word(tmp_path, caplog):
    save_weights(small_vit(), tmp_path / "weights.pt")
    with caplog.at_level(logging.DEBUG):
        load_weights(small_vit(seed=1), tmp_path / "weights.pt")
    assert caplog.text == ""


# -- files that do not fit -----------------------------------------------------------------------------------


def test_many_unmatched_keys_are_counted_and_nothing_untrue_is_logged_before(tmp_path, caplog):
    weights = {f"encoder.{name}": tensor for name, tensor in fake_weights("vit_b32").items()}
    torch.save(weights | {"\x1b[2J": torch.zeros(1)}, tmp_path / "odd.pt")
    with caplog.at_level(logging.INFO), pytest.raises(ValueError) as error:
        load_weights(on_meta("vit_b32"), tmp_path / "odd.pt")
    assert str(error.value) == (
        f"{tmp_path / 'odd.pt'} does not fit vit_b32: missing cls_token, pos_embed, patch_embed.proj.weight and "
        "147 more; unexpected encoder.cls_token, encoder.pos_embed, encoder.patch_embed.proj.weight and 150 more"
    )
    assert caplog.text == ""


def test_every_unmatched_key_is_named_in_one_sentence(tmp_path):
    weights = fake_weights("vit_b32")
    del weights["norm.weight"], weights["blocks.3.attn.qkv.bias"]
    weights |= {"extra.weight": torch.zeros(1), "blocks.0.ls1.gamma": torch.zeros(1)}
    weights["cls_token"] = torch.zeros(1, 1, 5)
    weights["blocks.2.norm1.bias"] = torch.zeros(4)
    torch.save({"state_dict": weights}, tmp_path / "odd.pt")
    with pytest.raises(ValueError) as error:
        load_weights(on_meta("vit_b32"), tmp_path / "odd.pt")
    assert str(error.value) == (
        f"{tmp_path / 'odd.pt'} does not fit vit_b32: missing blocks.3.attn.qkv.bias, norm.weight; "
        "unexpected extra.weight, blocks.0.ls1.gamma; "
        "wrong shape cls_token (file (1, 1, 5), model (1, 1, 768)), blocks.2.norm1.bias (file (4,), model (768,))"
    )


@pytest.mark.parametrize(
    "found, wanted", [("vit_b16", "vit_b32"), ("vit_l32", "vit_b32"), ("vit_b32", "vit_l32")]
)
def test_a_file_of_another_zoo_model_is_recognised(tmp_path, found, wanted):
    torch.save(fake_weights(found, img_size=384, num_classes=21843), tmp_path / "other.pt")
    with pytest.raises(ValueError, match=f"pt does not fit {wanted}: it looks like {found}, ask for that$"):
        load_weights(on_meta(wanted), tmp_path / "other.pt")


@pytest.mark.parametrize(
    "shape",
    [(1, 51, 768), (1, 50, 384), (1, 1, 768), (50, 768)],
    ids=["no square", "other width", "no grid", "no batch"],
)
def test_a_position_embedding_that_no_resizing_mends_is_named(tmp_path, shape):
    torch.save(fake_weights("vit_b32") | {"pos_embed": torch.zeros(shape)}, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=r"wrong shape pos_embed \(file \("):
        load_weights(on_meta("vit_b32", img_size=384), tmp_path / "odd.pt")


def test_half_a_head_is_named(tmp_path):
    weights = fake_weights("vit_b32", num_classes=10)
    del weights["head.bias"]
    torch.save(weights, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=r"missing head.bias; wrong shape head.weight \(file \(10, 768\)"):
        load_weights(on_meta("vit_b32"), tmp_path / "odd.pt")


def test_a_model_is_untouched_by_a_file_that_does_not_fit(tmp_path):
    weights = small_vit(img_size=48, num_classes=7).state_dict() | {"norm.weight": torch.zeros(3)}
    torch.save(weights, tmp_path / "odd.pt")
    model = small_vit(seed=1)
    with pytest.raises(ValueError, match="does not fit the model: wrong shape norm.weight"):
        load_weights(model, tmp_path / "odd.pt")
    assert_same(model, small_vit(seed=1))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda weight: weight.fill_(math.nan), r"wrong numbers blocks.1.norm1.weight \(not finite\)$"),
        (lambda weight: weight.double() * 1e300, r"wrong numbers blocks.1.norm1.weight \(not finite\)$"),
        (lambda weight: weight.bfloat16() / 0, r"wrong numbers blocks.1.norm1.weight \(not finite\)$"),
        (lambda weight: weight.to(torch.int8), r"wrong numbers blocks.1.norm1.weight \(torch.int8\)$"),
        (lambda weight: weight > 0, r"wrong numbers blocks.1.norm1.weight \(torch.bool\)$"),
        (lambda weight: weight.to(torch.complex64), r"wrong numbers blocks.1.norm1.weight \(torch.complex64\)$"),
    ],
)
def test_weights_that_are_no_numbers_of_a_model_are_refused(tmp_path, change, message):
    model = create_model("vit_nano32", img_size=64, num_classes=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(before | {"blocks.1.norm1.weight": change(before["blocks.1.norm1.weight"].clone())}, tmp_path / "x.pth")
    with pytest.raises(ValueError, match=message):
        load_weights(model, tmp_path / "x.pth")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_buffer_that_is_infinite_in_the_model_may_be_so_in_the_file(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    save_weights(model, tmp_path / "x.pth")
    load_weights(model, tmp_path / "x.pth")


def test_two_names_for_one_weight_are_refused(tmp_path):
    weights = small_vit().state_dict()
    torch.save(weights | {"module.norm.weight": torch.zeros(16)}, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match="unexpected module.norm.weight"):
        load_weights(small_vit(), tmp_path / "odd.pt")


# -- files that cannot be read -------------------------------------------------------------------------------


class Planted:
    """Something other than tensors and plain data; unpickling it must not run it."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('code in a weights file was run')",))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"\x80\x02}q\x00."[:5]])
def test_a_broken_file_is_one_sentence(tmp_path, suffix, content):
    (tmp_path / f"weights{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match="weights.* cannot be read as a file of tensors: .") as error:
        load_weights(small_vit(), tmp_path / f"weights{suffix}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_truncated_file_is_one_sentence(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    save_weights(small_vit(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="cannot be read as a file of tensors"):
        load_weights(small_vit(), path)


def test_a_file_that_may_not_be_read_is_not_called_missing(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").chmod(0)
    command = [sys.executable, "-c", "import sys, zoo.weights; zoo.weights.read_weights(sys.argv[1])"]
    if os.geteuid() == 0:  # root that may not read what it has closed
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
    command.append(str(tmp_path / "x.safetensors"))
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert "x.safetensors cannot be read as a file of tensors: [Errno 13] Permission denied" in done.stderr


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"state_dict": small_vit().state_dict(), "planted": Planted()}, tmp_path / "bad.pt")
    reason = r"it holds \w+.exec, which is no plain data: save the state_dict alone$"
    with pytest.raises(ValueError, match=f"bad.pt cannot be read as a file of tensors: {reason}"):
        load_weights(small_vit(), tmp_path / "bad.pt")


def test_the_reason_of_others_is_whole_and_has_no_terminal_codes():
    error = RuntimeError("\n404 Error (id 5).\n\n\x1b[1mNo\x1b[0m\x07 such place.\nException raised from f:\nframe #0")
    assert reason_of(error) == "404 Error (id 5). No\\x07 such place" and reason_of(EOFError()) == "EOFError"


@pytest.mark.parametrize(
    "content, holds",
    [({"optimizer": {"lr": 1}, "step": 3}, "optimizer, step"), ([1, 2], "list"), ({}, ""), ({"model": {}}, "")],
)
def test_a_file_without_weights_says_what_it_holds(tmp_path, content, holds):
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=f"odd.pt holds {holds}: expected tensors, bare or under state_dict"):
        load_weights(small_vit(), tmp_path / "odd.pt")


def test_a_missing_file_and_an_unknown_suffix_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no weights file .*none.pt"):
        load_weights(small_vit(), tmp_path / "none.pt")
    with pytest.raises(ValueError, match="weights.npz is not known as a weights file: .*safetensors, .pt, .*, .ckpt$"):
        load_weights(small_vit(), tmp_path / "weights.npz")
    with pytest.raises(ValueError, match="weights.npz is not known"):
        save_weights(small_vit(), tmp_path / "weights.npz")


def test_a_safetensors_file_of_others_loads(tmp_path):
    save_file(small_vit().state_dict(), tmp_path / "model.safetensors")
    model = small_vit(seed=1)
    load_weights(model, tmp_path / "model.safetensors")
    assert_same(model, small_vit())
    assert math.isfinite(model(torch.zeros(1, 3, 32, 32)).sum().item())
