"""The progress of the work: a bar on a terminal, ten lines in a log."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich import progress

Show = Callable[[int], None]  # takes the number of pieces done so far


@contextlib.contextmanager
def show_progress(what: str, total: int, *, unit: str = "images", quiet: bool = False) -> Iterator[Show]:
    """Yield a function that shows, on stderr, how many of `total` are done; it shows nothing if `quiet`."""
    if quiet:
        yield lambda done: None
    elif sys.stderr.isatty():
        with _bar(unit) as bar:
            task = bar.add_task(what, total=total)
            bar.console.show_cursor(True)  # a process that is killed could not show it again
            yield lambda done: bar.update(task, completed=done)
    else:
        yield _lines(what, total, unit)


def _bar(unit: str) -> progress.Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.BarColumn(),
        progress.TextColumn("{task.description}: {task.completed} of {task.total} " + unit),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )


def _lines(what: str, total: int, unit: str) -> Show:
    """Return a function that prints a line each time that another tenth is done."""
    tenths_shown = 0

    def show(done: int) -> None:
        nonlocal tenths_shown
        tenths = min(10, 10 * done // max(1, total))
        if tenths > tenths_shown:
            tenths_shown = tenths
            sys.stderr.write(f"{what}: {done} of {total} {unit}\n")
            sys.stderr.flush()

    return show
