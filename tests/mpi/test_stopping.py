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

pytestmark = pytest.mark.cluster  # a tier of its own: such runs mostly wait
BATCH = ["--data.global_batch_size", "16", "--data.micro_batch_size", "4", "--model.drop_path_rate", "0.1"]
RUN = ["--run.duration", "24 steps", "--run.eval_every", "10 steps"]
KEPT = ["--checkpoint.every", "1000 steps", "--checkpoint.best", "none"]  # only what stopping writes
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
    [
        ("mpirun", signal.SIGUSR1, 1, 75),
        ("horovodrun --gloo", signal.SIGTERM, 0, 1),
        ("torchrun", signal.SIGUSR1, 0, 1),
    ],
)
def test_a_signal_to_one_rank(tmp_path, uninterrupted, launcher, number, rank, job_code):
    """horovodrun and torchrun have an exit code of their own; each rank's is in what they print."""
    folder, output = tmp_path / "run", tmp_path / "output"
    command = training(folder, faults="tells_its_end,is_slow")
    with started([*LAUNCHERS[launcher](2), "python", *command], output) as process:
        wait_for(lambda: len(rows(folder, "steps.csv")) >= 3 or process.poll() is not None, output)
        found = re.search(rf"rank {rank} cpu \(pid (\d+)\)", output.read_text())
        assert found, output.read_text()
        before = len(rows(folder, "steps.csv"))
        os.kill(int(found[1]), number)
        code = process.wait(WAIT_S)
    text = output.read_text()
    (step,) = steps_saved(folder)
    assert code == job_code and re.search(r"Exit code: +75|exitcode *: 75", text), text
    assert ends(text) == [("0", str(step)), ("1", str(step))] and before <= step < STEPS, text
    sentence = f"stopped after step {step} of {STEPS}, because {number.name} reached 1 of 2 ranks; the same command"
    assert text.count(sentence) == 1 and "HorovodInternalError" not in text, text  # horovodrun has its own traceback
    code, text = launch(training(folder), ranks=2, launcher=launcher)
    assert code == 0 and f"resumed at step {step} from" in text, text
    assert steps_saved(folder)[-1] == STEPS and different(weights(folder), uninterrupted) == []


@pytest.mark.parametrize("place, step", [("signals_in_pass=6", 5), ("signals_in_evaluation=10", 10)])
def test_in_the_middle_of_a_step_and_of_an_evaluation(tmp_path, uninterrupted, place, step):
    """A step that is not complete was never taken; an evaluation that is not complete is made by the next start."""
    options = ["--data.eval_batch_size", "16"]
    code, text = launch(training(tmp_path, *options, faults=f"tells_its_end,{place}"), ranks=2)
    assert code == 75 and ends(text) == [("0", str(step)), ("1", str(step))], text
    assert f"stopped after step {step} of {STEPS}, because SIGUSR1 reached 1 of 2 ranks" in text, text
    assert steps_saved(tmp_path) == [step] and rows(tmp_path, "epochs.csv") == []
    code, text = launch(training(tmp_path, *options), ranks=2)
    assert code == 0 and different(weights(tmp_path), uninterrupted) == [], text
    assert [row["step"] for row in rows(tmp_path, "epochs.csv")] == ["10", "20", "24"]
    assert all(float(row["train_loss"]) > 0 for row in rows(tmp_path, "epochs.csv"))


def test_in_the_last_evaluation(tmp_path):
    """The next start makes it, the one after that has nothing left to do."""
    options = ["--data.eval_batch_size", "16", "--run.duration", "3 steps"]
    code, text = launch(training(tmp_path, *options, faults="signals_in_evaluation=3"), ranks=2)
    assert code == 75 and "stopped after step 3 of 3" in text and rows(tmp_path, "epochs.csv") == [], text
    for said in ("resumed at step 3", "This run is complete"):
        code, text = launch(training(tmp_path, *options), ranks=1, launcher="python")
        assert code == 0 and said in text and [row["step"] for row in rows(tmp_path, "epochs.csv")] == ["3"], text


def test_in_indexing(tmp_path):
    """There is nothing to lose, and nothing is trained first."""
    environment = {"XDG_CACHE_HOME": str(tmp_path)}  # without an index
    folder = tmp_path / "run"
    code, text = launch(training(folder, faults="signals_in_indexing"), ranks=2, environment=environment)
    assert code == 75 and not (folder / "steps.csv").exists(), text
    assert "Traceback" not in text, text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_imports_are_done(tmp_path, number):
    """A shell that runs the tests in the background has them ignore SIGINT, so env listens to it again."""
    output = tmp_path / "output"
    command = ["env", "--default-signal=INT", "python", "-m", "largebatch.train", "--run.folder", str(tmp_path / "run")]
    with started(command, output) as process:
        threads, maps = Path(f"/proc/{process.pid}/task"), Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: len(list(threads.iterdir())) == 2, output)  # the second one hears the signals
        assert "libtorch" not in maps.read_text()
        process.send_signal(number)
        assert process.wait(WAIT_S) == 75, output.read_text()
    assert f"stopped before the first step was done, because {number.name} came" in output.read_text()


