"""The processes of a run: how many there are, what they exchange, how they end together.

`HorovodRanks` (horovod.py) and `TorchRanks` (torch_distributed.py) are started by a launcher, `Single` (single.py)
needs none; `session` chooses. Every collective has a name, because Horovod's unnamed ones hang after uneven work; and
all ranks begin them in the same order, by which torch matches them. tests/mpi has a test of each.
"""

import faulthandler
import logging
import os
import socket
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.launch.cores import Cores, share_of_cores
from largebatch.launch.driver import device_of
from largebatch.launch.parents import Process, end_stopped, this_process
from largebatch.process.background import in_background
from largebatch.ranks import replicas
from largebatch.ranks.record import Record, recorded
from largebatch.ranks.reduction import Compression, Reduced, refuse_irreducible
from largebatch.ranks.sending import TYPES, Narrow, Unchanged
from largebatch.ranks.stop_points import StopPoints
from largebatch.ranks.stopped import Stopped, by_rank, sentence_of
from largebatch.ranks.watchdog import Mark, Watchdog

logger = logging.getLogger(__name__)
T = TypeVar("T")
Among = Literal["all", "data", "aside"]

GRACE_S = 3  # for the other ranks, which give up soon after, to report it, too
BEAT_S = 5.0  # rank 0 tells the others this often that it goes on with a long piece of work
MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 200e-6  # between two looks at a collective; each pause is twice the one before
COLLECTIVES = ("start_allreduce", "broadcast_object", "allgather", "allgather_object", "broadcast_tensors")
COMPARED = 16  # the ranks compare so many batches of `micro_batches`, and then one of so many


