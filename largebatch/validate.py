"""Exact top-1 and top-5 of a run or of weights; `ABOUT` has examples.

Each model has its own crop, filter, mean and standard deviation (`default_cfg`); a crop_pct above 1 pads the image. Of
a file with plain and averaged weights, the plain ones are used.
"""

from __future__ import annotations

import csv
import functools
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence, cast

# Other imports take seconds, and a mistake on the command line need not wait for them. So they stand in functions.
from largebatch.arguments import expanded, take_flags
from largebatch.config import ModelConfig, Page, TrainConfig, parse
from largebatch.config.parallel import ParallelConfig
from largebatch.files.run_folder import RunFolder
from largebatch.files.table import write_table
from largebatch.process.garbage import gc_disabled, gc_freeze, gc_resume
from largebatch.ranks.mistakes import report_mistakes
from largebatch.recipes import RECIPES, find

if TYPE_CHECKING:
    from torch import Tensor, nn

    from largebatch.data.index import Index
    from largebatch.ranks import Ranks
    from largebatch.report.predictions import Answer

logger = logging.getLogger(__name__)

ABOUT = """\
Exact top-1 and top-5 of a run, or of weights; every held-out image is counted once, with any number of ranks.

Examples
  largebatch validate runs/quickstart                                          the newest checkpoint of a run
  horovodrun -np 4 largebatch validate runs/vit_b32 --all --csv runs.csv       every checkpoint, in a table
  largebatch validate --model vit_b16 --init-from FILE --data FOLDER           weights of anybody
"""
OPTIONS = {
    "Model": ["model.name", "model.img_size", "model.num_classes", "model.weights"],
    "Images": ["data.path", "data.eval_batch_size", "data.crop_pct", "data.interpolation", "data.num_threads"],
    "Run": ["run.device", "run.precision"],
}
FLAGS = {
    "--ema": "the average of the weights of a run that kept one (--optim.ema_half_life, schedule_free_adamw)",
    "--all": "every checkpoint of the run, or every weights file in the folder of --init-from",
    "--real-labels FILE": "count a second time, with ReaL's real.json: right is each class that it lists for the image",
    "--csv FILE": "add a row for each validation to this table",
    "--predictions FILE": "write the answer to each image; the report shows the errors in RUN/predictions.csv",
}


@dataclass(frozen=True)
class Flags:
    """The options of a validation that are not in a config."""

    ema: bool = False
    all: bool = False
    real_labels: str = ""
    csv: str = ""
    predictions: str = ""


@dataclass(frozen=True)
class Row:
    """The result of one model: top-k in percent, the mean loss in nats; real_ columns are None without labels."""

    model: str
    weights: str
    img_size: int
    crop_pct: float
    interpolation: str
    images: int
    top1: float
    top5: float
    loss: float
    real_top1: float | None
    real_top5: float | None
    ranks: int
    eval_batch_size: int

    def __str__(self) -> str:
        real = "" if self.real_top1 is None else f"ReaL {self.real_top1:.2f} % {self.real_top5:.2f} %  "
        return (
            f"top-1 {self.top1:.2f} %  top-5 {self.top5:.2f} %  {real}loss {self.loss:.4f}  images {self.images}  "
            f"({self.weights})"
        )


def main(argv: Sequence[str] | None = None) -> None:
    with report_mistakes():
        config, flags = read(sys.argv[1:] if argv is None else argv)

    from largebatch.ranks import session

    with gc_disabled(), session(config) as comm:
        gc_freeze()
        comm.progress("start")
        validate(config, comm, flags)


def read(argv: Sequence[str]) -> tuple[TrainConfig, Flags]:
    """Return the config and the flags of a command line.

    If the first word is a run folder, or one of its checkpoints, the run's config gives the defaults, and the
    checkpoint, if there is one, the weights.
    """
    values, words = take_flags(argv, FLAGS)
    flags = Flags(**values)
    given = Path(expanded(words.pop(0))) if words and not words[0].startswith("-") else None
    run, chosen = RunFolder.of(given).check() if given else None, ""
    if run:
        chosen = str(given) if run.path != given else ""
        words = ["--config", str(run.config), "--run.folder", str(run.path), f"--model.weights={chosen}", *words]
    config = parse(words, choose_recipe=functools.partial(defaults, argv=words), page=Page(ABOUT, OPTIONS, FLAGS))
    if not run and not config.model.weights:
        raise ValueError("There is nothing to validate: give a run folder, or --model, --init-from FILE and --data.")
    if flags.ema and config.model.weights != chosen:
        raise ValueError("--ema and --init-from both choose weights: give one; --init-from also takes averages.")
    if flags.ema and not config.optim.averages:
        raise ValueError(f"--ema finds no averaged weights: {given} was trained without --optim.ema_half_life.")
    if flags.predictions and flags.all:
        raise ValueError("--predictions keeps the answers of one model, and --all validates several: give one of them.")
    # A checkpoint holds the whole model, however the run divided it.
    return replace(config, parallel=ParallelConfig()), flags


