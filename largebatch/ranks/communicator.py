"""The processes of a run: how they start, what they exchange, how they end together.

The calls are the same for any number of ranks, including one. Two of Horovod's own helpers are avoided:
`broadcast_optimizer_state` takes a real step to create state, and `broadcast_parameters` refuses ordinary arguments.
Every collective has a name, because unnamed ones hang after uneven work. tests/mpi has a test of each.
"""

import faulthandler
import logging
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from largebatch.config.horovod import HorovodConfig, stall_limit, told_the_longest
from largebatch.config.parallel import WHOLE, Shape
from largebatch.files import Damaged
from largebatch.files.names import on_screen
from largebatch.launch import gloo_start, launcher
from largebatch.launch.cores import compiler_processes, cores_of_process, share_of_cores, yields
from largebatch.launch.driver import accept_cpu
from largebatch.launch.home import set_missing_home
from largebatch.launch.parents import Process, end_hung_mpirun, end_stopped, this_process
from largebatch.process.background import in_background
from largebatch.process.installer import foreign_gpu, install_command
from largebatch.ranks.fp16 import Fp16
from largebatch.ranks.horovod import distribute, finish, hvd
from largebatch.ranks.mistakes import WAIT_S, Mistake, report_mistakes
from largebatch.ranks.reduction import Compression, Reduced, parameters_of, refuse_irreducible
from largebatch.ranks.replicas import digest_of_columns, length_of, part_of, share
from largebatch.ranks.sending import Unchanged
from largebatch.ranks.stop_points import StopPoints
from largebatch.ranks.stopped import Stopped
from largebatch.ranks.watchdog import Mark, Watchdog

if TYPE_CHECKING:
    from largebatch.config import TrainConfig

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Ranks that give up began to wait within a step of each other; this gives each the time to report it.
GRACE_S = 3
END_S = 10
LOOK_S = 0.1  # between two looks whether MPI's launcher is there
BEAT_S = 5.0  # rank 0 tells the others this often that it goes on with a long piece of work
PIECE = 2**30  # bytes in one message: MPI counts them in 31 bits
LIBRARIES = ("site-packages", "dist-packages")  # folders of programs that are not the user's own
UNSEEDED = 2**32  # torch begins with a seed of 53 random bits, a program gives a smaller one
COMPARED = 16  # the ranks compare so many batches of `micro_batches`, and then one of so many
# What Horovod can send; all other types are sent as bytes.
TYPES = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}


