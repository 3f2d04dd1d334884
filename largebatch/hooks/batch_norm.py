"""Running statistics of batch normalisation that do not depend on who computes a micro-batch.

Left alone, each rank would follow the micro-batches that it happens to see, and a checkpoint would hold rank 0's. Here

    statistics = statistics + momentum (mean over all micro-batches of the step - statistics)

once per step, and every rank holds the same numbers at every moment: nothing is left to be agreed on before an
evaluation or a checkpoint. With one pass of one rank it is what torch does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.engine import Hook, StepOutput, Trainer


@dataclass(eq=False)
class _Layer:
    module: _BatchNorm
    momentum: float
    kept: list[Tensor]  # mean and variance (C,) of the last step

    @property
    def buffers(self) -> list[Tensor]:
        """The module's own: after a step the statistics, within one the mean of its micro-batches so far."""
        mean, variance = self.module.running_mean, self.module.running_var
        assert mean is not None and variance is not None
        return [mean, variance]

    @property
    def passes(self) -> Tensor:
        """Micro-batches of this step so far, int64 0-d."""
        assert self.module.num_batches_tracked is not None
        return self.module.num_batches_tracked


class BatchNormStatistics(Hook):
    """Takes momentum from micro-batches to steps, for every layer that has running statistics.

    It comes before the hooks that average or save the model. A step costs one small allreduce. num_batches_tracked is 0
    after each step: with momentum None it makes torch begin a new mean.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = batch_norms(model)
        self.layers: list[_Layer] = []

    def before_fit(self, trainer: Trainer) -> None:
        """Let torch take plain means; one that was resumed stands in the buffers."""
        for module in self.modules:
            assert module.momentum is not None
            layer = _Layer(module, module.momentum, [])
            layer.kept = [buffer.clone() for buffer in layer.buffers]
            self.layers.append(layer)
            module.momentum = None
            layer.passes.zero_()

    @torch.no_grad()
    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """Average over all micro-batches of all ranks; a step that moved nothing is none."""
        passes = self.layers[0].passes
        sums = torch.cat([buffer.double() * passes for layer in self.layers for buffer in layer.buffers])
        total = trainer.comm.allreduce(torch.cat([sums, passes[None].double()]), name="batch_norm")
        step = iter((total[:-1] / total[-1]).float().split([len(b) for layer in self.layers for b in layer.buffers]))
        for layer in self.layers:
            for kept, buffer in zip(layer.kept, layer.buffers):
                mean = next(step)
                if output.applied:
                    kept.lerp_(mean, layer.momentum)
                buffer.copy_(kept)
            layer.passes.zero_()

    def after_fit(self, trainer: Trainer) -> None:
        """Give the modules back as they were."""
        for layer in self.layers:
            layer.module.momentum = layer.momentum
        self.layers.clear()


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The layers of batch normalisation that keep running statistics by momentum."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [layer for layer in layers if layer.track_running_stats and layer.momentum is not None]
