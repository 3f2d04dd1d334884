"""The reduction of gradients: an optimizer that averages them over the ranks, in place of Horovod's.

The classes in horovod.py and torch_distributed.py send. `Reduced` replaces what surprises in Horovod's
DistributedOptimizer; tests/mpi has a test of each.
Parameters that are unfrozen after wrapping are not reduced. Frozen and unused ones are, as zeros, which weight decay
turns into steps. A second optimizer of the model reduces gradients twice. Ranks that lack a gradient of a group let the
others wait for ever; `synchronize` busy-waits. Counts of passes outlive a step. Hooks and defaults are lost, hooks of
`step` run twice, closures after the reduction. Mistakes are bare assertions, and on one rank silent.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from largebatch.native.copies import to_host
from largebatch.ranks.buckets import buckets
from largebatch.ranks.mistakes import Mistake
from largebatch.ranks.replicas import (
    Votes,
    Watch,
    parameters_of,
    refuse_unlike,
)
from largebatch.ranks.sending import Unchanged

R = TypeVar("R", bound="Reduced")
Compression = Literal["none", "fp16", "bf16"]
HOOKS: Any = WeakTensorKeyDictionary()  # parameter -> handle of the hook that counts its passes


@dataclass
class Step:
    """What this rank has computed in a step so far; each step begins with a new one."""

    counts: dict[nn.Parameter, int] = field(default_factory=dict)  # passes that gave the parameter a gradient
    seen: dict[nn.Parameter, tuple[Tensor, int]] = field(default_factory=dict)  # gradient, and its version, after these
    ready: dict[int, int] = field(default_factory=dict)  # bucket -> gradients that had all passes
    sent: dict[int, Any] = field(default_factory=dict)  # bucket -> what `_send` returned; None: nothing


class Trained:
    """The parameters whose gradients are reduced, in buckets in the order of the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.parameters: set[nn.Parameter] = set()
        self.buckets: list[tuple[nn.Parameter, ...]] = []
        self.bucket_of: dict[nn.Parameter, int] = {}
        self.nbytes: list[int] = []  # of the buckets

    def change(self, *, more: Iterable[nn.Parameter] = (), less: Iterable[nn.Parameter] = ()) -> None:
        """Divide the gradients anew, between two steps."""
        self.parameters = (self.parameters | {*more}) - {*less}
        gradients = [parameter for parameter in reversed([*self.names]) if parameter in self.parameters]
        numbers = buckets([parameter.nbytes for parameter in gradients])
        self.buckets = [tuple(gradients[number] for number in bucket) for bucket in numbers]
        self.nbytes = [sum(parameter.nbytes for parameter in bucket) for bucket in self.buckets]
        self.bucket_of = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}


