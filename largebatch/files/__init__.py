"""Files that other processes see whole or not at all. Standard library only.

    atomic    atomic_file writes a file, written_once fills a folder; both appear under their name when complete
    locks     locked lets one process at a time do a piece of work
    run_lock  hold keeps a run folder for one job, on one host and between hosts
    cache     cache_folder, in which this package keeps what it can make again; safe_cache if others may write there;
              temporary_cache on the disk of the host
    damaged   Damaged is raised for a file that cannot be used
    names     on_screen, printable and listed show what others have chosen; Formatter does so in a log
    owners    distrust and refuse_links_of_others tell what other users have made, or may have
"""

from largebatch.files.atomic import atomic_file, written_once
from largebatch.files.cache import cache_folder, safe_cache, temporary_cache
from largebatch.files.damaged import Damaged
from largebatch.files.locks import locked, no_progress
from largebatch.files.owners import distrust, refuse_links_of_others

__all__ = [
    "Damaged",
    "atomic_file",
    "cache_folder",
    "distrust",
    "locked",
    "no_progress",
    "refuse_links_of_others",
    "safe_cache",
    "temporary_cache",
    "written_once",
]
