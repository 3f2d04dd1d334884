"""The name that somebody may have meant."""

import difflib
from collections.abc import Iterable, Mapping


def nearest(
    name: str,
    known: Iterable[str],
    *,
    none: str = "",
    cutoff: float = 0.6,
    hint: str = "{}?",
    shown: Mapping[str, str] = {},
) -> str:
    """Return "did you mean" with the most similar name in the hint, or `none`. shown: texts to print for names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {hint.format(shown.get(close[0], close[0]))}" if close else none
