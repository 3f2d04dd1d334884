"""Large-batch training of vision transformers on Horovod/MPI clusters.

The names below are loaded when first used: `import largebatch` alone costs nothing, and what needs no Horovod (Lamb,
schedules, recipes) does not import it.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from largebatch.imports import explain_import

if TYPE_CHECKING:
    from largebatch.config import TrainConfig
    from largebatch.engine import Hook, Trainer
    from largebatch.optim import Lamb, param_groups
    from largebatch.ranks import Ranks, session
    from largebatch.steps import Steps
    from largebatch.train import build_trainer

__version__ = "0.2.0"

EXPORTS = {
    "Ranks": "largebatch.ranks",
    "Hook": "largebatch.engine",
    "Lamb": "largebatch.optim",
    "Steps": "largebatch.steps",
    "TrainConfig": "largebatch.config",
    "Trainer": "largebatch.engine",
    "build_trainer": "largebatch.train",
    "param_groups": "largebatch.optim",
    "session": "largebatch.ranks",
}

__all__ = [
    "Hook", "Lamb", "Ranks", "Steps", "TrainConfig", "Trainer", "__version__", "build_trainer", "param_groups",
    "session",
]  # fmt: skip

if sys.argv[:1] == ["-m"]:  # python -m largebatch.PROGRAM; not where other programs use this package
    sys.excepthook = explain_import


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)
