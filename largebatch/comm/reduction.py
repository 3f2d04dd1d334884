"""The reduction of gradients: Horovod's DistributedOptimizer, made safe.

Horovod's wrapper surprises in six ways. Its `zero_grad` refuses ordinary arguments. Parameters that are unfrozen after
wrapping are silently not reduced. Frozen ones still are, as zeros, which weight decay turns into steps. A second
optimizer for the same model reduces each gradient twice. Its `synchronize` busy-waits (see polling.py). If a rank
did not compute each gradient of one of its groups, the others wait for ever. `Reduction` replaces each of these;
tests/mpi has a test of each.
"""

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from largebatch.comm.buckets import buckets
from largebatch.comm.fp16 import Fp16
from largebatch.comm.hvd import hvd
from largebatch.comm.polling import finish
from largebatch.comm.sending import Unchanged
from largebatch.comm.watchdog import Watchdog
from largebatch.native.copies import to_host

Compression = Literal["none", "fp16"]


class Reduction:
    """Averages gradients over the data ranks while the last pass of a step still runs."""

    def __init__(self, data_set: Any, watchdog: Watchdog, *, data_size: int, model_size: int) -> None:
        """data_set: the data_size ranks that hold the same part of the model as this one."""
        self._data_set, self._watchdog = data_set, watchdog
        self._data_size, self._model_size = data_size, model_size
        self._hooks: Any = WeakTensorKeyDictionary()  # parameter -> handle of the hook that reduces it

    def wrap(
        self, optimizer: Optimizer, model: nn.Module, *, passes: int = 1, compression: Compression = "none"
    ) -> Optimizer:
        """Return Horovod's DistributedOptimizer: gradients are summed over `passes` and averaged over the data ranks.

        The result is a new instance of the optimizer's class, made from the param groups alone, and takes over the
        state. Parameters that are frozen now are not reduced; `freeze` and `unfreeze` change that in place. If another
        optimizer of this model was wrapped before, that one no longer sees the gradients.
        compression: the type in which gradients are sent. With fp16, train with an enabled GradScaler: without one,
        small gradients lose digits.
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
                compression=Fp16(self._data_size) if compression == "fp16" else Unchanged(),
                op=hvd.Sum if compression == "fp16" else hvd.Average,  # Fp16 divides before it casts
                process_set=self._data_set,
            )
        wrapped.peak = wrapped.square = None
        wrapped.reduced, wrapped.backward_order = set(), [*reversed([*model.parameters()])]
        wrapped._grouped_allreduce_grad_async = partial(_begin, wrapped)
        wrapped.state.update(optimizer.state)
        wrapped.zero_grad = types.MethodType(_zero_grad, wrapped)
        wrapped.synchronize = partial(_synchronize, wrapped, self._watchdog)
        self._reduce(wrapped, (parameter for parameter in parameters_of(wrapped) if parameter.requires_grad))
        return wrapped

    def freeze(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Stop training parameters of a wrapped optimizer, on every rank between the same two steps.

        They are no longer reduced and keep their values to the bit, whatever the weight decay; their moments and
        step counts wait for `unfreeze`. ValueError for parameters that the optimizer does not have, and inside a step.
        """
        for parameter in _between_steps(optimizer, parameters):
            parameter.requires_grad_(False)
            parameter.grad = None  # the next step would apply a gradient that is left over
            optimizer.reduced.discard(parameter)  # type: ignore[attr-defined]
            optimizer._requires_update.discard(parameter)  # type: ignore[attr-defined]
            if parameter in self._hooks:
                self._hooks.pop(parameter).remove()
        _divide(optimizer)

    def unfreeze(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Train parameters of a wrapped optimizer from the next step on, on every rank between the same two steps.

        A parameter that was never trained begins as in a new optimizer, with moments of zero and a step count of its
        own. ValueError for parameters that the optimizer does not have, and inside a step.
        """
        parameters = _between_steps(optimizer, parameters)
        init_param = getattr(optimizer, "init_param", None)  # torch's own optimizers do the same in their first step
        for parameter in parameters:
            parameter.requires_grad_(True)
            if init_param is not None:
                init_param(parameter)
        self._reduce(optimizer, parameters)

    def _reduce(self, optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
        """Let Horovod reduce these gradients, too. It begins in the last pass of a step, bucket by bucket.

        If the model is divided among ranks, the reduction begins in `synchronize`: torch.distributed has then finished
        its messages, and the two libraries would not wait for each other.
        """
        for parameter in parameters:
            optimizer.reduced.add(parameter)
            if self._data_size > 1:  # Horovod reduces nothing on one rank
                optimizer._requires_update.add(parameter)
            if self._data_size > 1 and self._model_size == 1:
                if parameter in self._hooks:  # of this optimizer, or of another one for the same model
                    self._hooks.pop(parameter).remove()
                handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(optimizer._make_hook(parameter))
                self._hooks[parameter] = handle
        _divide(optimizer)


def synchronize(optimizer: Optimizer) -> None:
    """Finish the reduction of this step; afterwards all ranks hold the same gradients.

    It also completes a step in which this rank had fewer passes than others, or none. If nobody calls it, the
    optimizer's step does. ValueError if parameters were frozen or unfrozen by other means than `freeze` and `unfreeze`.
    """
    optimizer.synchronize()  # type: ignore[attr-defined]


def expect_passes(optimizer: Optimizer, passes: int) -> None:
    """Begin to reduce each gradient in this pass of a step from now on; call it between two steps, on every rank.

    A rank may have fewer passes in a step, as `synchronize` then begins; it may not have more.
    """
    if optimizer.backward_passes_per_step != passes:  # type: ignore[attr-defined]
        optimizer.set_backward_passes_per_step(passes)  # type: ignore[attr-defined]


def peak_sent(optimizer: Optimizer) -> float | None:
    """Return the largest absolute value of this rank's gradient in the last step, taken before compression.

    It includes the loss scale. None if it was not measured (see `measure_gradients`), as on one rank.
    """
    peak: Tensor | None = getattr(optimizer, "peak", None)
    return None if peak is None else float(peak)


def measure_gradients(optimizer: Optimizer) -> None:
    """Read each gradient before it is sent from now on, for `peak_sent`; with fp16 compression this is always done."""
    optimizer._compression.measures = True  # type: ignore[attr-defined]


def measure_square(optimizer: Optimizer) -> None:
    """Read each gradient of the coming reduction before it is sent, for `square_sent`."""
    optimizer.square = None  # type: ignore[attr-defined]
    optimizer._compression.measures_norm = True  # type: ignore[attr-defined]


def square_sent(optimizer: Optimizer) -> Tensor | None:
    """Return the squared norm of this rank's own gradient in the reduction that was measured last, 0-d.

    It is taken before compression, and includes the loss scale. None if nobody asked by `measure_square`, as on one
    rank.
    """
    return getattr(optimizer, "square", None)


def sends_fp16(optimizer: Optimizer) -> bool:
    """Return whether the gradients are sent in fp16."""
    return isinstance(optimizer._compression, Fp16)  # type: ignore[attr-defined]


def apply(optimizer: Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor) -> bool:
    """Step with the gradients as they are, unless their norm is not finite; return whether the step was taken.

    The norm is of reduced gradients, so every rank decides alike. Nothing is reduced a second time.

    On a GPU, LAMB looks at the norm by itself. So the host hands it the work first, and then waits for the norm alone:
    while it prepares the next step, the GPU computes this update.
    """
    finite = torch.isfinite(grad_norm)
    is_finite, decides = to_host(finite), not finite.is_cpu and getattr(optimizer, "can_skip", False)
    if decides:
        optimizer.finite = finite  # type: ignore[attr-defined]
    if decides or is_finite():
        with optimizer.skip_synchronize():  # type: ignore[attr-defined]
            optimizer.step()
    applied = bool(is_finite())
    if decides and not applied:
        optimizer.take_back()  # type: ignore[attr-defined]
    scaler.update()
    return applied


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
    """Freeze all parameters for the time of a block."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _between_steps(optimizer: Any, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters; ValueError if they cannot be frozen or unfrozen now."""
    parameters = list(parameters)
    if not hasattr(optimizer, "reduced"):
        raise ValueError("The optimizer is not wrapped: freeze by requires_grad_, then call Communicator.wrap.")
    if optimizer._handles:
        raise ValueError("Parameters were frozen or unfrozen inside a step: do it after it, before the next backward.")
    strangers = set(parameters) - set(parameters_of(optimizer))
    if strangers:
        raise ValueError(
            f"{len(strangers)} of {len(parameters)} parameters are not the optimizer's: give it all that are to be "
            "trained at any time; frozen ones cost it nothing."
        )
    return parameters


def _divide(optimizer: Any) -> None:
    """Divide what is reduced into buckets, Horovod's groups, between two steps."""
    gradients = [parameter for parameter in optimizer.backward_order if parameter in optimizer._requires_update]
    numbers = buckets([parameter.nbytes for parameter in gradients])
    optimizer._groups = [tuple(gradients[number] for number in bucket) for bucket in numbers]
    optimizer._p_to_group = {parameter: bucket for bucket in optimizer._groups for parameter in bucket}
    optimizer._group_counts = dict.fromkeys(optimizer._groups, 0)


def _begin(optimizer: Any, bucket: tuple[nn.Parameter, ...]) -> Any:
    """Replaces the wrapper's beginning of a bucket, which takes for granted that this rank computed each gradient."""
    for parameter in bucket:
        if parameter.grad is None:  # another rank may have one
            parameter.grad = torch.zeros_like(parameter)
        elif not parameter.grad.is_contiguous():  # Horovod would add up its memory
            raise ValueError(
                f"The gradient of {optimizer._parameter_names[parameter]} is not contiguous: give it the strides of "
                "the parameter."
            )
    return type(optimizer)._grouped_allreduce_grad_async(optimizer, bucket)


def _synchronize(optimizer: Any, watchdog: Watchdog) -> None:
    """Replaces the wrapper's synchronize, which does not know of parameters frozen or unfrozen since, and is slower."""
    changed = optimizer.reduced ^ {parameter for parameter in parameters_of(optimizer) if parameter.requires_grad}
    if changed:
        raise ValueError(
            f"{len(changed)} parameters were frozen or unfrozen by requires_grad after the optimizer was wrapped: use "
            "Communicator.freeze and unfreeze, which tell Horovod what to reduce."
        )
    with watchdog.waiting("gradients"):
        # Some are left if this rank computed fewer gradients than others in this step, or none.
        for bucket in optimizer._groups:
            if bucket not in optimizer._handles:
                for parameter in bucket:
                    optimizer._handles.pop(parameter, None)
                optimizer._handles[bucket] = _begin(optimizer, bucket)
        for bucket, (handle, gradients) in optimizer._handles.items():
            for sent, gradient in zip(finish(handle), gradients):
                optimizer._compression.decompress(sent, gradient)
            optimizer._allreduce_delay.update(dict.fromkeys(bucket, optimizer.backward_passes_per_step))
        optimizer._handles.clear()
        optimizer._group_counts = dict.fromkeys(optimizer._groups, 0)  # else the next step would begin a bucket early
        optimizer._synchronized = True  # Horovod's step warns if it has to synchronize once more
    watchdog.started()
    optimizer.peak = optimizer._compression.take_peak()
    square = optimizer._compression.take_square()
    if square is not None:  # else a second reduction of the step would hide that of the first
        optimizer.square = square


def _zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
    """Replaces the wrapper's zero_grad, which takes no argument."""
    if optimizer._handles:
        raise RuntimeError("zero_grad() before the step would race with the reduction: call it after the step.")
    Optimizer.zero_grad(optimizer, set_to_none=set_to_none)
