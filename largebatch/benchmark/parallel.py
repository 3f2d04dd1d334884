"""The costs of each way to share a model: bytes sent (counted), time and peak memory.

    mpirun -np 8 python -m largebatch.benchmark parallel [--model vit_l32] [--depth 2] [--batch-size 16]

Every contender runs a forward and backward pass of the same images on all ranks; several replicas divide the images.
The reduction of gradients over the data axis and the optimizer are left out. The bytes are those of ring algorithms,
whatever the library does: 2 (n-1)/n of a tensor in an allreduce, (n-1)/n on average in a broadcast, and so on. The cost
of a layer is the difference between models of depth 2 d and d.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from largebatch.augment import Augmented
from largebatch.benchmark.measure import Contender, Report, Round, compare
from largebatch.config.parallel import ParallelConfig, TensorConfig
from largebatch.losses import classification
from largebatch.parallel.mesh import start_torch_distributed
from largebatch.parallel.replica import ParallelReplica
from largebatch.precision import DTYPES, autocast, choose_precision
from largebatch.ranks import Ranks, session
from zoo import create_model, set_fused_attn

NUM_CLASSES = 1000

CONFIGS = {
    "1d, 8 ranks": ParallelConfig(tensor=TensorConfig(size=8)),
    "2.5d, 2 × 2 × 2": ParallelConfig(tensor=TensorConfig(mode="2.5d", size=8, depth=2)),
    "3d, 2 × 2 × 2": ParallelConfig(tensor=TensorConfig(mode="3d", size=8)),
    "pipeline 2 × 1d 4": ParallelConfig(pipeline=2, tensor=TensorConfig(size=4), micro_batches=4),
    "1d, 4 ranks": ParallelConfig(tensor=TensorConfig(size=4)),
    "2d, 2 × 2": ParallelConfig(tensor=TensorConfig(mode="2d", size=4)),
    "pipeline 2 × 1d 2": ParallelConfig(pipeline=2, tensor=TensorConfig(size=2), micro_batches=4),
    "sequence 4": ParallelConfig(sequence=4),
    "1d, 2 ranks": ParallelConfig(tensor=TensorConfig(size=2)),
    "pipeline 2": ParallelConfig(pipeline=2, micro_batches=4),
    "sequence 2": ParallelConfig(sequence=2),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="vit_l32", help="ViT of the zoo")
    parser.add_argument("--depth", type=int, default=2, help="blocks that are left of it, 2 or more")
    parser.add_argument("--img-size", type=int, default=224, help="image side in pixels")
    parser.add_argument("--batch-size", type=int, default=16, help="images of a pass, over all ranks")
    parser.add_argument("--precision", default="auto", choices=["auto", *DTYPES], help="autocast type, as in training")
    parser.add_argument("--rounds", type=int, default=3, help="measured passes of each contender")


def run(options: argparse.Namespace) -> Report | None:
    with session() as comm:
        device = comm.device()
        if options.precision == "auto":
            options.precision = choose_precision(device)
        configs = {name: config for name, config in CONFIGS.items() if comm.size % config.shape().size == 0}
        with comm.together("benchmark"):
            if not configs:
                raise ValueError(f"The job has {comm.size} ranks, expected 2, 4 or 8: one rank alone cannot share.")
        start_torch_distributed(comm, device)
        counts = {name: count(config, options, comm, device) for name, config in configs.items()}
        run_one = {name: partial(opened, config, options, comm, device) for name, config in configs.items()}
        contenders = [Contender(name, partial(start, options.depth)) for name, start in run_one.items()]
        barrier = partial(comm.barrier, name="benchmark/barrier")
        results = compare(contenders, device=device, rounds=options.rounds, barrier=barrier, quiet=comm.rank > 0)
        peaks = comm.allgather_object([result.peak_bytes for result in results], name="benchmark/peaks")
        if comm.rank > 0:
            return None
        for result, of_ranks in zip(results, zip(*peaks)):
            result.peak_bytes = max(of_ranks)
        title = (
            f"forward and backward, {options.model} with {options.depth} blocks at {options.img_size} px, "
            f"{options.precision}, {options.batch_size} images on {comm.size} ranks"
        )
        notes = [f"{name}: a rank sends {layer / 2**20:.2f} MiB per block" for name, layer in counts.items()]
        return Report("parallel", title, results, device, images=options.batch_size // comm.size, notes=notes)


def count(config: ParallelConfig, options: argparse.Namespace, comm: Ranks, device: torch.device) -> float:
    """Return the bytes that a rank sends for one block, forward and backward; the mean over ranks."""
    sent = []
    for depth in (options.depth, 2 * options.depth):
        with opened(config, options, comm, device, depth) as run_pass:
            run_pass()  # in its first pass torch's pipeline sends extra messages with shapes
            with counting() as counter:
                run_pass()
        sent.append(counter["bytes"])
    (difference,) = comm.allreduce(torch.tensor([sent[1] - sent[0]], dtype=torch.float64), name="benchmark/bytes")
    return float(difference) / comm.size / options.depth


@contextmanager
def opened(
    config: ParallelConfig, options: argparse.Namespace, comm: Ranks, device: torch.device, depth: int
) -> Iterator[Round]:
    """Divide a model; yield a function that runs a pass of this replica's share of the images."""
    model = shortened(options, depth)
    batch_size = options.batch_size * config.shape().size // comm.size
    replica = ParallelReplica(
        config,
        model,
        batch_size=batch_size,
        precision=options.precision,
        make_optimizer=lambda model: SGD(model.parameters()),
        limit_s=comm.stall_limit_s,
    )
    model.to_empty(device=device)  # after the cut, so that no rank ever needs memory for the whole model
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        tensor.normal_(std=0.02)
    images = torch.randn(batch_size, 3, options.img_size, options.img_size, device=device)
    batch = Augmented(images, torch.full((batch_size, NUM_CLASSES), 1 / NUM_CLASSES, device=device))
    objective = replica.adapt_objective(classification)

    def forward_backward(batch: Augmented, weight: float) -> Tensor:
        with autocast(device, options.precision):
            loss = objective(model, batch) * weight
        loss.backward()
        return loss.detach()

    def run_pass() -> None:
        replica.run_pass(batch, 1 / options.batch_size, forward_backward)
        replica.complete_gradients()
        model.zero_grad(set_to_none=True)

    yield run_pass
    replica.mesh.close()


