"""The reduction of gradients: Horovod's DistributedOptimizer, made safe.

Horovod's wrapper surprises in many ways. Its `zero_grad` refuses ordinary arguments. Parameters that are unfrozen after
wrapping are silently not reduced. Frozen ones still are, as zeros, which weight decay turns into steps; so are those
that no rank has used. A second optimizer for the same model reduces each gradient twice. Its `synchronize` busy-waits
(see polling.py). If a rank did not compute each gradient of one of its groups, the others wait for ever. Its counts of
passes outlive a step. It loses the hooks and the defaults of the optimizer, calls hooks of `step` twice, and calls a
closure after the reduction. It answers mistakes by bare assertions, and on one rank not at all. `Reduction` replaces
each of these; tests/mpi has a test of each.
"""

import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from largebatch.native.copies import to_host
from largebatch.ranks.buckets import buckets
from largebatch.ranks.fp16 import Fp16
from largebatch.ranks.hvd import hvd
from largebatch.ranks.mistakes import Mistake
from largebatch.ranks.polling import finish
from largebatch.ranks.replicas import Votes
from largebatch.ranks.sending import Unchanged
from largebatch.ranks.watchdog import Watchdog

Compression = Literal["none", "fp16"]


@dataclass
class Step:
    """What this rank has computed in a step so far; each step begins with a new one."""

    counts: dict[nn.Parameter, int] = field(default_factory=dict)  # passes that gave the parameter a gradient
    seen: dict[nn.Parameter, tuple[Tensor, int]] = field(default_factory=dict)  # gradient, and its version, after these
    ready: dict[int, int] = field(default_factory=dict)  # bucket -> gradients that had all passes


