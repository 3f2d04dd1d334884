"""The run: one training step, one loop around it, one evaluation.

Fine-tuning, validation and benchmarks use the same three. The engine knows neither recipes nor files: it is
given finished parts (build.py), and hooks do the rest. A step is one optimizer update on the global batch:
this rank's numbered micro-batches are summed by accumulation and the ranks by Horovod, so that every number
of ranks computes the same update.
"""

import logging
import math
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.augment import Augment, Augmented, seed_for
from largebatch.comm import Communicator
from largebatch.data.order import Plan
from largebatch.losses import COUNTS, count_correct
from largebatch.optim import clip_gradients, gradient_norm
from largebatch.precision import autocast

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """Where the run is. Everything else that a resumed run needs follows from these and the tensors."""

    step: int = 0  # optimizer steps done, skipped ones included
    images: int = 0  # training images seen
    skipped: int = 0  # steps whose gradient was not finite
    data: str = ""  # Index.digest() of the training images

    def advance(self, images: int, *, applied: bool) -> None:
        """Count one step over `images`."""
        self.step += 1
        self.images += images
        self.skipped += not applied


@dataclass(frozen=True)
class StepOutput:
    """What one step tells the hooks; tensors stay on the device until somebody reads them."""

    loss_sum: Tensor  # 0-d; the mean over ranks is the mean loss of the global batch
    grad_norm: Tensor  # 0-d; of the reduced gradient before clipping, the same on all ranks
    applied: bool  # False: the gradient was not finite and nothing moved
    images: int  # size of the global batch


Objective = Callable[[nn.Module, Augmented], Tensor]  # sum of the losses of a micro-batch


