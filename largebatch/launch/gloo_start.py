"""The start of Horovod's Gloo controller for ranks that MPI cannot bring together.

These are ranks of torchrun, and of an srun whose PMI Horovod's MPI does not speak. `prepare` sets what
`horovodrun --gloo` would have set.
"""

import ctypes
import json
import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from largebatch.launch.gloo_address import (
    LOOPBACK,
    GlooAddress,
    gloo_address,
    loopback,
    loopback_card,
    on_one_host,
    own_address,
    refuse_nameless,
    refuse_unreachable,
    store_address,
)
from largebatch.launch.launcher import GLOO_RENDEZVOUS, Launch, is_slurm_pmix, read_number

# Gloo's controller sends 2 (n - 1) messages one after the other before each reduction: 6 to 20 ms with 200 ranks.
MOST_RANKS = 32
JOIN_LIMIT_S = 300  # from the first rank that comes to the last one, which may still be importing torch


class Rendezvous:
    """The variables set for Gloo, the store, and rank 0's server of addresses; they stay until Horovod ends."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._environment = environment
        self._before: dict[str, str | None] = {}
        self._server: Any = None
        self.store: Any = None

    def serve(self, address: str, slots: Sequence["Slot"]) -> dict[str, str]:
        """Start a server of addresses; return the variables with which Horovod finds it."""
        from horovod.runner.common.util.hosts import SlotInfo

        from largebatch.launch.gloo_server import AddressServer

        self._server = AddressServer(address, [SlotInfo(**asdict(slot)) for slot in slots])
        return dict(zip(GLOO_RENDEZVOUS, (self._server.host, str(self._server.server_port))))

    def set(self, variables: Mapping[str, str]) -> None:
        self._before = {name: self._environment.get(name) for name in variables}
        self._environment.update(variables)

    def close(self) -> None:
        """Restore the environment and end the server, after every rank has ended Horovod."""
        for name, value in self._before.items():
            if value is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = value
        self._before = {}
        if self._server is not None:
            self._server.stop()
        self._server = self.store = None


@dataclass(frozen=True)
class Slot:
    """The numbers of a rank: among all, on its host, and (cross) among those with its local rank."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def mpi_version(library: str) -> str:
    """Return the version text of the MPI of a shared library, without starting MPI."""
    text = ctypes.create_string_buffer(8192)  # the longest MPI_MAX_LIBRARY_VERSION_STRING, MPICH's
    ctypes.CDLL(library).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    return text.value.decode(errors="replace")


def prepare(launch: Launch, environment: MutableMapping[str, str], *, mpi: str) -> Rendezvous:
    """Do the launcher's work for `hvd.init()` if needed; every rank closes the result after `hvd.shutdown()`.

    mpi: `mpi_version` of Horovod's MPI, empty without MPI. ValueError for settings that cannot work, RuntimeError if
    not all ranks come. Ranks that could reach each other raise the same error.
    """
    rendezvous = Rendezvous(environment)
    if launch.launcher == "horovodrun --gloo":
        refuse_many(launch)
        refuse_nameless([socket.gethostname()] if not own_address() else [])
    elif needs_gloo(launch, environment, mpi):
        refuse_many(launch)
        variables = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        if launch.size > 1:
            variables |= _meet(launch, environment, rendezvous)
        rendezvous.set(variables)
    return rendezvous


def refuse_many(launch: Launch) -> None:
    if launch.size > MOST_RANKS:
        raise ValueError(
            f"{launch.launcher} has started {launch.size} ranks that speak by Gloo, expected at most {MOST_RANKS}: "
            f"before each reduction Gloo sends {2 * (launch.size - 1)} messages one after the other; start the ranks "
            "with mpirun, horovodrun --mpi or `srun --mpi=pmix`."
        )


def needs_gloo(launch: Launch, environment: Mapping[str, str], mpi: str) -> bool:
    """Return whether Horovod must start without MPI; ValueError if HOROVOD_CONTROLLER forbids it."""
    controller = environment.get("HOROVOD_CONTROLLER", "").lower()
    if controller == "gloo" and launch.launcher in ("mpirun", "mpiexec") and launch.size > 1:
        raise ValueError(
            f"HOROVOD_CONTROLLER=gloo is set, but {launch.launcher} does not tell Gloo its ranks: unset it, or use "
            "`horovodrun --gloo`."
        )
    if controller == "mpi" and launch.launcher == "torchrun" and launch.size > 1:
        raise ValueError("HOROVOD_CONTROLLER=mpi is set, but torchrun does not start MPI: unset it, or use mpirun.")
    if launch.size > 1 and launch.launcher == "torchrun":
        return True
    if launch.launcher in ("mpirun", "mpiexec") or controller == "mpi" or "SLURM_STEP_ID" not in environment:
        return False
    return not _speaks(environment, mpi)


def _speaks(environment: Mapping[str, str], mpi: str) -> bool:
    """Return whether Horovod's MPI can ask this srun for its rank. Open MPI would end the process if it cannot."""
    if is_slurm_pmix(environment):
        return mpi.startswith("Open MPI")
    return "PMI_FD" in environment and mpi.startswith("MPICH")  # srun --mpi=pmi2


