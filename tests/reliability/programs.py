"""Programs for ranks: python -m tests.reliability.programs NAME ROUNDS FOLDER; rank 0 prints a report in JSON."""

import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "mpi" / "ranks")]

from parts import plan_for, small_trainer  # noqa: E402

from largebatch import hooks  # noqa: E402
from largebatch.build import build_trainer  # noqa: E402
from largebatch.comm import Communicator, Stopped, session  # noqa: E402
from largebatch.comm.replicas import check_replicas, named_tensors  # noqa: E402
from largebatch.hooks.recompute import check_gradient  # noqa: E402
from largebatch.start import start_ranks  # noqa: E402
from largebatch.train import read  # noqa: E402

IMAGES = 1_281_167  # of ImageNet-1K
FLIP_EVERY = 200  # checks between two in which a bit is flipped


def report(comm: Communicator, **numbers: object) -> None:
    if comm.rank == 0:
        print(f"report: {json.dumps(numbers)}", flush=True)


def compare(rounds: int, folder: Path) -> None:
    """Check the replicas so often; now and then a bit of one rank is flipped, which is found, and flipped back."""
    draws, found = random.Random(8), 0
    with session(deterministic=True) as comm:
        trainer = small_trainer(comm, plan_for(comm, steps=2), passes=2)
        trainer.fit()
        tensors = named_tensors(trainer.model, trainer.optimizer)
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


def held(folder: Path) -> dict[str, int]:
    """Return what this process holds: threads, descriptors, and files in the run folder."""
    files = sum(path.is_file() for path in folder.rglob("*"))
    threads, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return {"threads": threads, "descriptors": descriptors, "files": files}


def megabytes() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def soak(rounds: int, folder: Path) -> None:
    """Train so many steps of a toy, with rows, checks and checkpoints; report what grew since a tenth of them."""
    with session(deterministic=True) as comm:
        if comm.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        plan = plan_for(comm, steps=rounds)
        trainer = small_trainer(comm, plan, passes=2)
        batch, twentieth = plan.global_batch_size, rounds // 20 * plan.global_batch_size
        check = hooks.ReplicaCheck(interval_images=10 * batch, with_optimizer=True)
        trainer.eval_images = twentieth
        trainer.hooks = [
            hooks.RecomputeCheck(interval_images=100 * batch),
            check,
            hooks.Checkpoint(folder, every_images=twentieth, keep=2, config_text="", before_save=check.check),
            hooks.Log([hooks.Csv(folder)] if comm.rank == 0 else [], every_images=10 * batch),
        ]
        trainer.fit(max_steps=rounds // 10)
        first, memory = held(folder), megabytes()
        trainer.fit()
        last = held(folder)
        slope = (megabytes() - memory) / (0.9 * rounds / 1000)
        grown = {name: (first[name], last[name]) for name in first}
        report(comm, steps=trainer.state.step, mb_per_1000_steps=round(slope, 4), **grown)


def cost(rounds: int, folder: Path) -> None:
    """Measure what guards cost the training of ViT-B/32 on ImageNet's number of images; report shares of its time."""
    options = f"--recipe vit_b32 --data synthetic --run.folder {folder} --data.micro_batch_size 32".split()
    # The recipe computes in fp16, for which few CPUs have instructions: there a step would take minutes.
    options += "--data.global_batch_size 64 --run.precision auto --log.tensorboard false".split()
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
