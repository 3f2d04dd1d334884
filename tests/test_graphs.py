"""CUDA graphs, on a CPU: segments are the model, gradients have memory of their own, and what is wrong is refused.

`static_memory.capture` stands in for torch's. What only a GPU can show is in tests/gpu/test_on_a_gpu.py.
"""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import static_memory
import torch
from test_never_late import vit_with_cutmix
from torch import Tensor, nn

import zoo
from largebatch import graphs
from largebatch.assembly.replica import build_replica
from largebatch.augment import Augmented
from largebatch.benchmark.solo import Solo
from largebatch.config import TrainConfig, apply
from largebatch.graphs import Graphs, graph_passes
from largebatch.hooks import Ema, recompute
from largebatch.losses import classification
from largebatch.precision import autocast
from zoo.segments import segments_of
from zoo.vit import VisionTransformer

CPU = torch.device("cpu")
RATES = dict(pos_drop_rate=0.3, proj_drop_rate=0.3, attn_drop_rate=0.2, drop_rate=0.3, drop_path_rate=0.5)
RUN = (
    "--model vit_nano32 --img-size 64 --model.num_classes 7 --data.micro_batch_size 4 --run.graphs true "
    "--optim.impl eager"
)


def vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return zoo.create_model("vit_nano32", img_size=64, num_classes=7, **RATES | options)


def images(number: int = 0, count: int = 4) -> Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(number))


def batch(number: int = 0, count: int = 4) -> Augmented:
    return Augmented(images(number, count), torch.eye(7)[:count])


def config(arguments: str = "", precision: str = "fp32") -> TrainConfig:
    return apply(TrainConfig(), f"{RUN} --run.precision {precision} {arguments}".split())


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]


