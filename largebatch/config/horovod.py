"""Horovod's settings as options of the config, and the environment variables that they become.

Horovod reads its settings from the environment without any message: a variable that contradicts another one, or that
has no effect on this machine, costs speed or correctness unseen. So each setting has an option here, and contradictory
settings are refused with the reason. This file does not import Horovod.
"""

import math
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

STALL_LIMIT_S = 600  # Horovod itself warns of a missing rank after 60 s, and by default never stops
START_LIMIT_S = 1800  # 200 ranks that import from a slow file system, compile, or read a checkpoint come minutes apart
STALL_WARNING_S = 60  # Horovod's default; the warning must come before the limit
NO_TORUS = "--horovod.torus_allreduce is true, which needs GPUs and NCCL: leave it out on CPUs."
CPU_CYCLE_TIME_MS = 5  # at Horovod's default of 1 ms, its thread takes 3.8 % of a rank's core
CPU_FUSION_BYTES = 2**20  # Horovod sends a larger tensor without copies, which would take longer than a message


@dataclass(frozen=True, kw_only=True)
class HorovodConfig:
    """Horovod: when gradients are sent, and how long a rank waits for the others."""

    reduction: Literal["average", "adasum"] = "average"
    """rule by which the gradients of the ranks become one; adasum is an error: it combines the steps of the ranks, not
    their gradients, so there is no gradient left to clip, and it needs a power of two of ranks"""
    fusion_threshold_mb: int | None = None
    """gradients that become ready together are reduced in one message of up to this many MiB; 0: each in a message of
    its own; null: HOROVOD_FUSION_THRESHOLD, or Horovod's 128 on GPUs and 1 on CPUs, where copies into a message take
    longer than more messages: 1.04 s per step with 1, 1.16 with 128 (ViT-B/32, batch 4, 2 CPU ranks on one host). More
    pays on networks with a high latency"""
    cycle_time_ms: float | None = None
    """Horovod looks for ready gradients once in this many milliseconds: a longer time fuses more of them, a shorter
    time starts earlier. null: HOROVOD_CYCLE_TIME, or Horovod's 1 on GPUs and 5 on CPUs, where Horovod's thread shares a
    core with the rank and takes 1 % of it instead of 3.8 % (ViT-B/32, 2 ranks × 1 thread)"""
    torus_allreduce: bool = False
    """let Horovod reduce among the GPUs of each host, then between the hosts, each with NCCL. NCCL by itself chooses a
    way through the hosts as well, so measure both. For GPUs with NCCL on several hosts, each with the same number of
    ranks; not measured by us"""
    autotune: bool = False
    """let Horovod search for the fusion threshold, the cycle time and, on GPUs, torus_allreduce while it trains. This
    pays in runs of hours on an unknown network: the first steps are slower, and the last bits of sums change whenever
    Horovod changes a setting"""
    timeline: str = ""
    """file for Horovod's timeline, which shows every message of every tensor in chrome://tracing: some MB per step, so
    choose a file on a disk of the host; empty: no timeline. --run.profile_steps records a few steps for the same
    viewer"""
    stall_limit_s: float | None = None
    """end the run if a rank has waited this long for the others; choose more than any save or evaluation on one rank
    takes. null: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, or 600; 0: wait for ever, as a debugger needs"""
    start_limit_s: float | None = None
    """end the run if a rank has waited this long for the others before the first step or validation: meanwhile ranks
    start, open the images, read a checkpoint and compile. null: stall_limit_s or its variable if one of them is set,
    else 1800; 0: wait for ever"""
    hang_limit_s: float = 1800.0
    """end the run if a rank has worked this long without progress, as in a file system that does not answer; choose
    more than one pass, one file of images or the compilation of a model takes. 0: work for ever, as a debugger needs"""

    def check(self, *, deterministic: bool, device: str = "auto") -> None:
        """Raise ValueError, one sentence, for invalid values, also beside --run.deterministic and --run.device."""
        if self.torus_allreduce and device == "cpu":
            raise ValueError(NO_TORUS)
        if self.reduction == "adasum":
            raise ValueError(
                "--horovod.reduction is adasum, which combines the steps that each rank took by itself: there is no "
                "gradient of the global batch for --optim.clip_norm and LAMB's trust ratios, so use average."
            )
        if self.cycle_time_ms is not None and self.cycle_time_ms <= 0:
            raise ValueError(f"--horovod.cycle_time_ms is {self.cycle_time_ms}: expected a time above 0, or null.")
        if self.fusion_threshold_mb is not None and self.fusion_threshold_mb < 0:
            raise ValueError(
                f"--horovod.fusion_threshold_mb is {self.fusion_threshold_mb}: expected 0 or more, or null."
            )
        if self.stall_limit_s is not None and self.stall_limit_s < 0:
            raise ValueError(f"--horovod.stall_limit_s is {self.stall_limit_s}: expected 0 or more, or null.")
        if self.start_limit_s is not None and self.start_limit_s < 0:
            raise ValueError(f"--horovod.start_limit_s is {self.start_limit_s}: expected 0 or more, or null.")
        if self.hang_limit_s < 0:
            raise ValueError(f"--horovod.hang_limit_s is {self.hang_limit_s}: expected 0 or more.")
        self._check_together(deterministic)

    def _check_together(self, deterministic: bool) -> None:
        if deterministic and self.fusion_threshold_mb is not None:
            raise ValueError(
                f"--horovod.fusion_threshold_mb is {self.fusion_threshold_mb} and --run.deterministic is true, which "
                "reduces each gradient by itself, because fusion depends on timing: leave one of them out."
            )
        if deterministic and self.autotune:
            raise ValueError(
                "--horovod.autotune and --run.deterministic are both true: the choices of autotune depend on timing "
                "and change the order of sums, so leave one of them out."
            )
        fixed = [name for name in ("fusion_threshold_mb", "cycle_time_ms") if getattr(self, name) is not None]
        if self.autotune and fixed:
            raise ValueError(
                f"--horovod.autotune is true and --horovod.{fixed[0]} {getattr(self, fixed[0])}, and a value that is "
                "set is not tuned: leave one of them out."
            )

    def apply(self, environment: MutableMapping[str, str], *, deterministic: bool, on_gpus: bool) -> None:
        """Set the environment variables that Horovod reads; on_gpus: NCCL reduces the gradients.

        ValueError, one sentence, for an option that contradicts a variable or has no effect on this machine.
        """
        self.check(deterministic=deterministic)
        if deterministic and environment.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"):
            raise ValueError("--run.deterministic is true, which excludes HOROVOD_AUTOTUNE: unset one of them.")
        if self.torus_allreduce and not on_gpus:
            raise ValueError(NO_TORUS)
        if on_gpus and environment.get("HOROVOD_HIERARCHICAL_ALLREDUCE", "0") not in ("", "0"):
            raise ValueError(
                "HOROVOD_HIERARCHICAL_ALLREDUCE is set, which copies each gradient to the host and reduces it there: "
                "unset it, and leave the way between hosts to NCCL, or to --horovod.torus_allreduce true."
            )
        folder = os.path.dirname(os.path.abspath(self.timeline))
        if self.timeline and not os.path.isdir(folder):
            raise ValueError(f"--horovod.timeline is {self.timeline}: there is no folder {folder}, make it first.")
        options: dict[str, float | str | None] = {
            "fusion_threshold_mb": None if self.fusion_threshold_mb is None else self.fusion_threshold_mb * 2**20,
            "cycle_time_ms": self.cycle_time_ms,
            "torus_allreduce": 1 if self.torus_allreduce else None,
            "autotune": 1 if self.autotune else None,
            "timeline": self.timeline or None,
            "stall_limit_s": None if self.stall_limit_s is None else round(self.stall_limit_s),
        }
        for option, value in options.items():
            if value is not None:
                _set_variable(environment, VARIABLES[option], value, option=option)
        if deterministic:
            environment["HOROVOD_FUSION_THRESHOLD"] = "0"  # fusion depends on timing
        tuned = environment.get("HOROVOD_AUTOTUNE", "0") not in ("", "0")
        if tuned and on_gpus:  # else it would try the way through the memory of the host, too
            environment["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "0"
        if not tuned and not on_gpus:  # Horovod tunes no variable that is set
            environment.setdefault("HOROVOD_CYCLE_TIME", str(CPU_CYCLE_TIME_MS))
            environment.setdefault("HOROVOD_FUSION_THRESHOLD", str(CPU_FUSION_BYTES))
        environment.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(STALL_LIMIT_S))
        limit_s = stall_limit(environment)
        if 0 < limit_s <= STALL_WARNING_S:
            environment.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, round(limit_s / 2))))

    def start_limit(self, environment: Mapping[str, str]) -> float:
        """Return for how many seconds a rank may wait for the others at the start, 0: for ever; call before `apply`."""
        if self.start_limit_s is not None:
            return self.start_limit_s
        if self.stall_limit_s is not None:
            return self.stall_limit_s
        return stall_limit(environment) if VARIABLES["stall_limit_s"] in environment else START_LIMIT_S


