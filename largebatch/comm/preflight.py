"""What must be the same on all ranks before the first step, and who differs.

Each rank publishes its `RankReport`: its host and its traits (versions, our own source files, every option of the
config), and later its `Place`. Hosts drift apart unseen: one was updated, one holds an old checkout, one rank came
from another command line; such a run trains, and means nothing. Values are texts, so that ranks with different
versions of anything can still read each other.
"""

import hashlib
import importlib.metadata
import platform
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Sequence

from largebatch.comm.cores import Cores, compact, part

PACKAGES = ("torch", "horovod", "nvidia-dali-cuda120", "timm", "numpy", "torchvision", "safetensors", "pillow")
SHOWN = 4  # differences in one message; a rank with another recipe has dozens
SOURCES = "the sources of largebatch"


@dataclass(frozen=True)
class RankReport:
    """One rank: its host, and its traits, which all ranks must share (an option's name begins with --)."""

    host: str
    traits: dict[str, str]


def report_rank(options: Mapping[str, object]) -> RankReport:
    """The report of this process. options: every option of the config by its dotted name."""
    traits = {"Python": platform.python_version(), SOURCES: sources_digest()}
    traits |= {package: installed_version(package) for package in PACKAGES}
    traits |= {f"--{name}": str(value) for name, value in options.items()}
    return RankReport(socket.gethostname(), traits)


def installed_version(package: str) -> str:
    """As its metadata says; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def sources_digest() -> str:
    """Eight digits for the contents of all Python and C++ files of largebatch and zoo, wherever they lie."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    folders = (root / package for package in ("largebatch", "zoo"))
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp")):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def versions(report: RankReport) -> str:
    """One line for the log of a run: "Python 3.11.7, torch 2.13.0, ..."."""
    return ", ".join(f"{name} {value}" for name, value in report.traits.items() if not name.startswith("--"))


