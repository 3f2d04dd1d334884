"""`largebatch.reproduce fashion`: its stages, its tests of hypotheses, and a small size of it from end to end."""

import collections
import csv
import functools
import gzip
import itertools
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from largebatch.assembly import Images, build_eval_loader, build_model, build_plan, open_train_loader
from largebatch.config import DataConfig
from largebatch.data.sources import open_source
from largebatch.plan.target import curve_of
from largebatch.ranks.single import Single
from largebatch.reproduce import fashion, fashion_picture, hypotheses, images, trial
from largebatch.reproduce.__main__ import main, reproduce
from largebatch.reproduce.fashion import Fashion, Run
from largebatch.reproduce.hypotheses import Found, Paired
from largebatch.reproduce.results import Journal, Result

ROOT = Path(__file__).parents[1]
STUDY = Fashion(DataConfig(path="data"))
RATES = {"adamw": 0.008, "lamb": 0.03, "muon": 0.016}


def result(accuracy: float, *, steps: int = 100) -> Result:
    return Result([1, steps], [10.0, accuracy], [2.3, 0.5], [2.3, 0.5], False, 1.0, [100.0, 200.0, 400.0, 800.0])


def invented(run: Run, *, reached: int = 50, bf16: float = 0.0) -> Result:
    """Return a result that is best at a rate that grows with the batch; below `reached` epochs, 32,768 is far off."""
    best = RATES[run.contender] * (run.batch / 512) ** 0.3
    accuracy = 89 - 0.7 * math.log2(run.batch / 512) - 4 * abs(math.log10(run.lr / best))
    accuracy -= 20 * (run.batch == 32768 and run.epochs < reached) - bf16 * (run.precision == "bf16")
    return result(accuracy + random.Random(f"{run.name}").gauss(0, 0.1))


@functools.cache
def complete(study: Fashion, **how: float) -> dict[Run, Result]:
    """Make all runs of a study in the order in which they become known; nobody changes what it returns."""
    results: dict[Run, Result] = {}
    totals = []
    while missing := [run for run in study.wanted(results) if run not in results]:
        totals.append(study.total(results))
        results[missing[0]] = invented(missing[0], **how)
    assert sum(map(study.images, results)) == study.total(results) == totals[-1]
    assert totals == sorted(totals)
    return results


# -- the stages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reached, length", [(0, 20), (50, 50), (200, 200), (1000, 200)])
def test_the_length_is_the_shortest_at_which_the_largest_batch_comes_close(reached, length):
    results = complete(STUDY, reached=reached)
    assert STUDY.length(results, "bf16") == Found(STUDY, results).length == length
    tried = {run.epochs for run in results if run.batch == 32768 and run.searches}
    assert tried == {epochs for epochs in STUDY.lengths if epochs <= length}
    alone = [run for run in results if run.epochs < length and run.batch == 32768]
    assert STUDY.total({}) <= STUDY.total(results)
    assert {run.contender for run in alone} <= {"adamw"}


def test_a_rate_that_comes_close_lets_the_other_searches_begin():
    results = complete(STUDY)
    search = STUDY.search(results, "adamw", 32768, 50, "bf16")
    close = [run for run in search if results[run].accuracy >= 79]  # 512 reaches 89
    before = {run: results[run] for run in results if run.epochs < 50}
    assert STUDY.length(before, "bf16") is None and {*STUDY.wanted(before)} - {*before} == {*search[:3]}
    first = before | {close[0]: results[close[0]]}
    assert STUDY.length(first, "bf16") == 50
    grids = {run for name in fashion.OPTIMIZERS for run in STUDY.search(results, name, 32768, 50, "bf16")[:3]}
    assert grids - {close[0]} <= {*STUDY.wanted(first)} - {*before}


