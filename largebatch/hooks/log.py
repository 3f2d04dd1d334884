"""Computes the rows of numbers of a run, and hands them to the sinks.

All ranks compute each number together; the sinks on rank 0 only write. A row holds the numbers of its own step, not
means since an earlier row, so a resumed run leaves the same rows as one without interruption.
"""

import logging
import math
import resource
import time
from collections.abc import Callable, Sequence

import torch

from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.files.run_folder import Row
from largebatch.hooks.noise_scale import NoiseScale
from largebatch.hooks.sinks import Sink
from largebatch.hooks.slow_rank import SlowRank
from largebatch.optim import adapted_ratios, trust_summary
from largebatch.report.tables import TRUST

logger = logging.getLogger(__name__)
wall_clock = time.time  # seconds since the epoch


class Log(Hook):
    """Computes the rows. It must be the last hook, so that the time of the others is not training time."""

    def __init__(
        self, sinks: Sequence[Sink], *, every_images: int, noise: NoiseScale | None = None, slow: SlowRank | None = None
    ) -> None:
        """noise and slow: hooks of the run, noise with the same every_images."""
        self.sinks, self.noise, self.slow = sinks, noise, slow
        self.every_images = every_images
        self.since_row, self.since_epoch = Throughput(), Throughput()
        self.failed = set[str]()  # sinks
        self.started: float | None = None  # when the current step began; None during the first step

    def before_fit(self, trainer: Trainer) -> None:
        """Open the sinks; comm.Stopped if one cannot be opened."""
        with trainer.comm.together("log"):
            for sink in self.sinks if trainer.comm.rank == 0 else ():
                sink.open(trainer)

    def after_rollback(self, trainer: Trainer) -> None:
        """Open the sinks anew: the rows of later steps are written again."""
        self.after_fit(trainer)
        self.since_row, self.since_epoch, self.started = Throughput(), Throughput(), None
        self.before_fit(trainer)

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        if self.started is not None:
            for throughput in (self.since_row, self.since_epoch):
                throughput.add(output.images, time.perf_counter() - self.started, output.waited_s)
        self.tell(trainer, lambda sink: sink.advance(trainer.state.step))
        if trainer.due(self.every_images):
            mine = [output.loss_sum.double().cpu().view(1), *([self.noise.measured(trainer)] if self.noise else [])]
            total = trainer.comm.allreduce(torch.cat(mine), name="log/step")
            row = self.position(trainer) | {
                "loss": float(total[0]) / trainer.comm.size,
                "grad_norm": float(output.grad_norm),
                "stall": self.since_row.stall(),
                "images_per_s": self.since_row.take(),
                "memory_gib": peak_memory(trainer.device) / 2**30,
                "slow_rank": self.slow.rank if self.slow else math.nan,
                "time": round(wall_clock()),
            }
            row |= trust_ratios(trainer, output)
            row |= self.noise.row(trainer, output, total[1:]) if self.noise else {}
            self.tell(trainer, lambda sink: sink.write_step(row))

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        row = self.position(trainer) | {
            "train_loss": metrics["train_loss"],
            "eval_loss": metrics["loss"],
            "top1": metrics["top1"],
            "top5": metrics["top5"],
            "ema_loss": metrics.get("ema_loss", math.nan),
            "ema_top1": metrics.get("ema_top1", math.nan),
            "images_per_s": self.since_epoch.take(),
            "time": round(wall_clock()),
        }
        self.tell(trainer, lambda sink: sink.write_epoch(row))
        if trainer.comm.rank == 0 and (ratios := layer_ratios(trainer)):
            layers = {"step": row["step"], "epoch": row["epoch"]} | ratios
            self.tell(trainer, lambda sink: sink.write_layers(layers))

    def after_step(self, trainer: Trainer) -> None:
        self.started = time.perf_counter()

    def after_fit(self, trainer: Trainer) -> None:
        self.tell(trainer, lambda sink: sink.close())

    def position(self, trainer: Trainer) -> Row:
        # With optim.layer_decay the rate of the head, which is the schedule's.
        state, lr = trainer.state, max(group["lr"] for group in trainer.optimizer.param_groups)
        return {"step": state.step, "epoch": trainer.epoch, "images": state.images, "lr": lr, "skipped": state.skipped}

    def tell(self, trainer: Trainer, call: Callable[[Sink], None]) -> None:
        """Call every sink, on rank 0. On a full disk the rows are lost, but the run goes on."""
        for sink in self.sinks if trainer.comm.rank == 0 else ():
            try:
                call(sink)
            except OSError as error:
                name = type(sink).__name__
                if name not in self.failed:
                    logger.warning("%s failed at step %d: %s; later ones are not told", name, trainer.state.step, error)
                self.failed.add(name)


def trust_ratios(trainer: Trainer, output: StepOutput) -> Row:
    """Return the smallest, median and largest trust ratio of the step, nan if it has none."""
    summary = trust_summary(trainer.optimizer) if output.applied else None  # a skipped step leaves older ratios
    values = [math.nan] * len(TRUST) if summary is None else summary.tolist()
    return dict(zip(TRUST, values))


def layer_ratios(trainer: Trainer) -> Row:
    """Return the newest trust ratio of each adapted tensor of this rank, by its name."""
    ratios = adapted_ratios(trainer.optimizer)
    named = {name: ratios[p] for name, p in trainer.model.named_parameters() if p in ratios}
    return dict(zip(named, torch.stack([*named.values()]).tolist())) if named else {}


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has used, on a GPU or else of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Throughput:
    """Images per second, and the time without images, over the steps added since the last `take`."""

    def __init__(self) -> None:
        self.images, self.seconds, self.waited_s = 0, 0.0, 0.0

    def add(self, images: int, seconds: float, waited_s: float) -> None:
        self.images += images
        self.seconds += seconds
        self.waited_s += waited_s

    def stall(self) -> float:
        """Return the percentage of the time that this rank waited for images; nan if no step was measured."""
        return 100 * self.waited_s / self.seconds if self.seconds else math.nan

    def take(self) -> float:
        """Return images per second and start anew; nan if no step was measured."""
        rate = self.images / self.seconds if self.seconds else math.nan
        self.images, self.seconds, self.waited_s = 0, 0.0, 0.0
        return rate
