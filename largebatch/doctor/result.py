"""The result of a check, and the function that runs a program to get it."""

import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from largebatch.files.names import on_screen
from largebatch.process.installer import install_command

INSTALL, REINSTALL = install_command(), install_command("--force")

# What is no error: noise that Open MPI prints after the real one, and the stages of launches.ALLREDUCE.
NO_ERROR = re.compile(
    r"PMIX ERROR|ORTE_ERROR_LOG|sent help message|orte_base_help_aggregate|job has been aborted|"
    r"process=(started|initialised)\."
)


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    `detail` tells what the check found. `cause` tells what is wrong, and `fix` is one command that repairs it. A check
    that passed but has a cause is a note: training works, but not as well as it could.
    """

    name: str
    ok: bool
    detail: str = ""
    cause: str = ""
    fix: str = ""

    def __str__(self) -> str:
        """Return one line, or three lines if there is something to fix."""
        if not self.cause:
            return on_screen(f"ok    {self.name}: {self.detail}")
        kind = "note" if self.ok else "FAIL"
        return on_screen(f"{kind}  {self.name}\n      cause: {self.cause}\n      fix:   {self.fix}")


@dataclass(frozen=True)
class Output:
    """The output of a child process. `code` is its exit code, negative for a signal, None if it ran out of time."""

    code: int | None
    stdout: str
    stderr: str

    @property
    def last_error(self) -> str:
        """The last line with a message: of stderr, or of stdout if stderr has none."""
        for text in (self.stderr, self.stdout):
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
    """Kill a process and all its descendants: mpirun gives each ssh a process group of its own, which would live on."""
    family = [process.pid]
    for pid in family:  # the list grows in the loop
        try:
            family += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:  # the process has ended meanwhile
            pass
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run(
    command: list[str], *, limit_s: float, environment: dict[str, str] | None = None, stdin: str = ""
) -> Output:
    """Run a command in a process group of its own. When the time is up, it is killed with all its descendants."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=environment,
    ) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=limit_s)
        except subprocess.TimeoutExpired:
            kill(process)
            stdout, stderr = process.communicate()
            return Output(None, stdout, stderr)
    return Output(process.returncode, stdout, stderr)