def test_every_optimizer_has_as_many_trials_of_a_search_and_as_many_seeds():
    results = complete(STUDY)
    searches = [(name, 512, 20) for name in fashion.CARRIED] + [(name, 32768, 50) for name in fashion.OPTIMIZERS]
    assert [search[:3] for search in Found(STUDY, results).searches()] == searches
    for search in searches:
        runs = STUDY.search(results, *search, "bf16")
        assert len({run.lr for run in runs}) == 6 and {run.seed for run in runs} == {0}
    counted = {key: len(runs) for key, runs in Found(STUDY, results).runs.items()}
    ends = {("tuned", name, 32768): 5 for name in fashion.OPTIMIZERS}
    ends |= {("tuned", name, 512): 5 for name in fashion.CARRIED}
    carried = {("carried", name, batch): 3 for name in fashion.CARRIED for batch in (2048, 8192)}
    carried |= {("carried", name, 32768): 5 for name in fashion.CARRIED}
    others = {("longer", name, 32768): 3 for name in fashion.CARRIED}
    others |= {("half warm-up", name, 32768): 1 for name in fashion.CARRIED}
    assert counted == ends | carried | others
    seeds = {run.seed for runs in Found(STUDY, results).runs.values() for run in runs}
    assert seeds == {1, 2, 3, 4, 5}


def test_a_carried_rate_is_that_of_the_smallest_batch_times_the_root_of_the_quotient():
    results = complete(STUDY)
    found = Found(STUDY, results).runs
    for name in fashion.CARRIED:
        tuned = found["tuned", name, 512][0].lr
        best = max(STUDY.search(results, name, 512, 20, "bf16"), key=lambda run: results[run].accuracy)
        assert tuned == best.lr
        for batch, factor in ((2048, 2), (8192, 4), (32768, 8)):
            assert found["carried", name, batch][0].lr == pytest.approx(factor * tuned, rel=5e-3)


@pytest.mark.parametrize("bf16, precision", [(0.0, "bf16"), (0.7, "fp32"), (-0.7, "fp32"), (2.0, "fp32")])
def test_bfloat16_is_used_only_if_six_pairs_of_runs_agree(bf16, precision):
    pairs = STUDY.precision_pairs()
    assert len(pairs) == 12 and [run.precision for run in pairs] == ["fp32", "bf16"] * 6
    assert STUDY.precision({run: result(80.0) for run in pairs[:-1]}) is None
    assert {run.precision for run in complete(STUDY, bf16=bf16) if run not in pairs} == {precision}


def test_one_pair_far_apart_rules_bfloat16_out():
    results = {run: result(80.0) for run in STUDY.precision_pairs()}
    assert STUDY.precision(results) == "bf16"
    results[STUDY.precision_pairs()[1]] = result(81.6)  # the mean differs by 0.27 only
    assert STUDY.precision(results) == "fp32"


def test_all_optimizers_have_the_same_rules_at_each_batch():
    for run in complete(STUDY):
        config = STUDY.config(run)
        steps = run.epochs * 60_000 / run.batch
        (warmup, _), (half_life, _) = config.schedule.warmup.split(), config.optim.second_moment_half_life.split()
        if run.warmup:
            assert config.schedule.warmup == "50 %"
        else:
            assert int(warmup) / run.batch == pytest.approx(min(max(steps / 10, 10), steps / 2))
        assert (half_life, config.optim.weight_decay, config.optim.clip_norm) == ("60000", 0.05, 1.0)
        other = STUDY.config(replace(run, contender="adamw", lr=1.0))
        assert replace(config, optim=other.optim) == other
        assert config.data.global_batch_size == run.batch and config.schedule.name == "cosine"


def test_a_search_is_scored_by_a_tenth_of_each_class():
    labels = np.random.default_rng(0).integers(0, 10, 5000)
    scored = fashion.tenth_of_each_class(labels)
    assert [*np.bincount(labels[scored])] == [math.ceil(count / 10) for count in np.bincount(labels)]


# -- the tests of hypotheses ---------------------------------------------------------------------------------


def test_the_planner_reads_the_epochs_to_the_target_at_each_batch(tmp_path):
    found = Found(STUDY, complete(STUDY))
    hypotheses.write_runs(found, tmp_path)
    config = STUDY.config(found.runs["tuned", "lamb", 512][0])
    curve = curve_of(str(tmp_path / "results.csv"), config, num_images=60_000)
    assert curve.points == [(batch, 50.0) for batch in STUDY.batches]


