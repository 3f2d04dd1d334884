"""A run of the tests names what it leaves out, what this machine cannot run, and how it was shuffled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TIERS

ROOT = Path(__file__).parents[1]


def run_tests(*options: str, **variables: str) -> str:
    """Run pytest from the root of the repository, as a session of its own; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "LARGEBATCH_TESTS"} | variables
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: nothing was left to run
    return done.stdout


@pytest.mark.parametrize("processes", ["0", "2"])
def test_tiers_that_were_not_asked_for_are_named(processes):
    """cluster has tests among these files, and is left out; evidence has one, and is asked for."""
    files = ["tests/test_mutants.py", "tests/cluster/test_slurm.py"]
    options = ["-n", processes, "-m", "evidence", "--deselect", "tests/test_mutants.py::test_no_break_survives"]
    output = run_tests(*files, *options)
    lines = [line for line in output.splitlines() if line.startswith("left out: ")]
    assert lines == [f"left out: 4 tests of tier cluster ({TIERS['cluster']}): -m cluster runs them"], output


@pytest.mark.parametrize("processes", ["0", "2"])
def test_tests_that_need_a_compiler_are_skipped_without_one_and_the_reason_is_given(processes):
    output = run_tests("tests/test_tiers.py", "-n", processes, "-k", "compiles_something", CXX="no-such-compiler -O2")
    assert "1 skipped" in output and "there is no C++ compiler: no-such-compiler is not found; install g++" in output


@pytest.mark.needs_compiler
def test_one_that_compiles_something():
    command = [*os.environ.get("CXX", "g++").split(), "--version"]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_a_seed_shuffles_files_and_the_tests_in_each():
    files = ("tests/test_waiting.py", "tests/test_mutants.py", "tests/test_bind.py")  # import no torch
    orders = {}
    for seed in ("1", "1 again", "2", ""):
        options = ["--shuffle", seed.removesuffix(" again")] if seed else []
        output = run_tests("--collect-only", *files, *options)
        orders[seed] = [line for line in output.splitlines() if "::" in line]
        assert (f"shuffled: --shuffle {seed[:1]} " in output) == bool(seed), output
    assert orders["1"] == orders["1 again"]
    assert len({tuple(order) for order in orders.values()}) == 3
    assert len({frozenset(order) for order in orders.values()}) == 1
    for order in orders.values():
        changes = sum(one.partition("::")[0] != other.partition("::")[0] for one, other in zip(order, order[1:]))
        assert changes == len(files) - 1, "the tests of a file stay together"
