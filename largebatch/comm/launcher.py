"""Who started this process, and how its ranks find each other where MPI cannot tell them.

Each launcher announces rank and size in variables of its own. `recognise` reads them all and refuses what cannot be
meant; Horovod by itself looks at some of them, and trains alone on every rank where it misses the others. Under
torchrun, and under an srun whose PMI Horovod's MPI does not speak, `prepare` gives Horovod's Gloo controller what
`horovodrun --gloo` would have given it.

Being nested is not ambiguous: in an allocation of Slurm mpirun, mpiexec and torchrun are started, on each host, by a
step that has one task there. Two launchers that each counted other ranks are.
"""

import ctypes
import json
import re
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Mapping, MutableMapping, Sequence

from largebatch.bind import counts
from largebatch.comm.gloo_address import Place, loopback, own_address, refuse_nameless, refuse_unreachable

JOIN_LIMIT_S = 300  # from the first rank that comes to the last one, which may still be importing torch
DOCTOR = "run `python -m largebatch.doctor`"
GLOO_RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
GLOO_PLACE = tuple(
    "HOROVOD_" + name for name in "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME".split()
)
PLAIN_STEPS = 0xFFFFFFF0  # Slurm numbers from here on what are no steps of a program: the batch script, salloc's shell


@dataclass(frozen=True)
class Launch:
    """What the launcher announced to this process; None where it does not say."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None


@dataclass(frozen=True)
class Variables:
    """Where a launcher announces; rank and size make a launch, the others may be missing."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


HOROVODRUN = Variables(
    "horovodrun --gloo", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
)
TORCHRUN = Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPIRUN = Variables(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPIEXEC = Variables("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SRUN = Variables("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
FAMILIES = {family.launcher: family for family in (HOROVODRUN, TORCHRUN, MPIRUN, MPIEXEC, SRUN)}


# -- recognising ---------------------------------------------------------------------------------------------------


def recognise(environment: Mapping[str, str]) -> Launch:
    """The launch that this process is a rank of; `python` for none.

    ValueError for variables of two launchers that contradict each other, variables of one that are not complete,
    Horovod's elastic mode, and a program that was started once where Slurm was asked for several tasks.
    """
    _refuse_elastic(environment)
    claims = [claim for family in _families(environment) if (claim := _claim(family, environment))]
    several = [claim for claim in claims if claim.size > 1]
    for claim in several:
        others = [other for other in several if other is not claim]
        if all(_agree(claim, other, environment) or _carries(other, claim, environment) for other in others):
            return claim
    if several:
        raise ValueError(_ambiguous(several))
    if not claims:
        _refuse_forgotten(environment)
    return claims[0] if claims else Launch("python")


def _families(environment: Mapping[str, str]) -> list[Variables]:
    """The launchers that may have set variables here, those first that tell most where several agree."""
    families = [HOROVODRUN, MPIRUN]
    if "TORCHELASTIC_RUN_ID" in environment:
        families.insert(1, TORCHRUN)
    if "PMI_JOBID" not in environment or "SLURM_STEP_ID" not in environment:  # otherwise PMI_* are srun's
        families.append(MPIEXEC)
    if _is_step(environment):
        families.append(SRUN)
    if TORCHRUN not in families and environment.get("WORLD_SIZE") != "1":
        families.append(TORCHRUN)  # set by hand or by a scheduler, as torch.distributed wants them
    return families


def _is_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process, or one above it; a batch script and salloc's shell are no such steps."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < PLAIN_STEPS


def _is_slurm_pmix(environment: Mapping[str, str]) -> bool:
    """Whether srun --mpi=pmix started this process, and no mpirun after it."""
    return environment.get("PMIX_NAMESPACE", "").startswith("slurm.")


def _claim(family: Variables, environment: Mapping[str, str]) -> Launch | None:
    """What one launcher's variables say, if they are there."""
    size = _number(environment, family.size)
    if size is None:
        return None
    rank = _number(environment, family.rank)
    missing = [family.rank] if rank is None else []
    if family is HOROVODRUN:
        missing = [name for name in GLOO_PLACE + GLOO_RENDEZVOUS if not environment.get(name)]
    if size > 1 and missing:
        raise ValueError(
            f"{family.size}={size} is set without {', '.join(missing)}, so {family.launcher} did not start this "
            f"process: use a launcher, or unset {family.size}."
        )
    if rank is None or missing:
        return None
    if not 0 <= rank < size:
        raise ValueError(f"{family.rank}={rank} is no rank of {family.size}={size}: unset both, or use a launcher.")
    local_size = _step_local_size(environment) if family is SRUN else _number(environment, family.local_size)
    return Launch(family.launcher, rank, size, _number(environment, family.local_rank), local_size)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text} should be a number, as a launcher sets it: unset it.") from None


def _step_local_size(environment: Mapping[str, str]) -> int | None:
    """How many tasks of the step are on this host: SLURM_STEP_TASKS_PER_NODE is 2(x3),1 for 2, 2, 2 and 1."""
    sizes = counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environment, "SLURM_NODEID")
    return sizes[node] if node is not None and node < len(sizes) else None


