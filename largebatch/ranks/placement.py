"""The placement of the ranks: on which host, which cores and which GPU each one computes."""

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from largebatch.launch import bind, cores
from largebatch.launch.cores import Cores, share_of_cores
from largebatch.ranks.preflight import SHOWN, name_ranks
from largebatch.ranks.stopped import Stopped

if TYPE_CHECKING:
    from largebatch.ranks.ranks import Ranks

logger = logging.getLogger(__name__)

FILLED, SCARCE = 0.1, 0.5  # parts of a GPU's memory: with less free, a run cannot start, or may soon run out of it


def check_placement(comm: "Ranks", device: torch.device, *, loader_threads: int | None) -> list[str]:
    """Describe where the ranks compute, one line per host; rank 0 warns of ranks with too few cores or GPU memory.

    loader_threads: those of the config; None: by the cores of each rank. A collective: all ranks raise Stopped if two
    would use one GPU, or if another process fills one.
    """
    with comm.together("looking at the GPU"):
        mine = Place(
            host=socket.gethostname(),
            pid=os.getpid(),
            local_rank=comm.local_rank,
            device=str(device),
            gpu=gpu_names(device),
            cores=comm.cores,
            torch_threads=torch.get_num_threads(),
            loader_threads=loader_threads or cores.loader_threads(comm.num_cores),
            memory=torch.cuda.mem_get_info(device) if device.type == "cuda" else None,
        )
    places = comm.allgather_object(mine, name="placement")
    refused = shared_gpus(places) or filled_gpus(places, needed=FILLED)
    if refused:
        raise Stopped(refused)
    for doubtful in (short_of_cores(places, asked=loader_threads), filled_gpus(places, needed=SCARCE)):
        if doubtful and comm.rank == 0:
            logger.warning("%s", doubtful)
    return by_host(places)


def gpu_names(device: torch.device) -> tuple[str, str]:
    """Return the UUID of a GPU, or of its part (MIG), and the PCI address; empty for a CPU."""
    if device.type == "cpu":
        return "", ""
    found: Any = torch.cuda.get_device_properties(device)  # whose stub lacks what follows
    return str(found.uuid), f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"


@dataclass(frozen=True)
class Place:
    """The place of one rank. gpu: see `gpu_names`. memory: free bytes of its GPU, and all; None on a CPU."""

    host: str
    pid: int
    local_rank: int
    device: str
    gpu: tuple[str, str]
    cores: Cores
    torch_threads: int
    loader_threads: int
    memory: tuple[int, int] | None = None


def shared_gpus(places: Sequence[Place]) -> str:
    """Return a sentence with the ranks that would share a GPU; empty if none do."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        for name in zip(("", place.host), place.gpu):
            users.setdefault(name, []).append(rank)
    clauses: dict[str, str] = {}
    for (host, gpu), ranks in users.items():
        if gpu and len(ranks) > 1:
            who, some = name_ranks(ranks, [place.host for place in places]), [places[rank] for rank in ranks[:SHOWN]]
            seen_as = ", ".join(f"{place.device} of local rank {place.local_rank}" for place in some)
            parts = ", of which NCCL takes one part (MIG) alone" if host else ""
            clauses.setdefault(who, f"{who} share GPU {gpu}{parts} ({seen_as})")
    remedy = "give each rank a GPU of its own, or start fewer ranks per host."
    return f"{'; '.join([*clauses.values()][:SHOWN])}: {remedy}" if clauses else ""


def filled_gpus(places: Sequence[Place], *, needed: float) -> str:
    """Return a sentence with the ranks whose GPU has less than this part of its memory free."""
    filled: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        free, total = place.memory or (1, 1)
        if free < needed * total:
            filled.setdefault(f"{free / 2**30:.1f} of {total / 2**30:.0f} GiB of GPU memory free", []).append(rank)
    hosts = [place.host for place in places]
    clauses = [f"{name_ranks(of, hosts)} {'has' if len(of) == 1 else 'have'} {found}" for found, of in filled.items()]
    rest = "another process has the rest (nvidia-smi names it), so end it, or choose others with CUDA_VISIBLE_DEVICES."
    return f"{'; '.join(clauses[:SHOWN])}: {rest}" if clauses else ""


def by_host(places: Sequence[Place]) -> list[str]:
    """Return lines like "n1: rank 0 cuda:0 (pid 4711), rank 1 cuda:1 (pid 4712); ranks 0-1: cores 0-7 ..."."""
    hosts: dict[str, list[str]] = {}
    resources: dict[str, dict[str, list[int]]] = {}
    for rank, (place, num_cores) in enumerate(zip(places, shares_of_cores(places))):
        hosts.setdefault(place.host, []).append(f"rank {rank} {place.device} (pid {place.pid})")
        shared = "" if num_cores == len(place.cores.allowed) else f" ({num_cores:.3g} for each rank)"
        threads = f"threads: {place.torch_threads} of torch, {place.loader_threads} of the loader"
        resources.setdefault(place.host, {}).setdefault(f"{place.cores}{shared}, {threads}", []).append(rank)
    lines = []
    for host, ranks in hosts.items():
        each = [f"rank{'s' * (len(of) > 1)} {bind.ranges(of)}: {text}" for text, of in resources[host].items()]
        lines.append(f"{host}: {', '.join(ranks)}; {'; '.join(each)}")
    return lines


def shares_of_cores(places: Sequence[Place]) -> list[float]:
    of_host: dict[str, list[Cores]] = {}
    for place in places:
        of_host.setdefault(place.host, []).append(place.cores)
    return [share_of_cores(place.cores, of_host[place.host]) for place in places]


def short_of_cores(places: Sequence[Place], *, asked: int | None) -> str:
    """Return a sentence with the ranks that have too few cores for their threads, and the remedy.

    asked: --data.num_threads; if None, a rank on a single core is named only if the launcher bound it there although
    the host has more, or if it has less than a core.
    """
    short: dict[str, list[int]] = {}
    for rank, (place, num_cores) in enumerate(zip(places, shares_of_cores(places))):
        if place.cores.physical == 1 and len(place.cores.allowed) < place.cores.host_cores:
            found = f"bound to a single core, of {place.cores.host_cores}: start mpirun with --bind-to none, or with "
            found += "--map-by slot:PE=N for N cores each (Slurm: --cpus-per-task; a container: its set of CPUs)"
        elif asked is not None and num_cores < asked + 1:
            found = f"given {num_cores:.3g} core{'s' * (num_cores != 1)} for {asked} loader thread{'s' * (asked > 1)} "
            found += "and the training: leave --data.num_threads out, or start fewer ranks per host"
        elif num_cores < 1:
            found = f"given {num_cores:.3g} cores each: start fewer ranks per host, or raise their CPU limit"
        else:
            continue
        short.setdefault(found, []).append(rank)
    hosts = [place.host for place in places]
    clauses = [f"{name_ranks(of, hosts)} {'is' if len(of) == 1 else 'are'} {found}" for found, of in short.items()]
    return f"{'; '.join(clauses[:SHOWN])}." if clauses else ""
