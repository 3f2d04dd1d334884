"""Programs for ranks: python -m tests.reliability.programs NAME ROUNDS FOLDER; rank 0 prints a report in JSON."""

import json
import logging
import math
import os
import random
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import torch

from largebatch import hooks, train
from largebatch.assembly import build_trainer
from largebatch.assembly import trainer as parts
from largebatch.data.dali import TrainLoader
from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.files.run_folder import Row
from largebatch.hooks import sinks, slow_rank
from largebatch.hooks.recompute import check_gradient
from largebatch.hooks.sinks import Sink
from largebatch.process import background
from largebatch.ranks import Ranks, Stopped, session
from largebatch.ranks.replicas import check_replicas, named_tensors
from largebatch.replica import Replica
from largebatch.train import read

IMAGES = 1_281_167  # of ImageNet-1K
FLIP_EVERY = 200  # checks between two in which a bit is flipped
WATCHED = 200  # steps
SLOW_S = 0.2  # added to a step of a slow rank
KEPT = 5  # the newest two checkpoints, the best, its link, and the one before the loss rose
SMALL = "--model vit_nano32 --img-size 32 --data.micro_batch_size 4".split()


def report(comm: Ranks, **numbers: object) -> None:
    if comm.rank == 0:
        print(f"report: {json.dumps(numbers)}", flush=True)


def compare(rounds: int, folder: Path) -> None:
    """Check the replicas so often; now and then a bit of one rank is flipped, which is found, and flipped back."""
    draws, found = random.Random(8), 0
    config = read([*SMALL, "--data.global_batch_size", "24", "--run.duration", "2 steps", "--run.folder", str(folder)])
    with session(config) as comm:
        trainer = train.build_trainer(config, comm)
        trainer.fit()
        tensors = named_tensors(trainer.model, trainer.optimizer, trainer.average)
        for number in range(rounds):
            if number % FLIP_EVERY:
                check_replicas(comm, tensors, place=f"check {number}", remedy="")
                continue
            rank, name = draws.randrange(comm.size), draws.choice(list(tensors))
            element, bit = draws.randrange(tensors[name].numel()), draws.randrange(32)
            flip(tensors[name], element, bit, here=comm.rank == rank)
            try:
                check_replicas(comm, tensors, place=f"check {number}", remedy="")
            except Stopped as stopped:
                assert str(stopped).startswith(f"rank {rank} (") and f"values of {name}" in str(stopped), stopped
                found += 1
            flip(tensors[name], element, bit, here=comm.rank == rank)
        assert found == len(range(0, rounds, FLIP_EVERY)), found
        report(comm, checks=rounds, flips_found=found)


def flip(tensor: torch.Tensor, element: int, bit: int, *, here: bool) -> None:
    if here:
        tensor.detach().view(-1).view(torch.int32)[element] ^= torch.tensor(1, dtype=torch.int32) << bit


