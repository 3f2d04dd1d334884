"""The planner: counted memory beside real passes, closed forms, published runs, and mistakes."""

import csv
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from largebatch.assembly import build_objective
from largebatch.assembly.images import build_augment
from largebatch.assembly.replica import build_optimizer, build_sam
from largebatch.benchmark.__main__ import main as run_benchmark
from largebatch.config import ModelConfig, ParallelConfig, TensorConfig, TrainConfig, accumulation_passes, dump
from largebatch.config.horovod import CPU_CYCLE_TIME_MS, CPU_FUSION_BYTES
from largebatch.data.token_labels import TokenLabels
from largebatch.devices import DEVICES, NAMED, device_named, find_device
from largebatch.engine import TrainState
from largebatch.files.table import read_table
from largebatch.flops import training_flops, utilisation
from largebatch.hooks.ema import Ema
from largebatch.native.attention import choose_attention
from largebatch.optim.look_sam import LookSam
from largebatch.plan import constants, forecast, validation
from largebatch.plan.__main__ import main, read
from largebatch.plan.calibrate import Measured, predicted, read_measured
from largebatch.plan.forecast import Correction, Forecast, forecast_on
from largebatch.plan.memory import MOMENTS, Memory, blocks_bytes, checkpoint_bytes, largest_micro_batch, of_rank
from largebatch.plan.planning import cluster_of, fitted
from largebatch.plan.run import failures_of, input_of, num_steps, run_of
from largebatch.plan.search import search
from largebatch.plan.step import (
    Backward,
    Cluster,
    Speed,
    Step,
    allreduce_seconds,
    backward_of,
    block_bytes,
    cycle_seconds,
    exposed_seconds,
    inner_seconds,
    kernel_seconds,
    negotiation_seconds,
    optimizer_seconds,
    pass_seconds,
    passes_of,
    stages_of,
    step_of,
)
from largebatch.plan.text import search_json, search_lines
from largebatch.plan.trace import Kernel, Pass, _Counter, trace
from largebatch.precision import autocast
from largebatch.ranks.buckets import buckets
from largebatch.recipes import RECIPES
from zoo import create_model

import timm  # isort: skip  (after zoo, which makes it importable beside a CPU build of torch)

CPU = torch.device("cpu")
NAMES = ("vit_nano32", "volo_nano")


