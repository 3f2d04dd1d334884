"""What a run of the tests says of the tests that it leaves out, in one process and in several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("processes", ["0", "2"])
def test_tiers_that_were_not_asked_for_are_named(processes):
    """cluster has tests among these files, and is left out; evidence has one, and is asked for."""
    files = ["tests/test_mutants.py", "tests/cluster/test_slurm.py"]
    options = ["-q", "-n", processes, "-p", "no:cacheprovider", "-m", "evidence", "--deselect"]
    options.append("tests/test_mutants.py::test_no_break_survives")
    environment = {name: value for name, value in os.environ.items() if name != "LARGEBATCH_TESTS"}
    command = [sys.executable, "-m", "pytest", *files, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("left out: ")]
    sentence = "left out: 4 tests of tier cluster (several hosts, networks that fail and Slurm, on this machine): "
    assert lines == [f"{sentence}-m cluster runs them"], done.stdout + done.stderr
