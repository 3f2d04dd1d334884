"""From the images of a folder to a model that anybody can use: train, then look at what the run leaves for others."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import launch
from PIL import Image
from runs import SMALL, rows, weights
from safetensors.torch import load_file

from largebatch import checkpoint
from largebatch.export.__main__ import main as export
from largebatch.predict.__main__ import main as predict
from zoo import create_model, save_weights

import timm  # isort: skip  (after zoo, which makes it importable beside a CPU build of torch)

CLASSES = ["blue", "green", "red"]
GEOMETRY = {"crop_pct": 0.75, "interpolation": "bilinear", "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)}


def picture(channel: int, seed: int) -> Image.Image:
    draws = np.random.default_rng(seed)
    pixels = draws.integers(0, 160, (24, 32, 3), dtype=np.uint8)
    pixels[..., channel] += 80
    return Image.fromarray(pixels).resize((100 + 3 * seed, 80), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 4), ("val", 2)):
        for channel, name in zip((2, 1, 0), CLASSES):
            (folder / split / name).mkdir(parents=True)
            for k in range(count):
                picture(channel, 10 * (split == "val") + k).save(folder / split / name / f"{k}.png")
    return folder


@pytest.fixture(scope="module")
def run(images, tmp_path_factory) -> Path:
    """A run with a preparation of images of its own, and with an average of the weights."""
    folder = tmp_path_factory.mktemp("runs") / "colours"
    options = [*SMALL, "--recipe", "quickstart", "--data", str(images), "--model.num_classes", "3"]
    options += ["--data.global_batch_size", "12", "--data.micro_batch_size", "6", "--data.eval_batch_size", "6"]
    options += ["--run.duration", "4 epochs", "--checkpoint.every", "2 epochs", "--optim.lr", "0.05"]
    options += ["--optim.ema_half_life", "6 images", "--run.folder", str(folder)]
    options += [f"--data.{key}={list(value) if isinstance(value, tuple) else value}" for key, value in GEOMETRY.items()]
    code, output = launch(["-m", "largebatch.train", *options], ranks=1)
    assert code == 0, output
    return folder


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("[0-9]*"))


def test_timm_and_the_zoo_build_the_model_of_a_run_with_its_crop_and_classes(run):
    theirs = timm.create_model(f"local-dir:{newest(run)}", pretrained=True).eval()
    ours = create_model(weights=run).eval()
    batch = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(batch), theirs(batch)) and ours(batch).std() > 0.01
    assert all(torch.equal(value, weights(run)[name]) for name, value in ours.state_dict().items())
    for cfg in (ours.default_cfg, timm.data.resolve_model_data_config(theirs)):
        assert {key: tuple(cfg[key]) if isinstance(cfg[key], list) else cfg[key] for key in GEOMETRY} == GEOMETRY
    assert list(ours.default_cfg["label_names"]) == list(theirs.pretrained_cfg["label_names"]) == CLASSES
    average = create_model(weights=newest(run) / "model_ema.safetensors")
    assert all(torch.equal(value, weights(run, "model_ema")[name]) for name, value in average.state_dict().items())


# -- predict -----------------------------------------------------------------------------------------------------


def held_out(images: Path) -> list[str]:
    return [str(path) for path in sorted(images.glob("val/*/*"))]


def test_predictions_are_what_validate_counts(run, images, capfd):
    """The loss that validate prints, in another process, is that of these probabilities."""
    paths = held_out(images)
    assert predict([str(run), *paths, "--json"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["image"] for row in rows] == paths
    chances = [{entry["name"]: entry["probability"] for entry in row["classes"]} for row in rows]
    assert all(set(entry) == set(CLASSES) and math.isclose(sum(entry.values()), 1.0) for entry in chances)
    labels = [Path(path).parent.name for path in paths]
    loss = -sum(math.log(entry[label]) for entry, label in zip(chances, labels)) / len(paths)
    right = sum(max(entry, key=entry.__getitem__) == label for entry, label in zip(chances, labels))
    code, output = launch(["-m", "largebatch.validate", str(run)], ranks=1)
    found = re.search(r"top-1 ([\d.]+) %.*loss ([\d.]+) ", output)
    assert code == 0 and found, output
    assert found.group(2) == f"{loss:.4f}" and found.group(1) == f"{100 * right / len(paths):.2f}"


def test_predictions_are_those_of_timm_and_pil(run, images, capfd):
    """PIL's resize and torch's for bytes round differently by a level or two of 255."""
    model = timm.create_model(f"local-dir:{newest(run)}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    paths = held_out(images)
    assert predict([str(run), *paths, "--json"]) == 0
    for line, path in zip(capfd.readouterr().out.splitlines(), paths):
        with torch.inference_mode():
            expected = model(transform(Image.open(path).convert("RGB"))[None]).softmax(dim=1)[0]
        for entry in json.loads(line)["classes"]:
            assert entry["probability"] == pytest.approx(expected[CLASSES.index(entry["name"])].item(), abs=5e-3)


def test_bad_images_are_named_after_the_good_ones(run, images, tmp_path, capfd):
    good, text, cut = held_out(images)[0], tmp_path / "text.jpg", tmp_path / "cut.png"
    endless, fifo = tmp_path / "endless.png", tmp_path / "fifo.jpg"
    Image.open(good).save(endless)
    endless.write_bytes(endless.read_bytes()[:-12])
    os.mkfifo(fifo)
    text.write_text("no image")
    cut.write_bytes(Path(good).read_bytes()[:500])
    (tmp_path / "empty").mkdir()
    others = [tmp_path / "empty", "nothing.png", endless, fifo, "/dev/zero"]
    assert predict([str(run), *map(str, (text, good, cut, *others)), "--top", "2", "--ema"]) == 2
    out, err = capfd.readouterr()
    name, *shares = out.splitlines()
    assert name == good and len(shares) == 2 and all(re.fullmatch(r" +[\d.]+ %  (blue|green|red)", s) for s in shares)
    messages = [line for line in err.splitlines() if line.startswith("largebatch: ")]
    for path, message in zip((text, cut, *others), messages, strict=True):
        assert message.startswith(f"largebatch: {path} is left out: ")
    assert "it is a folder without images" in messages[2] and "there is no such file" in messages[3]
    assert "DALI, which decodes in training, cannot" in messages[4]
    assert all("it is a FIFO, a socket or a device" in message for message in messages[5:])


def test_a_folder_stands_for_the_images_in_it_and_a_pipe_is_not_waited_for(run, images, tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe.png")
    assert predict([str(run), str(images / "val"), str(tmp_path / "pipe.png"), "--json"]) == 2
    out, err = capfd.readouterr()
    assert [json.loads(line)["image"] for line in out.splitlines()] == held_out(images)
    assert f"{tmp_path / 'pipe.png'} is left out: it is a FIFO, a socket or a device" in err


def test_a_folder_has_the_images_that_training_finds(run, images, tmp_path, capfd):
    """Those behind links, and not the hidden copies of a Mac."""
    (first, *_) = held_out(images)
    (tmp_path / "top").mkdir()
    (tmp_path / "top/link").symlink_to(Path(first).parent)
    (tmp_path / "top/._1.png").write_bytes(b"a Mac's")
    assert predict([str(run), str(tmp_path / "top"), "--json"]) == 0
    seen = [json.loads(line)["image"] for line in capfd.readouterr().out.splitlines()]
    assert seen == sorted(str(tmp_path / "top/link" / path.name) for path in Path(first).parent.iterdir())


def test_a_folder_that_leads_to_itself_is_left_out_alone(run, images, tmp_path, capfd):
    (tmp_path / "top").mkdir()
    (tmp_path / "top/up").symlink_to(tmp_path)
    assert predict([str(run), str(tmp_path / "top"), str(images / "val"), "--json"]) == 2
    out, err = capfd.readouterr()
    assert [json.loads(line)["image"] for line in out.splitlines()] == held_out(images)
    assert f"{tmp_path / 'top'} is left out: {tmp_path / 'top/up/top'}" in err, err
    assert "is a link to a folder around it" in err, err


@pytest.mark.parametrize("program", ["predict", "pack", "export", "report"])
def test_help_needs_no_package_that_pip_does_not_install(program):
    missing = ("nvidia", "nvidia.dali", "google_crc32c", "horovod", "mpi4py", "rich")
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({missing})); sys.argv = ['x', '--help']\n"
    code += f"runpy.run_module('largebatch.{program}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: python -m largebatch.{program}"), done.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere"], "nowhere is not known as a weights file"),
        (["{run}", "--top", "0"], "--top is 0: expected 1 or more."),
        (["{images}"], "{images} has no weights: expected model.safetensors, or the checkpoints of a run with it"),
    ],
)
def test_mistakes_are_one_sentence(run, images, capsys, words, message):
    words = [word.format(run=run, images=images) for word in words]
    assert predict([words[0], *held_out(images), *words[1:]]) == 2
    assert capsys.readouterr().err.startswith(f"largebatch: {message.format(images=images)}")


def test_classes_without_names_have_numbers(images, tmp_path, capfd):
    torch.manual_seed(0)
    save_weights(create_model("vit_nano32", img_size=64, num_classes=12), tmp_path / "bare.pt")
    assert predict([str(tmp_path / "bare.pt"), held_out(images)[0]]) == 0
    assert len(re.findall(r"(?m)^ +\d+\.\d\d %  class \d+$", capfd.readouterr().out)) == 5


BAD = "\x1b]0;title\x07\x1b[2J{}\n12:00:00 | [forged](x)"


@pytest.fixture(scope="module")
def hostile(run, images, tmp_path_factory) -> Path:
    """The model of the run with names of classes that command a terminal, and images of the same names."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hub").mkdir()
    shutil.copy(newest(run) / "model.safetensors", folder / "hub")
    content = json.loads((newest(run) / "config.json").read_text())
    names = [BAD.format(k) for k in range(3)]
    (folder / "hub" / "config.json").write_text(json.dumps(content | {"label_names": names}))
    for name, known in zip(names, CLASSES):
        shutil.copytree(images / "val" / known, folder / "data" / "val" / (name + "?"))
    shutil.copy(held_out(images)[0], folder / (BAD.format(9) + ".png"))
    (folder / (BAD.format(8) + ".jpg")).write_text("no image")
    return folder


