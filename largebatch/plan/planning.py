"""A plan: what a config needs on a cluster, put together from the counted pass."""

import math
from dataclasses import dataclass, replace
from typing import Any

from largebatch.config import TrainConfig, accumulation_passes, exact_batches, nearest_batches
from largebatch.devices import find_device
from largebatch.parallel.replica import check as check_cuts
from largebatch.plan import constants
from largebatch.plan.constants import find_link
from largebatch.plan.memory import Memory, largest_micro_batch, of_rank
from largebatch.plan.run import Failures, Input, Run, failures_of, input_of, run_of
from largebatch.plan.step import Cluster, Speed, Step, step_of
from largebatch.plan.trace import Kernel, Pass, meta_model, trace


@dataclass(frozen=True)
class Plan:
    config: TrainConfig  # with a batch that can be made
    cluster: Cluster
    speed: Speed
    counted: Pass
    passes: int
    correction: str  # why the batch is not the one that was asked for; empty: it is
    memory: Memory
    largest: int  # largest micro-batch that fits
    other: Memory | None  # with activation checkpointing switched; None if the model cannot do it
    other_largest: int
    step: Step
    run: Run
    input: Input
    failures: Failures


def cluster_of(ranks: int, gpu: str, *, per_host: int = 8, network: str = "", cores_per_rank: float = 0) -> Cluster:
    """Return a cluster; ValueError for an unknown device or network, and for impossible numbers.

    cores_per_rank: CPU cores that decode, and without a GPU compute; less than 1 if ranks share a core.
    """
    for option, number in (("--gpus", ranks), ("--gpus-per-host", per_host)):
        if number < 1:
            raise ValueError(f"{option} is {number}: expected 1 or more.")
    if cores_per_rank < 0:
        raise ValueError(f"--cores-per-rank is {cores_per_rank}: expected more than 0.")
    device = find_device(gpu)
    cores = cores_per_rank or constants.CORES_PER_RANK[device.kind].value
    inside = find_link(device.inside)
    if device.kind == "cpu":
        device = device.times(cores)
        inside = replace(inside, bandwidth=inside.bandwidth * min(1.0, cores))  # a core sums what its ranks send
    return Cluster(
        ranks=ranks,
        device=device,
        per_host=per_host,
        inside=inside,
        between=find_link(network or constants.PORTS.get(device.inside, "ethernet10")),
        cores_per_rank=cores,
    )


def fitted(config: TrainConfig, ranks: int) -> tuple[TrainConfig, int, str]:
    """Return the config with the nearest batch that can be made, its passes, and why the given one cannot be made."""
    replicas = config.parallel.shape().data_size(ranks)
    batch: dict[str, Any] = {
        "global_batch_size": config.data.global_batch_size,
        "micro_batch_size": config.data.micro_batch_size,
        "num_ranks": replicas,
    }
    count, rest = divmod(batch["global_batch_size"], batch["micro_batch_size"])
    if not rest and count >= replicas and not count % replicas:
        return config, count // replicas, ""
    try:
        accumulation_passes(**batch)
        uneven = 100 * (1 - count / (math.ceil(count / replicas) * replicas))
        why = (
            f"The {count} micro-batches of a step do not come out even on {replicas} ranks, which wait {uneven:.0f} % "
            f"of their time; nearest exact: {nearest_batches(**batch)}."
        )
    except ValueError as error:
        why = str(error)
    found = exact_batches(**batch)
    if not found:
        raise ValueError(why)
    wanted = batch["global_batch_size"]
    micro, passes = min(found, key=lambda pair: abs(pair[0] * pair[1] * replicas - wanted))
    data = replace(config.data, micro_batch_size=micro, global_batch_size=micro * passes * replicas)
    return replace(config, data=data), passes, why


def make_plan(
    config: TrainConfig,
    cluster: Cluster,
    *,
    speed: Speed = Speed(),
    num_images: int = int(constants.IMAGENET_IMAGES.value),
    hours_per_failure: float = constants.GPU_HOURS_PER_FAILURE.value,
) -> Plan:
    """Return a plan. num_images: training images. hours_per_failure: GPU-hours between two failures."""
    config, passes, correction = fitted(config, cluster.ranks)
    if config.parallel.shape().size > 1:  # with the sentences of training
        check_cuts(config.parallel, meta_model(config, cluster.device.kind), batch_size=config.data.micro_batch_size)
    counted = trace(config, device=cluster.device.kind)
    other = otherwise(config, cluster)
    step = step_of(config, counted, cluster, speed)
    run = run_of(config, counted, cluster, step, speed, num_images=num_images)
    return Plan(
        config=config,
        cluster=cluster,
        speed=speed,
        counted=counted,
        passes=passes,
        correction=correction,
        memory=of_rank(config, counted, cluster.device, ranks=cluster.ranks),
        largest=largest_micro_batch(config, counted, cluster.device, ranks=cluster.ranks),
        other=of_rank(config, other, cluster.device, ranks=cluster.ranks) if other else None,
        other_largest=largest_micro_batch(config, other, cluster.device, ranks=cluster.ranks) if other else 0,
        step=step,
        run=run,
        input=input_of(config, cluster, step),
        failures=failures_of(
            config, counted, ranks=cluster.ranks, seconds=run.seconds, hours_per_failure=hours_per_failure
        ),
    )


def on_gpus(config: TrainConfig, plan: Plan, gpus: int, *, num_images: int) -> tuple[Step, Run]:
    """Return the step and the run of a config that `fitted` returned, on other GPUs than those of the plan."""
    cluster, counted = replace(plan.cluster, ranks=gpus), scaled(plan.counted, config.data.micro_batch_size)
    step = step_of(config, counted, cluster, plan.speed)
    return step, run_of(config, counted, cluster, step, plan.speed, num_images=num_images)


def otherwise(config: TrainConfig, cluster: Cluster) -> Pass | None:
    """Return the pass with activation checkpointing switched; None if the model cannot do it."""
    model = replace(config.model, grad_checkpointing=not config.model.grad_checkpointing)
    try:
        return trace(replace(config, model=model), device=cluster.device.kind)
    except ValueError:
        return None


def scaled(counted: Pass, images: int) -> Pass:
    """Return a counted pass with another number of images: its kernels grow in proportion."""
    ratio = images / counted.images
    kernels = tuple(Kernel(ratio * kernel.flops, ratio * kernel.moved) for kernel in counted.kernels)
    return replace(counted, images=images, kernels=kernels)
