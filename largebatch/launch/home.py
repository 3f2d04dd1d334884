"""A home folder for MPI: in a container a user id may have no name, and so no home."""

import os
import pwd
from collections.abc import MutableMapping


def set_missing_home(environment: MutableMapping[str, str]) -> None:
    """Set HOME to "/" if Open MPI would end the process without it."""
    if "HOME" not in environment and not has_name():
        environment["HOME"] = "/"


def has_name() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True