def test_names_of_others_do_not_command_the_terminal(hostile, capfd):
    bad = [str(path) for path in hostile.iterdir() if path.is_file()]
    assert predict([str(hostile / "hub"), *bad]) == 2
    out, err = capfd.readouterr()
    assert export([str(hostile / "hub"), str(hostile / "exported")]) == 0
    options = ["--model", "vit_nano32", "--init-from", str(hostile / "hub"), "--data", str(hostile / "data")]
    size = json.loads((hostile / "hub" / "config.json").read_text())["model_args"]["img_size"]
    code, output = launch(["-m", "largebatch.validate", *options, "--img-size", str(size)], ranks=1)
    assert code == 2 and "has classes that the model does not know: \\x1b]0;title\\x07" in output
    known, *unknown = sorted((hostile / "data" / "val").iterdir())
    shutil.copytree(known, hostile / "data" / "train" / known.name)
    shutil.copytree(known, hostile / "data" / "train" / "another")
    code, refused = launch(["-m", "largebatch.train", *options, "--run.folder", str(hostile / "run")], ranks=1)
    assert code == 2 and len(unknown) == 2, refused
    card = (hostile / "exported" / "README.md").read_text()
    for text in (out, err, output, refused, card):
        assert "x1b]0;title" in text.replace("\\", ""), text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text) and "\n12:00:00" not in text
    assert r"\| \[forged\](x)" in card