class Reduction:
    """Averages gradients over the data ranks while the last pass of a step still runs."""

    def __init__(self, data_set: Any, watchdog: Watchdog, *, data_size: int, model_size: int) -> None:
        """data_set: the data_size ranks that hold the same part of the model as this one."""
        self._data_set, self._watchdog = data_set, watchdog
        self._data_size, self._model_size = data_size, model_size
        self._hooks: Any = WeakTensorKeyDictionary()  # parameter -> handle of the hook that reduces it
        self.columns = 0  # a digest of what `micro_batches` shared last

    def wrap(
        self, optimizer: Optimizer, model: nn.Module, *, passes: int = 1, compression: Compression = "none"
    ) -> Optimizer:
        """Return Horovod's DistributedOptimizer: gradients are summed over `passes` and averaged over the data ranks.

        The result is a new instance of the optimizer's class, and shares param groups, state, defaults and hooks with
        the given one. Parameters that are frozen now are not reduced; `freeze` and `unfreeze` change that in place. If
        another optimizer of this model was wrapped before, that one no longer sees the gradients. A step may have fewer
        passes, on each rank another number: the gradients are those of the passes that were computed. A parameter that
        no rank has used in a step keeps its value, as in one process.
        compression: the type in which gradients are sent. With fp16, train with an enabled GradScaler: without one,
        small gradients lose digits.
        ValueError for parameters that Horovod cannot reduce.
        """
        if hasattr(optimizer, "reduced"):
            raise Mistake("The optimizer is wrapped already: to freeze and unfreeze, use Communicator's methods.")
        if passes < 1:
            raise Mistake(f"comm.wrap got passes={passes}: expected at least one.")
        _refuse_irreducible(model)
        _refuse_strangers(optimizer, model)
        with _without_gradients(model):  # Horovod's own hooks could not be removed again
            wrapped = _distributed(
                optimizer,
                named_parameters=model.named_parameters(),
                backward_passes_per_step=passes,
                compression=Fp16(self._data_size) if compression == "fp16" else Unchanged(),
                op=hvd.Sum if compression == "fp16" else hvd.Average,  # Fp16 divides before it casts
                process_set=self._data_set,
            )
        # A scheduler has replaced the step of the given instance; it still sees the param groups.
        wrapped.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
        wrapped.peak = wrapped.square = wrapped.watch = None
        wrapped.so_far, wrapped.reduced, wrapped.backward_order = Step(), set(), [*reversed([*model.parameters()])]
        wrapped.synchronize = partial(self._synchronize, wrapped)
        for method in (_step, _zero_grad, _load_state_dict, _add_param_group):
            setattr(wrapped, method.__name__[1:], types.MethodType(method, wrapped))
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
        """Reduce these gradients, too. It begins in the last pass of a step, bucket by bucket.

        If the model is divided among ranks, the reduction begins in `synchronize`: torch.distributed has then finished
        its messages, and the two libraries would not wait for each other.
        """
        for parameter in parameters:
            optimizer.reduced.add(parameter)
            if self._model_size == 1:
                if parameter in self._hooks:  # of this optimizer, or of another one for the same model
                    self._hooks.pop(parameter).remove()
                handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(partial(self._count, optimizer))
                self._hooks[parameter] = handle
        _divide(optimizer)

    def _count(self, optimizer: Any, parameter: nn.Parameter) -> None:
        """Count a pass that has given a parameter its gradient; begin to reduce a bucket in the last pass."""
        so_far, passes, gradient = optimizer.so_far, optimizer.backward_passes_per_step, parameter.grad
        assert gradient is not None
        count = so_far.counts[parameter] = so_far.counts.get(parameter, 0) + 1
        if count > passes:
            raise Mistake(
                f"The gradient of {optimizer._parameter_names[parameter]} was computed {count} times in a step of "
                f"{passes} {'pass' if passes == 1 else 'passes'}: give comm.wrap passes={count}, or add the losses and "
                "call backward() once; a step that is left out ends with optimizer.zero_grad()."
            )
        so_far.seen[parameter] = gradient, gradient._version
        optimizer._synchronized = False
        if count == passes:
            number = optimizer.bucket_of[parameter]
            so_far.ready[number] = so_far.ready.get(number, 0) + 1
            if so_far.ready[number] == len(optimizer._groups[number]):
                _refuse_layouts(optimizer, [number])
                self._begin(optimizer, number)

    def _begin(self, optimizer: Any, number: int) -> None:
        """Begin to reduce a bucket, of which this rank need not have computed each gradient."""
        bucket = optimizer._groups[number]
        if self._data_size == 1:  # there is nothing to send, and what has no gradient stays without one
            optimizer._handles[number] = None, ()
            return
        for parameter in bucket:
            if parameter.grad is None:  # another rank may have one
                parameter.grad = torch.zeros_like(parameter)
        optimizer._handles[number] = type(optimizer)._grouped_allreduce_grad_async(optimizer, bucket)

    def _synchronize(self, optimizer: Any) -> None:
        """Replaces the wrapper's synchronize, which does not know of parameters frozen or unfrozen, and is slower."""
        _refuse_frozen_otherwise(optimizer)
        changed = _changed(optimizer)
        # Some are left if this rank computed fewer gradients than others in this step, or none.
        left = [number for number in range(len(optimizer._groups)) if number not in optimizer._handles]
        _refuse_layouts(optimizer, left)
        order = [parameter for bucket in optimizer._groups for parameter in bucket]
        with self._watchdog.waiting("gradients"):
            used = torch.tensor([parameter.grad is not None for parameter in order], dtype=torch.int64)
            votes = Votes.begin(optimizer, used, self.columns, self._data_set) if self._data_size > 1 else None
            for number in left:
                self._begin(optimizer, number)
            for handle, gradients in optimizer._handles.values():
                for sent, gradient in zip(finish(handle) if gradients else (), gradients):
                    optimizer._compression.decompress(sent, gradient)
            used_by = votes.finish() if votes else used.tolist()
        optimizer._handles.clear()
        optimizer.so_far = Step()
        for parameter, ranks in zip(order, used_by):
            if not ranks:  # as in one process: else weight decay and moments would move it
                parameter.grad = None
        optimizer._synchronized = True  # a step outside of skip_synchronize warns
        self._watchdog.started()
        optimizer.peak = optimizer._compression.take_peak()
        square = optimizer._compression.take_square()
        if square is not None:  # else a second reduction of the step would hide that of the first
            optimizer.square = square
        if changed:
            raise Mistake(changed)
        if optimizer.watch:
            optimizer.watch(alike=votes is None or votes.alike)


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
    _refuse_inside_step(optimizer, "The number of passes was changed")
    optimizer.backward_passes_per_step = passes  # type: ignore[attr-defined]


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
            raise Mistake(
                f"Parameter {name} is {parameter.dtype}, which is not reduced here: keep parameters in float32 "
                "(model.float()) and let autocast compute in another type, with --run.precision or "
                "Trainer(precision=...)."
            )
        if not parameter.is_contiguous():
            raise Mistake(f"Parameter {name} is not contiguous: channels-last may be used for activations only.")


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


