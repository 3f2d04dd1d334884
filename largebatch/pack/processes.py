"""The processes that share the work of one packing: those of an MPI launcher, or this one alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Iterator

from largebatch.launch.launcher import HOROVODRUN, MPI_LAUNCHERS, TORCHRUN

LOCAL_SIZES = tuple(launcher.local_size for launcher in MPI_LAUNCHERS)


@dataclasses.dataclass(frozen=True)
class World:
    """This process among those that share the work."""

    rank: int = 0
    size: int = 1
    barrier: Callable[[], None] = lambda: None


@contextlib.contextmanager
def mpi_world() -> Iterator[World]:
    """Join the other processes of an MPI launcher. An error in one process ends all of them."""
    names = [launcher.size for launcher in MPI_LAUNCHERS] + (["SLURM_NTASKS"] if "PMIX_RANK" in os.environ else [])
    announced = next((os.environ[name] for name in names if name in os.environ), "1")
    if announced == "1":
        _refuse_without_mpi()
        yield World()
        return
    from mpi4py import MPI  # the import starts MPI

    world = MPI.COMM_WORLD
    if world.size == 1:
        raise ValueError(
            f"The launcher announced {announced} processes, but mpi4py sees 1: use the launcher of its MPI."
        )
    try:
        yield World(world.rank, world.size, world.Barrier)
    except BaseException as error:
        cause = error if isinstance(error, (ValueError, OSError)) else traceback.format_exc()
        sys.stderr.write(f"rank {world.rank} of {world.size}: {cause}\n")
        sys.stderr.flush()
        world.Abort(1)


def _refuse_without_mpi() -> None:
    """Raise ValueError if a launcher without MPI started several processes: each would pack everything."""
    for variables in (TORCHRUN, HOROVODRUN):
        name, number = variables.size, os.environ.get(variables.size, "1")
        if number != "1":
            raise ValueError(
                f"{name}={number} says that {variables.launcher} started several processes, but pack shares "
                f"its work by MPI: start it with mpirun, or unset {name} to pack with one process."
            )


def cores_per_process() -> int:
    of_host = next((os.environ[name] for name in LOCAL_SIZES if name in os.environ), "1")
    return max(1, len(os.sched_getaffinity(0)) // int(of_host))
