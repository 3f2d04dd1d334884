"""The micro-batches of a step, kept for a second gradient.

They are kept as they were loaded, before mixup and the like: `Trainer.prepare` draws the same numbers again, and a
teacher's label maps are smaller than the targets made of them. Those of a GPU wait in page-locked memory of the host,
because many passes would not fit beside the model. On a CPU they stay where they are. To decode them once more would
cost as much as the step itself where the loader is the limit.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from largebatch.native.copies import set_aside


class Kept:
    """The micro-batches of one step on this rank, none at first."""

    def __init__(self) -> None:
        self._batches: list[Callable[[], Any]] = []

    def keeping(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and keep each."""
        for batch in batches:
            self._batches.append(aside(batch))
            yield batch

    def again(self) -> Iterator[Any]:
        """Yield the batches once more, and let each go."""
        while self._batches:
            yield self._batches.pop(0)()


def aside(value: Any) -> Callable[[], Any]:
    """Set aside the tensors of a batch, a dataclass or a named tuple; return a function that gives it back."""
    if isinstance(value, Tensor):
        return set_aside(value)
    if isinstance(value, tuple):
        items = [aside(item) for item in value]
        return lambda: type(value)(*(item() for item in items))
    if is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: aside(getattr(value, one.name)) for one in fields(value)}
        kind: Any = type(value)
        return lambda: kind(**{name: part() for name, part in parts.items()})
    return lambda: value
