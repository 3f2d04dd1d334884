"""Own images in two commands, and models of timm: nothing is given but the folder and the model."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import launch
from PIL import Image
from runs import different, distance, rows, weights
from test_idx import names, write

TRAIN = ["-m", "largebatch.train"]
SMALL = ["--log.to", "none", "--run.precision", "fp32", "--run.deterministic", "true"]
IMAGES = {"train": 24, "val": 6}  # of each of three classes


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Three classes, each with a colour of its own under noise."""
    folder, noise = tmp_path_factory.mktemp("own") / "images", np.random.default_rng(0)
    for split, count in IMAGES.items():
        for channel, name in enumerate(("ant", "bee", "cat")):
            (folder / split / name).mkdir(parents=True)
            for k in range(count):
                pixels = noise.integers(0, 100, (40, 50, 3), dtype=np.uint8)
                pixels[..., channel] += 150
                Image.fromarray(pixels).save(folder / split / name / f"{k}.jpg")
    return folder


def train(*options: str, ranks: int = 1, steps: int) -> str:
    """The output of a run that stops after so many steps."""
    launcher = "python" if ranks == 1 else "mpirun"
    arguments = [*TRAIN, *SMALL, *options, "--run.max_steps", str(steps)]
    code, output = launch(arguments, ranks=ranks, launcher=launcher)
    assert code == 0, output
    return output


def test_two_commands_train_and_one_each_resumes_validates_and_fine_tunes(tmp_path, images):
    pack = ["-m", "largebatch.pack", str(images), str(tmp_path / "records")]
    code, output = launch(pack, ranks=1, launcher="python")
    assert code == 0, output
    run = tmp_path / "run"
    command = ["--model", "vit_nano32", "--data", str(tmp_path / "records"), "--run.folder", str(run)]
    output = train(*command, "--img-size", "64", ranks=2, steps=2)
    assert "72 training images of 3 classes: recipe scratch, 64 px, global batch 64 in micro-batches of 16" in output
    config = (run / "config.yaml").read_text()
    assert "num_classes: 3" in config and "recipe: scratch" in config
    output = train(*command, "--img-size", "64", "--run.eval_every", "3 steps", steps=3)
    assert "resumed at step 2" in output and rows(run, "epochs.csv")[-1]["step"] == "3"
    code, output = launch(["-m", "largebatch.validate", str(run)], ranks=1, launcher="python")
    assert code == 0 and "images 18 " in output, output
    tuned = ["--init-from", str(run), "--data", str(images), "--recipe", "finetune", "--img-size", "96"]
    output = train(*tuned, "--run.folder", str(tmp_path / "tuned"), ranks=2, steps=1)
    assert "recipe finetune, 96 px, global batch 64 in micro-batches of 16" in output
    assert "position embedding resized from 2 x 2 to 3 x 3" in output and "left out" not in output
    assert re.search(r"(\d+) of the model's (\d+) tensors are as in this file, not pos_embed$", output, re.MULTILINE)


def test_idx_files_train_validate_and_a_damaged_one_ends_all_ranks(tmp_path):
    write(tmp_path / "mnist", sides=(28, 28))
    run, batch = str(tmp_path / "run"), ["--data.global_batch_size", "20", "--data.micro_batch_size", "5"]
    command = ["--model", "vit_nano32", "--img-size", "32", "--data", str(tmp_path / "mnist"), *batch, "--run.folder"]
    assert "20 training images of 10 classes" in train(*command, run, ranks=2, steps=1)
    code, output = launch(["-m", "largebatch.validate", run], ranks=2)
    assert code == 0 and "images 7 " in output, output
    labels = tmp_path / "mnist" / f"{names('validation')[1]}.gz"
    labels.write_bytes(labels.read_bytes()[:-1])
    code, output = launch([*TRAIN, *SMALL, *command, str(tmp_path / "other")], ranks=2)
    assert code != 0 and f"{labels} is no whole IDX file of labels, copy it again: " in output, output
    assert "Traceback" not in output and not (tmp_path / "other").exists()


OWN = """
from dataclasses import dataclass

from timm.models import register_model
from torch import nn

from largebatch.recipes.sized import scratch


@dataclass
class Sizes:
    width: int = 8


@register_model
def own_tiny(pretrained=False, num_classes=10, **options):
    width = Sizes().width
    return nn.Sequential(nn.Conv2d(3, width, 32, 32), nn.ReLU(), nn.Flatten(), nn.Linear(width, num_classes))


def mine():
    return scratch("timm/own_tiny")
"""


