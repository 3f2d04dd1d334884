"""Names of files and classes, which others have chosen, in messages and logs."""

import logging
import re
from collections.abc import Collection
from urllib.parse import urlsplit

SHOWN = 3


def printable(text: str) -> str:
    """Return a text as one line that cannot command a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def on_screen(text: str) -> str:
    """Return a text that cannot command a terminal, or look like several messages: further lines are indented."""
    lines = [printable(line) for line in text.expandtabs().split("\n")]
    return "\n".join([lines[0], *(line if line[:1] in ("", " ") else f"    {line}" for line in lines[1:])])


def why(error: object) -> str:
    """Return an error's message; that of a file that cannot be used is a sentence, too."""
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return f"{error.filename} cannot be read or written: {error.strerror}."
    return str(error)


def without_password(error: Exception) -> str:
    """Return the message of an error, or its kind, without the user's name and password in an address."""
    return re.sub(r"//[^/@\s]+@", "//", str(error).strip()).rstrip(".") or type(error).__name__


def refuse_secret(address: str) -> None:
    """Raise ValueError for an address that may hold credentials, which would go into logs, configs and checkpoints."""
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise ValueError(f"{printable(address)} is no address ({error}): one is s3://bucket/imagenet.") from None
    secret = parts.password or parts.query or parts.username and parts.scheme.startswith("http")
    if "://" in address and secret:
        raise ValueError(
            f"An address of {parts.scheme}:// was given with a user, a password or a query, which would be written "
            "into logs and checkpoints: give the address alone, and credentials in the environment."
        )


def listed(names: Collection[str], count: int | None = None) -> str:
    """Return the first names, and how many more there are of `count`."""
    shown, count = ", ".join(printable(name) for name in [*names][:SHOWN]), count or len(names)
    return shown + (f" and {count - SHOWN:,} more" if count > SHOWN else "")


class Formatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return on_screen(super().formatMessage(record))
