"""A home folder for MPI. In a container of Kubernetes or OpenShift, a user id may have no name, and so no home."""

import os
import pwd
from collections.abc import MutableMapping


def set_missing_home(environment: MutableMapping[str, str]) -> None:
    """Set HOME to "/" if it is not set and the user id has no name: Open MPI would end the process."""
    if "HOME" not in environment and not has_name():
        environment["HOME"] = "/"


def has_name() -> bool:
    """Return whether the list of users knows the id of this process."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True
