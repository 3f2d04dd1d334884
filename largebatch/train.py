"""Train a model: recipe -> run.

    horovodrun -np 4 python -m largebatch.train --model vit_b32 [--data FOLDER] [--section.option value ...]

With --data, the run follows the published recipe of the model; without it, a quick start on embedded images. Any option
of the config may follow as --section.option. The same command line resumes an interrupted run.

SIGUSR1, SIGTERM or Ctrl-C to any rank, or the near end of a Slurm job, stops the run before the next pass of a step or
batch of an evaluation, with a checkpoint and exit code 75. A second signal ends it at once.
"""

import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

# Other imports take seconds, in which a signal may come. So they are in functions, which run when signals are heard.
from largebatch.comm.signals import Signals
from largebatch.comm.stopped import StoppedEarly

if TYPE_CHECKING:
    from largebatch.comm import Communicator
    from largebatch.config import TrainConfig
    from largebatch.engine import Trainer

logger = logging.getLogger("largebatch.train")

LOG = "log.txt"  # in the run folder


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of this process."""
    with Signals(nothing_to_lose=True) as signals:
        from largebatch.start import report_mistakes, start_ranks

        with report_mistakes():
            config = read(sys.argv[1:] if argv is None else argv)
        with start_ranks(config) as comm:
            signals.end = comm.abort
            comm.progress("start")
            with run_folder(config, comm):
                train(config, comm, signals)


def read(argv: Sequence[str]) -> "TrainConfig":
    """Return the config of a command line; ValueError for a mistake in it."""
    from largebatch.config import parse
    from largebatch.recipes import choose

    return parse(argv, choose_recipe=choose, prog="python -m largebatch.train", description=__doc__)


@contextmanager
def run_folder(config: "TrainConfig", comm: "Communicator") -> Iterator[None]:
    """Make the run folder, hold it for this job until the block ends, and start the log in it.

    Raises Stopped on all ranks, before anything in the folder is changed, if another job holds it. A run that is
    refused leaves no folder behind.
    """
    from largebatch.comm import Stopped
    from largebatch.files import refuse_links_of_others, run_lock

    folder = Path(config.folder)
    with ExitStack() as held:
        is_new = comm.rank == 0 and not folder.exists()
        with comm.together("opening the run folder"), refusing_read_only(config.folder):
            if comm.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                refuse_links_of_others(folder)
                held.enter_context(run_lock.hold(folder))
            start_log(config, comm)
        try:
            yield
        except Stopped:
            if is_new and folder.is_dir() and {path.name for path in folder.iterdir()} <= {run_lock.NAME, LOG}:
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def refusing_read_only(folder: str) -> Iterator[None]:
    """Turn an OSError of the block into the ValueError that names the option."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--run.folder is {folder}, which cannot be written ({error.strerror}): choose a folder that this user may "
            "write to."
        ) from None


def start_log(config: "TrainConfig", comm: "Communicator") -> None:
    """Print what is logged: all of it on rank 0, which writes it to log.txt, too, and warnings on the others."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if comm.rank == 0:
        handlers.append(logging.FileHandler(Path(config.folder) / LOG))
    level = logging.INFO if comm.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, handlers=handlers, format=f"[{comm.rank}] %(message)s", force=True)


def build_trainer(config: "TrainConfig", comm: "Communicator", signals: Signals | None = None) -> "Trainer":
    """Build the run of a config in a script of your own, resumed if its folder has a checkpoint.

        with largebatch.session(config) as comm:
            trainer = largebatch.build_trainer(config, comm)
            trainer.hooks = [MyHook(), *trainer.hooks]
            trainer.fit(max_steps=config.run.max_steps)

    This job holds the run folder until the session ends. The log goes to stderr and to log.txt in the folder.
    signals: with `Signals`, a signal ends `fit` with a checkpoint; without, it ends the process.
    """
    from largebatch.comm import Stopped

    size = config.parallel.shape().size
    if comm.model_size != size:
        raise Stopped(
            f"build_trainer got a session in which a model has {comm.model_size} ranks, and a config in which it has "
            f"{size}: start the session with the config, as in largebatch.session(config)."
        )
    with ExitStack() as opened:
        opened.enter_context(run_folder(config, comm))
        trainer = prepare(config, comm, signals)
        comm.before_shutdown(opened.pop_all().close)
    return trainer


def prepare(config: "TrainConfig", comm: "Communicator", signals: Signals | None) -> "Trainer":
    """Build the trainer of a run whose folder is open, and write its config.yaml."""
    from largebatch import build
    from largebatch.config import dump
    from largebatch.start import set_up

    logger.info("%s", headline(config))
    config, device = set_up(config, comm)
    trainer = build.build_trainer(config, comm, signals, device=device)
    with comm.together("writing config.yaml"):
        if comm.rank == 0:
            (Path(config.folder) / "config.yaml").write_text(dump(config))
    return trainer


def train(config: "TrainConfig", comm: "Communicator", signals: Signals) -> None:
    """Train, or resume the run in the folder of the config; all ranks raise StoppedEarly if it was told to end."""
    trainer = prepare(config, comm, signals)
    if trainer.complete:
        logger.info("This run is complete; to train again choose another --run.folder.")
        return
    reason = trainer.fit(max_steps=config.run.max_steps)
    logger.info("%s: step %d of %d, curves in curves.png", config.folder, trainer.state.step, trainer.num_steps)
    if reason:
        place = f"step {trainer.state.step} of {trainer.num_steps}"
        raise StoppedEarly(f"stopped after {place}, because {reason}; the same command resumes (exit code 75).")


def headline(config: "TrainConfig") -> str:
    """Describe the recipe of a run, and how to get the other one."""
    from largebatch.recipes import RECIPES

    other = ""
    if config.recipe == "quickstart" and config.model.name in RECIPES:
        other = f"; --data FOLDER takes the published recipe of {config.model.name}"
    elif config.recipe != "quickstart":
        other = "; without --data, a quick start on embedded images"
    return f"recipe {config.recipe}: {config.model.name} at {config.model.img_size} px on {config.data.path}{other}"


if __name__ == "__main__":
    main()
