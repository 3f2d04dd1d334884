"""Gradients that are sent in fp16, in the form that Horovod's DistributedOptimizer takes as `compression`.

The largest number in fp16 is 65504. Below 6e-5 it loses digits, and at 6e-8 the last one. Two factors keep gradients
inside this range:

- Each rank divides by the number of ranks in fp32, before it casts. The sum over ranks is then the mean, and no larger
  than the largest of its terms. Horovod's own prescale and postscale factors come after the cast and are rounded to
  fp16 once more, and with its average the sum itself may overflow first.
- The loss scale makes up for the division of small values: build/ enables the GradScaler with compression in every
  precision. An overflow while sending halves the scale, like an overflow in the model.
"""

import torch
from torch import Tensor

from largebatch.ranks.sending import Unchanged


class Fp16(Unchanged):
    """Sends gradient / num_ranks in fp16 and writes the sum back into the gradient in its own type.

    Horovod must add (op=Sum). One instance serves one optimizer.
    """

    measures = True  # the cast may overflow

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor to send and the gradient itself, into which `decompress` writes."""
        super().compress(gradient)
        wire = torch.empty_like(gradient, dtype=torch.float16)
        return torch.mul(gradient, 1 / self.num_ranks, out=wire), gradient

    def decompress(self, wire: Tensor, gradient: Tensor) -> None:
        """Overwrite this rank's gradient with the mean over ranks."""
        gradient.copy_(wire)
