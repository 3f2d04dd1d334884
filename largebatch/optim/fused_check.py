"""The trial of LAMB's Triton kernels at the start of a run: on this device they must give the numbers of `lamb_`.

The kernels get addresses, so a mistake of a compiler or a driver could change memory that is not theirs. Therefore the
tensors of the trial lie between other numbers, which must not change either.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from largebatch.optim.lamb import Scalars, lamb_list_, scalars

GUARD = 4  # numbers around each tensor; of float32, 16 bytes
BOUND = 1e-6  # of a difference, relative to the largest number of its kind: a few roundings of float32
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "bias_correction": True, "max_trust_ratio": 5.0}
GROUPS = (
    OPTIONS | {"weight_decay": 0.1, "adapt": True, "norm_range": (0.0, 10.0)},
    OPTIONS | {"weight_decay": 0.0, "adapt": False, "norm_range": (0.0, math.inf)},
    OPTIONS | {"weight_decay": 0.2, "adapt": True, "norm_range": (0.0, math.inf)},
)
STEPS = ((1, 1.0, True), (2, -1.5, True), (3, math.nan, False))  # number, factor of the gradient, whether it is taken

Four = tuple[Tensor, Tensor, Tensor, Tensor]  # x, g, m, v


def why_not_fused(device: torch.device, trial: Callable[[torch.device], str]) -> str:
    """Return why Triton kernels cannot be used on a device, as the end of a sentence; empty: they can.

    trial: runs the kernels, and returns how their numbers differ from others; `difference` for those of LAMB.
    """
    if device.type != "cuda":
        return f"computes on a device of type {device.type}, and the kernels are for GPUs"
    try:
        return trial(device)
    except Exception as error:  # of Triton, of the compiler that it calls, of the driver
        return f"cannot run the kernels ({(str(error).strip() or repr(error)).splitlines()[0]})"


def difference(device: torch.device) -> str:
    """Update tensors by the kernels and by the specification. Return how the results differ; empty: they agree."""
    from largebatch.optim import lamb_triton  # imports Triton, which is not everywhere

    chunk = lamb_triton.CHUNK
    places = _places((1, 5, 2 * chunk + 5, chunk, chunk, 0))
    ours = _memory(places[-1].stop + 2 * GUARD, device)
    theirs = _copy(ours)
    copies = torch.full_like(ours[0], math.pi, dtype=torch.bfloat16)
    rounded, copied = copies.clone(), [place if number % 3 != 1 else None for number, place in enumerate(places)]
    factor = torch.tensor(0.5, device=device)
    for step, scale, taken in STEPS:
        gradients = scale * theirs[1]
        ours[1].copy_(gradients)
        theirs[1].copy_(gradients)
        finite = torch.tensor(taken, device=device)
        numbers = [scalars(group, step) for group in GROUPS]
        own = [None if place is None else copies[place] for place in copied]
        found = lamb_triton.lamb_fused_(_parts(ours, places, numbers), factor, finite, own)
        expected = [r for part, s in _parts(theirs, places, numbers) for r in lamb_list_(part, s, factor, finite)]
        for place in (place for place in copied if place and taken):
            rounded[place].copy_(ours[0][place])
        pairs = {"trust ratios": (torch.stack(found), torch.stack(expected))}
        pairs |= dict(zip(("weights", "gradients", "first moments", "second moments"), zip(ours, theirs)))
        wrong = [name for name, (one, other) in pairs.items() if not _close(one, other)]
        if wrong := wrong + ["copies"] * (not torch.equal(copies, rounded)):
            return f"gets other numbers from the kernels than from the formulas ({', '.join(wrong)} of step {step})"
    return ""


def _memory(size: int, device: torch.device) -> Four:
    """Return x, g, m and v of all tensors and of all guards between them."""
    generator = torch.Generator().manual_seed(0)
    x, g, m, v = (torch.randn(size, generator=generator) for _ in range(4))
    return x.to(device), (0.1 * g).to(device), (0.1 * m).to(device), (0.01 * v.square()).to(device)


def _copy(four: Four) -> Four:
    x, g, m, v = (tensor.clone() for tensor in four)
    return x, g, m, v


def _places(lengths: Sequence[int]) -> list[slice]:
    """Return where the tensors lie in memory. Every other one does not suit loads of 16 bytes."""
    places, stop = [], 0
    for number, length in enumerate(lengths):
        start = stop + -stop % GUARD + GUARD + number % 2
        stop = start + length
        places.append(slice(start, stop))
    return places


def _parts(
    memory: Four, places: Sequence[slice], numbers: Sequence[Scalars]
) -> list[tuple[list[Four], Scalars]]:
    """Cut tensors out of memory, two for each group."""
    parts: list[tuple[list[Four], Scalars]] = [([], s) for s in numbers]
    for number, place in enumerate(places):
        x, g, m, v = (tensor[place] for tensor in memory)
        parts[number // 2][0].append((x, g, m, v))
    return parts


def _close(one: Tensor, other: Tensor) -> bool:
    largest = other.nan_to_num().abs().max().item()
    return torch.allclose(one, other, rtol=0, atol=BOUND * largest, equal_nan=True)
