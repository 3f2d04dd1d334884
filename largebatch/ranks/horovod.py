"""The ranks that a launcher has started, which speak by Horovod.

Horovod's own blocking calls busy-wait: they starve the loader, Horovod's own thread, and the rank that everyone waits
for. `finish` polls and sleeps. Two helpers of Horovod's are avoided: `broadcast_optimizer_state` takes a real step to
create state, and `broadcast_parameters` refuses ordinary arguments.
"""

import ctypes
import faulthandler
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.torch
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from largebatch.config.horovod import HorovodConfig, stall_limit, told_the_longest
from largebatch.config.parallel import WHOLE, Shape
from largebatch.launch import launcher, meeting
from largebatch.launch.cores import cores_of_process, yields
from largebatch.launch.home import set_missing_home
from largebatch.launch.parents import end_hung_mpirun
from largebatch.process.installer import foreign_gpu, install_command
from largebatch.ranks.mistakes import Mistake
from largebatch.ranks.ranks import Among, Ranks, sleep_until
from largebatch.ranks.reduction import Reduced
from largebatch.ranks.replicas import parameters_of
from largebatch.ranks.sending import Unchanged

hvd: Any = horovod.torch
END_S = 10
LOOK_S = 0.1  # between two looks whether MPI's launcher is there
# Gloo's controller sends 2 (n - 1) messages one after the other before each reduction: 6 to 20 ms with 200 ranks.
MOST_RANKS_BY_GLOO = 32
PIECE = 2**30  # bytes in one message: MPI counts them in 31 bits
# What Horovod can send; all other types are sent as bytes.
TYPES = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}


