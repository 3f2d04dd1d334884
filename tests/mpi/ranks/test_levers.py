"""What saves memory, time or bandwidth computes the same: recomputation, compilation, compression."""

import logging

import horovod.torch as hvd
import pytest
import torch
from parts import (
    CLASSES,
    batch_of,
    plan_for,
    seen_by_optimizer,
    serial_run,
    small_model,
    small_trainer,
    stopped_and_resumed,
    tiny_vit,
)
from torch import nn

from largebatch.augment import Augment, seed_for
from largebatch.data.order import Plan
from largebatch.engine import Trainer
from largebatch.hooks import Guards
from largebatch.losses import classification
from largebatch.ranks import Stopped
from zoo import volo

DROPOUT = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.1}
PASSES = 2


def gradients_of(comm, model: nn.Module, **options) -> list[torch.Tensor]:
    """What the optimizer sees in the first step."""
    trainer = small_trainer(comm, plan_for(comm), passes=PASSES, model=model, **options)
    return seen_by_optimizer(trainer, trainer.open_batches(0))[0]


# -- recomputation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputed_blocks_give_the_same_reduced_gradient(comm, precision):
    """To the last bit, over two passes with every kind of dropout."""
    kept, recomputed = tiny_vit(**DROPOUT), tiny_vit(**DROPOUT)
    recomputed.set_grad_checkpointing()
    one, other = (gradients_of(comm, model, precision=precision) for model in (kept, recomputed))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


# -- stochastic depth ---------------------------------------------------------------------------------------------


def with_stochastic_depth() -> nn.Sequential:
    """A model with a VOLO's block of each kind, both with stochastic depth."""
    options = {"mlp_ratio": 2.0, "drop_path": 0.5}
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 2, stride=2),
        Turned(),
        volo.Block(volo.OutlookAttention(8, 2, attn_drop=0.0), 8, **options),
        volo.Block(volo.Attention(8, 2, attn_drop=0.0), 8, **options),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


class Turned(nn.Module):
    """(B, C, H, W) -> (B, H, W, C)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1)


def test_images_that_skip_a_layer_are_drawn_alike_on_any_number_of_ranks(comm):
    """With a short step, and one whose last micro-batch has a single image."""
    plan = plan_for(comm, steps=3, left_over=5)
    trainer = small_trainer(comm, plan, passes=PASSES, model=with_stochastic_depth(), dtype=torch.float64)
    trainer.fit()
    serial = serial_run(plan, with_stochastic_depth().double())
    for ours, theirs in zip(trainer.model.parameters(), serial.parameters()):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


def test_a_run_with_stochastic_depth_resumes_with_the_same_bits(comm, tmp_path_factory):
    """From any step; rank 0 alone finds the checkpoint."""
    folder = tmp_path_factory.mktemp("resumed")

    def trainer() -> Trainer:
        return small_trainer(comm, plan_for(comm, steps=4), passes=PASSES, model=with_stochastic_depth())

    whole = trainer()
    whole.fit()
    for stop in (1, 2, 3):
        second = stopped_and_resumed(trainer, stop, folder)
        assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), second.model.parameters())), stop


# -- compression -------------------------------------------------------------------------------------------------

FP16_BOUND = 1e-3  # of ||difference|| / ||gradient||, per tensor; fp16 rounds by at most 2**-11 = 4.9e-4


def float64_gradients(plan: Plan) -> list[torch.Tensor]:
    """Of the first step, from the same fp32 images, in one process."""
    model, augment = small_model().double(), Augment(CLASSES, mixup_alpha=0.2)
    for micro in plan.micro_batches(0, 0, 1):
        batch = batch_of(plan, micro, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed_for(3, 0, micro.number))
        mixed = augment(batch.images.double(), batch.labels, generator)
        (classification(model, mixed) / plan.window_images(0)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("weight, scale", [(1.0, 2.0**10), (1e-6, 2.0**16)])
def test_compressed_gradients_keep_three_digits(comm, weight, scale):
    """Small ones too, which fp16 would round to nothing without a loss scale."""
    trainer = small_trainer(comm, plan_for(comm), passes=PASSES, compression="fp16", clip_norm=None)
    trainer.objective = lambda model, batch: weight * classification(model, batch)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    gradients, norm = seen_by_optimizer(trainer, trainer.open_batches(0))
    expected = [weight * gradient for gradient in float64_gradients(trainer.plan)]
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() <= FP16_BOUND * theirs.norm()
    whole = torch.stack([gradient.norm() for gradient in expected]).norm()
    assert abs(norm - whole) <= FP16_BOUND * whole
    exact = max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(gradients, expected)) < 5e-6
    assert exact == (comm.size == 1)  # what is sent is compressed


def test_gradients_in_bf16_are_wrong_by_no_more_than_their_bound(comm):
    """n roundings by 2⁻⁸ each, of numbers far out of fp16's range; Horovod says that it cannot add them.

    One process sends nothing.
    """
    model, draw = nn.Linear(1000, 3), torch.Generator().manual_seed(comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if comm.failures == (hvd.HorovodInternalError,):
        with pytest.raises(ValueError, match="Horovod does not add numbers in bf16:"):
            comm.wrap(optimizer, model, compression="bf16")
        return
    optimizer = comm.wrap(optimizer, model, compression="bf16")
    sent = [torch.randn(parameter.shape, generator=draw) * 1e20 for parameter in model.parameters()]
    sum((parameter * gradient).sum() for parameter, gradient in zip(model.parameters(), sent)).backward()
    optimizer.synchronize()
    everyone = comm.allgather_object(sent, name="sent")
    for number, parameter in enumerate(model.parameters()):
        whole = torch.stack([gradients[number].double() for gradients in everyone])
        bound = ((1 + 2.0**-8) ** comm.size - 1) * whole.abs().mean(0) if comm.size > 1 else 0.0
        wrong = (parameter.grad.double() - whole.mean(0)).abs()
        assert bool((wrong <= bound).all()) and bool((wrong > 0).any()) == (comm.size > 1)
        if comm.size > 1 and whole.numel() > 1000:
            print(f"bf16 of {comm.size} ranks: {wrong.norm() / whole.mean(0).norm():.1e}")


def test_a_rank_without_a_pass_in_its_first_step_has_the_loss_scale_too(comm):
    """Resumed before a short last step, of one micro-batch."""
    plan = plan_for(comm, left_over=4)
    trainer = small_trainer(comm, plan, passes=PASSES, compression="fp16")
    trainer.scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=128.0).state_dict())
    trainer.state.step, trainer.state.images = 1, plan.global_batch_size
    output = trainer.train_step(trainer.open_batches(1))
    assert output.applied and output.images == 4 and trainer.scaler.get_scale() == 128.0


def reduced(comm, values: list[float], *, compression: str) -> tuple[torch.Tensor, float | None]:
    """The mean over ranks of one gradient, rank r's being values[r]."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model, passes=1, compression=compression)
    (values[comm.rank] * model.weight.sum()).backward()
    optimizer.synchronize()
    return model.weight.grad, optimizer.sending.peak


