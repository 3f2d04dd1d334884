"""The numbers that a plan is made of, each with its source. Nothing here is fitted to a run of docs/planner.md.

Units are bytes, seconds, FLOP/s and bytes/s. `ASSUMED` marks numbers without a published source, which `--calibrate` or
an option replaces.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from largebatch.devices import GIB, look_up

ASSUMED = "assumed by us"


@dataclass(frozen=True)
class Link:
    """A network, as a ring or a tree of NCCL or MPI uses it."""

    name: str
    bandwidth: float  # bytes/s that a rank of a host (inside), or a host (between hosts), sends and receives at once
    latency: float  # seconds of a message from one rank to the next
    source: str


BUS = "bus bandwidth of all_reduce_perf: https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests"
IB = f"its rate, a tenth off for headers and rings, and a latency {ASSUMED}"

LINKS = {
    link.name: link
    for link in (
        Link("memory", 8e9, 20e-6, f"ranks that share the memory of a host: {ASSUMED}"),
        Link("pcie4", 12e9, 10e-6, f"GPUs without peer access, through host memory: {ASSUMED}"),
        Link("nvlink2", 130e9, 5e-6, f"150 GB/s one way, a tenth and more off: {ASSUMED}"),
        Link("nvlink3", 235e9, 3e-6, f"{BUS}; latency {ASSUMED}"),
        Link("nvlink4", 460e9, 3e-6, f"{BUS}; latency {ASSUMED}"),
        Link("nvlink5", 800e9, 3e-6, f"900 GB/s one way, a tenth off: {ASSUMED}"),
        Link("ethernet10", 1.1e9, 30e-6, f"its rate, a tenth off; TCP's latency {ASSUMED}"),
        Link("ethernet25", 2.8e9, 30e-6, f"its rate, a tenth off; TCP's latency {ASSUMED}"),
        Link("ethernet100", 11.2e9, 20e-6, f"its rate, a tenth off; TCP's latency {ASSUMED}"),
        Link("hdr", 22.5e9, 5e-6, f"one InfiniBand HDR port per host: {IB}"),
        Link("hdr8", 180e9, 5e-6, f"eight, as in a DGX A100: {IB}"),
        Link("ndr", 45e9, 5e-6, f"one InfiniBand NDR port per host: {IB}"),
        Link("ndr8", 360e9, 5e-6, f"eight, as in a DGX H100: {IB}"),
    )
}
# Networks between hosts, by the link inside of them; ethernet10 for the others.
PORTS = {"nvlink2": "hdr", "nvlink3": "hdr8", "nvlink4": "ndr8", "nvlink5": "ndr8"}


@dataclass(frozen=True)
class Constant:
    value: float
    source: str


BANDWIDTH_SHARE = Constant(0.85, f"share of the memory's bandwidth that simple kernels reach: {ASSUMED}")
LAUNCH_S = Constant(6e-6, f"time of the host for one operation of eager PyTorch: {ASSUMED}")
HOROVOD = "https://horovod.readthedocs.io/en/stable/tensor-fusion_include.html"
CYCLE_S = {
    "cuda": Constant(1e-3, f"HOROVOD_CYCLE_TIME: {HOROVOD}"),
    "cpu": Constant(5e-3, "largebatch/config/horovod.py: CPU_CYCLE_TIME_MS"),
}
FUSION_BYTES = {
    "cuda": Constant(128 * 2**20, f"HOROVOD_FUSION_THRESHOLD: {HOROVOD}"),
    "cpu": Constant(2**20, "largebatch/config/horovod.py: CPU_FUSION_BYTES"),
}
NEGOTIATION_LATENCY_S = Constant(3e-6, f"a small message of MPI over InfiniBand: {ASSUMED}")
LAMB_MOVED = Constant(44.0, "bytes per parameter and step: x, g, m, v in, m, v out; x, m, v in, x out; g for the norm")
ADAMW_MOVED = Constant(32.0, "bytes per parameter and step: x, g, m, v in, x, m, v out; g for the norm")
SCHEDULE_FREE = Constant(108.0, "bytes per parameter and step: 26 reads and writes by torch; g for the norm")
SGD_MOVED = Constant(24.0, "bytes per parameter and step: x, g, m in, x, m out; g for the norm")

CONTEXT_BYTES = Constant(0.6 * GIB, f"CUDA's context and libraries: {ASSUMED}")
NCCL_BYTES = Constant(0.4 * GIB, f"NCCL's buffers on many ranks: {ASSUMED}")
LOADER_BYTES = Constant(1.0 * GIB, f"DALI's buffers for decoding on a GPU: {ASSUMED}")
RESERVE = Constant(0.05, f"share of the memory that the allocator loses in gaps: {ASSUMED}")

IMAGENET_IMAGES = Constant(1_281_167, "https://www.image-net.org/challenges/LSVRC/2012/")
HELD_OUT_IMAGES = Constant(50_000, "https://www.image-net.org/challenges/LSVRC/2012/")
IMAGE_BYTES = Constant(115e3, "ILSVRC2012_img_train.tar has 147.9 GB for 1,281,167 images: https://www.image-net.org")
DECODED_PER_CORE = Constant(660.0, "images/s of 106 kB that a core of an AMD EPYC decodes and resizes: docs/speed.md")
CORES_PER_RANK = {
    "cuda": Constant(16, f"CPU cores beside a GPU: {ASSUMED}; --cores-per-rank"),
    "cpu": Constant(1, f"the core that computes: {ASSUMED}; --cores-per-rank"),
}
START_S = Constant(120.0, f"start, imports and the index, on GPUs that share a file system: {ASSUMED}")
EVALUATION_S = Constant(1.0, f"set-up of an evaluation: {ASSUMED}")
WRITE_RATE = Constant(1e9, f"bytes/s of a checkpoint's one writer: {ASSUMED}")
COPY_RATE = Constant(10e9, f"bytes/s of a copy to pinned host memory over PCIe 4: {ASSUMED}")
GPU_HOURS_PER_FAILURE = Constant(
    54 * 24 * 16384 / 419, "419 unexpected interruptions in 54 days of 16,384 H100: https://arxiv.org/abs/2407.21783"
)
RESTART_S = Constant(300.0, f"from a failure to the first new step: {ASSUMED}")

# Least and most of measured time by predicted time of the rows "counted" of docs/planner.md, on GPUs. Whole runs took
# 2.4 times as long at least, but another run need not.
STEPS_TOOK = (0.98, 1.79)
RUNS_TOOK = (0.98, 5.35)


def all_constants() -> Iterator[tuple[str, Constant]]:
    for name, value in globals().items():
        for one in value.values() if isinstance(value, dict) else (value,):
            if isinstance(one, Constant):
                yield name.lower(), one


def find_link(name: str) -> Link:
    return look_up(name, LINKS, "--network")
