"""Gradients in fp16 on the wire, in the form that Horovod's DistributedOptimizer takes as `compression`.

fp16 ends at 65504, and below 6e-5 it loses digits, at 6e-8 the last one. Two factors keep a gradient in between:

- Each rank divides by the number of ranks before it casts, in fp32, so that the sum over ranks is the mean and does
  not exceed the largest of its terms. Horovod's own prescale and postscale factors come after the cast, are rounded to
  fp16 again, and with its average the sum itself may overflow first.
- What the division takes from small values the loss scale gives back and more: build.py turns the GradScaler on with
  compression in every precision, and an overflow of the wire halves the scale as one of the model does.
"""

import torch
from torch import Tensor


class Fp16:
    """Casts this rank's share of the mean gradient to fp16, and back what the sum over ranks has made of it.

    Horovod has to add (op=Sum). One instance serves one optimizer.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.peaks: list[Tensor] = []  # of the window that is being sent, a 0-d tensor per gradient

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """What is sent, and what `decompress` needs: the gradient's own memory."""
        low, high = torch.aminmax(gradient)  # nan if there is one
        self.peaks.append(torch.maximum(high, -low))
        wire = torch.empty_like(gradient, dtype=torch.float16)
        return torch.mul(gradient, 1 / self.num_ranks, out=wire), gradient

    def decompress(self, wire: Tensor, gradient: Tensor) -> Tensor:
        """The mean over ranks, in place of this rank's gradient."""
        return gradient.copy_(wire)

    def take_peak(self) -> Tensor | None:
        """Largest absolute value that was compressed since the last call, inf and nan as they are: 0-d."""
        peak = torch.stack([peak.double() for peak in self.peaks]).max() if self.peaks else None
        self.peaks.clear()
        return peak
