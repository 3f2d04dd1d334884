"""A trace of real training steps is complete, with the phases of a step in it, or it is not written."""

import json
import os
import signal
from pathlib import Path

import pytest
from launch import launch, started, wait_for
from runs import SMALL

from largebatch.config import RunConfig, TrainConfig, check, profiled_steps

BATCH = ["--data.global_batch_size", "16", "--data.micro_batch_size", "4", "--run.duration", "40 steps"]


def training(folder: Path, *options: str, fault: str = "") -> list[str]:
    """What python is given. fault: one of programs.py."""
    program = ["tests.mpi.programs", fault] if fault else ["largebatch.train"]
    return ["-m", *program, *SMALL, *BATCH, "--run.folder", str(folder / "my run"), *options]


def temporary(folder: Path) -> dict[str, str]:
    """The environment with a folder for temporary files of its own, in which no C++ is compiled."""
    (folder / "tmp").mkdir()
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return {"TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": cache}


def traces(folder: Path) -> list[Path]:
    return [path for path in (folder / "tmp").iterdir() if "largebatch" in path.name]


def spans(trace: Path) -> dict[str, list[tuple[float, float]]]:
    """Beginning and end of each event of a duration, by name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") != "gpu_user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_the_phases_of_two_steps(tmp_path):
    """Steps 1 and 2 of two ranks, each of two passes; the third is not in it."""
    environment = temporary(tmp_path)
    options = ["--run.profile_steps", "1:3", "--run.max_steps", "3"]
    code, text = launch(training(tmp_path, *options), ranks=2, environment=environment)
    assert code == 0, text
    (trace,) = traces(tmp_path)
    assert trace.name == "largebatch-my run-rank0-steps-1-2.json" and text.count(f"process: {trace}") == 1, text
    found = spans(trace)
    assert [len(found[name]) for name in ("step", "forward", "synchronize", "optimizer step")] == [2, 4, 2, 2]
    phases = ["forward", "autograd::engine::evaluate_function: AddmmBackward0", "synchronize", "optimizer step"]
    for begin, end in found["step"]:
        first = [next(a for a, b in sorted(found[name]) if begin <= a and b <= end) for name in phases]
        assert first == sorted(first)


def test_a_run_that_ends_before_the_window_does(tmp_path):
    environment = temporary(tmp_path)
    options = ["--run.profile_steps", "2:9", "--run.max_steps", "3"]
    code, text = launch(training(tmp_path, *options), ranks=1, launcher="python", environment=environment)
    assert code == 0 and "trace of steps 2-3 of this process" in text, text
    (trace,) = traces(tmp_path)
    assert trace.name.endswith("-steps-2-3.json") and len(spans(trace)["step"]) == 2


@pytest.mark.cluster
@pytest.mark.parametrize(
    "fault, steps, sign", [("", "2:99", "step 3/40"), ("stops_half_through_its_trace", "2:4", "half written")]
)
def test_a_run_that_is_killed_leaves_no_broken_trace(tmp_path, fault, steps, sign):
    """Inside the window, and while the file is written."""
    environment, output = temporary(tmp_path), tmp_path / "output"
    options = ["--run.profile_steps", steps, "--log.every", "1 step"]
    command = ["python", *training(tmp_path, *options, fault=fault)]
    with started(command, output, environment=environment) as process:
        wait_for(lambda: sign in output.read_text() or process.poll() is not None, output)
        assert process.poll() is None, output.read_text()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not list((tmp_path / "tmp").glob("*.json"))


def test_a_trace_that_cannot_be_written_costs_itself_alone(tmp_path):
    environment = temporary(tmp_path)
    options = ["--run.profile_steps", "1:2", "--run.max_steps", "2"]
    arguments = training(tmp_path, *options, fault="may_not_write_its_trace")
    code, text = launch(arguments, ranks=1, launcher="python", environment=environment)
    assert code == 0 and "the trace of steps 1-1 of this process could not be written" in text, text
    assert traces(tmp_path) == []


@pytest.mark.parametrize("text, steps", [("", None), ("1:2", (1, 1)), ("10:13", (10, 12))])
def test_a_window(text, steps):
    assert profiled_steps(text) == steps


@pytest.mark.parametrize("text", ["0:3", "3:3", "4:2", "5", ":", "1:2:3", "-1:4", "a:b"])
def test_a_window_that_is_none(text):
    with pytest.raises(ValueError, match="^--run.profile_steps is '.*': expected a:b with 1 <= a < b, such as 10:13"):
        check(TrainConfig(run=RunConfig(profile_steps=text)))
