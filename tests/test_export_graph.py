"""Graphs for other programs: torch.export and ONNX, of each kind of model, with any number of images."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from largebatch.export import graph
from largebatch.export.__main__ import main
from zoo import create_model, hub, save_weights, volo

IMAGES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(9))
TINY = volo.Structure((1, 1, 1, 1), (16, 32), (2, 4), mlp_ratio=2.0, stem_dim=8, timm_name="")  # all kinds of layers


@pytest.fixture(params=["vit_nano32", "volo_d1"])
def folder(request, tmp_path, monkeypatch) -> Path:
    """An exported folder with a model whose classes have names."""
    monkeypatch.setitem(volo.STRUCTURES, "volo_d1", TINY)
    torch.manual_seed(0)
    model = create_model(request.param, img_size=64, num_classes=3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    save_weights(model, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hub.describe(request.param, model, label_names=["a", "b", "c"])))
    return tmp_path


@torch.no_grad()
def expected(folder: Path, count: int) -> torch.Tensor:
    logits = create_model(weights=folder).eval()(IMAGES[:count])
    assert logits.std() > 0.01
    return logits


def test_torch_loads_a_program_of_the_same_logits(folder, capsys):
    assert main([str(folder), str(folder / "model.pt2")]) == 0
    assert "images (batch, 3, 64, 64) -> logits; largest difference to the model 0" in capsys.readouterr().out
    files = {"config.json": ""}
    program = torch.export.load(folder / "model.pt2", extra_files=files).module()
    for count in (1, 2, 4):
        assert torch.equal(program(IMAGES[:count]), expected(folder, count))
    assert json.loads(files["config.json"]) == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "folder", ["vit_nano32", pytest.param("volo_d1", marks=pytest.mark.evidence)], indirect=True  # takes 20 s of a core
)
def test_onnxruntime_computes_the_same_logits(folder):
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX is not installed: pip install '.[onnx]'")
    assert main([str(folder), str(folder / "model.onnx")]) == 0
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 2, 4):
        (logits,) = session.run(["logits"], {"images": IMAGES[:count].numpy()})
        reference = expected(folder, count)
        assert (torch.from_numpy(logits) - reference).abs().max() < 1e-4 * reference.abs().max()
    text = session.get_modelmeta().custom_metadata_map["config.json"]
    assert json.loads(text) == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("folder", ["vit_nano32"], indirect=True)
def test_the_weights_of_a_large_onnx_model_are_in_a_second_file(folder, tmp_path_factory, capsys, monkeypatch):
    """From 1.5 GiB on. Both files can be copied elsewhere."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX is not installed: pip install '.[onnx]'")
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 1000)
    before, elsewhere = {*folder.iterdir()}, tmp_path_factory.mktemp("elsewhere")
    assert main([str(folder), str(folder / "model.onnx")]) == 0
    assert f"{folder}/model.onnx with model.onnx.data: ONNX" in capsys.readouterr().out
    assert {path.name for path in {*folder.iterdir()} - before} == {"model.onnx", "model.onnx.data"}
    for name in ("model.onnx", "model.onnx.data"):
        (folder / name).rename(elsewhere / name)
    session = onnxruntime.InferenceSession(elsewhere / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": IMAGES[:3].numpy()})
    reference = expected(folder, 3)
    assert (torch.from_numpy(logits) - reference).abs().max() < 1e-4 * reference.abs().max()


@pytest.mark.parametrize("folder", ["vit_nano32"], indirect=True)
def test_a_graph_that_computes_otherwise_is_not_written(folder, capsys, monkeypatch):
    def trace(model: nn.Module) -> torch.export.ExportedProgram:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.head.bias += 1e-3
        return real(other)

    real = graph._trace
    monkeypatch.setattr(graph, "_trace", trace)
    before = sorted(folder.iterdir())
    assert main([str(folder), str(folder / "model.pt2")]) == 2
    assert "model.pt2 would differ from the model's by " in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("folder", ["vit_nano32"], indirect=True)
def test_without_the_packages_onnx_is_one_sentence(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main([str(folder), str(folder / "model.onnx")]) == 2
    assert "largebatch: ONNX needs onnxruntime, which is not installed: pip install onnx" in capsys.readouterr().err