def _agree(one: Launch, other: Launch, environment: Mapping[str, str]) -> bool:
    """Whether both mean the same rank; not if one started the other, as all ranks then see the same outer one."""
    launchers = {one.launcher, other.launcher}
    nested = "torchrun" in launchers and "TORCHELASTIC_RUN_ID" in environment
    if "srun" in launchers and not launchers.isdisjoint({"mpirun", "mpiexec"}):
        nested = not _is_slurm_pmix(environment)  # otherwise Open MPI itself set its variables, in a parent
    return not nested and (one.rank, one.size) == (other.rank, other.size)


def _carries(outer: Launch, inner: Launch, environment: Mapping[str, str]) -> bool:
    """Whether the tasks of `outer` are not ranks but what starts the ranks of `inner` on each host."""
    if inner.launcher == "torchrun":
        return _number(environment, "GROUP_WORLD_SIZE") == outer.size  # one agent per task
    spans_hosts = inner.local_size is not None and inner.local_size < inner.size
    return outer.launcher == "srun" and inner.launcher in ("mpirun", "mpiexec") and spans_hosts


def _seen(claim: Launch) -> tuple[str, str]:
    """The variables behind a claim, with their values and without."""
    family = FAMILIES[claim.launcher]
    return f"{family.rank}={claim.rank} {family.size}={claim.size}", f"{family.rank} {family.size}"


def _ambiguous(claims: Sequence[Launch]) -> str:
    said = " and ".join(f"{claim.launcher} ({_seen(claim)[0]})" for claim in claims)
    unset = ", ".join(f"`unset {_seen(claim)[1]}` if {claim.launcher} did not start it" for claim in claims)
    return f"Each of {said} claims to have started this process: use one launcher alone, or {unset}."


def _refuse_elastic(environment: Mapping[str, str]) -> None:
    if environment.get("HOROVOD_ELASTIC", "0") not in ("", "0"):
        raise ValueError(
            "HOROVOD_ELASTIC is set: ranks that come and go would break the numbered batches of a run; start "
            "horovodrun without --host-discovery-script, --min-np and --max-np, and start the same command again "
            "after a loss, since a run resumes with any number of ranks."
        )


def _refuse_forgotten(environment: Mapping[str, str]) -> None:
    tasks = _number(environment, "SLURM_NTASKS")
    if tasks is not None and tasks > 1:
        raise ValueError(
            f"SLURM_NTASKS={tasks} tasks were asked for, but this program was started as one process: write "
            f"`mpirun -np {tasks}` or `srun` before it, or unset SLURM_NTASKS to train alone."
        )


