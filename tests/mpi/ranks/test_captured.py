"""Passes by graphs give the run the gradients of plain passes, on all ranks or on none. Run on two ranks, on CPUs.

`static_memory.capture` stands in for torch's, as in tests/test_graphs.py.
"""

from typing import Any

import pytest
import static_memory
import torch
from parts import begun, plan_for, seen_by_optimizer, small_trainer, tiny_vit
from torch import Tensor, nn

from largebatch import graphs
from largebatch.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from largebatch.graphs import Graphs, graph_passes
from largebatch.losses import classification

CPU = torch.device("cpu")
DROPOUT = {"proj_drop_rate": 0.3, "drop_path_rate": 0.3}
PASSES = 2


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(graphs, "capture", static_memory.capture)
    monkeypatch.setattr(graphs, "can_capture", lambda device: True)


def graphs_of_a_run(comm, model: nn.Module) -> Graphs | None:
    """For the micro-batches of `small_trainer`."""
    run = RunConfig(graphs=True, precision="fp32")
    config = TrainConfig(model=ModelConfig(img_size=8), data=DataConfig(micro_batch_size=4), run=run)
    return graph_passes(config, model, classification, CPU, comm)


def gradients_of(comm, model: nn.Module, made: Graphs | None) -> list[Tensor]:
    """What the optimizer sees in the first step."""
    trainer = small_trainer(comm, plan_for(comm), passes=PASSES, model=model)
    if made:
        trainer.objective = made.objective(trainer.objective)
    return seen_by_optimizer(trainer, trainer.open_batches(0))[0]


def test_reduced_gradients_have_the_bits_of_plain_passes(comm, caplog):
    """With dropout and two accumulated passes."""
    model = tiny_vit(**DROPOUT)
    made = graphs_of_a_run(comm, model)
    assert made is not None and not [record for record in caplog.records if record.name == graphs.__name__]
    ours, theirs = gradients_of(comm, model, made), gradients_of(comm, tiny_vit(**DROPOUT), None)
    assert all(map(torch.equal, ours, theirs))


def test_a_segment_is_reduced_while_the_backward_pass_goes_on_with_the_one_before(comm):
    model = tiny_vit(depth=2)
    made = graphs_of_a_run(comm, model)
    assert made is not None
    optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, passes=1)
    first, last = ({*segment.parameters()} for segment in made.segments)
    whole = {parameter for bucket in optimizer._groups if last >= {*bucket} for parameter in bucket}
    handed_over: list[bool] = []
    for parameter in first:
        parameter.register_post_accumulate_grad_hook(lambda _: handed_over.append(whole <= begun(optimizer)))
    made(torch.randn(4, 3, 8, 8)).square().sum().backward()
    comm.synchronize(optimizer)
    assert handed_over == [True] * len(first) and len(whole) > len(last) / 2


def fails(modules: Any, samples: Any) -> Any:
    raise RuntimeError("out of memory\nwith details")


def repeats_its_draws(modules: Any, samples: Any) -> Any:
    modules = static_memory.capture(modules, samples)
    forward = modules[0].forward

    def replay(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return forward(x)

    setattr(modules[0], "forward", replay)
    return modules


@pytest.mark.parametrize(
    "fault, expected",
    [
        (fails, "rank 1 cannot compute a pass by graphs (RuntimeError: out of memory); all ranks compute without it"),
        (repeats_its_draws, "rank 1 computes another gradient of "),
    ],
    ids=["fails", "draws"],
)
def test_if_one_rank_cannot_use_graphs_no_rank_does(comm, monkeypatch, caplog, fault, expected):
    """One warning; then all compute as if nobody had tried."""
    model = tiny_vit(**DROPOUT)
    if comm.rank == 1:
        monkeypatch.setattr(graphs, "capture", fault)
    drawn = torch.get_rng_state()
    made = graphs_of_a_run(comm, model)
    assert made is None and torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())
    said = [record.getMessage() for record in caplog.records if record.name == graphs.__name__]
    assert len(said) == (comm.rank == 0)
    assert all(line.startswith(f"--run.graphs true is not used: {expected}") for line in said)
    ours, theirs = gradients_of(comm, model, made), gradients_of(comm, tiny_vit(**DROPOUT), None)
    assert all(map(torch.equal, ours, theirs))
