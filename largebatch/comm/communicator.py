"""The processes of a run and what they exchange; the only file that imports Horovod.

The calls are the same at every size, one included. Horovod's own helpers are avoided where they surprise:
`broadcast_optimizer_state` takes a real step to create state, `broadcast_parameters` and the wrapper's
`zero_grad` refuse ordinary arguments, unnamed collectives hang after uneven work, parameters unfrozen after
wrapping are silently not reduced, frozen ones still are, as zeros that weight decay makes steps of, and a second
optimizer for the same model reduces each gradient twice. Each has its replacement here and a test in tests/mpi.
So have `synchronize` and all that block in it: they spin, and take the core from the loader, from Horovod's own thread
and from the rank that all wait for.
"""

import faulthandler
import logging
import os
import pickle
import socket
import sys
import time
import traceback
import types
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Iterable, Iterator, Literal, Mapping, Sequence

import horovod.torch as hvd
import torch
from horovod.torch import mpi_lib_v2
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from largebatch.comm import cores as affinity
from largebatch.comm import launcher
from largebatch.comm import preflight as agreement
from largebatch.comm.fp16 import Fp16
from largebatch.comm.watchdog import Watchdog
from largebatch.config.horovod import HorovodConfig, stall_limit
from largebatch.config.parallel import WHOLE, Shape

logger = logging.getLogger(__name__)

GRACE_S = 3  # ranks that give up waiting say so together, since they began to wait within a step of each other
MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 200e-6  # between two looks at a collective, doubled from look to look
AS_BYTES = (torch.bool, torch.bfloat16)  # not among Horovod's types; sent as their bytes


class Stopped(Exception):
    """Raised on every rank alike when one of them could not go on; the causes are already in the message."""

    exit_code = 2


class StoppedEarly(Stopped):
    """Raised on every rank alike when a run was told to end before it is complete, and can be resumed."""

    exit_code = os.EX_TEMPFAIL  # 75


