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

logger = logging.getLogger("largebatch.train")

LOG = "log.txt"  # in the run folder
ABOUT = """\
Train a model: largebatch train [--model NAME] [--data FOLDER] [--section.option value ...]

With --data, the run follows the published recipe of the model; without it, a quick start on embedded images. The same
command line resumes an interrupted run. A launcher starts the ranks; without one there is one rank.

Examples
  largebatch train                                                     quick start: ViT-B/32 learns digits
  horovodrun -np 4 largebatch train --model vit_b16 --data FOLDER      the published recipe, on four ranks
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


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of this process."""
    with Signals(nothing_to_lose=True) as signals:
        from largebatch.comm.mistakes import report_mistakes

        with report_mistakes():
            config = read(sys.argv[1:] if argv is None else argv)

        from largebatch.start import start_ranks

        with start_ranks(config) as comm:
            signals.end = comm.abort
            comm.progress("start")
            with run_folder(config, comm):
                train(config, comm, signals)


def read(argv: Sequence[str]) -> "TrainConfig":
    """Return the config of a command line; ValueError for a mistake in it, Answer if it asks for a text."""
    from largebatch.config import Page, parse
    from largebatch.recipes import choose

    return parse(argv, choose_recipe=choose, page=Page(ABOUT, OPTIONS))


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


def train(config: "TrainConfig", comm: "Communicator", signals: Signals) -> None:
    """Train, or resume the run in the folder of the config; all ranks raise StoppedEarly if it was told to end."""
    from largebatch.build import build_trainer
    from largebatch.config import dump
    from largebatch.start import set_up

    logger.info("%s", headline(config))
    config, device = set_up(config, comm)
    trainer = build_trainer(config, comm, signals, device=device)
    with comm.together("writing config.yaml"):
        if comm.rank == 0:
            (Path(config.folder) / "config.yaml").write_text(dump(config))
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
