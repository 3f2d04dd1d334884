"""The training step, and the loop around it.

A step is one optimizer update on the global batch. Its passes sum over this rank's numbered micro-batches, and the
reduction over the ranks, so any number of ranks computes the same update. The engine knows neither recipes nor files:
`assembly` gives it finished parts, and hooks do the rest.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from largebatch.augment import Augment, Augmented, seed_draws, seed_for
from largebatch.data.order import Plan
from largebatch.evaluation import evaluate
from largebatch.losses import Objective
from largebatch.native.copies import to_host
from largebatch.optim import LookSam, clip_gradients, follow_half_life
from largebatch.precision import autocast
from largebatch.ranks import Ranks
from largebatch.ranks.reduction import Reduced
from largebatch.replica import Replica

# The smoothed training loss (hooks/divergence.py): now, its lowest value, and the last step before it rose.
Smoothed = tuple[float, float, int]


@dataclass
class TrainState:
    """The place of the run. Everything else that a resumed run needs follows from these and the tensors."""

    step: int = 0  # optimizer steps done, skipped ones included
    images: int = 0  # training images seen
    applied_images: int = 0  # those of the steps that were not skipped
    skipped: int = 0  # steps whose gradient was not finite
    data: str = ""  # Index.digest() of the training images
    # The mean training loss up to this step, if the evaluation after the step is still to be made. None: it is not.
    train_loss: float | None = None
    # Since the last evaluation: the sum of the batches' mean losses, each times its images, and these images.
    losses: tuple[float, float] = (0.0, 0.0)
    in_a_row: int = 0  # steps skipped up to this one, without a step between
    best: tuple[str, float, int] | None = None  # metric, value and step of the best evaluation, if it is to be kept
    smoothed: Smoothed | None = None
    halvings: int = 0  # of the learning rate, each after a return to an older checkpoint
    phases: tuple[tuple[int, int], ...] = ()  # those of the plan; a ramp by the noise scale decides them in the run
    noise: tuple[float, float, int] | None = None  # the averages of hooks.NoiseScale, in a run that has it

    def advance(self, images: int, *, applied: bool) -> None:
        """Count one step over `images`."""
        self.step += 1
        self.images += images
        self.applied_images += images * applied
        self.skipped += not applied
        self.in_a_row = 0 if applied else self.in_a_row + 1


class LeftEarly(Exception):
    """Raised inside a step or an evaluation, on all ranks at the same point, if a hook ends the run there."""


@dataclass(frozen=True)
class StepOutput:
    """The results of one step, for the hooks; tensors stay on the device until somebody reads them."""

    loss_sum: Tensor  # 0-d; the mean over ranks is the mean loss of the global batch
    loss_on_host: Callable[[], Tensor]  # gives it as float64 in the host's memory; nobody waits for it any more
    grad_norm: Tensor  # 0-d; of the reduced gradient before clipping, the same on all ranks
    applied: bool  # False: the gradient was not finite and nothing moved
    images: int  # size of the global batch
    waited_s: float = 0.0  # the time that this rank waited for its images


class Batches(Sized, Iterable[Any], Protocol):
    """Batches that can be counted, and iterated again and again."""


@dataclass(kw_only=True)
class Trainer:
    """The parts of a run, and the loop; `assembly.build_trainer` makes one from a config."""

    comm: Ranks
    model: nn.Module
    objective: Objective
    optimizer: Reduced
    scaler: torch.amp.GradScaler
    learning_rate: Callable[[Plan, int], float]  # plan, step -> rate, before the state's halvings
    plan: Plan
    open_batches: Callable[[int], Any]  # first step -> iterator of this rank's micro-batches, to be closed
    eval_batches: Batches
    augment: Augment
    seed: int
    precision: str
    clip_norm: float | None
    eval_images: int  # training images between evaluations; 0: no evaluations
    device: torch.device
    replica: Replica  # attached to this model, optimizer and comm
    hooks: Sequence["Hook"] = ()
    sam: LookSam | None = None  # its state is that of the optimizer
    average: nn.Module | None = None  # average of the weights, kept by hooks.ema, saved and resumed with the model
    state: TrainState = field(default_factory=TrainState)
    losses: Tensor | None = None  # those of this rank, whose mean goes into the state when it is saved
    max_steps: int = 0  # those that `fit` was given
    waited_s: float = 0.0  # the time that this rank waited for the images of the newest step
    pass_s: list[float] = field(default_factory=list)  # the time of each forward and backward pass of the newest step
    stop_reason: str = ""  # a hook that ends the run says why, on all ranks at the same point
    # A hook sets it, on all ranks after the same step, if the run is to go on from an older state, which it loads.
    rollback: "Callable[[Trainer], None] | None" = None

    # -- one step ----------------------------------------------------------------------------------------------

    @record_function("step")
    def train_step(self, batches: Iterator[Any]) -> StepOutput:
        """Do one optimizer step on the global batch: this rank's micro-batches, one reduction, one update."""
        images, ranks = self.plan.window_images(self.state.step), self.comm.data_size
        self.optimizer.expect_passes(self.plan.passes_in_phase(self.state.step, ranks))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr() * group.get("lr_scale", 1.0)  # the scale is that of optim.layer_decay
            follow_half_life(group, images, before=self.state.applied_images)
        # Losses are sums over samples. Scaled by ranks / images, the mean over ranks of the accumulated gradients is
        # the gradient of the batch mean.
        compute = partial(self.compute_gradient, ranks / images)
        loss_sum, grad_norm = self.sam.gradient(self.optimizer, compute, batches) if self.sam else compute(batches)
        norm = self.replica.gradient_norm() if self.sam else grad_norm  # of the gradient that the optimizer takes
        loss_on_host = to_host(loss_sum.double())  # before the optimizer's work, for which a later copy would wait
        clip_gradients(self.optimizer, norm, self.clip_norm)  # LAMB applies the factor while it reads the gradients
        # The step's only wait for the device: to read the norm. If it is not finite, the update is skipped.
        with record_function("optimizer step"):
            applied = self.optimizer.step_if_finite(self.scaler, norm)
        if self.sam:
            self.sam.complete_step(self.optimizer, applied=applied)
        self.replica.complete_step(applied=applied)
        self.state.advance(images, applied=applied)  # the schedule moves on even if the weights did not
        return StepOutput(loss_sum, loss_on_host, grad_norm, applied, images, self.waited_s)

    def compute_gradient(self, weight: float, batches: Iterator[Any], *, again: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the gradient of the global batch; return this rank's summed loss × `weight`, and the norm, 0-d.

        again: replace the gradient by that of the same micro-batches at other weights.
        """
        if again:
            self.scaler.update(self.scaler.get_scale())  # the same scale, but there is another gradient to unscale
            self.replica.begin_again()
        loss_sum = torch.zeros((), device=self.device)  # read only when logged
        # GradScaler creates its scale on first use. In a short last step this rank may have no micro-batch, and
        # without a scale `unscale_` would fail.
        self.scaler.scale(loss_sum)
        for batch in self.window(batches, again=again):
            loss_sum += self.replica.run_pass(batch, weight, self.forward_backward)
        self.replica.complete_gradients()
        with record_function("synchronize"):
            self.optimizer.synchronize()
        # From here on all ranks hold the same gradients, so what each decides by them is the same on all.
        self.scaler.unscale_(self.optimizer)
        return loss_sum, self.replica.gradient_norm()

    def forward_backward(self, batch: Augmented, weight: float) -> Tensor:
        """Add the gradients of a micro-batch's summed loss × `weight` to those there are; return that loss, 0-d."""
        with record_function("forward"), autocast(self.device, self.precision):
            loss = self.objective(self.model, batch)
        loss = loss * weight
        with record_function("backward"):
            self.scaler.scale(loss).backward()  # Horovod starts reducing in the last pass
        return loss.detach()

    def window(self, batches: Iterator[Any], *, again: bool = False) -> Iterator[Augmented]:
        """Yield this rank's micro-batches of the coming step, augmented, in the order of their numbers."""
        mine = self.plan.micro_batches(self.state.step, self.comm.data_rank, self.comm.data_size)
        if not again:
            self.waited_s, self.pass_s = 0.0, []
        for number in range(self.plan.passes_in_step(self.state.step, self.comm.data_size)):
            self.pass_point(f"step {self.state.step + 1}, pass {number + 1}{' at perturbed weights' * again}")
            if number == len(mine):  # the last pass of a step may have fewer micro-batches than ranks
                break
            began = time.perf_counter()
            with record_function("load"):
                batch = next(batches)
            self.waited_s += time.perf_counter() - began
            assert (batch.step, batch.number) == (self.state.step, mine[number].number), "the loader left the plan"
            augmented = self.prepare(batch)
            if number == 0 and not again:
                self._each("at_first_batch", augmented)
            began = time.perf_counter()
            yield augmented
            self.pass_s.append(time.perf_counter() - began)

    def prepare(self, batch: Any) -> Augmented:
        """Return a micro-batch augmented. All that is drawn for it follows from (seed, step, number), on any rank."""
        seed_draws(seed_for(self.seed, batch.step, batch.number, purpose="model"), self.device)
        generator = torch.Generator().manual_seed(seed_for(self.seed, batch.step, batch.number))
        return self.augment(batch.images, batch.labels, generator, batch.token_labels)

    def lr(self) -> float:
        """Return the learning rate of the coming step."""
        return self.learning_rate(self.plan, self.state.step) * 0.5**self.state.halvings

    # -- the loop ----------------------------------------------------------------------------------------------

    def fit(self, *, max_steps: int = 0) -> str:
        """Train from the present state to step `max_steps` (0: to the end of the run).

        Returns the reason if it stopped early, else "".
        """
        self.max_steps = max_steps
        self.replica.check_objective(self.objective)
        with self.replica.statistics.over_steps():
            self._each("before_fit")
            self._train()
            while self.rollback:
                roll_back, self.rollback = self.rollback, None
                roll_back(self)
                self.replica.statistics.take_up()
                self._each("after_rollback")
                self._train()
            self._each("after_fit")
        return self.stop_reason if self.state.step < self.last_step or self.state.train_loss is not None else ""

    def change_phases(self, phases: tuple[tuple[int, int], ...]) -> None:
        """Cut the rest of the run by other phases, on every rank after the same step; those so far must be in them."""
        self.plan = replace(self.plan, phases=phases)
        self.state.phases = phases

    def _train(self) -> None:
        """Train to the last step, or until a hook asks for a rollback; reopen the batches if the plan changes."""
        if not self.eval_images:
            self.state.train_loss = None  # an evaluation that was due is no longer wanted
        elif self.state.train_loss is not None:  # the run was stopped in this evaluation
            self._evaluate_and_report()
        opened = None
        while self.plan is not opened and not self.rollback:
            opened = self.plan
            with closing(self.open_batches(self.state.step)) as batches:
                self._train_until(batches)

    def _train_until(self, batches: Iterator[Any]) -> None:
        """Train to the last step, or until a hook changes the plan, ends the run or asks for a rollback."""
        plan, losses = self.plan, self.own_losses()
        while self.state.step < self.last_step and not self.stop_reason and self.plan is plan:
            self.model.train()
            try:
                output = self.train_step(batches)
            except LeftEarly:
                # No rank has begun to reduce the gradients of this step.
                self.optimizer.zero_grad(set_to_none=True)  # which also forgets the passes
                self.replica.drop_step()
                return
            self._each("after_train_step", output)
            if self.rollback:
                return
            if output.applied:
                losses[0] += output.loss_sum * output.images
                losses[1] += output.images
            if self.eval_images and self.due(self.eval_images):
                total, images = self.total_losses()
                self.state.train_loss = total / images if images else math.nan  # nan: every step was skipped
                losses.zero_()
                self._evaluate_and_report()
            self._each("after_step")

    def _evaluate_and_report(self) -> None:
        """Make the evaluation that is due. If a hook ends the run in it, it remains due."""
        try:
            self._each("after_evaluate", {"train_loss": self.state.train_loss} | self.evaluate())
        except LeftEarly:
            return
        self.state.train_loss = None

    def pass_point(self, phase: str) -> None:
        """Let the hooks end the run before `phase`, where every rank comes between the same collectives.

        Raises LeftEarly, on all ranks.
        """
        self.comm.progress(phase)
        before = self.stop_reason  # of a hook that ended the run elsewhere, for which nothing is left out
        self._each("at_point")
        if self.stop_reason != before:
            raise LeftEarly

    @property
    def num_steps(self) -> int:
        return self.plan.num_steps

    @property
    def last_step(self) -> int:
        """The step at which `fit` ends."""
        return min(self.max_steps or self.num_steps, self.num_steps)

    @property
    def complete(self) -> bool:
        """Return whether all steps and the last evaluation are done."""
        return self.state.step >= self.num_steps and self.state.train_loss is None

    @property
    def epoch(self) -> float:
        """Passes over the training set so far."""
        return self.state.images / self.plan.epoch_images

    def due(self, interval_images: int, *, ahead: bool = False) -> bool:
        """Return whether the step just done passed a multiple of `interval_images`, or was the last of the run.

        ahead: return what this will be after the coming step.
        """
        step = self.state.step + ahead
        images = self.state.images + ahead * self.plan.window_images(self.state.step)
        before = images - self.plan.window_images(step - 1)
        return images // interval_images > before // interval_images or step == self.num_steps

    def own_losses(self) -> Tensor:
        """Return `losses`; those of the state if it was just loaded, whose mean over any number of ranks is right."""
        if self.losses is None:
            self.losses = torch.tensor(self.state.losses, dtype=torch.float64, device=self.device)
        return self.losses

    def total_losses(self) -> tuple[float, float]:
        """Return `TrainState.losses` as they are now: the mean over the ranks. A collective."""
        total, images = self.comm.allreduce(self.own_losses().cpu(), name="train_loss").tolist()
        return total / self.comm.size, images / self.comm.size

    def _each(self, event: str, *arguments: Any) -> None:
        for hook in self.hooks:
            getattr(hook, event)(self, *arguments)

    def evaluate(self, model: nn.Module | None = None) -> dict[str, float]:
        model = self.replica.predictor(self.model if model is None else model)
        num_rounds = max(self.comm.allgather_object(len(self.eval_batches), name="evaluation/rounds"))
        with closing(self._evaluated_batches(num_rounds)) as batches:
            return evaluate(model, batches, comm=self.comm, device=self.device, precision=self.precision)

    def _evaluated_batches(self, num_rounds: int) -> Generator[Any, None, None]:
        """Yield this rank's batches, with as many points as on every other rank.

        No collective here: torch is in inference mode, in which Horovod cannot write its results.
        """
        batches = iter(self.eval_batches)
        for number in range(num_rounds):
            self.pass_point(f"evaluation after step {self.state.step}, batch {number + 1}")
            yield from itertools.islice(batches, 1)


class Hook:
    """A part that watches a run. Every method runs on every rank, at these places::

        before_fit
        for each step:
            for each pass:
                at_point()
                at_first_batch(batch)           in the first pass only
            train_step                          -> StepOutput
            after_train_step(output)
            if an evaluation is due:
                for each batch:
                    at_point()
                evaluate                        -> metrics
                after_evaluate(metrics)
            after_step()                        checkpoints: the step and its evaluation are done
        after_fit

    If a hook sets rollback in after_train_step, an older state is loaded next, after_rollback is called, and the loop
    goes on from there.

    A hook may communicate, if it does so on all ranks; it writes files on rank 0 only. If a hook sets stop_reason at a
    point, the run leaves the step or the evaluation there, and after_fit is next: the step was never taken, and the
    evaluation is due when the run is resumed.
    """

    def before_fit(self, trainer: Trainer) -> None:
        """Called when the state is final: resumed, broadcast, ready for its first step."""

    def at_point(self, trainer: Trainer) -> None:
        """Called before each pass of a step and each batch of an evaluation, on all ranks equally often."""

    def at_first_batch(self, trainer: Trainer, batch: Augmented) -> None:
        """Called with a rank's first micro-batch of a step, before its pass; a rank may have none."""

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """Called when one optimizer step is done and counted in trainer.state."""

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Called after an evaluation; metrics are those of `Trainer.evaluate`, and train_loss since the last one.

        A hook may add to them, for the hooks that follow it.
        """

    def after_step(self, trainer: Trainer) -> None:
        """Called when everything that belongs to this step has happened."""

    def after_rollback(self, trainer: Trainer) -> None:
        """Called when the state is that of an older checkpoint: the steps after it are to be forgotten."""

    def after_fit(self, trainer: Trainer) -> None:
        """Called after the last step of this process."""
