"""Files and links of other users, on hosts and file systems that several share."""

import os
import stat
from pathlib import Path
from shlex import quote


def distrust(path: Path) -> str:
    """Return why somebody else may have made what lies in `path`, as the rest of a sentence, or "".

    `path` and what it links to must belong to this user or to root, and nobody else may be allowed to write.
    """
    link, target = os.lstat(path), os.stat(path)
    strangers = sorted({one.st_uid for one in (link, target)} - {os.geteuid(), 0})
    if strangers:
        return f"belongs to user {strangers[0]}"
    if target.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written to by other users (`chmod go-w {quote(str(path))}` after a look into it)"
    return ""


def refuse_links_of_others(folder: Path) -> None:
    """Raise ValueError if `folder`, or a folder in it, has a link of another user, who would choose where our files go.

    Also for pipes and devices. Own links are followed: many keep checkpoints on another disk.
    """
    entries = list(os.scandir(folder))
    for entry in [*entries, *(inner for one in entries if one.is_dir() for inner in _entries(one.path))]:
        if entry.is_symlink() and (owner := entry.stat(follow_symlinks=False).st_uid) not in (os.geteuid(), 0):
            raise ValueError(
                f"{entry.path} is a link that user {owner} has made, and this run would write to where it leads: "
                "remove it, or choose another --run.folder."
            )
        if os.path.exists(entry) and not (entry.is_file() or entry.is_dir()):
            raise ValueError(f"{entry.path} is neither a file nor a folder: remove it, or choose another --run.folder.")


def _entries(folder: str) -> list[os.DirEntry]:
    return list(os.scandir(folder)) if os.access(folder, os.R_OK | os.X_OK, effective_ids=True) else []