class Reduced(Optimizer):
    """The optimizer that `comm.wrap` returns: of the given one's class, with its groups, state, defaults and hooks.

    Its gradients are summed over the passes of a step and averaged over the data ranks, while the last pass still runs.
    If another optimizer of this model was wrapped before, that one no longer sees the gradients. A rank may have fewer
    passes in a step than others. A parameter that no rank has used in a step keeps its value, as in one process. A
    copy, or one from a pickle, is an ordinary optimizer of the given class.
    """

    kind: type[Optimizer]  # the class of the optimizer that was given; its step is taken
    finite: Tensor | None  # of an optimizer that can skip a step by itself, as LAMB on a GPU
    take_back: Callable[[], None]

    def take_over(
        self, plain: Optimizer, model: nn.Module, comm: Any, *, passes: int, sending: Unchanged, watch: bool
    ) -> None:
        """Begin to reduce what is trained of `plain`. watch: see `Watch`."""
        # A scheduler has replaced the step of the given instance; it still sees the param groups.
        self.__dict__.update({name: value for name, value in vars(plain).items() if name != "step"})
        self.kind, self.comm = type(plain), comm
        self.backward_passes_per_step, self.sending = passes, sending
        self.sends = comm.data_size > 1  # False: each rank keeps its own gradients
        self.trained, self.so_far = Trained(model), Step()
        self.is_synchronized, self.synchronizes = False, True
        self.watch = Watch(model) if watch and self.sends else None
        self._reduce(parameter for parameter in parameters_of(self) if parameter.requires_grad)

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (self.kind,), self.__getstate__()

    def _patch_step_function(self) -> None:
        """Do not let torch call the hooks of a step: the step of `kind` does."""

    # -- what is trained ---------------------------------------------------------------------------------------

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Stop training parameters, on every rank between the same two steps; their state waits for `unfreeze`.

        They keep their values to the bit, whatever the weight decay. ValueError for parameters that the optimizer does
        not have, and inside a step.
        """
        parameters = _owned(self, parameters)
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None  # the next step would apply a gradient that is left over
            if parameter in HOOKS:
                HOOKS.pop(parameter).remove()
        self.trained.change(less=parameters)

    def unfreeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train parameters from the next step on, on every rank between the same two steps.

        One that was never trained begins with moments of zero and its own step count. Errors: as in `freeze`.
        """
        parameters = _owned(self, parameters)
        init_param = getattr(self, "init_param", None)  # torch's own optimizers do the same in their first step
        for parameter in parameters:
            parameter.requires_grad_(True)
            if init_param is not None:
                init_param(parameter)
        self._reduce(parameters)

    def expect_passes(self, passes: int) -> None:
        """Begin to reduce each gradient in this pass of a step from now on; between two steps, on every rank."""
        _refuse_inside_step(self, "The number of passes was changed")
        self.backward_passes_per_step = passes

    def _reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reduce these gradients, too: from the last pass of a step on, bucket by bucket.

        If ranks share a model, from `synchronize` on: Horovod and torch.distributed do not wait for each other.
        """
        self.trained.change(more=(parameters := [*parameters]))
        for parameter in parameters if self.comm.model_size == 1 else ():
            if parameter in HOOKS:  # of this optimizer, or of another one for the same model
                HOOKS.pop(parameter).remove()
            HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(self._count)

    # -- one step ----------------------------------------------------------------------------------------------

    def _count(self, parameter: nn.Parameter) -> None:
        """Count a pass that has given a parameter its gradient; begin to reduce a bucket in the last pass."""
        so_far, passes, gradient = self.so_far, self.backward_passes_per_step, parameter.grad
        assert gradient is not None
        count = so_far.counts[parameter] = so_far.counts.get(parameter, 0) + 1
        if count > passes:
            raise Mistake(_too_often(self.trained.names[parameter], count, passes))
        so_far.seen[parameter] = gradient, gradient._version
        self.is_synchronized = False
        if count == passes:
            number = self.trained.bucket_of[parameter]
            so_far.ready[number] = so_far.ready.get(number, 0) + 1
            if so_far.ready[number] == len(self.trained.buckets[number]):
                _refuse_layouts(self, [number])
                self._complete(number)

    def _complete(self, number: int) -> None:
        """Begin to reduce a bucket of which this rank has computed each gradient."""
        self._begin(number)

    def _begin(self, number: int) -> None:
        """Begin to reduce a bucket, of which this rank need not have computed each gradient."""
        if not self.sends:  # what has no gradient stays without one
            self.so_far.sent[number] = None
            return
        for parameter in self.trained.buckets[number]:
            if parameter.grad is None:  # another rank may have one
                parameter.grad = torch.zeros_like(parameter)
        self.comm.record.begin(f"bucket {number}", self.trained.nbytes[number])
        self.so_far.sent[number] = self._send(self.trained.buckets[number])

    def _send(self, bucket: Sequence[nn.Parameter]) -> Any:
        """Begin to average the gradients of a bucket over the data ranks, in the form that `sending` gives them.

        All ranks send all buckets; the class in ranks/ decides whether in the same order.
        """
        raise NotImplementedError

    def _receive(self, sent: Any) -> None:
        """Wait for what `_send` began; the gradients are then those of all data ranks."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Finish the reduction of this step; afterwards all ranks hold the same gradients.

        It also completes a step in which this rank had fewer passes than others, or none. Without a call of it, `step`
        reduces. ValueError if parameters were frozen or unfrozen by other means than `freeze` and `unfreeze`.
        """
        _refuse_frozen_otherwise(self)
        changed = _changed(self)
        so_far, comm = self.so_far, self.comm
        left = [number for number in range(len(self.trained.buckets)) if number not in so_far.sent]
        _refuse_layouts(self, left)
        order = [parameter for bucket in self.trained.buckets for parameter in bucket]
        with comm.waiting("gradients"):
            used = torch.tensor([parameter.grad is not None for parameter in order], dtype=torch.int64)
            votes = Votes.begin(comm, self, used) if self.sends else None
            for number in left:
                self._begin(number)
            for sent in so_far.sent.values():
                if sent is not None:
                    self._receive(sent)
            used_by = votes.finish() if votes else used.tolist()
        self.so_far = Step()
        for parameter, ranks in zip(order, used_by):
            if not ranks:  # as in one process: else weight decay and moments would move it
                parameter.grad = None
        self.is_synchronized = True  # a step outside of skip_synchronize warns
        comm.started()
        self.sending.complete()
        if changed:
            raise Mistake(changed)
        if votes and not votes.alike and comm.model_size == 1:
            refuse_unlike(comm, self)
        if self.watch:
            self.watch.compare(comm, self)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step inside the block with the gradients as they are, after `synchronize`."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def step_if_finite(self, scaler: torch.amp.GradScaler, grad_norm: Tensor) -> bool:
        """Step with the gradients as they are, unless their norm is not finite; return whether the step was taken.

        The norm is of reduced gradients, so every rank decides alike. On a GPU, LAMB looks at the norm by itself: the
        host hands it the work, then waits for the norm alone, and prepares the next step while the GPU computes.
        """
        finite = torch.isfinite(grad_norm)
        is_finite, decides = to_host(finite), not finite.is_cpu and getattr(self, "can_skip", False)
        if decides:
            self.finite = finite
        if decides or is_finite():
            with self.skip_synchronize():
                self.step()
        applied = bool(is_finite())
        if decides and not applied:
            self.take_back()
        scaler.update()
        return applied

    # -- torch's methods ---------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the gradients of all ranks; those that a closure computes are reduced after each call of it."""
        if closure is not None:
            loss = self.kind.step(self, partial(self._compute, closure))
            self.is_synchronized = False
            return loss
        _refuse_order(self, from_scaler=_comes_from_scaler())
        if self.synchronizes:
            self.synchronize()
        self.is_synchronized = False
        return self.kind.step(self)

    def _compute(self, closure: Callable[[], Any]) -> Any:
        """Call a closure and reduce its gradients. Returns the mean loss, by which LBFGS decides, over the ranks."""
        loss = closure()
        self.synchronize()
        if not self.sends:
            return loss
        own = 0.0 if loss is None else torch.as_tensor(loss).detach().item()  # a rank may have nothing to add up
        mine = torch.tensor([own, float(loss is not None)], dtype=torch.float64)
        total, given = self.comm.allreduce(mine, name="closure/loss", among="data").tolist()
        mean = total / self.comm.data_size if given else None
        return loss.new_tensor(mean) if torch.is_tensor(loss) else mean

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and what this rank has computed of a step, unless they are being reduced."""
        if self.so_far.sent:
            raise Mistake(
                "zero_grad() before the step would race with the reduction: call it after the step, or, to leave a "
                "step out, after optimizer.synchronize()."
            )
        self.so_far = Step()
        self.kind.zero_grad(self, set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _refuse_inside_step(self, "A state was loaded")
        groups = self.param_groups  # a scheduler of the given instance sees this list
        self.kind.load_state_dict(self, state_dict)
        groups[:], self.param_groups = self.param_groups, groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Mistake(
            "A param group was added after comm.wrap, which reduces the gradients of those it was given: add it "
            "before, and use optimizer.freeze and unfreeze; frozen parameters cost nothing."
        )


def mixed(reduced: type[R], optimizer: Optimizer) -> R:
    """Return an instance of both classes, to take over this optimizer."""
    kind = type(optimizer)
    both: Any = type(kind.__name__, (reduced, kind), {})
    found: R = both.__new__(both)
    return found


def refuse_irreducible(optimizer: Optimizer, model: nn.Module, passes: int) -> None:
    """Raise Mistake if the optimizer cannot be wrapped."""
    if isinstance(optimizer, Reduced):
        raise Mistake("The optimizer is wrapped already: to freeze and unfreeze, use its own methods.")
    if passes < 1:
        raise Mistake(f"comm.wrap got passes={passes}: expected at least one.")
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise Mistake(
                f"Parameter {name} is {parameter.dtype}, which is not reduced here: keep parameters in float32 "
                "(model.float()) and let autocast compute in another type, with --run.precision or "
                "Trainer(precision=...)."
            )
        if not parameter.is_contiguous():
            raise Mistake(f"Parameter {name} is not contiguous: channels-last may be used for activations only.")
    known = set(model.parameters())
    strangers = sum(parameter not in known for parameter in parameters_of(optimizer))
    if strangers:
        raise Mistake(
            f"{strangers} of {len(parameters_of(optimizer))} parameters of the optimizer are not the model's: give "
            "comm.wrap the model whose parameters the optimizer has."
        )


def _owned(optimizer: Reduced, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters; Mistake if they cannot be frozen or unfrozen now."""
    parameters = list(parameters)
    _refuse_inside_step(optimizer, "Parameters were frozen or unfrozen")
    strangers = set(parameters) - set(parameters_of(optimizer))
    if strangers:
        raise Mistake(
            f"{len(strangers)} of {len(parameters)} parameters are not the optimizer's: give it all that are to be "
            "trained at any time; frozen ones cost it nothing."
        )
    return parameters


