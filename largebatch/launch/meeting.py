"""Where the ranks of torch.distributed meet: a store of torch, in which each leaves its address.

On one host, the store and Gloo listen at 127.0.0.1 alone; between hosts at the address of each host's own name. Gloo
takes the network card in GLOO_SOCKET_IFNAME or HOROVOD_GLOO_IFACE, if there is one. On Debian the own name may resolve
to 127.0.1.1, which other hosts cannot reach: Gloo would hang, so it is refused.
"""

import json
import os
import re
import socket
import time
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from largebatch.launch.launcher import Launch, read_number

LOOPBACK = "127.0.0.1"
CONNECT_S, PAUSE_S = 10.0, 0.1  # for one try to connect, and between two
# What tells a start of a job from others on its hosts.
START = "SLURM_JOB_ID SLURM_STEP_ID SLURM_RESTART_COUNT TORCHELASTIC_RESTART_COUNT PMIX_NAMESPACE PMI_JOBID".split()


@dataclass(frozen=True)
class Place:
    """What a rank tells the others before they connect."""

    host: str
    node: str  # tells apart two groups of ranks on one host, such as two agents of torchrun
    address: str  # at which Gloo listens; empty if the host's own name does not resolve
    loopback: str  # the same text for two ranks that can reach each other at 127.0.0.1


def place_here(environment: MutableMapping[str, str], node: str = "") -> Place:
    """Return the place of this rank. If only Horovod's variable names a network card, set Gloo's as well."""
    cards = environment.get("GLOO_SOCKET_IFNAME") or environment.get("HOROVOD_GLOO_IFACE", "")
    address = own_address()
    if cards:
        card = cards.partition(",")[0]
        address = card_address(card)
        if not address:
            known = ", ".join(sorted(card for _, card in socket.if_nameindex()))
            raise ValueError(
                f"GLOO_SOCKET_IFNAME or HOROVOD_GLOO_IFACE is {cards}, and {socket.gethostname()} has no network card "
                f"{card} with an IPv4 address: expected one of {known}."
            )
        environment["GLOO_SOCKET_IFNAME"] = cards
    return Place(socket.gethostname(), node, address, _loopback())


def listen_nowhere_else(places: Sequence[Place], environment: MutableMapping[str, str]) -> str:
    """Return the address of rank 0; on one host, let Gloo listen at 127.0.0.1 alone.

    ValueError, the same on all ranks, if other hosts cannot reach a host at its address.
    """
    if len({place.loopback for place in places}) > 1:
        _refuse_unreachable(places)
        return places[0].address
    if card := next((card for _, card in socket.if_nameindex() if card_address(card) == LOOPBACK), ""):
        environment.setdefault("GLOO_SOCKET_IFNAME", card)
    return LOOPBACK


def meet(launch: Launch, environment: MutableMapping[str, str], *, limit_s: float) -> tuple[Any, list[Place]]:
    """Return the store of a start of the job, and the places of all ranks, which come within limit_s; 0: at any time.

    ValueError for settings that cannot work, RuntimeError if not all ranks come. Ranks that could reach each other
    raise the same error.
    """
    from torch.distributed import PrefixStore

    host, port, serves = _address_of_store(launch, environment)
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise ValueError(
            f"{socket.gethostname()} cannot resolve {host}, where the ranks are to meet: add a line with its address "
            "and its name to /etc/hosts, or set MASTER_ADDR to an address of rank 0's host."
        ) from None
    group = "GROUP_RANK" if launch.launcher == "torchrun" else "SLURM_NODEID"
    mine = place_here(environment, environment.get(group, ""))
    try:
        if launch.rank > 0:
            _wait_for_server(host, port, limit_s)
        store = _open_store(host, port, serves, limit=limit_of(limit_s), one_host=launch.local_size == launch.size)
        store = PrefixStore(f"largebatch/{_start(environment)}", store)  # in which no earlier start has left anything
        places = _exchange(store, mine, rank=launch.rank, size=launch.size, limit=limit_of(limit_s))
    except (RuntimeError, OSError) as error:  # torch's text is a page, of which the first line is enough
        cause = os.strerror(error.errno).lower() if isinstance(error, OSError) and error.errno else str(error)
        raise RuntimeError(
            f"The {launch.size} ranks did not meet at {host}, port {port}, within {limit_s:g} s "
            f"({cause.splitlines()[0]}): see that all were started, with the same --run.ranks, and that MASTER_ADDR "
            "and MASTER_PORT, if you set them, are rank 0's and free. --horovod.start_limit_s is the limit."
        ) from None
    return store, places