class Communicator:
    """Rank, size and collectives of one process. Every collective has a name, the same on all ranks.

    Where `shape` puts model_size ranks to a copy of the model, rank = data_rank × model_size + model_rank. Gradients
    are reduced, and tensors broadcast, over the data_size ranks that hold the same part of it; all else goes over all.
    """

    def __init__(
        self, *, deterministic: bool = False, horovod: HorovodConfig | None = None, shape: Shape = WHOLE
    ) -> None:
        """Start Horovod. deterministic: reduce each tensor by itself, so that sums repeat to the last bit.

        The cores of a host are shared among its ranks, unless OMP_NUM_THREADS says otherwise.
        ValueError for settings, or launchers, that contradict each other; RuntimeError if Horovod sees other ranks than
        the launcher announced, or they do not come.
        """
        on_gpus = torch.cuda.is_available() and bool(hvd.nccl_built())
        (horovod or HorovodConfig()).apply(os.environ, deterministic=deterministic, on_gpus=on_gpus)
        launch = launcher.recognise(os.environ)
        shape.data_size(launch.size)  # refused before a rank waits for another
        mpi = launcher.mpi_version(mpi_lib_v2.__file__) if hvd.mpi_built() else ""
        self._rendezvous = launcher.prepare(launch, os.environ, mpi=mpi)
        self.stall_limit_s = stall_limit(os.environ)  # 0: none
        self._watchdog = Watchdog(self.stall_limit_s, self._give_up)
        with self._watchdog.waiting("start"):
            data_sets = [hvd.ProcessSet(range(rank, launch.size, shape.size)) for rank in range(shape.size)]
            hvd.init(process_sets=data_sets if shape.size > 1 else None)
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.model_size = shape.size
        self.data_rank, self.model_rank = divmod(self.rank, shape.size)
        self.data_size = self.size // shape.size
        self._data_set = data_sets[self.model_rank] if shape.size > 1 else hvd.global_process_set
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self._closing: list[Callable[[], None]] = []
        self._hooks: Any = WeakTensorKeyDictionary()  # parameter -> RemovableHandle of what reduces its gradient
        self._refuse_mismatch(launch)
        self._cores = affinity.cores_of_process()
        host = socket.gethostname()
        all_cores = self.allgather_object((host, self._cores), name="cores")
        self.num_cores: float = affinity.part(self._cores, [cores for theirs, cores in all_cores if theirs == host])
        if "OMP_NUM_THREADS" not in os.environ:  # each rank's torch would take all cores of the host
            torch.set_num_threads(max(1, int(self.num_cores)))

    def _refuse_mismatch(self, launch: launcher.Launch) -> None:
        """All ranks that Horovod sees raise RuntimeError if one of them is not where its launcher announced."""
        here = {"rank": self.rank, "size": self.size, "local_rank": self.local_rank, "local_size": self.local_size}
        causes = self.allgather_object(launcher.mismatch(launch, **here), name="launch")
        if any(causes):
            raise RuntimeError(next(filter(None, causes)))

    def device(self, kind: str = "auto") -> torch.device:
        """The device of this rank: `cpu`, the GPU numbered by the local rank, or the only one that it sees."""
        if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
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
                "`OPERATIONS=nccl ./mpi_scripts/install.sh --force`, or set --run.device cpu."
            )
        number = self.local_rank if visible > 1 else 0  # the only one may be this rank's own: `placement` finds out
        torch.cuda.set_device(number)
        return torch.device("cuda", number)

    def agree(self, options: Mapping[str, object]) -> str:
        """Compare what every rank runs, versions, sources and options; one line of what they share.

        All ranks raise Stopped if one differs, which is named with its value and the others'.
        """
        with self.together("reporting"):
            mine = agreement.report_rank(options)
        difference = agreement.disagreement(self.allgather_object(mine, name="agree"))
        if difference:
            raise Stopped(difference)
        return agreement.versions(mine)

    def agree_on(self, value: str, *, name: str) -> None:
        """All ranks raise Stopped if one has another value, which stands for the things called `name`."""
        values = self.allgather_object(value, name=f"agree/{name}")
        others = [str(rank) for rank, theirs in enumerate(values) if theirs != values[0]]
        if others:
            raise Stopped(f"rank {', '.join(others)} of {self.size} has other {name} than rank 0: make them the same.")

    def placement(self, device: torch.device, *, loader_threads: int | None) -> list[str]:
        """Where the ranks are, a line per host; rank r reads shard r. All raise Stopped if two would use one GPU.

        loader_threads: by the config; None: from the rank's cores. Rank 0 warns of ranks with too few cores.
        """
        with self.together("looking at the GPU"):
            mine = agreement.Place(
                host=socket.gethostname(),
                pid=os.getpid(),
                local_rank=self.local_rank,
                device=str(device),
                uuid=_uuid(device),
                cores=self._cores,
                torch_threads=torch.get_num_threads(),
                loader_threads=loader_threads or affinity.loader_threads(self.num_cores),
            )
        places = self.allgather_object(mine, name="placement")
        shared = agreement.shared_gpus(places)
        if shared:
            raise Stopped(shared)
        short = agreement.short_of_cores(places, asked=loader_threads)
        if short and self.rank == 0:
            logger.warning("%s", short)
        return agreement.by_host(places)

    # -- collectives -------------------------------------------------------------------------------------------

    def allreduce(self, tensor: Tensor, *, name: str) -> Tensor:
        """Sum over ranks, as a new tensor of the same shape."""
        with self._watchdog.waiting(name):
            return _finish(hvd.allreduce_async(tensor, name=name, op=hvd.Sum))

    def start_allreduce(self, tensor: Tensor, *, name: str) -> int:
        """Begin an allreduce; the handle for `finish_allreduce`. Any collectives of other names may come between."""
        handle: int = hvd.allreduce_async(tensor, name=name, op=hvd.Sum)
        return handle

    def finish_allreduce(self, handle: int) -> Tensor:
        """Sum over ranks of what each gave to `start_allreduce`."""
        with self._watchdog.waiting("an allreduce begun before"):
            return _finish(handle)

    def broadcast_object(self, value: Any, *, name: str) -> Any:
        """Rank 0's picklable value, at most a few MB (Horovod cannot send 2 GiB this way)."""
        mine = _pickled(value if self.rank == 0 else None)
        with self._watchdog.waiting(name):
            size = _finish(hvd.broadcast_async(torch.tensor(len(mine)), root_rank=0, name=f"{name}/size"))
            payload = mine if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            _finish(hvd.broadcast_async_(payload, root_rank=0, name=f"{name}/bytes"))
        return value if self.rank == 0 else pickle.loads(payload.numpy().data)

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        """Every rank's picklable value, in rank order."""
        mine = _pickled(value)
        with self._watchdog.waiting(name):
            sizes = _finish(hvd.allgather_async(torch.tensor([len(mine)]), name=f"{name}/sizes"))
            payloads = _finish(hvd.allgather_async(mine, name=f"{name}/bytes"))
        return [pickle.loads(payload.numpy().data) for payload in payloads.split(sizes.tolist())]

    def barrier(self, *, name: str) -> None:
        """Wait until every rank is here."""
        self.allreduce(torch.zeros(1), name=name)

    def broadcast_tensors(self, tensors: dict[str, Tensor], *, name: str) -> None:
        """Overwrite contiguous tensors by those of data rank 0 for the same part of the model, in place; without model
        ranks by rank 0's. Names and shapes agree on these ranks.
        """
        handles = []
        for key, tensor in tensors.items():
            flat = tensor.detach().view(-1)
            flat = flat.view(torch.uint8) if tensor.dtype in AS_BYTES else flat
            handles.append(
                hvd.broadcast_async_(
                    flat, root_rank=self.model_rank, name=f"{name}/{key}", process_set=self._data_set
                )
            )
        with self._watchdog.waiting(name):
            for handle in handles:
                _finish(handle)

    def broadcast_state(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make model and optimizer equal to rank 0's (see `broadcast_tensors`) without a step being taken.

        The optimizer's state must exist on every rank (`optim.init_state`). Scalars travel as an object, tensors
        in place; parameters last, so that nothing before can move them.
        """
        scalars, tensors = _optimizer_parts(model, optimizer)
        self._refuse_other_state(tensors)
        scalars = self.broadcast_object(scalars, name="state/scalars")
        for group, values in zip(optimizer.param_groups, scalars["groups"]):
            group.update(values)
        for parameter, values in zip(_parameters(optimizer), scalars["states"]):
            optimizer.state[parameter].update(values)
        self.broadcast_tensors(tensors, name="state/optimizer")
        self.broadcast_model(model)

    def _refuse_other_state(self, tensors: dict[str, Tensor]) -> None:
        """All ranks raise Stopped if one has not what the first rank with the same part of the model has."""
        first: dict[int, set[str]] = {}
        all_names = self.allgather_object((self.model_rank, set(tensors)), name="state/names")
        for rank, (part, names) in enumerate(all_names):
            differing = first.setdefault(part, names) ^ names
            if differing:
                raise Stopped(
                    f"rank {rank} has other optimizer state than rank {part}, which differ in {min(differing)}: freeze "
                    "the same parameters on all ranks before optim.init_state, as they were when it was saved."
                )

    def broadcast_model(self, model: nn.Module) -> None:
        """Make parameters and buffers equal to rank 0's (see `broadcast_tensors`)."""
        self.broadcast_tensors(dict(model.state_dict(keep_vars=True)), name="state/model")

    # -- the step ----------------------------------------------------------------------------------------------

    def wrap(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        passes: int = 1,
        compression: Literal["none", "fp16"] = "none",
    ) -> Optimizer:
        """Horovod's DistributedOptimizer: gradients are summed over `passes` and averaged over the data ranks.

        It is a new instance of the optimizer's class made from the param groups alone, with the state there was. What
        is frozen by then is not reduced; `freeze` and `unfreeze` change that in place. The model's optimizer wrapped
        before, if there was one, no longer sees its gradients.
        compression: the type on the wire. With fp16, train with an enabled GradScaler: without one, small gradients
        lose digits.
        ValueError for parameters that Horovod cannot reduce.
        """
        if hasattr(optimizer, "reduced"):
            raise ValueError("The optimizer is wrapped already: to freeze and unfreeze, use Communicator's methods.")
        _refuse_irreducible(model)
        with _without_gradients(model):  # Horovod's own hooks could not be removed again
            wrapped = hvd.DistributedOptimizer(
                optimizer,
                named_parameters=model.named_parameters(),
                backward_passes_per_step=passes,
                compression=Fp16(self.data_size) if compression == "fp16" else hvd.Compression.none,
                op=hvd.Sum if compression == "fp16" else hvd.Average,  # ours divides before it casts
                process_set=self._data_set,
            )
        wrapped.peak = None
        wrapped.reduced = set()
        wrapped.state.update(optimizer.state)
        wrapped.zero_grad = types.MethodType(_zero_grad, wrapped)
        wrapped.synchronize = partial(_synchronize, wrapped, self._watchdog)
        self._reduce(wrapped, (parameter for parameter in _parameters(wrapped) if parameter.requires_grad))
        return wrapped

    def freeze(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Stop training parameters of a wrapped optimizer, on every rank between the same two steps.

        They are no longer reduced and keep their values to the bit, whatever the weight decay; their moments and
        step counts wait for `unfreeze`. ValueError for parameters the optimizer does not have, and inside a step.
        """
        for parameter in _between_steps(optimizer, parameters):
            parameter.requires_grad_(False)
            parameter.grad = None  # or the next step would take it for one of its own
            optimizer.reduced.discard(parameter)  # type: ignore[attr-defined]
            optimizer._requires_update.discard(parameter)  # type: ignore[attr-defined]
            if parameter in self._hooks:
                self._hooks.pop(parameter).remove()

    def unfreeze(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Train parameters of a wrapped optimizer from the next step on, on every rank between the same two steps.

        One that was never trained begins as in a new optimizer: moments of zero, a step count of its own. ValueError
        for parameters the optimizer does not have, and inside a step.
        """
        parameters = _between_steps(optimizer, parameters)
        init_param = getattr(optimizer, "init_param", None)  # torch's own do the same in their first step
        for parameter in parameters:
            parameter.requires_grad_(True)
            if init_param is not None:
                init_param(parameter)
        self._reduce(optimizer, parameters)

    def _reduce(self, optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
        """Let Horovod begin to reduce each of these gradients in the last pass of a step.

        With model ranks only in `synchronize`: torch.distributed's messages are done by then, and two libraries do not
        wait for each other's.
        """
        for parameter in parameters:
            optimizer.reduced.add(parameter)
            if self.data_size > 1:  # Horovod reduces nothing on one rank
                optimizer._requires_update.add(parameter)
            if self.data_size > 1 and self.model_size == 1:
                if parameter in self._hooks:  # of this optimizer, or of another one for the same model
                    self._hooks.pop(parameter).remove()
                handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(optimizer._make_hook(parameter))
                self._hooks[parameter] = handle

    def synchronize(self, optimizer: Optimizer) -> None:
        """Finish the reduction of this window; afterwards all ranks hold the same gradients.

        Also completes a window in which this rank had fewer passes than others, or none. The optimizer's step does it
        where nobody has. ValueError if parameters were frozen or unfrozen by other means than `freeze` and `unfreeze`.
        """
        optimizer.synchronize()  # type: ignore[attr-defined]

    def peak_sent(self, optimizer: Optimizer) -> float | None:
        """Largest absolute value of this rank's gradient in the last window, before it was compressed, loss scale
        included; None where nothing is compressed, as on one rank."""
        peak: Tensor | None = getattr(optimizer, "peak", None)
        return None if peak is None else float(peak)

    def apply(self, optimizer: Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor) -> bool:
        """Step with the gradients as they are, unless their norm is not finite; say whether it was done.

        The norm is of reduced gradients, so every rank decides alike. Nothing is reduced a second time.
        """
        applied = bool(torch.isfinite(grad_norm))
        if applied:
            with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                optimizer.step()
        scaler.update()
        return applied

    # -- the end -----------------------------------------------------------------------------------------------

    @contextmanager
    def together(self, phase: str) -> Iterator[None]:
        """Run a block without collectives; if any rank fails in it, all raise Stopped with the causes by rank."""
        cause = None
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
        if hvd.mpi_enabled():  # not under Gloo or torchrun, where importing it would start MPI alone
            import mpi4py

            mpi4py.rc.initialize = False
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(code)
        os._exit(code)  # with Gloo the others see the lost connection, and the launcher ends them

    def before_shutdown(self, close: Callable[[], None]) -> None:
        """Call `close` on this rank when all ranks are done, before Horovod ends."""
        self._closing.append(close)

    def shutdown(self) -> None:
        """Leave Horovod after every rank is done."""
        self.barrier(name="shutdown")
        for close in self._closing:
            close()
        with self._watchdog.waiting("shutdown"):
            hvd.shutdown()
        self._watchdog.stop()
        self._rendezvous.close()

    def _give_up(self, what: str) -> None:
        """End the run: this rank waited too long for the others."""
        who = f"rank {self.rank} of {self.size}" if hvd.is_initialized() else "a rank"
        sys.stderr.write(
            f"largebatch: {who} on {socket.gethostname()} waited {self._watchdog.limit_s:g} s for the others "
            f"({what}): one that does not say so hangs, or is lost. --horovod.stall_limit_s is the limit; this rank is "
            "here:\n"
        )
        faulthandler.dump_traceback()
        sys.stderr.flush()
        time.sleep(GRACE_S)
        faulthandler.dump_traceback_later(GRACE_S, exit=True)  # should the way out be blocked as well
        if hvd.is_initialized():
            self.abort(1)
        os._exit(1)


@contextmanager
def session(
    *, deterministic: bool = False, horovod: HorovodConfig | None = None, shape: Shape = WHOLE
) -> Iterator[Communicator]:
    """A Communicator for one program. Whatever goes wrong ends all ranks with a non-zero exit and its cause.

    Exit code 2 for `Stopped` (all ranks agreed), 75 for `StoppedEarly`, 1 for a failure of this rank alone.
    """
    try:
        comm = Communicator(deterministic=deterministic, horovod=horovod, shape=shape)
    except (RuntimeError, ValueError) as error:  # every rank sees the same environment
        sys.exit(f"largebatch: {error}")
    try:
        yield comm
    except Stopped as error:
        if comm.rank == 0:
            sys.stderr.write(f"largebatch: {error}\n")
        comm.shutdown()
        sys.exit(error.exit_code)
    except BaseException as error:
        lost = isinstance(error, hvd.HorovodInternalError)
        cause = "stopped, because another rank failed" if lost else traceback.format_exc()
        sys.stderr.write(f"largebatch: rank {comm.rank} of {comm.size} on {socket.gethostname()}: {cause}\n")
        comm.abort(1)
    comm.shutdown()


def _finish(handle: int) -> Tensor:
    """What a collective gives, once all ranks have come to it."""
    _wait(handle)
    return hvd.synchronize(handle)


def _wait(handle: int) -> None:
    """Leave the core to others until a collective is done."""
    pause_s = MIN_PAUSE_S
    while not hvd.poll(handle):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _uuid(device: torch.device) -> str:
    """What tells one GPU from another across hosts and CUDA_VISIBLE_DEVICES; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_parts(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split the optimizer's state into picklable scalars and named tensors."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for parameter in _parameters(optimizer):
        state = optimizer.state.get(parameter, {})
        states.append({key: value for key, value in state.items() if not torch.is_tensor(value)})
        tensors |= {f"{names[parameter]}/{key}": value for key, value in state.items() if torch.is_tensor(value)}
    return {"groups": groups, "states": states}, tensors


def _refuse_irreducible(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"Parameter {name} is {parameter.dtype}, which is not reduced here: keep parameters in float32 "
                "(model.float()) and let autocast compute in another type, with --run.precision or "
                "Trainer(precision=...)."
            )
        if not parameter.is_contiguous():
            raise ValueError(f"Parameter {name} is not contiguous: channels-last may be used for activations only.")


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Everything frozen, for the time of a block."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _between_steps(optimizer: Any, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters, if they may be frozen or unfrozen now."""
    parameters = list(parameters)
    if not hasattr(optimizer, "reduced"):
        raise ValueError("The optimizer is not wrapped: freeze by requires_grad_, then call Communicator.wrap.")
    if optimizer._handles:
        raise ValueError("Parameters were frozen or unfrozen inside a step: do it after it, before the next backward.")
    strangers = set(parameters) - set(_parameters(optimizer))
    if strangers:
        raise ValueError(
            f"{len(strangers)} of {len(parameters)} parameters are not the optimizer's: give it all that are to be "
            "trained at any time; frozen ones cost it nothing."
        )
    return parameters


def _synchronize(optimizer: Any, watchdog: Watchdog) -> None:
    """Replaces the wrapper's synchronize, which knows nothing of what was frozen or unfrozen since."""
    changed = optimizer.reduced ^ {parameter for parameter in _parameters(optimizer) if parameter.requires_grad}
    if changed:
        raise ValueError(
            f"{len(changed)} parameters were frozen or unfrozen by requires_grad after the optimizer was wrapped: use "
            "Communicator.freeze and unfreeze, which tell Horovod what to reduce."
        )
    with watchdog.waiting("gradients"):
        begun = {parameter for parameter, (handle, _) in optimizer._handles.items() if handle is not None}
        for parameter in optimizer._requires_update - begun:  # a window in which this rank had fewer passes, or none
            optimizer._handles[parameter] = optimizer._allreduce_grad_async(parameter)
        for handle, _ in optimizer._handles.values():
            _wait(handle)
        type(optimizer).synchronize(optimizer)
    compression = optimizer._compression
    optimizer.peak = compression.take_peak() if isinstance(compression, Fp16) else None


def _zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
    """Replaces the wrapper's zero_grad, which takes no argument."""
    if optimizer._handles:
        raise RuntimeError("zero_grad() before the step would race with the reduction: call it after the step.")
    Optimizer.zero_grad(optimizer, set_to_none=set_to_none)


def _sentence(error: Exception) -> str:
    """A user's mistake in its own words, anything else with its type and place."""
    if isinstance(error, ValueError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"


def _by_rank(causes: Sequence[str | None], phase: str) -> str:
    """Each distinct cause once, with its ranks where they are not all."""
    ranks: dict[str, list[int]] = {}
    for rank, cause in enumerate(causes):
        if cause:
            ranks.setdefault(cause, []).append(rank)
    lines = []
    for cause, where in ranks.items():
        place = "" if len(where) == len(causes) else f"rank {', '.join(map(str, where))} of {len(causes)}, {phase}: "
        lines.append(place + cause)
    return "\n".join(lines)
