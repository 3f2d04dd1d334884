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
            __import__("os").kill(__import__("os").getpid(), {signal})
"""


def train(program: Path, folder: Path, ranks: int, launcher: str = "mpirun") -> tuple[int, str]:
    return launch([str(program), str(folder)], ranks=ranks, launcher=launcher, environment=ENVIRONMENT)


def with_signal(name: str, place: Path, signal: int) -> Path:
    """Write an example whose last rank sends itself a signal in step 14."""
    text = (EXAMPLES / f"{name}.py").read_text()
    step = "\n        optimizer.step()\n"
    assert step in text
    place.write_text(text.replace(step, step.rstrip() + KILL.format(signal=signal)))
    return place


def kill_and_resume(name: str, folder: Path, ranks: int) -> None:
    """Train on two ranks, lose one in step 14, and go on with so many ranks."""
    code, output = train(with_signal(name, folder.with_suffix(".py"), 9), folder, 2)
    assert code != 0 and steps_saved(folder) == [5, 10], output
    code, output = train(EXAMPLES / f"{name}.py", folder, ranks)
    assert code == 0, output


@pytest.mark.parametrize(
    "name, ranks",
    [
        ("own_loss", 2),
        *(
            pytest.param(name, ranks, marks=pytest.mark.cluster)
            for name, ranks in (("own_model", 3), ("own_data", 3), ("own_augmentation", 1))
        ),
    ],
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, name, ranks):
    """It is that of one rank without an interruption, up to rounding."""
    code, output = train(EXAMPLES / f"{name}.py", tmp_path / "whole", 1)
    assert code == 0, output
    kill_and_resume(name, tmp_path / "cut", ranks)
    assert steps_saved(tmp_path / "cut") == steps_saved(tmp_path / "whole")
    assert distance(weights(tmp_path / "whole"), weights(tmp_path / "cut")) <= ROUNDING


@pytest.mark.cluster
def test_on_the_same_ranks_it_goes_on_to_the_bit(tmp_path):
    code, output = train(EXAMPLES / "own_augmentation.py", tmp_path / "whole", 2, "horovodrun")
    assert code == 0, output
    kill_and_resume("own_augmentation", tmp_path / "cut", 2)
    assert not different(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


@pytest.mark.cluster
@pytest.mark.parametrize("launcher, code", [("mpirun", 75), ("torchrun", 1)])  # torchrun ends with 1, and prints 75
def test_a_signal_ends_all_ranks_with_a_checkpoint(tmp_path, launcher, code):
    program = with_signal("own_model", tmp_path / "told.py", 10)
    program.write_text(program.read_text().replace("epochs=3)", "epochs=3000)"))
    ended, output = train(program, tmp_path / "run", 2, launcher)
    (step,) = re.findall(r"stopped after step (\d+) of 44907, because SIGUSR1 reached 1 of 2 ranks; the same", output)
    assert ended == code and steps_saved(tmp_path / "run")[-1] == int(step), output


def test_a_mistake_is_one_sentence_of_one_rank(tmp_path):
    program = tmp_path / "wrong.py"
    program.write_text((EXAMPLES / "own_model.py").read_text().replace("micro_batch_size=24", "micro_batch_size=97"))
    code, output = train(program, tmp_path / "run", 2)
    said = [line for line in output.splitlines() if line.startswith("largebatch: ")]
    assert code == 2 and "Traceback" not in output, output
    assert said == ["largebatch: micro_batch_size 97 is larger than global_batch_size 96: lower the first or raise the "
                    "second."]  # fmt: skip


def test_the_page_shows_what_is_in_the_examples():
    shown = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    texts = [path.read_text() for path in EXAMPLES.glob("own_*.py")]
    assert len(shown) == 4
    assert not [block for block in shown if not any(block in text for text in texts)]
