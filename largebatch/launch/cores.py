"""The cores that a process really has: those it may run on, its limits of time there, and its share of both.

A launcher binds ranks to cores (Open MPI binds each of two ranks to a single core by default), a container or a batch
system limits their time, and several ranks of a host may share the rest. More threads than that only take turns.
A core here is a unit that the system schedules on, so a hardware thread if the processor has two for each core. If the
sets of several ranks overlap, each core is divided among the ranks that may use it. Libraries that count cores do not
know which ranks share a quota, so this file reads the control groups itself.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

PROCESS, SYSTEM = Path("/proc/self"), Path("/sys/devices/system")


@dataclass(frozen=True)
class Cores:
    """The cores and the time that the system allows to one process."""

    allowed: frozenset[int]  # numbers of the cores that it may run on
    quotas: dict[str, float]  # control group -> cores' worth of time that the processes of the group share
    nodes: tuple[int, ...]  # NUMA nodes of those cores; empty if the system does not say
    physical: int  # how many physical cores they belong to
    host_cores: int  # how many cores the host has, counted as in `allowed`

    def __str__(self) -> str:
        """Return a text like "cores 0-3 of NUMA node 0"."""
        nodes = f" of NUMA node{'s' * (len(self.nodes) > 1)} {compact(self.nodes)}" if self.nodes else ""
        return f"core{'s' * (len(self.allowed) > 1)} {compact(self.allowed)}{nodes}"


def cores_of_process(process: Path = PROCESS, system: Path = SYSTEM) -> Cores:
    """Return the cores of this process. process, system: the folders in which Linux describes it and the machine."""
    allowed = frozenset(os.sched_getaffinity(0))
    nodes = {int(path.name[4:]): expand(_read(path / "cpulist")) for path in system.glob("node/node[0-9]*")}
    siblings = {_read(system / f"cpu/cpu{core}/topology/thread_siblings_list") or str(core) for core in allowed}
    return Cores(
        allowed=allowed,
        quotas=quotas(process),
        nodes=tuple(sorted(node for node, cores in nodes.items() if cores & allowed)),
        physical=len(siblings),
        host_cores=os.cpu_count() or len(allowed),
    )


def share_of_cores(mine: Cores, of_host: Sequence[Cores]) -> float:
    """Return how many cores' worth of time a rank has while all ranks of its host work.

    of_host: the cores of all ranks of the host, with this one.
    """
    of_set = sum(Fraction(1, sum(core in theirs.allowed for theirs in of_host)) for core in mine.allowed)
    of_quotas = [quota / sum(group in theirs.quotas for theirs in of_host) for group, quota in mine.quotas.items()]
    return min([float(of_set), *of_quotas])  # fractions above, so that twelve sixths of a core make exactly two


def yields(cores: Cores, ranks: int) -> bool:
    """Return whether a thread that waits in MPI is to give up its core; ranks: how many share these cores.

    Horovod's thread of each rank waits beside the one that computes. Where there is no core for both, its busy waiting
    costs more than the messages: 2 ranks on 2 cores (AMD EPYC, 2026-11-21) did 89-94 img/s with this and 58-63 without
    (mpirun -np 2 python -m largebatch.train --model vit_b32 --run.max_steps 5, steps 3 to 5). With idle cores it would
    cost 5 to 50 us for each hop of a message.
    """
    return min(cores.physical / ranks, share_of_cores(cores, [cores] * ranks)) < 2


def loader_threads(cores: float) -> int:
    """Return the number of decoding threads for a rank: one less than its cores, but at least 1.

    A fast GPU trains small models on more images than the cores of its rank can prepare, so none is left idle.
    """
    return max(1, int(cores) - 1)


def compiler_processes(cores: float) -> int:
    """Return the number of processes with which torch compiles for a rank; torch by itself starts 32 for each."""
    return min(32, max(1, int(cores)))


def compact(numbers: Iterable[int]) -> str:
    """Return a text like "0-3,8"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def expand(text: str) -> set[int]:
    """Return the numbers in a text like "0-3,8"; the empty set for an empty text."""
    ranges = [word.partition("-") for word in text.split(",") if word]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


# -- quotas of control groups ------------------------------------------------------------------------------------


def quotas(process: Path = PROCESS) -> dict[str, float]:
    """Return the limits of a process: each control group with a limit, from its own up to the root -> cores."""
    found = {}
    for group in _groups(process):
        quota = _quota_v2(group) if (group / "cgroup.controllers").exists() else _quota_v1(group)
        if quota is not None:
            found[str(group)] = quota
    return found


def _groups(process: Path) -> Iterator[Path]:
    """Yield the folders of the groups that can limit the process: its own of both versions, and their parents."""
    of_version = {}
    for line in _read(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            of_version[2] = path
        elif "cpu" in controllers.split(","):
            of_version[1] = path
    for line in _read(process / "mountinfo").splitlines():
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


def _quota_v2(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() else None


def _quota_v1(group: Path) -> float | None:
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() else None  # -1: no limit


def _read(path: Path) -> str:
    """Return the text of a file, empty if the system does not have it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
