"""Gradients that are sent in 16 bits, in the form that Horovod's DistributedOptimizer takes as `compression`.

Each rank divides by the number of ranks in fp32, before it casts, so the sum is the mean. Horovod's own factors come
after the cast and round once more, and the sum for its average may overflow.

The largest number in fp16 is 65504. Below 6e-5 it loses digits, and at 6e-8 the last one. The loss scale makes up for
the division of small values: assembly/ enables the GradScaler with fp16 in every precision. An overflow while sending
halves the scale, like an overflow in the model.

bf16 has the range of fp32 and 8 bits, so it needs no scale. The casts of n ranks and the n - 1 additions each round by
at most u = 2⁻⁸: the mean is wrong by at most ((1 + u)ⁿ - 1) × the mean of the absolute values.
"""

import torch
from torch import Tensor

from largebatch.ranks.sending import Unchanged

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Narrow(Unchanged):
    """Sends gradient / num_ranks in 16 bits, to be added. One instance serves one optimizer."""

    averages = True

    def __init__(self, num_ranks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_ranks, self.dtype = num_ranks, dtype
        self.measures = dtype == torch.float16  # the cast may overflow

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        super().compress(gradient)
        wire = torch.empty_like(gradient, dtype=self.dtype)
        return torch.mul(gradient, 1 / self.num_ranks, out=wire), gradient

    def decompress(self, wire: Tensor, gradient: Tensor) -> None:
        gradient.copy_(wire)
