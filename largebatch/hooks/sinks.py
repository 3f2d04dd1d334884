"""The sinks: they write the rows of numbers that `Log` computes, on rank 0 only, so they cannot communicate.

    Csv            RUN/steps.csv      a row every log.every
                   RUN/epochs.csv     a row per evaluation
                   RUN/layers.csv     trust ratios, a row per evaluation
    Curves         RUN/curves.png     a picture of both tables
    Progress       the terminal       a bar, and in a log lines

Trackers have a file each: tensorboard.py, weights_and_biases.py and mlflow.py.
"""

import datetime
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path

from largebatch.engine import Trainer
from largebatch.files.run_folder import Row, RunFolder
from largebatch.process.background import in_background
from largebatch.process.progress import start_bar, stop_bar
from largebatch.report.draw import draw_curves
from largebatch.report.tables import EMA, EPOCH_COLUMNS, MEASURED, NOISE, STEP_COLUMNS, TRUST, Table

logger = logging.getLogger(__name__)

PLAIN_LINES = 40  # lines of progress per run if nobody watches; lines about evaluations come on top
REDRAW_S = 10.0  # shortest time between two drawings of the curves


class Sink:
    """A destination of rows, which have the columns STEP_COLUMNS and EPOCH_COLUMNS."""

    def open(self, trainer: Trainer) -> None:
        """The run starts or resumes at trainer.state."""

    def advance(self, step: int) -> None:
        """One more step is done."""

    def write_step(self, row: Row) -> None:
        """Write the row of a step."""

    def write_epoch(self, row: Row) -> None:
        """Write the row of an evaluation; the row of its step came before."""

    def write_layers(self, row: Row) -> None:
        """Write the trust ratio of each tensor at an evaluation, by its name."""

    def close(self) -> None:
        """The run ends or stops early."""


class Tracker(Sink):
    """A sink of numbers by their names, such as train/loss, at a step. A row without a number does not have it."""

    def add(self, numbers: Mapping[str, float], row: Row) -> None:
        """Write the numbers of a row."""

    def write_step(self, row: Row) -> None:
        self.add(_named("train", row, ("loss", "lr", "grad_norm", "skipped", *TRUST, *NOISE, *MEASURED[1:])), row)

    def write_epoch(self, row: Row) -> None:
        self.add(_named("epoch", row, ("train_loss", "eval_loss", "top1", "top5", *EMA)), row)


def _named(section: str, row: Row, names: Sequence[str]) -> dict[str, float]:
    return {f"{section}/{name}": row[name] for name in names if not math.isnan(row.get(name, math.nan))}


class Progress(Sink):
    """Shows a bar below the log if stderr is a terminal, else logs a line now and then."""

    def open(self, trainer: Trainer) -> None:
        self.trainer, self.num_epochs = trainer, trainer.plan.num_images / trainer.plan.epoch_images
        # The end of this process's first step, which is slower than the others: it compiles and fills caches.
        self.first: tuple[int, float] | None = None
        self.lines_done = -1
        text = "step {task.completed}/{task.total}  {task.description}"
        done = trainer.state.step
        self.bar = start_bar(text, trainer.last_step, done=done) if sys.stderr.isatty() else None

    def advance(self, step: int) -> None:
        self.first = self.first or (step, time.perf_counter())
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=step, total=self.trainer.last_step)

    def write_step(self, row: Row) -> None:
        numbers = f"loss {row['loss']:.4f}  lr {row['lr']:.3g}{_noise(row)}{_rate(row)}"
        lines = int(row["step"]) * PLAIN_LINES // self.trainer.num_steps
        if self.bar:
            self.bar.update(self.bar.task_ids[0], description=f"epoch {row['epoch']:.2f}  {numbers}")
        elif lines > self.lines_done:
            self.lines_done = lines
            place = f"step {row['step']:.0f}/{self.trainer.num_steps}  epoch {row['epoch']:.2f}"
            logger.info("%s  %s%s", place, numbers, self.left(row))

    def write_epoch(self, row: Row) -> None:
        place = f"epoch {row['epoch']:.4g}/{self.num_epochs:.4g}"
        loss = f"train loss {row['train_loss']:.4f}  held-out loss {row['eval_loss']:.4f}"
        accuracy = f"top-1 {row['top1']:.2f} %  top-5 {row['top5']:.2f} %"
        if not math.isnan(row.get("ema_top1", math.nan)):
            accuracy += f"  averaged weights: loss {row['ema_loss']:.4f}  top-1 {row['ema_top1']:.2f} %"
        logger.info("%s  %s  %s  lr %.3g%s", place, loss, accuracy, row["lr"], _rate(row))

    def close(self) -> None:
        if self.bar:
            stop_bar(self.bar)

    def left(self, row: Row) -> str:
        """Return the time to the last step at the pace since the first, evaluations and checkpoints included."""
        step, at = self.first or (row["step"], 0.0)
        if row["step"] <= step:
            return ""
        now, first, last = (self.trainer.plan.start(round(end)) for end in (row["step"], step, self.trainer.last_step))
        pace = (time.perf_counter() - at) / (now - first)  # per image: the steps of a batch ramp differ
        return f"  {datetime.timedelta(seconds=round(pace * (last - now)))} left"


class Csv(Sink):
    """Flushes each row, so that it is there before the checkpoint of its step."""

    def __init__(self, folder: str | Path) -> None:
        self.run = RunFolder(folder)
        self.steps, self.epochs = Table(self.run.steps, STEP_COLUMNS), Table(self.run.epochs, EPOCH_COLUMNS)
        self.layers: Table | None = None  # its columns are known with its first row

    def open(self, trainer: Trainer) -> None:
        self.steps.open(last_step=trainer.state.step)
        evaluated = trainer.state.train_loss is None
        self.epochs.open(last_step=trainer.state.step if evaluated else trainer.state.step - 1)

    def write_step(self, row: Row) -> None:
        self.steps.append(row)

    def write_epoch(self, row: Row) -> None:
        self.epochs.append(row)

    def write_layers(self, row: Row) -> None:
        if self.layers is None:
            self.layers = Table(self.run.layers, tuple(row))
            self.layers.open(last_step=round(row["step"]) - 1)
        self.layers.append(row)

    def close(self) -> None:
        self.steps.close()
        self.epochs.close()
        if self.layers:
            self.layers.close()
        self.layers = None  # another fit opens it again


class Curves(Sink):
    """Draws the files of Csv, which must come before, in a thread while the run goes on, and once more at the end."""

    def __init__(self, folder: str | Path, *, title: str) -> None:
        self.folder = Path(folder)
        self.title = title
        self.began = time.perf_counter()  # when the newest drawing began; before the first one, when the run did
        self.drawing: futures.Future[None] | None = None  # the newest in the thread

    def write_epoch(self, row: Row) -> None:
        """Raises the OSError of the drawing before."""
        before = self.drawing
        if time.perf_counter() - self.began > REDRAW_S and (before is None or before.done()):
            self.began = time.perf_counter()
            self.drawing = in_background(self.draw, name="largebatch-curves")
            if before:
                before.result()

    def close(self) -> None:
        if self.drawing:
            futures.wait([self.drawing])
        self.draw()

    def draw(self) -> None:
        draw_curves(self.folder, title=self.title)


def _rate(row: Row) -> str:
    return "" if math.isnan(row["images_per_s"]) else f"  {row['images_per_s']:.0f} img/s"


def _noise(row: Row) -> str:
    scale = row.get("noise_scale", math.nan)
    return "" if math.isnan(scale) else f"  noise scale {scale:,.0f} (an order of magnitude)"
