"""A run that commit 61bf4a0 began, stopped after step 3 of 6, goes on with the numbers of its own uninterrupted run.

Made on two ranks with `OPTIONS`, a part of them of that commit alone, and --run.max_steps 3; curves.png was removed.
"""

import tarfile
from pathlib import Path

import pytest
from launch import launch
from runs import SMALL, rows

RATES = ["--model.proj_drop_rate", "0.1", "--model.drop_path_rate", "0.1", "--augment.reprob", "0.3"]
OPTIONS = [
    *("--recipe", "quickstart", *SMALL, "--model", "vit_pico8", "--img-size", "32", *RATES),
    *("--augment.mixup_alpha", "0.2", "--optim.ema_half_life", "36 images", "--checkpoint.best", "none"),
    *("--data.global_batch_size", "40", "--data.micro_batch_size", "4"),
    *("--run.duration", "6 steps", "--run.eval_every", "6 steps", "--checkpoint.every", "3 steps"),
]
STEPS = {  # loss and norm of the gradient at 61bf4a0, uninterrupted
    "4": (2.31006742, 0.950828433),
    "5": (2.3103236, 1.80450225),
    "6": (2.31751466, 1.2120564),
}
EVALUATION = {"train_loss": 2.30849441, "eval_loss": 2.30706126, "top1": 10, "ema_loss": 2.30712991, "ema_top1": 10}


def test_a_run_of_an_older_version_goes_on_with_its_own_numbers(tmp_path):
    """On processors of another kind the last digits may differ."""
    with tarfile.open(Path(__file__).with_name("run_of_61bf4a0.tar.xz")) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "run"
    code, output = launch(["-m", "tests.mpi.smallest", *OPTIONS, "--run.folder", str(folder)], ranks=2)
    assert code == 0 and "resumed at step 3" in output, output
    steps = {row["step"]: (float(row["loss"]), float(row["grad_norm"])) for row in rows(folder, "steps.csv")}
    assert list(steps) == ["1", "2", "3", "4", "5", "6"]
    for step, pair in STEPS.items():
        assert steps[step] == pytest.approx(pair, rel=1e-5), step
    (evaluation,) = rows(folder, "epochs.csv")
    assert {name: float(evaluation[name]) for name in EVALUATION} == pytest.approx(EVALUATION, rel=1e-5)
