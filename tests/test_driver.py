"""NVIDIA's driver, faked: its folder in /proc, or an nvidia-smi. No run may train on CPUs beside GPUs unnoticed."""

import socket

import pytest
import torch

from largebatch.launch import driver
from largebatch.launch.driver import Driver, accept_cpu, find_driver
from largebatch.pack import token_labels
from largebatch.ranks.single import Single

VERSION_LINE = "NVRM version: NVIDIA UNIX {} {}  {}  Sat Aug 19 23:15:15 UTC 2023\nGCC version:  gcc version 12.2.0\n"


def write_driver(folder, version: str, gpus: int = 2, *, is_open: bool = False) -> None:
    kind = ("Open Kernel Module for", "x86_64") if is_open else ("x86_64", "Kernel Module")
    folder.mkdir(exist_ok=True)
    (folder / "version").write_text(VERSION_LINE.format(*kind, version))
    for number in range(gpus):
        (folder / "gpus" / f"0000:{number:02x}:00.0").mkdir(parents=True, exist_ok=True)


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """The driver's folder in /proc, empty; no nvidia-smi, and a host named n1."""
    monkeypatch.setattr(driver, "PROC", tmp_path / "nvidia")
    monkeypatch.setattr(driver.shutil, "which", lambda name: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "nvidia"


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    "version, cuda", [("580.65.06", "13.0"), ("570.86", "12.9"), ("535.104.05", "12.6"), ("470.2", "")]
)
def test_the_driver_and_the_cuda_for_it(proc, version, cuda, is_open):
    write_driver(proc, version, is_open=is_open)
    found = find_driver(proc)
    assert found == Driver(version, 2) and found.cuda == cuda


def test_a_host_without_a_driver(proc):
    assert find_driver(proc) is None
    accept_cpu("auto", torch="2.13.0", cuda="13.0")
    with pytest.raises(ValueError, match="^--run.device is cuda, and n1 has no NVIDIA driver: expected a host with"):
        accept_cpu("cuda", torch="2.13.0", cuda="13.0")


def test_a_driver_that_only_nvidia_smi_knows(proc, tmp_path, monkeypatch):
    """As in WSL."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '560.35.03\\n560.35.03\\n'\n")
    program.chmod(0o755)
    monkeypatch.setattr(driver, "QUERY", [str(program)])
    monkeypatch.setattr(driver.shutil, "which", lambda name: name)
    assert find_driver(proc) == Driver("560.35.03", 2)
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert find_driver(proc) is None
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setattr(driver, "QUERY_LIMIT_S", 0.1)
    assert find_driver(proc) is None


@pytest.mark.parametrize(
    "version, build, sentence",
    [
        (
            "535.104.05",
            "13.0",
            "n1 has 2 GPUs (driver 535.104.05), but torch 2.13.0, for CUDA 13.0, sees none: CUDA 13.0 needs driver 580 "
            "or newer, so install torch for this driver with `CUDA=12.6 mpi_scripts/install.sh`, or set --run.device "
            "cpu.",
        ),
        ("580.65.06", None, "torch 2.13.0, a build without CUDA, sees none: install torch for this driver with `CUDA="),
        ("580.65.06", "12.6", "sees none: give the job or the container its GPUs, or parts of them (Slurm: --gpus-per"),
        ("470.82.01", "12.6", "sees none: update the driver to 525 or newer, or set --run.device cpu."),
    ],
)
def test_a_gpu_that_torch_does_not_see(proc, version, build, sentence):
    write_driver(proc, version)
    for kind in ("auto", "cuda"):
        with pytest.raises(ValueError) as refused:
            accept_cpu(kind, torch="2.13.0", cuda=build)
        assert sentence in str(refused.value)


def test_a_gpu_that_another_process_has_alone(proc, monkeypatch):
    def refuse(*_) -> None:
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("set_device", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    with pytest.raises(ValueError) as refused:
        Single().device()
    assert str(refused.value) == (
        "GPU 0 of n1 takes no process (CUDA error: CUDA-capable device(s) is/are busy or unavailable): another one may "
        "have it for itself alone; nvidia-smi names it."
    )


def test_gpus_that_are_hidden_on_purpose(proc, monkeypatch, caplog):
    write_driver(proc, "580.65.06", gpus=1)
    for value in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        accept_cpu("auto", torch="2.13.0", cuda="13.0")
        found = "n1 has 1 GPU (driver 580.65.06), and CUDA_VISIBLE_DEVICES hides them: the CPU computes."
        assert caplog.messages == [found]
        caplog.clear()
        with pytest.raises(ValueError, match="sees none"):
            accept_cpu("cuda", torch="2.13.0", cuda="13.0")


def test_a_rank_and_a_teacher_are_refused(proc, monkeypatch):
    """With --run.device auto, and not with cpu; on a host without a driver they take the CPU as ever."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rank, cpu = Single(), torch.device("cpu")
    assert rank.device("auto") == rank.device("cpu") == token_labels._device("auto") == cpu
    write_driver(proc, "535.104.05")
    with pytest.raises(ValueError, match="or set --run.device cpu"):
        rank.device("auto")
    with pytest.raises(ValueError, match="or set --device cpu"):
        token_labels._device("auto")
    assert rank.device("cpu") == token_labels._device("cpu") == cpu
