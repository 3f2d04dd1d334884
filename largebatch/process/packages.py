"""Versions of packages, which are not imported for it."""

import importlib.metadata
from collections.abc import Iterable


def version_of(package: str) -> str:
    """Return the version in the metadata of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions(packages: Iterable[str]) -> list[str]:
    """Return name and version of those that are installed."""
    return [f"{name} {version}" for name in packages if (version := version_of(name))]
