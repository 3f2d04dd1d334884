"""Gradients on their way to the other ranks, in the form that Horovod's DistributedOptimizer takes as `compression`.

They are added in place, and afterwards nobody can tell on which rank a NaN began. So they may be measured before.
"""

import torch
from torch import Tensor

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Unchanged:
    """Sends gradients in their own type. One instance serves one optimizer."""

    dtype: torch.dtype | None = None  # on the wire; None: that of the gradient
    averages = False  # whether the sum of what is sent is the mean
    measures = False  # whether to read each gradient before it is sent
    measures_norm = False  # whether to take the norm of each in the coming step

    def __init__(self) -> None:
        self.peaks: list[Tensor] = []  # a 0-d tensor per gradient of the step that is being sent
        self.norms: list[Tensor] = []
        # Of this rank's gradient, before compression and with the loss scale, 0-d; None: not measured, or nothing sent.
        self.peak: Tensor | None = None  # the largest absolute value of the newest reduction; it may be inf or nan
        self.square: Tensor | None = None  # the squared norm of the newest reduction for which `measure_norm` asked

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if self.measures and gradient.numel():  # an empty one has no largest value
            low, high = torch.aminmax(gradient)  # both are nan if the gradient has one
            self.peaks.append(torch.maximum(high, -low))
        if self.measures_norm:
            self.norms.append(torch.linalg.vector_norm(gradient))
        return gradient, gradient

    def decompress(self, wire: Tensor, gradient: Tensor) -> None:
        """Do nothing: the gradient has been received in place."""

    def measure_norm(self) -> None:
        self.square, self.measures_norm = None, True

    def complete(self) -> None:
        """Keep the measurements of a complete reduction."""
        self.peak = torch.stack([peak.double() for peak in self.peaks]).max() if self.peaks else None
        if self.norms:  # a second reduction of the same step keeps the square of the first
            self.square = torch.stack([norm.double() for norm in self.norms]).square().sum()
        self.peaks.clear()
        self.norms.clear()
        self.measures_norm = False


class Narrow(Unchanged):
    """Sends gradient / num_ranks in 16 bits, to be added. One instance serves one optimizer.

    Each rank divides by the number of ranks in fp32, before it casts, so the sum is the mean. Horovod's own factors
    come after the cast and round once more, and the sum for its average may overflow.

    The largest number in fp16 is 65504. Below 6e-5 it loses digits, and at 6e-8 the last one. The loss scale makes up
    for the division of small values: assembly/ enables the GradScaler with fp16 in every precision. An overflow while
    sending halves the scale, like an overflow in the model.

    bf16 has the range of fp32 and 8 bits, so it needs no scale. The casts of n ranks and the n - 1 additions each round
    by at most u = 2⁻⁸: the mean is wrong by at most ((1 + u)ⁿ - 1) × the mean of the absolute values.
    """

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
