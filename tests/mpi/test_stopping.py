"""Runs that are told to end, under real launchers: after the same step everywhere, to be resumed to the last bit."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from launch import LAUNCHERS, ROOT, launch
from safetensors.torch import load_file

SMALL = ["--model", "vit_ti16", "--img-size", "32", "--run.precision", "fp32", "--run.deterministic", "true"]
BATCH = ["--data.global_batch_size", "16", "--data.micro_batch_size", "4", "--model.drop_path_rate", "0.1"]
RUN = ["--run.duration", "24 steps", "--run.eval_every", "10 steps", "--log.tensorboard", "false"]
KEPT = ["--checkpoint.every", "1000 steps"]  # only what stopping writes
STEPS = 24
PROGRAM = """
import os, signal, sys
from largebatch import engine, preemption, train
from zoo import vit

vit.STRUCTURES["vit_ti16"] = vit.Structure(16, embed_dim=32, depth=1, num_heads=2, timm_name="")
fit = engine.Trainer.fit
def reporting(self, **options):
    reason = fit(self, **options)
    print(f"rank {self.comm.rank} ended at step {self.state.step}.", flush=True)
    return reason
engine.Trainer.fit = reporting
"""
WAIT_S = 120


def command(folder: Path, *options: str, planted: str = "") -> list[str]:
    """What python is given. planted: more lines of the program."""
    arguments = [*SMALL, *BATCH, *RUN, *KEPT, "--run.folder", str(folder), *options]
    return ["-c", f"{PROGRAM}\n{planted}\ntrain.main({arguments!r})"]


@contextmanager
def started(arguments: list[str], launcher: str, output: Path) -> Iterator[subprocess.Popen]:
    """Two ranks under a launcher, their output in a file; all are gone at the end of the block."""
    with open(output, "w") as file:
        process = subprocess.Popen(
            [*LAUNCHERS[launcher](2), sys.executable, *arguments],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(condition: Callable[[], object], output: Path) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, output.read_text()
        time.sleep(0.02)


def rows(folder: Path) -> int:
    steps = folder / "steps.csv"
    return steps.read_text().count("\n") - 1 if steps.exists() else 0


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"{STEPS:08d}" / "model.safetensors")


def ends(text: str) -> list[tuple[str, str]]:
    """(rank, step) as each rank said."""
    return sorted(re.findall(r"rank (\d) ended at step (\d+)\.", text))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    code, text = launch(command(folder), ranks=2)
    assert code == 0 and "stopped after" not in text, text
    return weights(folder)


@pytest.mark.parametrize(
    "launcher, number, rank, job_code",
    [("mpirun", signal.SIGUSR1, 1, 75), ("horovodrun --gloo", signal.SIGTERM, 0, 1)],
)
def test_a_signal_to_one_rank(tmp_path, uninterrupted, launcher, number, rank, job_code):
    """horovodrun has an exit code of its own; each rank's is in what it prints."""
    folder, output = tmp_path / "run", tmp_path / "output"
    with started(command(folder), launcher, output) as process:
        wait_for(lambda: rows(folder) >= 3 or process.poll() is not None, output)
        found = re.search(rf"rank {rank} cpu \(pid (\d+)\)", output.read_text())
        assert found, output.read_text()
        before = rows(folder)
        os.kill(int(found[1]), number)
        code = process.wait(WAIT_S)
    text = output.read_text()
    (step,) = saved(folder)
    assert code == job_code and "Exit code:    75" in text or "Exit code: 75" in text, text
    assert ends(text) == [("0", str(step)), ("1", str(step))] and before <= step < STEPS, text
    sentence = f"stopped after step {step} of {STEPS}, because {number.name} came to 1 of 2 ranks; the same command"
    assert text.count(sentence) == 1 and "HorovodInternalError" not in text, text  # horovodrun has its own traceback
    code, text = launch(command(folder), ranks=2, launcher=launcher)
    assert code == 0 and f"resumed at step {step} from" in text, text
    resumed = weights(folder)
    assert all(torch.equal(resumed[key], tensor) for key, tensor in uninterrupted.items())


