"""Breaks the product on purpose, a line at a time, and sees whether the tests notice.

    python -m tests.mutants [-k TEXT] [--jobs 2]

`mutants.toml` lists the breaks, each with the tests that must fail with it. The working tree is never touched: every
break is made in a copy of it, in a folder of its own under TMPDIR. All these tests run once without a break first, and
must pass. Then a break is killed if pytest says that a test failed. It is an error, of the catalogue or of this
program, if pytest could not run the tests, or did not come to an end in time.

Importing torch, timm and DALI takes longer than most of these tests. So this process imports them once, and forks for
each run; what it must not import is the product, which each run takes from its own copy.

Each run has a keeper: a process between this one and the tests, which adopts whatever the tests leave behind, ends it,
and removes the folder. It does so, too, when this process is killed; so nothing is left in any case.
"""

import argparse
import ast
import compileall
import ctypes
import importlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = Path(__file__).with_name("mutants.toml")
TREE = ("largebatch", "zoo", "docs", "examples", "tests", "mpi_scripts", "README.md", "pyproject.toml", "setup.cfg")
TREE += ("requirements.lock",)
IMPORTED_ONCE = ("torch", "torch._dynamo", "torch.distributed.pipelining", "torch.utils.tensorboard", "numpy", "pytest")
IMPORTED_ONCE += ("scipy.stats", "PIL.Image", "nvidia.dali.fn", "horovod.torch", "matplotlib.figure")
IMPORTED_ONCE += ("safetensors.torch", "rich.progress", "timm", "timm.data", "timm.optim", "sklearn.datasets")
LIMIT_S = 120.0
GRACE_S = 1.0
NOTED = 3000  # characters of a run's output that are kept
SUBREAPER, PARENTS_DEATH = 36, 1  # of prctl(2)


@dataclass(frozen=True)
class Mutant:
    """A break: `text`, which occurs once in `function` of `file`, becomes something else, and `tests` fail.

    function: "Class.method" or "function"; "": the whole file, as in C++ and for what no function holds.
    ranks: how many to start by mpirun, for tests/mpi/ranks, torch_ranks: by torchrun; 1: no launcher. hang: that they
    never end counts as failed.
    """

    file: str
    text: str
    becomes: str
    breaks: str
    tests: tuple[str, ...]
    function: str = ""
    ranks: int = 1
    torch_ranks: int = 1
    hang: bool = False
    limit_s: float = LIMIT_S

    @property
    def launcher(self) -> str:
        if self.torch_ranks > 1:
            return f"torchrun --nproc-per-node {self.torch_ranks} --no-python"
        return f"mpirun -np {self.ranks}" if self.ranks > 1 else ""

    @property
    def folder(self) -> str:
        """Where the file lies."""
        return str(Path(self.file).parent)

    def apply(self, source: str) -> str:
        """The broken file. ValueError unless the text occurs exactly once."""
        before, part, after = within(source, self.function)
        count = part.count(self.text)
        if count != 1:
            where = f"{self.file} {self.function}".strip()
            raise ValueError(f"{where}: the text to break occurs {count} times, expected once: {self.text!r}")
        return before + part.replace(self.text, self.becomes) + after


def within(source: str, function: str) -> tuple[str, str, str]:
    """Return the source before, of and after a function with its decorators; an empty part if there is none."""
    if not function:
        return "", source, ""
    nodes: list[ast.AST] = [ast.parse(source)]
    for name in function.split("."):
        nodes = [inner for node in nodes for inner in ast.iter_child_nodes(node) if getattr(inner, "name", "") == name]
    lines = source.splitlines(keepends=True)
    for node in nodes:
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        return "".join(lines[:first]), "".join(lines[first : node.end_lineno]), "".join(lines[node.end_lineno :])
    return source, "", ""


@dataclass(frozen=True)
class Job:
    """One run of pytest. mutant: what is broken in its copy; None: nothing."""

    tests: tuple[str, ...]
    launcher: str  # its command line; empty: none
    limit_s: float
    mutant: Mutant | None = None


@dataclass(frozen=True)
class Outcome:
    """How a job ended: pytest's exit code, None if its time ran out; and the end of its output."""

    code: int | None
    seconds: float
    output: str


