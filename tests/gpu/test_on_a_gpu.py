"""A GPU computes what the CPU computes, from the same draws, and the host does not wait for it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import test_graphs
import test_never_late
import torch
from test_checkpoint import load, make_parts, save
from test_never_late import CLASSES, RUNS, label_maps, vit_with_cutmix
from test_optim import COMPILE, Reference, make_params, relative, set_grads
from torch import Tensor, nn

from largebatch.augment import Augment, Augmented
from largebatch.benchmark.solo import Solo
from largebatch.data import randaugment, randaugment_ops
from largebatch.graphs import Graphs, graph_passes
from largebatch.hooks.ema import lerp_
from largebatch.losses import classification
from largebatch.native.attention import outlook_difference
from largebatch.native.copies import pack, to_device, unpack
from largebatch.optim import (
    Lamb,
    WeightCopies,
    build_optimizer,
    fused_check,
    init_state,
    scale_gradients,
    why_not_fused,
)
from largebatch.ranks import reduction
from zoo.linear import read_copies
from zoo.volo import OutlookAttention, fuse_outlook

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

    def apply(self: Any, optimizer: Any, scaler: Any, grad_norm: Tensor) -> bool:
        with waiting(gpu, "error" if hasattr(optimizer, "can_skip") else "default"):
            return reduction.apply(optimizer, scaler, grad_norm)

    monkeypatch.setattr(test_never_late.Alone, "apply", apply)
    trainer = RUNS[run](gpu)
    trainer.fit(max_steps=2)
    with waiting(gpu, "error"):
        trainer.fit(max_steps=5)
    assert trainer.state.step == 5 and trainer.state.skipped == 0
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_lamb_in_triton_waits_for_nothing(gpu):
    """Its numbers: tests/test_fused_lamb.py, on a GPU and in the interpreter."""
    assert why_not_fused(gpu, fused_check.difference) == ""
    params = [nn.Parameter(p.detach().to(gpu)) for p in make_params(torch.float32)]
    optimizer = Lamb(params, impl="triton", weight_decay=0.1)
    factor, finite = torch.tensor(0.5, device=gpu), torch.tensor(True, device=gpu)
    for step in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        with waiting(gpu, "error" if step else "default"):
            optimizer.param_groups[0]["lr"] = 0.01 * step
            optimizer.finite = finite
            scale_gradients(optimizer, factor)
            optimizer.step()
    assert all(bool(p.isfinite().all()) for p in params)


def test_copies_of_weights_have_the_bits_of_autocast(device):
    """The host waits for nothing. On CPUs, whole models: tests/test_weight_copies.py."""
    plain, x = nn.Linear(48, 32).to(device), torch.randn(4, 48, device=device)
    ours = copy.deepcopy(plain)
    copies = WeightCopies(read_copies(nn.Sequential(ours)))
    with copies.over_steps():
        for step in range(3):
            found = []
            for layer in (ours, plain):
                with waiting(device, "error" if step else "default"), copies.reading():
                    with torch.autocast(device.type, torch.bfloat16):
                        y = layer(x)
                    y.float().square().sum().backward()
                    assert (copies.of(layer.weight) is not None) == (layer is ours)
                    with torch.no_grad():
                        layer.weight.add_(layer.weight.grad, alpha=-0.01)
                found.append((y.detach(), layer.weight.grad.clone()))
            assert all(torch.equal(one, other) for one, other in zip(*found))


def test_outlook_attention_in_triton_waits_for_nothing(gpu):
    """Its numbers: tests/test_fused_outlook.py, on a GPU and in the interpreter."""
    assert why_not_fused(gpu, outlook_difference) == ""
    layer = fuse_outlook(OutlookAttention(64, 2, attn_drop=0.0).to(gpu))
    x = torch.randn(4, 7, 7, 64, device=gpu, requires_grad=True)
    for step in range(3):
        with waiting(gpu, "error" if step else "default"), torch.autocast("cuda", torch.bfloat16):
            layer(x).float().square().sum().backward()
    assert bool(x.grad.isfinite().all())


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
    optimizer: Any = build_optimizer(model, lr=0.1, weight_decay=0.1)
    optimizer.skip_synchronize = contextmanager(lambda: iter([None]))
    init_state(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for value, applied in ((1.0, True), (torch.inf, False), (torch.nan, False)):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        assert reduction.apply(optimizer, scaler, torch.tensor(value, device=device)) == applied
        after = model.state_dict(), optimizer.state_dict()["state"]
        same = [torch.equal(old, after[0][name]) for name, old in before[0].items()]
        same += [torch.equal(old[k], after[1][i][k]) for i, old in before[1].items() for k in ("exp_avg", "exp_avg_sq")]
        assert same == [not applied] * len(same)


@pytest.mark.parametrize(
    "options",
    [dict(mixup_alpha=0.2, erase_prob=0.5), dict(cutmix_alpha=1.0, erase_prob=1.0, erase_mode="const"),
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


def test_operations_on_pixels_are_those_of_the_cpu_to_the_bit(device):
    images = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    operations = randaugment.draw(randaugment.parse("rand-m9-n3-p0.9"), 0, np.zeros(64, dtype=np.int64), np.arange(64))
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


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


def batch_on(device: torch.device, number: int) -> Augmented:
    images, targets, *_ = test_graphs.batch(number)
    return Augmented(images.to(device), targets.to(device))


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-5), ("bf16", 1e-2)])
def test_graphs_give_the_gradients_of_plain_passes(gpu, precision, bound):
    """With dropout, from the same seeds: two steps of accumulated passes, each over images of its own."""
    model = test_graphs.vit().to(gpu)
    objective = Graphs(model, batch_on(gpu, 0).images, precision).objective(classification)
    for numbers in ((1, 2), (3, 4, 5)):
        batches = [batch_on(gpu, number) for number in numbers]
        ours, theirs = (test_graphs.accumulate(model, each, batches, precision) for each in (objective, classification))
        for one, other in zip(ours, theirs, strict=True):
            assert float((one - other).norm()) <= bound * float(other.norm())


def test_draws_of_graphs_are_a_function_of_the_seed(gpu):
    """And those of the plain model; a capture leaves the random state as it was."""
    model, images = test_graphs.vit().to(gpu), batch_on(gpu, 0).images
    nn.init.normal_(model.head.weight)
    drawn = torch.cuda.get_rng_state(gpu)
    made = Graphs(model, images, "fp32")
    assert torch.equal(torch.cuda.get_rng_state(gpu), drawn)
    logits = []
    for forward, seed in ((made, 1), (made, 2), (made, 1), (model, 1), (model, 2)):
        torch.manual_seed(seed)
        logits.append(forward(images).detach().clone())
        torch.rand(7, device=gpu)
    assert torch.equal(logits[0], logits[2]) and not torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[:2], logits[3:], rtol=1e-4, atol=1e-4)


def test_a_trial_of_graphs_succeeds_and_leaves_everything_as_it_was(gpu, caplog):
    model = test_graphs.vit(weight_init="jax").to(gpu)
    before, drawn = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state(gpu)
    stream = torch.cuda.current_stream(gpu)
    config = test_graphs.config(precision="bf16")
    made = graph_passes(config, model, classification, torch.device("cuda", gpu.index or 0), Solo())
    assert isinstance(made, Graphs) and test_graphs.said(caplog) == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(gpu), drawn) and torch.cuda.current_stream(gpu) == stream
    assert all(parameter.grad is None for parameter in model.parameters())


class Waits(nn.Module):
    """A layer that no graph can capture."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0 * x.sum().item())


