"""The time of a step by part, in closed form: compute, exposed reduction, optimizer, input. Seconds and bytes."""

import math
from dataclasses import asdict, dataclass
from itertools import accumulate

from largebatch.config import ParallelConfig, TrainConfig, accumulation_passes
from largebatch.devices import Device
from largebatch.optim import LookSam
from largebatch.plan import constants
from largebatch.plan.constants import Link
from largebatch.plan.memory import share_of
from largebatch.plan.trace import Pass, precision_of
from largebatch.ranks.buckets import buckets
from zoo import vit, volo


@dataclass(frozen=True)
class Cluster:
    ranks: int
    device: Device
    per_host: int
    inside: Link
    between: Link
    cores_per_rank: float

    @property
    def hosts(self) -> int:
        return math.ceil(self.ranks / self.per_host)


@dataclass(frozen=True)
class Speed:
    """How fast a device runs a model, and how this is known."""

    factor: float = 1.0  # time of a pass as a multiple of the counted one
    source: str = "counted kernels at the rates of the device; no measurement of this model"


@dataclass(frozen=True)
class Backward:
    """The last backward pass of a step, from its beginning, as the reduction sees it."""

    seconds: float
    ready: tuple[float, ...]  # when each bucket of gradients is ready
    sizes: tuple[int, ...]  # bytes that each bucket needs on the wire


@dataclass(frozen=True)
class Step:
    compute: float
    exposed: float  # reduction that the backward pass does not hide
    optimizer: float
    input: float  # wait for images

    @property
    def seconds(self) -> float:
        return sum(asdict(self).values())


# -- compute --------------------------------------------------------------------------------------------------------


def kernel_seconds(counted: Pass, device: Device, precision: str) -> list[float]:
    rate, bandwidth = device.rate(precision), device.bandwidth * constants.BANDWIDTH_SHARE.value
    return [max(kernel.flops / rate, kernel.moved / bandwidth) for kernel in counted.kernels]


def pass_seconds(counted: Pass, device: Device, precision: str, speed: Speed = Speed()) -> float:
    """Return the time of a pass: of its kernels on the device, or of their launches if these take longer."""
    on_device = sum(kernel_seconds(counted, device, precision))
    on_host = len(counted.kernels) * constants.LAUNCH_S.value if device.kind == "cuda" else 0.0
    return speed.factor * max(on_device, on_host)


def backward_of(counted: Pass, cluster: Cluster, config: TrainConfig, speed: Speed) -> Backward:
    device, precision = cluster.device, precision_of(config, cluster.device.kind)
    times = kernel_seconds(counted, device, precision)
    stretch = pass_seconds(counted, device, precision, speed) / sum(times)
    ends = [0.0, *accumulate(times)]
    begins = ends[counted.forward_kernels]
    wire = 1.0 if config.run.compression == "none" else 0.5  # after the division into buckets
    share = share_of(config.parallel, counted.whole).weights
    sizes = [round(gradient.size * share) for gradient in counted.gradients]
    parts = [*buckets(sizes)]
    return Backward(
        seconds=(ends[-1] - begins) * stretch,
        ready=tuple((ends[counted.gradients[part[-1]].after] - begins) * stretch for part in parts),
        sizes=tuple(round(wire * sum(sizes[number] for number in part)) for part in parts),
    )


# -- communication --------------------------------------------------------------------------------------------------


def allreduce_seconds(size: float, cluster: Cluster, ranks: int = 0) -> float:
    """Return the time to sum `size` bytes over the ranks, by a ring or a tree as in NCCL. The slowest link decides.

    https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/
    """
    ranks = ranks or cluster.ranks
    if ranks == 1:
        return 0.0
    inside, hosts = min(ranks, cluster.per_host), math.ceil(ranks / cluster.per_host)
    bandwidth = min(cluster.inside.bandwidth, cluster.between.bandwidth) if hosts > 1 else cluster.inside.bandwidth
    near, far = cluster.inside.latency, cluster.between.latency
    ring = 2 * (ranks - hosts) * near + 2 * (hosts > 1) * hosts * far + 2 * (ranks - 1) / ranks * size / bandwidth
    tree = 2 * (inside - 1) * near + 2 * math.ceil(math.log2(hosts)) * far + 2 * size / bandwidth
    return min(ring, tree)


def negotiation_seconds(cluster: Cluster) -> float:
    """Return the time until Horovod knows that gradients are ready on all ranks: half a cycle, and two small sums."""
    rounds = 2 * 2 * math.ceil(math.log2(max(cluster.ranks, 1)))
    return cycle_seconds(cluster) / 2 + rounds * constants.NEGOTIATION_LATENCY_S.value


def cycle_seconds(cluster: Cluster) -> float:
    return constants.CYCLE_S[cluster.device.kind].value


def exposed_seconds(backward: Backward, cluster: Cluster, *, data_ranks: int, overlaps: bool) -> float:
    """Return the time of the reduction after the backward pass: that of the last cycle, or more if links are slow."""
    if data_ranks == 1:
        return 0.0
    cycle, total = cycle_seconds(cluster), sum(backward.sizes)
    messages = max(1, math.ceil(total / constants.FUSION_BYTES[cluster.device.kind].value))
    if not overlaps:
        one = allreduce_seconds(total / messages, cluster, data_ranks)
        return negotiation_seconds(cluster) + messages * one
    tail = sum(s for s, at in zip(backward.sizes, backward.ready) if at > backward.seconds - cycle)
    tail_s = negotiation_seconds(cluster) + allreduce_seconds(tail, cluster, data_ranks)
    busy = max(messages, min(len(backward.sizes), round(backward.seconds / cycle)))
    whole = busy * allreduce_seconds(total / busy, cluster, data_ranks) + negotiation_seconds(cluster)
    return max(tail_s, whole - (backward.seconds - backward.ready[0]))


