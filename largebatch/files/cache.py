"""The user's cache. Nobody else may write to it, because a shared library is loaded from it."""

import errno
import functools
import logging
import os
import tempfile
from pathlib import Path

from largebatch.files.owners import distrust

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return largebatch in $XDG_CACHE_HOME or ~/.cache; a user without a home folder gets `temporary_cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return temporary_cache()
    return Path(base).expanduser() / "largebatch"


def temporary_cache() -> Path:
    """Return the cache for users whose own cannot be used."""
    return Path(tempfile.gettempdir()) / f"largebatch-{os.geteuid()}"


@functools.cache
def safe_cache(wanted: Path, part: str = "", *, read_only: bool = False) -> Path:
    """Return the folder `part` of the cache `wanted`, made if it is missing.

    If this user cannot write to it, or other users can, log that and return the same part of `temporary_cache`;
    ValueError if that cannot be used either. read_only: it need not be writable.
    """
    trouble, strangers = _make(wanted, part, read_only=read_only)
    if not trouble:
        return wanted / part
    again, _ = _make(instead := temporary_cache(), part)
    if again:
        raise ValueError(
            f"The cache {wanted} {trouble}, and {instead} {again}: set XDG_CACHE_HOME to a folder of your own."
        )
    level = logging.WARNING if strangers else logging.INFO
    logger.log(level, "the cache %s %s: %s is used instead; XDG_CACHE_HOME chooses another", wanted, trouble, instead)
    return instead / part


def _make(folder: Path, part: str, *, read_only: bool = False) -> tuple[str, bool]:
    """Make a folder and a part of it, for this user alone.

    Return why they cannot be used, as the rest of a sentence, and whether other users are the reason.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for path in (folder, folder / part):
            path.mkdir(mode=0o700, exist_ok=True)
            if reason := distrust(path):
                return reason if path == folder else f"has a folder {part} that {reason}", True
            if not read_only and not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
                return f"cannot be used ({os.strerror(errno.EACCES)})", False
    except OSError as error:
        return f"cannot be used ({error.strerror})", False
    return "", False
