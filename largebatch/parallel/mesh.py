"""The ranks of a replica as a mesh: this rank's place on each axis, and the group of ranks along it.

The groups belong to torch.distributed; along the data axis `Ranks` still reduces. The axes are those of
config/parallel.py, "data", "model" (all ranks of the replica) and "job" (all ranks). No layer counts ranks.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from largebatch.config.parallel import Shape
from largebatch.launch import meeting
from largebatch.ranks import Ranks


@dataclass(frozen=True)
class Axis:
    """The ranks that share this rank's place on all other axes."""

    name: str
    size: int
    index: int  # of this rank, 0 .. size - 1
    ranks: tuple[int, ...]  # of the job, in the order of their places
    group: Any  # torch's ProcessGroup; None for an axis of one rank

    def __deepcopy__(self, memo: Any) -> "Axis":
        return self  # a copy of a model talks to the same ranks


class Mesh:
    """All axes of a job; torch.distributed has been started on all its ranks."""

    def __init__(self, shape: Shape, *, limit_s: float = 0) -> None:
        """Make the groups; every rank of the job calls this at the same place. limit_s: of a wait, 0: none."""
        self.shape, self._limit_s = shape, limit_s
        size, rank = dist.get_world_size(), dist.get_rank()
        sizes = {"data": shape.data_size(size)} | shape.sizes
        ranks = np.arange(size).reshape(*sizes.values())
        place = np.unravel_index(rank, ranks.shape)
        self.place = {name: int(index) for name, index in zip(sizes, place)}
        tables = {
            name: ranks.swapaxes(number, -1).reshape(-1, sizes[name]) for number, name in enumerate(sizes)
        }  # for each axis its groups of ranks: (number of groups, size)
        tables |= {"model": ranks.reshape(-1, shape.size), "job": ranks.reshape(1, -1)}
        self._groups: dict[Any, Any] = {}
        self._axes = {name: self._axis(name, table, rank) for name, table in tables.items()}

    def _axis(self, name: str, table: np.ndarray, rank: int) -> Axis:
        """Make one axis. Axes with the same ranks share a group, which costs threads or memory of a GPU."""
        key = frozenset(map(tuple, table.tolist()))
        if key not in self._groups:
            self._groups[key] = _new_group(table, meeting.limit_of(self._limit_s))
        (row,), (index,) = np.where(table == rank)
        return Axis(name, table.shape[1], int(index), tuple(map(int, table[row])), self._groups[key])

    def close(self) -> None:
        """Give the groups back; all ranks do so together, when no message is under way.

        The last mesh of a process need not.
        """
        for group in self._groups.values():
            if group not in (None, dist.group.WORLD):
                dist.destroy_process_group(group)
        self._groups.clear()

    def axis(self, name: str) -> Axis:
        return self._axes[name]

    def __deepcopy__(self, memo: Any) -> "Mesh":
        return self

    def places(self) -> list[dict[str, int]]:
        """The place of every rank of this replica, in the order of the axis "model"."""
        sizes = self.shape.sizes
        return [dict(zip(sizes, place)) for place in np.ndindex(*sizes.values())]

    def block(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """(index, number) of this rank's block in a dimension that is cut along `axes`, the coarsest first."""
        return block(self.shape.sizes, self.place, axes)


def block(sizes: dict[str, int], place: dict[str, int], axes: tuple[str, ...]) -> tuple[int, int]:
    """`Mesh.block` for any place."""
    index, number = 0, 1
    for name in axes:
        index, number = index * sizes[name] + place[name], number * sizes[name]
    return index, number


def _new_group(table: np.ndarray, limit: timedelta) -> Any:
    """Make all groups of a table (number of groups, size), and return this rank's; a collective of the job."""
    number, size = table.shape
    if size == 1:
        return None
    if number == 1:
        return dist.group.WORLD
    # torch's own limit would be half an hour.
    return dist.new_subgroups_by_enumeration(table.tolist(), timeout=limit)[0]


def start_torch_distributed(comm: Ranks, device: torch.device) -> None:
    """Start torch.distributed beside Horovod, if it is not running: gloo on CPUs, NCCL (with gloo beside it) on GPUs.

    It ends before Horovod does. If one rank fails, all raise.
    """
    if dist.is_initialized():
        return
    with comm.together("starting torch.distributed"):
        mine = meeting.place_here(os.environ)
    places = comm.allgather_object(mine, name="parallel/places")
    store = None
    with comm.together("starting torch.distributed"):
        host = meeting.listen_nowhere_else(places, os.environ)
        if comm.rank == 0:
            store = meeting.serve_store(host)
    port = comm.broadcast_object(store.port if store else None, name="parallel/port")
    store = store or dist.TCPStore(host, port, None, is_master=False)
    backend, limit = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", meeting.limit_of(comm.stall_limit_s)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, timeout=limit)
    comm.before_shutdown(_stop_torch_distributed)


def _stop_torch_distributed() -> None:
    """Leave torch.distributed once every rank is done; otherwise its threads may outlive Python and crash."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
