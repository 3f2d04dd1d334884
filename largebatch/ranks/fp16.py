"""Gradients that are sent in fp16, in the form that Horovod's DistributedOptimizer takes as `compression`.

The largest number in fp16 is 65504. Below 6e-5 it loses digits, and at 6e-8 the last one. Two factors keep gradients
inside this range:

- Each rank divides by the number of ranks in fp32, before it casts, so the sum is the mean. Horovod's own factors come
  after the cast and round once more, and the sum for its average may overflow.
- The loss scale makes up for the division of small values: assembly/ enables the GradScaler with compression in every
  precision. An overflow while sending halves the scale, like an overflow in the model.
"""

import torch
from torch import Tensor

from largebatch.ranks.sending import Unchanged


class Fp16(Unchanged):
    """Sends gradient / num_ranks in fp16; Horovod must add (op=Sum). One instance serves one optimizer."""

    measures = True  # the cast may overflow

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        super().compress(gradient)
        wire = torch.empty_like(gradient, dtype=torch.float16)
        return torch.mul(gradient, 1 / self.num_ranks, out=wire), gradient

    def decompress(self, wire: Tensor, gradient: Tensor) -> None:
        gradient.copy_(wire)
