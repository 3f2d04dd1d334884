"""Running statistics of batch normalisation that do not depend on the rank that computes a micro-batch.

    statistics = statistics + momentum (mean over all micro-batches of the step - statistics)

once per step, on every rank alike. With one rank and one pass per step torch does the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.ranks import Ranks


@dataclass(eq=False)
class _Layer:
    module: _BatchNorm
    momentum: float
    kept: list[Tensor]  # mean and variance (C,) of the last step
    passes: int = 0  # micro-batches of this step so far

    @property
    def buffers(self) -> list[Tensor]:
        """Mean and variance of the module: after a step the statistics, within a step the mean so far."""
        mean, variance = self.module.running_mean, self.module.running_var
        assert mean is not None and variance is not None
        return [mean, variance]

    def forward(self, images: Tensor) -> Tensor:
        """Call the module; in training, its buffers become the plain mean over the micro-batches of this step."""
        # Without a momentum torch takes this mean by itself, but it waits for the GPU to read the count.
        if self.module.training:
            self.passes += 1
            self.module.momentum = 1 / self.passes
        return type(self.module).forward(self.module, images)

    def begin_step(self) -> None:
        assert self.module.num_batches_tracked is not None
        for kept, buffer in zip(self.kept, self.buffers):
            buffer.copy_(kept)
        self.module.num_batches_tracked.zero_()
        self.passes = 0


class BatchNormStatistics:
    """Applies momentum once per step instead of once per micro-batch; a step costs one small allreduce."""

    def __init__(self, model: nn.Module, comm: Ranks) -> None:
        self.model, self.modules = model, batch_norms(model)
        self.comm = comm
        self.layers: list[_Layer] = []  # empty outside `over_steps`
        self.saved: list[tuple[Tensor, Tensor]] = []  # buffers of the model and their values, since `pause`

    @contextmanager
    def over_steps(self) -> Iterator[None]:
        """Let the modules take plain means inside the block."""
        for module in self.modules:
            assert module.momentum is not None
            layer = _Layer(module, module.momentum, [])
            self.layers.append(layer)
            # torch would compile the layer anew for each momentum.
            setattr(module, "forward", torch.compiler.disable(layer.forward))
        self.take_up()
        try:
            yield
        finally:
            for layer in self.layers:
                layer.module.momentum = layer.momentum
                del layer.module.forward
            self.layers.clear()

    @torch.no_grad()
    def take_up(self) -> None:
        """Take the buffers, perhaps those of a checkpoint, as the statistics of the last step."""
        for layer in self.layers:
            layer.kept = [buffer.clone() for buffer in layer.buffers]
            layer.begin_step()

    @torch.no_grad()
    def complete_step(self, *, applied: bool) -> None:
        """Average over the micro-batches of all ranks; a step that was not applied does not count."""
        self._resume()
        if not self.layers:
            return
        # Each layer by its own passes: one may be in evaluation, and a head is not used by every micro-batch.
        parts = [torch.cat([*layer.buffers, layer.buffers[0].new_ones(1)]).double() for layer in self.layers]
        sums = torch.cat([part * layer.passes for part, layer in zip(parts, self.layers)])
        total = self.comm.allreduce(sums, name="batch_norm").split([len(part) for part in parts])
        for layer, part in zip(self.layers, total):
            means = (part[:-1] / part[-1]).float().chunk(2)
            for kept, mean in zip(layer.kept, means):
                if applied:
                    kept.copy_(torch.where(part[-1] > 0, kept.lerp(mean, layer.momentum), kept))
            layer.begin_step()

    def pause(self) -> None:
        """Let the passes from here to the end of the step count for no statistics."""
        # These passes repeat the step's, so each rank counts twice as many, and the shares of the ranks stay the same.
        self.saved = [(buffer, buffer.clone()) for buffer in self.model.buffers()]

    def _resume(self) -> None:
        for buffer, before in self.saved:
            buffer.copy_(before)
        self.saved = []

    @torch.no_grad()
    def drop_step(self) -> None:
        """Forget the micro-batches of a step that is not complete."""
        self._resume()
        for layer in self.layers:
            layer.begin_step()


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that keep running statistics by momentum."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [layer for layer in layers if layer.track_running_stats and layer.momentum is not None]
