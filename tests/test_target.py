"""Hours to a target: epochs by the batch, points that are left out, the choice of GPUs beside whole plans, mistakes."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from largebatch.plan.__main__ import main, read
from largebatch.plan.planning import make_plan
from largebatch.plan.run import HOUR
from largebatch.plan.target import POINTS, Curve, at_target, choices, curve_of
from largebatch.reproduce.table import COLUMNS

PLAN = "--gpus 2 --gpu a100 --model vit_nano32 --img-size 64 --num-images 10000".split()
PLAN += "--micro-batch 64 --global-batch 512".split()
FAILURES = 1e6
MINE = "batch,epochs\n256,10\n512,11\n1024,13\n4096,30\n"


@pytest.fixture
def table(tmp_path):
    def write(text: str = MINE) -> str:
        Path(tmp_path, "mine.csv").write_text(text)
        return str(tmp_path / "mine.csv")

    return write


def curve(target: str, *words: str) -> Curve:
    options, config, _ = read([*PLAN, *words])
    return curve_of(target, config, num_images=options.num_images)


@pytest.mark.parametrize("name, worst", [("lars", 3264), ("lamb", 448)])
def test_a_published_point_that_is_left_out_is_predicted_within_10_percent(name, worst):
    """Of ResNet-50 with LARS from 3,264 to 65,536, and of BERT with LAMB from 448 to 13,056."""
    points = Curve(name, [*POINTS[name].items()])
    errors = points.errors()
    assert [*errors] == [*POINTS[name]][1:-1] and max(map(abs, errors.values())) < 0.1
    assert max(errors, key=lambda batch: abs(errors[batch])) == worst and points.factor == 1 + errors[worst]


def test_between_the_points_the_logarithms_are_on_a_line():
    points = Curve("mine", [(100, 10.0), (400, 40.0), (1600, 20.0)])
    found = [points.epochs(batch) for batch in (100, 200, 400, 800, 1600)]
    assert found == pytest.approx([10, 20, 40, 40 / 2**0.5, 20])
    (error,) = points.errors().values()
    assert error == pytest.approx(math.sqrt(200) / 40 - 1) and points.factor == pytest.approx(40 / math.sqrt(200))
    steps = [points.epochs(batch) for batch in range(100, 401)]
    assert steps == sorted(steps)


def test_published_points_keep_the_length_of_the_plan_at_its_batch():
    found = curve("lamb", "--epochs", "30")
    assert found.epochs(512) == pytest.approx(30)
    ratio = found.epochs(16384) / found.epochs(1536)
    assert ratio == pytest.approx(5.504 / 2.778)


def test_a_table_of_steps_is_that_of_their_epochs(table):
    by_epochs = curve(table())
    assert by_epochs.points == [(256, 10), (512, 11), (1024, 13), (4096, 30)]
    steps = "".join(f"{batch:g},{10000 * epochs / batch}\n" for batch, epochs in by_epochs.points)
    by_steps = curve(table(f"batch,steps\n{steps}"))
    assert dict(by_steps.points) == pytest.approx(dict(by_epochs.points))


def results(*rows: tuple[object, ...]) -> str:
    """A results.csv of reproduce with trials of 8 epochs; rows: optimizer, batch, purpose, steps, steps_to_target."""
    names = ("optimizer", "batch", "purpose", "steps", "steps_to_target")
    cells = [{"epochs": 8} | dict(zip(names, row)) for row in rows]
    return "\n".join([",".join(COLUMNS), *(",".join(str(row.get(name, "")) for name in COLUMNS) for row in cells)])


def test_the_results_of_reproduce_are_read(table):
    """The mean over the seeds of one optimizer, at the batches at which each has reached the target."""
    seeds = [("lamb", 128, "result", 100, 25), ("lamb", 128, "result", 100, 50), ("lamb", 256, "result", 50, 20)]
    more = [("lamb", 512, "result", 25, 20), ("lamb", 1024, "result", 12, 12), ("lamb", 1024, "result", 12, "")]
    others = [("adamw", 128, "result", 100, 90), ("lamb", 64, "search", 200, 10)]
    found = curve(table(results(*others, *seeds, *more)))
    assert dict(found.points) == pytest.approx({128: 3.0, 256: 3.2, 512: 6.4})


@pytest.mark.parametrize("gpus", [1, 2, 16, 1024])
def test_a_choice_is_the_best_of_whole_plans(gpus, table):
    """Each with the same batch and the epochs that this one needs."""
    options, config, cluster = read(PLAN)
    points = curve(table())
    given = {"num_images": options.num_images, "hours_per_failure": FAILURES}
    made = make_plan(at_target(config, points, num_images=options.num_images), cluster, **given)
    chosen = {one.gpus: one for one in choices(config, made, points, **given)}
    times = {}
    for batch in sorted({256, 512, 1024, 2048, 4096, chosen[gpus].batch}):
        if batch < gpus:
            continue
        at = replace(config, data=replace(config.data, global_batch_size=batch))
        plan = make_plan(at, replace(cluster, ranks=gpus), **given)
        assert plan.config.data.global_batch_size == batch
        at = at_target(plan.config, points, num_images=options.num_images)
        times[batch] = make_plan(at, replace(cluster, ranks=gpus), **given).failures.seconds
    assert min(times, key=lambda batch: times[batch]) == chosen[gpus].batch
    tolerance = 1e-12 if gpus < 1024 else 1e-3  # passes of 4 images are scaled from those of 64
    assert chosen[gpus].seconds == pytest.approx(times[chosen[gpus].batch], rel=tolerance)
    assert chosen[gpus].epochs == points.epochs(chosen[gpus].batch)


def test_the_cheapest_and_the_fastest_are_printed_with_an_interval(table, capsys):
    words = [*PLAN, "--target", table(), "--price-per-gpu-hour", "2"]
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    found = {one["gpus"]: one for one in made["target"]}
    assert set(found) == {2**k for k in range(13)}  # a global batch of 4096 has no image for more
    assert main(words) == 0
    said = capsys.readouterr().out
    factor = curve(table()).factor
    assert f"the other points give the epochs of one of them within a factor of {factor:.2f}" in said
    for name, key in (
        ("cheapest", lambda one: one["gpus"] * one["seconds"]),
        ("fastest", lambda one: one["seconds"]),
    ):
        best = min(found.values(), key=key)
        hours, s = best["seconds"] / HOUR, "s" * (best["gpus"] > 1)
        assert (
            f"{name}: {best['gpus']} GPU{s}, global batch {best['batch']}: {hours:.2f} h, failures included, price "
            f"{2 * best['gpus'] * hours:,.2f}; expect {0.98 * hours / factor:.2f} to {5.35 * hours * factor:.2f} h\n"
        ) in said
    assert made["run"]["training"] == pytest.approx(made["step"]["total"] * math.ceil(11 * 10000 / 512))


def test_the_published_points_are_said_to_be_of_another_model(capsys):
    assert main([*PLAN, "--target", "lamb", "--epochs", "3"]) == 0
    assert "note: MLPerf's points are of other models; the plan's own epochs at its batch " in capsys.readouterr().out


MISTAKES = {
    "lamp": "--target is lamp: expected lars, lamb, or a CSV file with the columns batch and epochs, or batch and ",
    "batch,hours\n1,2\n": "which has no rows with steps: expected lars, lamb, or a CSV file with the columns batch and",
    "size,epochs\n1,2\n": "which has no rows with batch: expected lars, lamb, or a CSV file with the columns batch and",
    "batch,epochs\n256,1\n512,2\n": "with 2 batches: expected at least 3 that reach it.",
    "batch,epochs\n256,1\n256,2\n512,2\n": "in which batch 256 follows 256: they must rise.",
    "batch,epochs\n512,1\n256,2\n1024,2\n": "in which batch 256 follows 512: they must rise.",
    "batch,epochs\n256,1\n512,0\n1024,2\n": "with '0' as epochs: expected a number above 0.",
    "batch,epochs\n256,1\n512,nan\n1024,2\n": "with 'nan' as epochs: expected a number above 0.",
    "batch,steps\n256,1\n512,\n1024,2\n": "with '' as steps: expected a number above 0.",
    "batch,epochs\n1024,1\n2048,2\n4096,3\n": "--global-batch is 512, and --target ",
    results(("adamw", 128, "result", 9, 9)): "without a result of --optim.name lamb: it has adamw.",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_one_sentence(text, table, capsys):
    assert main([*PLAN, "--target", table(text) if "\n" in text else text]) == 2
    said = capsys.readouterr()
    assert MISTAKES[text] in said.err and said.err.count("\n") == 1 and said.err.count(". ") == 0 and not said.out


def test_replicas_that_no_batch_of_the_points_can_feed(table, capsys):
    """400 replicas make batches of 400 and 800."""
    words = [*PLAN, "--gpus", "2000", "--parallel.sequence", "5", "--run.precision", "fp32"]
    assert main([*words, "--target", table("batch,epochs\n450,1\n512,2\n599,3\n")]) == 2
    said = capsys.readouterr().err
    assert "--gpus is 2000, and no number of GPUs can make a batch between those of --target" in said


def test_two_questions_at_once_are_refused(table, capsys):
    assert main([*PLAN, "--target", table(), "--search"]) == 2
    assert "and --search, which compares steps: leave one out." in capsys.readouterr().err
    assert main([*PLAN, "--target", table(), "--epochs", "3"]) == 2
    assert "--epochs is 3, and --target " in capsys.readouterr().err
