"""A GPU computes what the CPU computes, from the same draws, and the host does not wait for it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from test_checkpoint import load, make_parts, save
from test_never_late import CLASSES, GLOBAL_BATCH, RUNS, label_maps, vit_with_cutmix
from test_optim import COMPILE, Reference, make_params, relative, set_grads
from torch import Tensor, nn

from largebatch import checkpoint
from largebatch.augment import Augment
from largebatch.data import randaugment, randaugment_ops
from largebatch.hooks import Checkpoint
from largebatch.hooks.ema import lerp_
from largebatch.native.copies import pack, to_device, unpack
from largebatch.optim import (
    Lamb,
    build_optimizer,
    init_state,
    scale_gradients,
)
from largebatch.ranks.reduction import Reduced
from largebatch.ranks.single import Single

CPU = torch.device("cpu")


@contextmanager
def waiting(device: torch.device, mode: str) -> Iterator[None]:
    """Inside the block, a wait of the host for a GPU is an error, or by default allowed."""
    if device.type == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# -- the host ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS)
def test_a_training_step_waits_once(gpu, run, monkeypatch):
    """For the norm of the gradient. On CPUs: test_never_late.py.

    LAMB waits for an event, which is no error here; for other optimizers the norm is read outside of the block.
    """

    step_if_finite = Reduced.step_if_finite

    def steps(optimizer: Any, scaler: Any, grad_norm: Tensor) -> bool:
        with waiting(gpu, "error" if hasattr(optimizer, "can_skip") else "default"):
            return step_if_finite(optimizer, scaler, grad_norm)

    monkeypatch.setattr(Reduced, "step_if_finite", steps)
    trainer = RUNS[run](gpu)
    trainer.fit(max_steps=2)
    with waiting(gpu, "error"):
        trainer.fit(max_steps=5)
    assert trainer.state.step == 5 and trainer.state.skipped == 0
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_tensors_of_all_types_arrive(device):
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=shape) for shape in ((3,), (5, 7), (), (0, 4), (1,))]
    types = (torch.float64, torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)
    tensors = [torch.from_numpy(np.asarray(array)).to(dtype) for array in arrays for dtype in types]
    tensors.append(torch.arange(12).view(3, 4).T)
    before = [tensor.clone() for tensor in tensors]
    with waiting(device, "error"):
        sent = to_device(*tensors, device=device)
        if device.type == "cuda":
            for tensor in tensors:
                tensor.fill_(1)  # the copy does not need them any more
    for one, other in zip(sent, before, strict=True):
        assert one.device.type == device.type and one.dtype == other.dtype and torch.equal(one.cpu(), other)
    assert to_device(device=device) == []
    for one, other in zip(unpack(pack(before, pinned=False), before), before, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["eager", COMPILE])
def test_lamb_equals_the_float64_reference(device, impl):
    params = [nn.Parameter(p.detach().to(device)) for p in make_params(torch.float32)]
    references = [Reference(p.detach().cpu().numpy(), wd=0.1) for p in params]
    optimizer = Lamb(params, impl=impl, weight_decay=0.1)
    for step in range(4):
        grads = make_params(torch.float32)
        set_grads(grads, step)
        optimizer.param_groups[0]["lr"] = lr = 0.01 * (step + 1)
        for p, g, reference in zip(params, grads, references):
            p.grad = g.grad.to(device)
            reference.step(0.5 * g.grad.double().numpy(), lr)
        scale_gradients(optimizer, torch.tensor(0.5, device=device))
        optimizer.step()
    for p, reference in zip(params, references):
        assert relative(p.cpu(), reference.x) <= 1e-6


@pytest.mark.parametrize("impl", ["plain", "eager", COMPILE])
def test_lamb_takes_no_step_if_a_flag_on_its_device_says_so(device, impl):
    """x, m and v stay as they are to the bit, and the steps that follow are as if it had never been."""
    ours, theirs = ([nn.Parameter(p.detach().to(device)) for p in make_params(torch.float32)] for _ in range(2))
    skipping, plain = (Lamb(params, impl=impl, weight_decay=0.1) for params in (ours, theirs))
    init_state(skipping)
    for step in range(3):
        state = [tensor for p in ours for tensor in (p, *skipping.state[p].values()) if torch.is_tensor(tensor)]
        before = [tensor.detach().clone() for tensor in state]
        for p, value in zip(ours, (torch.inf, torch.nan, 1.0) * len(ours)):
            p.grad = torch.full_like(p, value)
        skipping.finite = torch.tensor(False, device=device)
        skipping.step()
        skipping.take_back()
        assert all(torch.equal(old.view(-1).view(torch.int32), new.detach().view(-1).view(torch.int32))
                   for old, new in zip(before, state, strict=True))  # fmt: skip
        for params in (ours, theirs):
            grads = make_params(torch.float32)
            set_grads(grads, step)
            for p, g in zip(params, grads):
                p.grad = g.grad.to(device)
        skipping.finite = torch.tensor(True, device=device)
        skipping.step()
        plain.step()
        assert skipping.finite is None
    for p, other in zip(ours, theirs):
        assert relative(p.cpu(), other.detach().double().cpu()) <= 1e-6
        assert skipping.state[p]["step"] == plain.state[other]["step"] == 3


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_is(device):
    model = nn.Linear(5, 3).to(device)
    optimizer = Single().wrap(build_optimizer(model, lr=0.1, weight_decay=0.1), model)
    init_state(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for value, applied in ((1.0, True), (torch.inf, False), (torch.nan, False)):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.synchronize()
        assert optimizer.step_if_finite(scaler, torch.tensor(value, device=device)) == applied
        after = model.state_dict(), optimizer.state_dict()["state"]
        same = [torch.equal(old, after[0][name]) for name, old in before[0].items()]
        same += [torch.equal(old[k], after[1][i][k]) for i, old in before[1].items() for k in ("exp_avg", "exp_avg_sq")]
        assert same == [not applied] * len(same)


@pytest.mark.parametrize(
    "options",
    [dict(mixup_alpha=0.2, erase_prob=0.5), dict(cutmix_alpha=1.0, erase_prob=1.0),
     dict(mixup_alpha=0.4, label_smoothing=0.1, grid=4, ground_truth="published")],
    ids=["mixup", "cutmix", "tokens"],
)  # fmt: skip
def test_augmentation_is_that_of_the_cpu(device, options):
    images, labels = torch.randn(16, 3, 64, 64), torch.arange(16) % CLASSES
    maps = label_maps(16, layers=2, device=CPU) if "grid" in options else None
    expected = Augment(CLASSES, **options)(images, labels, torch.Generator().manual_seed(1), maps)
    there = None if maps is None else type(maps)(*(tensor.to(device) for tensor in maps if tensor is not None))
    generator = torch.Generator().manual_seed(1)
    found = Augment(CLASSES, **options)(images.to(device), labels.to(device), generator, there)
    assert found.mix_box == expected.mix_box
    for one, other in zip(found[:3], expected[:3]):
        torch.testing.assert_close(None if one is None else one.cpu(), other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("text", ["rand-m9-n3-p0.9", "3a", "tf-m10-n2"])
def test_operations_on_pixels_are_those_of_the_cpu_to_the_bit(device, text):
    images = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    operations = randaugment.draw(randaugment.parse(text, 32), 0, np.zeros(64, dtype=np.int64), np.arange(64))
    expected = randaugment_ops.with_torch(images.clone(), (1, 2, 3), operations)
    found = randaugment_ops.with_torch(images.to(device, copy=True), (1, 2, 3), operations)
    assert torch.equal(found.cpu(), expected)


def test_dropout_is_a_function_of_seed_step_and_number(device):
    trainer = vit_with_cutmix(device)
    batches = trainer.open_batches(0)
    first, second = next(batches), next(batches)
    masks = []
    for batch in (first, second, first):
        trainer.prepare(batch)
        masks.append(nn.functional.dropout(torch.ones(1000, device=device)))
        torch.rand(7, device=device)
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])


def test_the_average_of_the_weights(device):
    average, model = (nn.Linear(4, 3).to(device) for _ in range(2))
    expected = torch.lerp(average.weight.detach().cpu(), model.weight.detach().cpu(), 0.25)
    with torch.no_grad():
        lerp_(average, model, 0.25)
    torch.testing.assert_close(average.weight.detach().cpu(), expected)


def test_a_checkpoint_goes_to_another_device_and_back(device, tmp_path):
    """To the bit: the device of a run is not part of its state."""
    parts = make_parts(seed=1)
    for name in ("host", "device", "back"):
        (tmp_path / name).mkdir()
    path = save(tmp_path / "host", 1, parts=parts)
    for folder, where in (("device", device), ("back", CPU)):
        fresh = make_parts(seed=2, steps=0)
        fresh[0].to(where)
        load(path, fresh)
        assert {value.device.type for state in fresh[1].state.values() for value in state.values()
                if torch.is_tensor(value)} == {where.type}  # fmt: skip
        path = save(tmp_path / folder, 1, parts=fresh)
    assert all(torch.equal(one, other) for one, other in zip(parts[0].parameters(), fresh[0].parameters()))
    one, other = (parts[1].state_dict()["state"], fresh[1].state_dict()["state"])
    assert all(torch.equal(one[i][key], other[i][key]) for i in one for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("run", RUNS)
def test_a_checkpoint_that_is_copied_while_the_gpu_goes_on_has_the_bits_of_its_step(device, run, tmp_path):
    """A save compares the sums of the file with those of its step, and fails if a bit differs."""
    trainer = RUNS[run](device)
    saving = Checkpoint(tmp_path, every_images=GLOBAL_BATCH, keep=9, config_text="")
    trainer.hooks = [*trainer.hooks, saving]
    trainer.fit(max_steps=5)
    assert [int(path.name) for path in checkpoint.checkpoints(tmp_path)] == [5, 4, 3, 2, 1]
