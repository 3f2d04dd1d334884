"""Tables of figures in CSV files."""

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from largebatch.files.atomic import atomic_file

Row = dict[str, str]


def read_table(path: Path, columns: Collection[str], *, what: str, expected: str) -> list[Row]:
    """Return the rows of a CSV file, as texts; ValueError for a file that is no such table.

    what: how the file was given. expected: what makes such tables.
    """
    try:
        special = path.exists() and not path.is_file()  # to read a FIFO waits, and a device may have no end
        rows = list(csv.DictReader(io.StringIO("" if special else path.read_text(encoding="utf-8"), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{what} is {path}, which cannot be read: {reason}.") from None
    if missing := [name for name in columns if not rows or any(row.get(name) is None for row in rows)]:
        raise ValueError(f"{what} is {path}, which has no rows with {', '.join(missing)}: expected {expected}.")
    return rows


def write_table(path: str | Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file atomically; file names in cells need not be UTF-8."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with atomic_file(path) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))
