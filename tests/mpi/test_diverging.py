"""A run of a user whose learning rate is far too high: SGD learns a little in its warm-up, and then loses all of it."""

import pytest
import torch
from launch import launch
from runs import SMALL, rows, steps_saved

RUN = "--img-size 32 --data.global_batch_size 64 --data.micro_batch_size 16 --optim.name sgd --optim.lr 3".split()
LENGTH = ["--run.duration", "280 steps", "--schedule.warmup", "240 steps", "--run.eval_every", "never"]
EVERY = ["--log.every", "5 steps", "--checkpoint.every", "10 steps"]


def test_a_user_whose_rate_is_too_high_goes_on_at_half_of_it(tmp_path):
    command = ["-m", "largebatch.train", *SMALL, *RUN, *LENGTH, *EVERY, "--run.folder", str(tmp_path)]
    code, output = launch(command, ranks=2)
    assert code == 2 and "the training loss sags: smoothed over 25 steps it is" in output, output
    assert "as the training loss diverged" in output and "halve goes back to the checkpoint of step" in output, output
    sound, *newest = steps_saved(tmp_path)
    assert len(newest) == 2 and sound < newest[0] - 20, "one from before the rise is kept"
    state = torch.load(tmp_path / "checkpoints" / f"{sound:08d}" / "state.pt")["state"]
    assert state["smoothed"][2] == sound and state["halvings"] == 0  # with the loss of its own step
    code, output = launch([*command, "--run.on_divergence", "halve", "--run.max_steps", str(newest[1] + 8)], ranks=2)
    assert code == 0 and f"back to step {sound}, and on at 0.5 of the learning rate" in output, output
    table = rows(tmp_path, "steps.csv")
    assert [int(row["step"]) for row in table] == list(range(5, newest[1] + 8, 5))
    rates = {int(row["step"]): float(row["lr"]) / (3 * int(row["step"]) / 241) for row in table}
    assert {step: round(rate, 6) for step, rate in rates.items()} == {
        step: 1.0 if step <= sound else 0.5 for step in rates
    }


LAMB = "--img-size 32 --data.global_batch_size 64 --data.micro_batch_size 16 --optim.name lamb --optim.lr 0.5".split()


@pytest.mark.parametrize(
    "axes", ["--parallel.zero 1", pytest.param("--parallel.tensor.size 2", marks=pytest.mark.evidence)]
)
def test_a_run_whose_state_is_in_parts_goes_back_as_well(axes, tmp_path):
    """The second run has no fault to find; it starts from the checkpoint to which the first one went back."""
    options = [*SMALL, *LAMB, *LENGTH, *EVERY, *axes.split(), "--run.on_divergence", "halve", "--run.max_steps"]
    run = ["-m", "largebatch.train", "--run.folder", str(tmp_path), *options]
    code, output = launch([*run, "60"], ranks=2)
    assert code == 0 and "diverged" not in output, output
    before = rows(tmp_path, "steps.csv")
    code, output = launch([*run, "180"], ranks=2)
    assert code == 0 and "back to step 50, and on at 0.5 of the learning rate" in output, output
    after = rows(tmp_path, "steps.csv")
    shared = len([row for row in before if int(row["step"]) <= 50])
    assert [row["loss"] for row in after[:shared]] == [row["loss"] for row in before[:shared]]
    rates = {int(row["step"]): float(row["lr"]) for row in before + after}
    assert rates[50] == pytest.approx(50 * rates[5] / 5) and rates[55] == pytest.approx(0.5 * 55 * rates[5] / 5)
    at_50, at_55 = (float(row["loss"]) for row in after[shared - 1 : shared + 1])
    assert at_55 == pytest.approx(at_50, rel=0.1), "the weights and moments of step 50 are in their places"
