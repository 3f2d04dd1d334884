"""How several optimizers train at larger and larger batches, each with a learning rate found by the same search.

    python -m largebatch.reproduce digits                          a ViT on handwritten digits
    python -m largebatch.reproduce digits --quick                  a smaller size, in a minute or two
    python -m largebatch.reproduce fashion [--data FOLDER]         a ViT on Fashion-MNIST, batches up to 32,768; hours
    python -m largebatch.reproduce fashion --minutes 60            an hour of it

Results have the same number of epochs, so a larger batch has fewer steps. The search trains on a part of the training
images and scores a rate by its accuracy on the rest; then other seeds train on all training images with the best rate,
and are evaluated on the held-out images. Two trials run at once, each on one thread of the CPU.

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
from typing import Any

from largebatch.arguments import Parser, complain
from largebatch.files.run_lock import hold
from largebatch.process.progress import show_progress
from largebatch.reproduce.contenders import CONTENDERS
from largebatch.reproduce.experiment import Experiment, digits, quick
from largebatch.reproduce.fashion import Fashion, fashion
from largebatch.reproduce.fashion import quick as fashion_quick
from largebatch.reproduce.results import Journal, Result, Study
from largebatch.reproduce.workers import Alone, Processes, Workers

DEBIAN = "/usr/share/datasets/fashion-mnist"  # of Debian's package


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(words)
        experiment = sized(options)
        folder = options.output or Path("runs/reproduce", options.experiment + "_quick" * options.quick)
        folder.mkdir(parents=True, exist_ok=True)
        with hold(folder):
            reproduce(experiment, folder, processes=options.processes, minutes=options.minutes)
    except (ValueError, OSError) as mistake:
        return complain(mistake)
    except KeyboardInterrupt:
        sys.stderr.write("largebatch: stopped; the same command goes on with the trials that are missing.\n")
        return 130
    return 0


def reproduce(study: Study, folder: Path, *, processes: int, minutes: float) -> None:
    """Make the trials that are missing, for at most `minutes`, and if none is left the tables and the picture."""
    journal, began = Journal(folder, study), time.perf_counter()
    until = began + 60 * minutes
    journal.read()
    if journal.next():
        tell(f"{len(journal.results)} trials are there in {folder}, {len(journal.next())} can begin")
    with closing(Processes(processes, until) if processes > 1 else Alone(until)) as crew:
        compute(journal, crew)
    spent = f"{time_of(time.perf_counter() - began)} now, {time_of(journal.spent())} of a process in all"
    if journal.next():
        tell(f"{spent}; the same command goes on with the trials that are missing")
        return
    print(f"{write(study, folder, journal.results)}\n{spent}; the files are in {folder}")


def compute(journal: Journal, crew: Workers) -> None:
    study, running = journal.study, set[Any]()
    while True:
        total = study.total(journal.results)
        with show_progress("reproduce", total, quiet=not journal.next()) as show:
            while study.total(journal.results) == total:
                journal.read()  # also those that a search with fewer or more rates has left
                show(sum(map(study.images, journal.results)))
                for trial in journal.next():
                    if trial not in running and crew.idle():
                        running.add(trial)
                        crew.start(trial, (study.config(trial), study.split(trial), journal.state_file(trial)))
                finished = crew.wait() if running else []
                if not finished:
                    return
                for trial, result in finished:
                    running.discard(trial)
                    journal.add(trial, result)


def write(study: Any, folder: Path, results: dict[Any, Result]) -> str:
    """Write the tables and the picture; return the text of the tables, and where they were computed."""
    import torch  # takes seconds to import

    from largebatch.benchmark.measure import hardware, versions
    from largebatch.reproduce import fashion_picture, hypotheses, picture, table

    if isinstance(study, Fashion):
        found = hypotheses.Found(study, results)
        text = hypotheses.write(found, folder)
        fashion_picture.draw(folder / "picture.png", found)
    else:
        text, cells = table.write(study, folder, results)
        picture.draw(folder / "picture.png", study, cells)
    processor = hardware(torch.device("cpu")).partition(", threads")[0]
    return f"{text}\n\n{processor}, a thread for each trial; {versions()}; {datetime.date.today()}"


def time_of(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def tell(sentence: str) -> None:
    sys.stderr.write(f"largebatch: {sentence}\n")


# -- the command line ----------------------------------------------------------------------------------------


def sized(options: argparse.Namespace) -> Experiment | Fashion:
    """Return the experiment of a command line; ValueError for a mistake."""
    for option in ("epochs", "rates", "seeds", "processes", "minutes"):
        value = getattr(options, option)
        if value is not None and not value >= 1:
            raise ValueError(f"--{option} is {value}: expected at least 1.")
    names = ("optimizers", "batches", "epochs", "rates", "seeds", "target")
    given = {name: value for name in names if (value := getattr(options, name))}
    if options.experiment == "fashion":
        if given:
            raise ValueError(f"--{[*given][0]} is for the digits: the sizes of fashion were written down beforehand.")
        found = fashion(fashion_folder(options.data))
        return fashion_quick(found) if options.quick else found
    if options.data:
        raise ValueError(f"--data is {options.data}, and the digits are built in: leave it out, or choose fashion.")
    for name in options.optimizers or ():
        if name not in CONTENDERS:
            raise ValueError(f"--optimizers has {name!r}: expected some of {', '.join(CONTENDERS)}.")
    if options.batches and min(options.batches) < 1:
        raise ValueError(f"--batches has {min(options.batches)}: expected at least 1.")
    if options.batches:
        given["batches"] = tuple(sorted({*options.batches}))
    return replace(quick(digits()) if options.quick else digits(), **given)


def fashion_folder(data: str | None) -> str:
    from largebatch.data.idx import is_idx

    folder = Path(data or DEBIAN).expanduser()
    if not is_idx(folder):
        commands = "apt-get download dataset-fashion-mnist && dpkg -x dataset-fashion-mnist_*.deb DIR"
        advice = f"`{commands}` puts Debian's into DIR{DEBIAN}, which --data takes."
        raise ValueError(f"{folder} has no IDX files of Fashion-MNIST: {advice}")
    return str(folder)


def _parser() -> Parser:
    parser = Parser("reproduce", __doc__)
    add = parser.add_argument
    add("experiment", choices=("digits", "fashion"), help="the images")
    add("--quick", action="store_true", help="a few minutes: smaller batches, fewer epochs, rates and seeds")
    add("--data", metavar="FOLDER", help=f"Fashion-MNIST's four IDX files (default: {DEBIAN})")
    add("--minutes", type=float, default=float("inf"), metavar="N", help="stop then; the same command goes on")
    add("--optimizers", nargs="+", metavar="NAME", help=f"digits: some of {', '.join(CONTENDERS)} (default: all)")
    add("--batches", nargs="+", type=int, metavar="N", help="digits: images per step (default: 32 128 512 1437)")
    add("--epochs", type=int, metavar="N", help="digits: length of each run (default: 25)")
    add("--rates", type=int, metavar="N", help="digits: learning rates tried for each optimizer and batch (default: 5)")
    add("--seeds", type=int, metavar="N", help="digits: runs with the best rate (default: 3)")
    add("--target", type=float, metavar="PERCENT", help="digits: accuracy to which steps count (default: 90)")
    add("--processes", type=int, default=2, metavar="N", help="trials at once (default: %(default)s)")
    add("--output", type=Path, metavar="FOLDER", help="folder of all results (default: runs/reproduce/EXPERIMENT)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
