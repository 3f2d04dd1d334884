"""Predictions beside published and measured runs, failures included. No constant is fitted to any of these.

Each row says what the plan was given. "counted": kernels at the rates of the device alone. "from NAME": the speed of
the run on those GPUs, or the time of those passes or steps, which is then no prediction and not in the table.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from largebatch.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TensorConfig,
    TrainConfig,
)
from largebatch.plan.calibrate import Measured, predicted
from largebatch.plan.constants import find_device
from largebatch.plan.memory import of_rank
from largebatch.plan.planning import cluster_of
from largebatch.plan.run import HOUR, num_steps, run_of
from largebatch.plan.step import Cluster, Speed, step_of
from largebatch.plan.trace import Pass, trace
from largebatch.recipes import RECIPES

IMAGENET = 1_281_167
COLOSSAL = "https://hpc-ai.com/blog/how-to-quickly-reproduce-vit-pre-training-with-only-one-small-server"
VOLO = "NVIDIA's account of VOLO-D5 on DGX A100: largebatch/recipes/volo.py"
TIMM = (
    "https://github.com/huggingface/pytorch-image-models/blob/main/results/"
    "benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
)
NEMO = (
    "https://docs.nvidia.com/nemo-framework/user-guide/latest/"
    "MultimodalModels/VisionLanguageFoundation/Vit/Perf.html"
)
DEIT = "https://arxiv.org/abs/2012.12877, section 5.6"
SMALL = "largebatch/recipes/vit.py: vit_s16"


@dataclass(frozen=True)
class Row:
    """A published or measured figure and its prediction."""

    group: str
    what: str
    unit: str
    published: float
    predicted: float
    given: str
    source: str

    @property
    def error(self) -> float:
        """The prediction's error, as a share of the figure."""
        return self.predicted / self.published - 1


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for group in (colossal, volo, here, nemo, deit, small, benchmarks, memory):
        yield from group()


def lines(found: Iterable[Row], *, markdown: bool = False) -> Iterator[str]:
    """Yield the table of rows, and their sources."""
    head = ("", "run", "published or measured", "predicted", "error", "given")
    widths = (2, 44, 22, 11, 8, 28)
    found = list(found)
    if markdown:
        yield f"| {' | '.join(head)} |"
        yield "|---|---|---|---|---|---|"
    else:
        yield " ".join(word.ljust(width) for word, width in zip(head, widths))
    for row in found:
        figures = f"{row.published:,.4g} {row.unit}", f"{row.predicted:,.4g}", f"{100 * row.error:+.0f} %"
        cells = (row.group, row.what, *figures, row.given)
        yield f"| {' | '.join(cells)} |" if markdown else " ".join(c.ljust(w) for c, w in zip(cells, widths)).rstrip()
    yield ""
    yield "sources: " + "; ".join(dict.fromkeys(f"({row.group}) {row.source}" for row in found))


# -- (a), (b): one run of a cluster gives the speed of another ------------------------------------------------------

FOUR = {"vit_b32": 14.58, "vit_b16": 78.58, "vit_l32": 37.83}  # hours on 4 A100
TWO_HUNDRED = {"vit_b32": 0.61, "vit_b16": 1.87, "vit_l32": 1.30}  # hours on 200; read by the comparison alone


def colossal() -> Iterator[Row]:
    """Yield 300 epochs of ViTs at 32K on 200 A100, from the hours on 4."""
    for name, published in TWO_HUNDRED.items():
        config = RECIPES[name]()
        speed = speed_of(config, cluster_of(4, "a100"), hours=FOUR[name])
        large = replace(config, data=replace(config.data, global_batch_size=32_800, micro_batch_size=164))
        predicted = hours_of(large, cluster_of(200, "a100"), speed)
        yield Row("a", f"{name}, 300 epochs, 200 A100", "h", published, predicted, "from 4 A100", COLOSSAL)


def volo() -> Iterator[Row]:
    """Yield VOLO-D5 on 40 A100 from its speed on 8, and the 170 hours that contradict it."""
    config = RECIPES["volo_d5_as_run"]()
    eight, forty = cluster_of(8, "a100"), cluster_of(40, "a100")
    speed = speed_of(config, eight, images_per_s=500)
    large = replace(config, data=replace(config.data, global_batch_size=40 * 44))
    yield Row("b", "volo_d5, 40 A100", "img/s", 2100, images_per_s(large, forty, speed), "from 8 A100", VOLO)
    short = replace(config, run=replace(config.run, duration="300 epochs"))
    hours = num_steps(short, IMAGENET) * 352 / 500 / HOUR
    yield Row("b", "volo_d5, 300 epochs, 8 A100", "h", 170, hours, "its own 500 img/s", VOLO)