def mismatch(launch: Launch, *, rank: int, size: int, local_rank: int, local_size: int) -> str:
    """One sentence if Horovod sees another place of this process than its launcher announced, else an empty text."""
    seen = (rank, size, local_rank, local_size)
    announced = (launch.rank, launch.size, launch.local_rank, launch.local_size)
    if all(said in (None, found) for said, found in zip(announced, seen)):
        return ""
    if size == 1:
        return (
            f"{launch.launcher} announced rank {launch.rank} of {launch.size}, but Horovod sees 1 process: each would "
            f"train alone, as the launcher's MPI is not the one Horovod was built with; {DOCTOR}."
        )
    return (
        f"{launch.launcher} announced rank {launch.rank} of {launch.size}, local rank {launch.local_rank} of "
        f"{launch.local_size}, but Horovod sees rank {rank} of {size}, local rank {local_rank} of {local_size}: the "
        f"launcher's MPI is not the one Horovod was built with; {DOCTOR}."
    )


# -- starting ------------------------------------------------------------------------------------------------------


class Rendezvous:
    """The variables set for Gloo, the store and the server behind them; what stays until Horovod is left."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._environment = environment
        self._before: dict[str, str | None] = {}
        self._server: Any = None
        self.store: Any = None

    def serve(self) -> int:
        """Start Horovod's server of addresses in a thread; its port."""
        from horovod.runner.http.http_server import RendezvousServer

        self._server = RendezvousServer()
        return int(self._server.start())

    def expect(self, slots: Sequence["Slot"]) -> None:
        """Tell the server who will come: it keeps addresses until the last of them has read them."""
        from horovod.runner.common.util.hosts import SlotInfo

        self._server.init([SlotInfo(**asdict(slot)) for slot in slots])

    def set(self, variables: Mapping[str, str]) -> None:
        """Set all of these, until `close`."""
        self._before = {name: self._environment.get(name) for name in variables}
        self._environment.update(variables)

    def close(self) -> None:
        """Give the environment back as it was and end the server; after every rank has left Horovod."""
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
    """A rank's place among all, on its host, and among the ranks with its number on other hosts."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def mpi_version(library: str) -> str:
    """What the MPI says of itself that a shared library is linked with; MPI is not started by that."""
    text = ctypes.create_string_buffer(8192)  # MPI_MAX_LIBRARY_VERSION_STRING of MPICH, the longest
    ctypes.CDLL(library).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    return text.value.decode(errors="replace")


def prepare(launch: Launch, environment: MutableMapping[str, str], *, mpi: str) -> Rendezvous:
    """Do what is missing for `hvd.init()`; close what comes back after `hvd.shutdown()`, on every rank.

    mpi: the text of `mpi_version` for Horovod's MPI, empty if it has none. ValueError for settings that cannot work,
    RuntimeError if not all ranks come; where the ranks could talk to each other, all raise the same.
    """
    rendezvous = Rendezvous(environment)
    if launch.launcher == "horovodrun --gloo":
        refuse_nameless([socket.gethostname()] if not own_address() else [])
    elif _needs_gloo(launch, environment, mpi):
        variables = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        if launch.size > 1:
            variables |= _meet(launch, environment, rendezvous)
        rendezvous.set(variables)
    return rendezvous


def _needs_gloo(launch: Launch, environment: Mapping[str, str], mpi: str) -> bool:
    """Whether Horovod is to be started without MPI, which then needs telling; ValueError if it was told otherwise."""
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
    """Whether Horovod's MPI can ask this srun who it is; in a step Open MPI ends the process where it cannot."""
    if _is_slurm_pmix(environment):
        return mpi.startswith("Open MPI")
    return "PMI_FD" in environment and mpi.startswith("MPICH")  # srun --mpi=pmi2


