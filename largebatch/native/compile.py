"""Compiles the C++ sources of this package, once for each kind of processor, and keeps the libraries.

ctypes calls them, so they compile without the headers of torch and Python, in a second or two.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

from largebatch.files import cache_folder, distrust, locked, safe_cache, temporary_cache

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


@functools.cache
def can_load(what: str, source: Path, *flags: str) -> bool:
    """Return whether the library can be loaded; if not, warn once why `what` could not be compiled."""
    try:
        load_library(source, *flags)
    except (OSError, subprocess.CalledProcessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning("%s could not be compiled: %s", what, output[0] if output else error)
        return False
    return True


@functools.cache
def load_library(source: Path, *flags: str) -> ctypes.CDLL:
    """Load the compiled source from a cache, or compile it. Raise OSError or CalledProcessError if that fails."""
    for cache in _caches():
        with contextlib.suppress(OSError, ValueError):  # it cannot be written, or others may write to it
            folder = safe_cache(cache, "native", read_only=True)
            return ctypes.CDLL(str(compile_library(source, flags, folder)))
    with tempfile.TemporaryDirectory() as own:  # a library that is loaded needs its file no more
        return ctypes.CDLL(str(compile_library(source, flags, Path(own))))


def _caches() -> list[Path]:
    """Return the caches to try: the host's own first, unless the user has chosen one.

    Home folders often belong to many hosts and have no locks; some temporary folders allow no libraries.
    """
    return [cache_folder()] if os.environ.get("XDG_CACHE_HOME") else [temporary_cache(), cache_folder()]


def compile_library(source: Path, flags: tuple[str, ...], folder: Path) -> Path:
    """Return the library's file in `folder`; the first of several processes makes it."""
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), *FLAGS, *flags]
    made_of = [source.read_text(), *compiler, platform.machine(), _processor()]
    path = folder / f"{source.stem}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    if _is_own(path):
        return path
    with locked(path), tempfile.TemporaryDirectory(dir=folder) as aside:
        if not _is_own(path):
            unfinished = Path(aside) / path.name
            command = [*compiler, str(source), "-o", str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            unfinished.chmod(0o755)  # some users let their group write to all that they make
            os.replace(unfinished, path)
    return path


def _is_own(path: Path) -> bool:
    """Return whether a library is there that only this user or root can have written."""
    return path.exists() and not distrust(path)


def _processor() -> str:
    """Return a text for -march=native: different nodes may share a home folder."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    kinds = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "".join(sorted({line for line in lines if line.startswith(kinds)}))
