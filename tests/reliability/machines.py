"""Trials of a run that loses its machine again and again, each time in the middle of a copy to its mirror.

The store is a real S3 server. The run speaks to it over a cable that counts bytes: after a drawn number of them the run
gets SIGKILL. Then its folder is removed, and the same command goes on from the mirror.
"""

import functools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import s3
from launch import run, started
from runs import SMALL, different, rows, weights

from largebatch import checkpoint
from tests.reliability.campaign import Size, Trial
from tests.reliability.faults import AS_USERS, SMALLER

OFTEN = ["--run.eval_every", "10 steps", "--checkpoint.every", "1 steps", "--data.eval_batch_size", "90"]
MOST_BYTES = 4_500_000  # about three checkpoints
STEPS = 16  # for each machine: more than it can do until its bytes are sent
ADDRESS = "s3://bucket/runs"
Store = Callable[[], s3.Cable]


@contextmanager
def connected(folder: Path) -> Iterator[s3.Cable]:
    with s3.server(folder / "s3.log", "bucket") as port, s3.Cable.laid(port) as cable:
        yield cable


def losing(size: Size, *, machines: int, seed: int) -> Iterator[Trial]:
    """Yield the trials of one run: undisturbed, on machine after machine, and at last to its end."""
    steps, folder, undisturbed = STEPS * machines, size.folder / "disturbed", size.folder / "undisturbed"
    draws = random.Random(seed)
    with ExitStack() as opened:
        store = functools.cache(lambda: opened.enter_context(connected(size.folder)))  # for all trials
        yield Trial("undisturbed", lambda: train_undisturbed(undisturbed, steps))
        for number in range(machines):
            length = draws.randrange(1, MOST_BYTES)
            yield Trial(f"{number + 1}: lost after {length} bytes", partial(lose, store, folder, steps, length))
        yield Trial("to the end", lambda: to_the_end(store, folder, undisturbed, steps))


def command(folder: Path, steps: int, *options: str) -> list[str]:
    place = ["--run.duration", f"{steps} steps", "--run.folder", str(folder), *options]
    return ["python", "-m", "largebatch.train", *SMALL, *AS_USERS, *SMALLER, *OFTEN, *place]


def train_undisturbed(folder: Path, steps: int) -> str:
    code, output = run(command(folder, steps), timeout_s=3600)
    return "" if code == 0 else output[-3000:]


def lose(store: Store, folder: Path, steps: int, length: int) -> str:
    """Go on with the run on an empty machine until so many bytes are sent; return what was not as promised."""
    cable, output = store(), folder.with_name("output")
    shutil.rmtree(folder, ignore_errors=True)
    before = newest(cable)
    with started(
        command(folder, steps, "--checkpoint.mirror", ADDRESS), output, environment=s3.environment(cable.port)
    ) as machine:
        cable.cut = lambda: os.kill(machine.pid, signal.SIGKILL)
        cable.length = length
        try:
            code = machine.wait(600)
        except subprocess.TimeoutExpired:
            code = 0
    said, after = output.read_text(), newest(cable)
    resumed = not before or f"resumed at step {before} from" in said or "resumed" not in said and after == before
    wrong = {
        f"exit code {code}": code != -signal.SIGKILL,
        f"step {before} was the newest whole one, and the run did not go on from it": not resumed,
        f"step {before} was the newest whole one, and now it is step {after}": after < before,
        f"step {after} has a manifest, and an empty machine gets another one": after != fetched(cable, folder),
    }
    told = ", ".join(sentence for sentence, is_so in wrong.items() if is_so)
    return f"{told}: {said[-3000:]}" if told else ""


def newest(cable: s3.Cable) -> int:
    """Return the newest step that has a manifest in the store, as another program sees it; 0 without one."""
    keys = [key for key in s3.keys(cable.to) if key.endswith("/manifest.json")]
    return max((int(key.split("/")[-2]) for key in keys), default=0)


def fetched(cable: s3.Cable, folder: Path) -> int:
    """Return the step from which an empty machine would go on; its checkpoint is verified."""
    place = folder.with_name("elsewhere") / folder.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    s3.use(cable.to)
    checkpoint.Mirror(ADDRESS, place).restore(lambda num_bytes: None)
    path = checkpoint.latest(place)
    return int(path.name) if path else 0


def to_the_end(store: Store, folder: Path, undisturbed: Path, steps: int) -> str:
    """Let the run end on one more empty machine; compare it with the undisturbed one, bit for bit."""
    shutil.rmtree(folder, ignore_errors=True)
    mirrored = command(folder, steps, "--checkpoint.mirror", ADDRESS)
    code, output = run(mirrored, timeout_s=3600, environment=s3.environment(store().port))
    if code != 0:
        return output[-3000:]
    told = [row["step"] for row in rows(folder, "steps.csv")]
    if told != [row["step"] for row in rows(undisturbed, "steps.csv")]:
        return f"steps.csv has the steps {told}"
    return ", ".join(different(weights(folder), weights(undisturbed)))