def _address_of_store(launch: Launch, environment: Mapping[str, str]) -> tuple[str, int, bool]:
    """Return host and port of the store, and whether this process serves it."""
    host, port = environment.get("MASTER_ADDR", ""), read_number(environment, "MASTER_PORT")
    if launch.launcher == "torchrun":
        if not host or port is None:
            raise ValueError(
                f"RANK={launch.rank} and WORLD_SIZE={launch.size} are set without MASTER_ADDR and MASTER_PORT: start "
                "the program with torchrun, or unset RANK and WORLD_SIZE."
            )
        return host, port, launch.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not host:
        one_host = launch.local_size == launch.size or environment.get("SLURM_STEP_NUM_NODES") == "1"
        host = LOOPBACK if one_host else first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if not host:
        raise ValueError(
            f"{launch.launcher} does not tell the ranks of torch.distributed which host rank 0 is on: set MASTER_ADDR "
            "to that host's name or address on all ranks (mpirun -x MASTER_ADDR=...), or leave --run.ranks out."
        )
    # A port of its own for each start, below those that the kernel gives to any program.
    return host, port or 20000 + zlib.crc32(_start(environment).encode()) % 12000, launch.rank == 0


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's compact list: node07 for node[07-12,31],login."""
    return re.split(r",(?![^\[]*\])", re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes))[0]


def _start(environment: Mapping[str, str]) -> str:
    return "-".join(environment.get(name, "") for name in START)


def limit_of(seconds: float) -> timedelta:
    """Return a limit for torch.distributed, which knows none that is endless; 0: ten years."""
    return timedelta(seconds=seconds) if seconds else timedelta(days=3650)


def _wait_for_server(host: str, port: int, limit_s: float) -> None:
    """Wait until somebody listens; torch's own client would print pages. OSError if nobody does in time."""
    end = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError:
            if limit_s and time.monotonic() > end:
                raise
            time.sleep(PAUSE_S)


def _open_store(host: str, port: int, serves: bool, *, limit: timedelta, one_host: bool) -> Any:
    from torch.distributed import TCPStore

    if serves and (address := store_address(host, one_host=one_host)):
        return serve_store(address, port, limit=limit)
    return TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False)


def store_address(host: str, *, one_host: bool) -> str:
    """Return the address at which rank 0 serves the store that all ranks look for at `host`; empty for all addresses.

    It is empty if `host` is not this host's, as with a Kubernetes service, and if it is a name for a loopback address
    although other hosts may come, which must be able to tell why they cannot stay.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda one: one[0] != socket.AF_INET)  # as Gloo knows IPv4 alone
    address = str(found[0][4][0])
    if host not in (address, "localhost") and address.startswith("127.") and not one_host:
        return ""
    with socket.socket(found[0][0]) as probe, suppress(OSError):
        probe.bind((address, 0))
        return address
    return ""


def serve_store(address: str, port: int = 0, *, limit: timedelta = timedelta(seconds=300)) -> Any:
    """Return a store of torch that this process serves at an IP address, not at all of them, as torch would by itself.

    port: 0 for any free one. limit: the longest wait for a key. OSError if it cannot listen there.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=2048)
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _exchange(store: Any, mine: Place, *, rank: int, size: int, limit: timedelta) -> list[Place]:
    """Return every rank's place. Rank 0, which may serve the store, waits until all have read them."""
    keys = [f"place/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(asdict(mine)))
    store.wait(keys, limit)
    places = [Place(**json.loads(text)) for text in store.multi_get(keys)]
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{other}" for other in range(size)], limit)
    return places


# -- addresses ---------------------------------------------------------------------------------------------------


def own_address() -> str:
    """Return the address of this host's own name; empty if it has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def card_address(card: str) -> str:
    """Return the IPv4 address of a network card, empty if there is none."""
    import psutil

    found = [one.address for one in psutil.net_if_addrs().get(card, []) if one.family == socket.AF_INET]
    return found[0] if found else ""


def _loopback() -> str:
    """Return a text for the kernel and the network namespace, in which processes reach each other at 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _refuse_unreachable(places: Sequence[Place]) -> None:
    """Raise the same ValueError on all ranks if other hosts cannot reach a host at its address."""
    refuse_nameless(sorted({place.host for place in places if not place.address}))
    local = sorted({f"{place.host} ({place.address})" for place in places if place.address.startswith("127.")})
    if local:
        raise ValueError(
            f"The own name of {', '.join(local)} resolves to an address that other hosts cannot reach: give it the "
            "address of its network in /etc/hosts there."
        )


def refuse_nameless(hosts: Sequence[str]) -> None:
    """Raise ValueError if there are hosts whose own name does not resolve."""
    if hosts:
        raise ValueError(
            f"{', '.join(hosts)} cannot resolve its own name, and Gloo would crash: add a line with its address and "
            "its name to /etc/hosts there."
        )
