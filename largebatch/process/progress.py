"""The progress of the work: a bar where stderr is a terminal, ten lines in a log."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Show = Callable[[int], None]  # takes the number of pieces done so far


@contextlib.contextmanager
def show_progress(what: str, total: int, *, unit: str = "images", quiet: bool = False) -> Iterator[Show]:
    """Yield a function that shows on stderr how many of `total` are done."""
    if quiet:
        yield lambda done: None
    elif sys.stderr.isatty():
        bar = start_bar(f"{what}: {{task.completed}} of {{task.total}} {unit}", total)
        try:
            yield lambda done: bar.update(bar.task_ids[0], completed=done)
        finally:
            stop_bar(bar)
    else:
        yield _lines(what, total, unit)


def _lines(what: str, total: int, unit: str) -> Show:
    """Return a function that prints a line for each tenth."""
    tenths_shown = 0

    def show(done: int) -> None:
        nonlocal tenths_shown
        tenths = min(10, 10 * done // max(1, total))
        if tenths > tenths_shown:
            tenths_shown = tenths
            sys.stderr.write(f"{what}: {done} of {total} {unit}\n")
            sys.stderr.flush()

    return show


def start_bar(text: str, total: int, *, done: int = 0) -> Bar:
    """Draw a bar on stderr with a text behind it, and let the log appear above it.

    rich replaces sys.stderr, so handlers of logging get the new stream.
    """
    from rich import progress
    from rich.console import Console

    terminal = sys.stderr
    columns = progress.BarColumn(), progress.TextColumn(text), progress.TimeRemainingColumn(elapsed_when_finished=True)
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task("", total=total, completed=done)
    bar.start()
    bar.console.show_cursor(True)  # a process that is killed could not show it again
    _redirect_log(terminal, sys.stderr)
    return bar


def stop_bar(bar: Bar) -> None:
    before = sys.stderr
    bar.stop()
    _redirect_log(before, sys.stderr)


def _redirect_log(old: TextIO, new: TextIO) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)