def speed_of(config: TrainConfig, cluster: Cluster, *, hours: float = 0, images_per_s: float = 0) -> Speed:
    """Return the speed with which a run takes so many hours, or its steps so many images per second."""

    def seconds(factor: float) -> float:
        if hours:
            return HOUR * hours_of(config, cluster, Speed(factor))
        return step_of(config, counted(config, cluster), cluster, Speed(factor)).seconds

    wanted = HOUR * hours if hours else config.data.global_batch_size / images_per_s
    return Speed(root(lambda factor: seconds(factor) - wanted), "a run of this cluster")


def root(function: Callable[[float], float]) -> float:
    """Return the zero of an increasing function between 0.01 and 100, to 1e-6 of it, by bisection."""
    low, high = 0.01, 100.0
    while high > low * (1 + 1e-6):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return low


# -- (c): passes and steps, measured here ---------------------------------------------------------------------------

TWO_THREADS = "AMD EPYC with AVX-512 bf16, 2 cores, threads per rank: 2"
ONE_CORE = "AMD EPYC with AVX-512 bf16, 2 cores, cores per rank: 1"
SHARED = "AMD EPYC with AVX-512 bf16, 2 cores, cores per rank: 0.5"
PASSES = "{} at 224 px, forward and backward, bf16, batch {}"
STEP = "training step, {} at 224 px, bf16, {} = {} ranks × {} micro-batch × {} passes"
# From largebatch/benchmark/NOTES.md, on an idle machine, torch 2.13.0; the first is the calibration.
PASSES_HERE = (
    Measured(PASSES.format("vit_b32", 32), TWO_THREADS, "--plain", "2026-11-23", 5.57, 64),
    Measured(PASSES.format("vit_b32", 64), TWO_THREADS, "--plain", "2026-11-21", 128 / 11.8, 128),
    Measured(PASSES.format("volo_d1", 8), TWO_THREADS, "--plain", "2026-11-23", 2.35, 16),
    Measured(PASSES.format("volo_d3", 8), TWO_THREADS, "--plain", "2026-11-22", 5.42, 16),
    Measured(STEP.format("vit_b32", 256, 2, 32, 4), ONE_CORE, "--data synthetic", "2026-11-23", 21.5, 128),
    Measured(STEP.format("vit_b32", 64, 2, 32, 1), ONE_CORE, "--data synthetic", "2026-11-21", 5.26, 32),
)
# By mpi_scripts/validate_plan.sh, one round on an idle machine, torch 2.13.0; the first is the calibration.
STEPS_HERE = tuple(
    Measured(
        STEP.format(model, ranks * micro * passes, ranks, micro, passes),
        {1: TWO_THREADS, 2: ONE_CORE, 4: SHARED}[ranks],
        "--data resident",
        "2026-11-24",
        seconds,
        micro * passes,
    )
    for ranks, model, micro, passes, seconds in (
        (2, "vit_b32", 8, 1, 1.617),
        (1, "vit_b32", 8, 1, 0.7569),
        (2, "vit_b32", 16, 1, 2.773),
        (2, "vit_b32", 8, 4, 6.054),
        (2, "vit_b16", 4, 1, 2.797),
        (2, "vit_s16", 8, 1, 1.460),
        (4, "vit_s16", 8, 1, 3.317),
        (2, "volo_d1", 4, 1, 1.170),
        (4, "volo_d1", 4, 1, 2.506),
    )
)


def here() -> Iterator[Row]:
    """Yield the time of passes and steps on two cores of a CPU, from the passes, and from the steps, of one model."""
    yield from compared(PASSES_HERE)
    yield from compared(STEPS_HERE)


