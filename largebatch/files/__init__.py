"""Files that other processes see whole or not at all. Standard library only."""

from largebatch.files.atomic import atomic_file, written_once
from largebatch.files.cache import cache_folder, safe_cache, temporary_cache
from largebatch.files.locks import locked, no_progress
from largebatch.files.owners import distrust, refuse_links_of_others

__all__ = [
    "Damaged", "atomic_file", "cache_folder", "distrust", "locked", "no_progress", "refuse_links_of_others",
    "safe_cache", "temporary_cache", "written_once",
]  # fmt: skip


class Damaged(ValueError):
    """Raised for a file that cannot be used; the message names it, the reason and the remedy."""
