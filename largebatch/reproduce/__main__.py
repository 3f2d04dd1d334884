"""How several optimizers train at larger and larger batches, each with a learning rate found by the same search.

    python -m largebatch.reproduce digits                          a ViT on handwritten digits
    python -m largebatch.reproduce digits --quick                  a smaller size, in a minute or two
    python -m largebatch.reproduce cifar10 --data FOLDER           the same on CIFAR-10's files

Every run has the same number of epochs, so a larger batch has fewer steps. The search trains on four fifths of the
training images and scores a rate by its accuracy on the rest; then other seeds train on all training images with the
best rate, and are evaluated on the held-out images. Two trials run at once, each on one thread of the CPU.

Written into --output: results.csv, table.md, picture.png, and the config and the result of each trial. The same
command goes on with the trials that are missing, and gives the same table. Neither Horovod nor DALI nor a GPU is
needed.
"""

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from largebatch.arguments import Parser, complain
from largebatch.files import atomic_file
from largebatch.files.run_lock import hold
from largebatch.process.progress import show_progress
from largebatch.reproduce.contenders import CONTENDERS
from largebatch.reproduce.experiment import Experiment, Trial, cifar10, digits, quick
from largebatch.reproduce.results import Journal
from largebatch.reproduce.workers import Alone, Processes, Workers


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(words)
        experiment = sized(options)
        folder = options.output or Path("runs/reproduce", options.experiment + "_quick" * options.quick)
        folder.mkdir(parents=True, exist_ok=True)
        with hold(folder):
            reproduce(experiment, folder, processes=options.processes)
    except (ValueError, OSError) as mistake:
        return complain(mistake)
    except KeyboardInterrupt:
        sys.stderr.write("largebatch: stopped; the same command goes on with the trials that are missing.\n")
        return 130
    return 0


def reproduce(experiment: Experiment, folder: Path, *, processes: int) -> None:
    """Make the trials that are missing, then the table, the CSV and the picture."""
    journal = Journal(folder, experiment)
    journal.read()
    began = time.perf_counter()
    with closing(Processes(processes) if processes > 1 else Alone()) as crew:
        if len(journal.results) < experiment.num_trials:
            tell(f"{experiment.num_trials} trials in {folder}, {len(journal.results)} of them are there")
            tell(f"the others take about {minutes(estimate(experiment, journal, crew, processes))}")
        compute(journal, crew)
    write(experiment, folder, journal, seconds=time.perf_counter() - began)


def compute(journal: Journal, crew: Workers) -> None:
    experiment, running = journal.experiment, set[Trial]()
    with show_progress("reproduce", experiment.num_trials, unit="trials") as show:
        while True:
            journal.read()  # also those that a search with fewer or more rates has left
            show(len(journal.results))
            for trial in journal.next():
                if trial not in running and crew.idle():
                    running.add(trial)
                    crew.start(trial, (experiment.config(trial), trial.searches))
            if not running:
                return
            for trial, result in crew.wait():
                running.discard(trial)
                journal.add(trial, result)


def estimate(experiment: Experiment, journal: Journal, crew: Workers, processes: int) -> float:
    """Measure an epoch at each batch; return the seconds that the missing trials take."""
    short = replace(experiment, epochs=1)
    name, seconds = experiment.optimizers[0], {}
    for batch in (*experiment.batches, experiment.batches[0]):  # the first one also reads the images
        crew.start(batch, (short.config(Trial(name, batch, CONTENDERS[name].rate, seed=1)), False))
        ((_, result),) = crew.wait()
        seconds[batch] = result.seconds
    work = 0.0
    for optimizer, batch in experiment.cells:
        done = sum((trial.contender, trial.batch) == (optimizer, batch) for trial in journal.results)
        missing = experiment.rates + experiment.seeds - done
        work += missing * experiment.epochs * seconds[batch] * CONTENDERS[optimizer].cost
    return work / CONTENDERS[name].cost / processes