def accumulate(model: nn.Module, objective: Any, batches: list[Augmented], precision: str = "fp32") -> list[Tensor]:
    """Gradients of one step's passes, with the draws of each."""
    model.zero_grad(set_to_none=True)
    for number, each in enumerate(batches):
        torch.manual_seed(number)
        with autocast(each.images.device, precision):
            loss = objective(model, each)
        loss.backward()
    return gradients(model)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == graphs.__name__]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A CPU that has graphs, as far as it can."""
    monkeypatch.setattr(graphs, "capture", static_memory.capture)
    monkeypatch.setattr(graphs, "can_capture", lambda device: True)


# -- segments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"global_pool": "avg", "residual": "bf16"}], ids=["", "avg, bf16"])
@pytest.mark.parametrize("count, expected", [(1, 1), (2, 2), (4, 2)])
def test_segments_are_the_model_to_the_bit(options, count, expected):
    """Outputs, gradients and draws; each weight belongs to one of them."""
    model = vit(**options)
    nn.init.normal_(model.head.weight)
    before, segments = list(model.state_dict()), segments_of(model, count)
    assert len(segments) == expected and list(model.state_dict()) == before
    theirs = [parameter for segment in segments for parameter in segment.parameters()]
    assert len(theirs) == len({*theirs}) and {*theirs} == {*model.parameters()}
    results = []
    for forward in (model, nn.Sequential(*segments)):
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        with autocast(CPU, "bf16"):
            logits = forward(images())
        logits.square().sum().backward()
        results.append([logits, *gradients(model)])
    assert same(*results)


def test_twelve_blocks_are_cut_into_equal_parts_and_other_models_into_none():
    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=8, depth=11, num_heads=2, reg_tokens=1)
    assert [len([*segment.layers]) for segment in segments_of(model, 4)] == [2 + 4, 3, 3, 3 + 4]

    class Other(VisionTransformer):
        def forward_features(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward_features(-x)

    other = Other(img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    for model in (other, zoo.create_model("volo_nano"), nn.Linear(1, 1)):
        assert segments_of(model, 4) == []
    with pytest.raises(ValueError, match="only a ViT can be cut"):
        Graphs(other, images(), "fp32")


# -- passes ------------------------------------------------------------------------------------------------------------


def test_without_gradients_to_add_to_the_second_pass_overwrites_the_first(on_a_gpu):
    """The trap, as torch sets it: autograd keeps the memory that the next replay writes to."""
    model = vit()
    theirs = accumulate(model, classification, [batch(1), batch(2)])
    made = Graphs(model, images(), "fp32")
    segments = nn.Sequential(*made.segments)
    stolen = accumulate(model, lambda _, each: classification(segments, each), [batch(1), batch(2)])
    last = accumulate(model, lambda _, each: torch.manual_seed(1) and classification(model, each), [batch(2)])
    assert same(stolen, [2 * gradient for gradient in last]) and not same(stolen, theirs)
    assert same(accumulate(model, made.objective(classification), [batch(1), batch(2)]), theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulated_gradients_have_the_bits_of_the_plain_model(on_a_gpu, precision):
    """With dropout, over steps, and with short micro-batches among the others, which no graph computes."""
    model = vit()
    objective = Graphs(model, images(), precision).objective(classification)
    short = batch(4, count=3)
    for passes in ([batch(1)], [batch(2), batch(3), batch(5)], [batch(6), short, batch(7)], [short, batch(8)]):
        ours, theirs = (accumulate(model, each, passes, precision) for each in (objective, classification))
        assert same(ours, theirs)


def test_a_run_takes_the_same_steps(on_a_gpu):
    runs = []
    for by_graphs in (False, True):
        torch.manual_seed(0)
        trainer = vit_with_cutmix(CPU)
        if by_graphs:
            made = Graphs(trainer.model, torch.zeros(8, 3, 64, 64), "fp32")
            trainer.objective = made.objective(trainer.objective)
        torch.manual_seed(1)
        trainer.fit(max_steps=3)
        (average,) = (hook.model for hook in trainer.hooks if isinstance(hook, Ema))
        runs.append([*trainer.model.parameters(), *average.parameters()])
    assert same(*runs)


def test_a_capture_leaves_gradients_and_draws_as_they_were(on_a_gpu):
    model, drawn = vit(), torch.get_rng_state()
    Graphs(model, images(), "fp32")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())


def freeze(model: nn.Module) -> None:
    model.pos_embed.requires_grad_(False)


def move(model: nn.Module) -> None:
    model.head.weight.data = model.head.weight.data.clone()


@pytest.mark.parametrize("change", [nn.Module.eval, freeze, move])
def test_a_changed_model_is_computed_without_graphs(on_a_gpu, change):
    model = vit()
    made = Graphs(model, images(), "fp32")
    assert made.fit(model, images())
    change(model)
    assert not made.fit(model, images())
    passes = [batch(1), batch(2)]
    assert same(accumulate(model, made.objective(classification), passes), accumulate(model, classification, passes))


def test_other_passes_are_computed_without_graphs(on_a_gpu):
    """Copies, evaluation, gradients of images, another type, shape or precision."""
    model = vit()
    made = Graphs(model, images(), "fp32")
    other = copy.deepcopy(model)
    assert not made.fit(other, images()) and list(other.state_dict()) == list(model.state_dict())
    assert same([other.eval()(images())], [model.eval()(images())]) and model.train()
    assert not made.fit(model, images(count=3)) and not made.fit(model, images().double())
    assert not made.fit(model, images().requires_grad_())
    with torch.no_grad():
        assert not made.fit(model, images())
    with autocast(CPU, "bf16"):
        assert not made.fit(model, images())
    assert made.fit(model, images())


def test_a_check_of_gradients_keeps_its_own(on_a_gpu):
    """RecomputeCheck compares two results, which graphs would write to the same memory."""
    trainer = vit_with_cutmix(CPU)
    trainer.objective = Graphs(trainer.model, torch.zeros(8, 3, 64, 64), "fp32").objective(trainer.objective)
    batches = [trainer.prepare(each) for each, _ in zip(trainer.open_batches(0), range(2))]
    first = recompute.gradients(trainer, batches[0])
    kept = {name: gradient.clone() for name, gradient in first.items()}
    second = recompute.gradients(trainer, batches[1])
    assert all(torch.equal(first[name], kept[name]) for name in kept)
    assert not torch.equal(first["pos_embed"], second["pos_embed"])


# -- before the first step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trial_leaves_everything_as_it_was(on_a_gpu, caplog, precision):
    """A new model, whose head is zero."""
    model = vit(weight_init="jax")
    assert not model.head.weight.any()
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    made = graph_passes(config(precision=precision), model, classification, CPU, Solo())
    assert isinstance(made, Graphs) and said(caplog) == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())
    with autocast(CPU, precision):
        assert made.fit(model, images())


def test_a_trial_computes_two_passes(on_a_gpu, monkeypatch, caplog):
    """So it sees that the second overwrote the gradient of the first."""
    monkeypatch.setattr(Graphs, "forward", lambda self, images: nn.Sequential(*self.segments)(images))
    assert graph_passes(config(), vit(), classification, CPU, Solo()) is None
    assert "computes another gradient of cls_token by graphs" in said(caplog)[0]


def give_up(modules: tuple[nn.Module, ...], samples: Any) -> tuple[nn.Module, ...]:
    try:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
    except RuntimeError:
        raise RuntimeError("operation failed due to a previous error during capture")  # as the end of a capture does


def wrong(change: Any) -> Any:
    """Return a capture with a fault in the last segment's replay: change(forward, images) -> outputs."""

    def capture(modules: tuple[nn.Module, ...], samples: Any) -> tuple[nn.Module, ...]:
        modules = static_memory.capture(modules, samples)
        last, forward = modules[-1], modules[-1].forward
        setattr(last, "forward", lambda x: change(forward, x))
        return modules

    return capture


