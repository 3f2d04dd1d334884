"""A file or folder that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from largebatch.files.locks import locked


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


def written_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return `folder`; if it does not exist, `write` first fills a temporary folder, which then gets this name."""
    if folder.is_dir():
        return folder
    with locked(folder):
        if folder.is_dir():
            return folder
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            write(temporary)
            with contextlib.suppress(FileExistsError):  # without locks another process may be first
                temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder
