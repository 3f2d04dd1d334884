"""The ranks of a run: what they exchange, and how they stop together. Only horovod.py imports Horovod.

The names below load when first used, so the files that need only the standard library do without Horovod and torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from largebatch.ranks.ranks import Ranks
    from largebatch.ranks.sessions import session
    from largebatch.ranks.stopped import Stopped, StoppedEarly

EXPORTS = {
    "Ranks": "largebatch.ranks.ranks",
    "Stopped": "largebatch.ranks.stopped",
    "StoppedEarly": "largebatch.ranks.stopped",
    "session": "largebatch.ranks.sessions",
}

__all__ = ["Ranks", "Stopped", "StoppedEarly", "session"]


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)
