"""How long a rank waits for the others, as options, and the environment variables that Horovod reads.

Horovod reads a variable without a message. So a variable that contradicts an option, or is harmful on this machine, is
refused. This file does not import Horovod.
"""

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from largebatch.config.values import at_least, check_values

STALL = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
STALL_LIMIT_S = 600  # Horovod itself warns of a missing rank after 60 s, and by default never stops
START_LIMIT_S = 1800  # 200 ranks that import from a slow file system, compile, or read a checkpoint come minutes apart
STALL_WARNING_S = 60  # Horovod's default; the warning must come before the limit
CPU_CYCLE_TIME_MS = 5  # at Horovod's default of 1 ms, its thread takes 3.8 % of a rank's core
CPU_FUSION_BYTES = 2**20  # Horovod sends a larger tensor without copies, which would take longer than a message
HARMFUL = {  # on GPUs
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "which copies gradients to the host: unset it, or set HOROVOD_TORUS_ALLREDUCE=1",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "with which the backward pass waits for each reduction: unset it",
}


@dataclass(frozen=True, kw_only=True)
class HorovodConfig:
    """How long a rank waits for the others, and works by itself; Horovod's own settings are variables, HOROVOD_..."""

    stall_limit_s: float | None = at_least(None, 0)
    """end the run if a rank has waited this long for the others; choose more than any save or evaluation on one rank
    takes. null: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, or 600; 0: wait for ever, as a debugger needs"""
    start_limit_s: float | None = at_least(None, 0)
    """end the run if a rank has waited this long for the others before the first step or validation: meanwhile ranks
    start, open the images, read a checkpoint and compile. null: stall_limit_s or its variable if one of them is set,
    else 1800; 0: wait for ever"""
    hang_limit_s: float = at_least(1800.0, 0)
    """end the run if a rank has worked this long without progress, as in a file system that does not answer; choose
    more than one pass, one file of images or the compilation of a model takes. 0: work for ever, as a debugger needs"""

    def apply(self, environment: MutableMapping[str, str], *, deterministic: bool, on_gpus: bool) -> None:
        """Set Horovod's variables, or raise ValueError for a wrong one; on_gpus: NCCL reduces the gradients."""
        check_values(self, "--horovod.")
        tuned = environment.get("HOROVOD_AUTOTUNE", "0") not in ("", "0")
        if deterministic and tuned:
            raise ValueError("--run.deterministic is true, which excludes HOROVOD_AUTOTUNE: unset one of them.")
        for name, harm in HARMFUL.items():
            if on_gpus and environment.get(name, "0") not in ("", "0"):
                raise ValueError(f"{name} is set, {harm}.")
        if self.stall_limit_s is not None:
            limit, present = round(self.stall_limit_s), environment.setdefault(STALL, str(round(self.stall_limit_s)))
            if not _same(present, limit):
                raise ValueError(
                    f"--horovod.stall_limit_s means {STALL}={limit}, and the environment has {present}: unset one of "
                    "them."
                )
        if deterministic:
            environment["HOROVOD_FUSION_THRESHOLD"] = "0"  # fusion depends on timing
        if tuned and on_gpus:  # else it would try the way through the memory of the host, too
            environment["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "0"
        if not tuned and not on_gpus:  # Horovod tunes no variable that is set
            environment.setdefault("HOROVOD_CYCLE_TIME", str(CPU_CYCLE_TIME_MS))
            environment.setdefault("HOROVOD_FUSION_THRESHOLD", str(CPU_FUSION_BYTES))
        environment.setdefault(STALL, str(STALL_LIMIT_S))
        limit_s = stall_limit(environment)
        if 0 < limit_s <= STALL_WARNING_S:
            environment.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, round(limit_s / 2))))

    def start_limit(self, environment: Mapping[str, str]) -> float:
        """Return the seconds that a rank may wait at the start, 0: for ever; call before `apply`."""
        if self.start_limit_s is not None:
            return self.start_limit_s
        if self.stall_limit_s is not None:
            return self.stall_limit_s
        return stall_limit(environment) if STALL in environment else START_LIMIT_S


def stall_limit(environment: Mapping[str, str]) -> float:
    """Return the seconds that a rank may wait for the others, 0: for ever; call after `HorovodConfig.apply`."""
    text = environment[STALL]
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{STALL} is {text!r}: expected a number of seconds.") from None


@contextmanager
def told_the_longest(environment: MutableMapping[str, str], limits: Sequence[float]) -> Iterator[None]:
    """Tell Horovod, which starts in this block, the longest limit in seconds; 0: none.

    Under MPI, Horovod itself watches waits, with one limit for the whole run. Our watchdog has the other limits.
    """
    before = environment[STALL]
    environment[STALL] = str(math.ceil(max(limits)) if all(limits) else 0)
    try:
        yield
    finally:
        environment[STALL] = before


def _same(present: str, value: float) -> bool:
    try:
        return float(present) == value
    except ValueError:
        return False
