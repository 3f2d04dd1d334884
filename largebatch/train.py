"""Train a model: recipe -> run. `ABOUT` says how to start it.

SIGUSR1, SIGTERM or Ctrl-C to any rank, or the near end of a Slurm job, stops the run before the next pass of a step or
batch of an evaluation, with a checkpoint and exit code 75. A second signal ends the run at once.
"""

import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# Other imports take seconds, in which a signal may come. So they stand in functions, which run when signals are heard.
from largebatch.files.run_folder import RunFolder
from largebatch.process.garbage import gc_disabled, gc_freeze, gc_resume
from largebatch.ranks.signals import Signals
from largebatch.ranks.stopped import StoppedEarly

if TYPE_CHECKING:
    import torch

    from largebatch.assembly import Images
    from largebatch.config import TrainConfig, Unsized
    from largebatch.engine import Trainer
    from largebatch.ranks import Ranks

    Work = Callable[[Sequence[str], TrainConfig, Ranks, Signals], None]

logger = logging.getLogger("largebatch.train")

TIME = "%Y-%m-%d %H:%M:%S"
OURS = ("largebatch", "zoo")  # whose logs are shown
ABOUT = """\
Train a model: largebatch train [--model NAME] [--data FOLDER] [--section.option value ...]

With --data, the recipe follows from the model and the number of images; without it, a quick start on embedded images.
The same command line resumes an interrupted run. A launcher starts the ranks; without one there is one rank.

Examples
  largebatch train                                                     quick start: ViT-B/32 learns digits
  horovodrun -np 4 largebatch train --model vit_b16 --data FOLDER      the recipe of the model, on four ranks
  mpirun -np 4 largebatch train --model vit_b32 --optim.name adamw --optim.lr 1e-3 --run.folder runs/adamw
"""
OPTIONS = {
    "Model": ["recipe", "model.name", "model.img_size", "model.num_classes", "model.weights"],
    "Images and batches": ["data.path", "data.global_batch_size", "data.micro_batch_size", "data.num_threads"],
    "Learning": ["optim.name", "optim.lr", "optim.weight_decay", "schedule.name", "schedule.warmup"],
    "Run": [
        "run.folder", "run.duration", "run.max_steps", "run.eval_every", "checkpoint.every", "run.seed", "run.device",
        "run.precision", "model.grad_checkpointing",
    ],
}  # fmt: skip


def main(
    argv: Sequence[str] | None = None, *, about: str = ABOUT, work: "Work | None" = None, log_file: bool = True
) -> None:
    """Do the work of a command line, by default training; about: the beginning of its help."""
    with Signals(nothing_to_lose=True) as signals, gc_disabled():
        from largebatch.ranks.mistakes import report_mistakes

        argv = sys.argv[1:] if argv is None else argv
        with report_mistakes():
            config = read(argv, about=about)

        from largebatch.ranks import session

        with session(config) as comm:
            gc_freeze()
            signals.end = comm.abort
            comm.before_shutdown(signals.all_ranks_are_done)
            comm.progress("start")
            with run_folder(config, comm, log_file=log_file):
                (work or train)(argv, config, comm, signals)


def read(argv: Sequence[str], num_images: int | None = None, *, about: str = ABOUT) -> "TrainConfig":
    """Return the config of a command line; ValueError for a mistake, Answer for a text.

    num_images: training images, on which a recipe may depend; None: not known yet.
    """
    from largebatch.config import Page, Unsized, parse
    from largebatch.recipes import choose, depends_on_data

    config = parse(argv, choose_recipe=partial(choose, num_images=num_images, argv=argv), page=Page(about, OPTIONS))
    return Unsized(**vars(config), argv=tuple(argv)) if num_images is None and depends_on_data(argv) else config


def sized(config: "Unsized", num_images: int) -> "TrainConfig":
    """Return the config for `num_images` training images; a program's changes to the config are kept."""
    from largebatch.config import check, differences
    from largebatch.config.values import with_values

    changed = {name: now for name, (_, now) in differences(read(config.argv), config).items()}
    found = with_values(read(config.argv, num_images), changed)
    check(found)
    return found


@contextmanager
def run_folder(config: "TrainConfig", comm: "Ranks", *, log_file: bool = True) -> Iterator[None]:
    """Make the run folder, hold it for this job until the block ends, and start the log.

    All ranks raise Stopped if another job holds the folder. A refused run leaves no folder.
    """
    from largebatch.files import refuse_links_of_others, run_lock
    from largebatch.ranks import Stopped

    folder = Path(config.folder)
    with ExitStack() as held:
        new: list[Path] = []
        with comm.together("opening the run folder"), refusing_read_only(config.folder):
            if comm.rank == 0:
                new = [path for path in (folder, *folder.parents) if not path.exists()]
                folder.mkdir(parents=True, exist_ok=True)
                refuse_links_of_others(folder)
                held.enter_context(run_lock.hold(folder))
            start_log(config, comm, to_file=log_file)
        try:
            yield
        except Stopped:
            if new and folder.is_dir() and {*folder.iterdir()} <= {RunFolder(folder).lock, RunFolder(folder).log}:
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # another run may have begun beside it
                    for parent in new[1:]:
                        parent.rmdir()
            raise


