"""find_lr under a launcher: the same curve on any ranks, nothing left behind that a run would notice."""

from pathlib import Path

import pytest
from launch import launch
from runs import SMALL, different, rows, weights

BATCH = "--img-size 32 --data.global_batch_size 32 --data.micro_batch_size 16".split()
SEARCH = "--run.deterministic false".split()  # two ranks have one order of a sum, however it is sent


def train(folder: Path, *options: str, ranks: int = 1, program: str = "train") -> tuple[int, str]:
    return launch(["-m", f"largebatch.{program}", *SMALL, *BATCH, "--run.folder", str(folder), *options], ranks=ranks)


def test_a_search_is_the_same_on_any_ranks_and_a_run_after_it_as_if_there_had_been_none(tmp_path):
    curves = []
    for ranks, folder in ((1, tmp_path / "one"), (2, tmp_path / "two")):
        code, output = train(folder, *SEARCH, ranks=ranks, program="find_lr")
        assert code == 0 and "lamb at a global batch of 32: the suggestion is --optim.lr 0." in output, output
        assert {path.name for path in folder.iterdir()} <= {"find_lr.csv", "find_lr.png", "log.txt", ".lock"}
        curves.append([(float(row["lr"]), float(row["loss"])) for row in rows(folder, "find_lr.csv")])
    alike = [(one, two) for (rate, one), (_, two) in zip(*curves) if rate < 3e-3]
    assert len(alike) == 83 and all(one == pytest.approx(two, rel=1e-3) for one, two in alike)
    for folder in (tmp_path / "one", tmp_path / "never"):
        code, output = train(folder, "--run.max_steps", "2")
        assert code == 0, output
    assert different(weights(tmp_path / "one"), weights(tmp_path / "never")) == []
    code, output = train(tmp_path / "one", *SEARCH, program="find_lr")
    assert code == 2 and "one, which has checkpoints of a run: a search begins from the initial state, so " in output


def test_a_step_that_fp16_skips_does_not_end_a_search(tmp_path):
    """The scale of the loss falls then, and training goes on."""
    batch = "--data.global_batch_size 16 --run.precision fp16".split()
    code, output = train(tmp_path, *batch, program="find_lr")
    assert code == 0, output
    assert float(rows(tmp_path, "find_lr.csv")[-1]["lr"]) > 0.2


@pytest.mark.evidence
@pytest.mark.parametrize("batch", ["64", "256"])
@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_the_suggestion_is_within_a_factor_2_of_the_best(name, batch, tmp_path):
    """Of runs of 200 steps at a quarter to four times the suggestion, by the mean training loss of the last quarter."""
    options = ["--optim.name", name, "--data.global_batch_size", batch, "--data.micro_batch_size", "32"]
    options += [] if name == "lamb" else ["--optim.preset", "null"]
    code, output = train(tmp_path / "search", *options, program="find_lr")
    assert code == 0, output
    suggestion = float(output.partition("--optim.lr ")[2].partition(";")[0])
    losses = {}
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
        folder = tmp_path / str(factor)
        rate = ["--optim.lr", str(factor * suggestion), "--run.duration", "200 steps", "--run.eval_every", "never"]
        code, output = train(folder, *options, *rate)
        assert code == 0, output
        last = [float(row["loss"]) for row in rows(folder, "steps.csv")][-50:]
        losses[factor] = sum(last) / len(last)
    assert min(losses, key=losses.__getitem__) in (0.5, 1.0, 2.0), (suggestion, losses)
