"""Whole training steps, on every rank of a launch, beside timm's model and LAMB in torch's DistributedDataParallel.

Ours is the Trainer that `largebatch.train` would run, with its loader. The peer trains on micro-batches of the same
loader, augmented by the same function, and accumulates gradients under `no_sync`. So only the model's code, the
reduction and the optimizer differ.

Each of the two also runs without its reduction. The difference is the exposed communication: the time by which a step
is longer because ranks exchange gradients. Nothing waits for the device inside a step.

    --data resident    batches that stay on the device: no loader, and with one process neither Horovod nor DALI
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.assembly import build_objective, build_trainer, divides, open_images, with_classes
from largebatch.augment import Augmented
from largebatch.batch_norm import BatchNormStatistics
from largebatch.benchmark import resident
from largebatch.benchmark.ceiling import measure_ceiling, mfu
from largebatch.benchmark.measure import Contender, Report, Round, Span, compare
from largebatch.benchmark.model import timms
from largebatch.config import TrainConfig, parse
from largebatch.devices import find_device
from largebatch.engine import Trainer
from largebatch.flops import training_flops
from largebatch.hooks import Average
from largebatch.losses import Objective
from largebatch.plan.memory import of_rank
from largebatch.plan.trace import Uncountable, trace
from largebatch.precision import autocast
from largebatch.ranks import Ranks, session
from largebatch.ranks.mistakes import report_mistakes
from largebatch.ranks.single import Single
from largebatch.recipes import choose
from largebatch.start import set_up
from zoo.model import ZooModel

DEFAULTS = ["--data.micro_batch_size=32", "--data.global_batch_size=256"]
DEFAULTS += ["--run.precision=auto", "--run.folder=runs/benchmark/step"]
DEFAULTS += ["--model.pos_drop_rate=0", "--model.proj_drop_rate=0"]  # dropout costs both the same
CPU = torch.device("cpu")
WAITING, EXPOSED, OPTIMIZER = "waiting for data", "exposed communication", "optimizer"
OFF = ", no reduction"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", help="as in largebatch.train, or resident; default: synthetic")
    parser.add_argument("--vs", nargs="+", default=["timm"], choices=["timm", "none"])
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each contender")


def run(options: argparse.Namespace) -> Report | None:
    """Measure steps of the run in `options.training`; return the report on rank 0."""
    on_device = options.data == resident.NAME
    with report_mistakes():
        if on_device:
            config = resident.read_config(DEFAULTS + options.training)
        else:
            data = [f"--data={options.data}"] if options.data else []
            argv = ["--data=synthetic", *DEFAULTS, *options.training, *data]
            config = parse(argv, choose_recipe=partial(choose, argv=argv))
        if sizes := config.schedule.image_sizes:
            raise ValueError(
                f"--schedule.image_sizes is {sizes!r}: steps of one size are measured, so leave it out, and give the "
                "size of a phase as --model.img_size."
            )
        if ramp := config.schedule.batch_ramp:
            raise ValueError(
                f"--schedule.batch_ramp is {ramp!r}: steps of one size are measured, so leave it out, and give the "
                "batch of a phase as --data.global_batch_size."
            )
    with session(config) as comm:
        config, device = set_up(config, comm)
        build = partial(resident.build_resident, config, device=device)
        if not on_device:
            images = open_images(config, comm)
            config = with_classes(config, images.train)  # those of timm's model, too
            build = partial(build_trainer, config, device=device, images=images)
        with closing(Feed(build(comm))) as feed:
            return measure(options, config, comm, feed, build)


class Feed:
    """The micro-batches of a training run, which the contenders consume in turn, a step at a time."""

    def __init__(self, trainer: Trainer) -> None:
        self.plan, self.augment, self.device = trainer.plan, trainer.augment, trainer.device
        self.loader = trainer.open_batches(0)
        self.watch = Stopwatch()
        self.step = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self.watch.timing(WAITING, CPU):  # the host waits, whatever the device does
            return next(self.loader)

    @contextmanager
    def next_step(self, watch: "Stopwatch") -> Iterator[None]:
        self.watch = watch
        watch.steps.append([])
        yield
        self.step += 1

    def close(self) -> None:
        self.loader.close()


class Stopwatch:
    """The parts of a contender's steps. Nobody waits while they are timed."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[str, Span]]] = [[]]

    @contextmanager
    def timing(self, part: str, device: torch.device) -> Iterator[None]:
        """Time a block as a part of the present step, by the clock of a device."""
        span = Span(device)
        yield
        span.end()
        self.steps[-1].append((part, span))

    def shares(self, seconds: list[float]) -> dict[str, float]:
        """Return the share of each part in the last steps, which took `seconds`."""
        shares: dict[str, float] = {}
        for part, span in (timed for step in self.steps[-len(seconds) :] for timed in step):
            shares[part] = shares.get(part, 0.0) + span.seconds() / sum(seconds)
        return shares


