"""Versions of packages, read without an import."""

import importlib.metadata
from collections.abc import Iterable


def version_of(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions(packages: Iterable[str]) -> list[str]:
    """Return name and version of each that is installed."""
    return [f"{name} {version}" for name in packages if (version := version_of(name))]
