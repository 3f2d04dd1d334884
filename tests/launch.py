"""Start programs under real launchers, as a user would: no flag but the number of ranks.

The `python` of a command is the warm one (warm.py), unless a test asks for a cold one: where a run is killed, stalls,
hangs or is told to end, and once for each launcher and each section of the READMEs.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import warm

ROOT = Path(__file__).parents[1]
LAUNCHERS = {
    "python": lambda ranks: [],
    "mpirun": lambda ranks: ["mpirun", "-np", str(ranks)],
    "horovodrun": lambda ranks: ["horovodrun", "-np", str(ranks)],
    "horovodrun --gloo": lambda ranks: ["horovodrun", "--gloo", "-np", str(ranks)],
    "torchrun": lambda ranks: ["torchrun", "--nproc-per-node", str(ranks), "--no-python"],
}
ENVIRONMENT = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "100"}
WAIT_S = 120


def launch(
    arguments: list[str],
    *,
    ranks: int,
    launcher: str = "mpirun",
    timeout_s: int = 240,
    environment: dict[str, str] | None = None,
    cold: bool = False,
) -> tuple[int, str]:
    """Run `python arguments...` on this number of ranks; see `run`."""
    command = [*LAUNCHERS[launcher](ranks), "python", *arguments]
    return run(command, timeout_s=timeout_s, environment=environment, cold=cold)


def run(
    command: list[str], *, timeout_s: int = 240, environment: dict[str, str] | None = None, cold: bool = False
) -> tuple[int, str]:
    """Run a command from the root of the repository; return its exit code, and its stdout and stderr together.

    A run over its time limit is killed whole and fails.
    """
    process = subprocess.Popen(
        with_python(command, cold=cold),
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | (environment or {}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        output = _end(process)
        raise AssertionError(f"{' '.join(command)} was not done after {timeout_s} s; its output:\n{output}") from None
    return process.returncode, output


def with_python(command: list[str], *, cold: bool) -> list[str]:
    """Return the command with the warm Python, or this one, for each word "python" and for a launcher in Python."""
    path = sys.executable if cold else warm.python()
    launcher, *words = [path if word == "python" else word for word in command]
    return [str(Path(path).with_name(launcher)) if launcher in warm.LAUNCHERS else launcher, *words]


def _end(process: subprocess.Popen) -> str:
    """Kill a launcher and its ranks, which torchrun puts into sessions of their own; return their output."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


@contextmanager
def started(
    command: list[str], output: Path, *, environment: dict[str, str] | None = None, cold: bool = True
) -> Iterator[subprocess.Popen]:
    """Start a command with its output in a file; kill it at the end of the block."""
    with open(output, "w") as file:
        process = subprocess.Popen(
            with_python(command, cold=cold),
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(condition: Callable[[], object], output: Path) -> None:
    """Poll until the condition is true; an AssertionError shows the file if the time is over."""
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, output.read_text()
        time.sleep(0.02)
