"""What watches a run: its guards, its checkpoints, and the numbers it writes down.

    RUN/steps.csv  epochs.csv     a row every log.every; a row per evaluation
    RUN/curves.png                both, drawn
    RUN/tensorboard/              the same numbers as event files

`build` puts the hooks into the order Guards, Ema (in ema.py), Checkpoint, StopEarly (in preemption.py), Profile (in
profiling.py), Log. Log computes each number once, on all ranks, and hands it to sinks, which exist on rank 0 and cannot
communicate. A row holds the numbers of its own step, not means since an earlier row, so an interrupted run leaves the
same rows as one that was not.
"""

import datetime
import logging
import math
import sys
import time
from pathlib import Path
from typing import Callable, Sequence, TextIO

import torch
from rich import progress
from rich.console import Console

from largebatch import checkpoint
from largebatch.comm import Stopped
from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.hooks.curves import EMA, EPOCH_COLUMNS, EPOCHS, STEP_COLUMNS, STEPS, TRUST, Row, Table, draw_curves
from largebatch.optim import trust_summary

logger = logging.getLogger(__name__)

PLAIN_LINES = 40  # lines of progress per run where there is no terminal, besides the evaluations
REDRAW_S = 10.0  # the curves are drawn at most this often


# ---------------------------------------------------------------------------------------------------------------
# hooks
# ---------------------------------------------------------------------------------------------------------------


class Guards(Hook):
    """Warns of each skipped step and ends the run after `max_skipped_steps` in a row."""

    def __init__(self, *, max_skipped_steps: int) -> None:
        self.max_skipped_steps = max_skipped_steps
        self.in_a_row = 0

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """comm.Stopped on every rank; all see the same `applied`, so all count alike."""
        self.in_a_row = 0 if output.applied else self.in_a_row + 1
        if output.applied:
            return
        cause, advice = self.explain(trainer, output)
        norm, step = float(output.grad_norm), trainer.state.step
        if trainer.comm.rank == 0:
            logger.warning("step %d skipped: the norm of its gradient is %s; %s", step, norm, cause)
        if self.in_a_row >= self.max_skipped_steps:
            raise Stopped(
                f"Training stopped at step {step}: {self.in_a_row} steps in a row had a gradient that is not finite "
                f"(--run.max_skipped_steps), and {cause}; {advice}."
            )

    def explain(self, trainer: Trainer, output: StepOutput) -> tuple[str, str]:
        """Why the gradient is not finite, the model or the cast to fp16 on the wire, and what to change."""
        advice = "lower --optim.lr, or use --run.precision bf16 or fp32"
        mine = bool(torch.isfinite(output.loss_sum)), trainer.comm.peak_sent(trainer.optimizer)
        finite, peaks = zip(*trainer.comm.allgather_object(mine, name="guards/finite"))
        ranks = ", ".join(str(rank) for rank, is_finite in enumerate(finite) if not is_finite)
        if ranks:
            return f"the loss is not finite on rank {ranks}", advice
        if not all(peak is not None and math.isfinite(peak) for peak in peaks):
            return "the loss is finite on every rank", advice
        scale = f"loss scale now {trainer.scaler.get_scale():g}" if trainer.scaler.is_enabled() else "no loss scale"
        return (
            f"every rank's own was finite, at most {max(peaks):.3g}, and overflowed in fp16 on the wire ({scale}), "
            "which --run.compression none avoids",
            "set that",
        )


