"""The tests of this folder run inside the ranks of real launches; here they become items of their own name.

`WORLDS` says in which launches a file is run. For the pytest that a user starts, each test is an item per launch, such
as `test_freezing.py::test_x[3_ranks]` (`-k "freezing and 3 ranks"` picks it). The first item of a launch starts it: a
pytest on every rank, which runs all the chosen tests of the launch and writes down how each ended. The items then read
that. A test that fails on one rank ends the launch, since others may wait for that rank; the rest gets another one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launch import ENVIRONMENT, LAUNCHERS, ROOT, with_python


class World(NamedTuple):
    """A launch: so many ranks under a launcher."""

    ranks: int
    launcher: str = "mpirun"

    def __str__(self) -> str:
        speak_by = {"torchrun": "_torch", "horovodrun --gloo": "_gloo"}.get(self.launcher, "")
        return f"{self.ranks}_rank{'s' * (self.ranks > 1)}{speak_by}"


ONE, TWO, GLOO, THREE, FOUR = World(1, "python"), World(2), World(2, "horovodrun --gloo"), World(3), World(4)
TWO_TORCH, THREE_TORCH = World(2, "torchrun"), World(3, "torchrun")
WORLDS = {
    "test_batch_norm": [ONE, THREE, THREE_TORCH],
    "test_captured": [TWO, TWO_TORCH],
    "test_compile": [TWO, TWO_TORCH],
    "test_data": [ONE, GLOO, THREE, FOUR, TWO_TORCH, THREE_TORCH],
    "test_freezing": [ONE, GLOO, THREE, TWO_TORCH, THREE_TORCH],
    "test_gradients": [ONE, GLOO, THREE, FOUR, TWO_TORCH, THREE_TORCH],
    "test_growing": [ONE, GLOO, THREE, TWO_TORCH, THREE_TORCH],
    "test_handing_over": [ONE, GLOO, THREE, TWO_TORCH, THREE_TORCH],
    "test_levers": [ONE, GLOO, THREE, TWO_TORCH, THREE_TORCH],
    "test_noise_scale": [ONE, THREE, FOUR, THREE_TORCH],
    "test_origin": [ONE, THREE, THREE_TORCH],
    "test_recompute": [TWO, THREE, TWO_TORCH, THREE_TORCH],
    "test_replicas": [TWO, THREE, TWO_TORCH, THREE_TORCH],
    "test_rollback": [THREE, THREE_TORCH],
    "test_saving": [GLOO, THREE, TWO_TORCH, THREE_TORCH],
    "test_schedule_free_on_ranks": [ONE, TWO, TWO_TORCH],
    "test_second_gradient": [ONE, THREE, THREE_TORCH],
    "test_steps_on_ranks": [ONE, GLOO, THREE, TWO_TORCH, THREE_TORCH],
    "test_stop_points": [ONE, GLOO, THREE, TWO_TORCH, THREE_TORCH],
    "test_traps": [ONE, GLOO, THREE, TWO_TORCH, THREE_TORCH],
    "test_validation": [THREE, THREE_TORCH],
    "test_zero": [GLOO, THREE, TWO_TORCH, THREE_TORCH],
}
INSIDE = "LARGEBATCH_RANK_TESTS"  # in the ranks: the folder of the launch; empty: only this process, for trying things
LIMIT_S = 600


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get(INSIDE)
    if folder is None:
        config.pluginmanager.register(Runner(config))
    elif folder:
        # Ranks that shared a folder for temporary files would remove each other's links in it when they end.
        config.option.basetemp = f"{folder}/files_of_{rank()}"
        config.pluginmanager.register(Reporter(Path(folder)))


if INSIDE not in os.environ:

    @pytest.fixture(autouse=True)
    def world() -> None:
        """The launch that runs the test; `pytest_generate_tests` gives each test those of its file."""

    def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
        worlds = WORLDS[metafunc.module.__name__]
        metafunc.parametrize("world", worlds, ids=str, indirect=True)


# -- on a rank -------------------------------------------------------------------------------------------------------

LIVE: list[Any] = []


def rank() -> str:
    """The number of this process, before the ranks have met."""
    names = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0")


@pytest.fixture(scope="session")
def comm():
    """One communicator for all tests of a launch."""
    from largebatch.ranks.sessions import start

    communicator = start(deterministic=True)
    LIVE.append(communicator)
    yield communicator
    communicator.shutdown()


@pytest.fixture(autouse=True)
def buckets_as_in_large_models(monkeypatch):
    """Else all gradients of a small model would be one."""
    from largebatch.ranks import buckets

    monkeypatch.setattr(buckets, "SMALLEST", 1)


def pytest_exception_interact(node, call, report):
    """Other ranks may wait for this one in a collective: tell the reason, then end the run."""
    if LIVE:
        sys.stderr.write(f"rank {LIVE[0].rank}: {node.nodeid}\n{report.longreprtext}\n")
        LIVE[0].abort(1)


class Reporter:
    """Writes a line for each test that begins, and for each that ended; and leaves out what was not chosen."""

    def __init__(self, folder: Path) -> None:
        self.chosen = set(json.loads((folder / "chosen").read_text()))
        self.file = open(folder / f"rank{rank()}", "w", buffering=1)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.chosen]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        skipped = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
        said = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "skipped": skipped}
        print(json.dumps(said | {"seconds": report.duration}), file=self.file)


# -- in the run that a user starts -----------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a test ended on all ranks of a launch."""

    outcome: str
    text: str = ""
    seconds: float = 0.0