@pytest.mark.parametrize("seed", range(5))
def test_p_values_and_intervals_are_those_of_scipy(seed):
    values = np.random.default_rng(seed).normal(0.6, 0.4, 5)
    claim = Paired("", [*values], 0.5)
    reference = stats.ttest_1samp(values, 0.5, alternative="greater")
    assert claim.p == pytest.approx(reference.pvalue, rel=1e-12)
    assert claim.interval == pytest.approx(tuple(stats.ttest_1samp(values, 0).confidence_interval(0.95)), rel=1e-12)
    both = Paired("", [*values], 0.5, absolute=True)
    below = stats.ttest_1samp(values, -0.5, alternative="less")
    assert both.p == pytest.approx(min(1, 2 * min(reference.pvalue, below.pvalue)), rel=1e-12)
    assert Paired("", [*-values], 0.5, absolute=True).p == pytest.approx(both.p, rel=1e-12)


def test_holm_corrects_for_the_number_of_hypotheses():
    assert hypotheses.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert hypotheses.holm([0.5, 0.9, 0.8, 0.7]) == [1.0] * 4


def test_a_claim_holds_is_refuted_or_open():
    def said(*values: float, threshold: float, absolute: bool = False) -> str:
        claim = Paired("", values, threshold, absolute)
        return hypotheses.answer(claim.p, [claim])

    assert said(2.0, 2.1, 1.9, threshold=1.0) == "holds"
    assert said(0.0, 0.1, -0.1, threshold=1.0) == "refuted"
    assert said(-0.5, 1.6, 0.7, threshold=1.0) == "open"
    assert said(-2.0, -2.1, -1.9, threshold=1.0) == "refuted"
    assert said(-2.0, -2.1, -1.9, threshold=1.0, absolute=True) == "holds"
    assert said(0.0, 0.1, -0.1, threshold=1.0, absolute=True) == "refuted"


def planted(**shifts: float) -> Found:
    """Return a finished study in which all runs have 80 %, but for shifts by purpose and optimizer."""
    results = complete(STUDY)
    runs = Found(STUDY, results).runs
    planned = dict(results)
    for (purpose, name, batch), several in runs.items():
        shift = shifts.get(f"{purpose}_{name}_{batch}", 0.0)
        planned |= {run: result(80 + shift + 0.1 * run.seed + 0.02 * (run.seed % 2) * len(name)) for run in several}
    return Found(STUDY, planned)


@pytest.mark.parametrize(
    "name, shifts, answers",
    [
        ("H1", {}, "refuted"),
        ("H1", {"tuned_lamb_32768": 1.0}, "holds"),
        ("H1", {"tuned_lamb_32768": -1.0}, "holds"),
        ("H2", {"carried_adamw_32768": -4.0, "carried_lamb_32768": -2.0}, "holds"),
        ("H2", {"carried_adamw_32768": -2.0, "carried_lamb_32768": -4.0}, "refuted"),
        ("H2", {"carried_adamw_32768": -4.0, "carried_lamb_32768": -2.0, "tuned_lamb_512": 2.0}, "refuted"),
        ("H3", {"tuned_muon_32768": 1.0}, "holds"),
        ("H3", {"tuned_muon_32768": 1.0, "tuned_lamb_32768": 1.0}, "refuted"),
        ("H4", {}, "holds"),
        ("H4", {"longer_adamw_32768": -2.0}, "refuted"),
        ("H4", {"longer_lamb_32768": 5.0}, "holds"),
    ],
)
def test_each_hypothesis_reads_the_runs_that_it_is_about(name, shifts, answers):
    _, claims = planted(**shifts).hypotheses()[name]
    assert hypotheses.answer(max(claim.p for claim in claims), claims) == answers


