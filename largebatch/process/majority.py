"""Which ranks or hosts differ from most."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def of_most(values: Iterable[T]) -> T:
    """Return the most frequent value; of several the one that comes first, so that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]
