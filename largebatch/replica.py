"""One copy of the model, whole on one rank; `parallel.replica` has one that several ranks share.

A replica never sees the trainer. The trainer calls it for everything that differs when ranks share a model.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.augment import Augmented
from largebatch.batch_norm import BatchNormStatistics
from largebatch.losses import Objective
from largebatch.optim import gradient_norm
from largebatch.ranks import Ranks
from largebatch.ranks.reduction import Reduced

ForwardBackward = Callable[[Augmented, float], Tensor]  # `Trainer.forward_backward`


class Replica:
    """A whole model on this rank."""

    model: nn.Module
    optimizer: Reduced
    comm: Ranks
    statistics: BatchNormStatistics

    # -- assembly ----------------------------------------------------------------------------------------------

    def adapt_optimizer(self, serial: Optimizer) -> Optimizer:
        """Return the optimizer of this copy, given that of a whole model."""
        return serial

    def adapt_objective(self, serial: Objective) -> Objective:
        """Return the objective of this copy, given that of a whole model."""
        return serial

    def check_objective(self, objective: Objective) -> None:
        """Raise ValueError if this copy cannot train with it."""

    def attach(self, model: nn.Module, optimizer: Reduced, comm: Ranks) -> None:
        self.model, self.optimizer, self.comm = model, optimizer, comm
        self.statistics = BatchNormStatistics(model, comm)

    def describe(self) -> list[str]:
        """Return lines for the log; every rank calls it."""
        return []

    # -- one step ----------------------------------------------------------------------------------------------

    def run_pass(self, batch: Augmented, weight: float, forward_backward: ForwardBackward) -> Tensor:
        """Add the gradients of a micro-batch's summed loss × `weight`; return that loss, 0-d."""
        return forward_backward(batch, weight)

    def complete_gradients(self) -> None:
        """After the last pass, add the parts of the gradients from other ranks of this copy."""

    def gradient_norm(self) -> Tensor:
        """Return the global norm, 0-d."""
        return gradient_norm(self.optimizer)

    def begin_again(self) -> None:
        """Drop the gradients: the same micro-batches follow at other weights, and count for no statistics."""
        self.model.zero_grad(set_to_none=True)
        self.statistics.pause()

    def complete_step(self, *, applied: bool) -> None:
        """Drop the gradients, and average the statistics of batch norm if the step was applied. A collective."""
        self.statistics.complete_step(applied=applied)
        self.model.zero_grad(set_to_none=True)

    def drop_step(self) -> None:
        """Forget the passes of a step that is not complete."""
        self.statistics.drop_step()
        self.model.zero_grad(set_to_none=True)

    def predictor(self, model: nn.Module) -> nn.Module:
        """Return a module that computes logits (B, K) of images (B, 3, H, W) on every rank."""
        return model

    # -- checkpoints -------------------------------------------------------------------------------------------

    def gather_whole(self) -> tuple[nn.Module, Optimizer]:
        """Return the whole model and optimizer, for rank 0 to save; every rank calls it."""
        return self.model, self.optimizer

    def empty_whole(self) -> tuple[nn.Module, Optimizer]:
        """Return a whole model and optimizer, into which rank 0 loads a checkpoint."""
        return self.model, self.optimizer

    def scatter_whole(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Give every rank its part of the checkpoint that rank 0 has loaded; every rank calls it."""
        self.comm.broadcast_state(model, optimizer)