def test_a_model_of_ones_own_is_trained_validated_and_used(tmp_path, images):
    (tmp_path / "my.py").write_text(OWN)
    own, run = f"{tmp_path / 'my.py'}:mine", str(tmp_path / "run")
    batch = ["--data.global_batch_size", "24", "--data.micro_batch_size", "6", "--img-size", "32", "--run.folder", run]
    train("--recipe", own, "--data", str(images), *batch, ranks=2, steps=1)
    image = str(next(images.glob("val/ant/*")))
    for words, expected in (
        (["-m", "largebatch.validate", run, "--recipe", own], "images 18 "),
        (["-m", "largebatch.predict", run, image, "--recipe", own], "ant"),
        (["-m", "largebatch.export", run, str(tmp_path / "hub"), "--recipe", own], "model.safetensors"),
    ):
        code, output = launch(words, ranks=1, launcher="python")
        assert code == 0 and expected in output, output
    code, output = launch(["-m", "largebatch.predict", run, image], ranks=1, launcher="python")
    assert code == 2 and "belongs to the model own_tiny, which timm does not have: run the file that" in output


def renamed(images: Path, folder: Path, names: dict[str, str]) -> Path:
    """The same images, in classes of other names."""
    for split in IMAGES:
        for old, new in names.items():
            (folder / split).mkdir(parents=True, exist_ok=True)
            (folder / split / new).symlink_to(images / split / old)
    return folder


def test_classes_are_known_by_their_names(tmp_path, images):
    """Learned as ant, bee, cat; then validated, resumed and tuned on folders that sort or name them otherwise."""
    run, learn = tmp_path / "run", ["--optim.lr", "0.01", "--augment.mixup_alpha", "0", "--augment.cutmix_alpha", "0"]
    command = ["--model", "vit_nano32", "--img-size", "32", "--run.folder", str(run), *learn]
    train(*command, "--data", str(images), steps=60)
    other = renamed(images, tmp_path / "other", {"ant": "ant", "bee": "asp", "cat": "cow"})
    part = renamed(images, tmp_path / "part", {"bee": "bee", "cat": "cat"})
    for data, expected in ((images, "images 18 "), (part, "images 12 ")):
        code, output = launch(["-m", "largebatch.validate", str(run), "--data", str(data)], ranks=2)
        assert code == 0 and expected in output and float(re.search(r"top-1 ([\d.]+) %", output)[1]) > 90, output
    unknown = "has classes that the model does not know: asp, cow; the model has ant, bee, cat. Leave"
    code, output = launch(["-m", "largebatch.validate", str(run), "--data", str(other)], ranks=2)
    assert code != 0 and f"other/val {unknown}" in output
    code, output = launch([*TRAIN, *SMALL, *command, "--data", str(other)], ranks=2)
    assert code != 0 and f"other/train {unknown}" in output
    tuned = ["--init-from", str(run), "--recipe", "finetune", "--img-size", "32", "--run.folder"]
    output = train(*tuned, str(tmp_path / "tuned"), "--data", str(other), steps=1)
    assert "head of 3 classes, whose names are others, left out, one of 3 classes initialised anew" in output
    output = train(*tuned, str(tmp_path / "same"), "--data", str(images), steps=1)
    assert "left out" not in output and re.search(r"(\d+) of the model's \1 tensors are as in this file$", output, re.M)


def test_a_script_trains_the_same_as_the_command_line(tmp_path, images):
    """examples/hook.py takes the same arguments: of a recipe whose batch and length follow from the images."""
    command = ["--model", "vit_nano32", "--img-size", "64", "--data", str(images), *SMALL, "--run.max_steps", "1"]
    script = str(Path(__file__).parents[2] / "examples" / "hook.py")
    for name, program in (("command", TRAIN), ("script", [script])):
        code, output = launch([*program, *command, "--run.folder", str(tmp_path / name)], ranks=2)
        assert code == 0 and "72 training images of 3 classes: recipe scratch, " in output, output
    places = [tmp_path / name for name in ("command", "script")]
    configs = [(place / "config.yaml").read_text().replace(str(place), "RUN") for place in places]
    assert configs[0] == configs[1]
    assert different(*map(weights, places)) == []


def test_a_model_of_timm_with_batch_norm_on_one_and_two_ranks(tmp_path, images):
    """Without held-out images. The statistics of batch norm, too, are those of one rank."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").symlink_to(images / "train")
    batch = ["--data.global_batch_size", "24", "--data.micro_batch_size", "6", "--run.eval_every", "never"]
    command = ["--model", "timm/test_resnet", "--img-size", "64", "--data", str(tmp_path / "data"), *batch]
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        output = train(*command, "--run.folder", str(folder), ranks=ranks, steps=3)
        assert "no evaluations: --run.eval_every is never" in output and not rows(folder, "epochs.csv")
        found.append({name: tensor for name, tensor in weights(folder).items() if tensor.is_floating_point()})
    assert distance(*found) < 1e-4
    statistics = [tensor for name, tensor in found[0].items() if name.endswith("running_mean")]
    assert statistics and not any(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in statistics)
    evaluated = ["--run.folder", str(folder), "--run.eval_every", "4 steps", "--data", str(images)]
    output = train(*command, *evaluated, steps=4)
    assert "resumed at step 3" in output and re.search(r"top-1 [\d.]+ %", output)
    code, output = launch(["-m", "largebatch.validate", str(folder), "--data", str(images)], ranks=2)
    assert code == 0 and "images 18 " in output, output
