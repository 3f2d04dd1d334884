"""The memory of a rank by part, from a counted pass, and the largest micro-batch that fits. Bytes throughout."""

import math
from dataclasses import asdict, dataclass, replace

from largebatch.config import ParallelConfig, TrainConfig
from largebatch.devices import Device
from largebatch.plan import constants
from largebatch.plan.trace import Pass

# Tensors of each parameter. Muon keeps one of a matrix, and the optimizer of the rest two.
MOMENTS = {"lamb": 2, "adamw": 2, "nadamw": 2, "schedule_free_adamw": 2, "sgd": 1, "lars": 1}
MOMENTS |= {"muon": 2, "muon_lamb": 2}


@dataclass(frozen=True)
class Memory:
    weights: float
    gradients: float
    moments: float
    average: float
    inputs: float  # images and targets, twice: the loader prepares the next micro-batch
    activations: float  # at the end of the forward pass
    workspace: float  # the peak of a pass less its activations, such as their gradients and recomputed blocks
    communication: float  # fusion buffer of Horovod, buffers of NCCL
    runtime: float  # CUDA's context, the loader's buffers, gaps between blocks of memory

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Share:
    """The parts of a model and of a pass that one rank of a replica has."""

    weights: float
    activations: float


def share_of(parallel: ParallelConfig, whole: float) -> Share:
    """Return a rank's share, by the table of parallel/README.md. whole: see `Pass`. Norms and biases count as cut."""
    shape, tensor = parallel.shape(), parallel.tensor
    cut = math.prod(shape.sizes[name] for name in shape.tensor)
    pieces = cut // tensor.depth if tensor.mode == "2.5d" else cut
    activations = whole + (1 - whole) / cut if tensor.mode == "1d" else 1 / cut
    # Under 1F1B and GPipe a stage holds as many parts of a micro-batch as there are stages, at most.
    in_flight = min(1.0, parallel.pipeline / (parallel.micro_batches or parallel.pipeline))
    activations *= in_flight / parallel.pipeline / parallel.sequence
    return Share(1 / pieces / parallel.pipeline, activations)


def blocks_bytes(parallel: ParallelConfig, counted: Pass) -> float:
    """Return the bytes of blocks of a matrix that the backward pass of parallel/tensor.py holds on a grid of ranks.

    They are another rank's weights, a summand of the gradient, the sum, and the rank's own.
    """
    if parallel.tensor.mode == "1d" or parallel.tensor.size == 1:
        return 0.0
    sizes = parallel.shape().sizes
    side = sizes.get("row", sizes.get("x", 1))
    return 4 * max(gradient.size for gradient in counted.gradients) / side**2


def of_rank(config: TrainConfig, counted: Pass, device: Device, *, ranks: int, micro_batch_size: int = 0) -> Memory:
    """Return the memory of a rank.

    counted: a pass of the config's model, with or without checkpointing. micro_batch_size: if it is not that of the
    pass, activations grow in proportion, apart from the casts of weights.
    """
    share = share_of(config.parallel, counted.whole)
    scale = (micro_batch_size or counted.images) / counted.images
    parameters = counted.weights * share.weights
    data_ranks = config.parallel.shape().data_size(ranks)
    moments = moments_bytes(config, counted) * share.weights
    if config.parallel.zero:
        moments = 0.0 if config.parallel.zero == "offload" else moments / data_ranks
    casts, on_gpu = counted.casts * share.weights, device.kind == "cuda"
    grows = scale * share.activations
    # Tokens and stages are cut behind the embedding, so the first stage keeps the patches of whole images.
    patches = counted.kept.get("patch_embed", 0) * (config.parallel.sequence * config.parallel.pipeline - 1)
    activations = casts + (counted.activations - counted.casts + patches) * grows
    peak = casts + (counted.peak - counted.casts + patches) * grows
    parts = Memory(
        weights=parameters + counted.buffers,
        gradients=parameters,
        moments=moments,
        average=parameters + counted.buffers if config.optim.averages else 0.0,
        inputs=2 * counted.inputs * scale,
        activations=activations,
        workspace=max(peak - activations, 0.0) + blocks_bytes(config.parallel, counted),
        communication=(ranks > 1) * (constants.FUSION_BYTES[device.kind].value + on_gpu * constants.NCCL_BYTES.value),
        runtime=on_gpu * (constants.CONTEXT_BYTES.value + constants.LOADER_BYTES.value),
    )
    if config.optim.sam_rho is not None:  # a copy of the weights while they are moved
        parts = replace(parts, workspace=parts.workspace + parameters)
    gaps = constants.RESERVE.value * (parts.total - parts.communication - parts.runtime)
    return replace(parts, runtime=parts.runtime + gaps)


def moments_bytes(config: TrainConfig, counted: Pass) -> int:
    """Return the bytes that the optimizer keeps for the whole model; Look-LayerSAM keeps one more direction."""
    return (MOMENTS[config.optim.name] + (config.optim.sam_rho is not None)) * counted.weights - counted.matrices


def largest_micro_batch(config: TrainConfig, counted: Pass, device: Device, *, ranks: int) -> int:
    """Return the largest micro-batch that fits into the device; 0 if not even one image does."""
    at = {n: of_rank(config, counted, device, ranks=ranks, micro_batch_size=n).total for n in (1, 2)}
    slope = at[2] - at[1]
    return max(0, math.floor((device.memory - (at[1] - slope)) / slope))


def checkpoint_bytes(config: TrainConfig, counted: Pass) -> float:
    models = 1 + config.optim.averages
    return (counted.weights + counted.buffers) * models + moments_bytes(config, counted)
