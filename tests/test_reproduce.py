"""`largebatch.reproduce`: images, searches, trials, resume, table and picture."""

import csv
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from largebatch.assembly import (
    Images,
    assemble,
    build_eval_loader,
    build_model,
    build_plan,
    build_replica,
    open_train_loader,
)
from largebatch.config import load
from largebatch.data.sources import open_source
from largebatch.ranks.single import Single
from largebatch.reproduce import images, picture, search, table, trial
from largebatch.reproduce.__main__ import main
from largebatch.reproduce.contenders import CONTENDERS
from largebatch.reproduce.experiment import Experiment, Trial, digits, every_fifth, quick
from largebatch.reproduce.results import Journal

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
TINY = "--batches 512 --optimizers lamb adamw --epochs 1 --rates 3 --seeds 2 --target 10".split()
FILES = ("results.csv", "table.md", "picture.png")


def opened() -> Images:
    return Images(*(open_source("digits", split=split).for_classes(10) for split in ("train", "validation")))


# -- trials --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hflip", [0.0, 0.5])
def test_images_from_memory_are_those_of_the_loaders(hflip):
    """To the bit: over an epoch and into the next one, with windows that reach out of the image."""
    experiment = digits()
    config = replace(experiment, data=replace(experiment.data, hflip=hflip)).config(Trial("lamb", 512, 0.01, seed=3))
    index, comm, model = opened(), Single(), build_model(config, CPU, weights=None)
    plan, prepared = build_plan(config, index.train), images.Preparation(config, model)
    pixels = images.Pixels(index.train, config.data.crop_padding)
    mine = images.training_batches(1, pixels=pixels, plan=plan, config=config, preparation=prepared)
    parts = dict(model=model, index=index.train, plan=plan, device=CPU, img_size=config.model.img_size)
    loader = open_train_loader(config, comm, 1, **parts)
    for batch, expected, _ in zip(mine, loader, range(3)):
        assert (batch.step, batch.number) == (expected.step, expected.number)
        assert torch.equal(batch.labels, expected.labels) and torch.equal(batch.images, expected.images)
    loader.close()
    held_out = build_eval_loader(config, comm, model=model, index=index.held_out, device=CPU)
    found = images.evaluation_batches(images.Pixels(index.held_out, 4), config=config, preparation=prepared)
    for batch, expected in zip(found, held_out, strict=True):
        assert torch.equal(batch.images, expected.images) and torch.equal(batch.labels, expected.labels)
    held_out.close()


def test_a_trial_is_the_run_of_its_config():
    """As `largebatch.train` puts it together, with the loaders: the same accuracies and losses, to the bit."""
    config = replace(digits(), epochs=2).config(Trial("lamb", 256, 0.02, seed=1))
    found = trial.run(config, split=None)
    comm, record, threads = Single(), trial.Record(lambda: False), torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = assemble(config, build_replica(config, comm, CPU, passes=1), CPU, images=opened(), signals=None)
    trainer.hooks = [record]
    trainer.fit()
    trainer.eval_batches.close()
    torch.set_num_threads(threads)
    assert found.steps == [row["step"] for row in record.rows] == [6, 12]
    assert found.losses == [row["loss"] for row in record.rows] and found.losses[1] < found.losses[0]
    assert found.accuracies == [row["top1"] for row in record.rows]
    assert found.train_losses == [row["train_loss"] for row in record.rows]


def test_a_search_sees_no_held_out_image_and_scores_images_on_which_it_does_not_train():
    config = replace(digits(), epochs=1).config(Trial("lamb", 1437, 0.01, seed=0))
    trained, scored = trial.images_of_search("digits", config.data.crop_padding, every_fifth)
    everything, _ = trial.images("digits", config.data.crop_padding)
    assert (len(trained), len(scored)) == (1149, 288)
    rows = sorted(image.tobytes() for part in (trained, scored) for image in part.bordered)
    assert rows == sorted(image.tobytes() for image in everything.bordered)
    trainer = trial.build(config, Single(), split=every_fifth, hooks=[trial.Record(lambda: False)])
    assert trainer.plan.num_steps == 1 and trainer.plan.num_samples == 1149  # as many steps of the same batch
    assert sum(len(batch.labels) for batch in trainer.eval_batches) == 288
    seen = np.unique(trainer.plan.samples(0, 1437)[1])
    assert len(seen) == 1149


