"""Large-batch training of vision transformers on Horovod/MPI clusters.

The names below are loaded when first used: `import largebatch` alone costs nothing, and what needs no Horovod (Lamb,
schedules, recipes) does not import it.
"""

import importlib
import sys
from typing import Any

from largebatch.imports import explain_import

__version__ = "0.1.0"

EXPORTS = {
    "Ranks": "largebatch.ranks",
    "Hook": "largebatch.engine",
    "Lamb": "largebatch.optim",
    "TrainConfig": "largebatch.config",
    "Trainer": "largebatch.engine",
    "build_trainer": "largebatch.train",
    "param_groups": "largebatch.optim",
    "session": "largebatch.ranks",
}

__all__ = ["__version__", *EXPORTS]  # noqa: PLE0604

if sys.argv[:1] == ["-m"]:  # python -m largebatch.PROGRAM; not where other programs use this package
    sys.excepthook = explain_import


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)
