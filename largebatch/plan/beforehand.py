"""What a run is told at its start: hours, end and memory; and the refusal of a run that cannot fit into its GPU."""

import datetime
from dataclasses import replace

from largebatch.config import TrainConfig
from largebatch.plan.constants import device_named
from largebatch.plan.memory import largest_micro_batch, of_rank
from largebatch.plan.planning import cluster_of
from largebatch.plan.run import HOUR, RAMP, run_of
from largebatch.plan.step import Speed, step_of
from largebatch.plan.trace import trace

GIB = 2**30


def expectation(
    config: TrainConfig, name: str, memory: float, *, ranks: int, per_host: int, num_images: int
) -> list[str]:
    """Return two lines for the log of a run on GPUs; none for a GPU that is not known.

    name, memory: what torch calls the GPU, and its bytes. ValueError if the counted parts alone, without those that are
    assumed, are more than it has.
    """
    known = device_named(name)
    if known is None:
        return []
    cluster = cluster_of(ranks, known.name, per_host=per_host)
    cluster = replace(cluster, device=replace(known, memory=memory))
    counted = trace(config, device="cuda")
    parts = of_rank(config, counted, cluster.device, ranks=ranks)
    certain = parts.total - parts.communication - parts.runtime - parts.inputs
    most = largest_micro_batch(config, counted, cluster.device, ranks=ranks)
    if certain > memory:
        raise ValueError(
            f"--data.micro_batch_size is {config.data.micro_batch_size}, which needs {certain / GIB:.1f} GiB on each "
            f"rank, and {name} has {memory / GIB:.1f}: give at most {most}, or --model.grad_checkpointing true."
        )
    room = f"plan: {parts.total / GIB:.1f} of {memory / GIB:.1f} GiB on each rank; micro-batches of up to {most} fit"
    try:
        step = step_of(config, counted, cluster)
    except ValueError:  # a resumed run keeps its batch on any number of ranks
        return [room]
    run = run_of(config, counted, cluster, step, Speed(), num_images=num_images)
    end = datetime.datetime.now() + datetime.timedelta(seconds=run.seconds)
    ramp = config.schedule.batch_ramp
    notes = [f"plan: {RAMP.format(ramp)}"] if ramp else []
    return [f"plan: at least {run.seconds / HOUR:.2f} h for the whole run, until {end:%Y-%m-%d %H:%M}", *notes, room]