def write(experiment: Experiment, folder: Path, journal: Journal, *, seconds: float) -> None:
    import torch  # takes seconds to import

    from largebatch.benchmark.measure import hardware, versions
    from largebatch.files.table import read_table, write_table
    from largebatch.reproduce import table
    from largebatch.reproduce.picture import draw

    results = folder / "results.csv"
    write_table(results, table.COLUMNS, table.rows(journal))
    cells = table.cells(read_table(results, table.COLUMNS, what="results.csv", expected="one of this program"))
    text = table.markdown(experiment, cells)
    with atomic_file(folder / "table.md") as file:
        file.write(f"{text}\n".encode())
    draw(folder / "picture.png", experiment, cells)
    processor = hardware(torch.device("cpu")).partition(", threads")[0]
    print(f"{text}\n\n{processor}, a thread for each trial; {versions()}; {datetime.date.today()}")
    spent = sum(result.seconds for result in journal.results.values())
    print(f"{minutes(seconds)} now, {minutes(spent)} of a process in all; {folder}/table.md, results.csv, picture.png")


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def tell(sentence: str) -> None:
    sys.stderr.write(f"largebatch: {sentence}\n")


# -- the command line ----------------------------------------------------------------------------------------


def sized(options: argparse.Namespace) -> Experiment:
    """Return the experiment of a command line; ValueError for a mistake."""
    if options.experiment == "digits" and options.data:
        raise ValueError(f"--data is {options.data}, and the digits are built in: leave it out, or choose cifar10.")
    experiment = digits() if options.experiment == "digits" else cifar10(cifar10_folder(options.data))
    experiment = quick(experiment) if options.quick else experiment
    for option in ("epochs", "rates", "seeds", "processes"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option} is {value}: expected at least 1.")
    for name in options.optimizers or ():
        if name not in CONTENDERS:
            raise ValueError(f"--optimizers has {name!r}: expected some of {', '.join(CONTENDERS)}.")
    if options.batches and min(options.batches) < 1:
        raise ValueError(f"--batches has {min(options.batches)}: expected at least 1.")
    given = {name: getattr(options, name) for name in ("epochs", "rates", "seeds", "target", "model")}
    given |= {"batches": tuple(sorted({*(options.batches or ())})), "optimizers": tuple(options.optimizers or ())}
    return replace(experiment, **{name: value for name, value in given.items() if value})


def cifar10_folder(data: str | None) -> str:
    from largebatch.data.archives import is_cifar10

    if data is None or not is_cifar10(Path(data).expanduser()):
        files = "cifar-10-binary.tar.gz or cifar-10-python.tar.gz, or the folder with its batches"
        raise ValueError(f"--data is {data}: expected CIFAR-10's files, that is {files}.")
    return data


def _parser() -> Parser:
    parser = Parser("reproduce", __doc__)
    add = parser.add_argument
    add("experiment", choices=("digits", "cifar10"), help="the images")
    add("--quick", action="store_true", help="two batches, fewer epochs, rates and seeds")
    add("--data", metavar="FOLDER", help="CIFAR-10's files")
    add("--optimizers", nargs="+", metavar="NAME", help=f"some of {', '.join(CONTENDERS)} (default: all)")
    add("--batches", nargs="+", type=int, metavar="N", help="images per step (default: 32, 128, 512 and all 1,437)")
    add("--epochs", type=int, metavar="N", help="length of each run (default: 25; cifar10: 15)")
    add("--rates", type=int, metavar="N", help="learning rates tried for each optimizer and batch (default: 5)")
    add("--seeds", type=int, metavar="N", help="runs with the best rate (default: 3)")
    add("--target", type=float, metavar="PERCENT", help="accuracy to which steps count (default: 90; cifar10: 40)")
    add("--model", metavar="NAME", help="a model of the zoo that takes 32 px (default: vit_nano32)")
    add("--processes", type=int, default=2, metavar="N", help="trials at once (default: %(default)s)")
    add("--output", type=Path, metavar="FOLDER", help="folder of all results (default: runs/reproduce/digits)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
