"""The command line of `python -m largebatch.pack`: packing itself, and its sub-commands check and token-labels."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from largebatch.arguments import complain
from largebatch.files.names import Formatter
from largebatch.pack import check, packing


def _token_labels(argv: Sequence[str]) -> int:
    from largebatch.pack import token_labels  # imports torch and timm, which the other commands do not need

    return token_labels.main(argv)


SUB_COMMANDS = {"check": check.main, "token-labels": _token_labels}


def main(argv: Sequence[str] | None = None) -> int:
    screen = logging.StreamHandler()
    screen.setFormatter(Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[screen])
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError) as error:
        return complain(error)


def run(argv: Sequence[str]) -> int:
    """Run the sub-command that `argv` begins with, or else pack; return the exit code.

    Raises ValueError for a mistake of the user, OSError for a disk or file that fails.
    """
    if argv and argv[0] in SUB_COMMANDS:
        return SUB_COMMANDS[argv[0]](argv[1:])
    return packing.main(argv)
