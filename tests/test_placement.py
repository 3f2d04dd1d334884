"""The lines and sentences about where ranks compute; tests/mpi/test_odd_rank.py tests that real ranks stop."""

from dataclasses import replace

import pytest

from largebatch.launch.bind import numbers
from largebatch.launch.cores import Cores
from largebatch.ranks.placement import FILLED, SCARCE, Place, by_host, filled_gpus, shared_gpus, short_of_cores


def place(host: str, allowed: str = "0-15", *, device: str = "cpu", gpu: tuple = ("", ""), **changes) -> Place:
    """Return a place on a host of sixteen cores in two NUMA nodes. changes: fields of its Cores."""
    cores = numbers(allowed)
    nodes = tuple(node for node in (0, 1) if {core // 8 for core in cores} & {node})
    of_process = {"quotas": {}, "nodes": nodes, "physical": len(cores), "host_cores": 16} | changes
    local_rank = int(device.partition(":")[2] or 0)
    return Place(host, 4711, local_rank, device, gpu, Cores(frozenset(cores), **of_process), 4, 3)


def gpu(host: str, uuid: str, local_rank: int = 0, allowed: str = "0-15", *, card: str = "") -> Place:
    return place(host, allowed, device=f"cuda:{local_rank}", gpu=(uuid, card or f"card of {uuid}"))


def test_a_gpu_has_one_rank():
    cpu = place("n0")
    assert shared_gpus([cpu, cpu]) == ""
    assert shared_gpus([gpu("n0", "a"), gpu("n0", "b", 1), gpu("n1", "c")]) == ""
    assert shared_gpus([gpu("n0", "a"), gpu("n0", "b", 1), gpu("n0", "a", 2)]) == (
        "ranks 0, 2 on n0 share GPU a (cuda:0 of local rank 0, cuda:2 of local rank 2): give each rank a GPU of its "
        "own, or start fewer ranks per host."
    )
    parts = [gpu("n0", uuid, card="0000:1b:00") for uuid in ("a", "b")]
    assert shared_gpus([parts[0], gpu("n1", "c", card="0000:1b:00")]) == ""
    assert shared_gpus(parts).startswith(
        "ranks 0, 1 on n0 share GPU 0000:1b:00, of which NCCL takes one part (MIG) alone (cuda:0 of local rank 0, "
    )


def test_a_gpu_that_another_process_fills():
    free = [replace(gpu("n0", str(gib)), memory=(gib * 2**30, 80 * 2**30)) for gib in (79, 5, 20)]
    assert filled_gpus([place("n0"), free[0]], needed=SCARCE) == ""
    rest = "another process has the rest (nvidia-smi names it), so end it, or choose others with CUDA_VISIBLE_DEVICES."
    assert filled_gpus(free, needed=FILLED) == f"rank 1 on n0 has 5.0 of 80 GiB of GPU memory free: {rest}"
    assert filled_gpus(free, needed=SCARCE) == (
        "rank 1 on n0 has 5.0 of 80 GiB of GPU memory free; rank 2 on n0 has 20.0 of 80 GiB of GPU memory free: " + rest
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