def test_the_sum_does_not_overflow_where_the_mean_fits(comm):
    for values in ([6e4] * comm.size, [1e5 if comm.size > 1 else 6e4] + [0.0] * (comm.size - 1)):
        gradient, peak = reduced(comm, values, compression="fp16")
        assert torch.allclose(gradient, torch.full((1, 3), sum(values) / comm.size), rtol=FP16_BOUND)
        assert peak == (None if comm.size == 1 else torch.tensor(values[comm.rank]))
    assert reduced(comm, values, compression="none")[1] is None


@pytest.mark.parametrize("scaled", [True, False])
def test_an_overflow_of_the_wire_skips_the_step_and_is_told_from_the_models(comm, scaled, caplog):
    """One rank's gradient is finite in fp32 and its share of the mean beyond 65504; then one's loss overflows."""
    caplog.set_level(logging.WARNING)
    trainer = small_trainer(comm, plan_for(comm, steps=4), passes=PASSES, compression="fp16")
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1.0 if not scaled else 4.0, enabled=scaled)
    trainer.hooks = [Guards(max_skipped_steps=2)]
    last, spoilt = comm.rank == comm.size - 1, {0: 1e8, 2: 1e8, 3: float("inf")}

    def objective(model, batch):
        extra = spoilt.get(trainer.state.step, 0.0) if last else 0.0
        loss = classification(model, batch)
        return loss + extra * model[5].bias.sum() if extra else loss

    trainer.objective = objective
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    if comm.size == 1:  # nothing is sent, nothing is cast
        trainer.fit(max_steps=1)
        assert trainer.state.skipped == 0
        return
    trainer.fit(max_steps=1)
    assert trainer.state.skipped == 1
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters()))
    assert trainer.scaler.get_scale() == (2.0 if scaled else 1.0)
    if comm.rank == 0:
        message = caplog.messages[-1]
        assert "step 1 skipped" in message and "overflowed in fp16 on the wire" in message
        assert "--run.compression none" in message and ("loss scale now 2" in message) == scaled
    trainer.fit(max_steps=2)
    assert trainer.state.skipped == 1  # finite again
    with pytest.raises(Stopped, match=f"the loss is not finite on rank {comm.size - 1}"):
        trainer.fit()
    assert trainer.state.skipped == 3


def test_an_empty_parameter_has_no_largest_value(comm):
    model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.empty(0))])
    optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model, compression="fp16")
    (2 * sum(parameter.sum() for parameter in model)).backward()
    optimizer.synchronize()
    assert model[0].grad.tolist() == [2.0] * 3 and optimizer.sending.peak in (None, 2.0)
