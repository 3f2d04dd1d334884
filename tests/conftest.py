"""What tests of several folders share."""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPTS_README = Path(__file__).parents[1] / "mpi_scripts" / "README.md"


@pytest.fixture(scope="session", autouse=True)
def compiled_code() -> Iterator[None]:
    """A folder of this session's own: what a run killed while it compiled has left elsewhere may be half a library."""
    with tempfile.TemporaryDirectory(prefix="largebatch-compiled-", ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests compute little at a time: a second thread would do less for it than it costs to wait for it, spinning."""
    if torch := sys.modules.get("torch"):  # it takes seconds to import where no test has
        torch.set_num_threads(1)


@pytest.fixture
def scripts_readme() -> Callable[[str], list[str]]:
    """Heading of a section of mpi_scripts/README.md -> its commands; each section has one block of them."""

    def commands(heading: str) -> list[str]:
        _, _, after = SCRIPTS_README.read_text().partition(f"\n## {heading}\n")
        (block,) = re.findall(r"```sh\n(.*?)```", after.partition("\n## ")[0], re.DOTALL)
        return block.splitlines()

    return commands
