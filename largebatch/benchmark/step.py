"""Whole training steps, on every rank of a launch, beside timm's model and LAMB in torch's DistributedDataParallel.

Ours is the Trainer that `largebatch.train` would run, with its loader. The peer trains on micro-batches of the same
loader, augmented by the same function, and accumulates gradients under `no_sync`. So only the model's code, the
reduction and the optimizer differ.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from largebatch.augment import Augmented
from largebatch.benchmark.ceiling import measure_ceiling, mfu
from largebatch.benchmark.measure import Contender, Report, Round, compare, now
from largebatch.benchmark.model import timm_name, training_flops
from largebatch.build import build_trainer
from largebatch.comm import Communicator
from largebatch.config import TrainConfig, parse
from largebatch.engine import Trainer
from largebatch.losses import soft_target_cross_entropy
from largebatch.parallel.rendezvous import start_torch_distributed
from largebatch.precision import autocast
from largebatch.recipes import choose
from largebatch.start import report_mistakes, set_up, start_ranks
from zoo.model import ZooModel

DEFAULTS = ["--data=synthetic", "--data.micro_batch_size=32", "--data.global_batch_size=256"]
DEFAULTS += ["--run.precision=auto", "--run.folder=runs/benchmark/step"]
DEFAULTS += ["--model.pos_drop_rate=0", "--model.proj_drop_rate=0"]  # dropout costs both the same


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; the options of largebatch.train may follow them."""
    parser.add_argument("--vs", nargs="+", default=["timm"], choices=["timm", "none"])
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each contender")


def run(options: argparse.Namespace) -> Report | None:
    """Measure steps of the run that `options.training` describes; the report on rank 0."""
    argv = DEFAULTS + options.training
    with report_mistakes():
        config = parse(argv, choose_recipe=choose, prog="python -m largebatch.benchmark step")
    with start_ranks(config) as comm:
        config, device = set_up(config, comm)
        with closing(Feed(build_trainer(config, comm, device=device))) as feed:
            return measure(options, config, comm, feed)


class Feed:
    """The stream of micro-batches of a training run, which the contenders consume in turn, a step at a time."""

    def __init__(self, trainer: Trainer) -> None:
        self.plan, self.augment, self.device = trainer.plan, trainer.augment, trainer.device
        self.loader = trainer.open_batches(0)
        self.watch = Stopwatch(trainer.device)
        self.step = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self.watch.timing("waiting for data"):
            return next(self.loader)

    def train(self, trainer: Trainer) -> None:
        """The trainer's own step, on the next global batch."""
        self.watch.steps.append(Counter())
        trainer.state.step = self.step
        trainer.model.train()
        trainer.train_step(self)
        self.step += 1

    def close(self) -> None:
        """End the loader."""
        self.loader.close()


def measure(options: argparse.Namespace, config: TrainConfig, comm: Communicator, feed: Feed) -> Report | None:
    """Run the contenders in turns, then gather the measurements of all ranks."""
    contenders = [Contender("largebatch", partial(ours, config, comm, feed))]
    if "timm" in options.vs:
        contenders.append(Contender("timm + DDP", partial(timm_ddp, config, comm, feed)))
    results = compare(
        contenders,
        device=feed.device,
        rounds=options.rounds,
        barrier=partial(comm.barrier, name="benchmark/barrier"),
        quiet=comm.rank > 0,
    )
    comm.barrier(name="benchmark/ceiling")
    ceiling = measure_ceiling(feed.device, config.run.precision)
    shares = feed.watch.shares(results[0].seconds)
    seen = comm.allgather_object(([result.peak_bytes for result in results], shares), name="benchmark/seen")
    if comm.rank > 0:
        return None
    for result, peaks in zip(results, zip(*(peaks for peaks, _ in seen))):
        result.peak_bytes = max(peaks)
    mean = {phase: sum(share[phase] for _, share in seen) / comm.size for phase in shares}
    images, flops = feed.plan.global_batch_size // comm.size, training_flops(config.model.name, config.model.img_size)
    notes = [f"{result.name}: {mfu(images / median(result.seconds), flops, ceiling)}" for result in results]
    notes.append("largebatch's step: " + ", ".join(f"{100 * share:.1f} % {phase}" for phase, share in mean.items()))
    batch, passes = config.data.micro_batch_size, images // config.data.micro_batch_size
    title = (
        f"training step, {config.model.name} at {config.model.img_size} px, {config.run.precision}, "
        f"{feed.plan.global_batch_size} = {comm.size} ranks × {batch} micro-batch × {passes} passes"
    )
    return Report("step", title, results, feed.device, images=images, ranks=comm.size, notes=notes)