def test_the_bend_lies_where_the_carried_rate_has_lost_a_point():
    """Between 2,048, where 0.595 points are lost, and 8,192, where 2.595 are."""
    found = planted(carried_lamb_2048=-0.5, carried_lamb_8192=-2.5, carried_lamb_32768=-5.0)
    assert found.bend("lamb") == pytest.approx(2048 * 4 ** ((1 - 0.5 - 0.284 / 3) / 2))
    assert found.bend("adamw") == math.inf


def test_a_sag_is_the_largest_share_of_the_way_back_to_a_guess():
    uniform = math.log(10)
    losses = [uniform, 1.0, 0.5, 0.5 + 0.3 * (uniform - 0.5), 0.4, 0.4 + 0.2 * (uniform - 0.4), 0.3]
    assert hypotheses.sag(losses) == (pytest.approx(0.3), 3)
    assert hypotheses.sag([3.0, 2.0, 1.0]) == (0.0, 0) == hypotheses.sag([])
    assert hypotheses.sag([3.0, 3.0 + 0.5 * uniform / 3])[0] == pytest.approx(0.5)


def test_a_run_that_diverged_reached_nothing():
    reached = result(80.0)
    assert reached.steps_to(75.0) == 100 and replace(reached, diverged=True).steps_to(75.0) is None


def test_the_table_names_each_run_and_each_answer(tmp_path):
    results = complete(STUDY)
    text = hypotheses.write(Found(STUDY, results), tmp_path)
    assert (tmp_path / "table.md").read_text() == f"{text}\n"
    fashion_picture.draw(tmp_path / "picture.png", Found(STUDY, results))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "results.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == len(results) and {row["optimizer"] for row in rows} == {*fashion.OPTIMIZERS}
    assert sorted(float(row["accuracy"]) for row in rows) == sorted(round(one.accuracy, 4) for one in results.values())
    assert all(f"H{number}: " in text for number in (1, 2, 3, 4))
    purposes = collections.Counter(row["purpose"] for row in rows)
    assert purposes == {"search": len(rows) - 55, "result": 32, "tuned": 15, "longer": 6, "half warm-up": 2}
    with open(tmp_path / "curves.csv", newline="") as file:
        assert len([*csv.DictReader(file)]) == 2 * len(results)
    check_that_the_table_follows(tmp_path, tmp_path / "again")


def check_that_the_table_follows(folder: Path, again: Path) -> None:
    """Write a folder's table.md and results.csv a second time, from its two tables of numbers alone, and compare."""
    again.mkdir()
    hypotheses.write(Found(STUDY, read_back(folder)), again)
    for name in ("table.md", "results.csv"):
        assert (again / name).read_text() == (folder / name).read_text(), name


def read_back(folder: Path) -> dict[Run, Result]:
    curves: dict[str, list[list[float]]] = collections.defaultdict(list)
    with open(folder / "curves.csv", newline="") as file:
        for name, *cells in [*csv.reader(file)][1:]:
            curves[name].append([*map(float, cells)])
    results = {}
    with open(folder / "results.csv", newline="") as file:
        for row in csv.DictReader(file):
            rate, sizes = float(row["learning_rate"]), [int(row[name]) for name in ("seed", "epochs")]
            run = Run(row["optimizer"], int(row["batch"]), rate, *sizes, row["precision"], row["warmup"])
            steps, accuracies, losses, train_losses = [*map(list, zip(*curves[run.name]))] or ([], [], [], [])
            if not (diverged := row["diverged"] == "1"):  # the last values have more digits
                losses[-1], train_losses[-1] = float(row["loss"]), float(row["train_loss"])
            scales = [float(row[f"noise_scale_{number}"] or "nan") for number in (1, 2, 3, 4)]
            results[run] = Result([*map(int, steps)], accuracies, losses, train_losses, diverged, 0.0, scales)
    return results


# -- runs ----------------------------------------------------------------------------------------------------


