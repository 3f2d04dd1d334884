"""The cores of a process, read from files like Linux's; tests/mpi/test_cores.py tests the binding of a launcher."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from largebatch.launch.bind import numbers, ranges
from largebatch.launch.cores import Cores, cores_of_process, loader_threads, quotas, share_of_cores, yields

LIMITS = Path("/sys/fs/cgroup/cpu")  # version 1


def cores(allowed: str, quotas: dict[str, float] | None = None, *, host_cores: int = 16) -> Cores:
    of_set = frozenset(numbers(allowed))
    return Cores(of_set, quotas or {}, nodes=(0,), physical=len(of_set), host_cores=host_cores)


@pytest.mark.parametrize(
    "of_host, parts",
    [
        ([cores("0-3")], [4]),
        ([cores("0-3"), cores("0-3")], [2, 2]),  # nothing is bound
        ([cores("0-3"), cores("4-7")], [4, 4]),  # bound apart
        ([cores("0-1"), cores("0-1"), cores("2-5"), cores("2-5")], [1, 1, 2, 2]),  # to a NUMA node each pair
        ([cores("0-3"), cores("2-5")], [3, 3]),
        ([cores("0-3"), cores("0")], [3.5, 0.5]),
        ([cores("0-11")] * 6, [2] * 6),  # in floating point a little less
        ([cores("0-1")] * 4, [0.5] * 4),
        ([cores("0-7", {"/job": 3})], [3]),
        ([cores("0-7", {"/job": 3})] * 2, [1.5] * 2),  # the quota is of both
        ([cores("0-7", {"/a": 3}), cores("0-7", {"/b": 9})], [3, 4]),  # of one each
        ([cores("0-7", {"/job/a": 3, "/job": 4}), cores("0-7", {"/job/b": 1, "/job": 4})], [2, 1]),
    ],
)
def test_the_part_of_each_rank(of_host, parts):
    assert [share_of_cores(mine, of_host) for mine in of_host] == parts


@pytest.mark.parametrize("have, threads", [(0.5, 1), (1, 1), (1.9, 1), (2, 1), (3, 2), (4.5, 3), (9, 8), (64, 63)])
def test_one_core_is_left_to_the_rank(have, threads):
    assert loader_threads(have) == threads


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8,10-11", "7,64-127"])
def test_a_compact_list_of_cores(text):
    assert ranges(numbers(text)) == text


def linux(folder: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """Write a process's folder of /proc, with control groups mounted inside `folder`."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts.replace("SYS", str(folder)))
    return folder


@pytest.mark.parametrize(
    "mine, ranks, gives_up",
    [
        (cores("0-1"), 2, True),  # the quick start: a core for each rank, which computes and waits
        (cores("0-1"), 1, False),
        (cores("0-15"), 8, False),
        (cores("0-15"), 9, True),
        (cores("0-15", {"/job": 4}), 2, False),
        (cores("0-15", {"/job": 3}), 2, True),
        (replace(cores("0-3"), physical=2), 2, True),  # two threads of a core are no two cores
    ],
)
def test_waiting_ranks_give_up_their_core_only_where_there_is_none_to_spare(mine, ranks, gives_up):
    assert yields(mine, ranks) is gives_up


V2 = "30 23 0:27 / SYS/v2 rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "32 31 0:29 / SYS/cpu rw - cgroup cgroup rw,cpu,cpuacct\n33 31 0:31 / SYS/set rw - cgroup cgroup rw,cpuset\n"
NAMELESS = "29 23 0:26 / SYS/tmp rw shared:8 - tmpfs  rw\n"  # mounted from ""
IN_CONTAINER = "32 31 0:29 /docker/1f SYS/cpu ro - cgroup cgroup rw,cpu,cpuacct\n"
HAS = {"v2/a/cgroup.controllers": "cpu", "v2/a/b/cgroup.controllers": "cpu", "v2/cgroup.controllers": "cpu"}


@pytest.mark.parametrize(
    "groups, mounts, files, found",
    [
        ("0::/a/b\n", V2, HAS | {"v2/a/b/cpu.max": "150000 100000", "v2/a/cpu.max": "max 100000"}, {"v2/a/b": 1.5}),
        ("0::/a/b\n", V2, HAS | {"v2/a/b/cpu.max": "max 100000", "v2/a/cpu.max": "200000 50000"}, {"v2/a": 4}),
        ("0::/a\n", NAMELESS + V2, HAS | {"v2/a/cpu.max": "200000 100000"}, {"v2/a": 2}),
        ("0::/a/b\n", V2, HAS, {}),  # without the cpu controller
        ("0::/\n", V2, HAS, {}),
        (
            "3:cpuset:/x\n2:cpu,cpuacct:/a\n0::/\n",
            V1,
            {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000", "set/x/cpu.cfs_quota_us": "1"},
            {"cpu/a": 2.5},
        ),
        (
            "2:cpu:/a\n",
            V1 + V2,
            {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
            {},
        ),
        (
            "2:cpu,cpuacct:/docker/1f\n",
            IN_CONTAINER,
            {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"},
            {"cpu": 3},
        ),
        ("", "", {}, {}),
    ],
)
def test_quotas_of_control_groups(tmp_path, groups, mounts, files, found):
    process = linux(tmp_path, groups, mounts, files)
    assert quotas(process) == {str(tmp_path / group): quota for group, quota in found.items()}


def test_nodes_and_threads_of_a_core(tmp_path):
    """A machine of two nodes with two hardware threads per core; the process has the cores of this one."""
    mine = sorted(os.sched_getaffinity(0))
    (tmp_path / "node" / "node0").mkdir(parents=True)
    (tmp_path / "node" / "node0" / "cpulist").write_text("900-903\n")
    (tmp_path / "node" / "node1").mkdir()
    (tmp_path / "node" / "node1" / "cpulist").write_text(f"{ranges(mine)}\n")
    for core in mine:
        (tmp_path / "cpu" / f"cpu{core}" / "topology").mkdir(parents=True)
        (tmp_path / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(ranges(mine))
    found = cores_of_process(system=tmp_path)
    assert (found.nodes, found.physical, found.allowed) == ((1,), 1, frozenset(mine))
    assert str(found) == f"core{'s' * (len(mine) > 1)} {ranges(mine)} of NUMA node 1"
    assert cores_of_process(system=tmp_path / "none").physical == len(mine)


def test_the_quota_of_a_real_control_group():
    """Start this interpreter in a group of its own with a core and a half (version 1, which needs root)."""
    group = LIMITS / f"largebatch-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("150000")
        program = (
            "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
            "from largebatch.launch.cores import cores_of_process, share_of_cores\n"
            "mine = cores_of_process(); print(mine.quotas, share_of_cores(mine, [mine]))"
        )
        command = [sys.executable, "-c", program, str(group)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert process.stdout == f"{{'{group}': 1.5}} {min(1.5, len(os.sched_getaffinity(0)))}\n", process.stderr
    finally:
        group.rmdir()
