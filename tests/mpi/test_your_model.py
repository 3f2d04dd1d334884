"""The programs of docs/your-model.md: any number of ranks, killed and resumed, gives the uninterrupted run."""

import os
import re
from pathlib import Path

import pytest
from launch import ROOT, launch
from runs import different, distance, steps_saved, weights

FOUND = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{FOUND}", "OMP_NUM_THREADS": "1"}
PAGE = (ROOT / "docs" / "your-model.md").read_text()
ROUNDING = 1e-5  # of float32 in another order, after up to 45 steps; measured: 2e-7 to 2e-6
KILL = """
        if steps.step == 13 and comm.rank == comm.size - 1:
            __import__("os").kill(__import__("os").getpid(), 9)
"""


def train(program: Path, folder: Path, ranks: int, launcher: str = "mpirun") -> tuple[int, str]:
    return launch([str(program), str(folder)], ranks=ranks, launcher=launcher, environment=ENVIRONMENT)


def kill_and_resume(name: str, folder: Path, ranks: int) -> None:
    """Train on two ranks, lose one in step 14, and go on with so many ranks."""
    text = (EXAMPLES / f"{name}.py").read_text()
    killed = folder.with_suffix(".py")
    killed.write_text(text.replace("\n        optimizer.step()\n", f"\n        optimizer.step(){KILL}"))
    assert KILL in killed.read_text()
    code, output = train(killed, folder, 2)
    assert code != 0 and steps_saved(folder) == [5, 10], output
    code, output = train(EXAMPLES / f"{name}.py", folder, ranks)
    assert code == 0, output


@pytest.mark.parametrize("name, ranks", [("own_model", 3), ("own_loss", 2), ("own_data", 3), ("own_augmentation", 1)])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, name, ranks):
    """It is that of one rank without an interruption, up to rounding."""
    code, output = train(EXAMPLES / f"{name}.py", tmp_path / "whole", 1)
    assert code == 0, output
    kill_and_resume(name, tmp_path / "cut", ranks)
    assert steps_saved(tmp_path / "cut") == steps_saved(tmp_path / "whole")
    assert distance(weights(tmp_path / "whole"), weights(tmp_path / "cut")) <= ROUNDING


def test_on_the_same_ranks_it_goes_on_to_the_bit(tmp_path):
    code, output = train(EXAMPLES / "own_augmentation.py", tmp_path / "whole", 2, "horovodrun")
    assert code == 0, output
    kill_and_resume("own_augmentation", tmp_path / "cut", 2)
    assert not different(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_the_page_shows_what_is_in_the_examples():
    shown = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    texts = [path.read_text() for path in EXAMPLES.glob("own_*.py")]
    assert len(shown) == 4
    assert not [block for block in shown if not any(block in text for text in texts)]
