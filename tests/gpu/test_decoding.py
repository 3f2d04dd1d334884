"""DALI decodes photographs on a GPU as on a CPU, through our loaders.

No GPU has run this (2026-11-26). nvJPEG rounds in other places than libjpeg, and the JPEG unit may enlarge colours
otherwise; so the bounds, in units of 1/255, are wider than those of test_dali.py, and a guess.
"""

import csv
from pathlib import Path

import pytest
import sklearn
import torch

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
from test_dali import difference, eval_loader, train_loader  # noqa: E402  # imports DALI

from largebatch.benchmark.__main__ import main  # noqa: E402
from largebatch.data import dali  # noqa: E402
from largebatch.data.order import Plan  # noqa: E402
from largebatch.data.scan import index_images  # noqa: E402

PHOTOGRAPHS = [str(Path(sklearn.__file__).parent / "datasets/images" / name) for name in ("china.jpg", "flower.jpg")]
CPU = torch.device("cpu")
MEAN_BOUND, MAX_BOUND = 1.5, 48.0
LOADERS = {
    "training": lambda index, device: train_loader(
        index, Plan(len(index), 4, 4, 24, seed=1), img_size=224, device=device
    ),
    "evaluation": lambda index, device: eval_loader(index, img_size=224, device=device),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_images_of_a_gpu_are_those_of_a_cpu(device, kind, monkeypatch):
    """On a CPU, DALI resizes and normalises as on a GPU."""
    index = index_images(2 * PHOTOGRAPHS, [0, 1, 0, 1], class_names=["china", "flower"])
    expected = [*LOADERS[kind](index, CPU)]
    monkeypatch.setattr(dali, "_finishes_on_cpu", lambda device: False)
    found = [*LOADERS[kind](index, device)]
    assert len(found) == len(expected) == (6 if kind == "training" else 1)
    for one, other in zip(found, expected):
        assert one.images.device.type == device.type and one.labels.tolist() == other.labels.tolist()
        delta = difference(one.images.cpu(), other.images)
        assert delta.mean(dim=1).max() < MEAN_BOUND and delta.max() < MAX_BOUND, (delta.mean(dim=1), delta.max())


def test_the_benchmark_has_the_loader_of_cpus_beside_that_of_a_gpu(device, tmp_path):
    options = "--data digits --img-size 32 --batch-size 4 --images 8 --num-threads 1 --threads 1 --rounds 1 --vs none"
    main(["loader", *options.split(), "--device", device.type, "--output", str(tmp_path)])
    rows = [*csv.DictReader((tmp_path / "loader.csv").read_text().splitlines())]
    names = ["largebatch", "largebatch, 5 ms late"] + ["largebatch, on CPUs"] * (device.type == "cuda")
    assert [row["contender"] for row in rows] == names and all(row["images"] == "8" for row in rows)
