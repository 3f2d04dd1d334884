"""Copies of weights in bfloat16: the bits of autocast, and no way to change a weight that leaves a copy behind.

tests/test_fused_lamb.py has the steps of LAMB that write copies.
"""

import copy
import dataclasses
import io

import pytest
import torch
from test_engine import BATCH, Alone, make_trainer
from torch import Tensor, nn

from largebatch import assembly
from largebatch.benchmark import resident
from largebatch.benchmark.solo import Solo
from largebatch.engine import Hook
from largebatch.hooks.ema import Ema
from largebatch.optim import Lamb, LookSam, WeightCopies
from largebatch.replica import Replica
from zoo import create_model
from zoo.linear import read_copies, weight_of

RATES = dict(drop_rate=0.1, pos_drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.3)
MODELS = {
    "vit": dict(name="vit_nano32", proj_drop_rate=0.1, **RATES),
    "vit, residual in bfloat16": dict(name="vit_nano32", residual="bf16", global_pool="avg", **RATES),
    "volo": dict(name="volo_nano", outlook_drop_path=True, **RATES),
    "timm": dict(name="timm/vit_tiny_patch16_224", drop_path_rate=0.3),
}


def rounded(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.bfloat16)


def two_passes(model: nn.Module, images: Tensor, copies: WeightCopies) -> list[Tensor]:
    """The outputs of two passes, and the gradients that they add up."""
    outputs = []
    for number in range(2):
        torch.manual_seed(number)
        with copies.reading():
            with torch.autocast("cpu", torch.bfloat16):
                made = model.forward_train(images, (0, 0, 1, 2)) if hasattr(model, "forward_train") else model(images)
            made = made if isinstance(made, tuple) else (made,)
            sum(part.float().square().sum() for part in made).backward()
        outputs += [part.detach() for part in made]
    return [*outputs, *(p.grad for p in model.parameters())]


# -- what a pass computes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_outputs_and_gradients_have_the_bits_of_autocast(options, again):
    torch.manual_seed(0)
    plain = create_model(img_size=64, num_classes=5, grad_checkpointing=again, **options).train()
    with torch.no_grad():  # heads and biases of zero would hide something
        for p in plain.parameters():
            p.add_(0.02 * torch.randn_like(p))
    ours = copy.deepcopy(plain)
    layers = read_copies(ours)
    copies, images = WeightCopies(layers), torch.randn(4, 3, 64, 64)
    read: set[Tensor] = set()
    of = copies.of
    copies.of = lambda weight: read.add(weight) or of(weight)
    found, expected = two_passes(ours, images, copies), two_passes(plain, images, WeightCopies())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    unread = sum(layer.weight not in read for layer in layers)
    # The weights of outlook attention are scaled in float32, and class attention computes with parts of a weight.
    assert len(layers) > 8 and unread == (3 if options["name"] == "volo_nano" else 0)
    assert (ours.patch_embed.proj in layers) == (options["name"] == "vit_nano32")


def test_a_layer_alone():
    """Frozen; in float64; where autocast is off, or computes in another type."""
    layer, x = nn.Linear(3, 2).requires_grad_(False), torch.randn(4, 3)
    copies = WeightCopies(read_copies(nn.Sequential(layer)))
    with copies.reading():
        assert weight_of(layer) is layer.weight
        with torch.autocast("cpu", torch.float16):
            assert weight_of(layer) is layer.weight
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(weight_of(layer), rounded(layer.weight)) and layer(x).dtype == torch.bfloat16
            layer.double()
            assert weight_of(layer) is layer.weight
    with copies.reading(), torch.autocast("cpu", torch.bfloat16):
        assert weight_of(layer) is layer.weight


def test_the_model_stays_what_it_was():
    """Names, state_dict and logits. Its copies, in memory and in files, read their own weights."""
    plain = create_model("vit_nano32", img_size=32, num_classes=5)
    model = copy.deepcopy(plain)
    copies = WeightCopies(read_copies(model))
    file = io.BytesIO()
    with copies.reading(), torch.autocast("cpu", torch.bfloat16):
        teacher = copy.deepcopy(model)
        torch.save(model, file)
        assert weight_of(model.head) is not model.head.weight
        file.seek(0)
        for other in (teacher, torch.load(file, weights_only=False)):
            assert weight_of(other.head) is other.head.weight and other.head.copies._layers == ()
    assert list(model.state_dict()) == list(plain.state_dict()) and repr(model) == repr(plain)
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(model.state_dict(), strict=True)
    images = torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert weight_of(model.head) is model.head.weight
        assert torch.equal(model.eval()(images), plain.eval()(images))


# -- no copy is left behind ----------------------------------------------------------------------------------------