def test_after_a_capture_that_failed_plain_passes_go_on(gpu, caplog):
    """On the stream from before, with draws, and memory that two streams use becomes free again."""
    model = test_graphs.vit()
    model.norm_pre = Waits()
    model, stream = model.to(gpu), torch.cuda.current_stream(gpu)
    assert graph_passes(test_graphs.config(), model, classification, gpu, Solo()) is None
    (line,) = test_graphs.said(caplog)
    assert line.startswith("--run.graphs true is not used: rank 0 cannot compute a pass by graphs (")
    assert torch.cuda.current_stream(gpu) == stream
    ours = test_graphs.accumulate(model, classification, [batch_on(gpu, 1), batch_on(gpu, 2)])
    assert all(bool(gradient.isfinite().all()) for gradient in ours)
    active, shared = torch.cuda.memory_stats(gpu)["active_bytes.all.current"], torch.empty(2**24, device=gpu)
    shared.record_stream(torch.cuda.Stream())
    del shared
    torch.cuda.synchronize()
    small = torch.empty(1, device=gpu)  # torch looks for memory that became free when it allocates
    assert torch.cuda.memory_stats(gpu)["active_bytes.all.current"] - active <= 2**16 and small.numel() == 1


def test_steps_by_graphs_wait_once_and_train(gpu, monkeypatch):
    """As `test_a_training_step_waits_once`."""

    def apply(self: Any, optimizer: Any, scaler: Any, grad_norm: Tensor) -> bool:
        return reduction.apply(optimizer, scaler, grad_norm)

    monkeypatch.setattr(test_never_late.Alone, "apply", apply)
    trainer = vit_with_cutmix(gpu)
    made = Graphs(trainer.model, torch.zeros(8, 3, 64, 64, device=gpu), "fp32")
    trainer.objective, fits = made.objective(trainer.objective), []
    monkeypatch.setattr(Graphs, "fit", lambda self, *these, fit=Graphs.fit: fits.append(fit(self, *these)) or fits[-1])
    trainer.fit(max_steps=2)
    with waiting(gpu, "error"):
        trainer.fit(max_steps=5)
    assert fits == [True] * 10 and trainer.state.skipped == 0
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