def compared(tables: Sequence[Measured]) -> Iterator[Row]:
    """Yield the time of passes and steps beside that which the first table predicts."""
    found = predicted(tables)
    if found is None:
        raise ValueError("The tables are not of steps of models of the zoo, which can be counted.")
    first = tables[0]
    for table, seconds in list(zip(tables, found))[1:]:
        source = f"measured: {table.hardware}, {table.date}; {first.name} took {first.seconds:.4g} s"
        yield Row("c", table.name, "s", table.seconds, seconds, f"from {first.name}", source)


# -- (d): published runs --------------------------------------------------------------------------------------------


def nemo() -> Iterator[Row]:
    """Yield ViT-g/14 on 1 and 16 hosts: the first from the counted kernels, the second also from the first."""
    model, large = "timm/vit_giant_patch14_224", 4096
    for gpu, one, many in (("a100", 693.0, 10_644.0), ("h100", 1428.0, 21_561.0)):
        config = made(model, global_batch_size=large, micro_batch_size=64, precision="bf16")
        eight, most = cluster_of(8, gpu), cluster_of(128, gpu)
        config_many = replace(config, data=replace(config.data, micro_batch_size=32))
        yield Row("d", f"ViT-g/14, NeMo, 8 {gpu}", "img/s", one, images_per_s(config, eight), "counted", NEMO)
        yield Row("d", f"ViT-g/14, NeMo, 128 {gpu}", "img/s", many, images_per_s(config_many, most), "counted", NEMO)
        speed = speed_of(config, eight, images_per_s=one)
        predicted = images_per_s(config_many, most, speed)
        yield Row("d", f"ViT-g/14, NeMo, 128 {gpu}", "img/s", many, predicted, f"from 8 {gpu}", NEMO)