# -- ours -----------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds that each phase of a step took, step by step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[Counter[str]] = [Counter()]

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase of the present step."""
        began = now(self.device)
        yield
        self.steps[-1][phase] += now(self.device) - began  # type: ignore[assignment]  # seconds, not counts

    def shares(self, seconds: list[float]) -> dict[str, float]:
        """Share of each phase in the last steps, which took `seconds`."""
        steps = self.steps[-len(seconds) :]
        phases = ("waiting for data", "exposed communication", "optimizer")
        return {phase: sum(step[phase] for step in steps) / sum(seconds) for phase in phases}


class TimedCommunicator:
    """A Communicator that measures its own time in a step, and the time of the optimizer's step, which it calls."""

    def __init__(self, comm: Communicator, watch: Stopwatch) -> None:
        self._comm, self._watch = comm, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def synchronize(self, optimizer: Any) -> None:
        """Time Communicator.synchronize: the part of the reduction that outlasts the last backward pass."""
        with self._watch.timing("exposed communication"):
            self._comm.synchronize(optimizer)

    def apply(self, *arguments: Any) -> bool:
        """Time Communicator.apply: the optimizer's step, without the norm for the clip, which is computed before."""
        with self._watch.timing("optimizer"):
            return self._comm.apply(*arguments)


@contextmanager
def ours(config: TrainConfig, comm: Communicator, feed: Feed) -> Iterator[Round]:
    """The Trainer's own step."""
    trainer = build_trainer(config, comm, device=feed.device)
    trainer.comm = TimedCommunicator(comm, feed.watch)  # type: ignore[assignment]

    yield partial(feed.train, trainer)


# -- the peer -------------------------------------------------------------------------------------------------------


@contextmanager
def timm_ddp(config: TrainConfig, comm: Communicator, feed: Feed) -> Iterator[Round]:
    """timm's model and Lamb in DistributedDataParallel, accumulating under no_sync."""
    import timm
    from timm.optim import Lamb, param_groups_weight_decay

    start_torch_distributed(comm, feed.device)
    c = config.model
    model = timm.create_model(
        timm_name(c.name),
        img_size=c.img_size,
        num_classes=c.num_classes,
        drop_rate=c.drop_rate,
        pos_drop_rate=c.pos_drop_rate,
        proj_drop_rate=c.proj_drop_rate,
        attn_drop_rate=c.attn_drop_rate,
        drop_path_rate=c.drop_path_rate,
    ).to(feed.device)
    parallel = DistributedDataParallel(model)
    without_decay = cast(ZooModel, model).no_weight_decay()
    groups = param_groups_weight_decay(model, config.optim.weight_decay, no_weight_decay_list=without_decay)
    optimizer = Lamb(groups, lr=1e-3, max_grad_norm=config.optim.clip_norm)

    def step() -> None:
        planned = feed.plan.micro_batches(feed.step, comm.rank, comm.size)
        for number, _ in enumerate(planned, start=1):
            batch = next(feed.loader)
            mixed: Augmented = feed.augment(batch.images, batch.labels, torch.Generator().manual_seed(number))
            with nullcontext() if number == len(planned) else parallel.no_sync():
                with autocast(feed.device, config.run.precision):
                    loss = soft_target_cross_entropy(parallel(mixed.images), mixed.targets)
                (loss * (comm.size / feed.plan.global_batch_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
        feed.step += 1

    yield step
