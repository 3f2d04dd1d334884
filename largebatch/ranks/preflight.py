"""The checks before the first step that all ranks run the same program on the same data.

Hosts drift apart unnoticed: one is updated, one holds an old checkout, one rank got another command line. The result of
such a run would mean nothing. Reports hold texts, so ranks with different versions of a package can read each other's.
"""

import hashlib
import logging
import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mode
from typing import TYPE_CHECKING

from largebatch.process.installer import install_command
from largebatch.process.packages import version_of
from largebatch.ranks.stopped import Stopped

if TYPE_CHECKING:
    from largebatch.ranks.ranks import Ranks

PACKAGES = ("torch", "horovod", "timm", "numpy", "torchvision", "safetensors", "pillow")
DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")  # one of them, by the CUDA of torch
SHOWN = 4  # differences in one message: a rank with another recipe has dozens
SOURCES = "the sources of largebatch"
# Variables of Horovod and NCCL that may differ: the place of a rank, the addresses of its host, its log; and those of
# Horovod's build, which it does not read when it runs.
OWN = re.compile(
    r"HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_|TIMELINE|LOG_|AUTOTUNE_LOG|THREAD_AFFINITY|WITH|BUILD_)|"
    r"HOROVOD_.*_(HOME|INCLUDE|LIB)$|NCCL_DEBUG"
)
VARIABLES = ("HOROVOD_", "NCCL_")
SET = ("--", *VARIABLES)  # how the names begin of what a user sets, unlike a version
VARIABLES_REMEDY = "give every rank the same variables (mpirun -x NAME hands one on)"

logger = logging.getLogger(__name__)


def agree(comm: "Ranks", options: Mapping[str, object]) -> str:
    """Compare versions, sources, options and Horovod's variables of all ranks; return one line of versions for the log.

    A collective: all ranks raise Stopped if one differs. Rank 0 warns if a variable of NCCL differs, as some of them
    may belong to a host.
    """
    with comm.together("reporting"):
        mine = report_rank(options)
    reports = comm.allgather_object(mine, name="agree")
    difference = disagreement(reports)
    if difference:
        raise Stopped(difference)
    doubtful = disagreement([replace(report, traits=report.nccl) for report in reports])
    if doubtful and comm.rank == 0:
        logger.warning("%s", doubtful)
    return versions(mine)


@dataclass(frozen=True)
class RankReport:
    """The host of one rank and its traits, which all ranks must share; the name of an option begins with --.

    nccl: the variables of NCCL, which the ranks should share.
    """

    host: str
    traits: dict[str, str]
    nccl: dict[str, str] = field(default_factory=dict)


def report_rank(options: Mapping[str, object]) -> RankReport:
    """Return the report of this process. options: every option of the config by its dotted name."""
    traits = {"Python": platform.python_version(), SOURCES: sources_digest()}
    traits |= {package: version_of(package) or "missing" for package in PACKAGES}
    found = [(package, version_of(package)) for package in DALI]
    traits["DALI"] = " and ".join(f"{version} ({name})" for name, version in found if version) or "missing"
    traits |= {f"--{name}": str(value) for name, value in options.items()}
    return RankReport(socket.gethostname(), traits | variables("HOROVOD_"), variables("NCCL_"))


def variables(prefix: str) -> dict[str, str]:
    """Return the environment variables with this prefix that ranks should share."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefix) and not OWN.match(name)}


def sources_digest() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    folders = (root / package for package in ("largebatch", "zoo"))
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp")):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def versions(report: RankReport) -> str:
    return ", ".join(f"{name} {value}" for name, value in report.traits.items() if not name.startswith(SET))


def disagreement(reports: Sequence[RankReport]) -> str:
    """Return a sentence with the ranks that differ from most, both values, and the remedy; empty if all agree.

    Of two equally frequent values, the lowest rank's counts as right.
    """
    names = dict.fromkeys(name for report in reports for name in report.traits)
    values = {
        name: [report.traits.get(name, "not set" if name.startswith(VARIABLES) else "unknown") for report in reports]
        for name in names
    }
    differing = [name for name in names if len(set(values[name])) > 1]
    if not differing:
        return ""
    clauses = [_clause(name, values[name], reports) for name in differing[:SHOWN]]
    if len(differing) > SHOWN:
        clauses.append(f"and {len(differing) - SHOWN} more differ")
    if all(name.startswith(VARIABLES) for name in differing):
        remedy = VARIABLES_REMEDY
    elif all(name.startswith(SET) for name in differing):  # some options become variables
        remedy = "start every rank with the same options"
    elif differing == [SOURCES]:
        remedy = "bring the working trees of all hosts to the same state"
    else:
        remedy = f"set up all hosts alike with {install_command()}"
    return f"{'; '.join(clauses)}: {remedy}."


def _clause(name: str, values: Sequence[str], reports: Sequence[RankReport]) -> str:
    """Return a clause like "rank 2 on node7 has timm 1.0.30, the other 3 ranks 1.0.31"."""
    usual = mode(values)
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
    """Return a text like "ranks 4, 5 on node7, 6 on node8", cut if long. hosts: by rank."""
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
