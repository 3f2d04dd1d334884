"""Gradients on their way to the other ranks, in the form that Horovod's DistributedOptimizer takes as `compression`.

The ranks' gradients are added in place: afterwards nobody can tell on which rank a NaN began. So they may be measured
before they are sent.
"""

import torch
from torch import Tensor


class Unchanged:
    """Sends gradients in their own type. One instance serves one optimizer."""

    measures = False  # whether to read each gradient before it is sent
    measures_norm = False  # whether to take the norm of each in the coming step

    def __init__(self) -> None:
        self.peaks: list[Tensor] = []  # a 0-d tensor per gradient of the step that is being sent
        self.norms: list[Tensor] = []

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor to send and the gradient itself."""
        if self.measures:
            low, high = torch.aminmax(gradient)  # both are nan if the gradient has one
            self.peaks.append(torch.maximum(high, -low))
        if self.measures_norm:
            self.norms.append(torch.linalg.vector_norm(gradient))
        return gradient, gradient

    def decompress(self, wire: Tensor, gradient: Tensor) -> None:
        """Write what was received into the gradient: it is there."""

    def take_peak(self) -> Tensor | None:
        """Return the largest absolute value sent since the last call, as a 0-d tensor; it may be inf or nan.

        None if nothing was measured, or nothing sent, as on one rank.
        """
        peak = torch.stack([peak.double() for peak in self.peaks]).max() if self.peaks else None
        self.peaks.clear()
        return peak

    def take_square(self) -> Tensor | None:
        """Return the sum of squares of all gradients sent since the last call, 0-d; None if it was not wanted."""
        square = torch.stack([norm.double() for norm in self.norms]).square().sum() if self.norms else None
        self.norms.clear()
        self.measures_norm = False
        return square