def renewed(copies: WeightCopies, weights: list[Tensor]) -> int:
    """How many of the weights a pass rounds anew; all copies are right in it, and beside it there are none."""
    rounds = counted(copies, weights)
    with copies.reading():
        for weight in weights:
            assert torch.equal(copies.of(weight), rounded(weight))
    assert not any(copies.of(weight) is not None for weight in weights)
    return rounds[0]


def counted(copies: WeightCopies, weights: list[Tensor]) -> list[int]:
    """A list that gets the number of weights that each pass rounds anew."""
    renew, rounds = WeightCopies._renew, []

    def counting() -> None:
        rounds.append(sum(copies.valid(weight) is None for weight in weights))
        renew(copies)

    copies._renew = counting
    return rounds


CHANGES = {
    "in place": lambda model: nn.init.ones_(model[0].weight),
    "state_dict": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "assigned": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True),
    "foreach": lambda model: torch._foreach_add_([model[0].weight.detach()], 1.0),
    "other memory": lambda model: setattr(model[0].weight, "data", torch.ones(4, 3)),
    "another parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(7, 3))),
    "a view": lambda model: model[0].weight.detach().view(-1)[1:].zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_that_torch_changes_is_rounded_anew(change):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    copies = WeightCopies(read_copies(model))
    with copies.over_steps():
        assert renewed(copies, [layer.weight for layer in model]) == 2
        assert renewed(copies, [layer.weight for layer in model]) == 0
        with torch.no_grad():
            change(model)
        assert renewed(copies, [layer.weight for layer in model]) >= 1


@pytest.mark.parametrize("impl", ["auto", "eager", "plain"])
def test_lamb_counts_the_versions_of_what_it_changes(impl):
    """Its code for CPUs writes past torch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    copies, optimizer = WeightCopies(read_copies(model)), Lamb(model.parameters(), lr=0.1, impl=impl)
    optimizer.copies = copies
    with copies.over_steps():
        for _ in range(2):
            assert renewed(copies, [layer.weight for layer in model]) == 2
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        model[1].requires_grad_(False).zero_grad()
        assert renewed(copies, [layer.weight for layer in model]) == 2
        optimizer.step()
        assert renewed(copies, [layer.weight for layer in model]) == 1


def test_without_a_run_around_it_each_pass_rounds_all():
    """Whoever calls `train_step` himself may change weights by any means between two steps."""
    model = nn.Sequential(nn.Linear(3, 4))
    copies = WeightCopies(read_copies(model))
    for _ in range(2):
        assert renewed(copies, [model[0].weight]) == 1
    with copies.over_steps():
        assert renewed(copies, [model[0].weight]) == 1
    model[0].weight.data.zero_()
    with copies.over_steps():
        assert renewed(copies, [model[0].weight]) == 1


def test_a_layer_that_is_frozen_and_trained_again():
    """Each pass computes the gradients that it needs, also if a pass without any came before."""
    layer = nn.Linear(3, 2)
    copies, x = WeightCopies(read_copies(nn.Sequential(layer))), torch.randn(4, 3, requires_grad=True)
    with copies.over_steps():
        with torch.no_grad():
            assert renewed(copies, [layer.weight]) == 1
        for trained in (True, False, False, True, True):
            layer.requires_grad_(trained).zero_grad()
            with copies.reading():
                with torch.autocast("cpu", torch.bfloat16):
                    assert weight_of(layer).requires_grad == trained and weight_of(layer) is copies.of(layer.weight)
                    y = layer(x)
                y.sum().backward()
            assert (layer.weight.grad is not None) == trained and x.grad is not None
        assert layer.weight.grad.dtype == torch.float32


def test_a_change_within_a_pass():
    """The layer reads its weight; if it has read the copy already, torch refuses the backward pass of the new one."""
    layer = nn.Linear(3, 2)
    copies = WeightCopies(read_copies(nn.Sequential(layer)))
    with copies.reading(), torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer.weight.add_(1.0)
        assert weight_of(layer) is layer.weight
    with copies.over_steps(), copies.reading(), torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(1, 3, requires_grad=True)
        y = layer(x)
        with torch.no_grad():
            layer.weight.add_(1.0)
        copies._renew()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            y.sum().backward()


# -- in a run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, expected",
    [("", 10), ("--optim.preset colossal", 10), ("--run.precision fp32", 0), ("--run.precision fp16", 0),
     ("--run.compile blocks", 0), ("--optim.name muon --optim.rest lamb --optim.preset nvlamb", 0),
     ("--optim.impl eager", 0)],
)  # fmt: skip
def test_which_runs_have_copies(monkeypatch, options, expected):
    """Those of a whole model, of which `Lamb` in Triton updates all, under autocast to bfloat16, and not compiled."""
    monkeypatch.setattr(assembly.replica, "lamb_impl", lambda comm, device, wanted: wanted)
    monkeypatch.setattr(assembly.replica, "compile_model", lambda *parts: None)
    base = "--model vit_nano32 --img-size 32 --run.precision bf16 --optim.impl triton --horovod.hang_limit_s 0 "
    config = resident.read_config((base + options).split())
    replica = assembly.build_replica(config, Solo(), torch.device("cpu"), passes=1)
    assert len(replica.copies._layers) == expected
    if expected:
        assert replica.optimizer.copies is replica.copies is replica.model.head.copies
    assert Lamb.copies._layers == Replica.copies._layers == ()


class Lambs(Alone):
    """A communicator whose step writes past torch, as LAMB's kernels do, and keeps the copies that were valid."""

    finite = True

    def apply(self, optimizer, scaler, grad_norm) -> bool:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        valid = [self.copies.valid(p) for p in params]
        for p, kept in zip(params, valid):
            if self.finite:
                p.data.sub_(0.1 * p.grad)
                if kept is not None:
                    kept.copy_(p)
        torch.autograd.graph.increment_version(params)
        self.copies.note(p for p, kept in zip(params, valid) if kept is not None)
        return self.finite


