"""Copies between the host and a GPU that nobody waits for.

A copy from ordinary memory makes the host wait, often until the GPU has finished everything before. A GPU reads
page-locked memory by itself. So all copies inside a training step go through `to_device`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

ALIGN = 16  # bytes; each tensor begins at a multiple, as its type needs


def to_device(*tensors: Tensor, device: torch.device) -> list[Tensor]:
    """Return tensors of the host on `device`, by one copy without waiting; for a CPU, the tensors themselves.

    The given tensors may change afterwards.
    """
    if device.type == "cpu":
        return list(tensors)
    block = pack(tensors, pinned=device.type == "cuda")
    assert block.is_pinned() or device.type != "cuda", "the host would wait for a copy from ordinary memory"
    return unpack(block.to(device, non_blocking=True), tensors)


def to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host; return a function that waits for this copy, but not for later work."""
    if tensor.device.type != "cuda":
        return lambda: tensor
    copied, done = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True), torch.cuda.Event()
    copied.copy_(tensor, non_blocking=True)
    done.record()

    def read() -> Tensor:
        done.synchronize()
        return copied

    return read


def set_aside(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that gives a tensor back later; until then a GPU has its memory for other things.

    The host waits for neither copy. A tensor of the host is kept itself, so nobody may change it.
    """
    if tensor.device.type != "cuda":
        return lambda: tensor
    device, copied = tensor.device, torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    return lambda: copied.to(device, non_blocking=True)


def pack(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    *starts, end = _starts(tensors)
    block = torch.empty(max(end, ALIGN), dtype=torch.uint8, pin_memory=pinned)
    for start, tensor in zip(starts, tensors):
        block[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    return block


def unpack(block: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a block in the types and shapes of the packed tensors."""
    spans = (block[start : start + tensor.nbytes] for start, tensor in zip(_starts(tensors), tensors))
    return [span.view(tensor.dtype).view(tensor.shape) for span, tensor in zip(spans, tensors)]


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Return the first byte of each tensor in a block, and the size of the block."""
    return list(accumulate((-(-tensor.nbytes // ALIGN) * ALIGN for tensor in tensors), initial=0))