@contextmanager
def refusing_read_only(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--run.folder is {folder}, which cannot be written ({error.strerror}): choose a folder that this user may "
            "write to."
        ) from None


class LogFile(logging.FileHandler):
    """Writes log.txt; warns once if it cannot, as on a full disk."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed:
            self.failed = True  # this warning fails here as well
            error = sys.exception()
            logger.warning("%s cannot be written (%s): it will lack lines; the run goes on", self.baseFilename, error)


def start_log(config: "TrainConfig", comm: "Ranks", *, to_file: bool = True) -> None:
    """Print the log: all of it on rank 0, which may also write log.txt; warnings of other ranks and packages."""
    from largebatch.files.names import Formatter

    screen = logging.StreamHandler()
    who = f"rank {comm.rank}: " if comm.rank else ""
    whole = Formatter(f"%(asctime)s {who}%(message)s", TIME)
    screen.setFormatter(Formatter("%(asctime)s %(message)s", "%H:%M:%S") if sys.stderr.isatty() else whole)
    handlers: list[logging.Handler] = [screen]
    if to_file and comm.rank == 0:
        handlers.append(LogFile(RunFolder(config.folder).log))
        handlers[-1].setFormatter(whole)
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for package in OURS:
        logging.getLogger(package).setLevel(logging.WARNING if comm.rank else logging.INFO)


def build_trainer(config: "TrainConfig", comm: "Ranks", signals: Signals | None = None) -> "Trainer":
    """Build, or resume, a run in a script of your own.

        with largebatch.session(config) as comm:
            trainer = largebatch.build_trainer(config, comm)
            trainer.hooks = [MyHook(), *trainer.hooks]
            trainer.fit(max_steps=config.run.max_steps)

    This job holds the run folder until the session ends; the log goes to stderr and to log.txt in the folder.
    With `signals`, a signal ends `fit` with a checkpoint; without, it ends the process.
    """
    from largebatch.ranks import Stopped

    size = config.parallel.shape().size
    if comm.model_size != size:
        raise Stopped(
            f"build_trainer got a session in which a model has {comm.model_size} ranks, and a config in which it has "
            f"{size}: start the session with the config, as in largebatch.session(config)."
        )
    with ExitStack() as opened:
        opened.enter_context(run_folder(config, comm))
        _, trainer = prepare(config, comm, signals)
        comm.before_shutdown(opened.pop_all().close)
    return trainer


def prepare(config: "TrainConfig", comm: "Ranks", signals: Signals | None) -> "tuple[TrainConfig, Trainer]":
    """Return the resolved config and the trainer of a run whose folder is open; write config.yaml."""
    from largebatch import assembly, checkpoint
    from largebatch.config import dump
    from largebatch.plan.forecast import forecast

    if config.checkpoint.mirror:
        mirror = checkpoint.Mirror(config.checkpoint.mirror, config.folder)
        comm.from_rank_0(mirror.check, phase="looking at the mirror")
        comm.from_rank_0(lambda: mirror.restore(lambda _: comm.progress()), phase="fetching from the mirror")
    with comm.together("opening the run folder"):
        if comm.rank == 0:
            refuse_lost_checkpoints(Path(config.folder))
    config, device, images = prepare_images(config, comm)
    correction = forecast(config, comm, device, num_images=len(images.train))
    trainer = assembly.build_trainer(config, comm, signals, device=device, images=images)
    trainer.hooks = [correction, *trainer.hooks]
    if config.checkpoint.mirror:
        comm.from_rank_0(lambda: mirror.refuse_other(config), phase="looking at the mirror")
    with comm.together("writing config.yaml"):
        if comm.rank == 0:
            if trainer.state.step:
                warn_of_other_file(config)
            lasting = replace(config, run=replace(config.run, end_time=None))  # the end of this job is not the run's
            RunFolder(config.folder).write_config(dump(lasting))
    return config, trainer


def refuse_lost_checkpoints(folder: Path) -> None:
    """Raise ValueError if this run has lost its checkpoints: it would begin anew, over its own tables."""
    from largebatch import checkpoint
    from largebatch.report import history

    if checkpoint.checkpoints(folder):
        return
    step, run = history.saved_step(folder), RunFolder(folder)
    if step or run.best.is_symlink():
        link = "" if step else f"its link best names {run.best.readlink()}"
        sign = link or f"{run.starts.name} says that step {step} was saved"
        raise ValueError(
            f"{run.checkpoints} has no checkpoint, but {sign}: restore one to resume this run, or choose another "
            "--run.folder to train from the beginning."
        )


def warn_of_other_file(config: "TrainConfig") -> None:
    """Warn if somebody has changed the run's config.yaml: the command line counts."""
    from largebatch import checkpoint
    from largebatch.config import differences, load

    file = RunFolder(config.folder).config
    try:
        found = differences(load(str(file)), config) if file.is_file() else {}
        kept = {name: both for name, both in found.items() if not checkpoint.may_differ(name, config)}
        other = "; ".join(f"--{name} {was}, now {now}" for name, (was, now) in kept.items())
    except ValueError as error:
        other = str(error)
    if other:
        logger.warning("%s is written anew, as the command line counts, not this file: %s", file, other)


