"""The FLOP/s that a device can reach: by its datasheet, and measured with a large matrix product.

Published utilisations (MFU) are of the datasheet's rate, which no code reaches, because processors lower their clock
under such a load. The measured product shows how far code can come, so reports have both.
"""

from dataclasses import dataclass

import torch

from largebatch.benchmark.measure import Span
from largebatch.devices import device_named
from largebatch.precision import DTYPES, computes


@dataclass(frozen=True)
class Ceiling:
    product: float  # measured with a large matrix product
    datasheet: float | None = None  # None: not known


def measure_ceiling(device: torch.device, precision: str) -> Ceiling:
    on_gpu = device.type == "cuda" and precision != "fp32"
    known = device_named(torch.cuda.get_device_name(device)) if on_gpu else None
    return Ceiling(matmul_flops(device, precision), known.peak if known else None)


def matmul_flops(device: torch.device, precision: str) -> float:
    """Return the FLOP/s of a large matrix product: the fastest row of a second, of at least three.

    On a GPU a row is ten products, because it would idle between single ones; on a CPU it is one.
    """
    # Larger products would take a minute each where the device has no instructions for the type.
    size = 8192 if device.type == "cuda" else 2048 if computes(device, precision) else 256
    in_a_row = 10 if device.type == "cuda" else 1
    a, b = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(2))

    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < 1:
        span = Span(device)
        for _ in range(in_a_row):
            torch.mm(a, b)
        span.end()
        seconds.append(span.seconds())
    return 2 * size**3 * in_a_row / min(seconds)


def mfu(images_per_s: float, flops: float, ceiling: Ceiling, *, executed: float | None = None) -> str:
    """Describe the model FLOP utilisation of one rank, with its images_per_s and ceiling.

    flops: of the model, for one image. executed: without layers that samples skip.
    """
    text = f"{images_per_s * flops / 1e9:.0f} GFLOP/s per rank, MFU {_shares(images_per_s * flops, ceiling)}"
    if executed is None or executed >= flops:
        return text
    rate = f"{images_per_s * executed / 1e9:.0f} GFLOP/s, {_shares(images_per_s * executed, ceiling)}"
    return f"{text}; executed, without the layers that stochastic depth skips: {rate}"


def _shares(achieved: float, ceiling: Ceiling) -> str:
    limits = {"the datasheet": ceiling.datasheet, "a matrix product": ceiling.product}
    known = {what: rate for what, rate in limits.items() if rate}
    return ", ".join(f"{100 * achieved / r:.1f} % of the {r / 1e9:.0f} GFLOP/s of {what}" for what, r in known.items())
