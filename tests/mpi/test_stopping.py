"""Runs that are told to end stop after the same step on all ranks, and resume to the last bit."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from launch import LAUNCHERS, WAIT_S, launch, started, wait_for
from runs import SMALL, different, rows, steps_saved, weights

BATCH = ["--data.global_batch_size", "16", "--data.micro_batch_size", "4", "--model.drop_path_rate", "0.1"]
RUN = ["--run.duration", "24 steps", "--run.eval_every", "10 steps"]
KEPT = ["--checkpoint.every", "1000 steps"]  # only what stopping writes
STEPS = 24


def training(folder: Path, *options: str, faults: str = "tells_its_end") -> list[str]:
    """What python is given. faults: those of programs.py."""
    return ["-m", "tests.mpi.programs", faults, *SMALL, *BATCH, *RUN, *KEPT, "--run.folder", str(folder), *options]


def ends(text: str) -> list[tuple[str, str]]:
    """(rank, step) as each rank said."""
    return sorted(re.findall(r"rank (\d) ended at step (\d+)\.", text))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    code, text = launch(training(folder), ranks=2)
    assert code == 0 and "stopped after" not in text, text
    return weights(folder)


@pytest.mark.parametrize(
    "launcher, number, rank, job_code",
    [("mpirun", signal.SIGUSR1, 1, 75), ("horovodrun --gloo", signal.SIGTERM, 0, 1)],
)
def test_a_signal_to_one_rank(tmp_path, uninterrupted, launcher, number, rank, job_code):
    """horovodrun has an exit code of its own; each rank's is in what it prints."""
    folder, output = tmp_path / "run", tmp_path / "output"
    with started([*LAUNCHERS[launcher](2), "python", *training(folder)], output) as process:
        wait_for(lambda: len(rows(folder, "steps.csv")) >= 3 or process.poll() is not None, output)
        found = re.search(rf"rank {rank} cpu \(pid (\d+)\)", output.read_text())
        assert found, output.read_text()
        before = len(rows(folder, "steps.csv"))
        os.kill(int(found[1]), number)
        code = process.wait(WAIT_S)
    text = output.read_text()
    (step,) = steps_saved(folder)
    assert code == job_code and "Exit code:    75" in text or "Exit code: 75" in text, text
    assert ends(text) == [("0", str(step)), ("1", str(step))] and before <= step < STEPS, text
    sentence = f"stopped after step {step} of {STEPS}, because {number.name} reached 1 of 2 ranks; the same command"
    assert text.count(sentence) == 1 and "HorovodInternalError" not in text, text  # horovodrun has its own traceback
    code, text = launch(training(folder), ranks=2, launcher=launcher)
    assert code == 0 and f"resumed at step {step} from" in text, text
    assert steps_saved(folder)[-1] == STEPS and different(weights(folder), uninterrupted) == []


def test_one_step_later_and_with_the_evaluation_that_is_due(tmp_path):
    """The signal comes in the third step, and the fourth has an evaluation."""
    options = ["--run.eval_every", "4 steps"]
    code, text = launch(training(tmp_path, *options, faults="tells_its_end,signals_in_step=2"), ranks=2, cold=True)
    assert code == 75 and ends(text) == [("0", "4"), ("1", "4")], text
    assert steps_saved(tmp_path) == [4] and (tmp_path / "epochs.csv").read_text().count("\n4,") == 1


@pytest.mark.parametrize("after", [4, 3])
def test_a_run_that_is_done_is_not_stopped(tmp_path, after):
    """The signal comes in the last step, or in the one before, after which there is nothing to stop."""
    faults = f"tells_its_end,signals_in_step={after}"
    code, text = launch(training(tmp_path, "--run.max_steps", "5", faults=faults), ranks=2)
    assert code == 0 and "stopped after" not in text and steps_saved(tmp_path) == [5], text


def test_before_the_end_of_the_job(tmp_path):
    """With a margin so long that the end is near at once; Slurm's own time is far away, and the option wins."""
    faults = "tells_its_end,has_a_long_margin"
    end = time.time() + 50000
    options, environment = ["--run.end_time", str(end)], {"SLURM_JOB_END_TIME": str(int(end + 1000000))}
    code, text = launch(training(tmp_path, *options, faults=faults), ranks=2, environment=environment)
    assert code == 75 and ends(text) == [("0", "2"), ("1", "2")] and steps_saved(tmp_path) == [2], text
    assert re.search(r"because the job ends at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, and two steps and a checkpoint", text)
    far = ["--run.end_time", str(end + 1000000), "--run.max_steps", "4"]
    environment = {"SLURM_JOB_END_TIME": str(int(end))}
    code, text = launch(training(tmp_path, *far, faults=faults), ranks=1, launcher="python", environment=environment)
    assert code == 0 and "resumed at step 2" in text and steps_saved(tmp_path) == [2, 4], text
    code, text = launch(training(tmp_path, faults=faults), ranks=1, launcher="python", environment=environment)
    assert code == 75 and steps_saved(tmp_path) == [4, 6], text


def test_a_job_whose_end_has_passed(tmp_path):
    code, text = launch(training(tmp_path, "--run.end_time", "2020-01-01T12:00"), ranks=2)
    assert code == 2 and text.count("--run.end_time is 2020-01-01T12:00, which has passed: expected a time") == 1, text


def test_a_second_signal_ends_a_rank_that_waits_for_ever(tmp_path):
    output = tmp_path / "output"
    with started(["mpirun", "-np", "2", "python", "-m", "tests.mpi.programs", "waits_for_ever"], output) as process:
        wait_for(lambda: "has pid" in output.read_text(), output)
        pid = int(re.search(r"rank 0 has pid (\d+)\.", output.read_text())[1])
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: "has heard" in output.read_text(), output)
        assert process.poll() is None
        os.kill(pid, signal.SIGTERM)
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM, output.read_text()