class Launch:
    """One start of a world's ranks, for some of the tests."""

    def __init__(self, world: World, tests: list[str], folder: Path) -> None:
        self.world, self.folder = world, folder
        self.read: Counter[Path] = Counter()  # bytes of each rank's file
        self.said: dict[str, list[dict[str, Any]]] = {}  # by test
        (folder / "chosen").write_text(json.dumps(tests))
        files = sorted({test.partition("::")[0] for test in tests})
        pytest_here = ["python", "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
        command = [*LAUNCHERS[world.launcher](world.ranks), *pytest_here, *files]
        with open(folder / "output", "w") as output:
            self.process = subprocess.Popen(
                with_python(command, cold=False),
                cwd=ROOT,
                env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1", INSIDE: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.limit = time.monotonic() + LIMIT_S

    def result(self, test: str, *, last: bool) -> Ended:
        """Wait for the test's end; it failed if its launch ended before. The last one also answers for the launch."""
        while True:
            over = self.process.poll() is not None or time.monotonic() > self.limit
            ended = self._ended(test)
            if over and ended is None or ended and ended.outcome == "failed":
                return self._failed()
            if ended and last and self.process.wait(self.limit - time.monotonic()) != 0:
                return self._failed()
            if ended:
                return ended
            time.sleep(0.02)

    def can_tell(self, test: str) -> bool:
        """Whether a result of the test is there, or may come."""
        return self.process.poll() is None or self._ended(test) is not None

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _failed(self) -> Ended:
        try:
            self.process.wait(30)  # a failure on one rank ends them all
        except subprocess.TimeoutExpired:
            self.end()
        return Ended("failed", (self.folder / "output").read_text(errors="replace"))

    def _ended(self, test: str) -> Ended | None:
        """None as long as the test goes on on a rank."""
        for file in self.folder.glob("rank*"):
            for line in self._new_lines(file):
                self.said.setdefault(line["test"], []).append(line)
        phases = self.said.get(test, [])
        if any(line["outcome"] == "failed" for line in phases):
            return Ended("failed")
        if sum(line["when"] == "teardown" for line in phases) < self.world.ranks:
            return None
        seconds = sum(line["seconds"] for line in phases) / self.world.ranks
        for line in phases:
            if line["outcome"] == "skipped":
                return Ended("skipped", line["skipped"], seconds)
        return Ended("passed", "", seconds)

    def _new_lines(self, file: Path) -> Iterator[dict[str, Any]]:
        """What a rank has written since the last look; the last line may be half written."""
        with open(file, "rb") as lines:
            lines.seek(self.read[file])
            whole = lines.read().rpartition(b"\n")[0]
        self.read[file] += len(whole) + bool(whole)
        return map(json.loads, whole.splitlines())


class Runner:
    """Starts a world's launch when its first item comes up, and reports each item as the ranks did."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.launches: dict[World, Launch] = {}
        self.left: dict[World, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if found := _place(item):
                self.left.setdefault(found[0], []).append(found[1])

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        found = _place(item)
        if not found:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        ended = self._run(*found)
        longrepr: Any = ended.text or None
        if ended.outcome == "skipped":
            longrepr = (str(item.path), item.location[1], ended.text)
        for when, outcome, reason, seconds in (
            ("setup", "passed", None, 0.0),
            ("call", ended.outcome, longrepr, ended.seconds),
            ("teardown", "passed", None, 0.0),
        ):
            keywords = dict.fromkeys(item.keywords, 1)
            report = pytest.TestReport(item.nodeid, item.location, keywords, outcome, reason, when, duration=seconds)
            item.ihook.pytest_runtest_logreport(report=report)
        item.session._setupstate.teardown_exact(nextitem)  # of what the items before have set up
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, world: World, test: str) -> Ended:
        left = self.left[world]
        if world not in self.launches or not self.launches[world].can_tell(test):
            folder = self.config._tmp_path_factory.mktemp(str(world))  # type: ignore[attr-defined]
            self.launches[world] = Launch(world, left, folder)
        ended = self.launches[world].result(test, last=left == [test])
        left.remove(test)
        return ended

    def pytest_sessionfinish(self) -> None:
        """They have ended, unless the session is broken off."""
        for launch in self.launches.values():
            launch.end()


def _place(item: pytest.Item) -> tuple[World, str] | None:
    """The world of an item, and how its ranks call its test; None for a test that is not of this folder."""
    if not isinstance(item, pytest.Function) or item.path.parent != Path(__file__).parent:
        return None
    world = item.callspec.params["world"]
    name = item.name.replace(f"[{world}-", "[").replace(f"[{world}]", "").replace(f"-{world}]", "]")
    return world, f"{item.path.relative_to(ROOT)}::{name}"
