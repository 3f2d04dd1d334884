"""C++ sources of this package, compiled once for a kind of processor and kept.

They are called through ctypes, so nothing of torch or Python is compiled against, and it takes a second or two.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


@functools.cache
def available(what: str, source: Path, *flags: str) -> bool:
    """Whether the library is there or could be made; if not, a warning has said why `what` is slower."""
    try:
        library(source, *flags)
    except (OSError, subprocess.CalledProcessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning("%s could not be compiled: %s", what, output[0] if output else error)
        return False
    return True


@functools.cache
def library(source: Path, *flags: str) -> ctypes.CDLL:
    """The compiled source, from the cache if it is there. OSError or CalledProcessError if it cannot be made."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "largebatch" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return ctypes.CDLL(str(_built(source, flags, folder)))
    except OSError:  # no home to write to
        with tempfile.TemporaryDirectory() as own:  # once loaded, its file is not needed
            return ctypes.CDLL(str(_built(source, flags, Path(own))))


def _built(source: Path, flags: tuple[str, ...], folder: Path) -> Path:
    """The library in `folder`; the first of several processes makes it, and it appears complete or not at all."""
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), *FLAGS, *flags]
    made_of = [source.read_text(), *compiler, platform.machine(), _processor()]
    path = folder / f"{source.stem}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    with open(folder / ".lock", "w") as lock, tempfile.TemporaryDirectory(dir=folder) as aside:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = Path(aside) / path.name
            command = [*compiler, str(source), "-o", str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            os.replace(unfinished, path)
    return path


def _processor() -> str:
    """What -march=native depends on: nodes of different kinds may share a home folder."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    kinds = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "".join(sorted({line for line in lines if line.startswith(kinds)}))
