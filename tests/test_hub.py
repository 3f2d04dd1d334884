"""config.json beside weights: timm builds the same model from it, and so does the zoo, whatever its place."""

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from zoo import MODELS, create_model, hub, list_models, save_weights

import timm  # isort: skip  (after zoo, which makes it importable beside a CPU build of torch)
from timm.data import resolve_model_data_config  # isort: skip

NAMES = ["cat", "dog", "élan"]
GEOMETRY = {"crop_pct": 0.8, "interpolation": "bilinear", "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}


def write(folder: Path, name: str, **options) -> nn.Module:
    """A folder with the weights of a model for three classes, all of them random, and its description; the model."""
    torch.manual_seed(1)
    model = create_model(name, **({"img_size": 64, "num_classes": 3} | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hub.describe(name, model, label_names=NAMES, **GEOMETRY)))
    return model


def images(side: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def difference(one: nn.Module, other: nn.Module, side: int = 64) -> float:
    """The largest difference of two logits, as a share of the largest logit."""
    first, second = one.eval()(images(side)), other.eval()(images(side))
    assert first.shape == (2, 3) and first.std() > 0.01
    return float((first - second).abs().max() / first.abs().max())


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path / "hub", "vit_nano32")
    return tmp_path / "hub"


# -- for timm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options, tolerance",
    [
        ("vit_ti16", {}, 0.0),
        ("vit_nano32", {}, 0.0),  # timm has no such name: another ViT with these sizes
        ("vit_nano32", {"global_pool": "avg", "img_size": 96}, 0.0),
        ("volo_d1", {}, 1e-5),  # timm's outlook attention adds up in another order
    ],
)
def test_timm_builds_the_same_model_from_the_folder(tmp_path, name, options, tolerance):
    ours = write(tmp_path, name, **options)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    side = options.get("img_size", 64)
    assert difference(ours, theirs, side) <= tolerance
    config = resolve_model_data_config(theirs)
    assert tuple(config["input_size"]) == (3, side, side) and config["crop_mode"] == "center"
    assert {key: tuple(config[key]) if isinstance(config[key], list) else config[key] for key in GEOMETRY} == GEOMETRY
    assert list(theirs.pretrained_cfg["label_names"]) == NAMES
    assert theirs.num_classes == 3 and theirs.pretrained_cfg["num_classes"] == 3


@pytest.mark.parametrize("name", [name for name in MODELS if name != "volo_nano"])  # timm's VOLOs have fixed widths
def test_every_model_is_known_to_timm_and_found_again(tmp_path, name):
    """Without memory: names and shapes of all tensors, at another size than the usual."""
    with torch.device("meta"):
        size = 126 if name == "vit_nano7" else 128
        ours = create_model(name, img_size=size, num_classes=5)
        content = hub.describe(name, ours)
        arguments = content["model_args"] | {"num_classes": 5}
        theirs = timm.create_model(content["architecture"], pretrained=False, **arguments)
    shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1] and content["num_features"] == theirs.num_features
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").touch()
    found, pool = hub.find(tmp_path), "avg" if name.startswith("plain") else ""
    assert (found.name, found.img_size, found.num_classes, found.global_pool) == (name, size, 5, pool)
    assert found.cfg == {key: ours.default_cfg[key] for key in hub.GEOMETRY}


# -- for the zoo -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options",
    [("vit_nano32", {"global_pool": "avg"}), ("vit_ti16", {}), ("volo_nano", {}), ("timm/resnet10t", {})],
)
def test_a_folder_needs_no_name_size_or_classes(tmp_path, name, options):
    ours = write(tmp_path, name, **options)
    for model in (create_model(weights=tmp_path), create_model(name, weights=f"local-dir:{tmp_path}")):
        assert difference(ours, model) == 0.0
        assert model.default_cfg == ours.default_cfg | GEOMETRY | {"label_names": tuple(NAMES)}


def test_what_is_given_replaces_what_is_found(folder, caplog):
    model = create_model(weights=folder, img_size=96, num_classes=4)
    assert model(images(96)).shape == (2, 4) and "head of 3 classes left out" in caplog.text
    cfg = model.default_cfg
    assert cfg["mean"] == GEOMETRY["mean"] and cfg["crop_pct"] == 0.9 and "label_names" not in cfg
    with pytest.raises(ValueError, match="does not fit vit_ti16: it looks like vit_nano32, ask for that"):
        create_model("vit_ti16", weights=folder)


