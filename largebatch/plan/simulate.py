"""A step at any number of ranks, event by event: backward pass, cycles of Horovod, messages, stragglers, stalls.

No clock and no state: `simulate` is a function of its arguments. Ranks differ by a factor on their speed, drawn from a
normal distribution, and by waits for images; a bucket of gradients can only be reduced when the slowest rank has it. In
every cycle Horovod takes the buckets that are ready on all ranks, joins them up to its threshold, and the links send
one message after the other.
"""

import math
import random
from dataclasses import dataclass

from largebatch.plan import constants
from largebatch.plan.step import Backward, Cluster, allreduce_seconds, cycle_seconds, negotiation_seconds


@dataclass(frozen=True)
class Disturbance:
    """How the ranks differ."""

    jitter: float = 0.0
    """standard deviation of a rank's time for its passes, as a share of it"""
    stall: float = 0.0
    """probability that a rank waits for images in a step"""
    stall_s: float = 0.0
    """how long it then waits"""


@dataclass(frozen=True)
class Message:
    """A message of joined gradients on the links."""

    begins: float
    ends: float
    size: int


@dataclass(frozen=True)
class Timeline:
    """A step, in seconds from its beginning."""

    ranks: int
    fastest: float
    """when the fastest rank ends its backward pass"""
    slowest: float
    """when the slowest one does"""
    alone: float
    """when an undisturbed rank does"""
    backward: float
    """when the last backward pass of an undisturbed rank begins"""
    messages: tuple[Message, ...]
    optimizer: float

    @property
    def reduced(self) -> float:
        """When the last gradient is reduced."""
        return max([self.slowest, *(message.ends for message in self.messages)])

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.reduced + self.optimizer

    @property
    def straggling(self) -> float:
        """The time that ranks lose because one is slower."""
        return self.slowest - self.alone

    @property
    def exposed(self) -> float:
        """The time from the end of the slowest backward pass to the last reduced gradient."""
        return self.reduced - self.slowest


def simulate(
    backward: Backward,
    cluster: Cluster,
    *,
    compute: float,
    optimizer: float,
    disturbance: Disturbance = Disturbance(),
    seed: int = 0,
) -> Timeline:
    """Return a step. compute: seconds of all passes of a rank; the last backward pass is `backward`."""
    factors = _factors(cluster.ranks, compute, disturbance, seed)
    slowest = max(factors)
    begins = (compute - backward.seconds) * slowest
    ready = sorted((begins + at * slowest, size) for at, size in zip(backward.ready, backward.sizes))
    return Timeline(
        ranks=cluster.ranks,
        fastest=compute * min(factors),
        slowest=compute * slowest,
        alone=compute,
        backward=compute - backward.seconds,
        messages=tuple(_messages(ready, cluster)) if cluster.ranks > 1 else (),
        optimizer=optimizer,
    )


def _factors(ranks: int, compute: float, disturbance: Disturbance, seed: int) -> list[float]:
    """Return the time of each rank's passes as a multiple of `compute`."""
    draw = random.Random(seed)
    factors = []
    for _ in range(ranks):
        factor = max(0.5, draw.gauss(1.0, disturbance.jitter)) if disturbance.jitter else 1.0
        waits = draw.random() < disturbance.stall
        factors.append(factor + waits * disturbance.stall_s / compute)
    return factors


def _messages(ready: list[tuple[float, int]], cluster: Cluster) -> list[Message]:
    """Return the messages for gradients that are ready on all ranks at these times."""
    cycle, limit = cycle_seconds(cluster), constants.FUSION_BYTES[cluster.device.kind].value
    agreed = negotiation_seconds(cluster) - cycle / 2
    messages: list[Message] = []
    free = 0.0
    while ready:
        seen = cycle * math.ceil(max(ready[0][0], free - agreed) / cycle)  # Horovod looks once in a cycle
        size, count = 0, 0
        while count < len(ready) and ready[count][0] <= seen and (not count or size + ready[count][1] <= limit):
            size += ready[count][1]
            count += 1
        ready = ready[count:]
        begins = seen + agreed  # not before `free`
        free = begins + allreduce_seconds(size, cluster)
        messages.append(Message(begins, free, size))
    return messages
