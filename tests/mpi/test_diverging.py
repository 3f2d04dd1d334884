"""A run of a user whose learning rate is far too high: SGD learns a little in its warm-up, and then loses all of it."""

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
