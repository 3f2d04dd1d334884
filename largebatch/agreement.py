"""What each rank tries out before the first step, so that all ranks use it, or none does."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from largebatch.augment import Augmented
from largebatch.config import TrainConfig
from largebatch.ranks import Communicator


def first_cause(comm: Communicator, cause: str, *, name: str) -> str:
    """Return which rank cannot use something, and why, the same on all ranks; "" if all can. Collective.

    cause: why this rank cannot, as the end of a sentence that begins with its name.
    """
    causes = comm.allgather_object(cause, name=name)
    return next((f"rank {rank} {cause}" for rank, cause in enumerate(causes) if cause), "")


def micro_batch(
    config: TrainConfig, model: nn.Module, device: torch.device, make: Callable[..., Tensor] = torch.zeros
) -> Augmented:
    """Return a micro-batch in the shapes of training. make: how its pixels are made."""
    count, side = config.data.micro_batch_size, config.model.img_size
    images = make(count, 3, side, side, device=device)
    targets = make(count, getattr(model, "num_classes"), device=device)
    return Augmented(images, targets, mix_box=(0, 0, 1, 1) if config.augment.mix_token else None)


def first_line(error: BaseException) -> str:
    """Return the type and the first line of the innermost error: torch wraps those of a compiler."""
    while inner := getattr(error, "inner_exception", None) or error.__cause__:
        error = inner
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
