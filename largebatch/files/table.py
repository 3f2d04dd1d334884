"""Tables of figures in CSV files."""

import csv
from collections.abc import Collection
from pathlib import Path

Row = dict[str, str]


def read_table(path: Path, columns: Collection[str], *, what: str, expected: str) -> list[Row]:
    """Return the rows of a CSV file, as texts. ValueError, one sentence, for a file that is no such table.

    what: how the file was given, such as the option's name. expected: what makes such tables.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{what} is {path}, which cannot be read: {error}.") from None
    missing = [name for name in columns if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"{what} is {path}, which has no rows with {', '.join(missing)}: expected {expected}.")
    return rows
