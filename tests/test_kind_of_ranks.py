"""What the ranks of a launch speak by, in environments recorded under real launchers."""

import os

import pytest
import torch
from recordings import recorded

from largebatch.launch.launcher import Launch, recognise
from largebatch.ranks import Ranks, sessions
from largebatch.ranks.horovod import HorovodRanks, speaks
from largebatch.ranks.sessions import kind_of_ranks
from largebatch.ranks.single import Single
from largebatch.ranks.torch_distributed import TorchRanks

OPEN_MPI, MPICH = "Open MPI v4.1.8, package: ...", "MPICH Version:      5.0.2 ..."


@pytest.mark.parametrize(
    "name, kind",
    [
        ("mpirun", HorovodRanks),
        ("mpirun5", HorovodRanks),
        ("mpiexec", HorovodRanks),
        ("horovodrun", HorovodRanks),
        ("horovodrun_gloo", HorovodRanks),
        ("srun_pmix", HorovodRanks),
        ("sbatch_mpirun", HorovodRanks),
        ("salloc_shell_mpirun", HorovodRanks),
        ("srun_pmi2", TorchRanks),
        ("srun_none", TorchRanks),
        ("srun_pty", TorchRanks),
        ("torchrun", TorchRanks),
    ],
)
def test_by_the_launcher_unless_the_user_says_otherwise(monkeypatch, name, kind):
    """Our Horovod has Open MPI."""
    for environment in recorded(name):
        monkeypatch.setattr(os, "environ", environment)
        launch = recognise(environment)
        assert kind_of_ranks(launch, "auto") is kind
        assert kind_of_ranks(launch, "torch") is TorchRanks
        if kind is HorovodRanks:
            assert kind_of_ranks(launch, "horovod") is HorovodRanks
        else:
            with pytest.raises(ValueError, match="^--run.ranks is horovod, and .*: leave it out, or use mpirun"):
                kind_of_ranks(launch, "horovod")


@pytest.mark.parametrize("wanted", ["auto", "horovod", "torch"])
def test_without_a_launcher_there_is_one_rank_which_needs_neither(monkeypatch, wanted):
    monkeypatch.setattr(os, "environ", {})
    assert kind_of_ranks(Launch("python"), wanted) is Single


def test_ranks_of_a_launcher_that_is_not_known_do_not_train_alone(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PMIX_RANK": "1", "MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(ValueError, match="--run.ranks is torch, and the launcher of this process is not known"):
        kind_of_ranks(Launch("python"), "torch")
    assert kind_of_ranks(Launch("python"), "auto") is HorovodRanks  # which sees whether it is alone


def test_an_srun_without_horovod(monkeypatch):
    monkeypatch.setattr(sessions, "find_spec", lambda name: None)
    monkeypatch.setattr(os, "environ", recorded("srun_pmix")[0])
    assert kind_of_ranks(recognise(os.environ), "auto") is TorchRanks
    with pytest.raises(ValueError, match="it is not installed"):
        kind_of_ranks(recognise(os.environ), "horovod")


def test_a_torch_that_cannot_reduce_on_gpus_is_refused(monkeypatch):
    """As built by a distribution; without its GPUs, which are planted here."""
    comm = object.__new__(TorchRanks)
    monkeypatch.setattr(Ranks, "device", lambda self, kind: torch.device("cpu" if kind == "cpu" else "cuda"))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="was built without NCCL .*: install PyTorch's own build, or set"):
        comm.device()
    assert comm.device("cpu").type == "cpu"


@pytest.mark.parametrize(
    "name, mpi, answer",
    [
        ("srun_pmix", OPEN_MPI, True),
        ("srun_pmix", MPICH, False),
        ("srun_pmi2", MPICH, True),
        ("srun_pmi2", OPEN_MPI, False),
        ("srun_none", OPEN_MPI, False),
        ("srun_none", MPICH, False),
    ],
)
def test_which_mpi_can_ask_an_srun_for_its_rank(name, mpi, answer):
    environment = recorded(name)[2]
    assert speaks(environment, mpi) is answer and speaks(environment | {"HOROVOD_CONTROLLER": "mpi"}, mpi)
