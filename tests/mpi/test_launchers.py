"""Real launchers give the same places and the same weights; an impossible start is refused in one sentence."""

import os
import random
import re
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launch import LAUNCHERS, launch, run, started
from runs import SMALL, different, weights

PLACES = ["-m", "tests.mpi.programs", "places"]
TWO = [(0, 2, 0, 2), (1, 2, 1, 2)]


def places(command: list[str], *arguments: str, cold: bool = False) -> list[tuple[int, int, int, int]]:
    """What the ranks of a launch saw; they must leave the environment as it was."""
    code, output = run([*command, "python", *PLACES, *arguments], cold=cold, environment={"PS1": "$ ", "_": "env"})
    assert code == 0 and "could not find environment variable" not in output, output
    (seen,) = re.findall(r"places \[(.*)\]", output)
    return [tuple(map(int, place.split(","))) for place in re.findall(r"\(([^)]*)\)", seen)]


def refusal(command: list[str], *arguments: str, **options) -> str:
    """What a launch says that must fail."""
    code, output = run([*command, "python", *PLACES, *arguments], timeout_s=120, **options)
    assert code != 0 and "places [" not in output and not re.search(r"/largebatch/\w+\.py", output), output
    return output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_gives_the_same_places(launcher):
    assert places(LAUNCHERS[launcher](2), cold=True) == ([(0, 1, 0, 1)] if launcher == "python" else TWO)


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "horovodrun --gloo"])
def test_the_ranks_of_torch_distributed_under_the_launchers_of_horovod(launcher):
    assert places(LAUNCHERS[launcher](2), "torch") == TWO


def test_ranks_that_speak_by_different_means_end_in_one_sentence():
    said = refusal(["mpirun", "-np", "2"], "mixed")
    assert said.count("The 2 ranks did not meet at 127.0.0.1") == 1 and "with the same --run.ranks" in said, said


