"""Start programs under real launchers, as a user would: no flag but the number of ranks."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "python": lambda ranks: [],
    "mpirun": lambda ranks: ["mpirun", "-np", str(ranks)],
    "horovodrun": lambda ranks: ["horovodrun", "-np", str(ranks)],
    "horovodrun --gloo": lambda ranks: ["horovodrun", "--gloo", "-np", str(ranks)],
    "torchrun": lambda ranks: ["torchrun", "--nproc-per-node", str(ranks), "--no-python"],
}


def launch(
    arguments: list[str],
    *,
    ranks: int,
    launcher: str = "mpirun",
    timeout_s: int = 240,
    environment: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Run `python arguments...` on so many ranks; see `run`."""
    command = [*LAUNCHERS[launcher](ranks), sys.executable, *arguments]
    return run(command, timeout_s=timeout_s, environment=environment)


def run(
    command: list[str], *, timeout_s: int = 240, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command from the root of the repository; (exit code, stdout and stderr together).

    A run over its time limit is killed whole and fails.
    """
    settings = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "100"} | (environment or {})
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | settings,
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


def _end(process: subprocess.Popen) -> str:
    """Kill a launcher and its ranks, which torchrun puts into sessions of their own; what they had written."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def check_on_ranks(files: list[str], *, ranks: int, launcher: str = "mpirun") -> None:
    """Run files of tests/mpi/ranks, all their tests, on every rank of one launch; a thread is enough for each."""
    pytest = ["-m", "pytest", "-x", "-q", "--no-header", "--color=no", "-p", "no:cacheprovider"]
    arguments = [*pytest, *(f"tests/mpi/ranks/{file}" for file in files)]
    one_thread = {"OMP_NUM_THREADS": "1"}
    code, output = launch(arguments, ranks=ranks, launcher=launcher, timeout_s=600, environment=one_thread)
    assert code == 0, output
    assert " passed" in output and not re.search(r"\d skipped", output), output