class Communicator:
    """Rank, size and collectives of one process. Every collective has a name, the same on all ranks.

    If `shape` divides each copy of the model among model_size ranks, rank = data_rank × model_size + model_rank.
    Gradients are reduced, and tensors broadcast, among the data_size ranks that hold the same part of the model; all
    other collectives span all ranks.
    """

    in_this_process = ""  # "open" from the first Communicator on, "ended" after it

    def __init__(
        self, *, deterministic: bool = False, horovod: HorovodConfig | None = None, shape: Shape = WHOLE
    ) -> None:
        """Start Horovod. deterministic: reduce each tensor by itself, so that sums repeat to the last bit.

        torch's threads of all ranks of a host share its cores, unless OMP_NUM_THREADS is set; so do the processes with
        which torch compiles, unless TORCHINDUCTOR_COMPILE_THREADS is set.
        ValueError for settings, or launchers, that contradict each other; RuntimeError if Horovod sees other ranks than
        the launcher announced, if ranks do not come, or for a second Communicator in a process.
        """
        _refuse_second()
        on_gpus = bool(hvd.nccl_built()) and torch.cuda.is_available()
        horovod = horovod or HorovodConfig()
        start_limit_s = horovod.start_limit(os.environ)
        horovod.apply(os.environ, deterministic=deterministic, on_gpus=on_gpus)
        launch = launcher.recognise(os.environ)
        self.launcher = launch.launcher  # Horovod's variables, which are set from here on, would look like a second one
        shape.data_size(launch.size)  # raises before any rank waits for another
        set_missing_home(os.environ)
        mpi = gloo_start.mpi_version(hvd.mpi_lib_v2.__file__) if hvd.mpi_built() else ""
        self.cores = cores_of_process()
        if launch.local_size:  # mpi_scripts/bind.sh, which knows the cores of each rank, has set the variable already
            os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", str(int(yields(self.cores, launch.local_size))))
        self._rendezvous = gloo_start.prepare(launch, os.environ, mpi=mpi)
        self.stall_limit_s = stall_limit(os.environ)  # 0: no limit
        self.hang_limit_s = horovod.hang_limit_s  # 0: no limit
        self._parent = os.getppid()
        self._processes: list[Process | None] = []  # of all ranks
        self._watchdog = Watchdog(
            self.stall_limit_s, self.hang_limit_s, self._give_up, start_limit_s=start_limit_s
        )
        with self._watchdog.waiting("start"), told_the_longest(os.environ, [start_limit_s, self.stall_limit_s]):
            data_sets = [hvd.ProcessSet(range(rank, launch.size, shape.size)) for rank in range(shape.size)]
            hvd.init(process_sets=data_sets if shape.size > 1 else None)
        Communicator.in_this_process = "open"
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.model_size = shape.size
        self.data_rank, self.model_rank = divmod(self.rank, shape.size)
        self.data_size = self.size // shape.size
        self._data_set = data_sets[self.model_rank] if shape.size > 1 else hvd.global_process_set
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self._closing: list[Callable[[], None]] = []
        self._shared = 0  # the batches that `micro_batches` has shared since the last `wrap`
        self.columns = 0  # a digest of what it shared last
        self._refuse_mismatch(launch)
        self.num_cores = self._share_cores()
        if hvd.mpi_enabled():
            threading.Thread(target=self._watch_launcher, name="largebatch-launcher", daemon=True).start()
        if "OMP_NUM_THREADS" not in os.environ:  # torch of each rank would use all cores of the host
            torch.set_num_threads(max(1, int(self.num_cores)))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compiler_processes(self.num_cores)))

    def _share_cores(self) -> float:
        """Return how many cores' worth of time this rank has, as all ranks of its host share its cores."""
        host = socket.gethostname()
        everyone = self.allgather_object((host, self.cores, this_process()), name="cores")
        self._processes = [process for _, _, process in everyone]
        return share_of_cores(self.cores, [cores for theirs, cores, _ in everyone if theirs == host])

    def _watch_launcher(self) -> None:
        """If MPI's launcher is gone, end the ranks of this host that are stopped: MPI ends this one in a second."""
        while Communicator.in_this_process == "open":
            time.sleep(LOOK_S)
            self._end_stopped_without_launcher()

    def _end_stopped_without_launcher(self) -> None:
        if os.getppid() != self._parent:  # else the launcher ends them
            end_stopped(self._processes)

    def _refuse_mismatch(self, launch: launcher.Launch) -> None:
        """Raise RuntimeError, on all ranks that Horovod sees, if one has another place than its launcher announced."""
        here = {"rank": self.rank, "size": self.size, "local_rank": self.local_rank, "local_size": self.local_size}
        causes = self.allgather_object(launcher.mismatch(launch, **here), name="launch")
        if any(causes):
            raise RuntimeError(next(filter(None, causes)))

    def share_random_numbers(self) -> None:
        """Let torch, numpy and Python draw as on rank 0 from here on, so that all ranks shuffle alike.

        If the program has not seeded torch, its seed is 0, so that the run does not depend on the number of ranks.
        """
        if torch.initial_seed() >= UNSEEDED:
            torch.manual_seed(0)
        mine = torch.get_rng_state(), np.random.get_state(), random.getstate()
        of_torch, of_numpy, of_python = self.broadcast_object(mine, name="random numbers")
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)

    def device(self, kind: str = "auto") -> torch.device:
        """Return the device of this rank: the CPU, the GPU with the number of the local rank, or the only GPU.

        ValueError if there is a GPU that torch does not see, unless kind is cpu.
        """
        if kind != "cpu" and not torch.cuda.is_available():
            accept_cpu(kind, torch=torch.__version__, cuda=torch.version.cuda)
            kind = "cpu"
        if kind == "cpu":
            return torch.device("cpu")
        visible = torch.cuda.device_count()
        if visible < self.local_size and visible != 1:
            raise ValueError(
                f"{socket.gethostname()} has {visible} visible GPUs for {self.local_size} ranks: "
                "start fewer ranks per host, or set --run.device cpu."
            )
        if not hvd.nccl_built():
            raise ValueError(
                "Horovod was built without NCCL and cannot reduce gradients on a GPU: build it anew with "
                f"`{install_command('--force', settings='OPERATIONS=nccl')}`, or set --run.device cpu."
            )
        # A single visible GPU may be this rank's own, or that of all ranks of the host: placement.py finds out.
        number = self.local_rank if visible > 1 else 0
        _refuse_foreign_gpu(number)
        torch.cuda.set_device(number)
        return torch.device("cuda", number)

    def progress(self, phase: str = "") -> None:
        """Tell the watchdog that this rank goes on. phase: what it does next; empty: as before.

        From the first call on, a rank that makes no progress for --horovod.hang_limit_s is ended. Each collective and
        each block of `together` are progress, too.
        """
        self._watchdog.progress(phase or self._watchdog.phase)

    def started(self) -> None:
        """Tell the watchdog that the start is over; so does the first reduction of gradients.

        From now on, a rank waits for the others for --horovod.stall_limit_s, no longer for --horovod.start_limit_s.
        """
        self._watchdog.started()

    # -- collectives -------------------------------------------------------------------------------------------

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Let the watchdog limit the time of a block, which waits for the other ranks in this collective."""
        return self._watchdog.waiting(name)

    def allreduce(self, tensor: Tensor, *, name: str, among_data_ranks: bool = False) -> Tensor:
        """Return the sum over ranks, a new tensor of the same shape; over all, or those with the same part of a model.
        """
        with self._watchdog.waiting(name):
            result: Tensor = finish(self.start_allreduce(tensor, name=name, among_data_ranks=among_data_ranks))
        return result

    def start_allreduce(self, tensor: Tensor, *, name: str, among_data_ranks: bool = False) -> int:
        """Begin an allreduce and return a handle for `finish_allreduce`; other collectives may come in between."""
        ranks = self._data_set if among_data_ranks else hvd.global_process_set
        handle: int = hvd.allreduce_async(tensor, name=name, op=hvd.Sum, process_set=ranks)
        return handle

    def finish_allreduce(self, handle: int) -> Tensor:
        """Return the sum over ranks of the tensors given to `start_allreduce`."""
        with self._watchdog.waiting("an allreduce begun before"):
            result: Tensor = finish(handle)
        return result

    def broadcast_object(self, value: Any, *, name: str) -> Any:
        """Return rank 0's picklable value."""
        mine = _pickled(value if self.rank == 0 else None)
        with self._watchdog.waiting(name):
            size = finish(hvd.broadcast_async(torch.tensor(len(mine)), root_rank=0, name=f"{name}/size"))
            payload = mine if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            for piece in payload.split(PIECE):
                finish(hvd.broadcast_async_(piece, root_rank=0, name=f"{name}/bytes"))
        return value if self.rank == 0 else pickle.loads(payload.numpy().data)

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        """Return the picklable values of all ranks, in rank order."""
        mine = _pickled(value)
        with self._watchdog.waiting(name):
            sizes = finish(hvd.allgather_async(torch.tensor([len(mine)]), name=f"{name}/sizes"))
            payloads = finish(hvd.allgather_async(mine, name=f"{name}/bytes"))
        return [pickle.loads(payload.numpy().data) for payload in payloads.split(sizes.tolist())]

    def from_rank_0(self, work: Callable[[], T], *, phase: str) -> T:
        """Return the picklable result of `work`, which rank 0 does for all; if it fails, all ranks raise Stopped.

        It may take longer than a rank waits for the others: rank 0 does it in a thread, and tells them meanwhile that
        it goes on. `work` has no collectives, and calls `progress` as any long work.
        """
        if self._watchdog.phase:
            self._watchdog.progress(phase)
        result, cause, done = None, "", torch.zeros(1)
        task = in_background(work, name="largebatch-work") if self.rank == 0 else None
        while not done:
            if task:
                done[0] = bool(wait([task], BEAT_S).done)
            with self._watchdog.waiting(phase, is_progress=task is None):
                finish(hvd.broadcast_async_(done, root_rank=0, name=f"{phase}/done"))
        try:
            result = task.result() if task else None
        except Exception as error:
            cause = _sentence(error)
            logger.debug("%s", traceback.format_exc())
        cause = self.broadcast_object(cause, name=f"{phase}/cause")
        if cause:
            raise Stopped(cause)
        return cast(T, self.broadcast_object(result, name=f"{phase}/result"))

    def barrier(self, *, name: str) -> None:
        """Wait until every rank has called this."""
        self.allreduce(torch.zeros(1), name=name)

    def broadcast_tensors(self, tensors: dict[str, Tensor], *, name: str) -> None:
        """Overwrite tensors in place by those of data rank 0 for the same part of the model.

        If the model is not divided, data rank 0 is rank 0. Names and shapes must agree on these ranks.
        """
        handles, copies = [], []
        for key, tensor in tensors.items():
            whole = tensor.detach().contiguous()  # a copy, if the tensor has gaps or another order
            flat = whole.view(-1) if tensor.dtype in TYPES else whole.view(-1).view(torch.uint8)
            handles.append(
                hvd.broadcast_async_(
                    flat, root_rank=self.model_rank, name=f"{name}/{key}", process_set=self._data_set
                )
            )
            copies += [] if tensor.is_contiguous() else [(tensor.detach(), whole)]
        with self._watchdog.waiting(name):
            for handle in handles:
                finish(handle)
        for tensor, whole in copies:
            tensor.copy_(whole)
        increment_version(tensors.values())  # Horovod does not tell torch that they changed

    def broadcast_state(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make model and optimizer equal to rank 0's (see `broadcast_tensors`) without taking a step.

        The optimizer's state must exist on every rank (`optim.init_state`). Scalars travel as an object, tensors in
        place. Parameters come last, so that nothing before can change them.
        """
        scalars, tensors = _optimizer_parts(model, optimizer)
        self._refuse_other_state(tensors)
        scalars = self.broadcast_object(scalars, name="state/scalars")
        for group, values in zip(optimizer.param_groups, scalars["groups"]):
            group.update(values)
        for parameter, values in zip(parameters_of(optimizer), scalars["states"]):
            if values:
                optimizer.state[parameter].update(values)
        self.broadcast_tensors(tensors, name="state/optimizer")
        self.broadcast_model(model)

    def _refuse_other_state(self, tensors: dict[str, Tensor]) -> None:
        """Raise Stopped on all ranks if one has other tensors than the first rank with the same part of the model."""
        first: dict[int, set[str]] = {}
        all_names = self.allgather_object((self.model_rank, set(tensors)), name="state/names")
        for rank, (model_rank, names) in enumerate(all_names):
            differing = first.setdefault(model_rank, names) ^ names
            if differing:
                raise Stopped(
                    f"rank {rank} has other optimizer state than rank {model_rank}, which differ in {min(differing)}: "
                    "freeze the same parameters on all ranks before optim.init_state, as they were when it was saved."
                )

    def broadcast_model(self, model: nn.Module) -> None:
        """Make parameters and buffers equal to rank 0's (see `broadcast_tensors`), also those that are never saved."""
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
        compare the options of the param groups and average the statistics of batch norm. They compare weights and
        state after 1, 2, 4, ... 1024 steps, then after each 1024. All ranks raise Stopped if something differs.
        watch: False for a caller that does all this by itself, as with a model that ranks share, where it is always
        False; the options are compared all the same.
        compression: the type in which gradients are sent. With fp16, train with an enabled GradScaler: without one,
        small gradients lose digits.
        ValueError for parameters that cannot be reduced.
        """
        watch = watch and self.model_size == 1
        refuse_irreducible(optimizer, model, passes)
        sending = Fp16(self.data_size) if compression == "fp16" else Unchanged()
        wrapped = distribute(optimizer, model, passes=passes, sending=sending, data_set=self._data_set)
        wrapped.take_over(optimizer, model, self, passes=passes, sending=sending, watch=watch)
        self._shared = 0
        if watch:
            share(self, model, wrapped)
        return wrapped

    def micro_batches(self, *columns: Any, passes: int = 1) -> Iterator[tuple[Any, ...]]:
        """Return the parts of a global batch that this data rank computes, each with the weight of its mean loss.

            for images, labels, weight in comm.micro_batches(images, labels, passes=4):
                (weight * loss(model(images), labels)).backward()

        columns: the same on all ranks, equally long, and made to be sliced: tensors, lists, indices of samples; or a
        dict of such. The ranks compare labels and indices in the first steps, then now and then.
        passes: those of `wrap`; a rank gets fewer parts if the batch is shorter than passes × ranks. The gradients,
        summed over the passes and averaged over the ranks, are those of the mean loss of the whole batch.
        What torch draws for a part, such as dropout, depends on the part, not on the rank, and afterwards all ranks go
        on with the same random numbers.
        """
        lengths = [length_of(column) for column in columns]
        if not columns or len(set(lengths)) > 1 or passes < 1:
            raise Mistake(
                f"micro_batches got columns of the lengths {lengths} and passes={passes}: expected one column or more, "
                "of the same length, and at least one pass."
            )
        if self._shared < COMPARED or self._shared % COMPARED == 0:
            self.columns = digest_of_columns(columns)
        self._shared += 1
        return self._parts(columns, lengths[0], passes * self.data_size)

    def _parts(self, columns: tuple[Any, ...], length: int, parts: int) -> Iterator[tuple[Any, ...]]:
        seed = int(torch.randint(2**62, ()))  # all ranks draw it
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            for part in range(self.data_rank, parts, self.data_size):
                start, stop = length * part // parts, length * (part + 1) // parts
                if start < stop:  # the mean of no sample would be NaN
                    torch.default_generator.manual_seed(seed + part)
                    if devices:
                        torch.cuda.manual_seed(seed + part)
                    weight = (stop - start) * self.data_size / length
                    yield *(part_of(column, start, stop) for column in columns), weight

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
            cause = _sentence(error)
            logger.debug("%s", traceback.format_exc())
        causes = self.allgather_object(cause, name=f"together/{phase}")
        if any(causes):
            raise Stopped(_by_rank(causes, phase))

    def abort(self, code: int = 1) -> None:
        """End every process of the run now."""
        sys.stdout.flush()
        sys.stderr.flush()
        end_hung_mpirun(self._parent)
        faulthandler.dump_traceback_later(END_S, exit=True)  # MPI's Abort hangs if mpirun does
        # Under Gloo the import of mpi4py.MPI would start MPI on this rank alone. A single rank has nobody else to end.
        if hvd.is_initialized() and hvd.mpi_enabled() and hvd.size() > 1:
            import mpi4py

            mpi4py.rc.initialize = False
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(code)
        self._end_stopped_without_launcher()
        os._exit(code)  # under Gloo the other ranks see the lost connection, and the launcher ends them

    def stop_points(self, requests: Callable[[], Sequence[bool]]) -> StopPoints:
        """Return points at which all ranks can leave their work together; every rank calls this (stop_points.py)."""
        points = StopPoints(requests, self._watchdog)
        self.before_shutdown(points.close)
        return points

    def before_shutdown(self, close: Callable[[], None]) -> None:
        """Register a function that this rank calls when all ranks are done, before Horovod ends."""
        self._closing.append(close)

    def shutdown(self) -> None:
        """Wait for every rank, then end Horovod."""
        self.barrier(name="shutdown")
        for close in self._closing:
            close()
        with self._watchdog.waiting("shutdown"):
            hvd.shutdown()
        Communicator.in_this_process = "ended"
        self._rendezvous.close()
        self._watchdog.stop()

    def _give_up(self, mark: Mark) -> None:
        """End the run, because this rank waited too long for the others, or worked too long without progress."""
        who = f"rank {self.rank} of {self.size}" if hvd.is_initialized() else "a rank"
        if mark.waits:
            option = "stall_limit_s" if self._watchdog.start_limit_s is None else "start_limit_s"
            cause = (
                f"waited {self._watchdog.wait_limit_s:g} s for the others ({mark.what}): one that does not say so "
                f"hangs, or is lost. --horovod.{option} is the limit; this rank is here:"
            )
        else:
            cause = (
                f"made no progress for {self._watchdog.hang_limit_s:g} s ({mark.what}): it hangs, perhaps in a file "
                "system that does not answer. --horovod.hang_limit_s is the limit; this rank is here:"
            )
        sys.stderr.write(f"largebatch: {who} on {socket.gethostname()} {cause}\n")
        faulthandler.dump_traceback()
        sys.stderr.flush()
        time.sleep(GRACE_S)
        self.abort(1)


def _refuse_foreign_gpu(number: int) -> None:
    """Raise ValueError if Horovod's kernels do not run on the GPU: they fail silently, and the ranks drift apart."""
    capability = torch.cuda.get_device_capability(number)
    if listed := foreign_gpu(capability):
        own = "".join(map(str, capability))
        remedy = install_command("--force", settings=f"HOROVOD_BUILD_CUDA_CC_LIST={listed},{own} OPERATIONS=nccl")
        raise ValueError(
            f"Horovod's kernels were compiled for the architectures {listed}, and the GPU of {socket.gethostname()} is "
            f"{own}: build Horovod anew with `{remedy}`."
        )


def _refuse_second() -> None:
    """Raise RuntimeError if this process has, or had, a Communicator: MPI starts once in a process."""
    if Communicator.in_this_process == "open":
        raise RuntimeError("a session is open in this process: use its communicator for everything inside.")
    if Communicator.in_this_process == "ended":
        raise RuntimeError(
            "a session has ended in this process, and MPI cannot start again: put all work into one session(), or "
            "start another process."
        )


@contextmanager
def session(
    config: "TrainConfig | None" = None,
    *,
    deterministic: bool = False,
    horovod: HorovodConfig | None = None,
    shape: Shape = WHOLE,
) -> Iterator[Communicator]:
    """Start a Communicator for one program. Any failure ends all ranks with its cause and a non-zero exit code.

    The code is 2 for `Stopped` (raised by all ranks) and `Mistake` (a wrong call of the program), 75 for
    `StoppedEarly`, 130 for Ctrl-C, 1 for a failure of this rank alone. The program may end by sys.exit(); with a code
    other than 0 it ends all ranks. Random numbers begin alike on all ranks (`share_random_numbers`).
    config: that of `build_trainer`; it decides instead of the other options. A process has one session.
    """
    if config is not None:
        deterministic, horovod, shape = config.run.deterministic, config.horovod, config.parallel.shape()
    try:
        with report_mistakes():
            comm = Communicator(deterministic=deterministic, horovod=horovod, shape=shape)
    except RuntimeError as error:
        sys.exit(f"largebatch: {error}")
    try:
        comm.share_random_numbers()
        yield comm
    except Stopped as error:
        if comm.rank == 0:
            sys.stderr.write(f"largebatch: {on_screen(str(error))}\n")
        comm.shutdown()
        sys.exit(error.exit_code)
    except Mistake as mistake:
        if comm.rank:  # the program is the same on all ranks, so rank 0 says it for all, unless it is right there
            time.sleep(WAIT_S)
        where = _line_of_program(mistake)
        sys.stderr.write(f"largebatch: rank {comm.rank} of {comm.size} on {socket.gethostname()}, {where}: {mistake}\n")
        comm.abort(2)
    except SystemExit as error:
        if error.code:
            said = error.code if isinstance(error.code, str) else f"exits with code {error.code}"
            sys.stderr.write(f"largebatch: rank {comm.rank} of {comm.size} on {socket.gethostname()}: {said}\n")
            comm.abort(error.code if isinstance(error.code, int) else 1)
        comm.shutdown()
        raise
    except KeyboardInterrupt:
        sys.stderr.write(f"largebatch: rank {comm.rank} of {comm.size} on {socket.gethostname()}: ended by Ctrl-C\n")
        comm.abort(128 + signal.SIGINT)
    except BaseException as error:
        if isinstance(error, hvd.HorovodInternalError):
            cause = "stopped, because another rank failed"
        else:
            cause = str(error) if isinstance(error, Damaged) else traceback.format_exc()
        sys.stderr.write(f"largebatch: rank {comm.rank} of {comm.size} on {socket.gethostname()}: {cause}\n")
        comm.abort(1)
    comm.shutdown()


def _line_of_program(error: BaseException) -> str:
    """Return the innermost line of the user's own program in a traceback, as "FILE, line N"."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is that of `session`
    libraries = (os.path.dirname(os.path.dirname(__file__)), *(f"{os.sep}{name}{os.sep}" for name in LIBRARIES))
    own = [frame for frame in frames if not any(folder in frame.filename for folder in libraries)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else "in a step"


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _optimizer_parts(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split the optimizer's state into picklable scalars and named tensors."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for parameter in parameters_of(optimizer):
        state = optimizer.state.get(parameter, {})
        states.append({key: value for key, value in state.items() if not torch.is_tensor(value)})
        tensors |= {f"{names[parameter]}/{key}": value for key, value in state.items() if torch.is_tensor(value)}
    return {"groups": groups, "states": states}, tensors


def _sentence(error: Exception) -> str:
    """Return the message of a ValueError as it is; for any other error add its type and place."""
    if isinstance(error, ValueError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"


def _by_rank(causes: Sequence[str | None], phase: str) -> str:
    """Return each distinct cause once, with its ranks unless it is the same on all."""
    ranks: dict[str, list[int]] = {}
    for rank, cause in enumerate(causes):
        if cause:
            ranks.setdefault(cause, []).append(rank)
    lines = []
    for cause, where in ranks.items():
        place = "" if len(where) == len(causes) else f"rank {', '.join(map(str, where))} of {len(causes)}, {phase}: "
        lines.append(place + cause)
    return "\n".join(lines)
