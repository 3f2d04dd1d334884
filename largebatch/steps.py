"""The steps of a loop of your own over a Dataset of torch: order, draws and checkpoints as in largebatch.train."""

import json
import random
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from largebatch import checkpoint
from largebatch.augment import seed_draws, seed_for
from largebatch.data.order import Plan
from largebatch.engine import TrainState
from largebatch.files import run_lock
from largebatch.ranks import Ranks, StoppedEarly
from largebatch.ranks.mistakes import Mistake
from largebatch.ranks.replicas import share
from largebatch.ranks.signals import SIGNALS, Signals
from largebatch.ranks.stop_points import StopPoints
from zoo import named_weights

ORDER = ("num_samples", "global_batch_size", "micro_batch_size", "num_images", "seed")  # of a plan
OPTIMIZER = "the optimizer"
TAKEN = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}  # options of DataLoader


class Steps:
    """The optimizer steps of a run, in an exact order, on any number of ranks.

        for micro_batches in steps:
            for images, labels, weight in micro_batches:
                (weight * loss(model(images), labels)).backward()
            optimizer.step()
            optimizer.zero_grad()

    An epoch takes each sample once; a batch may span two epochs, and the last one of the run may be short. A rank
    yields its micro-batches, as the DataLoader collates them, each with the weight of its mean loss: the gradients,
    summed over the passes and averaged over the ranks, are those of the mean loss of the whole batch. A short step may
    have no micro-batch on a rank, which takes the step all the same.
    What a sample's __getitem__ draws from torch, numpy.random or random follows from (seed, epoch, sample). What is
    drawn for a micro-batch, such as dropout, follows from (seed, step, number of the micro-batch). So neither the
    ranks, nor worker processes, nor a resume change a draw.

    Args:
        dataset: has __getitem__ and __len__; the same on all ranks.
        micro_batch_size: samples of a forward and backward pass; `passes`, for `comm.wrap`, follows from it.
        options: those of DataLoader, such as num_workers, collate_fn and pin_memory.
    """

    def __init__(
        self,
        comm: Ranks,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        micro_batch_size: int,
        epochs: int,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            kind = type(dataset).__name__
            raise Mistake(f"Steps got a {kind} as dataset: expected one with __getitem__ and __len__, to be shuffled.")
        if epochs < 1:
            raise Mistake(f"epochs is {epochs}, expected at least 1.")
        if theirs := TAKEN & options.keys():
            raise Mistake(f"Steps got {', '.join(sorted(theirs))}, which follow from its own order: leave them out.")
        self.comm, self.step, self._inside = comm, 0, False
        with comm.together("the order of the samples"):
            count = len(dataset)
            if not count:
                raise ValueError("Steps got a dataset without samples.")
            self.plan = Plan(count, global_batch_size, micro_batch_size, epochs * count, seed)
        self.num_steps, self.passes = self.plan.num_steps, self.plan.passes_in_phase(0, comm.data_size)
        self._order = {name: value for name, value in asdict(self.plan).items() if name in ORDER}
        first = comm.broadcast_object(self._order, name="steps/order")
        with comm.together("the order of the samples"):
            if other := _difference(first, self._order):
                raise ValueError(f"Steps got another order than on rank 0, {other}: give all ranks the same.")
        self._dataset, self._options = _Seeded(dataset, seed), options
        self._saved: tuple[Path, nn.Module, Optimizer, torch.amp.GradScaler, int] | None = None
        self._points: StopPoints | None = None
        self._signals = Signals()

    def checkpoint(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Go on from the newest checkpoint in a folder, if there is one; save one each `every` steps, and at the end.

        Every rank calls it before the loop. The two newest are kept, as folder/checkpoints/STEP/model.safetensors with
        the model's own names, and state.pt. SIGTERM, SIGUSR1 or Ctrl-C to any rank then end all of them after a step,
        with a checkpoint and exit code 75. All ranks raise Stopped for a checkpoint of another order, model or
        optimizer, and for a folder in which another job trains.
        """
        if every < 1 or self._saved:
            raise Mistake(f"steps.checkpoint got every={every}: expected 1 step or more, in one call before the loop.")
        if "://" in str(folder):
            raise Mistake(f"steps.checkpoint got the address {folder} as folder: expected a folder of this host.")
        folder, scaler = Path(folder), scaler or torch.amp.GradScaler(enabled=False)
        held = ExitStack()
        with self.comm.together("the checkpoint"):
            if self.comm.rank == 0:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    held.enter_context(run_lock.hold(folder))
                    if path := checkpoint.latest(folder):
                        self._check(path, model, optimizer)
                        self.step = checkpoint.load(path, model=model, optimizer=optimizer, scaler=scaler).step
                except ValueError as error:  # of a run, which has options
                    raise ValueError(str(error).replace("--run.folder", "folder")) from None
        self.comm.before_shutdown(held.close)
        self.step, state = self.comm.broadcast_object((self.step, scaler.state_dict()), name="steps/resume")
        scaler.load_state_dict(state)
        share(self.comm, model, optimizer)
        self._saved = folder, model, optimizer, scaler, every
        self._points = self.comm.stop_points(self._signals.requests)

    def __iter__(self) -> Iterator[Iterator[tuple[Any, ...]]]:
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=self._order_of_rank(),
            generator=torch.Generator(),  # else the loader draws from the program's numbers
            **self._options,
        )
        if self._inside:
            raise Mistake(f"the loop was left in step {self.step + 1}: keep one iter(steps), and go on with that.")
        listening: AbstractContextManager[Any] = self._signals if self._points else nullcontext()
        with listening:
            batches = iter(loader)
            while self.step < self.num_steps:
                if self._points and self._points.leave():
                    self._save()
                    raise StoppedEarly(self._explain(self._points.counts))
                micro_batches = self._micro_batches(batches)
                self._inside = True
                yield micro_batches
                if next(micro_batches, None) is not None:
                    raise Mistake(f"step {self.step + 1} has micro-batches left: take all before the next step.")
                self._inside = False
                self.step += 1
                if self._saved and (self.step % self._saved[-1] == 0 or self.step == self.num_steps):
                    self._save()

    def _order_of_rank(self) -> Iterator[list[tuple[int, int]]]:
        """Yield the (epoch, sample) pairs of each micro-batch of this rank, from the coming step on."""
        for step in range(self.step, self.num_steps):
            for job in self.plan.micro_batches(step, self.comm.data_rank, self.comm.data_size):
                epochs, samples = self.plan.samples(job.start, job.stop)
                yield [*zip(epochs.tolist(), samples.tolist())]

    def _micro_batches(self, batches: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the micro-batches of the coming step. A program's random numbers are afterwards what they were."""
        with _own_draws() as device:
            for job in self.plan.micro_batches(self.step, self.comm.data_rank, self.comm.data_size):
                batch = next(batches)
                _seed_all(seed_for(self.plan.seed, self.step, job.number, purpose="model"), device)
                weight = (job.stop - job.start) * self.comm.data_size / self.plan.window_images(self.step)
                yield (*batch, weight) if isinstance(batch, (list, tuple)) else (batch, weight)

    def _describe(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        shapes = {f"the model's {name}": [*tensor.shape] for name, tensor in named_weights(model).items()}
        return self._order | {OPTIMIZER: type(optimizer).__name__} | shapes  # that of `comm.wrap` keeps the name

    def _check(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
        """Raise ValueError if a checkpoint is of another order or optimizer, or of a model with other tensors."""
        try:
            saved = json.loads(checkpoint.read_state(path)["config"])
        except json.JSONDecodeError:
            raise ValueError(f"Checkpoint {path} is not of a loop with Steps: choose another folder.") from None
        now = self._describe(model, optimizer)
        if other := _difference({OPTIMIZER: now[OPTIMIZER]} | saved, now):  # older checkpoints do not name it
            raise ValueError(
                f"Checkpoint {path} was made with {other}: give what it was made with, or another folder to begin anew."
            )

    def _save(self) -> None:
        assert self._saved
        folder, model, optimizer, scaler, _ = self._saved
        state = TrainState(self.step, images=min(self.plan.start(self.step), self.plan.num_images))
        text = json.dumps(self._describe(model, optimizer))

        def write() -> None:
            snapshot = checkpoint.take_snapshot(
                model=model, optimizer=optimizer, scaler=scaler, state=state, config_text=text
            )
            try:
                checkpoint.save(folder, snapshot)
            except OSError as error:
                raise ValueError(
                    f"the checkpoint of step {self.step} could not be written ({error}): older ones are kept; mend "
                    "that, and the same command goes on from the newest."
                ) from error

        self.comm.from_rank_0(write, phase="saving")

    def _explain(self, counts: list[int]) -> str:
        ranks = self.comm.size
        told = [f"{signal.name} reached {n} of {ranks} ranks" for signal, n in zip(SIGNALS, counts) if n]
        return (
            f"stopped after step {self.step} of {self.num_steps}, because "
            f"{' and '.join(told) or 'the launcher is gone'}; the same command resumes (exit code 75)."
        )


class _Seeded(Dataset[Any]):
    """A dataset whose draws for a sample follow from (seed, epoch, sample)."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, place: tuple[int, int]) -> Any:
        _seed_all(seed_for(self.seed, *place, purpose="sample"), torch.device("cpu"))
        return self.dataset[place[1]]


def _seed_all(seed: int, device: torch.device) -> None:
    seed_draws(seed, device)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def _own_draws() -> Iterator[torch.device]:
    """Let a block draw as it likes; yield the device whose draws count."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices):
        yield torch.device("cuda" if devices else "cpu")
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def _difference(was: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the first difference between two orders, and perhaps models; "" if there is none."""
    both = ((name, was.get(name, "none"), now.get(name, "none")) for name in was | now)
    return next((f"{name} {before}, now {after}" for name, before, after in both if before != after), "")
