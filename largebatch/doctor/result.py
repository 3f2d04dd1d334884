"""The result of a check, and the function that runs a program to get it."""

import os
import re
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from largebatch.files.names import on_screen
from largebatch.process.installer import install_command, noted

NO_HOROVOD = ["--no-horovod"] if noted().get("horovod") == "none" else []
INSTALL, REINSTALL = install_command(), install_command("--force", *NO_HOROVOD)

# What is no error: noise that Open MPI and torchrun print around the real one, and the stages of launches.ALLREDUCE.
NO_ERROR = re.compile(
    r"PMIX ERROR|ORTE_ERROR_LOG|sent help message|orte_base_help_aggregate|job has been aborted|"
    r"process=(started|initialised)\.|Setting OMP_NUM_THREADS|torch/distributed/elastic/multiprocessing/api"
)


@dataclass(frozen=True)
class Result:
    """The outcome of a check. fix: one command that repairs the cause. A check that passed with a cause is a note."""

    name: str
    ok: bool
    detail: str = ""
    cause: str = ""
    fix: str = ""

    def __str__(self) -> str:
        if not self.cause:
            return on_screen(f"ok    {self.name}: {self.detail}")
        kind = "note" if self.ok else "FAIL"
        return on_screen(f"{kind}  {self.name}\n      cause: {self.cause}\n      fix:   {self.fix}")


def not_tried(name: str) -> Result:
    return Result(name, False, cause="not tried, because a check above failed", fix="apply the fix above first")


@dataclass(frozen=True)
class Output:
    """The output of a child process. code: its exit code, negative for a signal, None if it ran out of time."""

    code: int | None
    stdout: str
    stderr: str

    @property
    def last_error(self) -> str:
        """The last line with a message, of stdout if stderr has none."""
        for text in (self.stderr, self.stdout):
            text = text.partition("failed (exitcode")[0]  # here torchrun's own traceback begins
            lines = [line.strip() for line in text.splitlines() if line.strip(" -*=") and not NO_ERROR.search(line)]
            if lines:
                return lines[-1][:300]
        return "no message"

    @property
    def how_it_ended(self) -> str:
        if self.code is None:
            return "did not end in time"
        signum = -self.code if self.code < 0 else self.code - 128
        if 0 < signum < signal.NSIG:
            return f"was killed by {signal.Signals(signum).name}"
        return f"ended with exit code {self.code}"


def kill(process: subprocess.Popen) -> None:
    """Kill a process and all its descendants: mpirun gives each ssh a process group of its own."""
    family = [process.pid]
    for pid in family:  # the list grows in the loop
        with suppress(OSError):  # the process has ended meanwhile
            family += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def start(command: list[str], *, stdin: int = subprocess.PIPE, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process group of its own; its stdout is text to read."""
    ours: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "errors": "replace", "start_new_session": True}
    return subprocess.Popen(command, stdin=stdin, **ours, **options)


def run(command: list[str], *, limit_s: float, environment: dict[str, str] | None = None, stdin: str = "") -> Output:
    """Run a command, and kill it with all its descendants when its time is up."""
    with start(command, stderr=subprocess.PIPE, env=environment) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=limit_s)
        except subprocess.TimeoutExpired:
            kill(process)
            stdout, stderr = process.communicate()
            return Output(None, stdout, stderr)
    return Output(process.returncode, stdout, stderr)
