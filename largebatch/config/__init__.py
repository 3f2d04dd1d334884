"""The options of a run."""

from largebatch.config import image_sizes, ramp
from largebatch.config.checks import check, dropping, without_effect
from largebatch.config.cli import (
    apply,
    differences,
    dump,
    given_options,
    load,
    load_text,
    options,
    parse,
    read_file,
    typed,
)
from largebatch.config.durations import (
    NEVER,
    accumulation_passes,
    duration_images,
    duration_seconds,
    epoch_seconds,
    exact_batches,
    nearest_batches,
    profiled_steps,
)
from largebatch.config.help import Answer, Page
from largebatch.config.horovod import HorovodConfig
from largebatch.config.parallel import ParallelConfig, Shape, TensorConfig
from largebatch.config.sections import (
    AugmentConfig,
    CheckpointConfig,
    DataConfig,
    LogConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    Unsized,
)
from largebatch.config.values import byte_size

__all__ = [
    "Answer", "AugmentConfig", "CheckpointConfig", "DataConfig", "HorovodConfig", "LogConfig", "LossConfig",
    "ModelConfig", "NEVER", "OptimConfig", "Page", "ParallelConfig", "RunConfig", "ScheduleConfig", "Shape",
    "TensorConfig", "TrainConfig", "Unsized", "accumulation_passes", "apply", "byte_size", "check", "differences",
    "dropping", "dump", "duration_images", "duration_seconds", "epoch_seconds", "exact_batches", "given_options",
    "image_sizes", "load", "load_text", "nearest_batches", "options", "parse", "profiled_steps", "ramp", "read_file",
    "typed", "without_effect",
]  # fmt: skip
