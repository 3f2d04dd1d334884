"""Sums of bits: no single flip, no pair of flips and no exchange of words leaves a sum as it was."""

import hashlib
import random
import struct

import pytest
import torch

from largebatch import bit_sums
from largebatch.bit_sums import bit_sum, digest

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element: its bits
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int64]
PAIRS = 5000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Of 32 words, so that the sums of these tensors are put together from several."""
    monkeypatch.setattr(bit_sums, "PIECE", 32)


def flip(bits: torch.Tensor, element: int, bit: int) -> None:
    bits[element] ^= torch.tensor(1, dtype=bits.dtype) << bit


@pytest.mark.parametrize("dtype", TYPES)
def test_the_sum_sees_each_byte_of_each_type(dtype):
    for size in (0, 1, 2, 9, 16, 300):
        tensor = torch.randn(size + 1).to(dtype)[1:]  # where no word begins
        before, bits = bit_sum(tensor), tensor.view(torch.uint8)
        for byte in range(len(bits)):
            for bit in range(0, 1 if dtype == torch.bool else 8, 3):
                flip(bits, byte, bit)
                assert bit_sum(tensor) != before
                flip(bits, byte, bit)
        assert bit_sum(tensor) == before == bit_sum(tensor.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("apart", ["anywhere", "in one data line"])
def test_two_flips_of_the_same_bit_do_not_cancel(dtype, apart):
    """As a broken data line or a broken chip makes them; the highest bits of a word are the signs of its numbers."""
    draws, tensor = random.Random(0), torch.randn(500, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits, before = tensor.view(INTEGERS[tensor.element_size()]), bit_sum(tensor)
    width = 8 * tensor.element_size()
    for number in range(PAIRS):
        one = draws.randrange(500)
        near = [place for place in range(one % 8, 500, 8) if place != one]
        other = draws.choice(near) if apart == "in one data line" else (one + draws.randrange(1, 500)) % 500
        bit = width - 1 if number % 2 else draws.randrange(width)
        for element in (one, other):
            flip(bits, element, bit)
        assert bit_sum(tensor) != before, (one, other, bit)
        for element in (one, other):
            flip(bits, element, bit)
    assert bit_sum(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exchanged_rows_do_not_cancel(dtype):
    """Rows of 12 numbers, which begin within words, and rows whose numbers are the same in another order."""
    draws, tensor = random.Random(0), torch.randn(60, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor[30:] = tensor[:30].flip(1)
    before = bit_sum(tensor)
    for _ in range(PAIRS):
        one, other = draws.sample(range(60), 2)
        tensor[[one, other]] = tensor[[other, one]]
        assert bit_sum(tensor) != before, (one, other)
        tensor[[one, other]] = tensor[[other, one]]


def signed(number: int) -> int:
    """What 64 bits keep of a number."""
    return (number + 2**63) % 2**64 - 2**63


def in_plain_python(tensor: torch.Tensor) -> int:
    raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 8)
    words, total = struct.unpack(f"<{len(raw) // 8}q", raw), 0
    for start in range(0, len(words), 32):
        part = 0
        for place, word in enumerate(words[start : start + 32], start=1):
            number = signed(place * -7046029254386353131)
            number = signed((number ^ number >> 32) * -4658895280553007687)
            part += (word + (word >> 32)) * ((number ^ number >> 29) | 1)
        total = total * bit_sums.STEP + part
    return signed(total)


def test_sums_are_those_of_plain_integers():
    """Checkpoints have digests of them, so another version or device must find the same ones."""
    tensors = [torch.randn(1000), torch.ones(7, 3, dtype=torch.bfloat16).t(), torch.tensor(-1.5), torch.zeros(0)]
    sums = bit_sums.bit_sums(tensors)
    assert sums.tolist() == [in_plain_python(tensor) for tensor in tensors]
    assert digest(sums) == hashlib.blake2b(struct.pack("<4q", *sums.tolist()), digest_size=32).hexdigest()
    assert bit_sums.bit_sums([]).tolist() == []
