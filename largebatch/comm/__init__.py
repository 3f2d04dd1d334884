"""The ranks of a run: who started them, where they sit, what they exchange. Only this folder imports Horovod.

The names below are loaded when first used, so files that need only the standard library (the launcher, the cores) can
be imported without Horovod and torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from largebatch.comm.communicator import Communicator, session
    from largebatch.comm.stopped import Stopped, StoppedEarly

EXPORTS = {
    "Communicator": "largebatch.comm.communicator",
    "Stopped": "largebatch.comm.stopped",
    "StoppedEarly": "largebatch.comm.stopped",
    "session": "largebatch.comm.communicator",
}

__all__ = ["Communicator", "Stopped", "StoppedEarly", "session"]


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)