@pytest.mark.parametrize(
    "key, value", [("num_classes", 10**9), ("model_args", {"img_size": 10**6}), ("label_names", [1])]
)
def test_a_description_of_others_is_checked_by_every_command(hostile, tmp_path, capfd, key, value):
    shutil.copytree(hostile / "hub", tmp_path / "hub")
    content = json.loads((tmp_path / "hub" / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(json.dumps(content | {"label_names": None} | {key: value}))
    hub, image = str(tmp_path / "hub"), str(next(hostile.glob("*.png")))
    for command, words in ((predict, [hub, image]), (export, [hub, str(tmp_path / "out")])):
        assert command(words) == 2
        err = capfd.readouterr().err
        assert err.startswith(f"largebatch: {hub}/config.json ") and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


# -- export ------------------------------------------------------------------------------------------------------


def test_an_exported_folder_is_the_model_with_a_card(run, tmp_path, capsys):
    folder = tmp_path / "hub"
    assert export([str(run), str(folder), "--license", "cc-by-4.0"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert f"hf upload OWNER/NAME {folder}" in capsys.readouterr().out
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert all(torch.equal(value, weights(run)[name]) for name, value in theirs.state_dict().items())
    assert json.loads((folder / "config.json").read_text()) == json.loads((newest(run) / "config.json").read_text())
    card = (folder / "README.md").read_text()
    last = rows(run, "epochs.csv")[-1]
    for text in (
        "license: cc-by-4.0",
        "# colours",
        f"| accuracy | top-1 {float(last['top1']):.2f} %, top-5 {float(last['top5']):.2f} % of the held-out images, "
        f"at step {last['step']} |",
        "| recipe | quickstart |",
        "| classes | blue, green, red |",
        "| images | centre crop 0.75, bilinear, mean (0.4, 0.5, 0.6), std (0.2, 0.25, 0.3) |",
    ):
        assert text in card, text
    assert str(tmp_path) not in card  # nobody else has this path


def test_the_program_of_the_card_runs(run, images, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "hub"
    assert export([str(run), str(folder)]) == 0
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    Image.open(held_out(images)[0]).save(tmp_path / "image.jpg")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(compile(program, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[1] for line in lines) == CLASSES and all("%" in line for line in lines)


def test_an_average_is_exported_as_the_model(run, tmp_path):
    assert export([str(run), str(tmp_path / "hub"), "--ema"]) == 0
    found = load_file(tmp_path / "hub" / "model.safetensors")
    average = weights(run, "model_ema")
    assert all(torch.equal(found[name], average[name]) for name in average) and found.keys() == average.keys()
    assert f"top-1 {float(rows(run, 'epochs.csv')[-1]['ema_top1']):.2f} %" in (tmp_path / "hub/README.md").read_text()


def test_an_exported_folder_is_exported_again_and_trained_from(run, tmp_path):
    assert export([str(run), str(tmp_path / "one")]) == 0
    assert export([str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert checkpoint.find_weights(tmp_path / "two") == [tmp_path / "two" / "model.safetensors"]
    shutil.copytree(newest(run), tmp_path / "copied")
    file = tmp_path / "copied" / "model.safetensors"
    assert checkpoint.find_weights(tmp_path / "copied") == [file]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file} has changed since it was written: restore it, or give another"):
        checkpoint.find_weights(tmp_path / "copied")


def test_nothing_is_overwritten(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "model.pt2").touch()
    for target in ("full", "model.pt2"):
        assert export([str(run), str(tmp_path / target)]) == 2
        assert f"{tmp_path / target} already exists: give the name of a new folder" in capsys.readouterr().err
    assert export([str(tmp_path), str(tmp_path / "new")]) == 2 and not (tmp_path / "new").exists()