class Seen(NamedTuple):
    peak_bytes: int
    reserved_bytes: int
    seconds: list[float]
    shares: dict[str, float]


def measure(
    options: argparse.Namespace,
    config: TrainConfig,
    comm: Ranks,
    feed: Feed,
    build: Callable[[Ranks], Trainer],
) -> Report | None:
    makers = contenders(options, config, comm, feed, build)
    watches = {name: Stopwatch() for name in makers}
    results = compare(
        [Contender(name, partial(make, watches[name])) for name, make in makers.items()],
        device=feed.device,
        rounds=options.rounds,
        barrier=partial(comm.barrier, name="benchmark/barrier"),
        quiet=comm.rank > 0,
    )
    comm.barrier(name="benchmark/ceiling")
    ceiling = measure_ceiling(feed.device, config.run.precision)
    mine = {
        r.name: Seen(r.peak_bytes, r.reserved_bytes, r.seconds, watches[r.name].shares(r.seconds)) for r in results
    }
    ranks = comm.allgather_object(mine, name="benchmark/seen")
    if comm.rank > 0:
        return None
    for result in results:
        result.peak_bytes = max(seen[result.name].peak_bytes for seen in ranks)
        result.reserved_bytes = max(seen[result.name].reserved_bytes for seen in ranks)
    images, flops = feed.plan.global_batch_size // comm.size, training_flops(config.model.name, config.model.img_size)
    executed = training_flops(config.model.name, config.model.img_size, drop_path_rate=config.model.drop_path_rate)
    saving = {} if config.run.compile is True else {"largebatch": executed}
    whole = [result for result in results if not result.name.endswith(OFF)]
    notes = [
        f"{name}: {mfu(images / median(seconds), flops, ceiling, executed=saving.get(name))}"
        for name, seconds in ((result.name, result.seconds) for result in whole)
    ]
    notes += [f"{result.name}'s step: {parts(result.name, ranks)}" for result in whole]
    planned = planned_mib(config, comm, feed.device)
    notes += [f"the plan has {planned} MiB for weights, gradients, optimizer and a pass"] if planned else []
    batch, passes = config.data.micro_batch_size, images // config.data.micro_batch_size
    title = (
        f"training step, {config.model.name} at {config.model.img_size} px, {config.run.precision}, "
        f"{feed.plan.global_batch_size} = {comm.size} ranks × {batch} micro-batch × {passes} passes"
    )
    cores = min(comm.num_cores, torch.get_num_threads())
    work = {"model": config.model.name, "img_size": config.model.img_size, "precision": config.run.precision}
    work |= {"micro_batch": batch, "data": config.data.path, "plain": False, "planned_mib": planned}
    return Report(
        "step", title, results, feed.device, images=images, ranks=comm.size, cores=cores, notes=notes, work=work
    )


def planned_mib(config: TrainConfig, comm: Ranks, device: torch.device) -> int:
    """Return the plan's memory of a rank without its batches and what CUDA, NCCL and the loader keep; 0: no plan."""
    try:
        plan = of_rank(config, trace(config, device=device.type), find_device("cpu"), ranks=comm.size)
    except Uncountable:
        return 0
    tensors = (plan.weights, plan.gradients, plan.moments, plan.average, plan.activations, plan.workspace)
    return round(sum(tensors) / 2**20)


def contenders(
    options: argparse.Namespace,
    config: TrainConfig,
    comm: Ranks,
    feed: Feed,
    build: Callable[[Ranks], Trainer],
) -> dict[str, Callable[[Stopwatch], AbstractContextManager[Round]]]:
    """Return ours and the peer, and both without their reduction if it can be left out."""
    makers: dict[str, Callable[[Stopwatch], AbstractContextManager[Round]]] = {}
    peer, reducible = "timm + DDP" if comm.size > 1 else "timm", comm.data_size > 1 and not divides(config)
    for reduces in (True, False) if reducible else (True,):
        makers["largebatch" + OFF * (not reduces)] = partial(ours, build, comm, feed, reduces=reduces)
        if "timm" in options.vs:
            makers[peer + OFF * (not reduces)] = partial(timm_ddp, config, comm, feed, reduces=reduces)
    return makers