VARIABLES = {
    "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "torus_allreduce": "HOROVOD_TORUS_ALLREDUCE",
    "autotune": "HOROVOD_AUTOTUNE",
    "timeline": "HOROVOD_TIMELINE",
    "stall_limit_s": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
}


def stall_limit(environment: Mapping[str, str]) -> float:
    """Return for how many seconds a rank may wait for the others, 0: for ever; call `HorovodConfig.apply` before."""
    text = environment["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is {text!r}: expected a number of seconds.") from None


@contextmanager
def told_the_longest(environment: MutableMapping[str, str], limits: Sequence[float]) -> Iterator[None]:
    """Tell Horovod, which starts in this block, the longest of the limits; 0: none.

    Under MPI, Horovod watches waits by itself, with one limit for the whole run. The others are the watchdog's.
    """
    name = VARIABLES["stall_limit_s"]
    before = environment[name]
    environment[name] = str(math.ceil(max(limits)) if all(limits) else 0)
    try:
        yield
    finally:
        environment[name] = before


def _set_variable(environment: MutableMapping[str, str], name: str, value: float | str, *, option: str) -> None:
    """Set a variable; ValueError if the environment already has another value for it."""
    present = environment.setdefault(name, str(value))
    if not _same(present, value):
        raise ValueError(
            f"--horovod.{option} means {name}={value}, and the environment has {present}: unset one of them."
        )


def _same(present: str, value: float | str) -> bool:
    try:
        return present == value or float(present) == float(value)
    except ValueError:
        return False
