"""The end of a program with a wrong call or command line, or one that asks for a text. Needs Python's library alone."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from largebatch.config import Answer
from largebatch.files.names import on_screen, why
from largebatch.launch.launcher import is_rank_0, recognise

WAIT_S = 10.0  # long enough for rank 0 to print its sentence and for the launcher to end the other ranks


class Mistake(ValueError):
    """A wrong call in a user's own program; the message is a sentence that needs no traceback."""


@contextmanager
def report_mistakes() -> Iterator[None]:
    """End this process if the block raises ValueError or the OSError of a file (code 2), or Answer (code 0).

    Only rank 0 prints an answer or a mistake, and the launcher then ends the other ranks. A rank that still runs after
    WAIT_S seconds prints its own sentence: the mistake may be on that rank alone.
    """
    try:
        yield
    except Answer as answer:
        if is_rank_0(os.environ):
            _print(str(answer))
        sys.exit(0)
    except (ValueError, OSError) as mistake:
        if isinstance(mistake, OSError) and not mistake.filename:
            raise
        sys.stderr.write(f"largebatch: {on_screen(_for_one_rank(mistake))}\n")
        sys.exit(2)


def _for_one_rank(mistake: Exception) -> str:
    try:
        launch = recognise(os.environ)
    except ValueError as ambiguous:  # no process knows its rank, so each prints this
        return str(ambiguous)
    if launch.rank == 0:
        return why(mistake)
    time.sleep(WAIT_S)
    return f"rank {launch.rank} of {launch.size}, command line: {why(mistake)}"


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # a program such as head has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