def _meet(launch: Launch, environment: Mapping[str, str], rendezvous: Rendezvous) -> dict[str, str]:
    """Exchange places with all ranks; the variables that Gloo's controller reads."""
    host, port, serves = _store_address(launch, environment)
    _refuse_unresolved(host)
    is_first = launch.rank == 0
    node = environment.get("GROUP_RANK" if launch.launcher == "torchrun" else "SLURM_NODEID", "")
    mine = Place(
        socket.gethostname(), node, own_address(), loopback(), port=rendezvous.serve() if is_first else 0
    )
    try:
        rendezvous.store = _open_store(host, port, serves, environment)
        places = _exchange(rendezvous.store, mine, rank=launch.rank, size=launch.size)
        refuse_unreachable(places)
        slots = _slots(places)
        if is_first:
            rendezvous.expect(slots)
            rendezvous.store.set("ready", "")
        rendezvous.store.wait(["ready"], timedelta(seconds=JOIN_LIMIT_S))
    except RuntimeError as error:  # of torch's store, whose text is a page
        rendezvous.close()
        raise RuntimeError(
            f"The {launch.size} ranks did not meet at {host}, port {port}, within {JOIN_LIMIT_S} s "
            f"({str(error).splitlines()[0]}): see that all were started and that MASTER_ADDR and MASTER_PORT, if you "
            "set them, are rank 0's and free."
        ) from None
    except ValueError:
        rendezvous.close()
        raise
    return _gloo_variables(slots[launch.rank], address=places[0].address, port=places[0].port)


def _store_address(launch: Launch, environment: Mapping[str, str]) -> tuple[str, int, bool]:
    """Host and port of the store, and whether this process serves it."""
    host, port = environment.get("MASTER_ADDR", ""), _number(environment, "MASTER_PORT")
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
    if port is None:  # below those that the kernel gives to anyone; another one for each step
        port = 20000 + (int(environment.get("SLURM_JOB_ID", "0")) * 31 + int(environment["SLURM_STEP_ID"])) % 12000
    return host, port, launch.rank == 0


def first_host(nodes: str) -> str:
    """The first of Slurm's compact list: node07 of node[07-12,31],login."""
    return re.split(r",(?![^\[]*\])", re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes))[0]


def _refuse_unresolved(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise ValueError(
            f"{socket.gethostname()} cannot resolve {host}, where the ranks are to meet: add a line with its address "
            "and its name to /etc/hosts, or set MASTER_ADDR to an address of rank 0's host."
        ) from None


def _open_store(host: str, port: int, serves: bool, environment: Mapping[str, str]) -> Any:
    """torch's store of keys and values, the part of it that belongs to this start of the job."""
    from torch.distributed import PrefixStore, TCPStore

    limit = timedelta(seconds=JOIN_LIMIT_S)
    store = TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False)
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    start = "-".join(environment.get(name, "") for name in names)
    return PrefixStore(f"largebatch/{start}", store)


def _exchange(store: Any, mine: Place, *, rank: int, size: int) -> list[Place]:
    """Every rank's place, in rank order. Rank 0, which may be serving the store, goes on when all have read it."""
    limit = timedelta(seconds=JOIN_LIMIT_S)
    keys = [f"place/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(asdict(mine)))
    store.wait(keys, limit)
    places = [Place(**json.loads(text)) for text in store.multi_get(keys)]
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{other}" for other in range(size)], limit)
    return places


def _slots(places: Sequence[Place]) -> list[Slot]:
    """Horovod's three numberings of the ranks."""
    by_host: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_host.setdefault(place.label, []).append(rank)
    slots = []
    for rank, place in enumerate(places):
        on_host = by_host[place.label]
        local_rank = on_host.index(rank)
        peers = [ranks[local_rank] for ranks in by_host.values() if len(ranks) > local_rank]
        slot = Slot(
            place.label,
            rank=rank,
            local_rank=local_rank,
            cross_rank=peers.index(rank),
            size=len(places),
            local_size=len(on_host),
            cross_size=len(peers),
        )
        slots.append(slot)
    return slots


def _gloo_variables(slot: Slot, *, address: str, port: int) -> dict[str, str]:
    place = {f"HOROVOD_{name.upper()}": str(value) for name, value in asdict(slot).items()}
    return place | dict(zip(GLOO_RENDEZVOUS, (address, str(port))))
