"""RUN/starts.jsonl: a line for each start and end of a run, and for the first checkpoint of each start.

It tells the history of a run, and lost checkpoints. A start without an end was killed. Only rank 0 writes.
"""

import hashlib
import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.files.run_folder import RunFolder

if TYPE_CHECKING:
    from largebatch.ranks import Ranks

GIT_S = 10.0  # longest wait for git, which may be slow on a file system that many share


@dataclass(frozen=True)
class Start:
    """A start of a run, with its end if it had one."""

    time: float  # seconds since the epoch
    command: str
    launcher: str
    ranks: int
    hosts: list[str]
    commit: str  # of the sources; empty if they are in no git repository
    step: int = 0  # the step after which it goes on
    ended: float | None = None
    last_step: int | None = None
    reason: str = ""  # of an early end

    def __post_init__(self) -> None:
        """Raise TypeError for values of other types, and for a time that no calendar has."""
        texts = (self.command, self.launcher, self.commit, self.reason, *self.hosts)
        numbers = (self.time, self.ranks, self.step, self.ended or 0, self.last_step or 0)
        if not all(isinstance(text, str) for text in texts) or not all(0 <= number < 1e11 for number in numbers):
            raise TypeError("a start has other values")

    def __str__(self) -> str:
        hosts = self.hosts[0] if len(self.hosts) == 1 else f"{len(self.hosts)} hosts ({', '.join(self.hosts)})"
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{self.command}: {count(self.ranks, 'rank')} on {hosts}, started by {self.launcher}{commit}"


def describe_start(comm: "Ranks", words: Sequence[str]) -> Start:
    """Return the start of this process, with the hosts of all ranks. Every rank calls this."""
    hosts = comm.allgather_object(socket.gethostname(), name="starts")
    return Start(
        time=time.time(),
        command=shlex.join(["python", "-m", "largebatch.train", *words]),
        launcher=comm.launcher,
        ranks=comm.size,
        hosts=list(dict.fromkeys(hosts)),
        commit=commit() if comm.rank == 0 else "",
    )


def commit() -> str:
    """Return the git commit of the sources, with -dirty if they were changed; empty without one."""
    here = str(Path(__file__).parents[1])
    words = ["git", "--no-optional-locks", "-C", here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def write_start(folder: Path, start: Start) -> None:
    RunFolder(folder).add_line({"start": {name: value for name, value in asdict(start).items() if value is not None}})


def write_end(folder: Path, *, step: int, reason: str) -> None:
    """Add the end of the newest start. reason: of an early end."""
    RunFolder(folder).add_line({"end": {"ended": time.time(), "last_step": step, "reason": reason}})


def write_saved(folder: Path, *, step: int) -> None:
    RunFolder(folder).add_line({"saved": step})


def saved_step(folder: Path) -> int:
    """Return the newest step that was saved, by the history; 0 without one."""
    lines = [line for line in RunFolder(folder).read_lines() if isinstance(line, dict)]
    inside = [part for line in lines for part in (line, line.get("start"), line.get("end")) if isinstance(part, dict)]
    steps = [part.get(name) for part in inside for name in ("saved", "step", "last_step")]
    return max((step for step in steps if isinstance(step, int)), default=0)


def read_starts(folder: Path) -> list[Start]:
    """Return the starts of a run, oldest first, without lines that are cut off."""
    starts = list[Start]()
    for line in RunFolder(folder).read_lines():
        try:
            if "start" in line:
                starts.append(Start(**line["start"]))
            elif starts:
                starts[-1] = replace(starts[-1], **line["end"])
        except (ValueError, TypeError, KeyError):
            continue
    return starts


def identity(folder: Path) -> str:
    """Return 16 digits of a run that another one in the same folder does not have; a copy elsewhere has them, too."""
    starts = read_starts(folder)
    born = f"{starts[0].time} {starts[0].hosts}" if starts else str(folder.resolve())  # a user's program writes none
    return hashlib.sha256(born.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Event:
    time: float
    step: int
    text: str
    on_axis: bool = True


def events(starts: Sequence[Start]) -> list[Event]:
    """Return the starts and ends of a run, oldest first."""
    found = []
    for number, start in enumerate(starts):
        resumed = f"resumed after step {start.step}" if start.step else "started"
        again = " (the start before was killed)" if number and starts[number - 1].ended is None else ""
        hosts = ", ".join(start.hosts[:4]) + (f" and {len(start.hosts) - 4} more" if len(start.hosts) > 4 else "")
        place = f"{start.ranks} ranks on {hosts} by {start.launcher}" if start.ranks > 1 else f"1 rank on {hosts}"
        found.append(Event(start.time, start.step, f"{resumed}{again}: {place}", on_axis=number > 0))
        if start.ended is not None:
            reason = f"stopped early after step {start.last_step}: {start.reason}" if start.reason else ""
            told = reason or f"ended after step {start.last_step}"
            found.append(Event(start.ended, start.last_step or 0, told, on_axis=bool(start.reason)))
    return found


def count(number: int, noun: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
