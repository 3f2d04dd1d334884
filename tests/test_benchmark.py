"""The instrument against contenders of known behaviour, and each benchmark once, on a tiny model."""

import csv
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from events import note_events
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from largebatch.assembly import build_objective
from largebatch.benchmark import measure, model
from largebatch.benchmark.__main__ import main
from largebatch.benchmark.ceiling import Ceiling, mfu
from largebatch.benchmark.measure import Contender, Report, Result, compare
from largebatch.benchmark.model import config_of, training_flops
from zoo import create_model, set_fused_attn

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]


ABSENT = "horovod mpi4py nvidia.dali google_crc32c crc32c rich tensorboard sklearn".split()
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
    text = mfu(1831, training_flops("vit_b32", 224), Ceiling(312e12))
    assert text == "48439 GFLOP/s per rank, MFU 15.5 % of the 312000 GFLOP/s of a matrix product"


def test_utilisation_is_of_the_datasheet_and_of_a_product():
    text = mfu(100.0, 3e12, Ceiling(product=800e12, datasheet=1000e12), executed=2e12)
    assert text == (
        "300000 GFLOP/s per rank, MFU 30.0 % of the 1000000 GFLOP/s of the datasheet, 37.5 % of the 800000 GFLOP/s of "
        "a matrix product; executed, without the layers that stochastic depth skips: 200000 GFLOP/s, 20.0 % of the "
        "1000000 GFLOP/s of the datasheet, 25.0 % of the 800000 GFLOP/s of a matrix product"
    )


def test_a_gpu_is_timed_by_its_own_clock(monkeypatch):
    """The clock of the host would count the time to enqueue the work, or that until somebody waits for it."""
    calls = note_events(monkeypatch, milliseconds=250.0)
    span = measure.Span(torch.device("cuda"))
    calls.append("work")
    span.end()
    assert calls == ["record", "work", "record"]
    assert span.seconds() == 0.25 and calls[3:] == ["wait for the end"]


def test_executed_flops_are_those_that_are_left_on_average():
    """The reference draws: a forward pass of 1,000 images in training, without their values."""
    name, images = "volo_d5", 1000
    rate = config_of(name, 224).model.drop_path_rate
    torch.manual_seed(0)
    with torch.device("meta"):
        module = set_fused_attn(create_model(name, drop_path_rate=rate), False).train()
        batch = torch.empty(images, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        module(batch)
    drawn = 3 * counter.get_total_flops() / images
    assert training_flops(name, 224, drop_path_rate=rate) == pytest.approx(drawn, rel=0.005)
    assert drawn < 0.7 * training_flops(name, 224)


def test_a_model_is_measured_as_its_recipe_trains_it():
    """Ours and timm's alike: dropout of the ViTs, stochastic depth, mix-token and the loss of the tokens."""

    def rates(module):
        return sorted({layer.p for layer in module.modules() if isinstance(layer, nn.Dropout)})

    with torch.device("meta"):
        for plain, expected in ((False, [0.0, 0.1]), (True, [0.0])):
            config = config_of("vit_b32", 224, plain=plain)
            assert rates(model.ours(config, CPU, variant="eager", grad_checkpointing=False)) == expected
            assert rates(model.timms(config)) == expected
    config = config_of("volo_d1", 32)
    assert config.model.drop_path_rate == 0.1 == config_of("volo_d1", 32, plain=True).model.drop_path_rate
    batch, draw_box = model.training_batch(config, 2, CPU), model.box_of(config)
    assert batch.token_targets.shape == (2, 4, 1000) and len({draw_box() for _ in range(9)}) > 1
    for make in (model.timms, lambda config: model.ours(config, CPU, variant="eager", grad_checkpointing=False)):
        module = make(config).train()
        build_objective(config, module)(module, batch._replace(mix_box=(0, 0, 1, 2))).backward()
        assert all(parameter.grad is not None for parameter in module.parameters())  # those of both heads, too
    assert module(batch.images).shape == (2, 1000) and model.box_of(config_of("volo_d1", 32, plain=True))() is None


def test_several_sizes_and_variants_in_one_command(tmp_path, monkeypatch, capsys):
    arguments = "--model vit_nano32 --img-size 32 64 --batch-size 1 2 --variants eager blocks compiled --vs none"
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    monkeypatch.setattr(model, "measure_ceiling", lambda device, precision: Ceiling(1e9))
    arguments += f" --rounds 1 --precision fp32 --threads {torch.get_num_threads()} --output {tmp_path}"
    main(["model", *arguments.split()])
    names = {f"model_vit_nano32_{side}_{batch}" for side in (32, 64) for batch in (1, 2)}
    assert {path.stem for path in tmp_path.iterdir()} == names
    printed = capsys.readouterr().out
    assert printed.count("the time of largebatch, blocks compiled (") == 4
    assert printed.count("the time of largebatch, compiled (") == 4 and "vit_nano32 at 64 px" in printed and compiled


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
        ("optimizer --vs apex --model vit_ti16", "NVIDIA's apex is not installed"),
        ("model --model vit_x", "there is no model 'vit_x'"),
        ("loader --data digits --device cuda", "--device is cuda, and torch sees no GPU: run largebatch.doctor, or"),
        (f"page {ROOT}/zoo", f"FOLDER is {ROOT}/zoo, which has no CSV file: expected one that measure_gpu.sh wrote."),
    ],
)
def test_mistakes_are_one_sentence(command_line, sentence, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="^2$"):
        main([*command_line.split(), *[f"--threads={torch.get_num_threads()}"] * ("page" not in command_line)])
    assert sentence in capsys.readouterr().err