def _refuse_inside_step(optimizer: Reduced, what: str) -> None:
    if optimizer.so_far.counts:
        raise Mistake(f"{what} inside a step: do it after it, before the next backward.")


def _too_often(name: str, count: int, passes: int) -> str:
    return (
        f"The gradient of {name} was computed {count} times in a step of {passes} "
        f"{'pass' if passes == 1 else 'passes'}: give comm.wrap passes={count}, or add the losses and call backward() "
        "once; a step that is left out ends with optimizer.zero_grad()."
    )


def _refuse_order(optimizer: Reduced, *, from_scaler: bool) -> None:
    """Raise Mistake if `step` and `synchronize` are called in an order that gives other gradients."""
    if optimizer.synchronizes and from_scaler:
        raise Mistake(
            "scaler.step(optimizer) unscales gradients while they are being reduced: call optimizer.synchronize() "
            "after the last backward(), and scaler.step(optimizer) inside `with optimizer.skip_synchronize():`."
        )
    if not optimizer.synchronizes and not optimizer.is_synchronized:
        raise Mistake(
            "step() inside optimizer.skip_synchronize() has gradients that are not reduced: call "
            "optimizer.synchronize() before it, in each step."
        )
    if optimizer.synchronizes and optimizer.is_synchronized:
        warnings.warn(
            "optimizer.step() reduces the gradients once more after optimizer.synchronize(): step inside "
            "`with optimizer.skip_synchronize():`.",
            stacklevel=3,
        )


