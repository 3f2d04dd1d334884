"""The exceptions that all ranks of a run raise together."""

import os
import traceback
from collections.abc import Sequence

from largebatch.files.names import why


class Stopped(Exception):
    """Raised on every rank when one of them cannot go on; the message names the causes."""

    exit_code = 2


class StoppedEarly(Stopped):
    """Raised on every rank when a run was told to end before it is complete; it can be resumed."""

    exit_code = os.EX_TEMPFAIL  # 75


def sentence_of(error: Exception) -> str:
    """Return the message of a ValueError or of a file's error; add type and place to any other."""
    if isinstance(error, ValueError) or isinstance(error, OSError) and isinstance(error.filename, str):
        return why(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"


def by_rank(causes: Sequence[str | None], phase: str) -> str:
    """Return each distinct cause once, with its ranks unless it is the same on all."""
    ranks: dict[str, list[int]] = {}
    for rank, cause in enumerate(causes):
        if cause:
            ranks.setdefault(cause, []).append(rank)
    lines = []
    for cause, where in ranks.items():
        place = "" if len(where) == len(causes) else f"rank {', '.join(map(str, where))} of {len(causes)}, {phase}: "
        lines.append(place + cause)
    return "\n".join(lines)