def test_the_page_joins_the_tables_of_a_folder(tmp_path, capsys):
    """Those that were measured on a GPU; and one with images, whose share of the datasheet follows by hand."""
    (tmp_path / "few").mkdir()
    lines = ["contender,seconds,peak_mib,benchmark,images,command,hardware,versions,date,model,img_size,precision"]
    same = "t,512,python -m largebatch.benchmark model --output /x --model vit_b32,NVIDIA H200,torch,d,vit_b32,224,bf16"
    lines += [f"largebatch,{t},90,{same}" for t in (0.02, 0.01, 0.04)]
    lines += [f"timm,{t},100,{same}" for t in (0.03, 0.03, 0.02)]
    (tmp_path / "few" / "model.csv").write_text("\n".join(lines))
    columns = "contender,seconds,peak_mib,reserved_mib,planned_mib,benchmark,images,command,hardware,versions,date"
    (tmp_path / "few" / "step.csv").write_text(f"{columns}\nlargebatch,1,70,80,60,t,0,step,NVIDIA H200,torch,d")
    main(["page", str(tmp_path), "--output", str(tmp_path)])
    page = (tmp_path / "README.md").read_text()
    main(["page", str(ROOT / "docs/h200"), "--output", str(tmp_path / "other")])
    share = 100 * 512 * training_flops("vit_b32", 224) / 0.02 / 989e12
    command = "`python -m largebatch.benchmark model --model vit_b32`"
    assert page.splitlines()[2:5] == [
        f"| {command} | largebatch | 20 ms, 10 to 40; 25,600 img/s | {share:.1f} % |  |  |",
        f"| {command} | timm | 30 ms, 20 to 30; 17,067 img/s | {share / 1.5:.1f} % | 1.50 | 0.90 |",
        "| `step` | largebatch | 1000 ms, 1000 to 1000 |  |  | 70 MiB of 80 reserved; plan: 60 |",
    ]
    assert "| timm Lamb | 24.88 ms, 21.82 to 28.24 |  | 5.46 | 0.97 |" in capsys.readouterr().out


@pytest.mark.evidence
def test_the_script_for_gpus_runs_all_its_parts_on_a_cpu(tmp_path):
    """And begins none again that has passed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_VISIBLE")}
    environment |= {"SMOKE": "1", "OUTPUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    script, runs = ROOT / "mpi_scripts/measure_gpu.sh", []
    for _ in range(2):
        done = subprocess.run([script], text=True, capture_output=True, timeout=1500, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        runs.append(done.stdout)
    parts = subprocess.run([script, "--list"], text=True, capture_output=True, check=True, env=environment)
    names = parts.stdout.split()
    assert len(names) == 15 and all(f"{name}: passed before" in runs[1] for name in names)
    page = (tmp_path / "README.md").read_text()
    assert all(words in page for words in ("timm, compiled", "benchmark loader", " MiB; plan: "))