KILL = """
step = engine.Trainer.train_step
def signalling(self, batches):
    if (self.comm.rank, self.state.step) == (1, {after}):
        os.kill(os.getpid(), signal.SIGUSR1)
    return step(self, batches)
engine.Trainer.train_step = signalling
"""


def test_one_step_later_and_with_the_evaluation_that_is_due(tmp_path):
    """The signal comes in the third step, and the fourth has an evaluation."""
    options = ["--run.eval_every", "4 steps"]
    code, text = launch(command(tmp_path, *options, planted=KILL.format(after=2)), ranks=2)
    assert code == 75 and ends(text) == [("0", "4"), ("1", "4")], text
    assert saved(tmp_path) == [4] and (tmp_path / "epochs.csv").read_text().count("\n4,") == 1


@pytest.mark.parametrize("after", [4, 3])
def test_a_run_that_is_done_is_not_stopped(tmp_path, after):
    """The signal comes in the last step, or in the one before, after which there is nothing to stop."""
    code, text = launch(command(tmp_path, "--run.max_steps", "5", planted=KILL.format(after=after)), ranks=2)
    assert code == 0 and "stopped after" not in text and saved(tmp_path) == [5], text


def test_before_the_end_of_the_job(tmp_path):
    """With a margin so long that the end is near at once; Slurm's own time is far away, and the option wins."""
    planted = "preemption.MARGIN_S = 100000.0"
    end = time.time() + 50000
    options, environment = ["--run.end_time", str(end)], {"SLURM_JOB_END_TIME": str(int(end + 1000000))}
    code, text = launch(command(tmp_path, *options, planted=planted), ranks=2, environment=environment)
    assert code == 75 and ends(text) == [("0", "2"), ("1", "2")] and saved(tmp_path) == [2], text
    assert re.search(r"because the job ends at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, and two steps and a checkpoint", text)
    far = ["--run.end_time", str(end + 1000000), "--run.max_steps", "4"]
    environment = {"SLURM_JOB_END_TIME": str(int(end))}
    code, text = launch(command(tmp_path, *far, planted=planted), ranks=1, launcher="python", environment=environment)
    assert code == 0 and "resumed at step 2" in text and saved(tmp_path) == [2, 4], text
    code, text = launch(command(tmp_path, planted=planted), ranks=1, launcher="python", environment=environment)
    assert code == 75 and saved(tmp_path) == [4, 6], text


def test_a_job_whose_end_has_passed(tmp_path):
    code, text = launch(command(tmp_path, "--run.end_time", "2020-01-01T12:00"), ranks=2)
    assert code == 2 and text.count("--run.end_time is 2020-01-01T12:00, which has passed: expected a time") == 1, text


WAITING = """
import sys, threading, time
from largebatch import preemption
from largebatch.comm import session

preemption.ONCE_S = 0.0
with preemption.Signals() as signals, session() as comm:
    def tell():
        while signals.first is None:
            time.sleep(0.01)
        print("rank 0 has heard.", flush=True)
    if comm.rank == 0:
        threading.Thread(target=tell, daemon=True).start()
        print(f"rank 0 has pid {__import__('os').getpid()}.", flush=True)
        comm.barrier(name="never")
    time.sleep(1000)
"""


def test_a_second_signal_ends_a_rank_that_waits_for_ever(tmp_path):
    output = tmp_path / "output"
    with started(["-c", WAITING], "mpirun", output) as process:
        wait_for(lambda: "has pid" in output.read_text(), output)
        pid = int(re.search(r"rank 0 has pid (\d+)\.", output.read_text())[1])
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: "has heard" in output.read_text(), output)
        assert process.poll() is None
        os.kill(pid, signal.SIGTERM)
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM, output.read_text()
