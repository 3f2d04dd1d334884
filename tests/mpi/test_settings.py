"""Horovod's own variables hold: its timeline shows them; and what contradicts them is said."""

import csv
import json
from pathlib import Path

import pytest
from launch import launch

PROGRAMS = ["-m", "tests.mpi.programs"]


@pytest.mark.parametrize("threshold_mb, fused", [(0, False), (8, True)])
def test_what_waits_together_is_fused_up_to_the_threshold(tmp_path, threshold_mb, fused):
    """All fifty wait: a cycle is far longer than it takes to hand them over."""
    timeline = tmp_path / "timeline.json"
    environment = {
        "HOROVOD_CYCLE_TIME": "200",
        "HOROVOD_FUSION_THRESHOLD": str(threshold_mb * 2**20),
        "HOROVOD_TIMELINE": str(timeline),
    }
    code, output = launch([*PROGRAMS, "reduces_fifty"], ranks=2, environment=environment)
    assert code == 0, output
    events = timeline.read_text()
    assert "gradient 49" in events and ("MEMCPY_IN_FUSION_BUFFER" in events) == fused


def test_autotune_tries_settings(tmp_path):
    """Horovod's log of it has a line for each that it tried; nothing of ours holds the cycle time."""
    log = tmp_path / "autotune.csv"
    environment = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(log), "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2"}
    # cold: Horovod reads the number of steps when it is loaded
    code, output = launch([*PROGRAMS, "autotunes"], ranks=2, environment=environment, cold=True)
    assert code == 0, output
    with open(log, newline="") as file:
        assert len({row["cycle_time_ms"] for row in csv.DictReader(file)}) > 1


def test_a_mistake_is_said_once_and_before_horovod_starts(tmp_path):
    """Starting Horovod would complain of the limit first."""
    options = ["--optim.lrr", "1", "--run.folder", str(tmp_path / "run")]
    environment = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "soon"}
    code, output = launch(["-m", "largebatch.train", *options], ranks=2, environment=environment)
    assert code == 2 and "soon" not in output, output
    assert output.count("largebatch: There is no option optim.lrr; did you mean --optim.lr?\n") == 1, output


CONTRADICTIONS = [
    (
        ["--horovod.stall_limit_s", "5"],
        {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2.5"},
        "--horovod.stall_limit_s means HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=5, and the environment has 2.5: unset one",
    ),
    (
        ["--horovod.stall_limit_s", "64"],
        {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "64 s"},
        "--horovod.stall_limit_s means HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=64, and the environment has 64 s",
    ),
    (["--run.deterministic", "true"], {"HOROVOD_AUTOTUNE": "1"}, "which excludes HOROVOD_AUTOTUNE"),
    ([], {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "soon"}, "is 'soon': expected a number of seconds."),
]


def test_settings_that_contradict_the_environment(tmp_path: Path):
    """Each in a process of its own, forked by one that has imported everything."""
    folder, trials = ["--run.folder", str(tmp_path / "run")], tmp_path / "trials.json"
    trials.write_text(json.dumps([(folder + options, environment) for options, environment, _ in CONTRADICTIONS]))
    code, output = launch([*PROGRAMS, "trials", str(trials)], ranks=1, launcher="python")
    assert code == 0 and "Traceback" not in output, output
    *said, rest = output.split("trial ends with 2\n")
    assert rest == "" and len(said) == len(CONTRADICTIONS), output
    for text, (_, _, sentence) in zip(said, CONTRADICTIONS):
        assert text.count(sentence) == 1, output
