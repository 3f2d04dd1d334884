"""Sessions of a process that is the only rank: one after another, at a prompt also after an error; and the notebook."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import largebatch
from largebatch.ranks.stopped import Stopped

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # a session would change it


def drawn() -> list[float]:
    return torch.rand(2).tolist()


def test_a_session_may_follow_another():
    with largebatch.session() as comm:
        torch.manual_seed(3)
        first = drawn()
        with pytest.raises(SystemExit, match="a session is open in this process"), largebatch.session():
            pass
    assert not comm.is_open
    with largebatch.session() as other:
        torch.manual_seed(3)
        assert drawn() == first and other.is_open and (other.rank, other.size) == (0, 1)


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt(), Stopped("the reason"), SystemExit(3)])
def test_an_error_at_a_prompt_ends_the_session_and_not_the_process(monkeypatch, error):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(type(error)) as raised, largebatch.session() as comm:
        raise error
    assert raised.value is error and not comm.is_open
    with largebatch.session() as comm:
        assert comm.size == 1


def test_the_same_error_ends_a_program(tmp_path):
    (tmp_path / "program.py").write_text("import largebatch\nwith largebatch.session():\n    raise KeyError('mine')\n")
    command, found = [sys.executable, str(tmp_path / "program.py")], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=found, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "largebatch: rank 0 of 1 on " in done.stderr and "KeyError: 'mine'" in done.stderr


def test_the_notebook_runs_twice_in_one_process(tmp_path):
    """Its cells as a program; the second time, the runs of the first one are complete."""
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in [*cell["source"], "\n"]]
    program = f"import sys\nsys.ps1 = 'In: '\nfor _ in range(2):\n    exec({''.join(lines)!r}, {{}})\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout == "124330 parameters, 10 classes\n" * 2, done.stdout + done.stderr
    for name in ("notebook", "notebook_adamw"):  # the log of a session goes into its own folder, and each line once
        log = (tmp_path / "runs" / name / "log.txt").read_text()
        assert log.count("step 29/29") == 1 and "epoch 5/5" in log, log
