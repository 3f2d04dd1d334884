"""`python -m largebatch.benchmark loader`, on a few small images."""

import csv
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from largebatch.benchmark import loader
from largebatch.benchmark.__main__ import main
from largebatch.data.sources import open_source

COMMAND = """
import sys
from largebatch.benchmark.__main__ import main
main(sys.argv[1:])
assert "largebatch.data.dali" in sys.modules
assert not [name for name in sys.modules if name.partition(".")[0] in ("horovod", "mpi4py")]
"""
SMALL = ["--img-size=32", "--batch-size=4", "--num-threads=1", "--images=16", "--rounds=2"]


@pytest.fixture
def images(tmp_path):
    """Ten images of two classes as files, and a cache of our own."""
    rng = np.random.default_rng(0)
    for k in range(10):
        path = tmp_path / "data" / "train" / "ab"[k % 2] / f"{k}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 50 + k, 3), dtype=np.uint8)).save(path)
    return tmp_path / "data"


def arguments(images, *options):
    output = f"--output={images.parent / 'out'}"
    return ["loader", f"--data={images}", "--device=cpu", output, *SMALL, *options]


def test_ours_and_timms_are_measured_and_horovod_stays_out(images):
    command = [sys.executable, "-c", COMMAND, *arguments(images, "--vs=timm", "--auto-augment=rand-m9-mstd0.5-inc1")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(images.parent / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "1 threads, rand-m9-mstd0.5-inc1" in done.stdout
    for words in ("of its own rate", "img/s per core", "use_prefetcher"):
        assert words in done.stdout
    with open(images.parent / "out" / "loader.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for row in rows for name in row.values() if name in ("largebatch", "largebatch, 5 ms late", "timm")]
    assert [names.count(name) for name in ("largebatch", "largebatch, 5 ms late", "timm")] == [2, 2, 2]
    assert (images.parent / "out" / "loader.png").read_bytes().startswith(b"\x89PNG")
    copies = list((images.parent / "cache" / "largebatch").glob("benchmark-*/*/*.JPEG"))
    assert sorted(path.read_bytes() for path in copies) == sorted(path.read_bytes() for path in images.rglob("*.JPEG"))


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--vs=none", "--batch-size=11"], "--batch-size is 11, expected 1 to 10"),
        (["--auto-augment=cifar10"], "--auto-augment is cifar10, a policy that timm does not have: add --vs none."),
        (["--auto-augment=tf-m9"], "--auto-augment is tf-m9, a policy that timm does not have: add --vs none."),
    ],
)
def test_wrong_options_end_with_a_sentence(images, monkeypatch, capsys, options, sentence):
    monkeypatch.setenv("XDG_CACHE_HOME", str(images.parent / "cache"))
    with pytest.raises(SystemExit, match="^2$"):
        main(arguments(images, *options, f"--threads={torch.get_num_threads()}"))
    assert sentence in capsys.readouterr().err


def test_some_images_are_from_all_over_the_data():
    index = open_source("digits", split="train")
    few, all_of_them = loader.some(index, 10), loader.some(index, 10**6)
    assert len(few) == 10 and len(all_of_them) == len(index)
    for column in ("file", "offset", "label"):
        assert getattr(few, column)[[0, -1]].tolist() == getattr(index, column)[[0, -1]].tolist()


def test_the_late_read_gives_the_same_bytes(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    buffer = bytearray(4)
    with open(tmp_path / "file", "rb") as file:
        assert loader.late_preadv(file.fileno(), [buffer], 3) == 4
    assert buffer == b"3456"
