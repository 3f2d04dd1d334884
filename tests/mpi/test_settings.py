"""Horovod's own settings, from our options, as its timeline shows them."""

import csv
from pathlib import Path

import pytest
from launch import launch

PROGRAM = """
import sys

import horovod.torch as hvd
import torch

from largebatch.comm import session
from largebatch.tuning import HorovodConfig

with session(horovod=HorovodConfig(fusion_threshold_mb=int(sys.argv[1]), cycle_time_ms=200.0, timeline=sys.argv[2])):
    handles = [hvd.allreduce_async(torch.ones(1000), name=f"gradient {k}", op=hvd.Sum) for k in range(50)]
    assert all(torch.equal(hvd.synchronize(handle), torch.full((1000,), 2.0)) for handle in handles)
"""


@pytest.mark.parametrize("threshold_mb, fused", [(0, False), (8, True)])
def test_what_waits_together_is_fused_up_to_the_threshold(tmp_path, threshold_mb, fused):
    """All fifty wait: a cycle is far longer than it takes to hand them over."""
    timeline = tmp_path / "timeline.json"
    environment = {"HOROVOD_CYCLE_TIME": "200"}  # the option says the same
    code, output = launch(["-c", PROGRAM, str(threshold_mb), str(timeline)], ranks=2, environment=environment)
    assert code == 0, output
    events = timeline.read_text()
    assert "gradient 49" in events and ("MEMCPY_IN_FUSION_BUFFER" in events) == fused


AUTOTUNED = """
import horovod.torch as hvd
import torch

from largebatch.comm import session
from largebatch.tuning import HorovodConfig

with session(horovod=HorovodConfig(autotune=True)):
    for _ in range(100):
        assert torch.equal(hvd.allreduce(torch.ones(1000), name="gradient", op=hvd.Sum), torch.full((1000,), 2.0))
"""


def test_autotune_tries_settings(tmp_path):
    """Horovod's log of it has a line for each that it tried; nothing of ours holds the cycle time."""
    log = tmp_path / "autotune.csv"
    environment = {"HOROVOD_AUTOTUNE_LOG": str(log), "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2"}
    code, output = launch(["-c", AUTOTUNED], ranks=2, environment=environment)
    assert code == 0, output
    with open(log, newline="") as file:
        assert len({row["cycle_time_ms"] for row in csv.DictReader(file)}) > 1


CONTRADICTIONS = [
    (
        ["--horovod.cycle_time_ms", "5"],
        {"HOROVOD_CYCLE_TIME": "2.5"},
        "--horovod.cycle_time_ms means HOROVOD_CYCLE_TIME=5.0, and the environment has 2.5: unset one of them.",
    ),
    (
        ["--horovod.fusion_threshold_mb", "64"],
        {"HOROVOD_FUSION_THRESHOLD": "64 MB"},
        "--horovod.fusion_threshold_mb means HOROVOD_FUSION_THRESHOLD=67108864, and the environment has 64 MB",
    ),
    (["--run.deterministic", "true"], {"HOROVOD_AUTOTUNE": "1"}, "cannot be kept with HOROVOD_AUTOTUNE"),
    (["--horovod.timeline", "/nowhere/timeline.json"], {}, "there is no folder /nowhere, make it first."),
    ([], {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "soon"}, "is 'soon': expected a number of seconds."),
]
TRIALS = """
import os, sys
from largebatch import train
for folder, options, environment in {trials!r}:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os.environ.update(environment)
        train.main(["--run.folder", folder, *options])
        sys.exit("it trains")
    print("trial ends with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_settings_that_contradict_the_environment(tmp_path: Path):
    """Each in a process of its own, forked by one that has imported everything."""
    trials = [(str(tmp_path), options, environment) for options, environment, _ in CONTRADICTIONS]
    code, output = launch(["-c", TRIALS.format(trials=trials)], ranks=1, launcher="python")
    assert code == 0 and "Traceback" not in output, output
    *said, rest = output.split("trial ends with 1\n")
    assert rest == "" and len(said) == len(CONTRADICTIONS), output
    for text, (_, _, sentence) in zip(said, CONTRADICTIONS):
        assert text.count(sentence) == 1, output