def shortened(options: argparse.Namespace, depth: int) -> Any:
    with torch.device("meta"):
        model: Any = create_model(options.model, img_size=options.img_size, num_classes=NUM_CLASSES)
    if len(getattr(model, "blocks", ())) < depth:
        raise ValueError(f"--depth is {options.depth}, and twice as many blocks are built: {options.model} has fewer.")
    model.blocks = model.blocks[:depth]
    return set_fused_attn(model, torch.cuda.is_available())


# -- counting -------------------------------------------------------------------------------------------------------


# Bytes that one of n ranks sends in each function of torch.distributed, by the tensor in its first argument.
RINGS: dict[str, Callable[[Any, int], float]] = {
    "all_reduce": lambda tensor, n: 2 * (n - 1) / n * tensor.nbytes,
    "all_gather_single": lambda whole, n: (n - 1) / n * whole.nbytes,
    "reduce_scatter_single": lambda own, n: (n - 1) * own.nbytes,
    "broadcast": lambda tensor, n: (n - 1) / n * tensor.nbytes,
    "reduce": lambda tensor, n: (n - 1) / n * tensor.nbytes,
    "send": lambda tensor, n: tensor.nbytes,
    "isend": lambda tensor, n: tensor.nbytes,
}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the bytes that this rank sends by torch.distributed in the block, under the key "bytes"."""
    sent: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in (*RINGS, "batch_isend_irecv")}

    def counted(name: str, tensor: Any, *arguments: Any, **options: Any) -> Any:
        sent["bytes"] += round(RINGS[name](tensor, dist.get_world_size(options.get("group"))))
        return originals[name](tensor, *arguments, **options)

    def batch(operations: list[Any]) -> Any:
        sent["bytes"] += sum(one.tensor.nbytes for one in operations if one.op is originals["isend"])
        return originals["batch_isend_irecv"](operations)

    try:
        for name in RINGS:
            if name != "isend":  # torch's pipeline compares it with the original
                setattr(dist, name, partial(counted, name))
        setattr(dist, "batch_isend_irecv", batch)
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
