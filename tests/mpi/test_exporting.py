"""From the images of a folder to a model that anybody can use: train, then look at what the run leaves for others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from launch import launch
from PIL import Image
from runs import SMALL, weights

from zoo import create_model

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