class Replica:
    """One copy of the model and what works on it: here, whole on one rank. largebatch.parallel divides it."""

    def optimizer(self, serial: Optimizer) -> Optimizer:
        """What trains this copy, given what would train it whole."""
        return serial

    def bind(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Tell the optimizer, wrapped by now, whose parameters it has."""

    def objective(self, serial: Objective) -> Objective:
        """The objective of this copy, given that of a whole model."""
        return serial

    def describe(self, optimizer: Optimizer) -> list[str]:
        """Lines for the log; every rank calls it."""
        return []

    def run_pass(self, trainer: "Trainer", batch: Augmented, weight: float) -> Tensor:
        """Add the gradients of a micro-batch's summed loss × `weight` to those there are; that number, 0-d."""
        with autocast(trainer.device, trainer.precision):
            loss = trainer.objective(trainer.model, batch)
        loss = loss * weight
        trainer.scaler.scale(loss).backward()  # Horovod starts reducing in the last pass
        return loss.detach()

    def complete_gradients(self, trainer: "Trainer") -> None:
        """Add what the other ranks of this copy know of the gradients, after the last pass."""

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Norm of the whole gradient, 0-d."""
        return gradient_norm(optimizer)

    def predictor(self, model: nn.Module) -> nn.Module:
        """What makes logits (B, K) of images (B, 3, H, W), on every rank, with a model like the trainer's."""
        return model

    def plain(self, trainer: "Trainer") -> tuple[nn.Module, Optimizer]:
        """Model and optimizer as one rank would have them, for rank 0 to save; every rank calls it."""
        return trainer.model, trainer.optimizer

    def blank(self, trainer: "Trainer") -> tuple[nn.Module, Optimizer]:
        """What a saved model and optimizer can be loaded into; for `take`."""
        return trainer.model, trainer.optimizer

    def take(self, trainer: "Trainer", model: nn.Module, optimizer: Optimizer) -> None:
        """Give every rank its part of what rank 0 loaded into `blank`'s; every rank calls it."""
        trainer.comm.broadcast_state(model, optimizer)


class Hook:
    """Something that watches a run. Every method runs on every rank, at these places::

        before_fit
        for each step:
            train_step                          -> StepOutput
            after_train_step(output)
            if an evaluation is due:
                evaluate                        -> metrics
                after_evaluate(metrics)
            after_step()                        checkpoints: the step and its evaluation are done
        after_fit

    A hook may communicate, if it does so on all ranks; it writes files on rank 0 only.
    """

    def before_fit(self, trainer: "Trainer") -> None:
        """The state is final: resumed, broadcast, ready for its first step."""

    def after_train_step(self, trainer: "Trainer", output: StepOutput) -> None:
        """One optimizer step is done and counted in trainer.state."""

    def after_evaluate(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        """An evaluation is done; metrics as `Trainer.evaluate` returns them, and train_loss since the last one.

        A hook may add to them, for the hooks that follow it.
        """

    def after_step(self, trainer: "Trainer") -> None:
        """Everything that belongs to this step has happened."""

    def after_fit(self, trainer: "Trainer") -> None:
        """The last step of this process is done."""


@dataclass(kw_only=True)
class Trainer:
    """The parts of a run and the loop over them. `build.build_trainer` makes one from a config."""

    comm: Communicator
    model: nn.Module
    objective: Objective
    optimizer: Optimizer  # wrapped by comm.wrap
    scaler: torch.amp.GradScaler
    base_lr: float
    schedule: Callable[[int], float]  # step -> fraction of base_lr
    plan: Plan
    open_batches: Callable[[int], Any]  # first step -> iterator of this rank's micro-batches, to be closed
    eval_batches: Iterable[Any]
    augment: Augment
    seed: int
    precision: str
    clip_norm: float | None
    eval_images: int  # training images between evaluations
    device: torch.device
    replica: Replica = field(default_factory=Replica)
    hooks: Sequence[Hook] = ()
    state: TrainState = field(default_factory=TrainState)
    stop_reason: str = ""  # a hook that wants no further step says why, on all ranks after the same one

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.plan.num_steps

    @property
    def epoch(self) -> float:
        """Passes over the training set so far."""
        return self.state.images / self.plan.num_samples

    def lr(self) -> float:
        """Learning rate of the coming step."""
        return self.base_lr * self.schedule(self.state.step)

    # -- one step ----------------------------------------------------------------------------------------------

    def window(self, batches: Iterator[Any]) -> Iterator[Augmented]:
        """This rank's micro-batches of the coming step, augmented, in the order of their numbers.

        Mixup, boxes and everything the model draws are seeded by (seed, step, number): who computes a micro-batch
        does not matter to it.
        """
        for planned in self.plan.micro_batches(self.state.step, self.comm.data_rank, self.comm.data_size):
            batch = next(batches)
            assert (batch.step, batch.number) == (planned.step, planned.number), "the loader left the plan"
            torch.manual_seed(seed_for(self.seed, planned.step, planned.number, purpose="model"))
            generator = torch.Generator().manual_seed(seed_for(self.seed, planned.step, planned.number))
            yield self.augment(batch.images, batch.labels, generator, batch.token_labels)

    def train_step(self, batches: Iterator[Any]) -> StepOutput:
        """One optimizer step on the global batch."""
        window_images = self.plan.window_images(self.state.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr()
        loss_sum = torch.zeros((), device=self.device)  # read only when logged: nobody waits for the device
        self.scaler.scale(loss_sum)  # the scale comes with its first use, and a short window may give this rank none
        weight = self.comm.data_size / window_images  # of a sum over samples: then the mean over ranks of the sum
        for batch in self.window(batches):  # over passes is the mean of the batch
            loss_sum += self.replica.run_pass(self, batch, weight)
        self.replica.complete_gradients(self)
        self.comm.synchronize(self.optimizer)  # from here on all ranks hold the same gradients,
        self.scaler.unscale_(self.optimizer)  # so a local check of them decides alike everywhere
        grad_norm = self.replica.gradient_norm(self.optimizer)
        clip_gradients(self.optimizer, grad_norm, self.clip_norm)  # applied as the optimizer reads them
        applied = self.comm.apply(self.optimizer, self.scaler, grad_norm)  # skipped if the norm is not finite
        self.model.zero_grad(set_to_none=True)
        self.state.advance(window_images, applied=applied)  # the schedule moves on even if the weights did not
        return StepOutput(loss_sum, grad_norm, applied, window_images)

    # -- the loop ----------------------------------------------------------------------------------------------

    def fit(self, *, max_steps: int = 0) -> str:
        """Train from the present state to step `max_steps` (0: to the end of the run); why not so far, or nothing."""
        last_step = min(max_steps or self.num_steps, self.num_steps)
        self._each("before_fit")
        with closing(self.open_batches(self.state.step)) as batches:
            self._train_until(last_step, batches)
        self._each("after_fit")
        return self.stop_reason if self.state.step < last_step else ""

    def _train_until(self, last_step: int, batches: Iterator[Any]) -> None:
        losses = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum and images since the last evaluation
        while self.state.step < last_step and not self.stop_reason:
            self.model.train()
            output = self.train_step(batches)
            self._each("after_train_step", output)
            if output.applied:
                losses[0] += output.loss_sum * output.images
                losses[1] += output.images
            if self.due(self.eval_images):
                self._each("after_evaluate", {"train_loss": self.mean_loss(losses)} | self.evaluate())
                losses.zero_()
            self._each("after_step")

    def due(self, interval_images: int) -> bool:
        """Whether the step just done passed a multiple of `interval_images`, or was the last of the run."""
        before = self.state.images - self.plan.window_images(self.state.step - 1)
        return self.state.images // interval_images > before // interval_images or self.state.step == self.num_steps

    def mean_loss(self, losses: Tensor) -> float:
        """Mean loss per image from every rank's (sum, images)."""
        total, images = self.comm.allreduce(losses.cpu(), name="train_loss").tolist()
        return total / images if images else math.nan  # nan: every step was skipped

    def _each(self, event: str, *arguments: Any) -> None:
        for hook in self.hooks:
            getattr(hook, event)(self, *arguments)

    def evaluate(self, model: nn.Module | None = None) -> dict[str, float]:
        """`evaluate` of the model as it is now, or of another one."""
        model = self.replica.predictor(self.model if model is None else model)
        return evaluate(model, self.eval_batches, comm=self.comm, device=self.device, precision=self.precision)


def evaluate(
    model: nn.Module, batches: Iterable[Any], *, comm: Communicator, device: torch.device, precision: str
) -> dict[str, float]:
    """top1 and top5 in percent, mean loss in nats, images: exact, each image counted once at any number of ranks."""
    totals = tally(model, batches, device=device, precision=precision)
    sums = dict(zip(COUNTS, comm.allreduce(totals, name="evaluate").tolist()))
    images = sums["images"]
    return {
        "top1": 100 * sums["top1"] / images,
        "top5": 100 * sums["top5"] / images,
        "loss": sums["loss"] / images,
        "images": images / comm.model_size,  # each rank of a replica has counted its images
    }


def count_batch(logits: Tensor, batch: Any) -> Tensor:
    """`count_correct` of a batch."""
    return count_correct(logits, batch.labels)


@torch.inference_mode()
def tally(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device,
    precision: str,
    count: Callable[[Tensor, Any], Tensor] = count_batch,
    num_counts: int = len(COUNTS),
) -> Tensor:
    """What `count(logits, batch)`, (num_counts,), adds up to over the batches of this rank: float64, on the host."""
    model.eval()
    totals = torch.zeros(num_counts, dtype=torch.float64, device=device)
    for batch in batches:
        with autocast(device, precision):
            logits = model(batch.images)
        totals += count(logits, batch)
    return totals.cpu()