def the_same_draws(forward: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return forward(x)


def the_first_input(forward: Any, x: Tensor) -> Tensor:
    return forward(torch.ones_like(x) + 0 * x)


def the_weights_of_the_capture(modules: tuple[nn.Module, ...], samples: Any) -> tuple[nn.Module, ...]:
    """Reads the values of that time, as a graph would whose casts were made, and kept, outside of it."""
    segment = modules[-1]
    weights = [*segment.parameters()]
    kept = [weight.detach().clone() for weight in weights]

    def stale(forward: Any, x: Tensor) -> Tensor:
        values = [weight.detach().clone() for weight in weights]
        for weight, old in zip(weights, kept):
            weight.data.copy_(old)
        y = forward(x)
        for weight, new in zip(weights, values):
            weight.data.copy_(new)
        return y

    return wrong(stale)(modules, samples)


@pytest.mark.parametrize(
    "capture, cause",
    [
        (give_up, "cannot compute a pass by graphs (RuntimeError: operation not permitted when stream is capturing)"),
        (wrong(the_same_draws), "computes another gradient of cls_token by graphs (norm "),
        (wrong(the_first_input), "computes another gradient of cls_token by graphs (norm "),
        (wrong(lambda forward, x: forward(x).detach() * x.sum()), "computes another gradient of "),
        (wrong(lambda forward, x: forward(x) * torch.nan), "computes another gradient of cls_token by graphs (norm "),
        (the_weights_of_the_capture, "computes another gradient of "),
    ],
    ids=["fails", "draws", "input", "gradient", "nan", "weights"],
)
def test_graphs_that_are_wrong_are_not_used(on_a_gpu, monkeypatch, caplog, capture, cause):
    monkeypatch.setattr(graphs, "capture", capture)
    model = vit(weight_init="jax")
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert graph_passes(config(), model, classification, CPU, Solo()) is None
    (line,) = said(caplog)
    assert line.startswith(f"--run.graphs true is not used: rank 0 {cause}")
    assert line.endswith("; all ranks compute without it")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "make, line",
    [
        (vit, "rank 0 computes on the CPU: expected a GPU; all ranks compute without it"),
        (lambda: nn.Linear(2, 2), "only a ViT can be cut into segments for CUDA graphs"),
    ],
)
def test_on_a_cpu_and_for_other_models_rank_0_says_why_there_are_no_graphs(caplog, make, line, rank):
    comm = Solo()
    comm.rank = rank
    assert graph_passes(config(), make(), classification, CPU, comm) is None
    assert said(caplog) == [f"--run.graphs true is not used: {line}"] * (rank == 0)


@pytest.mark.parametrize("under_way", [True, False])
def test_a_capture_that_fails_gives_the_allocator_back(monkeypatch, under_way):
    """Not known to torch's Python code, which leaves it as it is in a capture."""
    done: list[str] = []

    def end(device: int, pool: Any) -> None:
        if not under_way:
            raise RuntimeError("not currently recording to mempool_id")
        done.append(f"end {device} {pool}")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 3))
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda *_, pool: give_up((), pool))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    release = lambda device, pool: done.append(f"release {device} {pool}")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graphs.capture((), ())
    assert done == ["end 1 (0, 3)", "release 1 (0, 3)"] * under_way


def test_a_gpu_that_computes_nothing_any_more_ends_the_run(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *_, **__: 1 / 0)
    with pytest.raises(RuntimeError, match="after a trial of --run.graphs true .*: leave the option out"):
        graphs._recover(SimpleNamespace(type="cuda"))


@pytest.mark.parametrize("used", [True, False])
def test_a_replica_computes_by_graphs_if_the_run_says_so(on_a_gpu, used):
    replica = build_replica(config(f"--run.graphs {str(used).lower()}"), Solo(), CPU, passes=1)
    objective = replica.adapt_objective(classification)
    assert isinstance(replica.graphs, Graphs) == used == (objective is not classification)
    if used:
        passes = [batch(1), batch(2)]
        model = replica.model
        assert same(accumulate(model, objective, passes), accumulate(model, classification, passes))