def test_a_file_with_a_name_is_read_as_ever_and_one_without_tells_by_its_neighbour(folder):
    file = folder / "model.safetensors"
    assert create_model("vit_nano32", img_size=64, num_classes=3, weights=file).default_cfg["crop_pct"] == 0.9
    assert create_model(weights=file).default_cfg["crop_pct"] == 0.8


def test_the_preparation_of_images_is_that_of_the_neighbour(folder):
    """For programs that have a file and a name; the crop is for the size."""
    file = folder / "model.safetensors"
    assert hub.preparation(file, 64) == GEOMETRY
    assert hub.preparation(file, 96) == {name: value for name, value in GEOMETRY.items() if name != "crop_pct"}
    (folder / "config.json").unlink()
    assert hub.preparation(file, 64) == {}


@pytest.mark.parametrize(
    "name, options", [("vit_nano32", {"img_size": 96}), ("vit_nano32", {"global_pool": "avg"}), ("volo_d1", {})]
)
def test_a_bare_file_is_known_by_its_tensors(tmp_path, name, options):
    ours = write(tmp_path, name, **options)
    (tmp_path / "model.safetensors").rename(tmp_path / "bare.safetensors")
    (tmp_path / "config.json").unlink()
    model = create_model(weights=tmp_path / "bare.safetensors")
    assert difference(ours, model, options.get("img_size", 64)) == 0.0 and model.default_cfg == ours.default_cfg


def test_a_bare_file_of_another_model_is_refused(tmp_path):
    save_weights(nn.Linear(2, 2), tmp_path / "linear.pt")
    with pytest.raises(ValueError, match="linear.pt does not tell its model, which is none of the zoo: name the model"):
        create_model(weights=tmp_path / "linear.pt")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architecture": "resnet18", "model_args": {"stem_width": 8}}, "resnet18 with stem_width 8, which the zoo"),
        ({"architecture": "resnet18", "model_args": {}}, "model.safetensors does not fit the model"),
        ({"architecture": "renset18", "model_args": {}}, "the model renset18, which timm does not have: run the file"),
        ({"model_args": {"class_token": False}}, "timm's vit_base_patch32_224 with class_token False, which the zoo"),
        ({"pretrained_cfg": []}, "config.json does not describe a model as timm does: expected an object"),
        ({"architecture": None}, "config.json does not describe a model as timm does: architecture is None, expected"),
        ({"architecture": "\x1b[2J"}, r"belongs to timm's \\x1b\[2J"),
        ({"num_classes": "3"}, "timm does: num_classes is '3', expected a whole number"),
        ({"num_classes": -1}, "num_classes is -1, expected"),
        ({"num_classes": True}, "num_classes is True, expected"),
        ({"num_classes": None}, "num_classes is None, expected"),
        ({"num_classes": 4, "label_names": None}, "says img_size 64 and num_classes 4, but head.weight in model.saf"),
        ({"num_classes": 10**9, "label_names": None}, r"but head.weight in .* is \(3, 32\), not \(1000000000, 32\)"),
        ({"model_args": [1]}, r"model_args is \[1\], expected an object"),
        ({"label_names": ["a"]}, r"label_names is \['a'\], expected 3 names, one for each class"),
        ({"label_names": [1, 2, 3]}, "label_names is no list of texts"),
        ({"label_names": "abc"}, "label_names is no list of texts"),
    ],
)
def test_a_description_of_another_model_is_refused(folder, changes, message):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))
    with pytest.raises(ValueError, match=message):
        create_model(weights=folder)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("img_size", "64", "img_size is '64', expected pixels, 1 to 16384"),
        ("img_size", 10**6, "img_size is 1000000, expected pixels"),
        ("img_size", 0, "img_size is 0, expected pixels"),
        ("img_size", [], "expected pixels"),
        ("img_size", 4096, r"says img_size 4096 and num_classes 3, but pos_embed in model.safetensors is \(1, 5, 32\)"),
        ("mean", [0.1, 0.2], "expected three numbers"),
        ("mean", ["a", "b", "c"], "expected three numbers"),
        ("mean", [math.nan, 0, 0], "expected three numbers"),
        ("std", [0, 0, 0], "expected three numbers from 0.001 to 1000"),
        ("std", [1e-300, 1, 1], "expected three numbers from 0.001 to 1000"),
        ("std", [1, 1e300, 1], "expected three numbers from 0.001 to 1000"),
        ("mean", [0, 0, -1e300], "expected three numbers from -1000 to 1000"),
        ("crop_pct", -1, "crop_pct is -1, expected a fraction"),
        ("crop_pct", 1e-9, "crop_pct is 1e-09, expected a fraction"),
        ("crop_pct", "0.9", "crop_pct is '0.9', expected a fraction"),
        ("crop_pct", 1e9, "expected a fraction"),
        ("interpolation", "cubic", "interpolation is 'cubic', expected bilinear or bicubic"),
        ("interpolation", ["bicubic"], "expected bilinear or bicubic"),
    ],
)
def test_a_description_with_other_values_is_refused(folder, key, value, message):
    content = json.loads((folder / "config.json").read_text())
    content["model_args" if key == "img_size" else "pretrained_cfg"][key] = value
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        create_model(weights=folder)


