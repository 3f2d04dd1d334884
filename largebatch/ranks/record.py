"""The newest collectives of a rank, for the report of a hang, and the ranks that have begun fewer.

All ranks begin the same ones, in the same order, but for the buckets of a step under Horovod.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

from largebatch.ranks.watchdog import Watchdog

KEPT, TOLD = 256, 16  # more are kept than are printed: a rank may be some buckets behind


class Collective(NamedTuple):
    number: int  # from 1
    name: str
    phase: str
    nbytes: int  # 0: an object
    began: float

    def __str__(self) -> str:
        return f"{self.number}, {self.name}" + f" of {self.phase}" * bool(self.phase)


class Record:
    def __init__(self, watchdog: Watchdog) -> None:
        self.count = 0
        self.thread = threading.get_ident()  # the thread of the stop points begins collectives at any time
        self._newest: deque[Collective] = deque(maxlen=KEPT)
        self._watchdog = watchdog

    def begin(self, name: str, nbytes: int) -> None:
        self.count += 1
        self._newest.append(Collective(self.count, name, self._watchdog.phase, nbytes, time.monotonic()))

    def lines(self) -> str:
        now, newest = time.monotonic(), list(self._newest)[-TOLD:]
        sizes = [f"{one.nbytes:,} bytes" if one.nbytes else "an object" for one in newest]
        return "".join(f"    {one}: {size}, {now - one.began:.1f} s ago\n" for one, size in zip(newest, sizes))

    def compare(self, begun: dict[int, int], hosts: Sequence[str]) -> str:
        """Return a sentence on the ranks that are behind. begun: rank -> how many collectives it has begun."""
        lowest, highest = min(begun.values()), max(begun.values())
        names = {one.number: str(one) for one in list(self._newest)}
        last, following, newest = (names.get(number, str(number)) for number in (lowest, lowest + 1, highest))
        if lowest == highest:
            return f"no rank is behind: the newest collective of each is {last}."
        slow = [f"rank {rank} on {hosts[rank]}" for rank, count in begun.items() if count == lowest]
        more = f" and {len(slow) - TOLD} more" * (len(slow) > TOLD)
        who = f"{', '.join(slow[:TOLD])}{more} {'is' if len(slow) == 1 else 'are'} behind"
        return f"{who}, after collective {last}, and not yet in {following}; the others have come to {newest}."


def recorded(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `Ranks` that also records each of its calls."""

    @wraps(collective)
    def recording(self: Any, value: Any, *, name: str, **options: Any) -> Any:
        if threading.get_ident() == self.record.thread:
            parts = value.values() if isinstance(value, dict) else (value,)
            self.record.begin(name, sum(getattr(part, "nbytes", 0) for part in parts))
        return collective(self, value, name=name, **options)

    return recording
