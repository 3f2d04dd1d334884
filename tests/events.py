"""CUDA's events on a machine without a GPU."""

import pytest
import torch


def note_events(monkeypatch: pytest.MonkeyPatch, *, milliseconds: float) -> list[str]:
    """Put events in the place of CUDA's that note their calls, any two of them so far apart; return the notes.

    A wait for the whole device is an error.
    """
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait for the end")

        def elapsed_time(self, other: "Event") -> float:
            return milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    return calls
