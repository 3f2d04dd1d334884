"""The signals that tell a run to end, and the end of its launcher.

Imports only Python's own library, so that a program can listen before its slow imports. A thread hears the signals:
Python calls handlers only in the main thread, and not inside a collective.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from largebatch.launch.launcher import is_rank_0
from largebatch.launch.parents import Parents
from largebatch.ranks.stopped import StoppedEarly

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
END = b"\0"  # no signal has this number
ONCE_S = 2.0
GRACE_S = 3.0  # for an end of all ranks together, before this process ends alone


class Signals:
    """Notes the first of `SIGNALS` that reaches this process inside `with`, and ends the process at a later one.

    Signals within `ONCE_S` of the first are the same request: mpirun under Slurm was seen to deliver it twice. A
    process that is ending ignores them: another rank's signal may have stopped the run. SIGINT stays ignored if it was,
    as in a shell's background job.
    """

    def __init__(self, *, nothing_to_lose: bool = False) -> None:
        """nothing_to_lose: while this attribute is True, the first signal ends the process with code 75."""
        self.first: signal.Signals | None = None
        self.nothing_to_lose = nothing_to_lose
        self.end: Callable[[int], object] = os._exit  # ends all ranks of the run with this code
        self._parents = Parents()
        self._before: dict[signal.Signals, Any] = {}

    def requests(self) -> list[bool]:
        """Return for each of `SIGNALS` whether it was the first, and last whether the launcher is gone."""
        return [*(self.first == number for number in SIGNALS), self._parents.gone()]

    def all_ranks_are_done(self) -> None:
        """End this process at its first signal no more, so that its own exit code is seen.

        A launcher sends SIGTERM to all ranks as soon as one has ended with a code other than 0.
        """
        self.nothing_to_lose = False

    def __enter__(self) -> "Signals":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, _heard)
                signal.siginterrupt(number, False)  # libraries need not know
        self._thread = threading.Thread(target=self._listen, name="largebatch-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if kind in (SystemExit, StoppedEarly) else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._writer, END)  # a close would not end the thread: forked processes have the pipe, too
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _listen(self) -> None:
        at = 0.0
        while (number := os.read(self._reader, 1)) != END:
            if number[0] not in SIGNALS:
                continue
            if self.first is None:
                self.first, at = signal.Signals(number[0]), time.monotonic()
                if self.nothing_to_lose:
                    self._end_at_once(self.first)
            elif time.monotonic() - at > ONCE_S:
                os._exit(128 + number[0])  # as a shell reports it

    def _end_at_once(self, number: signal.Signals) -> None:
        """End before the first step. Rank 0 alone says so: a launcher may send SIGTERM to all ranks."""
        if is_rank_0(os.environ):
            sys.stderr.write(
                f"largebatch: stopped before the first step was done, because {number.name} came; the same command "
                f"starts again where this one did (exit code {StoppedEarly.exit_code}).\n"
            )
            sys.stderr.flush()
        alone = threading.Timer(GRACE_S, os._exit, [StoppedEarly.exit_code])
        alone.daemon = True
        alone.start()
        self.end(StoppedEarly.exit_code)


def _heard(number: int, frame: FrameType | None) -> None:
    """Replace the default action, which would end the process; `_listen` does the work."""
