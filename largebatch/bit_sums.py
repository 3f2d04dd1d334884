"""Sums of the bits of tensors, which compare two copies on any device, without waiting for it."""

import functools
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

WORD = 8  # bytes that are added as one
PIECE = 2**20  # words that are multiplied at a time, so that a sum needs little memory
STEP = -3372029247567499371  # odd, so that a product loses no bit; each piece gets another power of STEP


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's words, each times an odd number of its place, 0-d int64 modulo 2^64.

    A flipped bit changes the sum; unlike a plain sum, it also shows two flips and exchanged words. The high half of a
    word is added to the low half, because all odd numbers times 2^63 are equal modulo 2^64.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    sums = []
    for piece in flat.split(PIECE * WORD):
        words = _words(piece)
        sums.append((words >> 32).add_(words).mul_(_odd_numbers(PIECE, words.device)[: len(words)]).sum())
    return functools.reduce(lambda total, one: total * STEP + one, sums)


def bit_sums(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of each tensor, (N,), on the device of the first."""
    sums = [bit_sum(tensor) for tensor in tensors]
    return torch.stack([one.to(sums[0].device) for one in sums]) if sums else torch.zeros(0, dtype=torch.int64)


def digest(sums: Tensor) -> str:
    return hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=32).hexdigest()


def _words(piece: Tensor) -> Tensor:
    """Return bytes as words, filled up with zeros."""
    if piece.storage_offset() % WORD == len(piece) % WORD == 0:
        return piece.view(torch.int64)
    words = torch.zeros(-(-len(piece) // WORD), dtype=torch.int64, device=piece.device)
    words.view(torch.uint8)[: len(piece)] = piece
    return words


@functools.cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Return pseudo-random odd numbers, the same on all devices and hosts."""
    numbers = torch.arange(1, count + 1, device=device) * -7046029254386353131
    numbers ^= numbers >> 32
    numbers *= -4658895280553007687
    numbers ^= numbers >> 29
    return numbers | 1