def _refuse_strangers(optimizer: Optimizer, model: nn.Module) -> None:
    known = set(model.parameters())
    strangers = sum(parameter not in known for parameter in parameters_of(optimizer))
    if strangers:
        raise Mistake(
            f"{strangers} of {len(parameters_of(optimizer))} parameters of the optimizer are not the model's: give "
            "comm.wrap the model whose parameters the optimizer has."
        )


def _distributed(optimizer: Optimizer, **options: Any) -> Any:
    """Return Horovod's optimizer, for which it calls the class with the param groups alone."""
    try:
        return hvd.DistributedOptimizer(optimizer, **options)
    except TypeError as error:
        name = type(optimizer).__name__
        raise Mistake(
            f"{name} cannot be wrapped: Horovod makes it anew as {name}(param_groups), and that fails ({error}). Give "
            "its other arguments defaults; the groups hold their values."
        ) from error


def _between_steps(optimizer: Any, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters; ValueError if they cannot be frozen or unfrozen now."""
    parameters = list(parameters)
    if not hasattr(optimizer, "reduced"):
        raise Mistake("The optimizer is not wrapped: freeze by requires_grad_, then call Communicator.wrap.")
    _refuse_inside_step(optimizer, "Parameters were frozen or unfrozen")
    strangers = set(parameters) - set(parameters_of(optimizer))
    if strangers:
        raise Mistake(
            f"{len(strangers)} of {len(parameters)} parameters are not the optimizer's: give it all that are to be "
            "trained at any time; frozen ones cost it nothing."
        )
    return parameters


def _refuse_inside_step(optimizer: Any, what: str) -> None:
    if optimizer.so_far.counts:
        raise Mistake(f"{what} inside a step: do it after it, before the next backward.")


def _divide(optimizer: Any) -> None:
    """Divide what is reduced into buckets, Horovod's groups, between two steps."""
    gradients = [parameter for parameter in optimizer.backward_order if parameter in optimizer.reduced]
    numbers = buckets([parameter.nbytes for parameter in gradients])
    optimizer._groups = [tuple(gradients[number] for number in bucket) for bucket in numbers]
    optimizer.bucket_of = {p: number for number, bucket in enumerate(optimizer._groups) for p in bucket}


def _refuse_frozen_otherwise(optimizer: Any) -> None:
    changed = optimizer.reduced ^ {parameter for parameter in parameters_of(optimizer) if parameter.requires_grad}
    if changed:
        raise Mistake(
            f"{len(changed)} parameters were frozen or unfrozen by requires_grad after the optimizer was wrapped: use "
            "Communicator.freeze and unfreeze, which tell Horovod what to reduce."
        )


def _refuse_layouts(optimizer: Any, numbers: Iterable[int]) -> None:
    """Raise Mistake for a gradient, in buckets of these numbers, whose memory Horovod would add up in another order."""
    for parameter in (parameter for number in numbers for parameter in optimizer._groups[number]):
        gradient = parameter.grad
        if gradient is not None and (gradient.layout != torch.strided or not gradient.is_contiguous()):
            raise Mistake(
                f"The gradient of {optimizer._parameter_names[parameter]} is not contiguous: give it the strides of "
                "the parameter; leave sparse=True out of an embedding."
            )


def _changed(optimizer: Any) -> str:
    """Return a sentence if the program has touched gradients that may be on their way to others; empty: it has not.

    Horovod writes past torch, which counts the versions of a tensor.
    """
    for parameter, (gradient, version) in optimizer.so_far.seen.items():
        if parameter.grad is not gradient or gradient._version != version:
            return (
                f"The gradient of {optimizer._parameter_names[parameter]} was changed or dropped between backward() "
                "and the step, while it is being reduced: call comm.synchronize(optimizer) before you clip, unscale or "
                "change gradients, and then step inside `with optimizer.skip_synchronize():`."
            )
    return ""


# -- methods of the wrapped optimizer --------------------------------------------------------------------------------


def _step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Replaces the wrapper's step, which calls the hooks of a step twice, and a closure after the reduction."""
    if closure is not None:
        loss = super(type(optimizer), optimizer).step(partial(_compute, optimizer, closure))
        optimizer._synchronized = False
        return loss
    if optimizer._should_synchronize and _comes_from_scaler():
        raise Mistake(
            "scaler.step(optimizer) unscales gradients while they are being reduced: call comm.synchronize(optimizer) "
            "after the last backward(), and scaler.step(optimizer) inside `with optimizer.skip_synchronize():`."
        )
    if not optimizer._should_synchronize and not optimizer._synchronized:
        raise Mistake(
            "step() inside optimizer.skip_synchronize() has gradients that are not reduced: call "
            "comm.synchronize(optimizer) before it, in each step."
        )
    if optimizer._should_synchronize:
        if optimizer._synchronized:
            warnings.warn(
                "optimizer.step() reduces the gradients once more after comm.synchronize(optimizer): step inside "
                "`with optimizer.skip_synchronize():`.",
                stacklevel=2,
            )
        optimizer.synchronize()
    optimizer._synchronized = False
    return super(type(optimizer), optimizer).step()


def _comes_from_scaler() -> bool:
    """Return whether torch's GradScaler calls the step; a scheduler may have put a function in between."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):
        if frame and frame.f_code is torch.amp.GradScaler._maybe_opt_step.__code__:
            return True
        frame = frame and frame.f_back
    return False


def _compute(optimizer: Any, closure: Callable[[], Any]) -> Any:
    """Call a closure, which computes gradients, and reduce them. Returns the mean of its loss over the ranks.

    An optimizer that decides by the loss, such as LBFGS, then decides alike on all ranks.
    """
    loss = closure()
    optimizer.synchronize()
    if torch.is_tensor(loss):
        loss = finish(
            hvd.allreduce_async(loss.detach(), name="closure/loss", op=hvd.Average, process_set=optimizer.process_set)
        )
    return loss


def _zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
    """Replaces the wrapper's zero_grad, which takes no argument."""
    if optimizer._handles:
        raise Mistake(
            "zero_grad() before the step would race with the reduction: call it after the step, or, to leave a step "
            "out, after comm.synchronize(optimizer)."
        )
    optimizer.so_far = Step()
    Optimizer.zero_grad(optimizer, set_to_none=set_to_none)


def _load_state_dict(optimizer: Any, state: dict[str, Any]) -> None:
    """Replaces the wrapper's load_state_dict, which forgets what is under way."""
    _refuse_inside_step(optimizer, "A state was loaded")
    super(type(optimizer), optimizer).load_state_dict(state)


def _add_param_group(optimizer: Any, group: dict[str, Any]) -> None:
    """Refuse a group that nothing would reduce."""
    raise Mistake(
        "A param group was added after comm.wrap, which reduces the gradients of those it was given: add it before, "
        "and use comm.freeze and comm.unfreeze; frozen parameters cost nothing."
    )