def parts(name: str, ranks: list[dict[str, Seen]]) -> str:
    """Describe the parts of a contender's step, by means over the ranks."""
    mean = {part: sum(seen[name].shares[part] for seen in ranks) / len(ranks) for part in ranks[0][name].shares}
    if name + OFF in ranks[0]:
        mean[EXPOSED] = exposed(*([seen[one].seconds for seen in ranks] for one in (name, name + OFF)))
    return ", ".join(f"{100 * mean[part]:.1f} % {part}" for part in (WAITING, EXPOSED, OPTIMIZER) if part in mean)


def exposed(reduced: list[list[float]], alone: list[list[float]]) -> float:
    """Return the share of a step that its reduction adds, the median of all rounds; noise may make it negative.

    reduced, alone: seconds of each round, rank by rank. Ranks that reduce wait for the slowest, so that one counts.
    """
    rounds = zip(map(max, zip(*reduced)), map(max, zip(*alone)))
    return median(1 - without / whole for whole, without in rounds)


# -- ours -----------------------------------------------------------------------------------------------------------


@contextmanager
def ours(
    build: Callable[[Ranks], Trainer], comm: Ranks, feed: Feed, watch: Stopwatch, *, reduces: bool
) -> Iterator[Round]:
    """Prepare the Trainer's own step, with the average of the weights if the run keeps one."""
    trainer = build(comm)
    if not reduces:  # the models of the ranks drift apart
        trainer.optimizer.sends, trainer.replica.statistics = False, BatchNormStatistics(trainer.model, Single())
    timed = ExitStack()
    trainer.optimizer.register_step_pre_hook(lambda *_: timed.enter_context(watch.timing(OPTIMIZER, feed.device)))
    trainer.optimizer.register_step_post_hook(lambda *_: timed.close())
    averages = [hook for hook in trainer.hooks if isinstance(hook, Average)]
    for hook in averages:
        hook.before_fit(trainer)

    def step() -> None:
        with feed.next_step(watch):
            trainer.state.step = feed.step
            trainer.model.train()
            output = trainer.train_step(feed)
            for hook in averages:
                hook.after_train_step(trainer, output)

    with trainer.replica.statistics.over_steps():
        yield step


# -- the peer -------------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """The loss of a model as a module, because DistributedDataParallel reduces only what `forward` computes."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Augmented) -> Tensor:
        return self.objective(self.model, batch)


@contextmanager
def timm_ddp(
    config: TrainConfig, comm: Ranks, feed: Feed, watch: Stopwatch, *, reduces: bool
) -> Iterator[Round]:
    """Prepare timm's model and Lamb, on several ranks in DistributedDataParallel, accumulating under no_sync."""
    from timm.optim import Lamb, param_groups_weight_decay

    model = timms(config).to(feed.device)
    without_decay = cast(ZooModel, model).no_weight_decay()
    groups = param_groups_weight_decay(model, config.optim.weight_decay, no_weight_decay_list=without_decay)
    optimizer = Lamb(groups, lr=1e-3, max_grad_norm=config.optim.clip_norm)
    loss_of, silent = distributed(Loss(model, build_objective(config, model)), comm, feed.device)

    def step() -> None:
        with feed.next_step(watch):
            planned = feed.plan.micro_batches(feed.step, comm.rank, comm.size)
            for number, batch in enumerate((next(feed) for _ in planned), start=1):
                generator = torch.Generator().manual_seed(number)
                mixed = feed.augment(batch.images, batch.labels, generator, batch.token_labels)
                with nullcontext() if reduces and number == len(planned) else silent():
                    with autocast(feed.device, config.run.precision):
                        loss = loss_of(mixed)
                    (loss * (comm.size / feed.plan.global_batch_size)).backward()
            with watch.timing(OPTIMIZER, feed.device):
                optimizer.step()
            optimizer.zero_grad()

    yield step


def distributed(
    module: nn.Module, comm: Ranks, device: torch.device
) -> tuple[nn.Module, Callable[[], AbstractContextManager[None]]]:
    """Return a module whose gradients are reduced, and a context in which they are not; one rank needs neither."""
    if comm.size == 1:
        return module, nullcontext
    from largebatch.parallel.mesh import start_torch_distributed

    start_torch_distributed(comm, device)
    parallel = DistributedDataParallel(module)
    return parallel, parallel.no_sync
