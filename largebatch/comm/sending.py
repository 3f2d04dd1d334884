"""Gradients on their way to the other ranks, in the form that Horovod's DistributedOptimizer takes as `compression`.

The ranks' gradients are added in place: afterwards nobody can tell on which rank a NaN began. So they may be measured
before they are sent.
"""

import torch
from torch import Tensor


class Unchanged:
    """Sends gradients in their own type. One instance serves one optimizer."""

    measures = False  # whether to read each gradient before it is sent

    def __init__(self) -> None:
        self.peaks: list[Tensor] = []  # a 0-d tensor per gradient of the step that is being sent

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor to send and the gradient itself."""
        if self.measures:
            low, high = torch.aminmax(gradient)  # both are nan if the gradient has one
            self.peaks.append(torch.maximum(high, -low))
        return gradient, gradient

    def decompress(self, wire: Tensor, gradient: Tensor) -> Tensor:
        """Return what was received."""
        return wire

    def take_peak(self) -> Tensor | None:
        """Return the largest absolute value sent since the last call, as a 0-d tensor; it may be inf or nan.

        None if nothing was measured, or nothing sent, as on one rank.
        """
        peak = torch.stack([peak.double() for peak in self.peaks]).max() if self.peaks else None
        self.peaks.clear()
        return peak
