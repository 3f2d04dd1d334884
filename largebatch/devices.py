"""GPUs, and the core of a CPU: the figures of their datasheets, the sources, and the names that torch prints."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from largebatch.nearest import nearest

T = TypeVar("T")

GIB = 2**30


@dataclass(frozen=True)
class Device:
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
        """Return the FLOP/s that products reach; in float32 the same share of the peak as in bf16."""
        return self.product if precision != "fp32" else self.peak_fp32 * self.product / self.peak

    def times(self, cores: float) -> "Device":
        """Return `cores` cores as one device; a rank may have less than one."""
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

# Words of the names that nvidia-smi and torch print; the first line that fits counts. None: no device above has this
# rate or memory.
NAMED = {
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


def find_device(name: str) -> Device:
    return look_up(name, DEVICES, "--gpu")


def look_up(name: str, known: Mapping[str, T], option: str) -> T:
    """Return the value of a name; ValueError, with the nearest name, if it is not known."""
    if name.lower() in known:
        return known[name.lower()]
    hint = nearest(name.lower(), known, none=f"expected one of {', '.join(known)}.", cutoff=0.4)
    raise ValueError(f"{option} is {name.lower()!r}, which is not known: {hint}")


def device_named(name: str) -> Device | None:
    """Return the device by its name in nvidia-smi, torch or a benchmark; None: not known, or a part of a GPU."""
    found = (device for words, device in NAMED.items() if re.search(rf"\b{words}\b", name, re.IGNORECASE))
    return None if is_part(name) else DEVICES.get(next(found, None) or "")


def is_part(name: str) -> bool:
    """Return whether a name is that of a part of a GPU (MIG)."""
    return bool(re.search(r"\bMIG\b", name))