def disagreement(reports: Sequence[RankReport]) -> str:
    """One sentence naming the ranks that differ from most, both values, and what to do; empty if all agree.

    Where two values have the same number of ranks, the lowest rank's is taken for the right one.
    """
    names = dict.fromkeys(name for report in reports for name in report.traits)
    values = {name: [report.traits.get(name, "unknown") for report in reports] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    if not differing:
        return ""
    clauses = [_clause(name, values[name], reports) for name in differing[:SHOWN]]
    if len(differing) > SHOWN:
        clauses.append(f"and {len(differing) - SHOWN} more differ")
    if all(name.startswith("--") for name in differing):
        remedy = "start every rank with the same options"
    elif differing == [SOURCES]:
        remedy = "bring the working trees of all hosts to the same state"
    else:
        remedy = "set up all hosts alike with mpi_scripts/install.sh"
    return f"{'; '.join(clauses)}: {remedy}."


def _clause(name: str, values: Sequence[str], reports: Sequence[RankReport]) -> str:
    """Like "rank 2 on node7 has timm 1.0.30, the other 3 ranks 1.0.31"."""
    usual = Counter(values).most_common(1)[0][0]  # among equals the first met, so the lowest rank's
    odd: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value != usual:
            odd.setdefault(value, []).append(rank)
    first, *rest = [
        f"{name_ranks(ranks, [report.host for report in reports])} {'has' if len(ranks) == 1 else 'have'} "
        f"{name} {value}"
        for value, ranks in odd.items()
    ]
    count = values.count(usual)
    others = "the other rank" if count == 1 else f"the other {count} ranks"
    return ", ".join([first, *rest, f"{others} {usual}"])


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Like "rank 2 on node7" or "ranks 4, 5 on node7, 6 on node8"; long lists are cut. hosts: of every rank."""
    of_host: dict[str, list[int]] = {}
    for rank in ranks:
        of_host.setdefault(hosts[rank], []).append(rank)
    places = []
    for host, here in list(of_host.items())[:SHOWN]:
        listed = ", ".join(map(str, here[:8])) + (", ..." if len(here) > 8 else "")
        places.append(f"{listed} on {host}")
    if len(of_host) > SHOWN:
        places.append(f"and {len(of_host) - SHOWN} more hosts")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(places)}"


@dataclass(frozen=True)
class Place:
    """Where one rank computes. device: like cuda:0. uuid: of its GPU, empty on a CPU."""

    host: str
    pid: int
    local_rank: int
    device: str
    uuid: str
    cores: Cores
    torch_threads: int
    loader_threads: int


def shared_gpus(places: Sequence[Place]) -> str:
    """One sentence naming the ranks that would use one GPU; empty if none do. places: of every rank."""
    users: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        if place.uuid:
            users.setdefault(place.uuid, []).append(rank)
    clauses = []
    for uuid, ranks in users.items():
        if len(ranks) > 1:
            users_of_it = [places[rank] for rank in ranks[:SHOWN]]
            seen_as = ", ".join(f"{place.device} of local rank {place.local_rank}" for place in users_of_it)
            clauses.append(f"{name_ranks(ranks, [place.host for place in places])} share GPU {uuid} ({seen_as})")
    if not clauses:
        return ""
    return f"{'; '.join(clauses[:SHOWN])}: give each rank a GPU of its own, or start fewer ranks per host."


def by_host(places: Sequence[Place]) -> list[str]:
    """A line per host: "n1: rank 0 cuda:0 (pid 4711), rank 1 cuda:1 (pid 4712); ranks 0-1: cores 0-7 ..."."""
    hosts: dict[str, list[str]] = {}
    resources: dict[str, dict[str, list[int]]] = {}
    for rank, (place, cores) in enumerate(zip(places, parts(places))):
        hosts.setdefault(place.host, []).append(f"rank {rank} {place.device} (pid {place.pid})")
        shared = "" if cores == len(place.cores.allowed) else f" ({cores:.3g} for each rank)"
        threads = f"threads: {place.torch_threads} of torch, {place.loader_threads} of the loader"
        resources.setdefault(place.host, {}).setdefault(f"{place.cores}{shared}, {threads}", []).append(rank)
    lines = []
    for host, ranks in hosts.items():
        each = [f"rank{'s' * (len(of) > 1)} {compact(of)}: {text}" for text, of in resources[host].items()]
        lines.append(f"{host}: {', '.join(ranks)}; {'; '.join(each)}")
    return lines


def parts(places: Sequence[Place]) -> list[float]:
    """Cores' worth of time of each rank, those of one host sharing theirs."""
    of_host: dict[str, list[Cores]] = {}
    for place in places:
        of_host.setdefault(place.host, []).append(place.cores)
    return [part(place.cores, of_host[place.host]) for place in places]


def short_of_cores(places: Sequence[Place], *, asked: int | None) -> str:
    """One sentence naming the ranks that have too few cores for their threads, and what to change; empty if none do.

    asked: loader threads by --data.num_threads, None if their number follows the cores; then a rank on one core has
    nothing to be told, unless the launcher bound it to that one on a host with others, or it has less than a core.
    """
    short: dict[str, list[int]] = {}
    for rank, (place, cores) in enumerate(zip(places, parts(places))):
        if place.cores.physical == 1 and len(place.cores.allowed) < place.cores.host_cores:
            found = f"bound to a single core, of {place.cores.host_cores}: start mpirun with --bind-to none, or with "
            found += "--map-by slot:PE=N for N cores each (Slurm: --cpus-per-task; a container: its set of CPUs)"
        elif asked is not None and cores < asked + 1:
            found = f"given {_count(cores)} for {asked} loader thread{'s' * (asked > 1)} and the training: "
            found += "leave --data.num_threads out, or start fewer ranks per host"
        elif cores < 1:
            found = f"given {_count(cores)} each: start fewer ranks per host, or raise their CPU limit"
        else:
            continue
        short.setdefault(found, []).append(rank)
    hosts = [place.host for place in places]
    clauses = [f"{name_ranks(of, hosts)} {'is' if len(of) == 1 else 'are'} {found}" for found, of in short.items()]
    return f"{'; '.join(clauses[:SHOWN])}." if clauses else ""


def _count(cores: float) -> str:
    return "1 core" if cores == 1 else f"{cores:.3g} cores"
