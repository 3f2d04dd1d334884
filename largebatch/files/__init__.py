"""Files that other processes see whole or not at all. Standard library only.

    atomic    atomic_file writes a file, written_once fills a folder; both appear under their name when complete
    locks     locked lets one process at a time do a piece of work
    run_lock  hold keeps a run folder for one job, on one host and between hosts
    cache     cache_folder, in which this package keeps what it can make again; safe_cache and distrust keep others out
"""

from largebatch.files.atomic import atomic_file, written_once
from largebatch.files.cache import cache_folder, distrust, safe_cache
from largebatch.files.locks import locked

__all__ = ["atomic_file", "cache_folder", "distrust", "locked", "safe_cache", "written_once"]