class Checkpoint(Hook):
    """Saves every `every_images` and at the end. A save that fails is a warning: older ones stay, the run goes on.
    The last one must not fail.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_images: int,
        keep: int,
        config_text: str,
    ) -> None:
        self.folder = Path(folder)
        self.every_images = every_images
        self.keep = keep
        self.config_text = config_text
        self.saved_step = 0
        self.failure: OSError | None = None  # of the newest save, on rank 0
        self.longest_s = 0.0  # time of a save, on rank 0

    def before_fit(self, trainer: Trainer) -> None:
        """What was resumed need not be saved again."""
        self.saved_step = trainer.state.step

    def after_step(self, trainer: Trainer) -> None:
        """The other ranks go on, and wait in the next step's reduction."""
        if trainer.due(self.every_images):
            self.save(trainer)

    def after_fit(self, trainer: Trainer) -> None:
        """Also where run.max_steps ended. comm.Stopped if what this process trained is nowhere."""
        if trainer.state.step != self.saved_step:
            self.save(trainer)
        with trainer.comm.together("saving"):
            if self.failure:
                raise ValueError(
                    f"the last checkpoint, of step {trainer.state.step}, could not be written ({self.failure}): older "
                    "ones are kept, and the same command goes on from the newest once there is room."
                )

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint, on rank 0."""
        began = time.perf_counter()
        self.saved_step = trainer.state.step  # or tried to, on all ranks alike
        model, optimizer = trainer.replica.gather_whole()
        if trainer.comm.rank != 0:
            return
        self.failure = None
        try:
            checkpoint.save(
                self.folder,
                model=model,
                optimizer=optimizer,
                scaler=trainer.scaler,
                state=trainer.state,
                config_text=self.config_text,
                keep=self.keep,
                average=trainer.average,
            )
        except OSError as error:
            self.failure = error
            logger.warning("the checkpoint of step %d failed: %s; older ones are kept", trainer.state.step, error)
        self.longest_s = max(self.longest_s, time.perf_counter() - began)


class Sink:
    """Where numbers go; only rank 0 has any that are open. Rows are those of STEP_COLUMNS and EPOCH_COLUMNS."""

    def open(self, trainer: Trainer) -> None:
        """The run starts, or goes on, at trainer.state."""

    def advance(self, step: int) -> None:
        """Another step is done."""

    def write_step(self, row: Row) -> None:
        """A step that is logged."""

    def write_epoch(self, row: Row) -> None:
        """An evaluation; its step is written before it."""

    def close(self) -> None:
        """The run ends, or stops."""


class Log(Hook):
    """Computes the rows on all ranks, every `every_images` and at each evaluation, and hands them to the sinks.

    It comes last among the hooks: what they do after a step is then not counted as training time.
    """

    def __init__(self, sinks: Sequence[Sink], *, every_images: int) -> None:
        self.sinks = sinks
        self.every_images = every_images
        self.since_row, self.since_epoch = Throughput(), Throughput()
        self.started: float | None = None  # when the present step began; None before the first one is done

    def before_fit(self, trainer: Trainer) -> None:
        """comm.Stopped if a sink cannot be opened."""
        with trainer.comm.together("log"):
            for sink in self.sinks if trainer.comm.rank == 0 else ():
                sink.open(trainer)

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        """One small reduction where a row is due, nothing else anywhere."""
        if self.started is not None:
            for throughput in (self.since_row, self.since_epoch):
                throughput.add(output.images, time.perf_counter() - self.started)
        self.tell(trainer, lambda sink: sink.advance(trainer.state.step))
        if trainer.due(self.every_images):
            loss = trainer.comm.allreduce(output.loss_sum.double().cpu(), name="log/loss") / trainer.comm.size
            row = self.place(trainer) | {
                "loss": float(loss),
                "grad_norm": float(output.grad_norm),
                "images_per_s": self.since_row.take(),
            }
            row |= trust_ratios(trainer, output)
            self.tell(trainer, lambda sink: sink.write_step(row))

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """The engine has reduced these already."""
        row = self.place(trainer) | {
            "train_loss": metrics["train_loss"],
            "eval_loss": metrics["loss"],
            "top1": metrics["top1"],
            "top5": metrics["top5"],
            "ema_loss": metrics.get("ema_loss", math.nan),
            "ema_top1": metrics.get("ema_top1", math.nan),
            "images_per_s": self.since_epoch.take(),
        }
        self.tell(trainer, lambda sink: sink.write_epoch(row))

    def after_step(self, trainer: Trainer) -> None:
        """The next step begins."""
        self.started = time.perf_counter()

    def after_fit(self, trainer: Trainer) -> None:
        """Also when the run only stops."""
        self.tell(trainer, lambda sink: sink.close())

    def place(self, trainer: Trainer) -> Row:
        """Where the run is, with the learning rate of the step just done."""
        state, lr = trainer.state, trainer.optimizer.param_groups[0]["lr"]
        return {"step": state.step, "epoch": trainer.epoch, "images": state.images, "lr": lr, "skipped": state.skipped}

    def tell(self, trainer: Trainer, call: Callable[[Sink], None]) -> None:
        """Call every sink, on rank 0. A full disk costs numbers, not the run."""
        for sink in self.sinks if trainer.comm.rank == 0 else ():
            try:
                call(sink)
            except OSError as error:
                logger.warning("%s failed at step %d: %s", type(sink).__name__, trainer.state.step, error)


def trust_ratios(trainer: Trainer, output: StepOutput) -> Row:
    """Smallest, median and largest ratio of the step just done: one wait for the device; nan where there are none."""
    summary = trust_summary(trainer.optimizer) if output.applied else None  # a skipped step left those of another
    values = [math.nan] * len(TRUST) if summary is None else summary.tolist()
    return dict(zip(TRUST, values))


class Throughput:
    """Images per second over the steps added since the last `take`."""

    def __init__(self) -> None:
        self.images, self.seconds = 0, 0.0

    def add(self, images: int, seconds: float) -> None:
        """One step."""
        self.images += images
        self.seconds += seconds

    def take(self) -> float:
        """nan where no step was measured, as after the first."""
        rate = self.images / self.seconds if self.seconds else math.nan
        self.images, self.seconds = 0, 0.0
        return rate


# ---------------------------------------------------------------------------------------------------------------
# sinks
# ---------------------------------------------------------------------------------------------------------------


class Progress(Sink):
    """A bar below the log on a terminal, a line now and then anywhere else; a line per evaluation on both."""

    def open(self, trainer: Trainer) -> None:
        self.num_steps, self.num_epochs = trainer.num_steps, trainer.plan.num_images / trainer.plan.num_samples
        self.first_step, self.opened = trainer.state.step, time.perf_counter()
        self.lines_done = -1
        self.bar = _start_bar(self.num_steps, done=self.first_step) if sys.stderr.isatty() else None

    def advance(self, step: int) -> None:
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=step)

    def write_step(self, row: Row) -> None:
        numbers = f"loss {row['loss']:.4f}  lr {row['lr']:.3g}  {_rate(row)}"
        lines = int(row["step"]) * PLAIN_LINES // self.num_steps
        if self.bar:
            self.bar.update(self.bar.task_ids[0], description=f"epoch {row['epoch']:.2f}  {numbers}")
        elif lines > self.lines_done:
            self.lines_done = lines
            place = f"step {row['step']:.0f}/{self.num_steps}  epoch {row['epoch']:.2f}"
            logger.info("%s  %s  %s left", place, numbers, self.left(row))

    def write_epoch(self, row: Row) -> None:
        place = f"epoch {row['epoch']:.4g}/{self.num_epochs:.4g}"
        loss = f"train loss {row['train_loss']:.4f}  held-out loss {row['eval_loss']:.4f}"
        accuracy = f"top-1 {row['top1']:.2f} %  top-5 {row['top5']:.2f} %"
        if not math.isnan(row.get("ema_top1", math.nan)):
            accuracy += f"  averaged weights: loss {row['ema_loss']:.4f}  top-1 {row['ema_top1']:.2f} %"
        logger.info("%s  %s  %s  lr %.3g  %s", place, loss, accuracy, row["lr"], _rate(row))

    def close(self) -> None:
        if self.bar:
            _stop_bar(self.bar)

    def left(self, row: Row) -> str:
        """Time to the end of the run at the pace so far, evaluations and checkpoints included."""
        pace = (time.perf_counter() - self.opened) / (row["step"] - self.first_step)
        return str(datetime.timedelta(seconds=round(pace * (self.num_steps - row["step"]))))


class Csv(Sink):
    """RUN/steps.csv and RUN/epochs.csv, each row on its way to the disk before the step's checkpoint is."""

    def __init__(self, folder: str | Path) -> None:
        self.steps = Table(Path(folder) / STEPS, STEP_COLUMNS)
        self.epochs = Table(Path(folder) / EPOCHS, EPOCH_COLUMNS)

    def open(self, trainer: Trainer) -> None:
        self.steps.open(last_step=trainer.state.step)
        self.epochs.open(last_step=trainer.state.step)

    def write_step(self, row: Row) -> None:
        self.steps.append(row)

    def write_epoch(self, row: Row) -> None:
        self.epochs.append(row)

    def close(self) -> None:
        self.steps.close()
        self.epochs.close()


