"""Names of files and classes, which others have chosen, in messages and logs."""

import logging
from collections.abc import Collection

SHOWN = 3


def printable(text: str) -> str:
    """Return a text as one line that cannot command a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def on_screen(text: str) -> str:
    """Return a text that cannot command a terminal. Further lines are indented: none looks like another message."""
    lines = [printable(line) for line in text.expandtabs().split("\n")]
    return "\n".join([lines[0], *(line if line[:1] in ("", " ") else f"    {line}" for line in lines[1:])])


def listed(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(printable(name) for name in [*names][:SHOWN])
    return shown + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


class Formatter(logging.Formatter):
    """Writes records `on_screen`."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record without its traceback."""
        return on_screen(super().formatMessage(record))