@pytest.mark.parametrize("text", ["", "[" * 20_000, '{"a": 1' + "0" * 5000 + "}", "\xff"])
def test_a_description_that_is_no_json_is_refused(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="config.json is no JSON: ."):
        create_model(weights=folder)


@pytest.mark.parametrize(
    "theirs, ours, rows",
    [
        ("", "abc", None), ("abc", "", None), ("abc", "abc", None), ("abc", "cab", [2, 0, 1]),
        ("abc", "abd", []), ("ab", "abc", []), ("aab", "baa", []),
    ],
)  # fmt: skip
def test_the_names_of_classes_tell_the_rows_of_a_head(theirs, ours, rows):
    assert hub.head_rows([*theirs], [*ours]) == rows


def test_the_head_follows_the_names_of_the_classes(folder, caplog):
    caplog.set_level(logging.WARNING, logger="zoo")  # another test may have set a lower one
    source = create_model(weights=folder).eval()
    for weights in (folder, folder / "model.safetensors"):
        given = {"img_size": 64, "num_classes": 3, "weights": weights}
        turned = create_model("vit_nano32", label_names=NAMES[::-1], **given).eval()
        assert torch.equal(turned(images()), source(images()).flip(1)) and not caplog.text
        assert turned.default_cfg["label_names"] == tuple(NAMES[::-1])
        other = create_model("vit_nano32", label_names=["cat", "dog", "cow"], **given)
        assert "head of 3 classes, whose names are others, left out, one of 3 classes initialised anew" in caplog.text
        assert other.head.weight.std() < 0.03 and torch.equal(other.norm.weight, source.norm.weight)
        caplog.clear()
    with pytest.raises(ValueError, match="label_names of vit_nano32 are 2, expected one for each class: 3"):
        create_model("vit_nano32", num_classes=3, label_names=["cat", "dog"])


def test_what_was_taken_from_a_file_is_logged(folder, caplog):
    with caplog.at_level(logging.INFO):
        create_model("vit_nano32", img_size=96, num_classes=4, weights=folder)
        create_model(weights=folder)
    count = len(create_model("vit_nano32").state_dict())
    others = ", not pos_embed, head.weight, head.bias"
    assert f"{count - 3} of the model's {count} tensors are as in this file{others}" in caplog.messages[-2]
    assert caplog.messages[-1].endswith(f": {count} of the model's {count} tensors are as in this file")


# -- runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(folder, tmp_path) -> Path:
    """A run folder with two checkpoints, as `largebatch.checkpoint` writes them."""
    for step in (99_999_999, 100_000_000):  # the newest is the one of more digits
        path = tmp_path / "run" / "checkpoints" / f"{step:08d}"
        shutil.copytree(folder, path)
        digests = {file.name: {"sha256": hub.digest(file)} for file in path.iterdir()}
        (path / "manifest.json").write_text(json.dumps({"step": step, "parts": digests}))
    (tmp_path / "run" / "checkpoints" / "100000001.tmp").mkdir()
    return tmp_path / "run"