def deit() -> Iterator[Row]:
    """Yield DeiT-B, 300 epochs at 1,024, on 8 and 16 V100."""
    for ranks, hours in ((8, 53.0), (16, 37.0)):
        config = made("vit_b16", global_batch_size=1024, micro_batch_size=1024 // ranks, precision="fp16")
        predicted = hours_of(config, cluster_of(ranks, "v100"))
        yield Row("d", f"DeiT-B, 300 epochs, {ranks} V100", "h", hours, predicted, "counted", DEIT)


def small() -> Iterator[Row]:
    """Yield ViT-S/16, 300 epochs at 4,096 on 8 A100, and ViT-B/32, B/16 and L/32 at 32K on 4."""
    predicted = hours_of(RECIPES["vit_s16"](), cluster_of(8, "a100"))
    yield Row("d", "ViT-S/16, 300 epochs, 8 A100", "h", 16.5, predicted, "counted", SMALL)
    for name, hours in FOUR.items():
        predicted = hours_of(RECIPES[name](), cluster_of(4, "a100"))
        yield Row("d", f"{name}, 300 epochs, 4 A100", "h", hours, predicted, "counted", COLOSSAL)


BENCHMARKS = {
    "vit_s16": (384, 1057.92), "vit_b32": (512, 1708.63), "vit_b16": (192, 392.99), "vit_l32": (256, 524.74),
    "vit_l16": (64, 117.2), "timm/volo_d1_224": (192, 437.04), "timm/volo_d2_224": (96, 238.89),
    "timm/volo_d3_224": (64, 162.19),
}  # fmt: skip


def benchmarks() -> Iterator[Row]:
    """Yield timm's own measurements of training steps on an RTX 3090."""
    for name, (batch, published) in BENCHMARKS.items():
        config = made(name, global_batch_size=batch, micro_batch_size=batch, precision="fp16")
        predicted = images_per_s(config, cluster_of(1, "rtx3090", cores_per_rank=1000))
        yield Row("d", f"{name}, timm, RTX 3090", "img/s", published, predicted, "counted", TIMM)


def made(model: str, *, global_batch_size: int, micro_batch_size: int, precision: str) -> TrainConfig:
    """Return a config without dropout: 300 epochs with AdamW."""
    return TrainConfig(
        model=ModelConfig(name=model, num_classes=1000),
        data=DataConfig(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size),
        optim=OptimConfig(name="adamw"),
        run=RunConfig(precision=precision),  # type: ignore[arg-type]  # one of its texts
    )


def images_per_s(config: TrainConfig, cluster: Cluster, speed: Speed = Speed()) -> float:
    """Return the predicted images per second of a config's steps."""
    return config.data.global_batch_size / step_of(config, counted(config, cluster), cluster, speed).seconds


def hours_of(config: TrainConfig, cluster: Cluster, speed: Speed = Speed()) -> float:
    """Return the predicted hours of a run on ImageNet."""
    one = counted(config, cluster)
    step = step_of(config, one, cluster, speed)
    return run_of(config, one, cluster, step, speed, num_images=IMAGENET).seconds / HOUR


def counted(config: TrainConfig, cluster: Cluster) -> Pass:
    """Return the pass of a config, counted once."""
    model = replace(config.model, weights="")
    kept = TrainConfig(
        model=model,
        loss=config.loss,
        data=DataConfig(micro_batch_size=config.data.micro_batch_size),
        run=RunConfig(precision=config.run.precision),
    )
    return _counted(kept, cluster.device.kind)


_counted = cache(lambda config, kind: trace(config, device=kind))


# -- memory, measured here ------------------------------------------------------------------------------------------

# Model, images, precision, checkpointing -> MiB that a pass adds at its peak to weights, gradients and images, by the
# allocator of torch 2.13.0 on CPUs, 2026-11-24. The gradients of an earlier pass are there.
MEASURED: dict[tuple[str, int, str, bool], float] = {
    ("vit_b32", 32, "bf16", False): 893.0,
    ("vit_b32", 32, "bf16", True): 265.3,
    ("vit_b32", 64, "fp32", False): 2665.5,
    ("vit_l32", 8, "bf16", False): 1061.4,
    ("vit_l32", 8, "bf16", True): 625.1,
    ("volo_d1", 8, "bf16", False): 544.6,
    ("volo_d1", 8, "bf16", True): 191.4,
}


# ViT-B/32 divided, 16 images of a replica, fp32 -> the same of the rank that needs most: tests/parallel/test_memory.py
DIVIDED: dict[str, tuple[ParallelConfig, float]] = {
    "1d on 2 ranks": (ParallelConfig(tensor=TensorConfig(size=2)), 313.2),
    "1d on 4 ranks": (ParallelConfig(tensor=TensorConfig(size=4)), 214.2),
    "2d on 4 ranks": (ParallelConfig(tensor=TensorConfig(mode="2d", size=4)), 133.6),
    "2.5d on 8 ranks": (ParallelConfig(tensor=TensorConfig(mode="2.5d", size=8, depth=2)), 69.2),
    "3d on 8 ranks": (ParallelConfig(tensor=TensorConfig(mode="3d", size=8)), 74.4),
    "2 stages": (ParallelConfig(pipeline=2, micro_batches=4), 135.7),
    "2 stages × 1d on 2 ranks": (ParallelConfig(pipeline=2, tensor=TensorConfig(size=2), micro_batches=4), 86.3),
    "2 stages × 1d on 4 ranks": (ParallelConfig(pipeline=2, tensor=TensorConfig(size=4), micro_batches=4), 57.5),
    "sequence on 2 ranks": (ParallelConfig(sequence=2), 263.4),
    "sequence on 4 ranks": (ParallelConfig(sequence=4), 145.7),
}


def memory() -> Iterator[Row]:
    """Yield peaks of forward and backward on CPUs, beside weights, gradients and images, in MiB."""
    for (name, batch, precision, again), measured in MEASURED.items():
        recipe = RECIPES[name]()
        config = replace(
            recipe,
            model=replace(recipe.model, grad_checkpointing=again),
            data=replace(recipe.data, micro_batch_size=batch),
            run=replace(recipe.run, precision=precision),  # type: ignore[arg-type]  # one of its texts
        )
        what = f"{name}, {precision}, batch {batch}" + ", checkpointing" * again
        yield Row("m", what, "MiB", measured, trace(config, device="cpu").peak / 2**20, "counted", "measured here")
    config = TrainConfig(model=ModelConfig(name="vit_b32"), data=DataConfig(micro_batch_size=16))
    config = replace(config, run=replace(config.run, precision="fp32"))
    whole = trace(config, device="cpu")
    for mesh, (parallel, measured) in DIVIDED.items():
        ranks = parallel.shape().size
        rank = of_rank(replace(config, parallel=parallel), whole, find_device("a100"), ranks=ranks)
        predicted = (rank.activations + rank.workspace) / 2**20
        yield Row("m", f"vit_b32, fp32, batch 16, {mesh}", "MiB", measured, predicted, "counted", "measured here")