def read_catalogue() -> list[Mutant]:
    """All breaks, in the order of the file."""
    entries = tomllib.loads(CATALOGUE.read_text())["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def main() -> int:
    """Run the command line; 0 if every break was killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="See whether the tests notice breaks.")
    parser.add_argument("-k", default="", help="only breaks with this text in their file, sentence or tests")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (default 2)")
    options = parser.parse_args()
    mutants = [one for one in read_catalogue() if options.k in " ".join((one.file, one.breaks, *one.tests))]
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}, expected 1 or more")
    if not mutants:
        parser.error(f"no break has {options.k!r} in its file, sentence or tests")
    if faults := [fault for mutant in mutants if (fault := fault_of(mutant))]:
        sys.exit("\n".join(faults))
    began = time.monotonic()
    with guarded_folder() as base:
        signal.signal(signal.SIGTERM, _exit)
        prepare(base)
        red = red_without_a_break(mutants, options.jobs, base)
        verdicts = Counter(_report(*pair, red) for pair in judge(mutants, options.jobs, base, red))
    counts = ", ".join(f"{number} {folder}" for folder, number in Counter(mutant.folder for mutant in mutants).items())
    print(f"breaks by folder: {counts}")
    print(
        f"{verdicts['killed']} killed, {verdicts['survived']} survived, {verdicts['error']} errors "
        f"of {len(mutants)} in {time.monotonic() - began:.0f} s"
    )
    return 0 if mutants and verdicts["killed"] == len(mutants) else 1


def fault_of(mutant: Mutant) -> str:
    """Why the break cannot be made; empty if it can."""
    try:
        mutant.apply((ROOT / mutant.file).read_text())
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def _exit(number: int, frame: Any) -> None:
    sys.exit(128 + number)


# -- what is run -------------------------------------------------------------------------------------------------


def prepare(base: Path) -> None:
    """Copy the tree, compiled, so that a run compiles what is broken alone; import what all runs need."""
    os.environ["OMP_NUM_THREADS"] = "1"  # runs share the cores
    (base / "cache").mkdir()
    for name in TREE:
        _copy(ROOT / name, base / "tree" / name, "__pycache__")
    for package in ("largebatch", "zoo"):
        compileall.compile_dir(base / "tree" / package, quiet=1)
    runpy.run_path(str(ROOT / "zoo" / "_torchvision.py"))  # lets timm be imported beside torch's CPU build
    for module in IMPORTED_ONCE:
        importlib.import_module(module)


def _copy(source: Path, target: Path, *ignored: str) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*ignored))
    else:
        target.parent.mkdir(exist_ok=True)
        shutil.copy2(source, target)


def groups_of(mutant: Mutant) -> set[tuple[str, str]]:
    """Files of tests, each with a launcher, as they run without a break."""
    return {(test.partition("::")[0], mutant.launcher) for test in mutant.tests}


def red_without_a_break(mutants: list[Mutant], jobs: int, base: Path) -> set[tuple[str, str]]:
    """Run all named tests once; the groups that failed, or left a test out."""
    tests: dict[tuple[str, str], dict[str, None]] = {}
    for mutant in mutants:
        for test in mutant.tests:
            tests.setdefault((test.partition("::")[0], mutant.launcher), {})[test] = None
    groups = {Job(tuple(names), group[1], 5 * LIMIT_S): group for group, names in tests.items()}
    began, red = time.monotonic(), set()
    for job, outcome in run(groups, jobs, base):
        if outcome.code != 0 or re.search(r"\d skipped", outcome.output):
            red.add(groups[job])
            print(f"red without a break, or skipped: {' '.join(job.tests)}\n{outcome.output}", flush=True)
    print(f"unbroken: {len(groups) - len(red)} of {len(groups)} files of tests pass, {time.monotonic() - began:.0f} s")
    return red


def judge(
    mutants: list[Mutant], jobs: int, base: Path, red: set[tuple[str, str]]
) -> Iterator[tuple[Mutant, Outcome | None]]:
    """How each break's run ended, as they end; None for those whose tests fail anyway."""
    sound = [mutant for mutant in mutants if not groups_of(mutant) & red]
    yield from ((mutant, None) for mutant in mutants if mutant not in sound)
    todo = [Job(mutant.tests, mutant.launcher, mutant.limit_s, mutant) for mutant in sound]
    for job, outcome in run(todo, jobs, base):
        assert job.mutant is not None
        yield job.mutant, outcome


def verdict(mutant: Mutant, outcome: Outcome | None) -> tuple[str, str]:
    """killed, survived or error; and why, where that is not said by the word."""
    if outcome is None:
        return "error", "its tests are red, or skipped, without the break"
    if outcome.code is None:
        return ("killed", "") if mutant.hang else ("error", f"no end within {mutant.limit_s:g} s")
    if outcome.code in (0, 1):
        return ("killed", "") if outcome.code else ("survived", f"green: {' '.join(mutant.tests)}")
    return "error", f"exit code {outcome.code}, which is no failed test\n{outcome.output}"


def _report(mutant: Mutant, outcome: Outcome | None, red: set[tuple[str, str]]) -> str:
    word, why = verdict(mutant, outcome)
    seconds = f"{outcome.seconds:6.1f} s" if outcome else " " * 8
    print(f"{word:8} {seconds}  {mutant.file}: {mutant.breaks}", *([why] if why else []), sep="\n    ", flush=True)
    return word


# -- processes ---------------------------------------------------------------------------------------------------


@contextmanager
def guarded_folder() -> Iterator[Path]:
    """A temporary folder, which a process of its own removes when this one has ended, however that comes about."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    reader, writer = os.pipe()
    guard = os.fork()
    if not guard:
        os.setsid()  # a terminal's Ctrl-C does not reach it
        os.close(writer)
        os.read(reader, 1)  # nothing comes: it returns when nobody is left who could write
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.close(reader)
    try:
        yield folder
    finally:
        os.close(writer)
        os.waitpid(guard, 0)


def run(todo: Iterable[Job], jobs: int, base: Path) -> Iterator[tuple[Job, Outcome]]:
    """Each job in a keeper of its own, so many at a time; what they say, as they end."""
    waiting, running = list(todo), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                job = waiting.pop(0)
                pid, report = _start_keeper(job, base)
                running[pid] = job, report
            pid, _ = os.wait()
            if pid in running:
                job, report = running.pop(pid)
                with open(report) as file:
                    said = file.read()
                yield job, Outcome(**json.loads(said)) if said else Outcome(-1, 0.0, "the keeper of this run failed")
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)
        for pid in running:
            os.waitpid(pid, 0)


def _start_keeper(job: Job, base: Path) -> tuple[int, int]:
    """Its process, and where it reports."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    code = 1
    try:
        prctl = ctypes.CDLL(None).prctl
        prctl(SUBREAPER, 1)
        prctl(PARENTS_DEATH, signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the parent says what to do
        if os.getppid() == parent:
            os.write(writer, json.dumps(vars(keep(job, base))).encode())
            code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def keep(job: Job, base: Path) -> Outcome:
    """Run a job in a folder of its own; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    try:
        shutil.copytree(base / "tree", folder / "tree")
        cache = base / "cache"
        if job.mutant:
            broken = folder / "tree" / job.mutant.file
            broken.write_text(job.mutant.apply(broken.read_text()))
            cache = folder / "cache"  # a broken index must not be found by others, nor hidden by a sound one
            shutil.copytree(base / "cache", cache, ignore=shutil.ignore_patterns("index"))
        (folder / "tmp").mkdir()
        began = time.monotonic()
        with open(folder / "output", "w+", errors="replace") as output:
            pid = os.fork()
            if not pid:
                _become_pytest(job, folder, cache, output.fileno())
            code = _wait(pid, job.limit_s)
            end_children()
            output.seek(0)
            return Outcome(code, round(time.monotonic() - began, 2), output.read()[-NOTED:])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        end_children()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(pid: int, limit_s: float) -> int | None:
    """The exit code of a process, None if it takes longer."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def end_children() -> None:
    """End all that is left of a run: what loses its parent becomes a child of the keeper, its subreaper.

    Two kinds of process are not killed, since they clear up when the others have gone, and end by themselves:
    Python's tracker of semaphores, and the guardian of a pytest that is killed.
    """
    deadline = time.monotonic() + GRACE_S
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for pid in map(int, children):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            clears = b"resource_tracker" in command or b"guardian.py" in command
            if time.monotonic() > deadline and not clears:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _become_pytest(job: Job, folder: Path, cache: Path, output: int) -> None:
    """In a forked process: run the tests of the copy, with the copy's sources, and end."""
    code = 3  # pytest's own for an internal error
    try:
        os.setsid()
        for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            signal.signal(number, handler)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        tree = str(folder / "tree")
        os.chdir(tree)
        os.environ.update(PYTHONPATH=tree, TMPDIR=str(folder / "tmp"), XDG_CACHE_HOME=str(cache))
        os.environ["LARGEBATCH_RANK_TESTS"] = ""  # tests of mpi/ranks run in this process, or in those of a launcher
        tempfile.tempdir = None  # as found by the parent
        arguments = ["-m", "", "-x", "-q", "--color=no", "-p", "no:cacheprovider", *job.tests]
        if job.launcher:
            command = [*job.launcher.split(), sys.executable, "-m", "pytest", *arguments]
            os.execvp(command[0], command)
        sys.path[:] = [tree, *(path for path in sys.path if path not in ("", str(ROOT)))]
        sys.modules["__main__"] = ModuleType("__main__")  # or processes of the tests would import this file
        importlib.invalidate_caches()
        code = int(importlib.import_module("pytest").main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
