"""The campaigns: each a promise of the README, tried many times. `faults` and `programs` have the trials."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

from launch import ROOT, launch

from tests.reliability.campaign import Campaign, Size, Trial
from tests.reliability.faults import STOPS, chain, matrix
from tests.reliability.machines import losing

PROGRAMS = "tests.reliability.programs"
LAUNCHERS = ("mpirun", "horovodrun", "horovodrun --gloo", "torchrun")
CONTROLLERS = ("mpirun", "horovodrun --gloo", "torchrun")  # horovodrun starts mpirun
Trials = Callable[[Size], Iterator[Trial]]


def tests(*options: str) -> Trials:
    """Return the one trial that consists of tests of the suite, which has them at full size; options of pytest."""

    def run() -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stdout[-3000:] + done.stderr[-1000:]

    return lambda size: iter([Trial(" ".join(options), run)])


def program(name: str, *, ranks: int, gate: int, full: int, check: Callable[[dict], str] = lambda report: "") -> Trials:
    """Return the one trial of a program of `programs.py`, which is given a number of rounds and prints a report."""

    def trials(size: Size) -> Iterator[Trial]:
        rounds = size.choose(gate, full)

        def run() -> str:
            shutil.rmtree(size.folder / name, ignore_errors=True)  # of a trial that was broken off
            arguments = ["-m", PROGRAMS, name, str(rounds), str(size.folder / name)]
            code, output = launch(arguments, ranks=ranks, timeout_s=36000, environment={"OMP_NUM_THREADS": "1"})
            reports = re.findall(r"report: (\{.*\})", output)
            if code != 0 or len(reports) != 1:
                return f"exit code {code}: {output[-3000:]}"
            (size.folder / f"{name}.json").write_text(reports[0])
            return check(json.loads(reports[0]))

        yield Trial(f"{name}, {rounds} rounds on {ranks} ranks", run)

    return trials


def is_flat(report: dict) -> str:
    """Say what grew in a long run.

    Memory may grow by 1 MB in 1,000 steps, whose rows are drawn, and by 40 MB, until the C library has found its size.
    """
    limits = {"threads": 0, "descriptors": 0, "files": 0, "megabytes": 40 + report["steps"] / 1000}
    grown = [name for name, limit in limits.items() if report[name][1] > report[name][0] + limit]
    return f"{', '.join(grown)} grew: {report}" if grown else ""


def is_cheap(report: dict) -> str:
    """Say if the guards take too much of a run."""
    limits = {"of_an_epoch": 0.01, "of_500_steps": 0.005, "of_a_step": 0.001}
    return "" if all(report[name] <= limit for name, limit in limits.items()) else f"too slow: {report}"


def names_slow_rank(report: dict) -> str:
    """Say if a slow rank was not named within 20 steps, with its phase, or another one was."""
    late = [one for one in report["rounds"] if one[-1] > 20]
    right = report["told"] == report["right"] == len(report["rounds"]) and not late
    return "" if right else f"late {late}, wrong {report['wrong']}: {report}"


CAMPAIGNS = (
    Campaign(
        "R1",
        "a rank that fails or is killed, in any phase, ends the job, and the output says why",
        lambda size: matrix(size, ("raise", "SIGKILL", "SIGTERM"), gate=3, who="0123", launchers=LAUNCHERS),
    ),
    Campaign(
        "R2",
        "a run that is killed again and again ends with the bits of the undisturbed one",
        lambda size: chain(size, ("SIGKILL",), links=size.choose(3, 50), seed=2, world=lambda number: 2),
    ),
    Campaign(
        "R3",
        "a run that goes on with 1, 2, 3, 4 ranks in turn has the losses of the undisturbed one",
        lambda size: chain(size, (), links=size.choose(2, 12), seed=3, world=lambda n: (1, 3, 4, 2, 4, 3, 1, 2)[n % 8]),
    ),
    Campaign("R4", "damaged checkpoints are never loaded", tests("tests/test_checkpoint.py")),
    Campaign(
        "R5",
        "a signal in any phase stops the run with a checkpoint and exit code 75, and nothing is lost",
        lambda size: chain(size, STOPS, links=size.choose(3, 100), seed=5, world=lambda number: 2),
    ),
    Campaign(
        "R6",
        "a rank that hangs in any phase ends the job, with the stacks of those that wait",
        lambda size: matrix(size, ("hang", "SIGSTOP"), gate=2, who="0123", launchers=CONTROLLERS),
    ),
    Campaign(
        "R7",
        "ranks that all hang in any phase end the job, with their stacks",
        lambda size: matrix(size, ("hang",), gate=1, who=["all"], launchers=CONTROLLERS),
    ),
    Campaign(
        "R8",
        "each flipped bit is found, and no check of sound ranks raises an alarm",
        program("compare", ranks=3, gate=1000, full=100_000),
    ),
    Campaign("R9", "a rank that computes a wrong gradient is named", tests("tests/mpi/ranks/test_recompute.py")),
    Campaign(
        "R10",
        "checkpoint and check of each epoch cost at most 1 % of it, recomputation 0.5 % of 500 steps, and the "
        "watch for slow ranks 0.1 % of a step",
        program("cost", ranks=2, gate=2, full=10, check=is_cheap),
    ),
    Campaign("R11", "a lost host ends the job everywhere", tests("tests/cluster/test_faults.py", "-k", "killed")),
    Campaign("R12", "a lost cable ends the job everywhere", tests("tests/cluster/test_faults.py", "-k", "cable")),
    Campaign(
        "R13",
        "a long run needs no more memory, threads, descriptors or files at its end",
        program("soak", ranks=2, gate=500, full=20_000, check=is_flat),
    ),
    Campaign("R14", "a repetition computes the same bits", tests("tests/mpi/test_runs.py", "-k", "resumed_equals")),
    Campaign("R15", "the doctor names what is broken", tests("tests/test_doctor.py")),
    Campaign(
        "R16",
        "a rank that takes 200 ms longer to load or to compute is named within 20 steps, and no healthy rank ever",
        lambda size: itertools.chain(
            program("slow", ranks=4, gate=2, full=100, check=names_slow_rank)(size),
            program("healthy", ranks=4, gate=200, full=10_000, check=names_slow_rank)(size),
        ),
    ),
    Campaign(
        "R17",
        "a run that loses its machine while it copies a checkpoint goes on from its mirror, with the same bits",
        lambda size: losing(size, machines=size.choose(3, 50), seed=17),
    ),
)
