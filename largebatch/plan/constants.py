"""The numbers that a plan is made of, each with its source. Nothing here is fitted to a run of docs/planner.md.

Bytes, seconds, FLOP/s and bytes/s throughout. `ASSUMED` marks numbers without a published source: they are ours, and a
calibration (`--calibrate`) or an option replaces them.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")

GIB = 2**30
ASSUMED = "assumed by us"


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPU of a rank."""

    name: str
    kind: str
    """cuda or cpu"""
    peak: float
    """FLOP/s of dense products in bf16 or fp16, by the datasheet"""
    peak_fp32: float
    """FLOP/s of products in float32"""
    product: float
    """FLOP/s that a large bf16 product reaches"""
    memory: float
    bandwidth: float
    """of its memory"""
    inside: str
    """link between the GPUs of a host"""
    source: str

    def rate(self, precision: str) -> float:
        """Return the FLOP/s that products reach in a precision; float32 as far below its peak as bf16 is below its."""
        return self.product if precision != "fp32" else self.peak_fp32 * self.product / self.peak

    def times(self, cores: float) -> "Device":
        """Return so many cores as one device. Ranks that share a core have less than one."""
        rates = {name: cores * getattr(self, name) for name in ("peak", "peak_fp32", "product", "bandwidth")}
        return replace(self, **rates)


MAMF = "largest product found: https://github.com/mag-/gpu_benchmark"
A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
H200 = "https://www.nvidia.com/en-us/data-center/h200/"
AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
HGX = "https://www.nvidia.com/en-us/data-center/hgx/"
GRACE = "https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/"
A30 = "https://www.nvidia.com/en-us/data-center/products/a30-gpu/"
L40S = "https://www.nvidia.com/en-us/data-center/l40s/"
L4 = "https://www.nvidia.com/en-us/data-center/l4/"
LIKE_H100 = "its product is assumed to reach the share of an H100"
LIKE_A100 = "its product is assumed to reach the share of an A100"
OVER_178 = "https://github.com/mag-/gpu_benchmark has 178.5e12, above the datasheet"
A_CORE = "a core of an AMD EPYC with AVX-512 bf16, measured: largebatch/benchmark/NOTES.md; memory assumed by us"

# Memory as torch shows it, which is less than the datasheet's: the driver keeps a part.
DEVICES = {
    device.name: device
    for device in (
        Device("v100", "cuda", 125e12, 15.7e12, 107e12, 31.7 * GIB, 900e9, "nvlink2", f"{VOLTA}; {LIKE_A100}"),
        Device("v100_16gb", "cuda", 125e12, 15.7e12, 107e12, 15.8 * GIB, 900e9, "nvlink2", f"{VOLTA}; {LIKE_A100}"),
        Device("a30", "cuda", 165e12, 10.3e12, 141e12, 23.5 * GIB, 933e9, "pcie4", f"{A30}; {LIKE_A100}"),
        Device("a100", "cuda", 312e12, 19.5e12, 267.9e12, 79.2 * GIB, 2039e9, "nvlink3", f"{A100}; {MAMF}"),
        Device("a100_40gb", "cuda", 312e12, 19.5e12, 267.9e12, 39.4 * GIB, 1555e9, "nvlink3", f"{A100}; {MAMF}"),
        Device("a100_pcie", "cuda", 312e12, 19.5e12, 267.9e12, 79.2 * GIB, 1935e9, "pcie4", f"{A100}; {MAMF}"),
        Device("h100", "cuda", 989e12, 67e12, 792.1e12, 79.1 * GIB, 3350e9, "nvlink4", f"{H100}; {MAMF}"),
        Device("h100_pcie", "cuda", 756e12, 51e12, 605e12, 79.1 * GIB, 2000e9, "pcie4", f"{H100}; {LIKE_H100}"),
        Device("h100_nvl", "cuda", 835e12, 60e12, 669e12, 93.1 * GIB, 3900e9, "pcie4", f"{H100}; {LIKE_H100}"),
        Device("gh200", "cuda", 989e12, 67e12, 792.1e12, 94.5 * GIB, 4000e9, "nvlink4", f"{GRACE}; {LIKE_H100}"),
        Device("h200", "cuda", 989e12, 67e12, 792.1e12, 139.8 * GIB, 4800e9, "nvlink4", f"{H200}; {LIKE_H100}"),
        Device("h200_nvl", "cuda", 835e12, 60e12, 669e12, 139.8 * GIB, 4800e9, "pcie4", f"{H200}; {LIKE_H100}"),
        Device("b200", "cuda", 2250e12, 75e12, 1802e12, 178.4 * GIB, 7700e9, "nvlink5", f"{HGX}; {LIKE_H100}"),
        Device("l4", "cuda", 121e12, 30.3e12, 104e12, 22 * GIB, 300e9, "pcie4", f"{L4}; {LIKE_A100}"),
        Device("l40s", "cuda", 362e12, 91.6e12, 311e12, 44.4 * GIB, 864e9, "pcie4", f"{L40S}; {LIKE_A100}"),
        Device("rtx3090", "cuda", 71e12, 35.6e12, 61e12, 23.6 * GIB, 936e9, "pcie4", f"{AMPERE}; {LIKE_A100}"),
        Device("rtx4090", "cuda", 165.2e12, 82.6e12, 165.2e12, 23.5 * GIB, 1008e9, "pcie4", f"{ADA}; {OVER_178}"),
        Device("cpu", "cpu", 210e9, 95e9, 210e9, 8 * GIB, 27e9, "memory", A_CORE),
    )
}