def test_one_process_announced_as_one_of_four():
    announced = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29574"}
    said = refusal([], environment=announced | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"})
    assert "largebatch: The 4 ranks did not meet at 127.0.0.1, port 29574, within 5 s" in said, said


BY_HAND = "export WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29573; RANK=1 \"$@\" & RANK=0 \"$@\"; wait"


@pytest.mark.parametrize("start", [LAUNCHERS["torchrun"](2), ["sh", "-c", BY_HAND, "sh"]], ids=["torchrun", "by hand"])
def test_ranks_on_one_host_listen_there_alone(start):
    """Nobody on another host finds a server of ours, nor Gloo itself."""
    code, output = run([*start, "python", "-m", "tests.mpi.programs", "listens", "parallel"])
    assert code == 0 and "listens [['127.0.0.1'], ['127.0.0.1']]" in output, output


def test_agents_of_torchrun_started_by_mpirun():
    """As on two hosts, with one agent on each."""
    agents = ["mpirun", "-np", "2", "torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    found = places([*agents, "--rdzv-endpoint", "127.0.0.1:29571", "--rdzv-id", "agents", "--no-python"])
    assert found == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]


def test_torchrun_starts_ranks_again():
    """The second start does not meet what the first has left in the agent's store."""
    agent = ["torchrun", "--nproc-per-node", "2", "--max-restarts", "1", "--no-python"]
    one_store = ["--master-addr", "127.0.0.1", "--master-port", "29572"]  # otherwise each start has its own
    assert places([*agent, *one_store], "fails") == TWO


def test_torchrun_trains_as_mpirun_does(tmp_path):
    """To the last bit: a sum of two has one order, in MPI as in Gloo."""
    options = ["--data.global_batch_size", "16", "--data.micro_batch_size", "4", "--run.duration", "2 steps"]
    for launcher in ("mpirun", "torchrun"):
        folder = ["--run.folder", str(tmp_path / launcher)]
        code, output = launch(["-m", "largebatch.train", *SMALL, *options, *folder], ranks=2, launcher=launcher)
        assert code == 0, output
    assert different(weights(tmp_path / "mpirun"), weights(tmp_path / "torchrun")) == []


def test_a_run_goes_on_under_the_other_launcher_in_the_middle_of_an_epoch(tmp_path):
    """From Horovod's ranks to those of torch.distributed and back; two ranks add alike, so to the last bit."""
    batch = ["--data.global_batch_size", "16", "--data.micro_batch_size", "4", "--run.duration", "6 steps"]
    for folder, launchers in (("whole", ["mpirun"]), ("mixed", ["mpirun", "torchrun", "mpirun"])):
        for number, launcher in enumerate(launchers, start=1):
            stop = ["--run.max_steps", str(6 * number // len(launchers)), "--run.folder", f"{tmp_path}/{folder}"]
            code, output = launch(["-m", "largebatch.train", *SMALL, *batch, *stop], ranks=2, launcher=launcher)
            assert code == 0 and ("resumed at step" in output) == (number > 1), output
    assert different(weights(tmp_path / "whole"), weights(tmp_path / "mixed")) == []


def test_no_mpirun_removes_the_folder_that_others_use():
    """conftest.keep_mpi_folder: otherwise one launch in a hundred, which starts at that moment, would fail."""
    folder = Path(tempfile.gettempdir(), f"ompi.{socket.gethostname()}.{os.getuid()}")
    subprocess.run(["mpirun", "-np", "1", "true"], check=True, timeout=60)
    assert [path.name for path in folder.iterdir() if not path.name.startswith(("pid.", "jf."))] == ["kept"]


def test_two_launchers_at_once():
    said = refusal(["mpirun", "-np", "2", "torchrun", "--nproc-per-node", "2", "--no-python"])
    assert re.search(r"torchrun \(RANK=\d WORLD_SIZE=2\) and mpirun \(OMPI_COMM_WORLD_RANK=\d OMPI_COMM_WORLD_S", said)


def test_an_mpi_that_is_not_horovods():
    """As a rank of MPICH's mpiexec sees it, whose variables Open MPI does not know."""
    said = refusal([], environment={"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert "mpiexec announced rank 1 of 2, but Horovod sees 1 process: each would train alone" in said
    assert "python -m largebatch.doctor" in said


def test_a_rank_in_another_place_than_announced_stops_all():
    wrong = 'if [ $OMPI_COMM_WORLD_RANK = 1 ]; then export OMPI_COMM_WORLD_LOCAL_SIZE=3; fi; exec "$@"'
    said = refusal(["mpirun", "-np", "2", "sh", "-c", wrong, "sh"])
    sentence = "largebatch: mpirun announced rank 1 of 2, local rank 1 of 3, but Horovod sees rank 1 of 2, local rank 1"
    assert said.count(sentence) == 2, said


def test_one_process_where_slurm_was_asked_for_four():
    assert "SLURM_NTASKS=4 tasks were asked for" in refusal([], environment={"SLURM_NTASKS": "4"})


def test_a_host_that_does_not_know_its_own_name():
    """Horovod's Gloo would end it by a signal. torch's is told the address, and so must be torchrun."""
    elsewhere = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"]
    tried = subprocess.run([*elsewhere, "true"], capture_output=True, text=True, timeout=20)
    if tried.returncode != 0:
        pytest.skip(f"a host name of its own needs root: {tried.stderr.strip()}")
    start = LAUNCHERS["torchrun"](2)
    assert places([*elsewhere, start[0], "--local-addr", "127.0.0.1", *start[1:]]) == TWO
    said = refusal([*elsewhere, *LAUNCHERS["horovodrun --gloo"](2)])
    assert "largebatch: no-such-host.invalid cannot resolve its own name, and Gloo would crash" in said, said
    assert "/etc/hosts" in said and "SIGSEGV" not in said


STRANGERS = {
    "is silent": lambda connection: None,
    "sends a byte now and then": lambda connection: connection.send(b"G"),
    "sends garbage": lambda connection: connection.send(random.Random(0).randbytes(1024)),
}


@pytest.mark.cluster
@pytest.mark.parametrize(
    "start, stranger",
    [*((LAUNCHERS["torchrun"](2), stranger) for stranger in STRANGERS), (["sh", "-c", BY_HAND, "sh"], "sends garbage")],
    ids=[*STRANGERS, "sends garbage to a store of ours"],
)
def test_a_stranger_at_every_port_holds_nothing(tmp_path, start, stranger):
    """From the moment that a port is there until the job has ended; the ranks wait long enough for all to be tried."""
    output, tried, connections = tmp_path / "output", set[int](), list[socket.socket]()
    command = [*start, "python", "-m", "tests.mpi.programs", "waits_for_strangers", str(tmp_path)]
    with started(command, output) as process:
        while process.poll() is None:
            for port in listening(process.pid) - tried:
                with suppress(OSError):
                    connections.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                    tried.add(port)
            for connection in connections:
                connection.settimeout(0.1)
                with suppress(OSError):
                    STRANGERS[stranger](connection)
            if len(tried) >= 7:  # that of the store, and each rank's for three groups
                (tmp_path / "go on").touch()
            time.sleep(0.05)
        for connection in connections:
            connection.close()
    assert process.returncode == 0 and output.read_text().count("the sum is right") == 2, output.read_text()
    assert len(tried) >= 7


def listening(launcher: int) -> set[int]:
    """Return the ports at which a launcher and its ranks listen."""
    found = set()
    for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
        with suppress(psutil.Error):
            sockets = process.net_connections(kind="inet")
            found |= {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.cluster
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_a_full_disk_at_the_end_is_one_sentence_and_older_checkpoints_are_kept(tmp_path, launcher):
    """A real one, of a size that has room for two checkpoints and not for a third beside them."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", tmp_path], check=True)
    try:
        options = ["--recipe", "quickstart", "--model", "vit_nano32", "--img-size", "32", "--run.duration", "12 steps"]
        options += ["--checkpoint.every", "4 steps", "--run.eval_every", "never", "--schedule.warmup", "0 steps"]
        train = ["-m", "largebatch.train", *options, "--run.folder", str(tmp_path / "run")]
        code, output = launch(train, ranks=2, launcher=launcher, cold=True)
        kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    said = [line for line in output.splitlines() if "largebatch: rank" in line]
    assert code != 0 and len(said) == 1 and "the last checkpoint, of step 12, could not be written" in said[0], output
    assert not re.search(r'/largebatch/\S+\.py", line', output), output  # torchrun itself prints a traceback
    assert kept == ["00000004", "00000008"]