def _meet(launch: Launch, environment: Mapping[str, str], rendezvous: Rendezvous) -> dict[str, str]:
    """Exchange addresses with all ranks; return the variables for Gloo's controller."""
    host, port, serves = _store_address(launch, environment)
    _refuse_unresolved(host)
    node = environment.get("GROUP_RANK" if launch.launcher == "torchrun" else "SLURM_NODEID", "")
    card = environment.get("HOROVOD_GLOO_IFACE", "")
    mine = GlooAddress(socket.gethostname(), node, gloo_address(card), loopback())
    try:
        rendezvous.store = _open_store(host, port, serves, launch, environment)
        addresses = _exchange(rendezvous.store, mine, rank=launch.rank, size=launch.size)
        refuse_unreachable(addresses)
        one_host, slots = on_one_host(addresses), number_slots(addresses)
        if launch.rank == 0:
            start_server(rendezvous, LOOPBACK if one_host else mine.address, slots)
        server = find_server(rendezvous.store)
    except RuntimeError as error:  # torch's store raises it with a page of text, of which the first line is enough
        rendezvous.close()
        raise RuntimeError(
            f"The {launch.size} ranks did not meet at {host}, port {port}, within {JOIN_LIMIT_S} s "
            f"({str(error).splitlines()[0]}): see that all were started and that MASTER_ADDR and MASTER_PORT, if you "
            "set them, are rank 0's and free."
        ) from None
    except ValueError:
        rendezvous.close()
        raise
    only_here = {"HOROVOD_GLOO_IFACE": loopback_card()} if one_host and not card else {}
    slot = {f"HOROVOD_{name.upper()}": str(value) for name, value in asdict(slots[launch.rank]).items()}
    return slot | server | only_here


def start_server(rendezvous: Rendezvous, address: str, slots: Sequence["Slot"]) -> None:
    """Start rank 0's server; tell all ranks how to find it, or why it could not start."""
    try:
        server = rendezvous.serve(address, slots)
    except OSError as error:
        server = {
            "error": f"{socket.gethostname()} cannot listen at {address}, the address of its own name "
            f"({error.strerror}): give it the address of its network in /etc/hosts there, or set HOROVOD_GLOO_IFACE to "
            "its network card."
        }
    rendezvous.store.set("server", json.dumps(server))


def find_server(store: Any) -> dict[str, str]:
    """Return the variables for rank 0's server; ValueError on all ranks if it could not start."""
    server: dict[str, str] = json.loads(store.get("server"))
    if "error" in server:
        raise ValueError(server["error"])
    return server


def _store_address(launch: Launch, environment: Mapping[str, str]) -> tuple[str, int, bool]:
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
        one_host = environment.get("SLURM_STEP_NUM_NODES") == "1"
        host = "127.0.0.1" if one_host else first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if port is None:  # a port of its own for each step, below those that the kernel gives to any program
        port = 20000 + (int(environment.get("SLURM_JOB_ID", "0")) * 31 + int(environment["SLURM_STEP_ID"])) % 12000
    return host, port, launch.rank == 0


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's compact list: node07 for node[07-12,31],login."""
    return re.split(r",(?![^\[]*\])", re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes))[0]


def _refuse_unresolved(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise ValueError(
            f"{socket.gethostname()} cannot resolve {host}, where the ranks are to meet: add a line with its address "
            "and its name to /etc/hosts, or set MASTER_ADDR to an address of rank 0's host."
        ) from None


def _open_store(host: str, port: int, serves: bool, launch: Launch, environment: Mapping[str, str]) -> Any:
    """Open the part of torch's key-value store that belongs to this start of the job."""
    from torch.distributed import PrefixStore, TCPStore

    limit = timedelta(seconds=JOIN_LIMIT_S)
    address = store_address(host, one_host=launch.local_size == launch.size) if serves else ""
    if address:
        from largebatch.launch.gloo_server import serve_store

        try:
            store = serve_store(address, port, limit=limit)
        except OSError as error:
            raise RuntimeError(os.strerror(error.errno or 0).lower()) from None
    else:
        store = TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False)
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    start = "-".join(environment.get(name, "") for name in names)
    return PrefixStore(f"largebatch/{start}", store)


def _exchange(store: Any, mine: GlooAddress, *, rank: int, size: int) -> list[GlooAddress]:
    """Return every rank's address. Rank 0, which may serve the store, waits until all have read them."""
    limit = timedelta(seconds=JOIN_LIMIT_S)
    keys = [f"address/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(asdict(mine)))
    store.wait(keys, limit)
    addresses = [GlooAddress(**json.loads(text)) for text in store.multi_get(keys)]
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{other}" for other in range(size)], limit)
    return addresses


def number_slots(addresses: Sequence[GlooAddress]) -> list[Slot]:
    """Number the ranks as Horovod does under MPI."""
    by_host: dict[str, list[int]] = {}
    for rank, address in enumerate(addresses):
        by_host.setdefault(address.label, []).append(rank)
    slots = []
    for rank, address in enumerate(addresses):
        on_host = by_host[address.label]
        local_rank = on_host.index(rank)
        peers = [ranks[local_rank] for ranks in by_host.values() if len(ranks) > local_rank]
        sizes = {"size": len(addresses), "local_size": len(on_host), "cross_size": len(peers)}
        slots.append(Slot(address.label, rank, local_rank, cross_rank=peers.index(rank), **sizes))
    return slots