# Words of the names that nvidia-smi and torch print; the first line that fits counts. None: another rate or memory than
# the devices above, or a part of one (MIG).
NAMED = {
    "MIG": None,
    "GH200": "gh200",
    "B200": "b200",
    "H200 NVL": "h200_nvl",
    "H200": "h200",
    "H100 PCIe": "h100_pcie",
    "H100 NVL": "h100_nvl",
    "H100": "h100",
    r"A100-\w+-40GB": "a100_40gb",
    r"A100-\w+-64GB": None,
    "A100 80GB PCIe": "a100_pcie",
    "A100": "a100",
    "A30": "a30",
    r"V100-\w+-16GB": "v100_16gb",
    "V100": "v100",
    "L40S": "l40s",
    "L4": "l4",
    "RTX [34]090 (D|Ti|Laptop)": None,
    "RTX 4090": "rtx4090",
    "RTX 3090": "rtx3090",
}

WITHOUT_BF16 = ("v100", "v100_16gb")


@dataclass(frozen=True)
class Link:
    """A network, as a ring or a tree of NCCL or MPI uses it."""

    name: str
    bandwidth: float
    """bytes/s that a rank of a host (inside), or a host (between hosts), sends and receives at once"""
    latency: float
    """seconds of a message from one rank to the next"""
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
PORTS = {"nvlink2": "hdr", "nvlink3": "hdr8", "nvlink4": "ndr8", "nvlink5": "ndr8"}
"""between hosts, by the link inside of them; ethernet10 for the others"""


@dataclass(frozen=True)
class Constant:
    """A number with its source."""

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

# Least and most of measured time by predicted time of the rows "counted" of docs/planner.md, on GPUs.
STEPS_TOOK = (0.98, 1.79)
RUNS_TOOK = (0.98, 5.35)
"""of whole runs, which took 2.4 times as long at least; nothing says that another one must"""


def all_constants() -> Iterator[tuple[str, Constant]]:
    """Yield the name and the value of each constant, in the order of this file."""
    for name, value in globals().items():
        for one in value.values() if isinstance(value, dict) else (value,):
            if isinstance(one, Constant):
                yield name.lower(), one


def find_device(name: str) -> Device:
    """Return a device by name; ValueError, with the nearest name, for an unknown one."""
    return _find(name.lower(), DEVICES, "--gpu")


def device_named(name: str) -> Device | None:
    """Return the device that nvidia-smi, torch or a benchmark's table names so; None if it is not known."""
    found = (device for words, device in NAMED.items() if re.search(rf"\b{words}\b", name, re.IGNORECASE))
    return DEVICES.get(next(found, None) or "")


def find_link(name: str) -> Link:
    """Return a link by name; ValueError, with the nearest name, for an unknown one."""
    return _find(name.lower(), LINKS, "--network")


def _find(name: str, known: Mapping[str, T], option: str) -> T:
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}."
    raise ValueError(f"{option} is {name!r}, which is not known: {hint}")