class TensorBoard(Sink):
    """RUN/tensorboard, with what an interrupted run wrote past the present step hidden."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) / "tensorboard"

    def open(self, trainer: Trainer) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # seconds, and on rank 0 only
        except ImportError as error:
            raise ValueError(
                f"TensorBoard is not installed ({error}): run `python -m pip install tensorboard`, or set "
                "--log.tensorboard false."
            ) from error
        self.writer = SummaryWriter(str(self.folder), purge_step=trainer.state.step + 1)

    def write_step(self, row: Row) -> None:
        self.add("train", row, ("loss", "lr", "grad_norm", "images_per_s", "skipped", *TRUST))

    def write_epoch(self, row: Row) -> None:
        self.add("epoch", row, ("train_loss", "eval_loss", "top1", "top5", *EMA))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()

    def add(self, section: str, row: Row, names: Sequence[str]) -> None:
        """One point per name that the row has a number for."""
        for name in names:
            if not math.isnan(row.get(name, math.nan)):
                self.writer.add_scalar(f"{section}/{name}", row[name], int(row["step"]))


class Curves(Sink):
    """RUN/curves.png; comes after Csv, whose files it draws."""

    def __init__(self, folder: str | Path, *, title: str) -> None:
        self.folder = Path(folder)
        self.title = title
        self.drawn = -math.inf

    def write_epoch(self, row: Row) -> None:
        if time.perf_counter() - self.drawn > REDRAW_S:
            self.close()

    def close(self) -> None:
        draw_curves(self.folder, title=self.title)
        self.drawn = time.perf_counter()


# ---------------------------------------------------------------------------------------------------------------
# lines on a terminal
# ---------------------------------------------------------------------------------------------------------------


def _rate(row: Row) -> str:
    return "" if math.isnan(row["images_per_s"]) else f"{row['images_per_s']:.0f} img/s"


def _start_bar(num_steps: int, *, done: int) -> progress.Progress:
    """Draw the bar, and send the log above it: rich replaces sys.stderr, which handlers have kept."""
    bar = progress.Progress(
        progress.TextColumn("step {task.completed}/{task.total}"),
        progress.BarColumn(),
        progress.TextColumn("{task.description}"),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task("", total=num_steps, completed=done)
    before = sys.stderr
    bar.start()
    bar.console.show_cursor(True)  # a run that is aborted could not show it again
    _redirect_log(before, sys.stderr)
    return bar


def _stop_bar(bar: progress.Progress) -> None:
    before = sys.stderr
    bar.stop()
    _redirect_log(before, sys.stderr)


def _redirect_log(old: TextIO, new: TextIO) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)
