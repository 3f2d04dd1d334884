"""The user's cache."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder largebatch in $XDG_CACHE_HOME, or in ~/.cache if that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "largebatch"
