"""What tests of several folders share."""

import os
import re
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


@pytest.fixture
def scripts_readme() -> Callable[[str], list[str]]:
    """Heading of a section of mpi_scripts/README.md -> its commands; each section has one block of them."""

    def commands(heading: str) -> list[str]:
        _, _, after = SCRIPTS_README.read_text().partition(f"\n## {heading}\n")
        (block,) = re.findall(r"```sh\n(.*?)```", after.partition("\n## ")[0], re.DOTALL)
        return block.splitlines()

    return commands
