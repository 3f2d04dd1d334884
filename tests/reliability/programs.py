"""Programs for ranks: python -m tests.reliability.programs NAME ROUNDS FOLDER; rank 0 prints a report in JSON."""

import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import torch

from largebatch import hooks, train
from largebatch.assembly import build_trainer
from largebatch.assembly import trainer as parts
from largebatch.engine import Trainer
from largebatch.files.run_folder import Row
from largebatch.hooks import sinks
from largebatch.hooks.recompute import check_gradient
from largebatch.hooks.sinks import Sink
from largebatch.process import background
from largebatch.ranks import Ranks, Stopped, session
from largebatch.ranks.replicas import check_replicas, named_tensors
from largebatch.start import start_ranks
from largebatch.train import read

IMAGES = 1_281_167  # of ImageNet-1K
FLIP_EVERY = 200  # checks between two in which a bit is flipped
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


def cost(rounds: int, folder: Path) -> None:
    """Measure what guards cost the training of ViT-B/32 on ImageNet's number of images; report shares of its time."""
    options = f"--recipe vit_b32 --data synthetic --run.folder {folder} --data.micro_batch_size 32".split()
    # The recipe computes in fp16, for which few CPUs have instructions: there a step would take minutes.
    options += "--data.global_batch_size 64 --run.precision auto --log.to none".split()
    config = read(options)
    with start_ranks(config) as comm:
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
        epoch_s = alone * IMAGES / trainer.plan.global_batch_size
        report(
            comm, step_s=alone, save_s=save_s, check_s=check_s, recompute_s=recompute_s,
            of_an_epoch=(save_s + 2 * check_s) / epoch_s, of_500_steps=recompute_s / (500 * alone),
        )  # fmt: skip


if __name__ == "__main__":
    {"compare": compare, "cost": cost, "soak": soak}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
