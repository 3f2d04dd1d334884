"""The start of Gloo, in environments recorded under real launchers; tests/mpi/test_launchers.py starts real ranks."""

import http.client
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from horovod.runner.common.util.hosts import SlotInfo
from recordings import recorded

from largebatch.launch import gloo_address, gloo_server, gloo_start
from largebatch.launch.gloo_address import GlooAddress, refuse_unreachable, store_address
from largebatch.launch.gloo_server import AddressServer
from largebatch.launch.gloo_start import first_host, prepare
from largebatch.launch.launcher import Launch, recognise

ROOT = Path(__file__).parents[1]
OPEN_MPI, MPICH = "Open MPI v4.1.8, package: ...", "MPICH Version:      5.0.2 ..."
STARTED_BY_THEMSELVES = [
    "mpirun",
    "mpirun5",
    "mpiexec",
    "horovodrun",
    "horovodrun_gloo",
    "srun_pmix",
    "sbatch_mpirun",
    "sbatch_mpirun5",
    "sbatch_mpiexec",
    "sbatch_horovodrun_gloo",
    "salloc_shell_mpirun",
]


@pytest.mark.parametrize("name", STARTED_BY_THEMSELVES)
def test_what_starts_by_itself_is_left_alone(name):
    """Nothing is set if MPI or horovodrun has told Horovod all."""
    for environment in recorded(name):
        before = dict(environment)
        prepare(recognise(environment), environment, mpi=OPEN_MPI)
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
    assert gloo_start.needs_gloo(launch, environment, mpi) is not speaks
    assert not gloo_start.needs_gloo(launch, environment | {"HOROVOD_CONTROLLER": "mpi"}, mpi)


@pytest.mark.parametrize("name, wanted", [("mpirun", "gloo"), ("mpiexec", "gloo"), ("torchrun", "mpi")])
def test_a_controller_that_the_launcher_does_not_start(name, wanted):
    environment = recorded(name)[0] | {"HOROVOD_CONTROLLER": wanted}
    with pytest.raises(ValueError, match=f"HOROVOD_CONTROLLER={wanted} is set, but {name} does not"):
        prepare(recognise(environment), environment, mpi=OPEN_MPI)


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun --gloo", "srun"])
def test_too_many_ranks_for_gloo(monkeypatch, launcher):
    """All of them say so before one waits for another."""
    monkeypatch.setattr(gloo_start, "own_address", lambda: "10.0.0.1")
    monkeypatch.setattr(gloo_start, "_meet", lambda *arguments: {})
    environment = {"SLURM_STEP_ID": "0"} if launcher == "srun" else {}
    for rank in (0, 32):
        message = rf"^{launcher} has started 33 ranks .* at most 32: .* 64 messages .* with mpirun"
        with pytest.raises(ValueError, match=message):
            gloo_start.prepare(Launch(launcher, rank, 33), dict(environment), mpi="")
    gloo_start.prepare(Launch(launcher, 31, 32), dict(environment), mpi="").close()
    gloo_start.prepare(Launch("mpirun", 32, 33), {}, mpi="Open MPI").close()


