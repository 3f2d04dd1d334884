"""The command `largebatch`: `largebatch train ...` is `python -m largebatch.train ...`.

This file needs Python's library alone; a program is imported when it is chosen.
"""

import platform
import runpy
import sys
from collections.abc import Sequence

from largebatch import __version__
from largebatch.config import Answer
from largebatch.imports import explain_import
from largebatch.nearest import nearest
from largebatch.process.packages import versions
from largebatch.ranks.mistakes import report_mistakes

PROGRAMS = {
    "train": "train a model, or go on with a run",
    "find_lr": "search a learning rate: some 200 steps, a suggestion, no weights",
    "find_batch": "find how far the batch of a run can grow: branches from a checkpoint, no weights",
    "validate": "count top-1 and top-5 of a run, or of weights, exactly",
    "report": "show runs on one page, or name the first difference of two",
    "predict": "name the classes of images with the weights of a run",
    "export": "write a folder for timm and the hub, ONNX or torch.export",
    "pack": "write images, ImageNet's tars, CIFAR-10 or IDX files into TFRecord shards, and check shards",
    "doctor": "check that this installation and these hosts can train",
    "benchmark": "measure our speed beside timm's and torch's",
    "reproduce": "compare optimizers at larger and larger batches, each tuned alike",
    "plan": "predict memory, hours and cost of a run on a cluster",
}
PACKAGES = ("torch", "timm", "horovod", "mpi4py", "nvidia-dali-cuda120", "nvidia-dali-cuda130")


def main() -> None:
    with report_mistakes():
        name = chosen(sys.argv[1:])
    del sys.argv[1]
    sys.excepthook = explain_import
    runpy.run_module(f"largebatch.{name}", run_name="__main__", alter_sys=True)


def chosen(argv: Sequence[str]) -> str:
    """Return the program that a command line names first; ValueError for another word, Answer for a text."""
    first = [*argv, ""][0]
    if first in PROGRAMS:
        return first
    if first in ("", "-h", "--help", "help"):
        raise Answer(overview())
    if first == "--version":
        ours = f"largebatch {__version__}, Python {platform.python_version()}"
        raise Answer(", ".join([ours, *versions(PACKAGES)]))
    if first.startswith("-"):
        raise ValueError(f"{first} stands before a program: expected one first, as in largebatch train {first} ...")
    hint = nearest(first.lower(), PROGRAMS, none=f"expected {', '.join(PROGRAMS)}.", cutoff=0.5)
    raise ValueError(f"There is no program {first!r}: {hint}")


def overview() -> str:
    lines = [f"  largebatch {name:11}{text}" for name, text in PROGRAMS.items()]
    lines += ["", "  largebatch PROGRAM --help                 its options"]
    lines += ["  largebatch --version                      versions, also of the packages below"]
    about = "Train vision transformers with very large batches, on any number of ranks:"
    command = "horovodrun -np 4 largebatch train --model vit_b32 --data FOLDER"
    module = "Each program is also a module: python -m largebatch.train."
    return "\n".join([about, "", f"  {command}", "", *lines, "", module])


if __name__ == "__main__":
    main()
