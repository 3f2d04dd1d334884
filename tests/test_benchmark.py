"""The instrument against contenders of known behaviour, and each benchmark once, on a tiny model."""

import csv
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from largebatch.benchmark import measure
from largebatch.benchmark.__main__ import main
from largebatch.benchmark.measure import Contender, Report, Result, compare
from largebatch.benchmark.model import mfu, training_flops

CPU = torch.device("cpu")


ABSENT = "horovod mpi4py nvidia.dali jsonargparse google_crc32c crc32c rich tensorboard sklearn".split()
HIDE = f"""
import importlib.machinery, sys
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = any(name == absent or name.startswith(absent + ".") for absent in {ABSENT!r})
        return None if hidden else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
"""


def run_benchmarks(*command_lines: list[str]) -> str:
    """What `python -m largebatch.benchmark` prints for each, without the packages that are ABSENT."""
    program = (
        f"{HIDE}from largebatch.benchmark.__main__ import main\n"
        f"for arguments in {list(command_lines)!r}: main(arguments)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_contenders_alternate_and_the_order_turns_round():
    calls = []

    def contender(name):
        @contextmanager
        def opened():
            calls.append(f"open {name}")
            yield lambda: calls.append(name)
            calls.append(f"close {name}")

        return Contender(name, opened)

    results = compare([contender("a"), contender("b")], device=CPU, rounds=3, warmup=1, quiet=True)
    first = ["open a", "a", "a", "close a"]  # what it finds in memory afterwards belongs to libraries
    alone = ["open a", "a", "a", "close a", "open b", "b", "b", "close b"]
    together = ["open a", "open b", "a", "b", "b", "a", "a", "b", "b", "a", "close b", "close a"]
    assert calls == first + alone + together
    assert [result.name for result in results] == ["a", "b"]
    assert all(len(result.seconds) == 3 for result in results)  # the warm-up is not among them


def test_memory_is_what_each_adds():
    """Also when the one before it has freed more."""

    def contender(mib):
        @contextmanager
        def opened():
            kept = torch.ones(mib * 2**18)
            yield lambda: kept.add_(1)

        return Contender(str(mib), opened)

    results = compare([contender(300), contender(64), contender(128)], device=CPU, rounds=1, quiet=True)
    for result in results:
        assert int(result.name) <= result.peak_bytes / 2**20 < int(result.name) + 32


def test_ratios_are_taken_round_by_round(tmp_path, capsys):
    """A machine that was slow for one round changes no ratio."""
    ours, theirs = Result("ours", 100 * 2**20, [1.0, 10.0, 1.0]), Result("theirs", 200 * 2**20, [2.0, 20.0, 3.0])
    report = Report("speed", "a title", [ours, theirs], CPU, images=8, notes=["a note"])
    assert report.ratios(theirs) == [2.0, 2.0, 3.0]
    report.write(tmp_path)
    printed = capsys.readouterr().out
    assert "ours takes 0.500 × the time of theirs (2.00 × its speed) and 0.50 × its memory" in printed
    assert "a title" in printed and "a note" in printed and f"torch {torch.__version__}" in printed
    with open(tmp_path / "speed.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["contender"], float(row["seconds"])) for row in rows] == [
        *(("ours", seconds) for seconds in ours.seconds),
        *(("theirs", seconds) for seconds in theirs.seconds),
    ]
    assert rows[0]["versions"] == measure.versions() and rows[0]["peak_mib"] == "100"
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model, gflops", [("vit_b32", 26.46), ("vit_b16", 105.38), ("vit_l32", 92.27)])
def test_flops_are_those_of_the_published_runs(model, gflops):
    """6 x MACs per image, as the utilisation of the published runs is computed."""
    assert training_flops(model, 224) == pytest.approx(gflops * 1e9, rel=0.002)
    assert mfu(1831, training_flops("vit_b32", 224), 312e12).startswith("48439 GFLOP/s per rank, MFU 15.5 %")


def test_optimizer_and_model_need_hardly_more_than_torch_and_timm(tmp_path):
    common = ["--model", "vit_ti16", "--rounds", "1", "--threads", "1", "--output", str(tmp_path)]
    small = ["--img-size", "32", "--batch-size", "2", "--precision", "fp32"]
    optimizer, model = run_benchmarks(["optimizer", *common], ["model", *common, *small]).split("vit_ti16 at 32 px")
    assert "largebatch takes" in optimizer and "timm Lamb" in optimizer and "torch AdamW" in optimizer
    assert "largebatch takes" in model and "MFU" in model
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.csv",
        "model.png",
        "optimizer.csv",
        "optimizer.png",
    ]


@pytest.mark.parametrize(
    "command_line, sentence",
    [
        ("speed", "The first argument is one of optimizer, loader, model, step, parallel, scaling."),
        ("optimizer --vs apex --model vit_ti16", "NVIDIA's apex is not installed"),
        ("model --model vit_x", "there is no model 'vit_x'"),
    ],
)
def test_mistakes_are_one_sentence(command_line, sentence):
    with pytest.raises(SystemExit, match=sentence):
        main([*command_line.split(), f"--threads={torch.get_num_threads()}"])