def small(name: str, *, precision: str = "fp32", checkpointing: bool = False, **options: Any) -> TrainConfig:
    """A model of seconds with its recipe's kind of loss."""
    like = RECIPES["volo_d1"]() if name == "volo_nano" else TrainConfig()
    model = ModelConfig(name=name, img_size=64, num_classes=10, grad_checkpointing=checkpointing, **options)
    return replace(
        like,
        model=model,
        data=replace(like.data, micro_batch_size=8),
        run=replace(like.run, precision=precision),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def vit() -> Pass:
    """A pass of ViT-B/32 on a GPU, 16 images."""
    return trace(of_images(b32(), 16), device="cuda")


def b32() -> TrainConfig:
    return RECIPES["vit_b32"]()


def of_images(config: TrainConfig, micro_batch_size: int) -> TrainConfig:
    return replace(config, data=replace(config.data, micro_batch_size=micro_batch_size))


# -- memory -------------------------------------------------------------------------------------------------------


def really(config: TrainConfig) -> tuple[int, int, int]:
    """Compute a pass on the CPU; return activations, peak and FLOPs."""
    torch.manual_seed(0)
    model = choose_attention(create_model(**config.model.arguments() | {"weights": None}), CPU).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    images, targets = torch.randn(8, 3, 64, 64), torch.rand(8, 10)
    from largebatch.augment import Augmented

    tokens = torch.rand(8, 16, 10) if config.loss.dense_weight else None
    batch = Augmented(images, targets, tokens)
    counter = _Counter(model)
    counter.ignore([*(p.grad for p in model.parameters()), *(t for t in batch if isinstance(t, Tensor))])
    objective = build_objective(config, model)
    with counter:
        torch.manual_seed(0)
        with autocast(CPU, config.run.precision):
            loss = objective(model, batch)
        kept = counter.live
        loss.backward()
    return kept, counter.peak, int(sum(kernel.flops for kernel in counter.kernels))


@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("name", (*NAMES, "timm/test_convnext", "timm/test_resnet"))
def test_counted_memory_is_that_of_a_real_pass(name, precision, checkpointing):
    rates = {"vit_nano32": {"proj_drop_rate": 0.1, "pos_drop_rate": 0.1}, "volo_nano": {"drop_path_rate": 0.3}}
    config = small(name, precision=precision, checkpointing=checkpointing, **rates.get(name, {}))
    kept, peak, _ = really(config)
    counted = trace(config, device="cpu")
    assert counted.activations == pytest.approx(kept, rel=0.01)  # checkpoint keeps the state of a generator
    assert counted.peak == pytest.approx(peak, rel=0.03)


FAMILIES = {  # a model of each, and the side of its images
    "resnet18": 160,
    "convnext_atto": 96,
    "mobilenetv3_small_050": 64,
    "regnetx_002": 64,
    "densenet121": 64,
    "swin_tiny_patch4_window7_224": 224,
    "beit_base_patch16_224": 160,
    "deit3_small_patch16_224": 384,
    "eva02_tiny_patch14_224": 112,
    "mvitv2_tiny": 224,
    "samvit_base_patch16_224": 224,
    "iformer_t": 128,
    "levit_128s": 224,
    "crossvit_tiny_240": 240,
}


def traced(name: str, side: int) -> None:
    """Count passes of a model of timm as on a GPU, with checkpointing as well if the model can do it."""
    whole = None
    for checkpointing in (False, True):
        config = small(f"timm/{name}", precision="bf16", checkpointing=checkpointing)
        config = replace(config, model=replace(config.model, img_size=side))
        try:
            found = trace(of_images(config, 2), device="cuda")
        except ValueError as error:
            assert checkpointing and "cannot do it: leave it out" in str(error)
            return
        assert sum(gradient.size for gradient in found.gradients) == found.weights
        whole = whole or found
        assert found.peak <= 1.05 * whole.peak and found.flops >= whole.flops


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_timm_are_counted(name):
    traced(name, FAMILIES[name])


@pytest.mark.evidence
@pytest.mark.parametrize("module", timm.list_modules())
def test_a_model_of_every_module_of_timm_is_counted(module):
    for name in timm.list_models(module=module)[:1]:
        published = timm.get_pretrained_cfg(name)
        traced(name, published.input_size[-1] if published else 224)


@timm.models.register_model
def test_numbers(**options: Any) -> torch.nn.Module:
    """A model of timm's kind that looks at its numbers."""
    model = timm.create_model("test_resnet", **options)
    model.act1 = Positive()
    return model


test_numbers.__test__ = False  # type: ignore[attr-defined]


class Positive(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten()[x.flatten().nonzero()[:, 0]].view_as(x)


def test_a_model_that_cannot_be_counted_gets_one_sentence(capsys):
    assert main(["--model", "timm/test_numbers", "--gpus", "2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("largebatch: timm/test_numbers cannot be counted without its numbers (The register_meta ")
    assert error.endswith("measure it, by `python -m largebatch.benchmark step --model timm/test_numbers`.\n")


def test_a_model_without_checkpointing_is_planned_without_a_word_of_it(capsys):
    assert main(["--model", "timm/crossvit_tiny_240", "--model.img_size", "240", "--gpus", "2"]) == 0
    assert "without activation checkpointing, which this model cannot do" in capsys.readouterr().out
    assert main(["--model", "timm/crossvit_tiny_240", "--model.img_size", "240", "--gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["other_checkpointing"] is None


def test_memory_counts_until_it_is_free():
    counter = _Counter(torch.nn.Linear(1, 1, device="meta"))
    with counter:
        x = torch.empty(1000, device="meta")
        y = x + 1
        del y
        z = x.view(10, 100) + 1
    assert counter.live == counter.peak == 8000 and [kernel.moved for kernel in counter.kernels] == [8000, 8000]
    del z
    assert counter.live == 4000


def test_checkpointing_keeps_less_and_computes_a_third_more():
    configs = (small("vit_ti16", checkpointing=on) for on in (False, True))
    plain, again = (trace(of_images(config, 256), device="cuda") for config in configs)
    assert again.activations < 0.2 * plain.activations and again.peak < 0.4 * plain.peak
    assert 1.2 < again.flops / plain.flops < 1.34


def test_flops_are_those_of_the_flop_counter_without_the_gradient_of_the_images(vit):
    first_layer = 2 * 49 * 3 * 32 * 32 * 768
    # The gradient of attention by the fused kernel computes one product more.
    scores = 12 * 2 * 2 * 50 * 50 * 768
    assert vit.flops / vit.images == pytest.approx(training_flops("vit_b32", 224) - first_layer + scores / 2, rel=1e-3)


def test_parameters_and_gradients_are_those_of_the_model(vit):
    assert vit.weights == 4 * 88_224_232
    assert sum(gradient.size for gradient in vit.gradients) == vit.weights and len(vit.gradients) == 152
    assert vit.gradients[0].name.startswith("head") and vit.gradients[-1].name.startswith(("patch", "pos", "cls"))


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", ("vit_nano32", "volo_nano", "timm/test_resnet"))
def test_parts_beside_the_pass_have_the_bytes_of_a_real_run(name):
    """Weights, gradients and the average; micro-batches with the targets of their loss, of which one is prepared."""
    config, device = small(name), find_device("cpu")
    config = replace(config, optim=replace(config.optim, ema_half_life="1 epochs"))
    model = create_model(**config.model.arguments() | {"weights": None})
    average = Ema(model, half_life_images=10).model
    ids, placement = torch.zeros(8, 2, 4, 4, dtype=torch.int32), torch.eye(2, 3, dtype=torch.float64).expand(8, 2, 3)
    taught = TokenLabels(ids, torch.zeros(8, 2, 4, 4).half(), placement) if config.loss.dense_weight else None
    images, labels = torch.randn(8, 3, 64, 64), torch.zeros(8, dtype=torch.int64)
    augmented = build_augment(config)(images, labels, torch.Generator(), taught)
    assert (augmented.token_targets is None) == (name != "volo_nano")
    found = of_rank(config, trace(config, device="cpu"), device, ranks=1)
    assert found.weights == nbytes([*model.parameters(), *model.buffers()])
    assert found.gradients == nbytes(torch.zeros_like(parameter) for parameter in model.parameters())
    assert found.average == nbytes([*average.parameters(), *average.buffers()])
    assert found.inputs == 2 * nbytes(tensor for tensor in augmented if isinstance(tensor, Tensor))
    twice = of_rank(config, trace(config, device="cpu"), device, ranks=1, micro_batch_size=16)
    assert twice.inputs == 2 * found.inputs and twice.average == found.average
    without = replace(config, optim=replace(config.optim, ema_half_life=""))
    assert of_rank(without, trace(config, device="cpu"), device, ranks=1).average == 0


@pytest.mark.parametrize("name", sorted(MOMENTS))
@pytest.mark.parametrize("rho", (None, 0.1))
def test_an_optimizer_keeps_the_bytes_that_are_planned(name, rho):
    config, device = small("vit_nano32"), find_device("cpu")
    config = replace(config, optim=replace(config.optim, name=name, sam_rho=rho))
    model = create_model(**config.model.arguments() | {"weights": None})
    optimizer = build_optimizer(config, model, "eager" if name == "lamb" else None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    build_sam(config, optimizer)
    kept = nbytes(x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.ndim)
    counted = trace(config, device="cpu")
    found = of_rank(config, counted, device, ranks=1)
    assert found.moments == kept
    models = 2 if name == "schedule_free_adamw" else 1  # the average is one
    assert checkpoint_bytes(config, counted) == models * nbytes(model.state_dict().values()) + kept


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(vit):
    device = find_device("a100")
    most = largest_micro_batch(b32(), vit, device, ranks=8)
    counted = trace(of_images(b32(), most), device="cuda")
    assert of_rank(b32(), counted, device, ranks=8).total <= device.memory * 1.01
    more = trace(of_images(b32(), round(1.03 * most)), device="cuda")
    assert of_rank(b32(), more, device, ranks=8).total > device.memory


def test_zero_divides_the_moments_and_offload_moves_them(vit):
    config, device = b32(), find_device("a100")
    plain = of_rank(config, vit, device, ranks=8)
    divided = of_rank(replace(config, parallel=ParallelConfig(zero=1)), vit, device, ranks=8)
    moved = of_rank(replace(config, parallel=ParallelConfig(zero="offload")), vit, device, ranks=8)
    assert plain.moments == 2 * vit.weights
    assert divided.moments == plain.moments / 8 and moved.moments == 0
    assert divided.activations == plain.activations


@pytest.mark.parametrize(
    "parallel, weights",
    (
        (ParallelConfig(tensor=TensorConfig(size=4)), 4),
        (ParallelConfig(tensor=TensorConfig(mode="2d", size=4)), 4),
        (ParallelConfig(tensor=TensorConfig(mode="2.5d", size=8, depth=2)), 4),
        (ParallelConfig(tensor=TensorConfig(mode="3d", size=8)), 8),
        (ParallelConfig(pipeline=2), 2),
        (ParallelConfig(sequence=2), 1),
    ),
)
def test_ranks_that_share_a_model_hold_a_part(vit, parallel, weights):
    device = find_device("a100")
    whole = of_rank(b32(), vit, device, ranks=8)
    part = of_rank(replace(b32(), parallel=parallel), vit, device, ranks=8)
    assert part.gradients == pytest.approx(whole.gradients / weights)
    assert part.activations < whole.activations


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_that_share_tokens_keep_the_patches_of_whole_images(vit, stages):
    """Their product with the embedding reads all patches; tokens are cut after it, and the first stage has it whole."""
    device, config = find_device("a100"), b32()
    plain = ParallelConfig(pipeline=stages)
    whole = of_rank(replace(config, parallel=plain), vit, device, ranks=8).activations
    part = of_rank(replace(config, parallel=replace(plain, sequence=4)), vit, device, ranks=8).activations
    patches, casts = vit.images * 49 * 3072 * 2, vit.casts / stages  # of weights, which are whole
    assert whole - casts == pytest.approx((vit.activations - vit.casts - patches) / stages + patches, rel=0.03)
    assert part - casts == pytest.approx((whole - casts - patches) / 4 + patches, rel=0.03)
    assert part - casts > 1.05 * (whole - casts) / 4


def test_a_grid_of_ranks_holds_four_blocks_of_the_widest_matrix(vit):
    widest = 4 * 3072 * 768
    grids = {"2d": 4, "2.5d": 8, "3d": 8}
    for mode, size in grids.items():
        tensor = TensorConfig(mode=mode, size=size, depth=2 if mode == "2.5d" else 1)  # type: ignore[arg-type]
        assert blocks_bytes(ParallelConfig(tensor=tensor), vit) == 4 * widest / 4
    assert not blocks_bytes(ParallelConfig(tensor=TensorConfig(size=4)), vit)


# -- time -----------------------------------------------------------------------------------------------------------


def backward(seconds: float = 0.1, count: int = 100, size: int = 4_000_000) -> Backward:
    """Gradients that become ready one after the other, at equal distances."""
    return Backward(seconds, tuple(seconds * (k + 1) / count for k in range(count)), (size,) * count)


def test_gradients_are_reduced_in_the_buckets_of_training(vit):
    found = backward_of(vit, cluster_of(8, "a100"), b32(), Speed())
    sizes = [gradient.size for gradient in vit.gradients]
    parts = [*buckets(sizes)]
    assert found.sizes == tuple(sum(sizes[number] for number in part) for part in parts) and len(parts) < len(sizes) / 6
    assert 0 < found.ready[0] < found.ready[-2] <= found.ready[-1] <= found.seconds

    assert [*found.ready] == sorted(found.ready) and sum(found.sizes) == vit.weights


def test_horovods_settings_on_cpus_are_those_of_training():
    assert constants.FUSION_BYTES["cpu"].value == CPU_FUSION_BYTES
    assert constants.CYCLE_S["cpu"].value == CPU_CYCLE_TIME_MS / 1000


def test_a_large_sum_takes_the_time_of_a_ring_and_a_small_one_that_of_a_tree():
    cluster = cluster_of(10_000, "a100")
    ring = 2 * 9999 / 10_000 * 1e12 / cluster.between.bandwidth
    assert allreduce_seconds(1e12, cluster) == pytest.approx(ring, rel=0.01)
    hops = 2 * 7 * cluster.inside.latency + 2 * math.ceil(math.log2(1250)) * cluster.between.latency
    assert allreduce_seconds(1, cluster) == pytest.approx(hops, rel=0.01)
    assert allreduce_seconds(1e9, replace(cluster, ranks=1)) == 0


def pipelined(stages: int, parts: int, seconds: float) -> float:
    """Return the time in which stages work through parts of a micro-batch, one after the other, event by event.

    All forward passes come first, then all backward passes, which take twice as long; `seconds`: of one stage alone.
    """
    forward, backward = seconds / parts / 3, 2 * seconds / parts / 3
    ends = [0.0] * stages  # of the last work of each stage
    for part in range(parts):
        for stage in range(stages):
            ends[stage] = max(ends[stage], ends[stage - 1] if stage else 0.0) + forward
    for part in range(parts):
        for stage in reversed(range(stages)):
            ends[stage] = max(ends[stage], ends[stage + 1] if stage < stages - 1 else 0.0) + backward
    return ends[0]


@pytest.mark.parametrize("stages, parts", ((1, 1), (2, 2), (2, 8), (3, 5), (4, 4), (4, 16), (6, 6)))
def test_a_pipeline_idles_as_long_as_one_that_is_simulated(vit, stages, parts):
    """(stages - 1) / (parts + stages - 1) of its time."""
    cluster = cluster_of(12, "a100")
    instant = {name: replace(getattr(cluster, name), bandwidth=1e30) for name in ("inside", "between")}
    config = replace(b32(), parallel=ParallelConfig(pipeline=stages, micro_batches=parts if stages > 1 else None))
    config = replace(config, data=replace(config.data, global_batch_size=16 * 12, micro_batch_size=16))
    compute = step_of(config, vit, replace(cluster, **instant)).compute
    work = stages * pass_seconds(vit, cluster.device, "bf16") / stages  # a replica of `stages` ranks has so many passes
    assert compute == pytest.approx(pipelined(stages, parts, work), rel=1e-9)
    assert 1 - work / compute == pytest.approx((stages - 1) / (parts + stages - 1), abs=1e-9)


def simulated(work: Backward, cluster: Cluster) -> float:
    """Return the exposed part of a reduction, cycle by cycle: buckets that are ready are joined, one message a time."""
    cycle, ready, free = cycle_seconds(cluster), list(zip(work.ready, work.sizes)), 0.0
    agreed = negotiation_seconds(cluster) - cycle / 2
    while ready:
        seen = cycle * math.ceil(max(ready[0][0], free - agreed) / cycle)  # Horovod looks once in a cycle
        size = ready.pop(0)[1]
        while ready and ready[0][0] <= seen and size + ready[0][1] <= constants.FUSION_BYTES["cuda"].value:
            size += ready.pop(0)[1]
        free = seen + agreed + allreduce_seconds(size, cluster)
    return free - work.seconds


@pytest.mark.parametrize("ranks", (8, 200, 10_000))
@pytest.mark.parametrize("bandwidth", (1e9, 1e10, 1e15))
def test_the_exposed_reduction_is_that_of_a_simulated_step_to_two_cycles(ranks, bandwidth):
    cluster = cluster_of(ranks, "a100")
    fast = {name: replace(getattr(cluster, name), bandwidth=bandwidth, latency=1e-7) for name in ("inside", "between")}
    cluster, work = replace(cluster, **fast), backward()
    closed = exposed_seconds(work, cluster, data_ranks=ranks, overlaps=True)
    assert simulated(work, cluster) == pytest.approx(closed, rel=0.02, abs=2 * cycle_seconds(cluster))


def test_without_overlap_all_of_the_reduction_is_exposed():
    cluster, work = cluster_of(8, "a100"), backward()
    apart = exposed_seconds(work, cluster, data_ranks=8, overlaps=False)
    assert apart >= 2 * 7 / 8 * 4e8 / cluster.inside.bandwidth + negotiation_seconds(cluster)
    assert exposed_seconds(work, cluster, data_ranks=1, overlaps=False) == 0


def test_a_run_is_its_steps_evaluations_and_checkpoints(vit):
    """By hand: 1,000,000 images in batches of 4,096 on 8 GPUs, 30 epochs, the average evaluated as well."""
    config, cluster = b32(), cluster_of(8, "a100")
    config = replace(
        config,
        data=replace(config.data, global_batch_size=4096, micro_batch_size=16),
        optim=replace(config.optim, ema_half_life="1 epochs"),
        run=replace(config.run, duration="30 epochs", eval_every="2 epochs"),
        checkpoint=replace(config.checkpoint, every="3 epochs"),
    )
    found = run_of(config, vit, cluster, Step(0.1, 0.01, 0.02, 0.03), Speed(), num_images=1_000_000)
    assert num_steps(config, 1_000_000) == 7325  # 30,000,000 / 4,096 = 7,324.2
    assert num_steps(replace(config, run=replace(config.run, max_steps=5)), 1_000_000) == 5
    repeated = replace(config, augment=replace(config.augment, repeats=3))  # an epoch then has whole batches: 244
    assert num_steps(repeated, 1_000_000) == 7320
    assert found.training == pytest.approx(7325 * 0.16)
    timed = replace(config, checkpoint=replace(config.checkpoint, every="5 minutes"))  # in 1,172 s
    timed_run = run_of(timed, vit, cluster, Step(0.16, 0, 0, 0), Speed(), num_images=1_000_000)
    assert timed_run.checkpoints == pytest.approx(0.3 * found.checkpoints)
    each = pass_seconds(vit, cluster.device, "bf16") / vit.images
    assert found.evaluations == pytest.approx(15 * (1.0 + 2 * 6250 * each / 3))
    state = vit.weights * 4  # weights, two moments, the average
    assert found.checkpoints == pytest.approx(10 * state / 10e9)
    # A save of 2 TB takes 2,000 s, and the next one waits for the rest of it.
    slow = run_of(config, replace(vit, weights=5e11), cluster, Step(0.1, 0, 0, 0), Speed(), num_images=1_000_000)
    assert slow.checkpoints == pytest.approx(10 * (200 + 2000 - 73.25))
    assert (found.start, run_of(config, vit, cluster_of(8, "cpu"), Step(1, 0, 0, 0), Speed(), num_images=9).start) == (
        120, 0,
    )  # fmt: skip
    shared = replace(config, parallel=ParallelConfig(sequence=2))  # half of the replicas, each twice as fast
    again = run_of(shared, vit, cluster, Step(0.1, 0, 0, 0), Speed(), num_images=1_000_000)
    assert again.evaluations == pytest.approx(found.evaluations)
    forward = sum(kernel_seconds(vit, cluster.device, "bf16")[: vit.forward_kernels])
    assert forward == pytest.approx(sum(kernel_seconds(vit, cluster.device, "bf16")) / 3, rel=0.15)


def test_a_kernel_takes_the_longer_of_its_flops_and_its_bytes_and_a_pass_at_least_its_launches(vit):
    device = find_device("a100")
    made = replace(vit, kernels=(Kernel(267.9e9, 1.0), Kernel(0.0, 2039e6), Kernel(267.9e9, 2 * 2039e6)))
    times = [1e-3, 1e-3 / 0.85, 2e-3 / 0.85]
    assert kernel_seconds(made, device, "bf16") == pytest.approx(times)
    assert pass_seconds(made, device, "bf16", Speed(2.0)) == pytest.approx(2 * sum(times))
    assert kernel_seconds(made, device, "fp32")[0] == pytest.approx(1e-3 * 312 / 19.5)  # as far below the datasheet
    small = replace(made, kernels=made.kernels[:1] * 2 + (Kernel(0.0, 1.0),) * 1000)
    assert pass_seconds(small, device, "bf16") == pytest.approx(1002 * 6e-6)


def test_what_hides_the_reduction_and_what_does_not(vit):
    """compile, a mesh and the core of a CPU show all of it; a replica of all ranks has none."""
    base = replace(b32(), data=replace(b32().data, global_batch_size=16 * 8, micro_batch_size=16))
    cluster = cluster_of(8, "a100")
    cpu = cluster_of(8, "cpu")
    hidden = step_of(base, vit, cluster).exposed
    compiled = replace(base, run=replace(base.run, compile=True))
    cut = replace(base, parallel=ParallelConfig(sequence=2))
    for config, where in ((compiled, cluster), (cut, cluster), (base, cpu)):
        work, ranks = backward_of(vit, where, config, Speed()), config.parallel.shape().data_size(8)
        whole = exposed_seconds(work, where, data_ranks=ranks, overlaps=False)
        assert step_of(config, vit, where).exposed == pytest.approx(whole) and whole > hidden
    assert step_of(replace(base, parallel=ParallelConfig(sequence=8)), vit, cluster).exposed == 0
    assert negotiation_seconds(cluster_of(200, "a100")) == pytest.approx(0.5e-3 + 2 * 2 * 8 * 3e-6)
    half = replace(base, run=replace(base.run, compression="fp16"))
    sizes = [backward_of(vit, cluster, config, Speed()).sizes for config in (base, half)]
    assert sizes[1] == tuple(size // 2 for size in sizes[0])


def test_stages_hold_as_many_parts_as_there_are_stages_and_a_grid_its_blocks(vit):
    device = find_device("a100")

    def rank(parallel: ParallelConfig) -> Memory:
        return of_rank(replace(b32(), parallel=parallel), vit, device, ranks=8)

    few, many = (rank(ParallelConfig(pipeline=2, micro_batches=parts)).activations - vit.casts / 2 for parts in (2, 8))
    assert many == pytest.approx(few * 2 / 8)
    square = ParallelConfig(tensor=TensorConfig(mode="2d", size=4))
    peak = vit.peak / 4
    assert rank(square).activations + rank(square).workspace == pytest.approx(peak + 4 * 4 * 3072 * 768 / 4)


def test_images_are_read_as_fast_as_steps_need_them(vit):
    config = replace(b32(), data=replace(b32().data, global_batch_size=1600, micro_batch_size=100))
    found = input_of(config, cluster_of(8, "a100"), Step(0.5, 0.1, 0.1, 0.1))
    assert found.images_per_s == pytest.approx(2000) and found.cores_per_rank == pytest.approx(250 / 660)
    assert found.bytes_per_s == pytest.approx(2000 * 147.9e9 / 1_281_167, rel=0.01)  # the archive of ImageNet
    cluster = cluster_of(8, "a100", cores_per_rank=1)
    step = step_of(config, vit, cluster)
    assert step.input == pytest.approx(200 / 660 - step.compute - step.exposed - step.optimizer)
    assert step_of(config, vit, cluster_of(8, "a100", cores_per_rank=1000)).input == 0


@pytest.mark.parametrize("name, tensors", (("lamb", 11), ("adamw", 8), ("sgd", 6), ("lars", 6)))
def test_an_optimizer_moves_its_tensors_through_the_memory(vit, name, tensors):
    """And ZeRO an eighth of them, and sends the weights to all."""
    config = replace(b32(), optim=replace(b32().optim, name=name))
    cluster = cluster_of(8, "a100")
    found = optimizer_seconds(vit, config, cluster)
    assert found == pytest.approx(tensors * vit.weights / (0.85 * 2039e9))
    divided = optimizer_seconds(vit, replace(config, parallel=ParallelConfig(zero=1)), cluster)
    assert divided == pytest.approx(found / 8 + 7 / 8 * vit.weights / cluster.inside.bandwidth, rel=0.05)


def test_a_second_gradient_every_few_steps_costs_its_share(vit):
    config = replace(b32(), data=replace(b32().data, global_batch_size=128, micro_batch_size=16))
    plain = step_of(config, vit, cluster_of(8, "a100"))
    sam = replace(config, optim=replace(config.optim, sam_rho=0.1))
    assert step_of(sam, vit, cluster_of(8, "a100")).compute == pytest.approx(1.2 * plain.compute)
    device = find_device("a100")
    more = of_rank(sam, vit, device, ranks=8).workspace - of_rank(config, vit, device, ranks=8).workspace
    assert more == vit.weights  # a copy


def test_ranks_of_a_replica_wait_for_their_messages(vit):
    """By the formulas of parallel/README.md, of which test_bytes.py counts those of a block."""
    tokens, width, depth, images = 50, 768, 12, 16
    a, w = images * tokens * width * 2, 12 * width**2 * 2
    for parallel, sent in (
        (ParallelConfig(tensor=TensorConfig(size=4)), depth * 8 * 3 / 4 * a),
        (ParallelConfig(tensor=TensorConfig(mode="2d", size=4)), depth * (21 * a + 3 * w) / 4),
        (ParallelConfig(sequence=4), depth * 2 * 3 / 4 * 2 * a),
        (ParallelConfig(pipeline=2), 2 * a),
        (ParallelConfig(), 0),
    ):
        cluster = cluster_of(16, "a100")
        config = replace(b32(), parallel=parallel)
        assert inner_seconds(vit, config, cluster) == pytest.approx(sent / cluster.inside.bandwidth)
        apart, wide = replace(cluster, per_host=1), replace(config, run=replace(config.run, precision="fp32"))
        assert inner_seconds(vit, wide, cluster) == pytest.approx(2 * sent / cluster.inside.bandwidth)
        assert inner_seconds(vit, config, apart) == pytest.approx(sent / cluster.between.bandwidth)


def test_buffers_of_libraries_count_where_they_are(vit):
    gib, config = 2**30, b32()
    for gpu, ranks, communication, runtime in (
        ("a100", 1, 0, 1.6 * gib), ("a100", 8, 2**27 + 0.4 * gib, 1.6 * gib), ("cpu", 8, 2**20, 0),
    ):  # fmt: skip
        found = of_rank(config, vit, find_device(gpu), ranks=ranks)
        rest = found.total - found.communication - found.runtime
        assert found.communication == pytest.approx(communication)
        assert found.runtime == pytest.approx(runtime + 0.05 * rest)


def test_expected_time_with_failures_is_that_of_many_runs(vit):
    """Daly's formula beside drawn failures: 200,000 segments have a standard error of 0.5 %."""
    found = failures_of(b32(), vit, ranks=10_000, seconds=36_000, hours_per_failure=2_000)
    cost, restart = 3 * vit.weights / constants.COPY_RATE.value, constants.RESTART_S.value
    assert found.mtbf == 720 and found.interval == pytest.approx(math.sqrt(2 * cost * 720))
    draw, total, segments = random.Random(0), 0.0, 200_000
    for _ in range(segments):
        needed = found.interval + cost
        while (failure := draw.expovariate(1 / 720)) < needed:
            total += failure
            needed = restart + found.interval + cost  # a failure in the restart begins it anew
        total += needed
    assert found.seconds == pytest.approx(36_000 * total / segments / found.interval, rel=0.02)
    never = failures_of(b32(), vit, ranks=8, seconds=36_000, hours_per_failure=1e12)
    assert never.seconds == pytest.approx(36_000, rel=1e-4)


# -- batches, meshes, constants -------------------------------------------------------------------------------------


def test_a_batch_that_cannot_be_made_becomes_the_nearest_with_the_sentence_of_training():
    config, passes, why = fitted(b32(), 200)
    assert (config.data.global_batch_size, config.data.micro_batch_size, passes) == (32_800, 164, 1)
    with pytest.raises(ValueError) as error:
        accumulation_passes(global_batch_size=32_768, micro_batch_size=256, num_ranks=200)
    assert why == str(error.value)
    assert fitted(b32(), 4) == (b32(), 32, "")
    assert passes_of(b32(), 4) == 32


def test_search_orders_meshes_and_refuses_with_the_sentences_of_training():
    found = search(replace(b32(), run=replace(b32().run, precision="bf16")), cluster_of(8, "a100"))
    times = [one.step.seconds for one in found if one.step]
    assert times == sorted(times) and found[0].parallel.shape().size == 1
    reasons = {one.refused for one in found if one.refused}
    assert any("mode 2d expects a square" in reason for reason in reasons)
    listed = json.loads(search_json(found))
    assert len(listed) == len(found) and all((one["step"] is None) == bool(one["refused"]) for one in listed)
    shown = "\n".join(search_lines(found))
    assert "data parallel alone, ZeRO" in shown and "refused: tensor 2d 2 and " in shown


@pytest.mark.parametrize("gpus, planned", ((200, 32_800), (3, 33_024), (64, 32_768)))
def test_search_rounds_the_batch_as_a_plan_does_and_takes_bf16_instead_of_fp16(gpus, planned, capsys):
    assert main(["--gpus", str(gpus), "--model", "vit_b32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"]["global"] == planned
    assert main(["--gpus", str(gpus), "--model", "vit_b32", "--search"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert "meshes fit; the fastest is: data parallel alone" in first and len(rest) < 25
    notes = [line for line in rest if line.startswith("note: ")]
    assert sum(f"planned with a global batch of {planned}." in note for note in notes) == (planned != 32_768)
    assert sum("--run.precision is fp16" in note for note in notes) == 1
    assert gpus == 3 or any(line.startswith("tensor 1d 2") for line in rest)
    assert not any("fp16" in line for line in rest if line.startswith("refused"))


def test_a_search_that_finds_nothing_begins_with_one_sentence(capsys):
    assert main([*TINY, "--gpus", "2", "--gpu", "v100", "--search", "--run.precision", "fp16"]) == 0
    assert "are in bf16" not in capsys.readouterr().out  # which a V100 does not have
    cluster = cluster_of(2, "a100")
    tiny = replace(cluster, device=replace(cluster.device, memory=2**20))
    config = replace(small("vit_nano32"), data=replace(TrainConfig().data, global_batch_size=64, micro_batch_size=8))
    first, *_ = search_lines(search(config, tiny))
    assert first.startswith("None of 14 meshes can be had; data parallel alone: A micro-batch of 1 needs ")


def test_every_constant_has_a_source_and_devices_are_those_of_the_datasheets():
    numbers = [value for _, value in constants.all_constants()]
    assert len(numbers) >= 25
    for one in (*numbers, *DEVICES.values(), *constants.LINKS.values()):
        assert constants.ASSUMED in one.source or "https://" in one.source or "largebatch/" in one.source or (
            "docs/" in one.source or "bytes per parameter" in one.source
        )
    assert {name for name in NAMED.values() if name} == DEVICES.keys() - {"cpu"}
    for name, device in DEVICES.items():
        assert cluster_of(16, name).between.name in constants.LINKS and 0.8 < device.product / device.peak <= 1


PUBLISHED = Path(__file__).parents[1] / "docs/planner.csv"


@pytest.fixture(scope="module")
def rows() -> list[validation.Row]:
    return validation.validated([PUBLISHED], lambda words: read(words)[1:])


def test_the_published_table_of_errors_is_what_the_plan_predicts(rows):
    """docs/planner.md, to its last digit; README names some of them."""
    printed = [line for line in validation.lines(rows) if line.startswith("| ")]
    written = PUBLISHED.with_suffix(".md").read_text().splitlines()
    assert printed == [line for line in written if line in printed] and len(printed) == 1 + len(rows) > 50


def test_predictions_for_200_gpus_do_not_read_the_published_hours():
    cells = read_table(PUBLISHED, validation.COLUMNS, what="TABLE", expected="")
    runs = [row for row in cells if row["run"].startswith("vit_b32, 300 epochs, ")]
    changed = [row | {"published": "1"} if "200" in row["run"] else row for row in runs]
    found, again = (
        [row.predicted for row in validation.published(given, lambda words: read(words)[1:])]
        for given in (runs, changed)
    )
    assert found == again and len(found) == 2
    assert validation.root(lambda x: x - 3.0) == pytest.approx(3.0, rel=1e-5)


def test_the_ranges_of_a_plan_are_those_of_its_own_errors(rows, tmp_path, capsys):
    """A time that is not calibrated is told with the errors of all rows on GPUs that were not, either."""
    took: dict[str, list[float]] = {"img/s": [], "h": []}  # images per second are those of steps
    for row in rows:
        if row.group == "d" and row.given == "counted":
            took[row.unit].append(1 + row.error if row.unit == "img/s" else 1 / (1 + row.error))
    assert constants.STEPS_TOOK == pytest.approx((min(took["img/s"]), max(took["img/s"])), rel=0.01)
    assert constants.RUNS_TOOK == pytest.approx((min(took["img/s"]), max(took["h"])), rel=0.01)
    assert main([*TINY, "--gpus", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for part, (least, most) in (("step", constants.STEPS_TOOK), ("run", constants.RUNS_TOOK)):
        assert told["expected"][part] == pytest.approx([least * told[part]["total"], most * told[part]["total"]])
    assert main([*TINY, "--gpus", "8"]) == 0
    output = capsys.readouterr().out
    assert output.count(" without a calibration: published ") == 2
    file = table(tmp_path / "step.csv", A_STEP)
    assert main([*TINY, "--gpus", "1", "--json", "--calibrate", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["expected"] is None


# -- the command line -----------------------------------------------------------------------------------------------

TINY = ("--model", "vit_nano32", "--model.img_size", "64", "--global-batch", "64", "--micro-batch", "8")


def test_json_adds_up_and_a_run_folder_gives_the_same(tmp_path, capsys):
    assert main([*TINY, "--gpus", "8", "--json", "--price-per-gpu-hour", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    for part in ("step", "run"):
        values = found[part]
        assert sum(value for name, value in values.items() if name != "total") == pytest.approx(values["total"])
    assert found["price"] == pytest.approx(2 * found["gpu_hours"]) and found["kwh"] is None
    assert found["batch"] == {"global": 64, "micro": 8, "passes": 1, "note": ""}
    from largebatch.config import parse
    from largebatch.recipes import find

    words = ["--model", "vit_nano32", "--data", "synthetic", "--model.img_size", "64", "--data.global_batch_size", "64"]
    config = parse([*words, "--data.micro_batch_size", "8"], choose_recipe=find)
    (tmp_path / "config.yaml").write_text(dump(config))
    assert main([str(tmp_path), "--gpus", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == found["step"]


def test_table_and_picture(tmp_path, capsys):
    assert main([*TINY, "--gpus", "16", "--watts-per-gpu", "400", "--picture", str(tmp_path / "p.png")]) == 0
    output = capsys.readouterr().out
    for words in ("16 ranks × 4 micro-batch × 1 pass", "largest micro-batch", "exposed", "kWh", "assumed by us"):
        assert words in output
    assert (tmp_path / "p.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "words, sentence",
    (
        (["--gpu", "a10"], "--gpu is 'a10', which is not known: did you mean a100?"),
        (["--network", "hrd"], "--network is 'hrd', which is not known: did you mean hdr?"),
        (["--gpus", "0"], "--gpus is 0: expected 1 or more."),
        (["--model", "vit_b33"], "There is no model 'vit_b33': did you mean vit_b32?"),
        (["--epochs", "0"], "--epochs is 0: expected more than 0."),
        (["--gpus", "3", "--parallel.pipeline", "2"], "--parallel asks for replicas of 2 ranks"),
        (["--gpus", "6", "--parallel.tensor.size", "3"], "The model has 2 attention heads, and tensor 3 cuts them"),
        (["nowhere"], "nowhere is not a run folder: expected a config.yaml in it; give the --run.folder of a run."),
        (["--optim.lrr", "1"], "There is no option optim.lrr"),
    ),
)
def test_mistakes_are_one_sentence(words, sentence, capsys):
    run = words[:1] if not words[0].startswith("-") else []
    given = [word for word in TINY if "--model" not in words or word not in ("--model", "vit_nano32")]
    assert main([*run, *given, *words[len(run) :]]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"largebatch: {sentence}") and error.count("\n") == 1


A_STEP = Measured(
    seconds=1.0, model="vit_nano32", img_size=64, precision="bf16", ranks=1, micro_batch=8, images=64,
    hardware="a GPU", data="resident", benchmark="a step", command="c", versions="v", date="2026-11-21",
)  # fmt: skip
PASSES = replace(A_STEP, images=16, data="", benchmark="passes")


def table(path: Path, measured: Measured) -> Path:
    """A table as `largebatch.benchmark` writes it."""
    row = {"contender": "largebatch", "round": 0, "peak_mib": 1} | asdict(measured)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    return path


def test_calibration_gives_the_measured_time_and_says_so(tmp_path, capsys):
    file = table(tmp_path / "step.csv", A_STEP)
    assert main([*TINY, "--gpus", "1", "--json", "--calibrate", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"]["total"] == pytest.approx(1.0, rel=1e-6)
    assert str(file) in found["speed"]["source"]


@pytest.mark.parametrize(
    "other, sentence",
    (
        ({"model": "vit_b16", "img_size": 224}, "measured with vit_b16 at 224 px"),
        ({"precision": "fp32"}, "measured in fp32"),
        ({"model": "", "benchmark": "loader"}, "a table of 'loader': expected a table of `largebatch.benchmark model`"),
        ({"seconds": 0.0}, "expected a table of `largebatch.benchmark model`"),
        ({"seconds": math.nan}, "expected a table of `largebatch.benchmark model`"),
        ({"seconds": -1.0}, "expected a table of `largebatch.benchmark model`"),
        ({"micro_batch": 0}, "expected a table of `largebatch.benchmark model`"),
        ({"ranks": 10**12}, "expected a table of `largebatch.benchmark model`"),
        ({"img_size": "big"}, "expected a table of `largebatch.benchmark model`"),
        ({"precision": "fp8"}, "expected a table of `largebatch.benchmark model`"),
        ({"cores": math.nan}, "expected a table of `largebatch.benchmark model`"),
    ),
)
def test_a_calibration_of_something_else_is_refused(other, sentence, tmp_path, capsys):
    file = table(tmp_path / "t.csv", replace(PASSES, **other))
    assert main([*TINY, "--gpus", "1", "--calibrate", str(file)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("column", ["img_size", "ranks", "cores", "plain", "seconds"])
def test_a_table_that_lacks_a_column_is_refused(tmp_path, capsys, column):
    file = table(tmp_path / "t.csv", PASSES)
    with open(file, newline="") as text:
        rows = [{name: cell for name, cell in row.items() if name != column} for row in csv.DictReader(text)]
    with open(file, "w", newline="") as text:
        csv.DictWriter(text, rows[0]).writerows([{name: name for name in rows[0]}, *rows])
    for words in ([*TINY, "--gpus", "1", "--calibrate", str(file)], ["validate", str(file), str(file)]):
        assert main(words) == 2 and "expected a table of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"from": "nobody"}, "from 'nobody': expected one of run, rate"),
        ({"figure": "hours"}, "with the figure 'hours'"),
        ({"published": "0"}, "published '0'"),
        ({"published": "nan"}, "published 'nan'"),
        ({"published": "about 3"}, "published 'about 3'"),
        ({"options": "--gpu \x1b[2J"}, "--gpu is '\\x1b[2j'"),
        ({"options": None}, "no rows with options"),
    ],
)
def test_a_row_of_published_runs_that_says_nothing_is_refused(tmp_path, capsys, changes, sentence):
    row = next(row for row in read_table(PUBLISHED, (), what="TABLE", expected="") if not row["from"]) | changes
    names = sorted(row, key=lambda name: name == "options")  # a row that is cut off lacks the last
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([names, [row[name] for name in names if row[name] is not None]])
    assert main(["validate", str(tmp_path / "t.csv")]) == 2
    assert sentence in capsys.readouterr().err


def test_names_in_a_table_cannot_command_a_terminal(tmp_path, capsys):
    row = next(row for row in read_table(PUBLISHED, (), what="TABLE", expected="") if not row["from"])
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([row, (row | {"run": "\x1b[2Jx", "source": "a\x07b"}).values()])
    assert main(["validate", str(tmp_path / "t.csv")]) == 0
    out = capsys.readouterr().out
    assert r"\x1b[2Jx" in out and r"a\x07b" in out and "\x1b" not in out


def test_a_pipe_in_place_of_a_table_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "t.csv")
    assert main(["validate", str(tmp_path / "t.csv")]) == 2
    assert "has no rows with group, run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "hardware, gpu, sentence",
    (
        ("NVIDIA H100 80GB HBM3, 26 CPU cores", "a100", "measured on NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100", "is for a100: measure on a whole one, or leave --calibrate out."),
        ("AMD EPYC, 2 cores, threads per rank: 2", "h100", "is for h100: give --gpu cpu, or leave --calibrate out."),
        ("NVIDIA A100-SXM4-40GB", "cpu", "is for cpu: give --gpu a100_40gb, or leave --calibrate out."),
    ),
)
def test_a_calibration_of_another_device_is_refused(hardware, gpu, sentence, tmp_path, capsys):
    file = table(tmp_path / "t.csv", replace(PASSES, hardware=hardware, cores=2.0 * ("AMD" in hardware)))
    words = [*TINY, "--run.precision", "bf16", "--gpus", "1", "--gpu", gpu, "--calibrate", str(file)]
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_a_calibration_on_two_cores_predicts_half_a_core(tmp_path, capsys):
    """Four ranks on two cores: each pass takes four times as long as with both cores."""
    file = table(tmp_path / "t.csv", replace(PASSES, hardware="AMD EPYC", cores=2))
    words = [*TINY, "--run.precision", "bf16", "--gpus", "4", "--gpu", "cpu", "--cores-per-rank", "0.5", "--json"]
    assert main([*words, "--calibrate", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"]["compute"] == pytest.approx(found["batch"]["passes"] * 0.5 * 4, rel=1e-6)


def test_neither_horovod_nor_dali_is_needed():
    code = "import sys; sys.modules.update(dict.fromkeys(['horovod', 'nvidia', 'mpi4py'])); "
    code += f"from largebatch.plan.__main__ import main; sys.exit(main({[*TINY, '--gpus', '8']!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout


# -- beside training and benchmarks ---------------------------------------------------------------------------------


A100 = "NVIDIA A100-SXM4-80GB"


def planned(config: TrainConfig, *, memory: float = 80 * 2**30, ranks: int = 4) -> Forecast:
    plan = forecast_on(config, A100, memory, ranks=ranks, per_host=ranks, num_images=1000)
    assert plan
    return plan


def test_training_is_told_hours_and_memory_and_refused_if_it_cannot_fit():
    told = planned(small("vit_nano32")).lines(A100)
    assert len(told) == 2 and "h for the whole run" in told[0] and "GiB on each rank" in told[1]
    for config, memory, remedy in (
        (small("vit_nano32"), 2**20, "give --model.grad_checkpointing true"),
        (small("vit_nano32", checkpointing=True), 2**20, "take a smaller model"),
        (small("timm/efficientvit_m0"), 2**20, "give --model.grad_checkpointing true"),
    ):
        with pytest.raises(ValueError, match=f"--data.micro_batch_size is 8, which needs .* has 0.0: {remedy}.$"):
            planned(config, memory=memory).lines(A100)
    much = replace(b32(), data=replace(b32().data, micro_batch_size=4096, global_batch_size=4096 * 4))
    with pytest.raises(ValueError, match=r": give at most (\d+), or give --model.grad_checkpointing true.$") as refused:
        planned(much, memory=16 * 2**30).lines(A100)
    most = int(str(refused.value).split("at most ")[1].split(",")[0])
    assert planned(replace(much, data=replace(much.data, micro_batch_size=most)), memory=16 * 2**30).lines(A100)
    assert forecast_on(small("vit_nano32"), "another GPU", 2**20, ranks=4, per_host=4, num_images=1000) is None


def test_a_resumed_run_with_a_batch_of_other_ranks_is_not_refused():
    config = small("vit_nano32")
    odd = planned(replace(config, data=replace(config.data, global_batch_size=16)), ranks=5)
    assert len(odd.lines(A100)) == 1
    assert odd.rest(10.0, left=50) == (500.0, "without evaluations and checkpoints")


def test_a_batch_ramp_is_told_what_the_hours_leave_out():
    config = small("vit_nano32")
    growing = planned(replace(config, schedule=replace(config.schedule, batch_ramp="8@0,noise")))
    assert "--schedule.batch_ramp '8@0,noise' is not counted" in growing.lines(A100)[1]
    rest, note = growing.rest(10.0, left=50)
    assert rest == 500.0 and note == "if the batch stays as it is now, without evaluations and checkpoints"


def corrected(monkeypatch, caplog, seconds: list[float], **parts) -> list[str]:
    """Let a hook of a plan watch steps that end after so many seconds each; return its lines."""
    trainer = SimpleNamespace(comm=SimpleNamespace(rank=0), last_step=1000, state=TrainState(), device=CPU, sam=None)
    vars(trainer).update(parts)
    now = iter([0.0, *accumulate(seconds)])
    monkeypatch.setattr(forecast, "clock", lambda: next(now))
    hook = Correction(None)
    with caplog.at_level("INFO", logger="largebatch.plan"):
        for trainer.state.step in range(1, 2 + len(seconds)):
            hook.after_train_step(trainer, None)  # type: ignore[arg-type]
    return [record.getMessage() for record in caplog.records]


def test_the_first_steps_correct_the_hours_once(monkeypatch, caplog):
    """The slow start and a pause do not count: 974 steps of 36 s are 9.74 h."""
    seconds = [300.0] * 5 + [36.0] * 10 + [900.0] + [36.0] * 20
    (line,) = corrected(monkeypatch, caplog, seconds)
    assert line.startswith("plan: a step takes 36 s, the rest of the run 9.74 h, until ")
    assert line.endswith("(without evaluations and checkpoints)")


def test_the_second_gradient_of_each_fifth_step_counts(monkeypatch, caplog):
    """As in the plan: 974 steps of 30 s on average."""
    (line,) = corrected(monkeypatch, caplog, 8 * [25.0] * 4 + 8 * [50.0], sam=LookSam(rho=0.1))
    assert line.startswith("plan: a step takes 30 s, the rest of the run 8.12 h, until ")


def test_short_rests_and_other_ranks_say_nothing(monkeypatch, caplog):
    assert not corrected(monkeypatch, caplog, [0.01] * 40)
    assert not corrected(monkeypatch, caplog, [36.0] * 40, comm=SimpleNamespace(rank=1))


def test_steps_as_planned_leave_the_hours_as_planned():
    plan = planned(small("vit_nano32"))
    assert plan.step
    whole, steps = plan.run(plan.step), num_steps(plan.config, 1000)
    rest, note = plan.rest(plan.step.seconds, left=steps)
    assert rest == pytest.approx(whole.seconds - whole.start) and note == "1.00 × the plan"
    slower, note = plan.rest(2 * plan.step.seconds, left=steps // 2)
    assert rest / 2 < slower < rest and note == "2.00 × the plan"  # evaluations have a part that does not grow


# Names as nvidia-smi prints them -> the device, its TFLOP/s by the datasheet, and the GiB that nvidia-smi shows.
PRINTED: dict[str, tuple[str, float, float] | None] = {
    "Tesla V100-SXM2-16GB": ("v100_16gb", 125, 16),
    "Tesla V100-SXM2-32GB": ("v100", 125, 32),
    "Tesla V100S-PCIE-32GB": None,
    "Tesla T4": None,
    "NVIDIA A10": None,
    "NVIDIA A30": ("a30", 165, 24),
    "NVIDIA A40": None,
    "NVIDIA A100-SXM4-40GB": ("a100_40gb", 312, 40),
    "NVIDIA A100-PCIE-40GB": ("a100_40gb", 312, 40),
    "NVIDIA A100-SXM4-80GB": ("a100", 312, 80),
    "NVIDIA A100 80GB PCIe": ("a100_pcie", 312, 80),
    "NVIDIA A100-SXM-64GB": None,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA H100 80GB HBM3": ("h100", 989, 79.6),
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,
    "NVIDIA H100 PCIe": ("h100_pcie", 756, 79.6),
    "NVIDIA H100 NVL": ("h100_nvl", 835, 93.6),
    "NVIDIA H200": ("h200", 989, 140.4),
    "NVIDIA H200 NVL": ("h200_nvl", 835, 140.4),
    "NVIDIA GH200 480GB": ("gh200", 989, 95.6),
    "NVIDIA B200": ("b200", 2250, 179.1),
    "NVIDIA GB200": None,
    "NVIDIA L4": ("l4", 121, 22.5),
    "NVIDIA L40": None,
    "NVIDIA L40S": ("l40s", 362, 45.0),
    "NVIDIA GeForce RTX 3090": ("rtx3090", 71, 24),
    "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA GeForce RTX 4090": ("rtx4090", 165.2, 24),
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA RTX A6000": None,
    "AMD EPYC 7B13": None,
}


@pytest.mark.parametrize("name", PRINTED)
def test_devices_are_known_by_the_names_that_are_printed(name):
    """By those of a benchmark's table as well; the utilisation of an unknown one is unknown, too."""
    device, expected = device_named(f"{name}, 16 CPU cores"), PRINTED[name]
    assert device == device_named(name)
    if expected is None:
        assert device is None and utilisation("vit_nano32", 64, gpu=name, ranks=2) is None
        return
    assert device and (device.name, device.peak) == (expected[0], expected[1] * 1e12)
    share = utilisation("vit_nano32", 64, gpu=name, ranks=2)
    assert share == training_flops("vit_nano32", 64) / (2 * device.peak)
    assert 0.97 < device.memory / 2**30 / expected[2] < 1  # torch shows less than nvidia-smi


def test_steps_of_an_unknown_gpu_are_not_predicted_as_those_of_a_cpu():
    assert predicted([replace(A_STEP, hardware="NVIDIA A100-SXM4-40GB MIG 1g.5gb, 16 CPU cores")]) is None


def test_scaling_is_predicted_from_the_fewest_ranks():
    one = replace(A_STEP, seconds=0.5, hardware="NVIDIA A100-SXM4-80GB, 16 CPU cores")
    found = predicted([replace(one, ranks=ranks) for ranks in (1, 2, 4)])
    assert found is not None and found[0] == pytest.approx(0.5) and found[0] < found[1] < 0.52


def test_ranks_that_share_cores_take_turns():
    """A rank with half a core takes twice the time of one with a core, and the sums of gradients, too."""
    first = replace(A_STEP, ranks=2, images=16, hardware="AMD EPYC", cores=1)
    tables = [first, replace(first, ranks=4, cores=0.5), replace(first, ranks=1, cores=2)]
    found = predicted(tables)
    assert found is not None and found == pytest.approx([1.0, 2.0, 0.5], rel=0.05)
    decoding = predicted([*tables[:2], replace(tables[1], data="synthetic")])
    assert decoding is not None and decoding[2] - decoding[1] == pytest.approx(16 / 0.5 / 660)
    assert predicted([replace(first, data="synthetic")]) == pytest.approx([1.0])


def test_own_steps_are_validated_by_the_first_of_them(tmp_path, capsys):
    files = []
    for ranks, seconds in ((2, 1.0), (4, 2.5), (4, 1.5)):
        step = replace(A_STEP, ranks=ranks, images=8, seconds=seconds, hardware="AMD EPYC", cores=2 / ranks)
        files.append(str(table(tmp_path / f"{len(files)}.csv", replace(step, benchmark=f"{ranks} ranks"))))
    first, second, third = files
    assert main(["validate", first, first, second, third]) == 0
    output = capsys.readouterr().out
    (row,) = [line for line in output.splitlines() if line.startswith("| c ")]
    assert "vit_nano32, 4 ranks × 8" in row and " 2 s " in row and "from vit_nano32, 2 ranks × 8" in row
    loader = table(tmp_path / "loader.csv", replace(PASSES, model="", benchmark="loader"))
    assert main(["validate", first, str(loader)]) == 2
    assert "a table of 'loader': expected a table of `largebatch.benchmark model` or" in capsys.readouterr().err


def test_what_a_benchmark_writes_is_what_the_planner_reads(tmp_path):
    words = "--model vit_nano32 --img-size 64 --batch-size 2 --plain --vs none --rounds 1 --threads 1 --device cpu"
    run_benchmark(["model", *words.split(), "--precision", "fp32", "--output", str(tmp_path)])
    found = read_measured(tmp_path / "model.csv", option="--calibrate")
    assert (found.model, found.img_size, found.precision, found.micro_batch) == ("vit_nano32", 64, "fp32", 2)
    assert (found.passes, found.cores, found.data, found.plain) == (2, 1, "", True)


def test_volo_can_be_divided_and_its_stages_are_counted():
    config = replace(RECIPES["volo_d1"](), parallel=ParallelConfig(tensor=TensorConfig(size=2)))
    assert stages_of(config) == [(784, 192, 4), (196, 384, 14)]
    assert block_bytes(config.parallel, a=100.0, w=1.0) == 8 * 0.5 * 100
    cube = ParallelConfig(tensor=TensorConfig(mode="3d", size=8))
    assert block_bytes(cube, a=100.0, w=1.0) == pytest.approx((39 * 100 + 3) / 8)