def a_run(*hooks: Hook, steps: int = 3, sam: LookSam | None = None):
    """A trainer with copies, which are checked in each pass, and a list that gets how many each pass rounds anew."""
    trainer = make_trainer(steps * BATCH, eval_images=BATCH, hooks=hooks)
    weight = trainer.model[1].weight
    trainer.comm = Lambs()
    trainer = dataclasses.replace(trainer, precision="bf16", sam=sam)
    trainer.replica.copies = trainer.comm.copies = copies = WeightCopies(read_copies(trainer.model))
    forward, rounds = trainer.objective, counted(copies, [weight])

    def objective(model, batch):
        assert torch.equal(copies.of(weight), rounded(weight))
        assert torch.equal(weight_of(model[1]), rounded(weight)) and weight_of(model[1]).requires_grad
        return forward(model, batch)

    trainer.objective = objective
    if sam:
        sam.begin(trainer.optimizer)
    return trainer, rounds


def test_a_run_rounds_once_and_then_lamb_keeps_the_copies():
    """Evaluations, averages of weights and steps that are skipped change nothing."""
    trainer, rounds = a_run(steps=4)
    trainer.hooks = (Ema(trainer.model, half_life_images=10),)
    trainer.fit(max_steps=2)
    assert rounds == [1, 0, 0, 0]
    trainer.comm.finite = False
    trainer.fit()
    assert rounds[4:] == [1, 0, 0, 0]  # the first pass of a `fit`


def test_look_sam_reads_the_perturbed_weights():
    """A skipped step would leave a copy of them behind if LAMB noted it then."""
    sam = LookSam(rho=0.5, every=2, alpha=0.5)
    trainer, rounds = a_run(sam=sam, steps=4)
    trainer.fit()
    assert rounds == [1, 0, 1, 0] + [1, 0] + [0, 0, 1, 0] + [1, 0]
    trainer, rounds = a_run(sam=sam, steps=2)
    trainer.comm.finite = False
    trainer.fit()
    assert rounds == [1, 0, 1, 0] * 2


class Writes(Hook):
    """A user's hook, which writes past torch at one event."""

    def __init__(self, event: str, write) -> None:
        setattr(self, event, lambda trainer, *arguments: write(trainer.model[1].weight))


WRITES = {
    "data": lambda weight: weight.data.mul_(1.5),
    "numpy": lambda weight: weight.detach().numpy().__imul__(1.5),
    "other memory and back": lambda weight: swapped(weight),
}


def swapped(weight: Tensor) -> None:
    first = weight.data
    weight.data = torch.ones_like(weight)
    first.mul_(1.5)
    weight.data = first


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("event", ["at_point", "at_first_batch", "after_train_step", "after_evaluate", "after_step"])
def test_a_users_hook_may_change_weights_by_any_means(event, write):
    """at_first_batch comes after the beginning of a step, and before its first pass."""
    trainer, rounds = a_run(Writes(event, write))
    trainer.fit()
    assert len(rounds) == 6 and all(rounds)


def test_an_older_state_is_read_after_a_rollback():
    trainer, rounds = a_run(steps=3)
    states: list[dict[str, Tensor]] = []

    class Back(Ema):
        def __init__(self) -> None:
            pass

        before_fit, after_evaluate = Hook.before_fit, Hook.after_evaluate

        def after_train_step(self, trainer, output) -> None:
            states.append({k: v.clone() for k, v in trainer.model.state_dict().items()})
            if len(states) == 2:
                trainer.rollback = load

    def load(trainer) -> None:
        for name, tensor in trainer.model.state_dict().items():
            tensor.data.copy_(states[0][name])
        trainer.state.step -= 1
        trainer.state.images -= BATCH

    Back.__module__ = "largebatch.hooks.back"  # for a hook of a user, all is rounded anew anyway
    trainer.hooks = (Back(),)
    trainer.fit()
    assert rounds == [1, 0, 0, 0, 1, 0, 0, 0]
