"""The cores that a process really has: where it may run, how much time it is given there, and who shares it.

A launcher binds ranks to cores (Open MPI each of two to a single one, unless told otherwise), a container or a batch
system limits their time, and several ranks of a host may share what is left; threads beyond that only take turns. A
core here is what the system schedules on, so a hardware thread where a processor has two for each of its cores. Where
the sets of several ranks overlap, each core is divided among those that may use it.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

PROCESS, SYSTEM = Path("/proc/self"), Path("/sys/devices/system")
MOST_LOADER_THREADS = 8  # each decodes about 660 images of 106 kB a second (README): 8 feed any GPU; more cost memory


@dataclass(frozen=True)
class Cores:
    """What the system lets one process have."""

    allowed: frozenset[int]  # numbers of the cores it may run on
    quotas: dict[str, float]  # cores' worth of time, by the control group that its processes share it in
    nodes: tuple[int, ...]  # NUMA nodes of those cores; empty where the system does not say
    physical: int  # cores of the processor among them
    host_cores: int  # how many the host has, as `allowed` counts them

    def __str__(self) -> str:
        """Like "cores 0-3 of NUMA node 0"."""
        nodes = f" of NUMA node{'s' * (len(self.nodes) > 1)} {compact(self.nodes)}" if self.nodes else ""
        return f"core{'s' * (len(self.allowed) > 1)} {compact(self.allowed)}{nodes}"


def cores_of_process(process: Path = PROCESS, system: Path = SYSTEM) -> Cores:
    """Of this process. process, system: where Linux describes it and the machine."""
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
    """Cores' worth of time that one of the ranks of a host has, all of them working. of_host: every rank's, with it."""
    of_set = sum(Fraction(1, sum(core in theirs.allowed for theirs in of_host)) for core in mine.allowed)
    of_quotas = [quota / sum(group in theirs.quotas for theirs in of_host) for group, quota in mine.quotas.items()]
    return min([float(of_set), *of_quotas])  # in fractions, as twelve sixths of a core are two


def loader_threads(cores: float) -> int:
    """Decoding threads of a rank that has so many cores: one is left to the rank itself, if there are two."""
    return min(MOST_LOADER_THREADS, max(1, int(cores) - 1))


def compact(numbers: Iterable[int]) -> str:
    """Like "0-3,8"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def expand(text: str) -> set[int]:
    """The numbers in "0-3,8"; none in an empty text."""
    ranges = [word.partition("-") for word in text.split(",") if word]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


# ---------------------------------------------------------------------------------------------------------------
# quotas of control groups
# ---------------------------------------------------------------------------------------------------------------


def quotas(process: Path = PROCESS) -> dict[str, float]:
    """The limits that hold for a process: each group with one, from its own up to the root, and how many cores."""
    found = {}
    for group in _groups(process):
        quota = _quota_v2(group) if (group / "cgroup.controllers").exists() else _quota_v1(group)
        if quota is not None:
            found[str(group)] = quota
    return found


def _groups(process: Path) -> Iterator[Path]:
    """Folders of the groups that can limit the process's time: of version 1 and version 2, each and those above it."""
    of_version = {}
    for line in _read(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            of_version[2] = path
        elif "cpu" in controllers.split(","):
            of_version[1] = path
    for line in _read(process / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        (_, _, _, root, mounted, *_), (kind, _, options, *_) = before.split(" "), after.split(" ")  # one may be empty
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version not in of_version or version == 1 and "cpu" not in options.split(","):
            continue
        own = Path(of_version[version])
        inside = own.relative_to(root) if own.is_relative_to(root) else Path()  # a container may see its own as root
        yield from (Path(mounted, folder) for folder in (inside, *inside.parents))


def _quota_v2(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() else None


def _quota_v1(group: Path) -> float | None:
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() else None  # -1: no limit


def _read(path: Path) -> str:
    """Empty if the system does not have it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
