"""Meshes that share a model among the ranks of a cluster: the fastest that fits first, the others with a reason."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from largebatch.config import ParallelConfig, TensorConfig, TrainConfig, check
from largebatch.devices import WITHOUT_BF16
from largebatch.parallel.replica import check as check_cuts
from largebatch.plan.memory import largest_micro_batch, of_rank
from largebatch.plan.planning import fitted, scaled
from largebatch.plan.step import Cluster, Speed, Step, passes_of, step_of
from largebatch.plan.trace import Pass, meta_model, precision_of, trace

MODES = ("1d", "2d", "2.5d", "3d")


@dataclass(frozen=True)
class Candidate:
    """A mesh with its step, or the reason why it cannot be."""

    parallel: ParallelConfig
    micro_batch_size: int
    step: Step | None = None
    memory: float = 0.0  # bytes of a rank
    refused: str = ""


def shareable(config: TrainConfig, cluster: Cluster) -> tuple[TrainConfig, list[str]]:
    """Return the config with a batch and a precision for all meshes, and notes of what was changed."""
    notes: list[str] = []
    try:
        even, _, why = fitted(replace(config, parallel=ParallelConfig()), cluster.ranks)
    except ValueError:  # fewer images than ranks, which some meshes can share
        even, why = config, ""
    if why:
        batch = even.data.global_batch_size
        notes.append(f"{why} All meshes are planned with a global batch of {batch}.")
        config = replace(config, data=replace(config.data, global_batch_size=batch))
    if precision_of(config, cluster.device.kind) == "fp16" and cluster.device.name not in WITHOUT_BF16:
        notes.append("--run.precision is fp16, which ranks that share a model do not have: all meshes are in bf16.")
        config = replace(config, run=replace(config.run, precision="bf16"))
    return config, notes


def search(config: TrainConfig, cluster: Cluster, speed: Speed = Speed()) -> list[Candidate]:
    """Return all meshes within a host and pipelines between hosts, the best first, the refused ones last."""
    counted = trace(config, device=cluster.device.kind)
    model = meta_model(config, cluster.device.kind)
    configs = (replace(config, parallel=parallel) for parallel in _meshes(cluster))
    found = [_candidate(one, counted, model, cluster, speed) for one in configs]
    return sorted(found, key=lambda one: (bool(one.refused), one.step.seconds if one.step else math.inf))


def _meshes(cluster: Cluster) -> Iterator[ParallelConfig]:
    sizes = [2**k for k in range(int(math.log2(max(1, min(cluster.per_host, cluster.ranks)))) + 1)]
    for pipeline, sequence, size in itertools.product(sizes, sizes, sizes):
        if pipeline * sequence * size > cluster.ranks or sequence * size > cluster.per_host:
            continue
        for mode in MODES if size > 1 else MODES[:1]:
            tensor = TensorConfig(mode=mode, size=size, depth=2 if mode == "2.5d" else 1)  # type: ignore[arg-type]
            yield ParallelConfig(pipeline=pipeline, sequence=sequence, tensor=tensor)
            yield ParallelConfig(pipeline=pipeline, sequence=sequence, tensor=tensor, zero=1)


def _candidate(config: TrainConfig, counted: Pass, model: torch.nn.Module, cluster: Cluster, speed: Speed) -> Candidate:
    parallel, micro = config.parallel, config.data.micro_batch_size
    try:
        check(config)
        replicas = parallel.shape().data_size(cluster.ranks)
        micro = _exact(config.data.global_batch_size, replicas, micro * parallel.shape().size)
        fits = largest_micro_batch(config, counted, cluster.device, ranks=cluster.ranks)
        micro = _exact(config.data.global_batch_size, replicas, min(micro, fits)) if fits < micro else micro
        config = replace(config, data=replace(config.data, micro_batch_size=micro))
        check_cuts(parallel, model, batch_size=micro)
        passes_of(config, cluster.ranks)
        memory = of_rank(config, counted, cluster.device, ranks=cluster.ranks, micro_batch_size=micro).total
        if memory > cluster.device.memory:
            device = cluster.device
            raise ValueError(
                f"A micro-batch of {micro} needs {memory / 2**30:.1f} GiB, and {device.name} has "
                f"{device.memory / 2**30:.1f}: divide the model further."
            )
        return Candidate(parallel, micro, step_of(config, scaled(counted, micro), cluster, speed), memory)
    except ValueError as error:
        return Candidate(parallel, micro, refused=str(error))


def _exact(global_batch_size: int, replicas: int, most: int) -> int:
    """Return the largest micro-batch, up to `most`, that makes the global batch; `most` if there is none."""
    share, rest = divmod(global_batch_size, replicas)
    if rest or most < 1:
        return max(1, most)
    return next(micro for micro in range(min(most, share), 0, -1) if share % micro == 0)
