"""A skipped step is traced back to its rank, micro-batch and images, and the run goes on as if nobody had looked."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from parts import plan_for, replicas_agree, small_model, small_trainer
from torch import nn

from largebatch.engine import Hook
from largebatch.hooks import Guards
from largebatch.ranks import Stopped

HOST = os.uname().nodename


def spoil(trainer, sample: int, change: Callable[[torch.Tensor], object]) -> None:
    """Change the pixels of a sample after decoding, each time that it comes."""
    opened = trainer.open_batches

    def spoilt(start: int) -> Iterator:
        for batch in opened(start):
            for row in (batch.samples == sample).nonzero()[0]:
                change(batch.images[row])
            yield dataclasses.replace(batch)

    trainer.open_batches = spoilt


def the_place(trainer, step: int, number: int) -> tuple[int, list[int]]:
    """The rank that computes a micro-batch, and its samples."""
    micro = trainer.plan.micro_batches(step, 0, 1)[number]
    return number % trainer.comm.size, trainer.plan.samples(micro.start, micro.stop)[1].tolist()


def guarded(comm, *, steps: int = 2, **options):
    """A trainer whose run ends after two skipped steps in a row; in the first two, each sample comes once at most."""
    trainer = small_trainer(comm, plan_for(comm, steps=steps), passes=2, **options)
    trainer.hooks = [Guards(max_skipped_steps=2, where="number {}".format)]
    return trainer


def warnings(caplog) -> list[str]:
    return [message for message in caplog.messages if "skipped" in message]


@pytest.mark.parametrize("mixup_alpha", [0.0, 0.2])
def test_an_image_with_a_nan(comm, caplog, mixup_alpha):
    caplog.set_level(logging.WARNING)
    trainer = guarded(comm, mixup_alpha=mixup_alpha)
    number = 2 * comm.size - 1
    rank, samples = the_place(trainer, 1, number)
    spoil(trainer, samples[2], lambda image: image[1, 3].fill_(float("nan")))
    trainer.fit()
    assert trainer.state.skipped == 1 and replicas_agree(comm, trainer.model, "nan")
    if comm.rank == 0:
        (message,) = warnings(caplog)
        assert message.startswith("step 2 skipped: ") and f"the loss is not finite on rank {rank};" in message
        assert message.endswith(
            f"computed again, it began on rank {rank} ({HOST}): micro-batch {number}, sample number {samples[2]} with "
            "pixels that are not finite"
        )


def test_an_image_that_overflows_in_the_model(comm, caplog):
    caplog.set_level(logging.WARNING)
    trainer = guarded(comm, mixup_alpha=0.0)
    rank, samples = the_place(trainer, 1, 0)
    spoil(trainer, samples[1], lambda image: image.fill_(1e30))
    trainer.fit()
    assert trainer.state.skipped == 1
    if comm.rank == 0:
        (message,) = warnings(caplog)
        assert message.endswith(f"it began on rank {rank} ({HOST}): micro-batch 0, sample number {samples[1]}")


def test_a_rank_that_computes_wrongly(comm, caplog):
    """Its backward pass gives a NaN each time, in a weight's gradient alone; the run is given up."""
    caplog.set_level(logging.WARNING)
    trainer = guarded(comm)
    rank = comm.size - 1
    if comm.rank == rank:
        trainer.model[5].weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(Stopped) as stopped:
        trainer.fit()
    every = "it is so in each micro-batch of every rank" if comm.size == 1 else "it began on rank 2"
    assert trainer.state.step == 2 and f"; computed again, {every}" in str(stopped.value)
    if comm.size > 1:
        assert f"rank 2 ({HOST}): each of its micro-batches; lower --optim.lr" in str(stopped.value)


def test_a_fault_that_does_not_repeat_is_caught_at_its_second_time(comm, caplog):
    caplog.set_level(logging.WARNING)
    trainer = guarded(comm, steps=5)
    faults, rank = [0, 2], comm.size - 1

    def fault(gradient: torch.Tensor) -> torch.Tensor | None:
        if faults and trainer.state.step == faults[0]:
            faults.pop(0)
            return gradient * float("nan")
        return None

    if comm.rank == rank:
        trainer.model[5].weight.register_hook(fault)
    trainer.fit()
    assert trainer.state.skipped == 2 and not faults or comm.rank != rank
    if comm.rank == 0:
        one, other = warnings(caplog)
        again = "computed again, the gradient is finite on every rank, so a processor or a memory may be at fault"
        assert one.endswith(f"the loss is finite on every rank; {again}")
        assert (f"the gradient is not on rank {rank}; {again}" in other) == (comm.size > 1)


def test_overflows_of_a_growing_loss_scale_are_not_looked_into(comm, caplog):
    """Until the run is given up: then the scale does not explain them."""
    caplog.set_level(logging.WARNING)
    trainer = guarded(comm)
    trainer.scaler = torch.amp.GradScaler("cpu")
    rank, samples = the_place(trainer, 0, 0)
    spoil(trainer, samples[0], lambda image: image.fill_(float("nan")))
    trainer.fit(max_steps=1)
    assert trainer.state.skipped == 1
    if comm.rank == 0:
        assert "computed again" not in warnings(caplog)[-1]
    spoil(trainer, the_place(trainer, 1, 0)[1][0], lambda image: image.fill_(float("nan")))
    with pytest.raises(Stopped, match=rf"began on rank 0 \({HOST}\): micro-batch 0, sample"):
        trainer.fit()


def test_a_rank_that_cannot_look_says_so_and_the_run_goes_on(comm, caplog):
    """It has no memory for it; no rank waits for another while it looks."""
    caplog.set_level(logging.WARNING)
    trainer = guarded(comm)
    spoil(trainer, the_place(trainer, 0, 0)[1][0], lambda image: image.fill_(float("nan")))
    opened, rank = trainer.open_batches, comm.size - 1
    points: list[int] = []

    class Points(Hook):
        def at_point(self, trainer) -> None:
            points.append(trainer.state.step)

    def failing(start: int) -> Iterator:
        if points and comm.rank == rank:
            raise MemoryError("planted")
        return opened(start)

    trainer.open_batches = failing
    trainer.hooks.append(Points())
    trainer.fit()
    assert trainer.state.skipped == 1 and points == [0, 0, 1, 1, 2, 2]  # the last are of the evaluation
    if comm.rank == 0:
        assert f"rank {rank} could not (MemoryError: planted)" in warnings(caplog)[0]


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return images


def test_looking_moves_nothing(comm):
    """Weights, buffers, running statistics and random numbers are those of a run in which nobody looks."""

    def trained(looks: bool) -> dict[str, torch.Tensor]:
        model = nn.Sequential(Counting(), nn.BatchNorm2d(3), small_model(dropout=0.2))
        trainer = guarded(comm, model=model)
        trainer.hooks = trainer.hooks if looks else []
        spoil(trainer, the_place(trainer, 1, 0)[1][0], lambda image: image.fill_(float("nan")))
        trainer.fit()
        assert trainer.state.skipped == 1 and trainer.state.step == 2
        return {**model.state_dict(), "draw": torch.rand(3)}

    one, other = trained(True), trained(False)
    assert all(torch.equal(one[name], other[name]) for name in other)