def prepare_images(config: "TrainConfig", comm: "Ranks") -> "tuple[TrainConfig, torch.device, Images]":
    """Return the resolved config, the device of this rank, and the images."""
    from largebatch.config import Unsized
    from largebatch.start import set_up

    logger.info("%s", headline(config))
    config, device = set_up(config, comm, final=not isinstance(config, Unsized))
    config, images = read_images(config, comm, device)
    return config, device, images


def train(argv: Sequence[str], config: "TrainConfig", comm: "Ranks", signals: Signals) -> None:
    """Train or resume; all ranks raise StoppedEarly if told to end. argv: for the log."""
    from largebatch import checkpoint
    from largebatch.config import typed
    from largebatch.hooks import Mirroring
    from largebatch.report import history
    from largebatch.report.summary import log_end

    folder = Path(config.folder)
    start = history.describe_start(comm, argv)
    logger.info("%s", start)
    if checkpoint.checkpoints(folder) and typed(argv, "config") and not typed(argv, "run.folder"):
        logger.warning("--config names the run folder %s: this run goes on; --run.folder starts another", folder)
    config, trainer = prepare(config, comm, signals)
    if trainer.complete:
        logger.info("This run is complete; to train again choose another --run.folder.")
        for hook in trainer.hooks:
            if isinstance(hook, Mirroring):
                hook.after_fit(trainer)
        return
    with comm.together("writing starts.jsonl"):
        if comm.rank == 0:
            history.write_start(folder, replace(start, step=trainer.state.step))
    gc_resume()
    reason = trainer.fit(max_steps=config.run.max_steps)
    if comm.rank == 0:
        log_end(config, trainer, reason)
    if reason:
        place = f"step {trainer.state.step} of {trainer.num_steps}"
        raise StoppedEarly(f"stopped after {place}, because {reason}; the same command resumes (exit code 75).")


def read_images(config: "TrainConfig", comm: "Ranks", device: "torch.device") -> "tuple[TrainConfig, Images]":
    """Return the images, and the config with their classes; an `Unsized` config gets its recipe."""
    from largebatch import assembly
    from largebatch.config import Unsized
    from largebatch.start import resolve, warn_of_doubtful

    assembly.check_model(config, comm)
    unsized = config if isinstance(config, Unsized) else None
    if not unsized:
        assembly.check_batch(config, comm)
    names = comm.from_rank_0(lambda: assembly.classes_of_run(config), phase="reading the classes of the run")
    train = assembly.open_data(config, comm, "train", with_maps=not unsized and config.data.token_labels, names=names)
    if unsized:
        config = comm.from_rank_0(lambda: resolve(sized(unsized, len(train)), device), phase="choosing a recipe")
        logger.info("%d training images of %d classes: %s", len(train), train.num_classes, size_line(config))
        warn_of_doubtful(config, device, comm)
        with comm.together("choosing a recipe"):
            if config.data.token_labels:
                train.check_maps(train.num_classes)
    config = assembly.with_classes(config, train)
    return config, assembly.Images(train, assembly.open_held_out(config, comm, train))


def size_line(config: "TrainConfig") -> str:
    data, run = config.data, config.run
    return (
        f"recipe {config.recipe}, {config.model.img_size} px, global batch {data.global_batch_size} in micro-batches "
        f"of {data.micro_batch_size}, {run.duration}, {config.optim.name}; --recipe takes another one"
    )


def headline(config: "TrainConfig") -> str:
    """Describe the recipe, and how to get another one."""
    from largebatch.config import Unsized
    from largebatch.recipes import RECIPES

    if isinstance(config, Unsized):
        return f"{config.model.name} on {config.data.path}; the recipe follows from the number of images"
    place = f"{config.model.name} at {config.model.img_size} px on {config.data.path}"
    other = ""
    if config.recipe == "quickstart" and config.model.name in RECIPES:
        other = "; with --data FOLDER, the recipe follows from the number of images"
    elif config.recipe != "quickstart":
        other = "; without --data, a quick start on embedded images"
    return f"recipe {config.recipe}: {place}{other}"


if __name__ == "__main__":
    main()