def test_a_run_folder_is_its_newest_checkpoint(run):
    assert hub.find(run).weights == run / "checkpoints" / "100000000" / "model.safetensors"
    assert create_model(weights=run).num_classes == 3


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_passed_over_or_refused(run, caplog, file):
    newest = run / "checkpoints" / "100000000"
    content = (newest / file).read_bytes()
    (newest / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        assert hub.find(run).weights.parent.name == "99999999"
    assert f"checkpoint {newest} is refused: {file} has changed since it was written" in caplog.text
    for source in (newest, newest / "model.safetensors"):
        with pytest.raises(ValueError, match=f"{newest / file} has changed since it was written: restore it, or take"):
            hub.find(source)


@pytest.mark.parametrize("moment", ["_check_found", "read_weights", "label_names", "why_changed"])
def test_a_checkpoint_that_is_removed_when_it_has_been_chosen_is_no_failure(run, monkeypatch, moment):
    """Before, while or after it is read, a run removes the newest checkpoint, and has written a newer one."""
    import zoo

    place = zoo if moment == "_check_found" else hub
    real = getattr(place, moment)

    def rotate(*args, **options):
        if (run / "checkpoints" / "100000000").is_dir():
            (run / "checkpoints" / "100000000").rename(run / "checkpoints" / "100000009")
        return real(*args, **options)

    expected = create_model(weights=run)
    monkeypatch.setattr(place, moment, rotate)
    assert difference(create_model(weights=run), expected) == 0.0


def test_weights_that_are_not_there_are_looked_for_a_few_times(run, monkeypatch):
    monkeypatch.setattr(hub, "_weights_of", lambda folder, name: folder / "model.safetensors")
    with pytest.raises(ValueError, match="there is no weights file .*/run/model.safetensors$"):
        create_model(weights=run)


def test_the_average_is_taken_if_it_is_asked_for(run):
    with pytest.raises(ValueError, match=f"{run} has no weights: expected model_ema.safetensors, or"):
        hub.find(run, average=True)
    average = run / "checkpoints" / "99999999" / "model_ema.safetensors"
    shutil.copy(average.with_name("model.safetensors"), average)
    assert hub.find(run, average=True).weights == average and create_model(weights=average).num_classes == 3


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} has no weights: expected model.safetensors, or the checkpoints"):
        create_model(weights=tmp_path)


# -- names -------------------------------------------------------------------------------------------------------


def test_timms_names_are_names_of_the_zoo():
    for theirs, (ours, side) in {"vit_base_patch32_384": ("vit_b32", 384), "volo_d1_224": ("volo_d1", 224)}.items():
        with torch.device("meta"):
            model = create_model(theirs)
            same = create_model(ours, img_size=side)
        assert model.default_cfg == same.default_cfg
        assert [v.shape for v in model.state_dict().values()] == [v.shape for v in same.state_dict().values()]
    assert hub.zoo_name("vit_base_patch16_224_miil") is None  # another model under a longer name


def test_the_models_are_listed():
    assert list_models() == list(MODELS) and list_models("volo_d*") == [f"volo_d{k}" for k in range(1, 6)]


@pytest.mark.parametrize("source", ["hf-hub:timm/vit_base_patch32_224.augreg_in1k", "vit_base_patch32_224.augreg_in1k"])
def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch, tmp_path, source):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = "timm/vit_base_patch32_224.augreg_in1k"
    with pytest.raises(ValueError, match=f"^hf-hub:{repository} could not be fetched: .*; without a network, copy"):
        create_model("vit_b32", weights=source)


def test_what_is_on_the_hub_is_read_from_its_copy(monkeypatch, folder):
    import huggingface_hub

    def download(repository: str, **options) -> str:
        asked.append((repository, options))
        return str(folder)

    asked: list = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert create_model(weights="hf-hub:us/model@v2").default_cfg["label_names"] == tuple(NAMES)
    wanted = ["model.safetensors", "config.json"]
    assert asked == [("us/model", {"revision": "v2", "allow_patterns": wanted})]


def test_neither_name_nor_weights_is_refused():
    with pytest.raises(ValueError, match="there is no model's name, and there are no weights: the zoo has vit_b32"):
        create_model()
