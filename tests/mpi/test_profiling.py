"""A trace of real training steps: whole, with the phases of a step in it, or none."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import ROOT, launch

from largebatch.config import RunConfig, TrainConfig, check, profiled_steps

OPTIONS = ["--model", "vit_ti16", "--img-size", "32", "--run.precision", "fp32", "--log.tensorboard", "false"]
BATCH = ["--data.global_batch_size", "16", "--data.micro_batch_size", "4", "--run.duration", "40 steps"]
PROGRAM = """
import sys
from largebatch import train
from zoo import vit
vit.STRUCTURES["vit_ti16"] = vit.Structure(16, embed_dim=32, depth=1, num_heads=2, timm_name="")
"""


def command(folder: Path, *options: str, planted: str = "") -> list[str]:
    arguments = [*OPTIONS, *BATCH, "--run.folder", str(folder / "my run"), *options]
    return ["-c", f"{PROGRAM}\n{planted}\ntrain.main({arguments!r})"]


def temporary(folder: Path) -> dict[str, str]:
    """The environment with a folder for temporary files of its own."""
    (folder / "tmp").mkdir()
    return {"TMPDIR": str(folder / "tmp")}


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
    code, text = launch(command(tmp_path, *options), ranks=2, environment=environment)
    assert code == 0, text
    (trace,) = traces(tmp_path)
    assert trace.name == "largebatch-my run-rank0-steps-1-2.json" and text.count(f"process: {trace}") == 1, text
    found = spans(trace)
    assert [len(found[name]) for name in ("step 1", "step 2", "synchronize", "optimizer step")] == [1, 1, 2, 2]
    assert len(found["forward"]) == 4 and "step 3" not in found
    phases = ["forward", "autograd::engine::evaluate_function: AddmmBackward0", "synchronize", "optimizer step"]
    for number in (1, 2):
        ((begin, end),) = found[f"step {number}"]
        first = [next(a for a, b in sorted(found[name]) if begin <= a and b <= end) for name in phases]
        assert first == sorted(first)


def test_a_run_that_ends_before_the_window_does(tmp_path):
    environment = temporary(tmp_path)
    options = ["--run.profile_steps", "2:9", "--run.max_steps", "3"]
    code, text = launch(command(tmp_path, *options), ranks=1, launcher="python", environment=environment)
    assert code == 0 and "trace of steps 2 to 3 of this process" in text, text
    (trace,) = traces(tmp_path)
    found = spans(trace)
    assert [name for name in found if name.startswith("step")] == ["step 2", "step 3"]


EXPORTING = """
import time
from torch.profiler import profile
export = profile.export_chrome_trace
def stopping(self, path):
    export(self, path)
    with open(path, "r+") as file:
        file.truncate(1000)
    print("half written", flush=True)
    time.sleep(1000)
profile.export_chrome_trace = stopping
"""


@pytest.mark.parametrize("planted, steps, sign", [("", "2:99", "step 3/40"), (EXPORTING, "2:4", "half written")])
def test_a_run_that_is_killed_leaves_no_broken_trace(tmp_path, planted, steps, sign):
    """Inside the window, and while the file is written."""
    environment = os.environ | temporary(tmp_path)
    options = ["--run.profile_steps", steps, "--log.every", "1 step"]
    output = tmp_path / "output"
    with open(output, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *command(tmp_path, *options, planted=planted)],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            limit = time.monotonic() + 120
            while sign not in output.read_text():
                assert process.poll() is None and time.monotonic() < limit, output.read_text()
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert not list((tmp_path / "tmp").glob("*.json"))


LIMITED = """
import resource
from torch.profiler import profile
export = profile.export_chrome_trace
def limited(self, path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, before[1]))
    export(self, path)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
profile.export_chrome_trace = limited
"""


def test_a_trace_that_cannot_be_written_costs_itself_alone(tmp_path):
    """Files may not grow beyond 20 kB while it is written; the profiler raises nothing."""
    environment = temporary(tmp_path)
    options = ["--run.profile_steps", "1:2", "--run.max_steps", "2"]
    arguments = command(tmp_path, *options, planted=LIMITED)
    code, text = launch(arguments, ranks=1, launcher="python", environment=environment)
    assert code == 0 and "the trace of steps 1 to 1 could not be written" in text, text
    assert traces(tmp_path) == []


@pytest.mark.parametrize("text, steps", [("", None), ("1:2", (1, 1)), ("10:13", (10, 12))])
def test_a_window(text, steps):
    assert profiled_steps(text) == steps


@pytest.mark.parametrize("text", ["0:3", "3:3", "4:2", "5", ":", "1:2:3", "-1:4", "a:b"])
def test_a_window_that_is_none(text):
    with pytest.raises(ValueError, match="^--run.profile_steps is '.*': expected a:b with 1 <= a < b, such as 10:13"):
        check(TrainConfig(run=RunConfig(profile_steps=text)))