class HorovodRanks(Ranks):
    """The ranks of one launch. If `shape` divides the model, each part has a process set of Horovod's."""

    kind = "Horovod"
    failures = (hvd.HorovodInternalError,)

    def __init__(
        self, *, deterministic: bool = False, horovod: HorovodConfig | None = None, shape: Shape = WHOLE
    ) -> None:
        """Start Horovod. deterministic: reduce each tensor by itself, so that sums repeat to the last bit.

        ValueError for settings or launchers that contradict each other; RuntimeError if ranks do not come, or not those
        of the launcher.
        """
        on_gpus = bool(hvd.nccl_built()) and torch.cuda.is_available()
        horovod = horovod or HorovodConfig()
        start_limit_s = horovod.start_limit(os.environ)
        horovod.apply(os.environ, deterministic=deterministic, on_gpus=on_gpus)
        launch = launcher.recognise(os.environ)
        self._wrapped = 0  # optimizers
        self.launcher = launch.launcher  # Horovod's variables, which are set from here on, would look like a second one
        shape.data_size(launch.size)  # raises before any rank waits for another
        set_missing_home(os.environ)
        _refuse_controller(launch)
        self.cores = cores_of_process()
        if launch.local_size:  # mpi_scripts/bind.sh, which knows the cores of each rank, has set the variable already
            os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", str(int(yields(self.cores, launch.local_size))))
        stall_limit_s = stall_limit(os.environ)
        super().__init__(
            stall_limit_s=stall_limit_s, hang_limit_s=horovod.hang_limit_s, start_limit_s=start_limit_s
        )
        with self._watchdog.waiting("start"), told_the_longest(os.environ, [start_limit_s, stall_limit_s]):
            data_sets = [hvd.ProcessSet(range(rank, launch.size, shape.size)) for rank in range(shape.size)]
            hvd.init(process_sets=data_sets if shape.size > 1 else None)
        self.is_open = True
        self.rank, self.size, self.model_size = hvd.rank(), hvd.size(), shape.size
        self.data_rank, self.model_rank = divmod(self.rank, shape.size)
        self.data_size = self.size // shape.size
        self._data_set = data_sets[self.model_rank] if shape.size > 1 else hvd.global_process_set
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self._refuse_mismatch(launch)
        self._introduce()
        if hvd.mpi_enabled():
            threading.Thread(target=self._watch_launcher, name="largebatch-launcher", daemon=True).start()

    def _watch_launcher(self) -> None:
        """If MPI's launcher is gone, end this host's stopped ranks: MPI ends this one in a second."""
        while self.is_open:
            time.sleep(LOOK_S)
            self._end_stopped_without_launcher()

    def _refuse_mismatch(self, launch: launcher.Launch) -> None:
        """Raise RuntimeError on all ranks if one has another place than its launcher announced."""
        here = {"rank": self.rank, "size": self.size, "local_rank": self.local_rank, "local_size": self.local_size}
        causes = self.allgather_object(launcher.mismatch(launch, **here), name="launch")
        if any(causes):
            raise RuntimeError(next(filter(None, causes)))

    def device(self, kind: str = "auto") -> torch.device:
        device = super().device(kind)
        if device.type == "cuda":
            if not hvd.nccl_built():
                raise ValueError(
                    "Horovod was built without NCCL and cannot reduce gradients on a GPU: build it anew with "
                    f"`{install_command('--force', settings='OPERATIONS=nccl')}`, or set --run.device cpu."
                )
            _refuse_foreign_gpu(device)
        return device

    # -- collectives -------------------------------------------------------------------------------------------

    def start_allreduce(self, tensor: Tensor, *, name: str, among: Among = "all", largest: bool = False) -> int:
        ranks = self._data_set if among == "data" else hvd.global_process_set
        operation = hvd.Max if largest else hvd.Sum
        handle: int = hvd.allreduce_async(tensor, name=name, op=operation, process_set=ranks)
        return handle

    def finish(self, handle: int, *, pause_s: float | None = None) -> Tensor:
        result: Tensor = finish(handle, pause_s=pause_s)
        return result

    def broadcast_object(self, value: Any, *, name: str) -> Any:
        mine = _pickled(value if self.rank == 0 else None)
        with self._watchdog.waiting(name):
            size = finish(hvd.broadcast_async(torch.tensor(len(mine)), root_rank=0, name=f"{name}/size"))
            payload = mine if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            for piece in payload.split(PIECE):
                finish(hvd.broadcast_async_(piece, root_rank=0, name=f"{name}/bytes"))
        return value if self.rank == 0 else pickle.loads(payload.numpy().data)

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        mine = _pickled(value)
        with self._watchdog.waiting(name):
            sizes = finish(hvd.allgather_async(torch.tensor([len(mine)]), name=f"{name}/sizes"))
            payloads = finish(hvd.allgather_async(mine, name=f"{name}/bytes"))
        return [pickle.loads(payload.numpy().data) for payload in payloads.split(sizes.tolist())]

    def allgather(self, tensor: Tensor, *, sizes: Sequence[int], name: str) -> Tensor:
        with self._watchdog.waiting(name):
            whole: Tensor = finish(hvd.allgather_async(tensor, name=name, process_set=self._data_set))
        return whole

    def broadcast_tensors(self, tensors: dict[str, Tensor], *, name: str) -> None:
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

    def _mixed(self, optimizer: Optimizer, model: nn.Module, passes: int, sending: Unchanged) -> Reduced:
        self._wrapped += 1
        # Two models, as of a GAN, may have equal names, and Horovod refuses to send two tensors of one name at a time.
        prefix = f"{self._wrapped}/" if self._wrapped > 1 else ""
        return distribute(optimizer, model, prefix, passes=passes, sending=sending, data_set=self._data_set)

    # -- the end -----------------------------------------------------------------------------------------------

    def abort(self, code: int = 1) -> None:
        end_hung_mpirun(self._parent)
        faulthandler.dump_traceback_later(END_S, exit=True)  # MPI's Abort hangs if mpirun does
        # Under Gloo the import of mpi4py.MPI would start MPI on this rank alone. A single rank has nobody else to end.
        if hvd.is_initialized() and hvd.mpi_enabled() and hvd.size() > 1:
            import mpi4py

            mpi4py.rc.initialize = False
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(code)
        super().abort(code)

    def _part(self) -> None:
        with self._watchdog.waiting("shutdown"):
            hvd.shutdown()


def finish(handle: int, *, pause_s: float | None = None) -> Any:
    """Sleep until a collective is done; return its result."""
    sleep_until(lambda: bool(hvd.poll(handle)), pause_s=pause_s)
    return hvd.synchronize(handle)