class Ranks(ABC):
    """Rank, size and collectives of one process. Every collective has a name, the same on all ranks.

    If the model is divided among model_size ranks, rank = data_rank × model_size + model_rank. Gradients are reduced,
    and tensors broadcast and gathered, among the data_size ranks that hold the same part of the model; all other
    collectives span all ranks.
    """

    launcher = "python"
    kind = "one process"
    rank = data_rank = model_rank = local_rank = 0
    size = data_size = model_size = local_size = 1
    cores: Cores
    num_cores: float  # how many cores' worth of time this rank has
    processes: Sequence[Process | None] = ()  # of all ranks, if they are known
    failures: tuple[type[Exception], ...] = ()  # what is raised here because another rank has failed

    def __init_subclass__(cls) -> None:
        for name in {*COLLECTIVES} & vars(cls).keys():
            setattr(cls, name, recorded(vars(cls)[name]))

    def __init__(self, *, stall_limit_s: float = 0.0, hang_limit_s: float, start_limit_s: float | None = None) -> None:
        """Begin to watch that this rank goes on. A limit of 0: none."""
        self.stall_limit_s, self.hang_limit_s = stall_limit_s, hang_limit_s
        self.is_open = False
        self.columns = 0  # a digest of what `micro_batches` shared last
        self._shared = 0  # the batches that it has shared since the last `wrap`
        self._closing: list[Callable[[], None]] = []
        self._parent = os.getppid()
        self._watchdog = Watchdog(stall_limit_s, hang_limit_s, self._give_up, start_limit_s=start_limit_s)
        self.record = Record(self._watchdog)
        self._points: StopPoints | None = None

    def device(self, kind: str = "auto") -> torch.device:
        """Return the device of this rank: the CPU, the GPU with the number of the local rank, or the only GPU.

        ValueError if there is a GPU that torch does not see, unless kind is cpu.
        """
        return device_of(kind, local_rank=self.local_rank, local_size=self.local_size)

    def progress(self, phase: str = "") -> None:
        """Tell the watchdog that this rank goes on. phase: what it does next; empty: as before.

        After the first call, a rank without progress for --horovod.hang_limit_s is ended. Collectives and blocks of
        `together` are progress, too.
        """
        self._watchdog.progress(phase or self._watchdog.phase)

    def started(self) -> None:
        """Tell the watchdog that the start is over; so does the first reduction of gradients.

        Then a rank waits for the others for --horovod.stall_limit_s, no longer for --horovod.start_limit_s.
        """
        self._watchdog.started()

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Let the watchdog limit the time of a block, which waits for the other ranks in this collective."""
        return self._watchdog.waiting(name)

    @property
    def waited_s(self) -> float:
        """The time that this rank has waited for others so far."""
        return self._watchdog.waited_s

    # -- collectives -------------------------------------------------------------------------------------------

    @abstractmethod
    def start_allreduce(self, tensor: Tensor, *, name: str, among: Among = "all", largest: bool = False) -> Any:
        """Begin to sum over ranks; return a handle for `finish`. Other collectives may come in between.

        among: all ranks; data: those with the same part of the model; aside: all, for the one other thread that calls
        this beside the main thread. largest: take the largest value instead.
        """

    @abstractmethod
    def finish(self, handle: Any, *, pause_s: float | None = None) -> Tensor:
        """Return a new tensor with the sum; the caller limits the time. pause_s: seconds between two looks."""

    @abstractmethod
    def broadcast_object(self, value: Any, *, name: str) -> Any:
        """Return rank 0's picklable value."""

    @abstractmethod
    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        """Return the picklable values of all ranks, in rank order."""

    @abstractmethod
    def allgather(self, tensor: Tensor, *, sizes: Sequence[int], name: str) -> Tensor:
        """Return the 1-d tensors of all data ranks, which have these sizes, one behind the other."""

    @abstractmethod
    def broadcast_tensors(self, tensors: dict[str, Tensor], *, name: str) -> None:
        """Overwrite tensors in place by those of data rank 0 for the same part of the model (rank 0 if it is whole).

        Names and shapes must agree on these ranks.
        """

    def allreduce(self, tensor: Tensor, *, name: str, among: Among = "all") -> Tensor:
        """Return the sum over ranks, a new tensor of the same shape."""
        with self._watchdog.waiting(name):
            return self.finish(self.start_allreduce(tensor, name=name, among=among))

    def finish_allreduce(self, handle: Any) -> Tensor:
        """Return the sum over ranks of the tensors given to `start_allreduce`."""
        with self._watchdog.waiting("an allreduce begun before"):
            return self.finish(handle)

    def barrier(self, *, name: str) -> None:
        """Wait until every rank has called this."""
        self.allreduce(torch.zeros(1), name=name)

    def from_rank_0(self, work: Callable[[], T], *, phase: str) -> T:
        """Return the picklable result of `work`, which only rank 0 calls; if it fails, all ranks raise Stopped.

        Every rank calls this. `work` has no collectives, calls `progress`, and may take longer than a rank waits for
        the others: meanwhile rank 0 tells them that it goes on.
        """
        return _of_rank_0(self, self._watchdog, work, phase)

    def broadcast_state(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make model and optimizer equal to rank 0's (see `broadcast_tensors`) without taking a step.

        The optimizer's state must exist on every rank (`optim.init_state`).
        """
        replicas.broadcast_state(self, model, optimizer)

    def broadcast_model(self, model: nn.Module) -> None:
        """Make parameters and all buffers equal to rank 0's (see `broadcast_tensors`)."""
        self.broadcast_tensors({**dict(model.named_parameters()), **dict(model.named_buffers())}, name="state/model")

    # -- the step ----------------------------------------------------------------------------------------------

    def wrap(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        passes: int = 1,
        compression: Compression = "none",
        watch: bool = True,
    ) -> Reduced:
        """Return an optimizer whose gradients are summed over `passes` and averaged over the data ranks.

        Every rank calls it, and gets rank 0's weights, buffers, options and optimizer state. In each step the ranks
        compare the options of the param groups and average the statistics of batch norm. They compare weights and state
        after 1, 2, 4, ... 1024 steps, then after each 1024. All ranks raise Stopped if something differs.
        watch: False for a caller that does all this by itself; always False for a model that ranks share. The ranks
        compare the options all the same.
        compression: the type in which gradients are sent. With fp16, train with an enabled GradScaler: without one,
        small gradients lose digits.
        ValueError for parameters that cannot be reduced.
        """
        watch = watch and self.model_size == 1
        refuse_irreducible(optimizer, model, passes)
        sending = Unchanged() if compression == "none" else Narrow(self.data_size, TYPES[compression])
        wrapped = self._mixed(optimizer, model, passes, sending)
        wrapped.take_over(optimizer, model, self, passes=passes, sending=sending, watch=watch)
        self._shared = 0
        if watch:
            replicas.share(self, model, wrapped)
            if choose := getattr(wrapped, "choose_impl", None):  # of LAMB
                choose(lambda able: all(self.allgather_object(able, name="wrap/able")))
        return wrapped

    @abstractmethod
    def _mixed(self, optimizer: Optimizer, model: nn.Module, passes: int, sending: Unchanged) -> Reduced:
        """Return an instance of a class of `Reduced` and this optimizer's, which can send to the data ranks."""

    def micro_batches(self, *columns: Any, passes: int = 1) -> Iterator[tuple[Any, ...]]:
        """Return the parts of a global batch that this data rank computes, each with the weight of its mean loss.

            for images, labels, weight in comm.micro_batches(images, labels, passes=4):
                (weight * loss(model(images), labels)).backward()

        columns: the same on all ranks, equally long, and made to be sliced: tensors, lists, indices of samples; or a
        dict of such. The ranks compare labels and indices in the first steps, then now and then.
        passes: those of `wrap`; a rank gets fewer parts if the batch is shorter than passes × ranks. The gradients,
        summed over the passes and averaged over the ranks, are those of the mean loss of the whole batch.
        What torch draws for a part, such as dropout, depends on the part, not on the rank; afterwards all ranks go on
        with the same random numbers.
        """
        length = replicas.common_length(columns, passes)
        if self._shared < COMPARED or self._shared % COMPARED == 0:
            self.columns = replicas.digest_of_columns(columns)
        self._shared += 1
        return replicas.parts_of(self, columns, length, passes * self.data_size)

    # -- the end -----------------------------------------------------------------------------------------------

    @contextmanager
    def together(self, phase: str) -> Iterator[None]:
        """Run a block without collectives. If it fails on any rank, all ranks raise Stopped with the causes by rank."""
        cause = None
        if self._watchdog.phase:
            self._watchdog.progress(phase)
        try:
            yield
        except Exception as error:
            cause = sentence_of(error)
            logger.debug("%s", traceback.format_exc())
        causes = self.allgather_object(cause, name=f"together/{phase}")
        if any(causes):
            raise Stopped(by_rank(causes, phase))

    def abort(self, code: int = 1) -> None:
        """End every process of the run now."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._end_stopped_without_launcher()
        os._exit(code)  # the other ranks see the lost connection, and the launcher ends them

    def _introduce(self) -> None:
        """Tell the other ranks the cores and the process of this one. A collective."""
        host = socket.gethostname()
        everyone = self.allgather_object((host, self.cores, this_process()), name="cores")
        self.processes = [process for _, _, process in everyone]
        self.num_cores = share_of_cores(self.cores, [cores for theirs, cores, _ in everyone if theirs == host])

    def _end_stopped_without_launcher(self) -> None:
        if os.getppid() != self._parent:  # else the launcher ends them
            end_stopped(self.processes)

    def stop_points(self, requests: Callable[[], Sequence[bool]]) -> StopPoints:
        """Return points at which all ranks can leave their work together; every rank calls this."""
        self._points = StopPoints(requests, self)
        self.before_shutdown(self._points.close)
        return self._points

    def before_shutdown(self, close: Callable[[], None]) -> None:
        """Register a function that this rank calls when all ranks are done, before they part."""
        self._closing.append(close)

    def shutdown(self) -> None:
        """Wait for every rank, then part from them."""
        self.barrier(name="shutdown")
        for close in self._closing:
            close()
        self._part()
        self.is_open = False
        self._watchdog.stop()

    def _part(self) -> None:
        """Part from the others, while the watchdog still looks."""

    def _give_up(self, mark: Mark) -> None:
        who = f"rank {self.rank} of {self.size}" if self.is_open else "a rank"
        with suppress(Exception):  # this rank must end
            seen = f"largebatch: {self._points.compare(mark.began)}\n" if self._points else ""
            newest = self.record.lines()
            sys.stderr.write(seen + f"largebatch: the newest collectives of {who}:\n{newest}" * bool(newest))
        sys.stderr.write(f"largebatch: {who} on {socket.gethostname()} {self._watchdog.explain(mark)}\n")
        faulthandler.dump_traceback()
        sys.stderr.flush()
        time.sleep(GRACE_S)
        self.abort(1)


def sleep_until(done: Callable[[], bool], *, pause_s: float | None = None) -> None:
    """Look again and again, and sleep in between for pause_s; None: short, then longer."""
    pause = pause_s or MIN_PAUSE_S
    while not done():
        time.sleep(pause)
        pause = pause_s or min(2 * pause, MAX_PAUSE_S)


def _of_rank_0(comm: Ranks, watchdog: Watchdog, work: Callable[[], T], phase: str) -> T:
    if watchdog.phase:
        watchdog.progress(phase)
    result, cause, done = None, "", False
    task = in_background(work, name="largebatch-work") if comm.rank == 0 else None
    while not done:
        mine = torch.tensor(float(bool(task and wait([task], BEAT_S).done)))
        with watchdog.waiting(phase, is_progress=task is None):
            done = bool(comm.finish(comm.start_allreduce(mine, name=f"{phase}/done")))
    try:
        result = task.result() if task else None
    except Exception as error:
        cause = sentence_of(error)
        logger.debug("%s", traceback.format_exc())
    cause = comm.broadcast_object(cause, name=f"{phase}/cause")
    if cause:
        raise Stopped(cause)
    return cast(T, comm.broadcast_object(result, name=f"{phase}/result"))