def test_a_run_that_is_done_is_not_stopped(tmp_path):
    """The signal comes after the last step, when there is nothing to stop."""
    faults = "tells_its_end,signals_at_the_end"
    code, text = launch(training(tmp_path, "--run.max_steps", "5", faults=faults), ranks=2)
    assert code == 0 and "stopped after" not in text and steps_saved(tmp_path) == [5], text


def test_ranks_whose_horovodrun_is_killed(tmp_path):
    """It has become a shell that waits for mpirun, and mpirun does not notice."""
    folder, output = tmp_path / "run", tmp_path / "output"
    command = ["horovodrun", "-np", "2", "python", *training(folder, faults="tells_its_end,is_slow")]
    with started(command, output) as process:
        wait_for(lambda: len(rows(folder, "steps.csv")) >= 2 or process.poll() is not None, output)
        pids = [int(pid) for pid in re.findall(r"\(pid (\d+)\)", output.read_text())]
        process.terminate()
        process.wait(WAIT_S)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), output)
    text = output.read_text()
    (step,) = steps_saved(folder)
    assert len(pids) == 2 and ends(text) == [("0", str(step)), ("1", str(step))] and step < STEPS, text
    assert re.search("because the launcher of [12] of 2 ranks is gone; the same command resumes", text), text


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo", "torchrun"])
def test_a_rank_that_is_stopped_ends_without_its_launcher(tmp_path, launcher):
    """It obeys nothing but SIGKILL. Under torchrun the other rank first waits for it, as long as it may."""
    folder, output = tmp_path / "run", tmp_path / "output"
    limits = ["--horovod.stall_limit_s", "4", "--horovod.start_limit_s", "100"]
    command = training(folder, *limits, faults="is_slow")
    with started([*LAUNCHERS[launcher](2), "python", *command], output) as process:
        wait_for(lambda: len(rows(folder, "steps.csv")) >= 2 or process.poll() is not None, output)
        pids = [int(pid) for pid in re.findall(r"rank \d cpu \(pid (\d+)\)", output.read_text())]
        assert len(pids) == 2, output.read_text()
        try:
            os.kill(pids[1], signal.SIGSTOP)
            process.kill()
            process.wait(WAIT_S)
            wait_for(lambda: not any(map(still_runs, pids)), output)
        finally:
            for pid in filter(still_runs, pids):
                os.kill(pid, signal.SIGKILL)


def still_runs(pid: int) -> bool:
    """A process that nobody has waited for has ended, too."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_before_the_end_of_the_job(tmp_path):
    """With a margin so long that the end is near at once; Slurm's own time is far away, and the option wins."""
    faults = "tells_its_end,has_a_long_margin,is_slow"
    end = time.time() + 50000
    options, environment = ["--run.end_time", str(end)], {"SLURM_JOB_END_TIME": str(int(end + 1000000))}
    code, text = launch(training(tmp_path, *options, faults=faults), ranks=2, environment=environment)
    (step,) = steps_saved(tmp_path)
    assert code == 75 and ends(text) == [("0", str(step)), ("1", str(step))] and 1 <= step < STEPS, text
    assert re.search(r"because the job ends at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, and a pass and a checkpoint", text)
    assert "end_time: null" in (tmp_path / "config.yaml").read_text()  # --config gives it to jobs with other ends
    far = ["--run.end_time", str(end + 1000000), "--run.max_steps", str(step + 1)]
    environment = {"SLURM_JOB_END_TIME": str(int(end))}
    code, text = launch(training(tmp_path, *far, faults=faults), ranks=1, launcher="python", environment=environment)
    assert code == 0 and f"resumed at step {step}" in text and steps_saved(tmp_path) == [step, step + 1], text
    code, text = launch(training(tmp_path, faults=faults), ranks=1, launcher="python", environment=environment)
    assert code == 75 and step + 1 < steps_saved(tmp_path)[-1] < STEPS, text


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
        os.kill(pid, signal.SIGINT)
        assert process.wait(WAIT_S) == 128 + signal.SIGINT, output.read_text()
