"""Where the ranks of torch.distributed meet; tests/mpi/test_launchers.py and tests/cluster start real ones."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import recorded

from largebatch.launch import meeting
from largebatch.launch.launcher import Launch, recognise
from largebatch.launch.meeting import LOOPBACK, Place, first_host, listen_nowhere_else, place_here, store_address

ROOT = Path(__file__).parents[1]


def test_torch_variables_without_an_address():
    environment = {"RANK": "0", "WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match="without MASTER_ADDR and MASTER_PORT"):
        meeting.meet(recognise(environment), environment, limit_s=3)


def address_of(launch: Launch, environment: dict[str, str]) -> tuple[str, int, bool]:
    return meeting._address_of_store(launch, environment)


@pytest.mark.parametrize("name", ["srun_none", "srun_pmix", "mpirun", "horovodrun_gloo"])
def test_all_ranks_of_a_launch_look_for_one_store_and_rank_0_serves_it(name):
    found = [address_of(recognise(environment), environment) for environment in recorded(name)]
    assert len({(host, port) for host, port, _ in found}) == 1 and 20000 <= found[0][1] < 32000
    assert [serves for _, _, serves in found] == [True] + [False] * (len(found) - 1)


def test_two_jobs_on_a_host_have_ports_of_their_own():
    one, other = {"PMIX_NAMESPACE": "866779137"}, {"PMIX_NAMESPACE": "866844673"}
    launch = Launch("mpirun", 0, 2, 0, 2)
    assert address_of(launch, one)[0] == LOOPBACK and address_of(launch, one) != address_of(launch, other)


def test_mpirun_on_two_hosts_needs_the_address_of_rank_0():
    launch = Launch("mpirun", 0, 4, 0, 2)
    with pytest.raises(ValueError, match="mpirun does not tell .* which host rank 0 is on: set MASTER_ADDR"):
        address_of(launch, {})
    assert address_of(launch, {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}) == ("n1", 29500, True)


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


# -- where Gloo and the store listen --------------------------------------------------------------------------------


def place(host: str, *, address: str = "10.0.0.1", loopback: str = "one") -> Place:
    return Place(host, "", address, loopback)


def test_ranks_on_one_host_use_its_loopback():
    """Whatever its own name resolves to, and without one."""
    for own in ("127.0.1.1", "10.0.0.1", ""):
        environment: dict[str, str] = {}
        assert listen_nowhere_else([place("a", address=own), place("b", address=own)], environment) == LOOPBACK
        assert environment == {"GLOO_SOCKET_IFNAME": "lo"}


def test_addresses_that_others_cannot_reach():
    environment: dict[str, str] = {}
    others = [place("a"), place("b", address="10.0.0.2", loopback="two")]
    assert listen_nowhere_else(others, environment) == "10.0.0.1" and not environment
    with pytest.raises(ValueError, match=re.escape("The own name of b (127.0.1.1) resolves to an address that other")):
        listen_nowhere_else([place("a"), place("b", address="127.0.1.1", loopback="two")], environment)
    with pytest.raises(ValueError, match="^b cannot resolve its own name, and Gloo would crash"):
        listen_nowhere_else([place("a"), place("b", address="", loopback="two")], environment)


def test_the_own_name_unless_a_card_is_named():
    environment: dict[str, str] = {}
    assert place_here(environment).address == meeting.own_address() and not environment


@pytest.mark.parametrize("variables", [{"HOROVOD_GLOO_IFACE": "lo"}, {"GLOO_SOCKET_IFNAME": "lo,eth9"}])
def test_a_card_by_its_name(variables):
    """The one that Horovod was told of goes for torch, too; torch's own variable comes first."""
    environment = {"HOROVOD_GLOO_IFACE": "eth9"} | variables
    assert place_here(environment).address == LOOPBACK
    assert environment["GLOO_SOCKET_IFNAME"] == variables.get("GLOO_SOCKET_IFNAME", "lo")


def test_a_card_that_is_not_there():
    with pytest.raises(ValueError, match="is eth9, and .* has no network card eth9 with an IPv4 address: .* lo"):
        place_here({"HOROVOD_GLOO_IFACE": "eth9"})


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
    monkeypatch.setattr(meeting.socket, "getaddrinfo", lambda *arguments, **options: found)
    assert store_address(host, one_host=one_host) == address


# -- ranks that do not meet -----------------------------------------------------------------------------------------

JOIN = """
import sys
from largebatch.launch import meeting
from largebatch.launch.launcher import Launch

place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
try:
    meeting.meet(Launch("torchrun", int(sys.argv[1]), 2), place, limit_s=3)
except RuntimeError as error:
    print(error)
"""


def join(rank: int, port: int) -> str:
    command = [sys.executable, "-c", JOIN, str(rank), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_rank_never_comes(rank):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert join(rank, port).startswith(f"The 2 ranks did not meet at 127.0.0.1, port {port}, within 3 s (")


def test_the_port_is_taken():
    with socket.create_server(("", 0)) as server:
        assert "(address already in use)" in join(0, server.getsockname()[1])
