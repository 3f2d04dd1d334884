"""Finds the rank, the micro-batch and the images with which a gradient that is not finite began.

The ranks' gradients are added in place, so after a step nobody knows whose was not finite. But a skipped step moves
nothing, and its micro-batches depend on the seed and the step alone. So each rank computes its own again, by itself and
without a loss scale.
"""

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from largebatch.augment import Augmented
from largebatch.engine import Trainer
from largebatch.hooks.recompute import undone
from largebatch.precision import autocast

MOST = 3  # places in a message
Where = Callable[[int], str]  # sample number -> text that names it


@dataclass(frozen=True)
class Place:
    """A micro-batch whose gradient is not finite."""

    number: int
    cause: str
    samples: list[int]


@dataclass(frozen=True)
class Found:
    """The result of one rank."""

    host: str
    places: tuple[str, ...] = ()
    everywhere: bool = False  # in all its micro-batches
    failure: str = ""


def find_origin(trainer: Trainer, step: int, where: Where) -> tuple[str, bool]:
    """Compute the micro-batches of a skipped step again; return a clause about the origin, and whether it was found.

    A collective. step: number of the step, from 0; nothing must have moved since. where: names a sample.
    """
    host, comm = socket.gethostname(), trainer.comm
    try:
        places = list(recompute(trainer, step))
        everywhere = len(places) == len(trainer.plan.micro_batches(step, comm.data_rank, comm.data_size)) > 1
        mine = Found(host, tuple(describe_place(place, where) for place in places), everywhere)
    except Exception as error:  # this only explains, so it must not end the run: there may be no memory for it
        mine = Found(host, failure=f"{type(error).__name__}: {error}")
    return describe(comm.allgather_object(mine, name="guards/origin"))


def recompute(trainer: Trainer, step: int) -> Iterator[Place]:
    """Yield the micro-batches of this rank whose gradient is not finite. The run's state stays as it is."""
    mine = trainer.plan.micro_batches(step, trainer.comm.data_rank, trainer.comm.data_size)
    with as_before(trainer, step), closing(trainer.open_batches(step)) as batches:
        for batch in itertools.islice(batches, len(mine)):
            # Not the trainer's `window`, in which the ranks talk to each other: each one may fail here by itself.
            trainer.comm.progress(f"step {step + 1} again, micro-batch {batch.number}")
            augmented = trainer.prepare(batch)
            if bad := rows(batch.images):
                yield Place(batch.number, " with pixels that are not finite", batch.samples[bad].tolist())
            elif (found := examine(trainer, augmented)) is not None:
                yield Place(batch.number, "", batch.samples[found].tolist())


def examine(trainer: Trainer, batch: Augmented) -> list[int] | None:
    """Return the rows of a micro-batch whose part of the gradient is not finite, all if it cannot be told; else None.

    The gradient of an image shows its row, unless batch normalisation couples the images. With mixup, the row of an
    image mixed with a bad one is bad, too.
    """
    images = batch.images.detach().requires_grad_()
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    with autocast(trainer.device, trainer.precision):
        loss = trainer.objective(trainer.model, batch._replace(images=images))
    # Not `backward`, which would add to the gradients and start Horovod's reduction.
    of_images, *others = torch.autograd.grad(loss, [images, *parameters], allow_unused=True)
    if torch.isfinite(loss) and all(bool(torch.isfinite(g).all()) for g in (of_images, *others) if g is not None):
        return None
    return rows(of_images) or list(range(len(images)))


def rows(tensor: Tensor) -> list[int]:
    """Return the rows of (B, ...) that have a value which is not finite."""
    found: list[int] = torch.isfinite(tensor).flatten(1).all(dim=1).logical_not().nonzero().flatten().tolist()
    return found


@contextmanager
def as_before(trainer: Trainer, step: int) -> Iterator[None]:
    """Put the run back to the beginning of `step`; afterwards restore its place, buffers and random state.

    Models run uncompiled: gradients of images would need another compilation.
    """
    state = trainer.state
    trainer.state = replace(state, step=step)
    try:
        with undone(trainer), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        trainer.state = state


# -- the message ---------------------------------------------------------------------------------------------------


def describe_place(place: Place, where: Where) -> str:
    samples = first([where(sample) for sample in place.samples[:MOST]], len(place.samples), ", ")
    noun = "sample" if len(place.samples) == 1 else "samples"
    return f"micro-batch {place.number}, {noun} {samples}{place.cause}"


def first(texts: Sequence[str], count: int, comma: str) -> str:
    """Join the first texts of `count`, and say how many are left out."""
    more = [f"{count - MOST} more"] if count > MOST else []
    return comma.join([*texts[:MOST], *more])


def describe(ranks: list[Found]) -> tuple[str, bool]:
    failed = [f"rank {rank} could not ({found.failure})" for rank, found in enumerate(ranks) if found.failure]
    bad = [rank for rank, found in enumerate(ranks) if found.places]
    if not bad:
        again = "computed again, the gradient is finite on every rank, so a processor or a memory may be at fault"
        return "; ".join([again, *failed[:MOST]]), False
    if all(found.everywhere for found in ranks):
        return "computed again, it is so in each micro-batch of every rank: no single image is the cause", True
    clauses = []
    for rank in bad[:MOST]:
        host, places = ranks[rank].host, ranks[rank].places
        what = "each of its micro-batches" if ranks[rank].everywhere else first(places, len(places), "; ")
        clauses.append(f"rank {rank} ({host}): {what}")
    return "; ".join(["computed again, it began on " + first(clauses, len(bad), "; "), *failed[:MOST]]), True