def write_idx(folder: Path, *, train: int, test: int) -> Path:
    """Write Fashion-MNIST's four files with bright squares, whose place is the class."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name, count in (("train", train), ("t10k", test)):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        pixels = rng.integers(0, 120, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(pixels, labels):
            row, column = divmod(int(label), 4)
            image[9 * row + 1 : 9 * row + 8, 7 * column : 7 * column + 7] += 120
        sizes = np.array([count, 28, 28], dtype=">i4").tobytes()
        images = b"\0\0\x08\x03" + sizes + pixels.tobytes()
        for kind, data in (("images-idx3", images), ("labels-idx1", b"\0\0\x08\x01" + sizes[:4] + labels.tobytes())):
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(data))
    return folder


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> Path:
    return write_idx(tmp_path_factory.mktemp("squares") / "idx", train=600, test=200)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def tiny(folder: Path, **sizes: int) -> Fashion:
    return replace(fashion.quick(fashion.fashion(str(folder))), epoch=600, **sizes)


def test_images_from_memory_are_those_of_the_loaders(squares):
    """At 28 px nothing is resized; windows reach out of the image, half of them are mirrored. To the bit."""
    study = tiny(squares)
    config = study.config(Run("lamb", 512, 0.01, 3, 4, "fp32"))
    index = Images(*(open_source(str(squares), split=split).for_classes(10) for split in ("train", "validation")))
    comm, model = Single(), build_model(config, torch.device("cpu"), weights=None)
    plan, prepared = build_plan(config, index.train), images.Preparation(config, model)
    pixels = images.Pixels(index.train, 2)
    mine = images.training_batches(1, pixels=pixels, plan=plan, config=config, preparation=prepared)
    parts = dict(model=model, index=index.train, plan=plan, device=torch.device("cpu"), img_size=28)
    loader = open_train_loader(config, comm, 1, **parts)
    for batch, expected, _ in zip(mine, loader, range(5)):
        assert torch.equal(batch.labels, expected.labels) and torch.equal(batch.images, expected.images)
    loader.close()
    held_out = build_eval_loader(config, comm, model=model, index=index.held_out, device=torch.device("cpu"))
    found = images.evaluation_batches(images.Pixels(index.held_out, 2), config=config, preparation=prepared)
    for batch, expected in zip(found, held_out, strict=True):
        assert torch.equal(batch.images, expected.images) and torch.equal(batch.labels, expected.labels)
    held_out.close()


def test_the_noise_scale_of_a_run_is_that_of_its_gradients(squares):
    """At a rate of 0 all steps have the same weights: the estimates, by the gradient of each image alone."""
    study = tiny(squares)
    config = study.config(Run("adamw", 512, 0.0, 1, 10, "fp32"))
    config = replace(config, data=replace(config.data, crop_padding=0, hflip=0.0))
    record = trial.Record(lambda: False)
    trainer = trial.build(config, Single(), split=None, hooks=[record.noise, record])
    trainer.fit()
    pixels, _ = trial.images(str(squares), 0)
    prepared = images.Preparation(config, trainer.model).training(pixels.whole(0, 600), np.zeros(600, dtype=bool))
    each = []
    for image, label in zip(prepared, pixels.labels):
        loss = torch.nn.functional.cross_entropy(trainer.model(image[None]), label[None])
        each.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, [*trainer.model.parameters()])]))
    gradients, expected = torch.stack(each).double(), []
    for step in range(11):  # the twelfth is short
        _, samples = trainer.plan.samples(512 * step, 512 * step + 512)
        first, whole = (float(gradients[part].mean(dim=0).square().sum()) for part in (samples[:256], samples))
        expected.append(((512 * whole - 256 * first) / 256, (first - whole) / (1 / 256 - 1 / 512)))
    assert np.array(record.estimates) == pytest.approx(np.array(expected), rel=1e-3)
    quarters = [np.mean(part, axis=0) for part in np.split(np.array(expected), [3, 6, 9])]
    scales = [noise / signal if signal > 0 < noise else math.nan for signal, noise in quarters]
    assert record.noise_scales() == pytest.approx(scales, rel=1e-3, nan_ok=True)


def test_a_killed_experiment_goes_on_to_the_same_bytes(tmp_path, monkeypatch, capsys):
    study = tiny(write_idx(tmp_path / "idx", train=1600, test=100), batches=(512, 768, 1024, 1536), lengths=(2,))
    monkeypatch.setattr("largebatch.reproduce.__main__.sized", lambda options: study)
    words = ["fashion", "--processes", "1", "--output"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    (tmp_path / "part" / "trials").mkdir(parents=True)
    for file in sorted((tmp_path / "whole" / "trials").glob("*.json"))[::2]:
        for one in (file, file.with_suffix(".yaml")):
            (tmp_path / "part" / "trials" / one.name).write_bytes(one.read_bytes())
    assert main([*words, str(tmp_path / "part")]) == 0
    for name in ("results.csv", "curves.csv", "table.md", "picture.png"):
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert "H4: " in capsys.readouterr().out


def test_the_trials_that_were_made_so_far_are_those_of_the_experiment():
    """Of docs/fashion: none is of another config, and the experiment goes on with all of them."""
    folder = ROOT / "docs" / "fashion"
    journal = Journal(folder, fashion.fashion("fashion-mnist"))
    journal.read()
    made = {file.stem for file in (folder / "trials").glob("*.json")}
    assert {run.name for run in journal.results} == made and len(made) >= 20


@pytest.mark.parametrize("stopped", [2, 12, 13, 20])
def test_a_trial_that_is_stopped_goes_on_to_the_same_bits(squares, tmp_path, stopped):
    """From its newest evaluation, if it has made one: after step 6 of 12, or 12 passes and a batch to evaluate."""
    config, file = tiny(squares).config(Run("lamb", 512, 0.01, 3, 10, "fp32")), tmp_path / "state.pt"
    points, run = itertools.count(), functools.partial(trial.run, config, split=None, file=file)
    assert run(given_up=lambda: next(points) == stopped) is None
    assert file.is_file() == (stopped > 12)
    uninterrupted = trial.run(config, split=None)
    assert replace(run(), seconds=0) == replace(uninterrupted, seconds=0)
    again = run()  # has no step to make
    assert replace(again, seconds=0) == replace(uninterrupted, seconds=0)
    file.write_bytes(file.read_bytes()[:1000])  # damaged: from the beginning
    assert replace(run(), seconds=0) == replace(uninterrupted, seconds=0)
    other = replace(config, optim=replace(config.optim, lr=0.02))
    assert trial.run(other, split=None, file=file).losses == trial.run(other, split=None).losses != uninterrupted.losses


@pytest.mark.parametrize("processes", [1, 2])
def test_an_experiment_stops_after_its_minutes(tmp_path, capsys, processes):
    study = tiny(write_idx(tmp_path / "idx", train=1600, test=100), batches=(512, 768, 1024, 1536), lengths=(2,))
    reproduce(study, tmp_path, processes=processes, minutes=0.02)
    assert "the same command goes on with the trials that are missing" in capsys.readouterr().err
    assert not (tmp_path / "table.md").exists()
    reproduce(study, tmp_path, processes=processes, minutes=10)
    assert (tmp_path / "table.md").exists() and not [*tmp_path.glob("trials/*.pt")]


@pytest.mark.evidence
def test_quick_answers_all_hypotheses(tmp_path):
    """On Debian's files where they are, else on squares."""
    folder = Path("/usr/share/datasets/fashion-mnist")
    data = folder if folder.is_dir() else write_idx(tmp_path / "idx", train=6000, test=1000)
    command = [sys.executable, "-m", "largebatch", "reproduce", "fashion", "--quick", "--data", str(data)]
    command += ["--output", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=True)
    assert all(f"H{number}: " in done.stdout for number in (1, 2, 3, 4))
    with open(tmp_path / "out" / "results.csv", newline="") as file:
        tuned = [float(row["accuracy"]) for row in csv.DictReader(file) if row["batch"] == "512" and row["seed"] != "0"]
    assert len(tuned) == 4 and max(tuned) > 25  # chance is 10
