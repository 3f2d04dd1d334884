"""What ranks must share, as sentences; that real ranks stop on it is in tests/mpi/test_odd_rank.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.comm import preflight as agreement
from largebatch.comm.cores import Cores, expand
from largebatch.comm.preflight import (
    Place,
    RankReport,
    by_host,
    disagreement,
    name_ranks,
    report_rank,
    shared_gpus,
    short_of_cores,
)
from largebatch.config import TrainConfig, options

ROOT = Path(__file__).parents[1]


def reports(*traits: dict[str, str]) -> list[RankReport]:
    """Two ranks per host: node0, node0, node1, ..."""
    return [RankReport(f"node{rank // 2}", one) for rank, one in enumerate(traits)]


def versions(*timm: str) -> list[RankReport]:
    return reports(*({"torch": "2.13.0", "timm": version} for version in timm))


def test_equal_ranks_agree():
    assert disagreement(versions("1", "1", "1")) == ""
    assert disagreement(versions("1")) == ""


@pytest.mark.parametrize(
    "timm, clause",
    [
        (("2", "2", "1", "2"), "rank 2 on node1 has timm 1, the other 3 ranks 2"),
        (("1", "2", "2"), "rank 0 on node0 has timm 1, the other 2 ranks 2"),
        (("1", "2"), "rank 1 on node0 has timm 2, the other rank 1"),
        (("2", "2", "2", "1", "1"), "ranks 3 on node1, 4 on node2 have timm 1, the other 3 ranks 2"),
        (("2", "1", "3", "2"), "rank 1 on node0 has timm 1, rank 2 on node1 has timm 3, the other 2 ranks 2"),
    ],
)
def test_the_minority_is_the_odd_one(timm, clause):
    assert disagreement(versions(*timm)) == f"{clause}: set up all hosts alike with mpi_scripts/install.sh."


def test_options_are_named_with_both_values():
    same = {"torch": "2", "--optim.lr": "0.1", "--run.seed": "0"}
    sentence = disagreement(reports(same, same | {"--optim.lr": "0.2", "--run.seed": "3"}, same))
    assert sentence == (
        "rank 1 on node0 has --optim.lr 0.2, the other 2 ranks 0.1; rank 1 on node0 has --run.seed 3, the other 2 "
        "ranks 0: start every rank with the same options."
    )


def test_a_long_list_of_differences_is_cut():
    one, other = ({f"--o{k}": value for k in range(30)} for value in "ab")
    assert "; and 26 more differ: start every rank" in disagreement(reports(one, one, other))


def test_a_trait_that_one_rank_does_not_know():
    """Ranks of different versions of largebatch may report different names."""
    sentence = disagreement(reports({"a": "1", agreement.SOURCES: "x"}, {agreement.SOURCES: "x"}, {"a": "1"}))
    assert "rank 1 on node0 has a unknown, the other 2 ranks 1" in sentence
    assert "rank 2 on node1 has the sources of largebatch unknown, the other 2 ranks x" in sentence


def test_many_ranks_are_named_shortly():
    hosts = [f"n{rank // 10}" for rank in range(200)]
    assert name_ranks([3], hosts) == "rank 3 on n0"
    text = name_ranks(range(100, 200), hosts)
    assert text.startswith("ranks 100, 101, 102, 103, 104, 105, 106, 107, ... on n10, 110") and len(text) < 250
    assert text.endswith("and 6 more hosts")


def test_a_report_holds_versions_and_every_option():
    traits = report_rank(options(TrainConfig())).traits
    assert traits["--optim.lr"] == "0.001" and traits["--recipe"] == "" and "missing" not in traits.values()
    line = agreement.versions(RankReport("n", traits))
    assert "torch 2." in line and "--" not in line


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(agreement, "PACKAGES", ("no-such-package",))
    assert report_rank({}).traits["no-such-package"] == "missing"


@pytest.mark.parametrize("change", ["largebatch/optim.py", "zoo/vit.py", "largebatch/recipes/new.py"])
def test_the_digest_is_of_all_our_sources(tmp_path, change):
    """Of what is imported, wherever it lies; a stale file or one more shows."""

    def digest(root: Path) -> str:
        program = "from largebatch.comm.preflight import sources_digest; print(sources_digest())"
        return subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True).stdout

    for package in ("largebatch", "zoo"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    assert digest(tmp_path) == digest(ROOT) != ""
    with open(tmp_path / change, "a") as file:
        file.write("\n")
    assert digest(tmp_path) != digest(ROOT)


def place(host: str, allowed: str = "0-15", *, device: str = "cpu", uuid: str = "", **changes) -> Place:
    """On a host of sixteen cores in two NUMA nodes. changes: of its Cores."""
    cores = expand(allowed)
    nodes = tuple(node for node in (0, 1) if {core // 8 for core in cores} & {node})
    of_process = {"quotas": {}, "nodes": nodes, "physical": len(cores), "host_cores": 16} | changes
    local_rank = int(device.partition(":")[2] or 0)
    return Place(host, 4711, local_rank, device, uuid, Cores(frozenset(cores), **of_process), 4, 3)


def gpu(host: str, uuid: str, local_rank: int = 0, allowed: str = "0-15") -> Place:
    return place(host, allowed, device=f"cuda:{local_rank}", uuid=uuid)


def test_a_gpu_has_one_rank():
    cpu = place("n0")
    assert shared_gpus([cpu, cpu]) == ""
    assert shared_gpus([gpu("n0", "a"), gpu("n0", "b", 1), gpu("n1", "c")]) == ""
    assert shared_gpus([gpu("n0", "a"), gpu("n0", "b", 1), gpu("n0", "a", 2)]) == (
        "ranks 0, 2 on n0 share GPU a (cuda:0 of local rank 0, cuda:2 of local rank 2): give each rank a GPU of its "
        "own, or start fewer ranks per host."
    )


def test_placement_lines():
    threads = "threads: 4 of torch, 3 of the loader"
    assert by_host([gpu("n0", "a"), gpu("n0", "b", 1), gpu("n1", "c")]) == [
        "n0: rank 0 cuda:0 (pid 4711), rank 1 cuda:1 (pid 4711); ranks 0-1: cores 0-15 of NUMA nodes 0-1 (8 for each "
        f"rank), {threads}",
        f"n1: rank 2 cuda:0 (pid 4711); rank 2: cores 0-15 of NUMA nodes 0-1, {threads}",
    ]
    bound = [gpu("n0", "a", 0, "0-3"), gpu("n0", "b", 1, "9"), place("n1", quotas={"/job": 2.5}, nodes=())]
    assert by_host(bound) == [
        "n0: rank 0 cuda:0 (pid 4711), rank 1 cuda:1 (pid 4711); rank 0: cores 0-3 of NUMA node 0, "
        f"{threads}; rank 1: core 9 of NUMA node 1, {threads}",
        f"n1: rank 2 cpu (pid 4711); rank 2: cores 0-15 (2.5 for each rank), {threads}",
    ]


LAPTOP = {"host_cores": 2, "nodes": (0,)}
BOUND = (
    "bound to a single core, of 2: start mpirun with --bind-to none, or with --map-by slot:PE=N for N cores each "
    "(Slurm: --cpus-per-task; a container: its set of CPUs)"
)
LEAVE_OUT = "leave --data.num_threads out, or start fewer ranks per host"


@pytest.mark.parametrize(
    "places, asked, sentence",
    [
        ([place("n0")] * 4, None, ""),
        ([place("n0", "0-1", **LAPTOP)] * 2, None, ""),  # the quick start
        ([place("n0", "0-1", **LAPTOP)], None, ""),
        ([place("n0", "0", host_cores=1)], None, ""),  # there are no more
        ([place("n0", "0-1", host_cores=2, physical=1)], None, ""),  # one core of two threads, all there are
        ([place("n0", quotas={"/job": 1})], None, ""),  # as many threads as fit
        ([place("n0", core, **LAPTOP) for core in "01"], None, f"ranks 0, 1 on n0 are {BOUND}."),  # by default
        ([place("n0", "0-1", physical=1)], None, f"rank 0 on n0 is {BOUND.replace('of 2', 'of 16')}."),
        (
            [place("n0", "0-1", **LAPTOP)] * 4,
            None,
            "ranks 0, 1, 2, 3 on n0 are given 0.5 cores each: start fewer ranks per host, or raise their CPU limit.",
        ),
        ([place("n0")] * 4, 3, ""),
        (
            [place("n0")] * 4,
            4,
            f"ranks 0, 1, 2, 3 on n0 are given 4 cores for 4 loader threads and the training: {LEAVE_OUT}.",
        ),
        (
            [place("n0"), place("n1", "0-1", **LAPTOP), place("n1", "0-1", **LAPTOP), place("n2", "3")],
            1,
            f"ranks 1, 2 on n1 are given 1 core for 1 loader thread and the training: {LEAVE_OUT}; rank 3 on n2 is "
            f"{BOUND.replace('of 2', 'of 16')}.",
        ),
    ],
)
def test_a_rank_with_too_few_cores(places, asked, sentence):
    assert short_of_cores(places, asked=asked) == sentence
