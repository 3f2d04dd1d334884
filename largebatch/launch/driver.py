"""NVIDIA's driver on this host, found without CUDA: a GPU that torch does not see is there all the same."""

import logging
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.process.installer import install_command

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PROC = Path("/proc/driver/nvidia")
QUERY = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]  # a line for each GPU
QUERY_LIMIT_S = 60  # 20 s are normal if the driver is not kept loaded; a broken driver never answers
# The CUDA to install for a driver from this major version on, as in mpi_scripts/install.sh. Programs built with CUDA 12
# run from driver 525 on, and those of CUDA 13 from 580; GPUs that need driver 570 need more than CUDA 12.6.
CUDA_OF_DRIVER = {580: "13.0", 570: "12.9", 525: "12.6"}
OLDEST_DRIVER = {12: 525, 13: 580}


@dataclass(frozen=True)
class Driver:
    """The driver of this host. version: such as 535.104.05."""

    version: str
    num_gpus: int

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    @property
    def cuda(self) -> str:
        """The CUDA to install for it; empty if it is too old."""
        return next((cuda for oldest, cuda in CUDA_OF_DRIVER.items() if self.major >= oldest), "")


def find_driver(proc: Path = PROC) -> Driver | None:
    """Return the driver that is loaded, None without one. proc: its folder in /proc."""
    try:
        described = (proc / "version").read_text()
    except OSError:  # no driver, or one that has no such file, as in WSL
        return _ask_driver()
    version = re.search(r"\s(\d{3,}\.\d[\d.]*)\s", described)
    return Driver(version[1] if version else "0", len(list(proc.glob("gpus/*"))))


def _ask_driver() -> Driver | None:
    if shutil.which(QUERY[0]) is None:
        return None
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_LIMIT_S).stdout
    except subprocess.TimeoutExpired:
        return None
    versions = re.findall(r"^\d+\.[\d.]+$", answer, re.MULTILINE)
    return Driver(versions[0], len(versions)) if versions else None


def accept_cpu(kind: str, *, torch: str, cuda: str | None, option: str = "--run.device") -> None:
    """Raise ValueError if torch sees no GPU, but `kind`, the value of the option, is not auto or the host has a GPU.

    A run that trains on CPUs unnoticed would take weeks. If CUDA_VISIBLE_DEVICES hides the GPUs, there is only a
    warning. torch: its version. cuda: the CUDA that it was built with, None without.
    """
    driver, host = find_driver(PROC), socket.gethostname()
    if driver is None:
        if kind != "auto":
            raise ValueError(f"{option} is {kind}, and {host} has no NVIDIA driver: expected a host with GPUs, or cpu.")
        return
    found = f"{host} has {driver.num_gpus} GPU{'s' * (driver.num_gpus != 1)} (driver {driver.version})"
    if kind == "auto" and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        logger.warning("%s, and CUDA_VISIBLE_DEVICES hides them: the CPU computes.", found)
        return
    seen_by = f"torch {torch}, {f'for CUDA {cuda}' if cuda else 'a build without CUDA'},"
    raise ValueError(f"{found}, but {seen_by} sees none: {_cure(driver, cuda)}, or set {option} cpu.")


def device_of(kind: str, *, local_rank: int, local_size: int) -> "torch.device":
    import torch

    if kind != "cpu" and not torch.cuda.is_available():
        accept_cpu(kind, torch=torch.__version__, cuda=torch.version.cuda)
        kind = "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible < local_size and visible != 1:
        raise ValueError(
            f"{socket.gethostname()} has {visible} visible GPUs for {local_size} ranks: start fewer ranks per host, or "
            "set --run.device cpu."
        )
    # A single visible GPU may be this rank's own, or that of all ranks of the host: ranks/placement.py finds out.
    number = local_rank if visible > 1 else 0
    try:
        torch.cuda.set_device(number)
        torch.cuda.mem_get_info(number)
    except torch.AcceleratorError as error:
        found = f"GPU {number} of {socket.gethostname()} takes no process ({str(error).splitlines()[0]})"
        raise ValueError(f"{found}: another one may have it for itself alone; nvidia-smi names it.") from None
    return torch.device("cuda", number)


def oldest_driver(cuda: str | None) -> int:
    """Return the oldest major version of a driver for a CUDA such as 12.6; 0 for none."""
    return OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0) if cuda else 0


def _cure(driver: Driver, cuda: str | None) -> str:
    oldest = oldest_driver(cuda)
    needs = f"CUDA {cuda} needs driver {oldest} or newer, so " if driver.major < oldest else ""
    if cuda and not needs:
        return "give the job or the container its GPUs, or parts of them (Slurm: --gpus-per-node, docker: --gpus all)"
    if not driver.cuda:
        return f"update the driver to {min(CUDA_OF_DRIVER)} or newer"
    return f"{needs}install torch for this driver with `{install_command(settings=f'CUDA={driver.cuda}')}`"