def defaults(given: Mapping[str, Any], *, argv: Sequence[str] = ()) -> TrainConfig:
    """Choose a recipe as training does, but allow a model without a recipe."""
    model, data = given.get("model.name"), given.get("data.path")
    if not given.get("recipe") and model and model not in RECIPES and data not in (None, "", "digits"):
        return TrainConfig(model=ModelConfig(name=model))
    return find(given, argv=argv)


def validate(config: TrainConfig, comm: Ranks, flags: Flags) -> list[Row]:
    """Evaluate the model on the held-out images with each file of weights; rank 0 prints and writes."""
    from largebatch.assembly import build_model, open_data
    from largebatch.report.predictions import write as write_predictions
    from largebatch.start import set_up

    config, device = set_up(config, comm)
    with comm.together("opening the table"):
        table = _read_table(flags.csv) if comm.rank == 0 and flags.csv else []
        for option, path in (("csv", flags.csv), ("predictions", flags.predictions)):
            if comm.rank == 0 and path and not os.access(folder := Path(path).parent, os.W_OK | os.X_OK):
                raise ValueError(f"--{option} is {path}, and {folder} is no folder that this user can write to.")
    choice = functools.partial(comm.from_rank_0, lambda: choose(config, flags), phase="looking for weights")
    paths, classes, names, prepared = choice()
    config = replace(config, model=replace(config.model, num_classes=classes))
    held_out = open_data(config, comm, "validation", names=names)
    listed = _real_labels(flags.real_labels, held_out, comm) if flags.real_labels else None
    with comm.together("building"):
        model = build_model(config, device, weights=None).to(device)
        cast(Any, model).default_cfg.update(prepared)
    rows = []
    gc_resume()
    for path in load_each(paths, model, comm, lambda: choice()[0]):
        comm.started()
        answers: dict[int, Answer] | None = {} if flags.predictions else None
        rows.append(evaluate_weights(path, model, config, comm, held_out=held_out, listed=listed, answers=answers))
        config = replace(config, data=replace(config.data, eval_batch_size=rows[-1].eval_batch_size))
        gathered = comm.allgather_object(answers, name="validate/answers") if flags.predictions else []
        with comm.together("writing the table"):
            if comm.rank == 0:
                print(rows[-1], flush=True)
                if flags.predictions:
                    merged = dict(itertools.chain.from_iterable(part.items() for part in gathered))
                    write_predictions(Path(flags.predictions), held_out, merged)
                if flags.csv:
                    columns = [field.name for field in fields(Row)]
                    write_table(flags.csv, columns, table + [asdict(row) for row in rows])
    return rows


def choose(config: TrainConfig, flags: Flags) -> tuple[list[str], int, tuple[str, ...], dict[str, Any]]:
    """Return the files of weights, by default checkpoints of the run folder; the number of classes; and of the first
    file the names of the classes, and how its images are prepared.
    """
    from largebatch.checkpoint import find_weights
    from zoo.hub import TRIES, label_names, preparation
    from zoo.weights import Gone

    for _ in range(TRIES):  # a run that goes on may remove what was found
        found = find_weights(config.model.weights or config.folder, average=flags.ema, every=flags.all)
        paths = [str(file) for file in found]
        try:
            classes = config.model.num_classes or count_classes(config, paths[0])
            return paths, classes, label_names(paths[0]), preparation(paths[0], config.model.img_size)
        except Gone as error:
            gone = error
    raise ValueError(f"{gone}.")


def load_each(paths: Sequence[str], model: nn.Module, comm: Ranks, again: Callable[[], list[str]]) -> Iterator[str]:
    """Load each file on all ranks, and yield its path.

    A run may have removed a file since the choice: one of several is left out, and `again` replaces a single one.
    """
    from zoo import load_weights
    from zoo.weights import Gone

    waiting, before = [*paths], ""
    while waiting:
        path, gone = waiting.pop(0), False
        with comm.together(f"loading {path}"):
            try:
                load_weights(model, path, new_heads=False)  # an untrained head would guess
            except Gone:
                gone = True
                if path == before:
                    raise
        if any(comm.allgather_object(gone, name="validate/gone")):
            if comm.rank == 0:
                logger.warning("%s has been removed since it was chosen", path)
            before = path
            waiting = waiting if len(paths) > 1 else again()
        else:
            yield path