class ReducedByHorovod(Reduced):
    """Mixed in before Horovod's DistributedOptimizer, which sends the buckets."""

    # Horovod's: its handle, and the gradients into which `decompress` writes
    _grouped_allreduce_grad_async: Callable[[Sequence[nn.Parameter]], tuple[int, Sequence[Tensor]]]

    def _send(self, bucket: Sequence[nn.Parameter]) -> Any:
        return self._grouped_allreduce_grad_async(bucket)

    def _receive(self, sent: Any) -> None:
        handle, gradients = sent
        for received, gradient in zip(finish(handle), gradients):
            self.sending.decompress(received, gradient)


class _Parameters(Optimizer):
    """An optimizer that Horovod can make anew from the groups alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def distribute(
    optimizer: Optimizer, model: nn.Module, prefix: str, *, passes: int, sending: Unchanged, data_set: Any
) -> ReducedByHorovod:
    """Return Horovod's optimizer with our methods and those of `optimizer`; it averages over `data_set`."""
    if sending.dtype == torch.bfloat16:
        raise Mistake(
            "Horovod does not add numbers in bf16: start the ranks with torchrun, or with --run.ranks torch, or send "
            "the gradients with --run.compression fp16."
        )
    with _without_gradients(model):  # Horovod's own hooks could not be removed again
        distributed: Any = hvd.DistributedOptimizer(
            _Parameters(parameters_of(optimizer)),
            named_parameters=[(prefix + name, parameter) for name, parameter in model.named_parameters()],
            backward_passes_per_step=passes,
            compression=sending,
            op=hvd.Sum if sending.averages else hvd.Average,
            process_set=data_set,
        )
    kind = type(optimizer)
    distributed.__class__ = type(kind.__name__, (ReducedByHorovod, type(distributed), kind), {})
    reduced: ReducedByHorovod = distributed
    return reduced


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _refuse_controller(launch: launcher.Launch) -> None:
    """Raise ValueError if Horovod could not start, or only slowly, with the controller that is asked for."""
    controller = os.environ.get("HOROVOD_CONTROLLER", "").lower()
    if controller == "gloo" and launch.launcher in ("mpirun", "mpiexec") and launch.size > 1:
        raise ValueError(
            f"HOROVOD_CONTROLLER=gloo is set, but {launch.launcher} does not tell Gloo its ranks: unset it, or use "
            "`horovodrun --gloo`."
        )
    if launch.launcher != "horovodrun --gloo":
        return
    if launch.size > MOST_RANKS_BY_GLOO:
        raise ValueError(
            f"{launch.launcher} has started {launch.size} ranks that speak by Gloo, expected at most "
            f"{MOST_RANKS_BY_GLOO}: before each reduction Gloo sends {2 * (launch.size - 1)} messages one after the "
            "other; start the ranks with mpirun, horovodrun --mpi or `srun --mpi=pmix`, or with torchrun."
        )
    meeting.refuse_nameless([] if meeting.own_address() else [socket.gethostname()])


def mpi_version() -> str:
    """Return the version text of Horovod's MPI, without starting it; empty for a Horovod without MPI."""
    text = ctypes.create_string_buffer(8192)  # the longest MPI_MAX_LIBRARY_VERSION_STRING, MPICH's
    if hvd.mpi_built():
        ctypes.CDLL(hvd.mpi_lib_v2.__file__).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    return text.value.decode(errors="replace")


def speaks(environment: Mapping[str, str], mpi: str) -> bool:
    """Return whether an MPI can ask this srun for its rank. Open MPI would end the process if it cannot."""
    if environment.get("HOROVOD_CONTROLLER", "").lower() == "mpi":
        return True
    if launcher.is_slurm_pmix(environment):
        return mpi.startswith("Open MPI")
    return "PMI_FD" in environment and mpi.startswith("MPICH")  # srun --mpi=pmi2


def _refuse_foreign_gpu(device: torch.device) -> None:
    """Raise ValueError if Horovod's kernels do not run on the GPU: they fail silently, and the ranks drift apart."""
    capability = torch.cuda.get_device_capability(device)
    if listed := foreign_gpu(capability):
        own = "".join(map(str, capability))
        remedy = install_command("--force", settings=f"HOROVOD_BUILD_CUDA_CC_LIST={listed},{own} OPERATIONS=nccl")
        raise ValueError(
            f"Horovod's kernels were compiled for the architectures {listed}, and the GPU of {socket.gethostname()} is "
            f"{own}: build Horovod anew with `{remedy}`."
        )


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
