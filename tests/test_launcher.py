"""Recognising the launcher of a process, in environments recorded under real launchers.

Each file of tests/launchers has the command, the versions and the date, and a line of variables for each rank.
tests/mpi/test_launchers.py starts the launchers themselves.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from recordings import FOLDER, recorded

from largebatch.launch import bind
from largebatch.launch.bind import counts
from largebatch.launch.launcher import Launch, mismatch, recognise

TWO = [(0, 2, 0, 2), (1, 2, 1, 2)]
THREE = [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]
FOUR = [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]

# file: launcher, and of each rank its rank, size, local rank and local size
KNOWN = {
    "mpirun": ("mpirun", TWO),
    "mpirun5": ("mpirun", TWO),
    "mpiexec": ("mpiexec", TWO),
    "horovodrun": ("mpirun", TWO),
    "horovodrun_gloo": ("horovodrun --gloo", TWO),
    "torchrun": ("torchrun", TWO),
    "srun_none": ("srun", THREE),
    "srun_pmi2": ("srun", THREE),
    "srun_pmix": ("srun", THREE),
    "srun_pty": ("srun", [(0, 1, 0, 1)]),
    "srun_torchrun": ("torchrun", FOUR),
    "sbatch_mpirun": ("mpirun", FOUR),
    "sbatch_mpirun5": ("mpirun", FOUR),
    "sbatch_mpiexec": ("mpiexec", FOUR),
    "sbatch_torchrun": ("torchrun", TWO),
    "sbatch_horovodrun_gloo": ("horovodrun --gloo", TWO),
    "salloc_shell_mpirun": ("mpirun", TWO),
}
FORGOTTEN = ["sbatch_python", "salloc_python", "salloc_shell"]
OF_TORCHRUN, OF_MPIRUN = "RANK WORLD_SIZE", "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"
OF_SRUN = "SLURM_PROCID SLURM_STEP_NUM_TASKS"
AMBIGUOUS = {
    "two_mpirun_around_torchrun": ("torchrun", OF_TORCHRUN, "mpirun", OF_MPIRUN),
    "two_torchrun_around_mpirun": ("torchrun", OF_TORCHRUN, "mpirun", OF_MPIRUN),
    "two_srun_around_torchrun": ("torchrun", OF_TORCHRUN, "srun", OF_SRUN),
    "two_srun_around_mpirun": ("mpirun", OF_MPIRUN, "srun", OF_SRUN),
}


def test_every_recording_has_its_line():
    names = {path.stem for path in FOLDER.glob("*.txt")}
    assert names == {*KNOWN, *FORGOTTEN, *AMBIGUOUS}


@pytest.mark.parametrize("name", KNOWN)
def test_recognised(name):
    """Also by bind.sh, which cannot import the package."""
    who, places = KNOWN[name]
    assert [recognise(environment) for environment in recorded(name)] == [Launch(who, *place) for place in places]
    assert [bind.local_rank(environment) for environment in recorded(name)] == [place[2:] for place in places]


@pytest.mark.parametrize("name", FORGOTTEN)
def test_alone_where_several_tasks_were_asked_for(name):
    (environment,) = recorded(name)
    with pytest.raises(ValueError, match="SLURM_NTASKS=4 tasks were asked for, .* one process: write `mpirun -np 4"):
        recognise(environment)
    assert recognise(environment | {"SLURM_NTASKS": "1"}).size == 1


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_two_launchers_at_once(name):
    """Every rank refuses, even a rank that happens to have the same number under both launchers."""
    one, of_one, other, of_other = AMBIGUOUS[name]
    for environment in recorded(name):
        with pytest.raises(ValueError) as error:
            recognise(environment)
        assert str(error.value).startswith("Each of ") and "\n" not in str(error.value)
        for variable in (of_one + " " + of_other).split():
            assert f"{variable}={environment[variable]}" in str(error.value)
        assert f"`unset {of_one}` if {one} did not start it" in str(error.value)
        assert f"`unset {of_other}` if {other} did not start it" in str(error.value)
        for keep, unset in ((one, of_other), (other, of_one)):
            rest = {key: value for key, value in environment.items() if key not in unset.split()}
            assert recognise(rest).launcher == keep


def test_nobody_started_it():
    assert recognise({}) == Launch("python", 0, 1, None, None)
    assert recognise({"PATH": "/bin", "RANK": "0", "WORLD_SIZE": "1", "SLURM_NTASKS": "1"}) == Launch("python")


def test_variables_that_agree():
    """A script may copy a launcher's variables for torch.distributed; the launcher counts."""
    for environment, (rank, size, *_) in zip(recorded("mpirun") + recorded("srun_none"), TWO + THREE):
        who = recognise(environment)
        torchs = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
        assert recognise(environment | torchs) == who
        with pytest.raises(ValueError, match=f"torchrun .RANK={rank} WORLD_SIZE=7"):
            recognise(environment | torchs | {"WORLD_SIZE": "7"})


