"""The files of ranks/ under real launchers: few launches, with many files in each, as starting ranks takes longest."""

from pathlib import Path

import pytest
from launch import check_on_ranks

REDUCTION = ["gradients", "traps", "levers", "freezing"]
WITHOUT_MPI = "horovodrun --gloo"


@pytest.mark.parametrize(
    "ranks, launcher, names",
    [
        (1, "python", [*REDUCTION, "data", "batch_norm"]),
        (2, WITHOUT_MPI, [*REDUCTION, "data", "zero"]),
        (2, "mpirun", ["compile"]),
        (3, "mpirun", [*REDUCTION, "data", "batch_norm", "validation", "zero"]),
        (4, "mpirun", ["gradients", "data"]),
    ],
)
def test_on_ranks(ranks, launcher, names):
    check_on_ranks([f"test_{name}.py" for name in names], ranks=ranks, launcher=launcher)


def test_every_file_is_run():
    for path in (Path(__file__).parent / "ranks").glob("test_*.py"):
        assert f'"{path.stem.removeprefix("test_")}"' in Path(__file__).read_text(), path
