"""A compiled model gives the run the same gradients, from a bounded number of graphs. Run on two ranks."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from parts import CLASSES, batch_of, begun, plan_for, seen_by_optimizer, small_trainer, tiny_vit
from torch import nn
from torch._dynamo.utils import counters

from largebatch import compiling
from largebatch.augment import Augment, seed_for
from largebatch.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from largebatch.losses import classification
from zoo.blocks import compile_blocks

CPU = torch.device("cpu")
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}  # of ||difference|| / ||gradient||, per tensor
DROPOUT = {"proj_drop_rate": 0.3, "drop_path_rate": 0.3}
PASSES = 2
COMPILE = torch.compile

pytestmark = pytest.mark.needs_compiler


@pytest.fixture(autouse=True)
def forget_graphs():
    """Graphs belong to code, and past eight of them torch silently runs eagerly."""
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def without_kernels(monkeypatch):
    """The graphs of torch.compile, computed by torch's own operations: a kernel takes a second to compile."""
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="aot_eager"))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def eager_vit(**rates: float) -> nn.Module:
    """One block: a kernel takes about a second to compile."""
    return tiny_vit(depth=1, **rates)


def compiled_vit(**rates: float) -> nn.Module:
    model = eager_vit(**rates)
    compiling.compile_passes(model)
    return model


def compile_as_a_run_does(comm, model: nn.Module, wanted: Any) -> None:
    """For the micro-batches of `small_trainer`."""
    run = RunConfig(compile=wanted, precision="fp32")
    config = TrainConfig(model=ModelConfig(img_size=8), data=DataConfig(micro_batch_size=4), run=run)
    compiling.compile_model(config, model, classification, CPU, comm)


def gradients_of(comm, model: nn.Module, **options: Any) -> list[torch.Tensor]:
    """What the optimizer sees in the first step."""
    trainer = small_trainer(comm, plan_for(comm), passes=PASSES, model=model, **options)
    return seen_by_optimizer(trainer, trainer.open_batches(0))[0]


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(ours, theirs, strict=True))


def test_gradients_names_and_copies_are_those_of_the_eager_model(comm):
    model, eager = compiled_vit(), eager_vit()
    theirs = gradients_of(comm, eager, dtype=torch.float64)
    assert graphs() == 0
    ours = gradients_of(comm, model, dtype=torch.float64)
    assert graphs() == 1
    assert 0 < distance(ours, theirs) <= BOUND[torch.float64]
    assert list(model.state_dict()) == list(eager.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in eager.named_parameters()]
    eager.load_state_dict(model.state_dict(), strict=True)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(copy.deepcopy(model).eval()(images), eager.eval()(images))  # a copy is an eager model
    assert graphs() == 1


def test_dropout_follows_the_micro_batch_not_the_rank(comm):
    """Its masks are others than the eager model's, but the ranks together draw what one process would."""
    ours = gradients_of(comm, compiled_vit(**DROPOUT))
    plan, model, augment = plan_for(comm), compiled_vit(**DROPOUT), Augment(CLASSES, mixup_alpha=0.2)
    for micro in plan.micro_batches(0, 0, 1):
        batch = batch_of(plan, micro, dtype=torch.float32)
        torch.manual_seed(seed_for(3, 0, micro.number, purpose="model"))
        generator = torch.Generator().manual_seed(seed_for(3, 0, micro.number))
        mixed = augment(batch.images, batch.labels, generator)
        (classification(model, mixed) / plan.window_images(0)).backward()
    assert distance(ours, [parameter.grad for parameter in model.parameters()]) <= BOUND[torch.float32]
    assert distance(ours, gradients_of(comm, eager_vit())) > 0.1  # there was something to draw


@pytest.mark.usefixtures("without_kernels")
def test_short_batches_and_evaluation_add_few_graphs_once(comm):
    """A short last window, evaluations of two batch sizes; every number is the eager model's."""
    results = []
    for model in (eager_vit(), compiled_vit()):
        plan = plan_for(comm, steps=4, left_over=5)
        trainer = small_trainer(comm, plan, passes=PASSES, model=model, dtype=torch.float64)
        batch = trainer.eval_batches[0]
        short = replace(batch, images=batch.images[:3], labels=batch.labels[:3])
        trainer.eval_batches = [batch, batch, short]
        trainer.fit(max_steps=2)
        metrics = [trainer.evaluate()]
        trainer.fit(max_steps=4)
        metrics.append(trainer.evaluate())
        before_end = graphs()
        trainer.fit()
        results.append((metrics, before_end, graphs()))
    (eager, *none), (compiled, before_end, at_end) = results
    assert none == [0, 0]
    for one, other in zip(eager, compiled):
        assert one == pytest.approx(other, rel=1e-10)
    assert 0 < before_end <= 3 and at_end <= 4  # training; evaluation of one size and of any; the short window


@pytest.mark.usefixtures("without_kernels")
def test_gradients_are_reduced_only_after_the_compiled_backward_pass(comm):
    """Why the log says that the overlap is lost; the eager model reduces meanwhile, and so does one in blocks."""
    in_blocks = eager_vit()
    compile_blocks(in_blocks)
    found: list[list[torch.Tensor]] = []
    for model in (eager_vit(), in_blocks, compiled_vit()):
        optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, passes=1)
        handed_over: list[int] = []
        images = torch.linspace(-1, 1, 4 * 3 * 8 * 8).view(4, 3, 8, 8).requires_grad_()
        images.register_hook(lambda _: handed_over.append(len(begun(optimizer))))  # their gradient is the last one
        model(images).square().sum().backward()
        optimizer.synchronize()
        found.append([parameter.grad for parameter in model.parameters()])
        eager = model._compiled_call_impl is None
        assert (handed_over[0] > 12) if eager else (handed_over[0] == 0)
    assert graphs() == 2
    assert all(distance(compiled, found[0]) <= BOUND[torch.float32] for compiled in found[1:])


def no_compiler(monkeypatch) -> str:
    """Plant it, and return what this rank should say."""
    monkeypatch.setattr(compiling, "can_compile", lambda device_type: False)
    return "has no compiler for cpu: expected "


def broken_compiler(monkeypatch) -> str:
    def give_up(graph, inputs):
        raise RuntimeError("the compiler gave up\nfor a reason of its own")

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=give_up))
    return "cannot compute a compiled pass (RuntimeError: the compiler gave up); all ranks"


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("wanted, fault", [(True, no_compiler), ("blocks", broken_compiler)])
def test_if_one_rank_cannot_compile_all_compute_as_if_nobody_had_tried(comm, monkeypatch, caplog, wanted, fault):
    """One warning; then the draws of dropout and stochastic depth, and so the gradients, have the same bits."""
    model = eager_vit(**DROPOUT)
    expected = fault(monkeypatch) if comm.rank == 1 else ""
    drawn = torch.get_rng_state()
    compile_as_a_run_does(comm, model, wanted)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())
    (expected,) = filter(None, comm.allgather_object(expected, name="expected"))
    said = [record.getMessage() for record in caplog.records if record.name == compiling.__name__]
    if comm.rank == 0:
        (line,) = said
        assert line.startswith(f"--run.compile {str(wanted).lower()} is not used: rank 1 {expected}")
    else:
        assert said == []
    before = graphs()
    assert (before > 0) == (comm.rank == 0 and fault is broken_compiler)  # if one has none, nobody compiles
    ours, theirs = gradients_of(comm, model), gradients_of(comm, eager_vit(**DROPOUT))
    assert all(map(torch.equal, ours, theirs)) and graphs() == before