class Holding(Sink):
    """Reports what rank 0 holds after a tenth of the steps and after the last one, when its threads have done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: list[dict[str, float]] = []

    def open(self, trainer: Trainer) -> None:
        self.steps = trainer.last_step // 10, trainer.last_step

    def write_epoch(self, row: Row) -> None:
        if row["step"] in self.steps:
            futures.wait(list(background._begun))
            self.held.append(held(self.folder))

    def close(self) -> None:
        numbers = {name: [one[name] for one in self.held] for name in self.held[0]}
        print("report:", json.dumps({"steps": self.steps[1]} | numbers), flush=True)


def held(folder: Path) -> dict[str, float]:
    """Return what this process holds: threads, descriptors, files in the run folder, and megabytes in memory.

    The checkpoints that are kept, the best one among them, may be one more at the end.
    """
    threads, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    outside = sum(path.is_file() for path in folder.rglob("*") if "checkpoints" not in path.parts)
    kept = max(len(os.listdir(folder / "checkpoints")), KEPT)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": threads,
        "descriptors": descriptors,
        "files": outside + kept,
        "megabytes": round(pages * resource.getpagesize() / 2**20, 1),
    }


def soak(rounds: int, folder: Path) -> None:
    """Train so many steps as a user does, with 50 evaluations and checkpoints; report what grew since a tenth of them.

    The curves are drawn after each evaluation, not every 10 seconds at most, and gradients are compared.
    """
    often = f"{rounds // 50} steps"
    options = ["--data.global_batch_size", "16", "--run.duration", f"{rounds} steps", "--run.folder", str(folder)]
    options += ["--run.eval_every", often, "--checkpoint.every", often, "--log.every", "10 steps"]
    build_sinks, sinks.REDRAW_S = parts.build_sinks, 0.0
    parts.build_sinks = lambda config: [*build_sinks(config), Holding(folder)]
    train.main([*SMALL, *options, "--run.recompute", "100 steps"])


class Planter(Hook):
    """Adds 200 ms to each step of one rank, in a phase, until the rank is named; and so on, round after round.

    The pauses are as long as the window of the medians. All ranks draw the same, and see the same verdicts.
    """

    def __init__(self, comm: Ranks, watching: hooks.SlowRank, rounds: int) -> None:
        self.comm, self.watching, self.left, self.draws = comm, watching, rounds, random.Random(16)
        self.planted: tuple[int, str] | None = None  # rank and phase
        self.slept = self.since = 0  # the newest step that slept, and that before the first of this round
        self.next = 2 * slow_rank.WINDOW  # the step after which the next round begins
        self.rounds: list[tuple[int, str, int]] = []  # rank, phase, and steps until the rank was named
        self.told: list[str] = []  # on rank 0

    def before_fit(self, trainer: Trainer) -> None:
        ears = logging.Handler()
        ears.emit = lambda record: self.told.append(record.getMessage())  # type: ignore[method-assign]
        slow_rank.logger.addHandler(ears)
        self.slow(trainer, TrainLoader, "__next__", "loading")
        self.slow(trainer, Replica, "run_pass", "forward and backward")

    def slow(self, trainer: Trainer, owner: Any, name: str, phase: str) -> None:
        """Let this method be slow once in a step that is to be slow."""
        whole = getattr(owner, name)

        def slowly(*arguments: Any) -> Any:
            if self.planted == (self.comm.rank, phase) and self.slept <= trainer.state.step:
                self.slept = trainer.state.step + 1
                time.sleep(SLOW_S)
            return whole(*arguments)

        setattr(owner, name, slowly)

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        step, slowest = trainer.state.step, self.watching.rank
        if self.planted and (slowest == self.planted[0] or step - self.since == 2 * slow_rank.WINDOW):
            self.rounds.append((*self.planted, step - self.since))
            self.planted, self.next = None, step + slow_rank.WINDOW + self.draws.randrange(slow_rank.EVERY)
            self.left -= 1
        elif not self.planted and step >= self.next and math.isnan(slowest) and self.left:
            self.planted = self.draws.randrange(self.comm.size), self.draws.choice(slow_rank.PHASES[:2])
            self.since = step

    def at_point(self, trainer: Trainer) -> None:
        if self.rounds and not self.left:
            trainer.stop_reason = "all rounds are done"


def slow(rounds: int, folder: Path) -> None:
    """Slow one of the ranks down in so many rounds; report who was named, after how many steps, and what else was."""
    watched(folder, steps=200 * rounds, rounds=rounds)


def healthy(rounds: int, folder: Path) -> None:
    """Train so many steps with nothing planted; report what was told, and how near the slowest rank was to that."""
    watched(folder, steps=rounds, rounds=0)


def watched(folder: Path, *, steps: int, rounds: int) -> None:
    options = ["--data.global_batch_size", "32", "--run.duration", f"{steps} steps", "--run.folder", str(folder)]
    config, excess, seen = read([*SMALL, *options]), slow_rank.excess, [0.0]
    slow_rank.excess = lambda table: seen.append(max(found := excess(table))) or found  # type: ignore
    with session(config) as comm:
        trainer = build_trainer(config, comm)
        (watching,) = [hook for hook in trainer.hooks if isinstance(hook, hooks.SlowRank)]
        planter = Planter(comm, watching, rounds)
        trainer.hooks = [*trainer.hooks, planter]
        began = time.perf_counter()
        trainer.fit()
        step_s = (time.perf_counter() - began) / trainer.state.step
        expected = [f"rank {rank} .* its {phase} takes " for rank, phase, _ in planter.rounds]
        right = [bool(re.match(one, told)) for one, told in zip(expected, planter.told)]
        report(
            comm, rounds=planter.rounds, told=len(planter.told), right=sum(right), steps=trainer.state.step,
            step_s=step_s, nearest=max(seen), seconds=round(step_s * trainer.state.step),
            wrong=[told for told in planter.told if not any(re.match(one, told) for one in expected)],
        )  # fmt: skip


def cost(rounds: int, folder: Path) -> None:
    """Measure what guards cost the training of ViT-B/32 on ImageNet's number of images; report shares of its time."""
    options = f"--recipe vit_b32 --data synthetic --run.folder {folder} --data.micro_batch_size 32".split()
    # The recipe computes in fp16, for which few CPUs have instructions: there a step would take minutes.
    options += "--data.global_batch_size 64 --run.precision auto --log.to none".split()
    config = read(options)
    with session(config) as comm:
        trainer = build_trainer(config, comm)
        batches = trainer.open_batches(0)
        (saving,) = [hook for hook in trainer.hooks if isinstance(hook, hooks.Checkpoint)]
        saving.before_fit(trainer)

        def seconds(work: Callable[[], object]) -> float:
            comm.barrier(name="begin")
            began = time.perf_counter()
            work()
            comm.barrier(name="end")
            return time.perf_counter() - began

        def step() -> float:
            return seconds(lambda: trainer.train_step(batches))

        def save() -> float:
            """What a save and the steps beside its thread take longer than these steps alone."""
            took, steps = seconds(lambda: saving.save(trainer)), [step() for _ in range(rounds)]
            return took + seconds(lambda: saving.wait(comm)) + sum(steps) - rounds * alone

        first = trainer.prepare(next(trainer.open_batches(trainer.state.step)))
        tensors = named_tensors(trainer.model, trainer.optimizer)
        alone, save_s = statistics.median(step() for _ in range(rounds)), 0.0
        save()  # its memory is new
        alone, save_s = statistics.median(step() for _ in range(rounds)), save()
        check_s = min(seconds(lambda: check_replicas(comm, tensors, place="cost", remedy="")) for _ in range(3))
        recompute_s = min(seconds(lambda: check_gradient(trainer, first)) for _ in range(3))
        (watching,) = [hook for hook in trainer.hooks if isinstance(hook, hooks.SlowRank)]
        before, output = comm.record.count, trainer.train_step(batches)
        collectives = comm.record.count - before
        watching.before_fit(trainer)

        def watch() -> None:
            """What the watch for slow ranks does in WATCHED steps, with its messages, and the records of these."""
            for _ in range(WATCHED):
                watching.at_point(trainer)
                watching.after_train_step(trainer, output)
                watching.after_step(trainer)
                trainer.state.step += 1
                for _ in range(collectives):
                    comm.record.begin("a collective", 0)

        watch_s = min(seconds(watch) for _ in range(3)) / WATCHED
        epoch_s = alone * IMAGES / trainer.plan.global_batch_size
        report(
            comm, step_s=alone, save_s=save_s, check_s=check_s, recompute_s=recompute_s,
            of_an_epoch=(save_s + 2 * check_s) / epoch_s, of_500_steps=recompute_s / (500 * alone),
            watch_s=watch_s, of_a_step=watch_s / alone,
        )  # fmt: skip


if __name__ == "__main__":
    programs = {"compare": compare, "cost": cost, "healthy": healthy, "slow": slow, "soak": soak}
    programs[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