def test_torch_variables_without_an_address():
    environment = {"RANK": "0", "WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match="without MASTER_ADDR and MASTER_PORT"):
        prepare(recognise(environment), environment, mpi=OPEN_MPI)
    assert environment == {"RANK": "0", "WORLD_SIZE": "2"}


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


def address_of(host: str, *, node: str = "", address: str = "10.0.0.1", loopback: str = "one") -> GlooAddress:
    return GlooAddress(host, node, address, loopback)


def test_slots_of_uneven_hosts():
    """As Horovod numbers ranks over MPI: a, a, b, b, b, c."""
    slots = gloo_start.number_slots([address_of(host) for host in "aabbbc"])
    assert [slot.rank for slot in slots] == list(range(6)) and {slot.size for slot in slots} == {6}
    assert [(slot.local_rank, slot.local_size) for slot in slots] == [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (0, 1)]
    assert [(slot.cross_rank, slot.cross_size) for slot in slots] == [(0, 3), (0, 2), (1, 3), (1, 2), (0, 1), (2, 3)]
    agents = gloo_start.number_slots([address_of("a", node="0"), address_of("a", node="1")])
    assert [(slot.local_rank, slot.local_size, slot.cross_rank) for slot in agents] == [(0, 1, 0), (0, 1, 1)]


def test_addresses_that_others_cannot_reach():
    refuse_unreachable([address_of("a", address="127.0.1.1"), address_of("b", address="127.0.0.1")])
    refuse_unreachable([address_of("a"), address_of("b", address="10.0.0.2", loopback="two")])
    with pytest.raises(ValueError, match=re.escape("The own name of b (127.0.1.1) resolves to an address that other")):
        refuse_unreachable([address_of("a"), address_of("b", address="127.0.1.1", loopback="two")])
    with pytest.raises(ValueError, match="^b cannot resolve its own name, and Gloo would crash"):
        refuse_unreachable([address_of("a"), address_of("b", address="")])


@pytest.fixture
def server():
    slots = [SlotInfo(**asdict(slot)) for slot in gloo_start.number_slots([address_of("a"), address_of("a")])]
    started = AddressServer("127.0.0.1", slots)
    yield started
    started.stop()


def answer(server: AddressServer, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, response.read()


def test_the_server_of_addresses_answers_its_ranks(server):
    """As Horovod asks: http://ADDR:PORT/SCOPE/KEY, with what the variables say."""
    path = f"http://{server.host}:{server.server_port}/global_/0".partition(str(server.server_port))[2]
    assert answer(server, "GET", path)[0] == 404
    assert answer(server, "PUT", path, b"here")[0] == 200
    assert answer(server, "GET", path) == (200, b"here")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
@pytest.mark.parametrize("start", ["", "/", "/0123456789abcdef0123456789abcdef:1"])
def test_the_server_of_addresses_refuses_everybody_else(server, method, start):
    path = f"/{server.secret}:1/global_/0"
    assert answer(server, "PUT", path, b"here")[0] == 200
    body = b"elsewhere" if method == "PUT" else None
    assert answer(server, method, f"{start}/global_/0", body)[0] == 403
    assert answer(server, method, "/setup.cfg" if method == "HEAD" else "/global_", body)[0] == 403
    assert answer(server, "GET", path) == (200, b"here")


def test_the_server_of_addresses_closes_its_port():
    started = AddressServer("127.0.0.1", [])
    port = started.server_port
    started.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=20)


SERVE = """
import sys, threading, time
from largebatch.launch import gloo_server

gloo_server.REQUEST_S = 1000.0
server = gloo_server.AddressServer("127.0.0.1", [])
print(server.server_port, flush=True)
while sum("process_request" in thread.name for thread in threading.enumerate()) < 3:
    time.sleep(0.01)
server.stop()
print("stopped")
"""
STRANGERS = {
    "silence": lambda send: None,
    "half a line": lambda send: send(b"GET /"),
    "headers without an end": lambda send: send(b"GET / HTTP/1.0\r\nA: "),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_who_stays_connected_does_not_hold_the_end(stranger):
    """The process ends while the stranger goes on: each read alone would last until the stranger's next byte."""
    command, limit = [sys.executable, "-c", SERVE], time.monotonic() + 60
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        port = int(process.stdout.readline())
        connections = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3)]
        for connection in connections:
            STRANGERS[stranger](connection.sendall)
        while process.poll() is None:
            for connection in connections:
                with suppress(OSError):
                    connection.sendall(b"a")
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            if time.monotonic() > limit:
                process.kill()
        assert process.returncode == 0 and process.stdout.read() == "stopped\n"


def test_a_request_has_a_limit_as_a_whole(server, monkeypatch):
    monkeypatch.setattr(gloo_server, "REQUEST_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as stranger:
        stranger.sendall(b"GET /")
        stranger.settimeout(0.05)
        for _ in range(1000):  # the limit of Horovod's own, of each read, begins anew with each byte
            try:
                stranger.sendall(b"a")
                assert stranger.recv(1) == b""
                return
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return
        pytest.fail("the request goes on")


@pytest.mark.parametrize(
    "host, one_host, address",
    [
        ("localhost", False, "127.0.0.1"),
        ("127.0.1.1", False, "127.0.1.1"),
        ("debian", True, "127.0.1.1"),
        ("debian", False, ""),
        ("kubernetes-service", True, ""),
    ],
)
def test_where_the_store_listens(monkeypatch, host, one_host, address):
    """A name for a loopback address may be looked up by other hosts; a service's address is none of this host's."""
    known = {"localhost": "127.0.0.1", "debian": "127.0.1.1", "kubernetes-service": "198.51.100.7"}
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known.get(host, host), 0))]
    monkeypatch.setattr(gloo_address.socket, "getaddrinfo", lambda *arguments, **options: found)
    assert store_address(host, one_host=one_host) == address


def test_all_ranks_hear_that_rank_0_cannot_listen():
    class Store(dict):
        set, get = dict.__setitem__, dict.__getitem__

    rendezvous = gloo_start.Rendezvous({})
    rendezvous.store = Store()
    gloo_start.start_server(rendezvous, "198.51.100.7", [])
    with pytest.raises(ValueError, match="cannot listen at 198.51.100.7, the address of its own name"):
        gloo_start.find_server(rendezvous.store)


ALONE = "import sys; from largebatch.launch import gloo_start; from largebatch.launch.launcher import Launch"
JOIN = (
    "launch = Launch('torchrun', int(sys.argv[1]), 2); gloo_start.JOIN_LIMIT_S = 3\n"
    "env = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': sys.argv[2]}\n"
    "try: gloo_start.prepare(launch, env, mpi='')\n"
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"The 2 ranks did not meet at 127.0.0.1, port {port}, within 3 s"), done.stdout
    assert done.stdout.endswith("['MASTER_ADDR', 'MASTER_PORT']\n") and done.stdout.count("\n") == 1


def test_the_port_is_taken():
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", f"{ALONE}\n{JOIN}", "0", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert "address already in use" in done.stdout and done.stdout.count("\n") == 1, done.stdout + done.stderr
