"""find_batch under launchers: the run's own bits at its own batch, the same images at others, nothing else changed."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from launch import launch
from runs import SMALL, rows, steps_saved

from largebatch.files import run_lock

BATCH = "--img-size 32 --data.global_batch_size 16 --data.micro_batch_size 4".split()
BATCH += "--schedule.name constant --schedule.warmup 0steps".split()
BATCH += "--log.every 1steps --run.duration 120steps --run.eval_every never --checkpoint.every 10steps".split()
DRAWN = "--model.drop_path_rate 0.1 --model.proj_drop_rate 0.1 --optim.ema_half_life 5steps".split()
LENGTH = 1600  # images: 100 steps of the run, 50 of twice its batch
SEARCH = ["--images", str(LENGTH)]
SGD = "--optim.name sgd --optim.preset null".split()


def train(
    folder: Path, *options: str, steps: int, ranks: int = 1, launcher: str = "python", program: str = "largebatch.train"
) -> Path:
    given = [*SMALL, *BATCH, "--run.folder", str(folder), "--run.max_steps", str(steps), *options]
    code, output = launch(["-m", *program.split(), *given], ranks=ranks, launcher=launcher)
    assert code == 0, output
    return folder


def find(place: Path, *options: str, ranks: int = 1, launcher: str = "python") -> tuple[int, str]:
    return launch(["-m", "largebatch.find_batch", str(place), *options], ranks=ranks, launcher=launcher)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def branches(folder: Path) -> dict[int, list[dict[str, float]]]:
    found: dict[int, list[dict[str, float]]] = {}
    for row in rows(folder, "find_batch.csv"):
        found.setdefault(int(row["batch"]), []).append({name: float(cell) for name, cell in row.items()})
    return found


def average(losses: Sequence[float], batch: int) -> float:
    """Each loss weighs 0.9 to the power of the images after it, in steps of the largest batch."""
    weights = [0.9 ** ((len(losses) - number) * batch / 32) for number in range(1, len(losses) + 1)]
    return sum(weight * loss for weight, loss in zip(weights, losses)) / sum(weights)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """At half of its learning rate, 0.002, since step 10."""
    program = "tests.mpi.programs halves_after_step=10"
    return train(tmp_path_factory.mktemp("find_batch") / "run", *DRAWN, steps=20, program=program)


@pytest.mark.parametrize("ranks, launcher", [(1, "python"), (2, "mpirun"), (3, "torchrun")])
def test_the_base_branch_is_the_run_that_goes_on_and_nothing_else_changes(run, tmp_path, ranks, launcher):
    folder = shutil.copytree(run, tmp_path / "run", symlinks=True)
    before = digests(folder)
    code, output = find(folder, *SEARCH, ranks=ranks, launcher=launcher)
    assert code == 0 and output.count("the loss departs between 16 and 32: it ends 0.0") == 1, output
    after = digests(folder)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"find_batch.csv", "find_batch.png"}
    found = branches(folder)
    assert {batch: len(steps) for batch, steps in found.items()} == {16: 100, 32: 50}
    for batch, steps in found.items():
        assert [row["images"] for row in steps] == [*range(batch, LENGTH + 1, batch)]
        assert all(row["lr"] == pytest.approx(0.001 * (batch / 16) ** 0.5, rel=1e-8) for row in steps)
        mean = average([row["loss"] for row in steps], batch)
        assert steps[-1]["smoothed"] == pytest.approx(mean, rel=1e-8)  # nine digits are written
        assert f"global batch {batch}: {len(steps)} steps at a learning rate of" in output
    # The run itself, from the same checkpoint and on the same ranks.
    whole = train(shutil.copytree(run, tmp_path / "whole"), *DRAWN, steps=120, ranks=ranks, launcher=launcher)
    assert [float(row["loss"]) for row in rows(whole, "steps.csv")][20:] == [row["loss"] for row in found[16]]
    if ranks == 2:
        code, output = find(folder, *SEARCH, ranks=ranks, launcher=launcher)
        assert code == 0 and digests(folder) == after, output


def test_an_earlier_checkpoint_and_a_run_that_is_at_its_end(run, tmp_path):
    """There is a newer checkpoint. The branches go on after the end of the run."""
    folder = train(shutil.copytree(run, tmp_path / "run"), *DRAWN, steps=120)
    assert steps_saved(folder) == [110, 120]
    code, output = find(folder / "checkpoints" / "00000110", *SEARCH)
    assert code == 0 and f"each over {LENGTH} images, {LENGTH - 160} of them after the end of the run" in output, output
    ours = [row["loss"] for row in branches(folder)[16]]
    assert len(ours) == 100 and ours[:10] == [float(row["loss"]) for row in rows(folder, "steps.csv")][110:]
    decayed = train(tmp_path / "decayed", "--schedule.name", "linear", "--run.duration", "2steps", steps=2)
    code, output = find(decayed, *SEARCH)
    assert code == 2 and "The learning rate after step 2 is 0, so no branch would learn: give" in output


def test_where_the_loss_is_known_to_depart(tmp_path):
    """Plain SGD at rates far too low: a step of k times the batch goes as far as k steps. Far too high: it is lost."""
    low = train(tmp_path / "low", *SGD, "--optim.lr", "1e-4", steps=10)
    code, output = find(low, "--images", "3200")
    assert code == 0 and "the loss does not depart up to 64: --images 6400 tries 128, too;" in output, output
    assert [(batch, len(steps)) for batch, steps in branches(low).items()] == [(16, 200), (32, 100), (64, 50)]
    high = train(tmp_path / "high", *SGD, "--optim.lr", "1e30", steps=1)
    code, output = find(high, *SEARCH)
    sentence = "At the run's own batch of 16 the loss is not finite, so nothing can be compared: give an "
    assert code == 2 and output.count(sentence) == 1 and not (high / "find_batch.csv").exists(), output


@pytest.mark.cluster
def test_a_signal_in_the_second_branch_ends_all_ranks_together(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run", symlinks=True)
    before = digests(folder)
    command = ["-m", "tests.mpi.programs", "signals_at_batch=32", "find_batch", str(folder), *SEARCH]
    code, output = launch(command, ranks=2, cold=True)
    sentence = "the search stopped, because SIGUSR1 reached 1 of 2 ranks; the same command begins it anew (exit code"
    assert code == 75 and output.count(sentence) == 1 and "global batch 16: 100 steps" in output, output
    assert digests(folder) == before


def test_what_training_would_refuse_is_refused(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run", symlinks=True)
    before = digests(folder)
    for options, sentence in (
        (["--optim.lr", "3"], "was made with --optim.lr 0.002, now 3.0: give the options it was made with"),
        (["--images", "100"], "--images is 100: expected at least 1600, which are 50 steps of 32, twice the run's"),
    ):
        code, output = find(folder, *options, ranks=2, launcher="mpirun")
        assert code == 2 and output.count(sentence) == 1 and "Traceback" not in output, output
    with run_lock.hold(folder):
        code, output = find(folder, *SEARCH)
    assert code == 2 and f"{folder} is in use by " in output and "Traceback" not in output, output
    assert digests(folder) == before
