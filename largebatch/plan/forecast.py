"""The hours and the memory that a run logs at its start, and corrects by its first steps."""

import datetime
import logging
import statistics
import time
from dataclasses import dataclass, replace

import torch

from largebatch.config import TrainConfig
from largebatch.devices import GIB, device_named
from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.plan.memory import Memory, largest_micro_batch, of_rank
from largebatch.plan.planning import cluster_of, otherwise
from largebatch.plan.run import HOUR, RAMP, Run, num_steps, run_of
from largebatch.plan.step import Cluster, Speed, Step, step_of
from largebatch.plan.trace import Pass, trace
from largebatch.ranks import Ranks

logger = logging.getLogger(__name__)
clock = time.perf_counter

UNMEASURED = 5  # first steps: kernels are chosen and compiled, and the loader is ahead
MEASURED = 20  # steps after these, by which the rest is predicted
SHORT_S = 60.0  # a shorter rest is not logged


@dataclass(frozen=True)
class Forecast:
    """The plan of a run on the GPUs that it has."""

    config: TrainConfig
    cluster: Cluster
    counted: Pass
    num_images: int
    step: Step | None  # None: there is no plan for uneven ranks of a resumed run

    @property
    def memory(self) -> Memory:
        return of_rank(self.config, self.counted, self.cluster.device, ranks=self.cluster.ranks)

    def run(self, step: Step, speed: Speed = Speed()) -> Run:
        return run_of(self.config, self.counted, self.cluster, step, speed, num_images=self.num_images)

    def rest(self, seconds: float, *, left: int) -> tuple[float, str]:
        """Return the time of the `left` steps if each takes `seconds`, and a note: how far the plan was off."""
        if self.config.schedule.batch_ramp:
            return left * seconds, "if the batch stays as it is now, without evaluations and checkpoints"
        if self.config.schedule.image_sizes:
            return left * seconds, "if the image size stays as it is now, without evaluations and checkpoints"
        if self.step is None:
            return left * seconds, "without evaluations and checkpoints"
        factor = seconds / self.step.seconds
        run = self.run(Step(seconds, 0.0, 0.0, 0.0), Speed(factor))
        share = left / num_steps(self.config, self.num_images)
        return share * (run.seconds - run.start), f"{factor:.2f} × the plan"

    def lines(self, name: str) -> list[str]:
        """Return lines for the log; ValueError if the run surely does not fit. name: torch's name of the GPU."""
        needed, capacity = self.memory, self.cluster.device.memory
        certain = needed.total - needed.communication - needed.runtime - needed.inputs
        most = largest_micro_batch(self.config, self.counted, self.cluster.device, ranks=self.cluster.ranks)
        if certain > capacity:
            remedies = [f"give at most {most}"] if most else []
            if not self.config.model.grad_checkpointing and otherwise(self.config, self.cluster):
                remedies.append("give --model.grad_checkpointing true")
            raise ValueError(
                f"--data.micro_batch_size is {self.config.data.micro_batch_size}, which needs {certain / GIB:.1f} GiB "
                f"on each rank, and {name} has {capacity / GIB:.1f}: "
                f"{', or '.join(remedies) or 'take a smaller model'}."
            )
        room = f"{needed.total / GIB:.1f} of {capacity / GIB:.1f} GiB on each rank; micro-batches of up to {most} fit"
        hours: list[str] = []
        if self.step:
            seconds = self.run(self.step).seconds
            hours = [f"plan: at least {seconds / HOUR:.2f} h for the whole run, until {end(seconds)}"]
        if ramp := self.config.schedule.batch_ramp:
            hours.append(f"plan: {RAMP.format(ramp)}")
        return [*hours, f"plan: {room}"]


def forecast(config: TrainConfig, comm: Ranks, device: torch.device, *, num_images: int) -> "Correction":
    """Log hours and memory of a run on GPUs; return the hook that corrects them. All ranks stop if it cannot fit."""
    found = None
    with comm.together("planning"):
        if comm.rank == 0 and device.type == "cuda":
            name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
            try:
                found = forecast_on(
                    config, name, memory, ranks=comm.size, per_host=comm.local_size, num_images=num_images
                )
                for line in found.lines(name) if found else ():
                    logger.info("%s", line)
            except RuntimeError as error:  # a model that cannot be counted without its weights
                logger.debug("no plan: %s", error)
    return Correction(found)


def forecast_on(
    config: TrainConfig, name: str, memory: float, *, ranks: int, per_host: int, num_images: int
) -> Forecast | None:
    """Return the forecast on a GPU, None if it is not known. name: torch's name of the GPU; memory: its bytes."""
    known = device_named(name)
    if known is None:
        return None
    cluster = cluster_of(ranks, known.name, per_host=per_host)
    cluster = replace(cluster, device=replace(known, memory=memory))
    counted = trace(config, device="cuda")
    try:
        step = step_of(config, counted, cluster)
    except ValueError:
        step = None
    return Forecast(config, cluster, counted, num_images, step)


def end(seconds: float) -> str:
    return f"{datetime.datetime.now() + datetime.timedelta(seconds=seconds):%Y-%m-%d %H:%M}"


class Correction(Hook):
    """Logs, once, the time of the rest of the run by its first steps, and the memory in use. Only rank 0 measures."""

    def __init__(self, plan: Forecast | None) -> None:
        self.plan = plan
        self.ends: list[float] = []

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        if trainer.comm.rank or len(self.ends) > UNMEASURED + MEASURED:
            return
        self.ends.append(clock())
        if len(self.ends) == UNMEASURED + MEASURED + 1:
            steps = [after - before for before, after in zip(self.ends, self.ends[1:])]
            extra = 1 / trainer.sam.every if trainer.sam else 0  # the median has no second gradient
            if line := self.line(trainer, (1 + extra) * statistics.median(steps[UNMEASURED:])):
                logger.info("%s", line)

    def line(self, trainer: Trainer, seconds: float) -> str:
        left = trainer.last_step - trainer.state.step
        rest, note = left * seconds, "without evaluations and checkpoints"
        if self.plan:
            rest, note = self.plan.rest(seconds, left=left)
        if rest < SHORT_S:
            return ""
        hours = f"the rest of the run {rest / HOUR:.2f} h, until {end(rest)} ({note})"
        return f"plan: a step takes {seconds:.3g} s, {hours}{self.memory(trainer.device)}"

    def memory(self, device: torch.device) -> str:
        if device.type != "cuda":
            return ""
        free, capacity = torch.cuda.mem_get_info(device)
        predicted = f", {self.plan.memory.total / GIB:.1f} predicted" if self.plan else ""
        return f"; {(capacity - free) / GIB:.1f} of {capacity / GIB:.1f} GiB are in use{predicted}"