def test_a_trial_that_diverges_has_the_lowest_score_and_one_that_nobody_wants_has_none():
    experiment = replace(digits(), epochs=4)
    diverged = trial.run(experiment.config(Trial("sgd", 1437, 1e30, seed=0)), split=every_fifth)
    assert diverged.diverged and diverged.accuracy == 0.0 and diverged.score < (0.0, -100.0)
    wanted = iter([False, True])
    config = experiment.config(Trial("sgd", 1437, 0.1, seed=0))
    assert trial.run(config, split=every_fifth, given_up=lambda: next(wanted)) is None


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_trains_with_every_batch(name):
    """The config is one that `largebatch.train` takes, and differs from another contender's in the optimizer alone."""
    for experiment in (digits(), quick(digits())):
        for batch in experiment.batches:
            config = experiment.config(Trial(name, batch, 0.01, seed=1))
            other = experiment.config(Trial("sgd", batch, 0.01, seed=1))
            assert replace(config, optim=other.optim) == other and config.optim.lr == 0.01
    short = replace(digits(), epochs=2).config(Trial(name, 1437, CONTENDERS[name].rate, seed=1))
    assert trial.run(short, split=None).losses[-1] < 2.6


# -- searches ------------------------------------------------------------------------------------------------


def searched(middle: float, budget: int, score) -> list[float]:
    scores: dict[float, tuple[float, float]] = {}
    tried = []
    while rates := [rate for rate in search.tried_rates(middle, budget, scores) if rate not in scores]:
        tried += rates
        scores |= {rate: score(rate) for rate in rates}
    assert tried == search.tried_rates(middle, budget, scores)
    return tried


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("peak", [1e-6, 0.003, 0.04, 0.11, 30.0])
def test_every_search_has_the_same_budget_and_comes_closer_to_the_best(budget, peak):
    """Wherever the best rate lies; with enough trials, the best that was tried lies within a factor of 2."""

    def score(rate: float) -> tuple[float, float]:
        return -abs(math.log(rate / peak)), 0.0

    tried = searched(0.04, budget, score)
    assert len(tried) == len(set(tried)) == budget
    best = search.best_rate({rate: score(rate) for rate in tried})
    assert best == min(tried, key=lambda rate: abs(math.log(rate / peak)))
    if budget >= 5 and 0.003 <= peak <= 0.2 or budget == 12:
        assert 0.5 <= best / peak <= 2


def test_a_rate_beyond_the_edge_is_next_and_otherwise_the_wider_gap():
    assert search.grid(0.04, 5) == [0.01, 0.04, 0.16]
    falling = {0.01: (9.0, 0.0), 0.04: (5.0, 0.0), 0.16: (1.0, 0.0)}
    assert search.refined(falling) == 0.0025
    assert search.refined({rate: (-score, rest) for rate, (score, rest) in falling.items()}) == 0.64
    inside = {0.01: (1.0, 0.0), 0.04: (9.0, 0.0), 0.16: (2.0, 0.0)}
    assert search.refined(inside) == 0.08  # two equal gaps: towards the better neighbour
    assert search.refined(inside | {0.08: (3.0, 0.0)}) == 0.02  # the wider gap


def test_equal_accuracies_are_decided_by_the_loss_and_equal_losses_by_the_lower_rate():
    scores = {0.1: (97.0, -0.3), 0.2: (97.0, -0.2), 0.4: (96.9, -0.1)}
    assert search.best_rate(scores) == 0.2
    assert search.best_rate({0.4: (97.0, -0.2), **scores}) == 0.2


# -- the whole program ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reproduce")
    assert main(["digits", *TINY, "--processes", "1", "--output", str(folder)]) == 0
    return folder


def rows_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_each_optimizer_has_the_same_number_of_trials_and_the_best_rate_is_chosen(tiny):
    rows = rows_of(tiny)
    for name in ("lamb", "adamw"):
        searches = [row for row in rows if row["optimizer"] == name and row["purpose"] == "search"]
        results = [row for row in rows if row["optimizer"] == name and row["purpose"] == "result"]
        assert len(searches) == 3 and [row["seed"] for row in searches] == ["0"] * 3
        assert [row["seed"] for row in results] == ["1", "2"]
        best = max(searches, key=lambda row: (float(row["accuracy"]), -float(row["loss"])))
        assert [row["learning_rate"] for row in searches if row["chosen"] == "1"] == [best["learning_rate"]]
        assert {row["learning_rate"] for row in results} == {best["learning_rate"]}
    assert len(rows) == 10


def test_each_trial_keeps_the_config_of_its_run(tiny):
    experiment = replace(digits(), epochs=1)
    for row in rows_of(tiny):
        one = Trial(row["optimizer"], 512, float(row["learning_rate"]), int(row["seed"]))
        file = tiny / "trials" / f"{one.name}.yaml"
        assert load(str(file)) == experiment.config(one)
        result = json.loads(file.with_suffix(".json").read_text())
        assert float(row["accuracy"]) == round(result["accuracies"][-1], 4)


