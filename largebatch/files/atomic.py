"""A file or folder that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from largebatch.files.locks import locked, no_progress


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[io.BufferedWriter]:
    """Open a file that appears at `path`, with its bytes on the disk, when the block ends without an error."""
    temporary = Path(path).with_name(f".{Path(path).name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)  # the name that a person knows
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def written_once(
    folder: Path, write: Callable[[Path, Callable[[], None]], None], progress: Callable[[], None] = no_progress
) -> Path:
    """Return `folder`; if it does not exist, `write` first fills a temporary folder, which then gets this name.

    `write` is given the folder, in which a process that was killed or had an outage may have left files, and a function
    to call while it works.
    """
    if folder.is_dir():
        return folder
    with locked(folder, progress) as go_on:
        if folder.is_dir():
            return folder
        temporary = folder.with_name(f".{folder.name}.unfinished")
        temporary.mkdir(exist_ok=True)
        try:
            write(temporary, go_on)
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # without locks another process may be first
                raise
        except ValueError as error:
            if type(error) is ValueError:  # not an outage: bad data, which will have another name when it is mended
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