def count_classes(config: TrainConfig, path: str) -> int:
    import torch

    from largebatch.assembly import build_model
    from zoo.weights import count_classes as count

    config = replace(config, model=replace(config.model, num_classes=1000))
    with torch.device("meta"):
        model = build_model(config, torch.device("cpu"), weights=None)
    return count(model, path)


def evaluate_weights(
    path: str,
    model: nn.Module,
    config: TrainConfig,
    comm: Ranks,
    *,
    held_out: Index,
    listed: Tensor | None,
    answers: dict[int, Answer] | None = None,
) -> Row:
    """Evaluate the model, which holds the weights of `path`; put the answers for this rank into `answers`."""
    import torch

    from largebatch.assembly import build_eval_loader, model_geometry
    from largebatch.evaluation import COUNTS, LISTED_COUNTS, count_correct, count_listed, tally, tally_fitting

    device = next(model.parameters()).device

    def count(logits: Tensor, batch: Any) -> Tensor:
        counts = count_correct(logits, batch.labels)
        if answers is not None:
            answers.update(zip(batch.samples.tolist(), answer(logits, batch.labels)))
        if listed is None:
            return counts
        return torch.cat([counts, count_listed(logits, listed[batch.samples].to(device))])

    def open_batches(size: int) -> Iterable[Any]:
        smaller = replace(config, data=replace(config.data, eval_batch_size=size))
        with comm.together("opening the images"):
            loader = build_eval_loader(smaller, comm, model=model, index=held_out, device=device)
            return opened.enter_context(closing(loader))

    names = COUNTS if listed is None else COUNTS + LISTED_COUNTS
    with ExitStack() as opened:
        totals, batch_size = tally_fitting(
            functools.partial(
                tally, model, device=device, precision=config.run.precision, count=count, num_counts=len(names)
            ),
            open_batches,
            num_images=len(held_out),
            batch_size=config.data.eval_batch_size,
            comm=comm,
        )
    geometry = model_geometry(config.data, model)
    return Row(
        model=config.model.name,
        weights=path,
        img_size=config.model.img_size,
        crop_pct=geometry.crop_pct,
        interpolation=geometry.interpolation,
        **_figures(dict(zip(names, comm.allreduce(totals, name="validate/totals").tolist()))),
        ranks=comm.size,
        eval_batch_size=batch_size,
    )


def _figures(sums: dict[str, float]) -> dict[str, Any]:
    """Return the figures of a Row from the sums over all images."""
    from largebatch.evaluation import means

    count = sums.get("real_images")
    real = {name: 100 * sums[name] / count if count else None for name in ("real_top1", "real_top5")}
    return {"images": round(sums["images"])} | means(sums) | real


def answer(logits: Tensor, labels: Tensor) -> list[Answer]:
    """Return an answer for each image; ties as in `count_correct`."""
    import torch.nn.functional as F

    from largebatch.precision import at_least_float32
    from largebatch.report.predictions import Answer

    logits = at_least_float32(logits)
    first = logits.sort(dim=1, descending=True, stable=True).indices[:, 0]
    confidence = logits.softmax(dim=1).gather(1, first[:, None])[:, 0]
    loss = F.cross_entropy(logits, labels, reduction="none")
    return [Answer(*values) for values in zip(first.tolist(), confidence.tolist(), loss.tolist())]


def _real_labels(path: str, held_out: Index, comm: Ranks) -> Tensor:
    """Return the listed classes (N, L); rank 0 reads for all, as the names of images are inside the records."""
    import torch

    from largebatch.data.imagenet_real import real_labels

    labels = None
    with comm.together(f"reading {path}"):
        if comm.rank == 0:
            labels = real_labels(path, held_out)
    return torch.from_numpy(comm.broadcast_object(labels, name="validate/real"))


def _read_table(path: str) -> list[dict[str, Any]]:
    """Return the rows of earlier validations; ValueError for another table."""
    if not Path(path).exists():
        return []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if reader.fieldnames != [field.name for field in fields(Row)]:
        raise ValueError(f"{path} is not a table of validations: expected one, or the name of a new file, for --csv.")
    return rows


if __name__ == "__main__":
    main()
