"""The ranks that torch.distributed brings together, by NCCL on GPUs and Gloo elsewhere: no MPI, and nothing to build.

It matches the messages of a process group by their order, not by their name. So the gradients of each optimizer have a
group of their own, in which the buckets are sent in one order, and so has the thread of the stop points.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from largebatch.config.horovod import HorovodConfig, stall_limit
from largebatch.config.parallel import WHOLE, Shape
from largebatch.launch import meeting
from largebatch.launch.cores import cores_of_process
from largebatch.launch.launcher import recognise
from largebatch.ranks.buckets import SMALLEST
from largebatch.ranks.ranks import Among, Ranks, sleep_until
from largebatch.ranks.reduction import Reduced, mixed
from largebatch.ranks.sending import Unchanged


class RankLost(Exception):
    """Another rank has ended, or does not answer."""


class TorchRanks(Ranks):
    """The ranks of one launch."""

    kind = "torch.distributed"
    failures = (RankLost,)

    def __init__(
        self, *, deterministic: bool = False, horovod: HorovodConfig | None = None, shape: Shape = WHOLE
    ) -> None:
        """Start torch.distributed. ValueError and RuntimeError: see `meeting.meet`."""
        horovod = horovod or HorovodConfig()
        start_limit_s = horovod.start_limit(os.environ)
        horovod.apply(os.environ, deterministic=deterministic, on_gpus=False)
        launch = recognise(os.environ)
        self.launcher, self.rank, self.size, self.model_size = launch.launcher, launch.rank, launch.size, shape.size
        self.data_size = shape.data_size(launch.size)  # raises before any rank waits for another
        self.data_rank, self.model_rank = divmod(self.rank, shape.size)
        self.cores = cores_of_process()
        limits = stall_limit(os.environ), start_limit_s
        super().__init__(stall_limit_s=limits[0], hang_limit_s=horovod.hang_limit_s, start_limit_s=start_limit_s)
        store, places = meeting.meet(launch, os.environ, limit_s=start_limit_s)
        meeting.listen_nowhere_else(places, os.environ)
        with self._watchdog.waiting("start"):
            try:
                self._connect(store, shape, meeting.limit_of(max(limits) if all(limits) else 0))
                self._introduce()
            except (RuntimeError, RankLost) as error:
                raise RuntimeError(
                    f"The {self.size} ranks met, but cannot reach each other ({str(error).splitlines()[0]}): see that "
                    "no firewall is between their hosts, and that GLOO_SOCKET_IFNAME, if set, names their network."
                ) from None
        self._same_part = self._groups[0] if shape.size > 1 else None
        self.is_open = True
        here = [(place.host, place.node) for place in places]
        self.local_rank = here[: self.rank].count(here[self.rank]) if launch.local_rank is None else launch.local_rank
        self.local_size = launch.local_size or here.count(here[self.rank])

    def _connect(self, store: Any, shape: Shape, limit: timedelta) -> None:
        by_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        backend = "cpu:gloo,cuda:nccl" if by_nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
        self._aside = dist.new_group(backend="gloo", timeout=limit)
        table = np.arange(self.size).reshape(-1, shape.size).T.tolist()
        self._new_group = lambda: dist.new_subgroups_by_enumeration(table, timeout=limit)[0]
        self._groups, self._users = [self._new_group()], list[Any]()  # of gradients, and the optimizers that use them
        for group in (None, self._aside, *self._groups):  # a rank whose place a stranger has taken would show now
            dist.all_reduce(torch.zeros(1), group=group)

    def device(self, kind: str = "auto") -> torch.device:
        device = super().device(kind)
        if device.type == "cuda" and not dist.is_nccl_available():
            raise ValueError(
                f"torch {torch.__version__} was built without NCCL and cannot reduce gradients on a GPU: install "
                "PyTorch's own build, or set --run.device cpu."
            )
        return device

    # -- collectives -------------------------------------------------------------------------------------------

    def start_allreduce(self, tensor: Tensor, *, name: str, among: Among = "all", largest: bool = False) -> Any:
        group = {"all": None, "data": self._same_part, "aside": self._aside}[among]
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        with losing_ranks():
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            return dist.all_reduce(result, op=op, group=group, async_op=True), result

    def finish(self, handle: Any, *, pause_s: float | None = None) -> Tensor:
        work, result = handle
        _wait(work, pause_s=pause_s)
        return cast(Tensor, result)

    def broadcast_object(self, value: Any, *, name: str) -> Any:
        box = [value if self.rank == 0 else None]
        with self._watchdog.waiting(name), losing_ranks():
            dist.broadcast_object_list(box, src=0)
        return value if self.rank == 0 else box[0]

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        values = [None] * self.size
        with self._watchdog.waiting(name), losing_ranks():
            dist.all_gather_object(values, value)
        return values

    def allgather(self, tensor: Tensor, *, sizes: Sequence[int], name: str) -> Tensor:
        whole = tensor.new_empty(sum(sizes))
        parts = whole.split([*sizes])
        parts[self.data_rank].copy_(tensor)
        with self._watchdog.waiting(name), losing_ranks():  # Gloo's own allgather expects equal sizes.
            pieces = [(rank, part) for rank, part in enumerate(parts) if part.numel()]
            works = [dist.broadcast(p, group=self._same_part, group_src=rank, async_op=True) for rank, p in pieces]
            for work in works:
                _wait(work)
        return whole

    def broadcast_tensors(self, tensors: dict[str, Tensor], *, name: str) -> None:
        wholes = [tensor.detach().contiguous() for tensor in tensors.values()]  # copies of those that have gaps
        with self._watchdog.waiting(name), losing_ranks():
            for whole in wholes:
                dist.broadcast(whole.view(-1).view(torch.uint8), group=self._same_part, group_src=0)
        for tensor, whole in zip(tensors.values(), wholes):
            if not tensor.is_contiguous():
                tensor.detach().copy_(whole)
        increment_version(tensors.values())  # torch.distributed does not tell autograd that they changed

    def _mixed(self, optimizer: Optimizer, model: nn.Module, passes: int, sending: Unchanged) -> Reduced:
        """Give it a process group that no optimizer of any rank uses: two would send their buckets in any order."""
        reduced = mixed(ReducedByTorch, optimizer)
        number = 0
        if self._users:
            used = torch.tensor([float(user() is not None) for user in self._users])
            number = [*self.allreduce(used, name="wrap/groups").tolist(), 0.0].index(0.0)
        if number == len(self._groups):
            self._groups.append(self._new_group())
        self._users[number : number + 1] = [weakref.ref(reduced)]
        reduced.group = self._groups[number]
        return reduced

    def _part(self) -> None:
        with self._watchdog.waiting("shutdown"):
            dist.destroy_process_group()


@contextmanager
def losing_ranks() -> Iterator[None]:
    """Raise RankLost for the RuntimeError with which torch.distributed reports it."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(str(error).splitlines()[0].partition(". ")[0]) from error


