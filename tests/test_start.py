"""Mistakes in a command line, before there are ranks; and the packages that a rank does not load at its start."""

import gc
import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from largebatch import start, train, validate
from largebatch.config import Answer, RunConfig, TrainConfig
from largebatch.config.parallel import ParallelConfig
from largebatch.ranks import Stopped, mistakes


def said(monkeypatch, capsys, **environment: str) -> tuple[str, list[float]]:
    """The sentence of a process with these variables, and how long it waited before."""
    waits: list[float] = []
    monkeypatch.setattr(mistakes.os, "environ", environment)
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(SystemExit) as end, mistakes.report_mistakes():
        raise ValueError("There is no option x.")
    assert end.value.code == 2
    return capsys.readouterr().err, waits


def test_a_mistake_is_said_by_rank_0_and_later_by_a_rank_that_still_runs(monkeypatch, capsys):
    alone = said(monkeypatch, capsys)
    first = said(monkeypatch, capsys, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="3")
    assert alone == first == ("largebatch: There is no option x.\n", [])
    second = said(monkeypatch, capsys, OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="3")
    assert second == ("largebatch: rank 1 of 3, command line: There is no option x.\n", [mistakes.WAIT_S])


def test_a_text_is_printed_by_one_rank(monkeypatch, capsys):
    for rank, printed in (("0", "the text\n"), ("1", "")):
        monkeypatch.setattr(mistakes.os, "environ", {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "3"})
        with pytest.raises(SystemExit) as end, mistakes.report_mistakes():
            raise Answer("the text")
        assert (end.value.code, capsys.readouterr().out) == (0, printed)


def test_a_mistake_of_a_rank_that_two_launchers_claim(monkeypatch, capsys):
    mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
    sentence, waits = said(monkeypatch, capsys, **mpirun, RANK="2", WORLD_SIZE="4")
    assert "claims to have started this process" in sentence and not waits


def test_python_searches_no_garbage_while_a_run_begins(monkeypatch):
    """Nor while a validation begins; after it as before."""
    searched: list[bool] = []

    def begin(config) -> None:
        searched.append(gc.isenabled())
        raise Stopped("seen")

    monkeypatch.setattr("largebatch.ranks.sessions.session", begin)
    for command, argv in ((train, []), (validate, ["--model", "vit_nano32", "--init-from", "a"])):
        with pytest.raises(Stopped, match="seen"):
            command.main(argv)
    assert searched == [False, False] and gc.isenabled()


def test_a_rank_does_not_load_what_only_rank_0_needs_or_nobody():
    """Hundreds of ranks would read thousands of files at once, from a file system that all hosts share."""
    root = Path(start.__file__).parents[1]
    modules = "train, largebatch.validate, largebatch.assembly, largebatch.data.dali, horovod.torch"
    loaded = f"import sys, largebatch.{modules}; print(*sys.modules)"
    command, environment = [sys.executable, "-c", loaded], os.environ | {"PYTHONPATH": str(root)}
    output = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=True, timeout=120).stdout
    packages = {name.partition(".")[0] for name in output.decode().split()}
    assert {"torch", "horovod", "timm", "nvidia"} <= packages
    hidden = {"matplotlib", "tensorboard", "sklearn", "scipy", "mpi4py"}  # torch for CUDA itself imports Triton
    assert not packages & hidden


def test_bits_are_compared_only_where_sums_come_in_one_order():
    """A GPU adds up in any order, unless it is told not to."""
    for device, deterministic, refused in (("cpu", False, False), ("cuda", True, False), ("cuda", False, True)):
        run = RunConfig(recompute="500 steps", deterministic=deterministic, precision="fp32")
        with pytest.raises(ValueError, match="set --run.deterministic true as well") if refused else nullcontext():
            start.resolve(TrainConfig(run=run), torch.device(device))


def test_a_precision_that_the_device_chooses_is_checked(monkeypatch):
    """A GPU without bf16 computes in fp16, which ranks that share a model cannot."""
    monkeypatch.setattr(start, "choose_precision", lambda device: "fp16")
    config = TrainConfig(run=RunConfig(precision="auto"))
    assert start.resolve(config, torch.device("cuda")).run.precision == "fp16"
    shared = replace(config, parallel=ParallelConfig(pipeline=2, micro_batches=2))
    with pytest.raises(ValueError, match="--run.precision is fp16 and --parallel pipeline 2: .*choose bf16 or fp32"):
        start.resolve(shared, torch.device("cuda"))


def test_the_benchmarks_are_listed():
    asked = subprocess.run([sys.executable, "-m", "largebatch.benchmark", "--help"], capture_output=True, text=True)
    assert asked.returncode == 0 and "python -m largebatch.benchmark optimizer" in asked.stdout


@pytest.mark.parametrize("removed", [False, True])
def test_a_run_that_is_refused_leaves_no_folder(tmp_path, monkeypatch, removed):
    """Its reason is told, also if it is that somebody has removed the folder."""
    monkeypatch.setattr(train, "start_log", lambda config, comm, to_file: None)
    comm = SimpleNamespace(rank=0, together=lambda phase: nullcontext())
    config = TrainConfig(run=RunConfig(folder=str(tmp_path / "run")))
    with pytest.raises(Stopped, match="the reason"), train.run_folder(config, comm):
        assert (tmp_path / "run").is_dir()
        if removed:
            shutil.rmtree(tmp_path / "run")
        raise Stopped("the reason")
    assert not (tmp_path / "run").exists()


def test_a_script_whose_session_does_not_fit_its_config_is_refused():
    """Its ranks would be divided otherwise than its model."""
    config = train.read(["--model", "vit_nano32", "--parallel.pipeline", "2"])
    with pytest.raises(Stopped, match="has 1 ranks, and a config in which it has 2: start the session with the config"):
        train.build_trainer(config, SimpleNamespace(model_size=1))
