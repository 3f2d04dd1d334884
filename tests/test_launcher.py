"""Which launcher started a process, by environments recorded under real ones, one line of variables per rank.

Each file of tests/launchers says the command, the versions and the date; tests/mpi/test_launchers.py starts them anew.
"""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.comm import launcher
from largebatch.comm.gloo_address import Place, refuse_unreachable
from largebatch.comm.launcher import Launch, first_host, mismatch, prepare, recognise

RECORDED = Path(__file__).parent / "launchers"
OPEN_MPI, MPICH = "Open MPI v4.1.8, package: ...", "MPICH Version:      5.0.2 ..."
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


def recorded(name: str) -> list[dict[str, str]]:
    """The variables of each rank, in rank order."""
    lines = (RECORDED / f"{name}.txt").read_text().splitlines()
    return [dict(word.split("=", 1) for word in line.split()) for line in lines if not line.startswith("#")]


def test_every_recording_has_its_line():
    names = {path.stem for path in RECORDED.glob("*.txt")}
    assert names == {*KNOWN, *FORGOTTEN, *AMBIGUOUS}


@pytest.mark.parametrize("name", KNOWN)
def test_recognised(name):
    who, places = KNOWN[name]
    assert [recognise(environment) for environment in recorded(name)] == [Launch(who, *place) for place in places]


@pytest.mark.parametrize("name", FORGOTTEN)
def test_alone_where_several_tasks_were_asked_for(name):
    (environment,) = recorded(name)
    with pytest.raises(ValueError, match="SLURM_NTASKS=4 tasks were asked for, .* one process: write `mpirun -np 4"):
        recognise(environment)
    assert recognise(environment | {"SLURM_NTASKS": "1"}).size == 1


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_two_launchers_at_once(name):
    """Every rank refuses, those too whose two ranks happen to be the same number."""
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
    """Set from a launcher's own by a script, for torch.distributed; the launcher counts."""
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


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in ("srun_pty", "srun_none", "srun_pmi2")])
def test_what_starts_by_itself_is_left_alone(name):
    """Nothing is set where MPI or horovodrun has told Horovod all."""
    for environment in recorded(name):
        launch = recognise(environment)
        if launch.launcher != "torchrun":
            before = dict(environment)
            prepare(launch, environment, mpi=OPEN_MPI)
            assert environment == before


@pytest.mark.parametrize(
    "mpi, name, gloo", [(OPEN_MPI, "srun_pty", True), (MPICH, "srun_pty", True), (OPEN_MPI, "mpirun", False)]
)
def test_one_task_of_a_step(mpi, name, gloo):
    """Open MPI ends a process of a step that it cannot ask for its rank, even if it is alone."""
    environment = recorded(name)[0]
    before = dict(environment)
    start = prepare(recognise(environment), environment, mpi=mpi)
    assert (environment.get("HOROVOD_CONTROLLER") == "gloo") == gloo
    assert (environment.get("HOROVOD_CPU_OPERATIONS") == "gloo") == gloo
    start.close()
    assert environment == before


@pytest.mark.parametrize(
    "name, mpi, speaks",
    [
        ("srun_pmix", OPEN_MPI, True),
        ("srun_pmix", MPICH, False),
        ("srun_pmi2", MPICH, True),
        ("srun_pmi2", OPEN_MPI, False),
        ("srun_none", OPEN_MPI, False),
        ("srun_none", MPICH, False),
    ],
)
def test_which_mpi_starts_under_srun(name, mpi, speaks):
    environment = recorded(name)[2]
    launch = recognise(environment)
    assert launcher._needs_gloo(launch, environment, mpi) is not speaks
    assert not launcher._needs_gloo(launch, environment | {"HOROVOD_CONTROLLER": "mpi"}, mpi)


@pytest.mark.parametrize("name, wanted", [("mpirun", "gloo"), ("mpiexec", "gloo"), ("torchrun", "mpi")])
def test_a_controller_that_the_launcher_does_not_start(name, wanted):
    environment = recorded(name)[0] | {"HOROVOD_CONTROLLER": wanted}
    with pytest.raises(ValueError, match=f"HOROVOD_CONTROLLER={wanted} is set, but {name} does not"):
        prepare(recognise(environment), environment, mpi=OPEN_MPI)


def test_torch_variables_without_an_address():
    environment = {"RANK": "0", "WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match="without MASTER_ADDR and MASTER_PORT"):
        prepare(recognise(environment), environment, mpi=OPEN_MPI)
    assert environment == {"RANK": "0", "WORLD_SIZE": "2"}


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
    "nodes, first",
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("node[07-12,31],login", "node07"),
        ("gpu[3,5-7],m1", "gpu3"),
        ("r[2-3]n[1-4]", "r2n1"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def place(host: str, *, node: str = "", address: str = "10.0.0.1", loopback: str = "one") -> Place:
    return Place(host, node, address, loopback, port=1)


def test_slots_of_uneven_hosts():
    """As Horovod numbers ranks over MPI: a, a, b, b, b, c."""
    slots = launcher._slots([place(host) for host in "aabbbc"])
    assert [slot.rank for slot in slots] == list(range(6)) and {slot.size for slot in slots} == {6}
    assert [(slot.local_rank, slot.local_size) for slot in slots] == [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (0, 1)]
    assert [(slot.cross_rank, slot.cross_size) for slot in slots] == [(0, 3), (0, 2), (1, 3), (1, 2), (0, 1), (2, 3)]
    agents = launcher._slots([place("a", node="0"), place("a", node="1")])
    assert [(slot.local_rank, slot.local_size, slot.cross_rank) for slot in agents] == [(0, 1, 0), (0, 1, 1)]


def test_addresses_that_others_cannot_reach():
    refuse_unreachable([place("a", address="127.0.1.1"), place("b", address="127.0.0.1")])
    refuse_unreachable([place("a"), place("b", address="10.0.0.2", loopback="two")])
    with pytest.raises(ValueError, match=re.escape("The own name of b (127.0.1.1) resolves to an address that other")):
        refuse_unreachable([place("a"), place("b", address="127.0.1.1", loopback="two")])
    with pytest.raises(ValueError, match="^b cannot resolve its own name, and Gloo would crash"):
        refuse_unreachable([place("a"), place("b", address="")])


ALONE = "import sys; from largebatch.comm import launcher as l; launch = l.Launch('torchrun', int(sys.argv[1]), 2)"
JOIN = (
    "l.JOIN_LIMIT_S = 3; env = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': sys.argv[2]}\n"
    "try: l.prepare(launch, env, mpi='')\n"
    "except RuntimeError as error: print(error, sorted(env))"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_rank_never_comes(rank):
    port = str(free_port())
    command = [sys.executable, "-c", f"{ALONE}\n{JOIN}", str(rank), port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=RECORDED.parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"The 2 ranks did not meet at 127.0.0.1, port {port}, within 3 s"), done.stdout
    assert done.stdout.endswith("['MASTER_ADDR', 'MASTER_PORT']\n") and done.stdout.count("\n") == 1


def test_the_port_is_taken():
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", f"{ALONE}\n{JOIN}", "0", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=RECORDED.parents[1])
    assert "address already in use" in done.stdout and done.stdout.count("\n") == 1, done.stdout + done.stderr