def inner_seconds(counted: Pass, config: TrainConfig, cluster: Cluster) -> float:
    """Return the communication in a pass of a divided model, by parallel/README.md. None of it is hidden."""
    shape, parallel = config.parallel.shape(), config.parallel
    if shape.size == 1:
        return 0.0
    width = 4 if precision_of(config, cluster.device.kind) == "fp32" else 2
    sent = 0.0
    for tokens, features, depth in stages_of(config):
        a, w = counted.images * tokens * features * width, 12 * features**2 * width
        ring = 2 * (parallel.sequence - 1) / parallel.sequence * 2 * a  # K and V, forward and backward
        between = 2 * a * (parallel.pipeline > 1)
        sent += (block_bytes(parallel, a, w) + ring) * depth / parallel.pipeline + between
    link = cluster.inside if shape.size <= cluster.per_host else cluster.between
    return sent / link.bandwidth


def block_bytes(parallel: ParallelConfig, a: float, w: float) -> float:
    """Return the bytes that a rank sends for a block in a pass; a, w: bytes of activations and of matrices."""
    tensor, sizes = parallel.tensor, parallel.shape().sizes
    side = max(sizes.get("row", 1), sizes.get("x", 1))
    if tensor.mode == "1d":
        return 8 * (tensor.size - 1) / tensor.size * a
    if tensor.mode == "3d":
        return (side - 1) / side**3 * (39 * a + 3 * w)
    depth = tensor.depth
    return (side - 1) / side**2 * (21 * a / depth + 3 * w) + 2 * (depth - 1) / depth * w / side**2


def stages_of(config: TrainConfig) -> list[tuple[int, int, int]]:
    """Return (tokens, features, blocks) of each stage of a model of the zoo."""
    name, side = config.model.name, config.model.img_size
    if name in vit.STRUCTURES:
        structure = vit.STRUCTURES[name]
        tokens = (side // structure.patch_size) ** 2 + (structure.family != "plain")
        return [(tokens, structure.embed_dim, structure.depth)]
    outlook, *rest = volo.STRUCTURES[name].depths
    outer, inner = volo.STRUCTURES[name].dims
    return [((side // 8) ** 2, outer, outlook), ((side // volo.CELL) ** 2, inner, sum(rest))]


# -- the step -------------------------------------------------------------------------------------------------------


def optimizer_seconds(counted: Pass, config: TrainConfig, cluster: Cluster) -> float:
    moved = dict.fromkeys(("adamw", "nadamw"), constants.ADAMW_MOVED)
    moved |= dict.fromkeys(("sgd", "lars"), constants.SGD_MOVED) | {"schedule_free_adamw": constants.SCHEDULE_FREE}
    parameters = counted.weights / 4 * share_of(config.parallel, counted.whole).weights
    bandwidth = cluster.device.bandwidth * constants.BANDWIDTH_SHARE.value
    update = moved.get(config.optim.name, constants.LAMB_MOVED).value * parameters / bandwidth
    if not config.parallel.zero:
        return update
    data_ranks = config.parallel.shape().data_size(cluster.ranks)
    return update / data_ranks + allreduce_seconds(4 * parameters / 2, cluster, data_ranks)  # an allgather is half


def passes_of(config: TrainConfig, ranks: int) -> int:
    """Return the passes of a rank in a step; ValueError if the batch cannot be made."""
    return accumulation_passes(
        global_batch_size=config.data.global_batch_size,
        micro_batch_size=config.data.micro_batch_size,
        num_ranks=config.parallel.shape().data_size(ranks),
    )


def step_of(config: TrainConfig, counted: Pass, cluster: Cluster, speed: Speed = Speed()) -> Step:
    data_ranks = config.parallel.shape().data_size(cluster.ranks)
    passes, parallel = passes_of(config, cluster.ranks), config.parallel
    one = pass_seconds(counted, cluster.device, precision_of(config, cluster.device.kind), speed)
    parts = parallel.micro_batches or parallel.pipeline
    bubble = (parallel.pipeline - 1) / parts
    compute = passes * (one / parallel.shape().size * (1 + bubble) + inner_seconds(counted, config, cluster))
    exposed = exposed_seconds(
        backward_of(counted, cluster, config, speed),
        cluster,
        data_ranks=data_ranks,
        # The core of a CPU that computes also sums.
        overlaps=cluster.device.kind != "cpu" and parallel.shape().size == 1 and config.run.compile is not True,
    )
    if config.optim.sam_rho is not None:  # a second gradient every few steps
        share = 1 + 1 / LookSam.every
        compute, exposed = compute * share, exposed * share
    optimizer = optimizer_seconds(counted, config, cluster)
    decoded = config.data.micro_batch_size * passes / (cluster.cores_per_rank * constants.DECODED_PER_CORE.value)
    beside = 0.0 if cluster.device.kind == "cpu" else compute + exposed + optimizer  # a core does one after the other
    return Step(compute, exposed, optimizer, max(0.0, decoded - beside))
