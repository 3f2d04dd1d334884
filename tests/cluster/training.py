"""The small training run of the tests in this folder: its start across hosts, and the files that it leaves."""

from pathlib import Path

import torch
import warm
from hosts import Hosts, Job
from safetensors.torch import load_file

LAUNCHERS = {
    "mpirun": ["mpirun"],
    "horovodrun": ["horovodrun"],
    "horovodrun --gloo": ["horovodrun", "--gloo"],
}
MODEL = "--model vit_nano32 --img-size 64 --run.precision fp32 --run.deterministic true".split()
BATCH = "--data.global_batch_size 16 --data.micro_batch_size 4 --log.to none".split()
# every rank shares two cores with all the others
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def launcher_on(launcher: str, where: str) -> list[str]:
    """The launcher's part of a command for places such as "h1:2,h2:2", as a user would type it."""
    ranks = sum(int(place.split(":")[1]) for place in where.split(","))
    return [*LAUNCHERS[launcher], "-np", str(ranks), "-H", where]


def training(folder: Path, *options: str, cold: bool = False) -> list[str]:
    """The command of one process. The warm Python is the same on all hosts: they share the files and the server."""
    python = "python" if cold else warm.python()
    return [python, "-m", "largebatch.train", *MODEL, *BATCH, "--run.folder", str(folder), *options]


def start(
    hosts: Hosts, launcher: str, where: str, folder: Path, *options: str, cold: bool = False, **environment: str
) -> Job:
    """Start a training run on h1."""
    command = [*launcher_on(launcher, where), *training(folder, *options, cold=cold)]
    return hosts.start("h1", command, environment=ONE_THREAD | environment)


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight and buffer of the newest checkpoint; 20 steps on, they show what the optimizer's state was."""
    files = sorted(max((folder / "checkpoints").glob("[0-9]*")).glob("*.safetensors"))
    assert files, folder
    return {f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()}
