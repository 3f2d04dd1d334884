"""The options of a run.

sections.py   every option: dataclasses with default, unit and meaning
horovod.py    the options of Horovod, and the environment variables they become
parallel.py   the options of a model that several ranks share, and the sizes of its axes
checks.py     which values are allowed, and which options fit together
ramp.py       a batch ramp as phases
durations.py  "5 epochs" as images, a global batch as passes, times, ranges of steps
cli.py        command line and YAML: parse, dump, load, compare
values.py     texts as values of a type
help.py       the texts of --help: short, a section, a word, all
completion.py words for the tab key, for bash, zsh and fish
words.py      what to give instead of an option that does not exist
"""

from largebatch.config import ramp
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

__all__ = [
    "Answer",
    "AugmentConfig",
    "CheckpointConfig",
    "DataConfig",
    "HorovodConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "NEVER",
    "OptimConfig",
    "Page",
    "ParallelConfig",
    "RunConfig",
    "ScheduleConfig",
    "Shape",
    "TensorConfig",
    "TrainConfig",
    "Unsized",
    "accumulation_passes",
    "apply",
    "check",
    "differences",
    "dropping",
    "dump",
    "duration_images",
    "duration_seconds",
    "epoch_seconds",
    "exact_batches",
    "given_options",
    "load",
    "load_text",
    "nearest_batches",
    "options",
    "parse",
    "profiled_steps",
    "ramp",
    "read_file",
    "typed",
    "without_effect",
]