def test_table_and_picture_show_the_figures_of_the_csv(tiny):
    experiment = replace(digits(), batches=(512,), epochs=1, optimizers=("lamb", "adamw"), seeds=2, target=10.0)
    rows, text = rows_of(tiny), (tiny / "table.md").read_text()
    drawn = picture.figure(experiment, table.cells(rows)).axes
    for name in experiment.optimizers:
        results = [row for row in rows if row["optimizer"] == name and row["purpose"] == "result"]
        accuracies = [float(row["accuracy"]) for row in results]
        mean, spread = statistics.fmean(accuracies), statistics.stdev(accuracies)
        assert f"{mean:.1f} ± {spread:.1f}" in text and f" {float(results[0]['learning_rate']):g} " in text
        (line,) = (line for line in drawn[0].lines if line.get_gid() == name)
        assert line.get_ydata().tolist() == [mean] and abs(math.log(line.get_xdata()[0] / 512)) < 0.2
        (bars,) = (bars for bars in drawn[0].collections if bars.get_gid() == name)
        assert bars.get_segments()[0][:, 1].tolist() == [mean - spread, mean + spread]
        (line,) = (line for line in drawn[1].lines if line.get_gid() == name)
        assert line.get_ydata().tolist() == [statistics.fmean(float(row["steps_to_target"]) for row in results)]
    assert (tiny / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_an_experiment_that_was_killed_goes_on_to_the_same_bytes(tiny, tmp_path, capsys):
    """Some trials are missing, in a search and after it; those that are there are not made again."""
    (tmp_path / "trials").mkdir()
    files = sorted((tiny / "trials").iterdir())
    kept = [file for file in files if "adamw" in file.name and "seed2" not in file.name]
    kept += [file for file in files if "lamb_batch512_lr0.02_seed0" in file.name]
    for file in kept:
        (tmp_path / "trials" / file.name).write_bytes(file.read_bytes())
    before = {file.name: (tmp_path / "trials" / file.name).stat().st_mtime_ns for file in kept}
    assert main(["digits", *TINY, "--processes", "1", "--output", str(tmp_path)]) == 0
    assert "5 trials are there" in capsys.readouterr().err
    assert {name: (tmp_path / "trials" / name).stat().st_mtime_ns for name in before} == before
    assert [(tmp_path / name).read_bytes() for name in FILES] == [(tiny / name).read_bytes() for name in FILES]
    assert sorted(file.name for file in (tmp_path / "trials").iterdir()) == [file.name for file in files]


def test_a_trial_of_another_size_is_refused(tiny, capsys):
    assert main(["digits", *TINY, "--epochs", "2", "--processes", "1", "--output", str(tiny)]) == 2
    assert "is of a trial whose run.duration was another one: choose another --output" in capsys.readouterr().err


@pytest.mark.cluster
def test_two_processes_killed_and_started_again_give_the_same_bytes(tiny, tmp_path):
    command = [sys.executable, "-m", "largebatch.reproduce", "digits", *TINY, "--output", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 120
    while len([*tmp_path.glob("trials/*.json")]) < 2:
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.read()  # the last process that holds it has ended
    assert not (tmp_path / "results.csv").exists()
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    assert [(tmp_path / name).read_bytes() for name in FILES] == [(tiny / name).read_bytes() for name in FILES]


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("digits --data x", "--data is x, and the digits are built in: leave it out, or choose fashion."),
        ("fashion --data nowhere", "nowhere has no IDX files of Fashion-MNIST: `apt-get download"),
        ("fashion --epochs 3", "--epochs is for the digits: the sizes of fashion were written down beforehand."),
        ("fashion --minutes 0", "--minutes is 0.0: expected at least 1."),
        ("digits --rates 0", "--rates is 0: expected at least 1."),
        ("digits --seeds -1", "--seeds is -1: expected at least 1."),
        ("digits --optimizers lamb adam", "--optimizers has 'adam': expected some of sgd, adamw, lars, lamb"),
        ("digits --batches 0", "--batches has 0: expected at least 1."),
        ("digits --batches 2000 --processes 1", "--batches has 2000, and there are 1437 training images: expected at"),
    ],
)
def test_mistakes_are_one_sentence(line, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    errors = [said for said in capsys.readouterr().err.splitlines() if "are there in" not in said]
    assert len(errors) == 1 and errors[0].startswith("largebatch: ") and sentence in errors[0], errors


@pytest.mark.evidence
def test_quick_shows_every_optimizer_far_above_chance(tmp_path):
    command = [sys.executable, "-m", "largebatch", "reproduce", "digits", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=True)
    experiment: Experiment = quick(digits())
    found = table.cells(rows_of(tmp_path))
    assert {(cell.optimizer, cell.batch) for cell in found} == {*experiment.cells}
    assert len(rows_of(tmp_path)) == len([*tmp_path.glob("trials/*.json")])
    assert min(cell.mean for cell in found if cell.batch == 128) > 20  # chance is 10
    assert all(CONTENDERS[name].label in done.stdout for name in experiment.optimizers)
    journal = Journal(tmp_path, experiment)
    journal.read()
    assert not journal.next()
    assert sum(map(experiment.images, journal.results)) == experiment.total(journal.results)