def _wait(work: Any, *, pause_s: float | None = None) -> None:
    sleep_until(work.is_completed, pause_s=pause_s)
    with losing_ranks():
        work.wait()


class ReducedByTorch(Reduced):
    """Sends large gradients as they are, and the small ones of a bucket in one message."""

    group: Any  # torch's ProcessGroup for its gradients

    def _complete(self, number: int) -> None:
        """Send all buckets in whose turn it is: a rank that lacks a gradient would send in another order."""
        ready, buckets = self.so_far.ready, self.trained.buckets
        while (following := len(self.so_far.sent)) < len(buckets) and ready.get(following) == len(buckets[following]):
            self._begin(following)

    def _send(self, bucket: Sequence[nn.Parameter]) -> Any:
        pairs = [self.sending.compress(cast(Tensor, parameter.grad)) for parameter in bucket]
        small: dict[torch.dtype, list[Tensor]] = {}
        for wire, _ in pairs:
            if wire.nbytes < SMALLEST:
                small.setdefault(wire.dtype, []).append(wire)
        joined = [(torch.cat([wire.view(-1) for wire in wires]), wires) for wires in small.values()]
        messages = [whole for whole, _ in joined] + [wire for wire, _ in pairs if wire.nbytes >= SMALLEST]
        with losing_ranks():
            works = [dist.all_reduce(message, group=self.group, async_op=True) for message in messages]
        return works, pairs, joined

    def _receive(self, sent: Any) -> None:
        works, pairs, joined = sent
        for work in works:
            _wait(work)
        for whole, wires in joined:
            parts = whole.split([wire.numel() for wire in wires])
            torch._foreach_copy_(wires, [part.view_as(wire) for part, wire in zip(parts, wires)])
        if not self.sending.averages:
            torch._foreach_div_([wire for wire, _ in pairs], self.comm.data_size)
        for wire, gradient in pairs:
            self.sending.decompress(wire, gradient)
