"""The cores that a process really has: those it may run on, its limits of time there, and its share of both.

A launcher binds ranks to cores, a container or a batch system limits their time, and the ranks of a host share the
rest. A core here is a unit that the system schedules on, such as a hardware thread. Libraries that count cores do not
know which ranks share a quota, so this file reads the control groups itself.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from largebatch.launch.bind import numbers, ranges, text_of

PROCESS, SYSTEM = Path("/proc/self"), Path("/sys/devices/system")


@dataclass(frozen=True)
class Cores:
    allowed: frozenset[int]  # numbers of the cores that it may run on
    quotas: dict[str, float]  # control group -> cores' worth of time that the processes of the group share
    nodes: tuple[int, ...]  # NUMA nodes of those cores; empty if the system does not say
    physical: int  # how many physical cores they belong to
    host_cores: int  # how many cores the host has, counted as in `allowed`

    def __str__(self) -> str:
        nodes = f" of NUMA node{'s' * (len(self.nodes) > 1)} {ranges(self.nodes)}" if self.nodes else ""
        return f"core{'s' * (len(self.allowed) > 1)} {ranges(self.allowed)}{nodes}"


def cores_of_process(process: Path = PROCESS, system: Path = SYSTEM) -> Cores:
    """Return the cores of this process. process, system: folders in which Linux describes it and the machine."""
    allowed = frozenset(os.sched_getaffinity(0))
    nodes = {int(path.name[4:]): numbers(text_of(path / "cpulist")) for path in system.glob("node/node[0-9]*")}
    siblings = {text_of(system / f"cpu/cpu{core}/topology/thread_siblings_list") or str(core) for core in allowed}
    return Cores(
        allowed=allowed,
        quotas=quotas(process),
        nodes=tuple(sorted(node for node, cores in nodes.items() if allowed.intersection(cores))),
        physical=len(siblings),
        host_cores=os.cpu_count() or len(allowed),
    )


def share_of_cores(mine: Cores, of_host: Sequence[Cores]) -> float:
    """Return how many cores' worth of time a rank has while all ranks of its host work; of_host has `mine`, too."""
    of_set = sum(Fraction(1, sum(core in theirs.allowed for theirs in of_host)) for core in mine.allowed)
    of_quotas = [quota / sum(group in theirs.quotas for theirs in of_host) for group, quota in mine.quotas.items()]
    return min([float(of_set), *of_quotas])  # fractions above, so that twelve sixths of a core make exactly two


def yields(cores: Cores, ranks: int) -> bool:
    """Return whether a thread that waits in MPI is to give up its core; ranks: how many share these cores.

    Horovod's thread of each rank waits beside the one that computes. Without a core for both, busy waiting costs more
    than the messages (largebatch/benchmark/NOTES.md).
    """
    return min(cores.physical / ranks, share_of_cores(cores, [cores] * ranks)) < 2


def loader_threads(cores: float) -> int:
    """Return the number of decoding threads for a rank: one less than its cores, but at least 1."""
    return max(1, int(cores) - 1)


def compiler_processes(cores: float) -> int:
    """Return the number of processes with which torch compiles for a rank; its default is 32."""
    return min(32, max(1, int(cores)))


# -- quotas of control groups ------------------------------------------------------------------------------------


def quotas(process: Path = PROCESS) -> dict[str, float]:
    """Return the control groups that limit a process, from its own up to the root, each with its cores."""
    found = {}
    for group in _groups(process):
        if (group / "cgroup.controllers").exists():  # version 2
            quota, _, period = text_of(group / "cpu.max").partition(" ")
        else:
            quota, period = text_of(group / "cpu.cfs_quota_us"), text_of(group / "cpu.cfs_period_us")
        if quota.isdigit():  # not "max", or -1
            found[str(group)] = int(quota) / int(period)
    return found


def _groups(process: Path) -> Iterator[Path]:
    """Yield the folders of the process's control groups, of both versions, and of their parents."""
    of_version = {}
    for line in text_of(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            of_version[2] = path
        elif "cpu" in controllers.split(","):
            of_version[1] = path
    for line in text_of(process / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        # Split at every space, because a field may be empty.
        (_, _, _, root, mounted, *_), (kind, _, options, *_) = before.split(" "), after.split(" ")
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version not in of_version or version == 1 and "cpu" not in options.split(","):
            continue
        own = Path(of_version[version])
        # A container may see its own group as the root.
        inside = own.relative_to(root) if own.is_relative_to(root) else Path()
        yield from (Path(mounted, folder) for folder in (inside, *inside.parents))
