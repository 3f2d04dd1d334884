"""What tests of several folders share."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS_README = Path(__file__).parents[1] / "mpi_scripts" / "README.md"


@pytest.fixture
def scripts_readme() -> Callable[[str], list[str]]:
    """Heading of a section of mpi_scripts/README.md -> its commands; each section has one block of them."""

    def commands(heading: str) -> list[str]:
        _, _, after = SCRIPTS_README.read_text().partition(f"\n## {heading}\n")
        (block,) = re.findall(r"```sh\n(.*?)```", after.partition("\n## ")[0], re.DOTALL)
        return block.splitlines()

    return commands