def _refuse_frozen_otherwise(optimizer: Reduced) -> None:
    wanted = {parameter for parameter in parameters_of(optimizer) if parameter.requires_grad}
    changed = optimizer.trained.parameters ^ wanted
    if changed:
        raise Mistake(
            f"{len(changed)} parameters were frozen or unfrozen by requires_grad after the optimizer was wrapped: use "
            "optimizer.freeze and unfreeze, which change what is reduced."
        )


def _refuse_layouts(optimizer: Reduced, numbers: Iterable[int]) -> None:
    """Raise Mistake for a gradient, in buckets of these numbers, whose memory Horovod would add up in another order."""
    for parameter in itertools.chain.from_iterable(optimizer.trained.buckets[number] for number in numbers):
        gradient = parameter.grad
        if gradient is not None and (gradient.layout != torch.strided or not gradient.is_contiguous()):
            raise Mistake(
                f"The gradient of {optimizer.trained.names[parameter]} is not contiguous: give it the strides of "
                "the parameter; leave sparse=True out of an embedding."
            )


def _changed(optimizer: Reduced) -> str:
    """Return a sentence if the program has touched gradients that may be on their way to others; empty: it has not.

    Horovod writes past torch, which counts the versions of a tensor.
    """
    for parameter, (gradient, version) in optimizer.so_far.seen.items():
        if parameter.grad is not gradient or gradient._version != version:
            return (
                f"The gradient of {optimizer.trained.names[parameter]} was changed or dropped between backward() "
                "and the step, while it is being reduced: call optimizer.synchronize() before you clip, unscale or "
                "change gradients, and then step inside `with optimizer.skip_synchronize():`."
            )
    return ""


def _comes_from_scaler() -> bool:
    """Return whether torch's GradScaler, if enabled, calls the step; a scheduler may have put a function in between."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):
        if frame and frame.f_code is torch.amp.GradScaler.step.__code__:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame and frame.f_back
    return False
