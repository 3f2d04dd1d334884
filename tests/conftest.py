"""The setting of all tests: tiers, their order, and a folder of the session that is removed at its end."""

import gc
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

gc.disable()  # until all tests are imported
ROOT = Path(__file__).parents[1]
SCRIPTS_README = ROOT / "mpi_scripts" / "README.md"
GUARDIAN = Path(__file__).with_name("guardian.py")
SHARED_MEMORY = Path("/dev/shm")
NVIDIA = Path("/dev/nvidiactl")
# Open MPI 4 and 5: the folder of the segments by which ranks of a host talk. It keeps them if mpirun is killed.
MPI_MEMORY = ("OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TIERS = {  # marker: what its tests are
    "cluster": "several hosts, failing networks and Slurm on this machine; runs that are killed, hang or told to end",
    "evidence": "full-size runs, and the breaks of mutants.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in a random order")


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a folder for its files, one for its shared memory, and a guardian that clears both."""
    config.option.keyword = re.sub(r"\b(\d) (ranks?)\b", r"\1_\2", config.option.keyword)
    if "LARGEBATCH_TESTS" in os.environ:  # a process of a session that has both: pytest-xdist's, or a rank's
        return
    folder = tempfile.mkdtemp(prefix="lb-")  # short, since names of sockets, of up to 107 characters, begin with it
    for name in ("tmp", "compiled"):
        os.mkdir(f"{folder}/{name}")
    os.environ |= {"LARGEBATCH_TESTS": folder, "TMPDIR": f"{folder}/tmp"}
    keep_mpi_folder(f"{folder}/tmp", socket.gethostname())
    # A cache outside of it may hold files that a killed run has left incomplete.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
    if SHARED_MEMORY.is_dir():
        memory = SHARED_MEMORY / Path(folder).name
        memory.mkdir(mode=0o700)
        os.environ |= dict.fromkeys(MPI_MEMORY, str(memory))
    tempfile.tempdir = None
    reads, _ = os.pipe()  # the other end closes when this process ends
    command = [sys.executable, "-IS", str(GUARDIAN), folder]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, reads, 0)], setsid=True)
    os.close(reads)


def keep_mpi_folder(temporary: str, host: str) -> None:
    """Let no mpirun of a host remove the folder that all of them use, because one that starts just then would fail."""
    os.makedirs(f"{temporary}/ompi.{host}.{os.getuid()}/kept")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tier of a folder, skip what this machine cannot run, and shuffle if asked to."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")[0]
    reason = f"there is no C++ compiler: {compiler} is not found; install g++, or name another compiler with CXX=..."
    has_compiler = shutil.which(compiler)
    for item in items:
        if item.path.parent.name == "cluster":
            item.add_marker("cluster")
        if item.get_closest_marker("needs_compiler") and not has_compiler:
            item.add_marker(pytest.mark.skip(reason=reason))
    if config.option.shuffle is not None:
        draws = random.Random(config.option.shuffle)
        draws.shuffle(items)
        place = {file: draws.random() for file in sorted({item.path for item in items})}
        items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at what is imported: each would take a tenth of a second."""
    gc.freeze()
    gc.enable()


class Together(LoadScopeScheduling):
    """Gives each process of pytest-xdist whole files, and of mpi/ranks all tests of a launch."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        world = re.search(r"\[(\d_ranks?[a-z_]*)", test)
        return world[1] if world and file.startswith("tests/mpi/ranks/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    return Together(config, log)


LEFT_OUT: Counter[str] = Counter()  # tests of each tier


def pytest_deselected(items: list[pytest.Item]) -> None:
    LEFT_OUT.update(tier for item in items for tier in TIERS if item.get_closest_marker(tier))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of left-out tests from a process of pytest-xdist to the process that the user started."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(LEFT_OUT)


def pytest_testnodedown(node: Any, error: Any) -> None:
    if not error:
        LEFT_OUT.update({tier: count for tier, count in node.workeroutput["left_out"].items() if not LEFT_OUT[tier]})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the seed of a shuffled order, and the tiers that were not asked for."""
    if config.option.shuffle is not None:
        terminalreporter.write_line(f"shuffled: --shuffle {config.option.shuffle} gives the same order again")
    asked = config.option.markexpr
    for tier, count in LEFT_OUT.items():
        if f"not {tier}" in asked or asked and tier not in asked:
            terminalreporter.write_line(f"left out: {count} tests of tier {tier} ({TIERS[tier]}): -m {tier} runs them")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute with one thread: tests compute little at a time, and a second thread costs more than it saves.

    Before each test, because the one before may have started a run, which takes all cores.
    """
    if torch := sys.modules.get("torch"):  # it takes seconds to import where no test has
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A program ignores signals when it has ended; called in this process, it would let those of later tests do so."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before, "the test leaves another answer to a signal"


@pytest.fixture
def scripts_readme() -> Callable[[str], list[str]]:
    """Heading of a section of mpi_scripts/README.md -> its commands; each section has one block of them."""

    def commands(heading: str) -> list[str]:
        _, _, after = SCRIPTS_README.read_text().partition(f"\n## {heading}\n")
        (block,) = re.findall(r"```sh\n(.*?)```", after.partition("\n## ")[0], re.DOTALL)
        return block.splitlines()

    return commands
