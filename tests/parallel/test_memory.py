"""The planner's memory of ranks that share a model is what torch's allocator finds in a real pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo import on_ranks
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from largebatch.augment import Augmented
from largebatch.benchmark.parallel import CONFIGS
from largebatch.config import ModelConfig, ParallelConfig
from largebatch.devices import find_device
from largebatch.losses import classification
from largebatch.parallel.replica import ParallelReplica
from largebatch.plan.memory import of_rank
from largebatch.plan.trace import trace
from largebatch.recipes import RECIPES
from zoo import create_model, set_fused_attn

MODEL = ModelConfig(name="vit_b32", num_classes=1000)
# 12 heads are not 8 parts.
MESHES = {name: config for name, config in CONFIGS.items() if name != "1d, 8 ranks"}


def allocated(run_pass: Any) -> int:
    """The most bytes that a pass adds at once to what there was, by torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_pass()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measured(parallel: ParallelConfig, images: int) -> int:
    """The least of three passes that add to gradients: gloo frees a message by chance a moment later than it might."""
    with torch.device("meta"):
        model: Any = create_model(MODEL.name, num_classes=MODEL.num_classes)
    set_fused_attn(model, False)
    replica = ParallelReplica(
        parallel, model, batch_size=images, precision="fp32", make_optimizer=lambda model: SGD(model.parameters())
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        tensor.normal_(std=0.02)
    batch = Augmented(torch.randn(images, 3, 224, 224), torch.full((images, MODEL.num_classes), 1e-3))
    objective = replica.adapt_objective(classification)

    def forward_backward(batch: Augmented, weight: float) -> torch.Tensor:
        loss = objective(model, batch) * weight
        loss.backward()
        return loss.detach()

    def run_pass() -> None:
        replica.run_pass(batch, 1.0, forward_backward)
        replica.complete_gradients()

    run_pass()
    return min(allocated(run_pass) for _ in range(3))


@pytest.mark.parametrize(
    "name, images", [("1d, 2 ranks", 8), *(pytest.param(name, 16, marks=pytest.mark.evidence) for name in MESHES)]
)
def test_a_rank_needs_what_is_predicted(name, images):
    parallel, recipe = MESHES[name], RECIPES["vit_b32"]()
    config = replace(
        recipe,
        model=MODEL,
        data=replace(recipe.data, micro_batch_size=images),
        run=replace(recipe.run, precision="fp32"),
        parallel=parallel,
    )
    ranks = parallel.shape().size
    memory = of_rank(config, trace(config, device="cpu"), find_device("a100"), ranks=ranks)
    largest = max(on_ranks(measured, ranks, parallel, images))
    print(f"{name}: {largest / 2**20:.1f} MiB")
    assert memory.activations + memory.workspace == pytest.approx(largest, rel=0.1)