def test_a_parent_that_is_a_rank_of_open_mpi():
    """Open MPI sets its variables when it starts in a task of srun --mpi=pmix; what that task starts inherits them."""
    for environment, (rank, size, *_) in zip(recorded("srun_pmix"), THREE):
        both = environment | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}
        assert (recognise(both).rank, recognise(both).size) == (rank, size)


@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 is set without OMPI_COMM_WORLD_RANK"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4 is set without PMI_RANK"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set without RANK"),
        ({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "0"}, "HOROVOD_SIZE=4 is set without HOROVOD_LOCAL_RANK"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is no rank of WORLD_SIZE=4"),
        ({"RANK": "first", "WORLD_SIZE": "4"}, "RANK=first should be a number"),
        ({"HOROVOD_ELASTIC": "1"}, "HOROVOD_ELASTIC is set: .* resumes with any number of ranks"),
    ],
)
def test_a_start_that_cannot_be(environment, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        recognise(environment)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("gone", [name for name in recorded("horovodrun_gloo")[0] if "GLOO_REND" in name])
def test_gloo_without_its_rendezvous(gone):
    environment = recorded("horovodrun_gloo")[1]
    del environment[gone]
    with pytest.raises(ValueError, match=f"HOROVOD_SIZE=2 is set without {gone}"):
        recognise(environment)


def test_mismatch():
    launch = Launch("mpirun", 1, 2, 1, 2)
    assert mismatch(launch, rank=1, size=2, local_rank=1, local_size=2) == ""
    assert mismatch(Launch("torchrun", 1, 2), rank=1, size=2, local_rank=0, local_size=1) == ""
    alone = mismatch(launch, rank=0, size=1, local_rank=0, local_size=1)
    assert alone.startswith("mpirun announced rank 1 of 2, but Horovod sees 1 process: each would train alone")
    assert "python -m largebatch.doctor" in alone
    for seen in ((0, 2, 1, 2), (1, 3, 1, 2), (1, 2, 0, 2), (1, 2, 1, 3)):
        rank, size, local_rank, local_size = seen
        text = mismatch(launch, rank=rank, size=size, local_rank=local_rank, local_size=local_size)
        assert f"Horovod sees rank {rank} of {size}, local rank {local_rank} of {local_size}" in text


@pytest.mark.parametrize(
    "text, expected", [("8", [8]), ("4(x2),3", [4, 4, 3]), ("2(x3),1", [2, 2, 2, 1]), ("1,2", [1, 2]), ("", [])]
)
def test_numbers_for_each_host(text, expected):
    assert counts(text) == expected


BARE = ["launch.launcher", "launch.meeting", "launch.cores", "ranks.preflight", "doctor.machine"]


@pytest.mark.parametrize("file", BARE)
def test_files_that_need_only_the_standard_library(file):
    """Packing, the doctor and the command line import these before, or without, Horovod and torch."""
    program = f"import sys, largebatch.{file}; print({{'horovod', 'torch', 'numpy'}} & set(sys.modules))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.stdout == "set()\n", done.stderr
