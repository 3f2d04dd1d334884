"""Whole runs from the command line, under every launcher: DALI, Horovod and our LAMB as a user meets them."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from launch import launch
from runs import SMALL, different, distance, rows, weights

from largebatch.report.tables import MEASURED

BATCH = ["--data.global_batch_size", "40", "--data.micro_batch_size", "4"]  # not even on three or four ranks
LENGTH = ["--run.duration", "6 steps", "--run.eval_every", "4 steps"]
AVERAGED = ["--optim.ema_half_life", "36 images"]
RATES = ["--model.proj_drop_rate", "0.1", "--model.drop_path_rate", "0.1", "--augment.reprob", "0.3"]
MIXED = ["--augment.mixup_alpha", "0.2", "--augment.cutmix_alpha", "1"]
DRAWN = ["--augment.auto_augment", "rand-m9-mstd0.5-inc1", "--data.interpolation", "random"]
PADDED = ["--data.crop_padding", "1", "--data.scale", "[0.08, 1]"]
RANDOM = [*RATES, *MIXED, *DRAWN, *PADDED]
TRAIN = ["-m", "largebatch.train"]
VALIDATE = ["-m", "largebatch.validate"]


def train(
    folder: Path, *options: str, ranks: int, launcher: str = "mpirun", fault: str = "", cold: bool = False
) -> tuple[int, str]:
    """fault: one of programs.py."""
    program = ["-m", "tests.mpi.programs", fault] if fault else TRAIN
    arguments = [*SMALL, *BATCH, *LENGTH, *RANDOM, "--run.folder", str(folder), *options]
    return launch([*program, *arguments], ranks=ranks, launcher=launcher, cold=cold)


def trained(
    folder: Path, *options: str, ranks: int, launcher: str = "mpirun", cold: bool = False
) -> dict[str, torch.Tensor]:
    """Train, successfully; the weights of the newest checkpoint."""
    code, output = train(folder, *options, ranks=ranks, launcher=launcher, cold=cold)
    assert code == 0, output
    return weights(folder)


def reproducible(folder: Path, name: str) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows(folder, name)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    trained(folder, *AVERAGED, ranks=3)
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "interrupted"
    trained(folder, *AVERAGED, "--run.max_steps", "3", ranks=3)
    return folder


@pytest.mark.parametrize(
    "ranks, launcher", [(1, "python"), (2, "horovodrun --gloo"), (3, "torchrun"), (4, "horovodrun")]
)
def test_every_launch_form_trains_the_same(tmp_path, uninterrupted, ranks, launcher):
    """With every augmentation, dropout, stochastic depth: ranks, launchers, an average change only the order of sums.

    Two ranks are cold, as a user's: the run that they are compared with has warm ones.
    """
    cold = ranks == 2
    assert distance(weights(uninterrupted), trained(tmp_path, ranks=ranks, launcher=launcher, cold=cold)) < 1e-4


def test_the_log_says_what_ran_and_where(uninterrupted):
    log = (uninterrupted / "log.txt").read_text()
    assert re.search(r"Python 3\.\d+.*, the sources of largebatch [0-9a-f]{8}, torch 2\..*, timm 1\.", log)
    assert len(re.findall(r"rank \d \w+ \(pid \d+\)", log)) == 3
    assert log.count("the 10 micro-batches of a step do not come out even on 3 ranks: some compute 4, others 3, ") == 1
    assert "global batch 40 = 3 ranks × 4 micro-batch × up to 4 passes" in log


def test_resumed_equals_uninterrupted(tmp_path, interrupted, uninterrupted):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    trained(folder, *AVERAGED, ranks=3)
    for name in ("model", "model_ema"):
        ours = weights(folder, name)
        for key, tensor in weights(uninterrupted, name).items():
            assert torch.equal(ours[key], tensor), (name, key)
    assert distance(weights(folder), weights(folder, "model_ema")) > 1e-3
    for name in ("steps.csv", "epochs.csv"):  # the run was interrupted between two evaluations
        assert reproducible(folder, name) == reproducible(uninterrupted, name)
    assert [row["step"] for row in rows(folder, "steps.csv")] == [str(step) for step in range(1, 7)]
    report = ["-m", "largebatch.report", "diff", str(folder), str(uninterrupted)]
    code, output = launch(report, ranks=1, launcher="python")
    assert code == 0 and len(re.findall(r"^same ", output, re.MULTILINE)) == 6, output


def test_a_run_that_has_lost_its_checkpoints_is_refused_and_goes_on_when_they_are_restored(tmp_path, interrupted):
    folder = shutil.copytree(interrupted, tmp_path / "run", symlinks=True)
    tables = [(folder / name).read_bytes() for name in ("steps.csv", "epochs.csv", "starts.jsonl")]
    (kept,) = (folder / "checkpoints").glob("[0-9]*")
    kept.rename(tmp_path / kept.name)
    code, output = train(folder, *AVERAGED, ranks=2)
    sentence = f"{folder}/checkpoints has no checkpoint, but starts.jsonl says that step 3 was saved: restore one to "
    assert code == 2 and output.count(sentence) == 1 and "Traceback" not in output, output
    assert tables == [(folder / name).read_bytes() for name in ("steps.csv", "epochs.csv", "starts.jsonl")]
    (tmp_path / kept.name).rename(kept)
    code, output = train(folder, *AVERAGED, ranks=2)
    assert code == 0 and "resumed at step 3 from" in output, output


def test_resumed_on_two_ranks_of_three(tmp_path, interrupted, uninterrupted):
    """The batches and every draw stay; only the order of sums changes."""
    folder = shutil.copytree(interrupted, tmp_path / "run")
    assert distance(weights(uninterrupted), trained(folder, *AVERAGED, ranks=2)) < 1e-4
    assert distance(weights(uninterrupted, "model_ema"), weights(folder, "model_ema")) < 1e-4
    for run in (folder, uninterrupted):
        best = max(rows(run, "epochs.csv"), key=lambda row: float(row["top1"]))
        assert (run / "checkpoints" / "best").readlink() == Path(f"{int(best['step']):08d}")
    losses = [[float(row["loss"]) for row in rows(run, "steps.csv")] for run in (folder, uninterrupted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    means = [[float(row["train_loss"]) for row in rows(run, "epochs.csv")] for run in (folder, uninterrupted)]
    assert means[0] == pytest.approx(means[1], rel=1e-4)  # the first of steps before and after


def test_schedule_free_stopped_and_resumed_under_another_launcher(tmp_path):
    """The average of the weights is what validate --ema takes."""
    options = ["--optim.name", "schedule_free_adamw", "--schedule.name", "constant", "--schedule.warmup", "3 steps"]
    options += ["--checkpoint.best", "ema_top1", "--optim.lr", "1e-3"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(whole, *options, ranks=1, launcher="python")
    trained(parts, *options, "--run.max_steps", "3", ranks=2)
    trained(parts, *options, ranks=2, launcher="torchrun")
    for name in ("model", "model_ema"):
        both = [weights(folder, name) for folder in (whole, parts)]
        for found in both:  # the gradient of a key's bias is roundings alone, which AdamW divides by their own size
            assert found.pop("blocks.0.attn.qkv.bias").any() and found.pop("blocks.1.attn.qkv.bias").any()
        assert distance(*both) < 1e-5
    assert distance(weights(whole), weights(whole, "model_ema")) > 1e-3
    last = rows(parts, "epochs.csv")[-1]
    code, output = launch([*VALIDATE, str(parts), "--ema"], ranks=1, launcher="python")
    assert code == 0 and f"top-1 {float(last['ema_top1']):.2f} %" in output, output
    assert f"loss {float(last['ema_loss']):.4f}" in output and last["ema_loss"] != last["eval_loss"]


RAMP = ["--schedule.batch_ramp", "12@0,20@24 images,40@64 images", "--run.duration", "200 images"]
SCALED = ["--schedule.scaling", "linear", "--schedule.reference_batch_size", "40", "--schedule.warmup", "30 images"]
FORGETS = ["--optim.second_moment_half_life", "30 images"]


def test_a_batch_ramp_stopped_inside_a_phase_and_resumed_on_other_ranks(tmp_path):
    """Steps of 12, 12, 20, 20, 40, 40, 40 and 16 images: first all on one rank, then five on three and three on two."""
    options = [*RAMP, *SCALED, *FORGETS, "--log.every", "1 image"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    reference = trained(whole, *options, ranks=1, launcher="python")
    trained(parts, *options, "--run.max_steps", "5", ranks=3)
    assert distance(reference, trained(parts, *options, ranks=2)) < 1e-4
    steps = [rows(folder, "steps.csv") for folder in (whole, parts)]
    for column, places in (("images", [12, 24, 44, 64, 104, 144, 184, 200]), ("lr", None), ("loss", None)):
        ours, theirs = ([float(row[column]) for row in table] for table in steps)
        assert ours == pytest.approx(theirs, rel=1e-4 if column == "loss" else 1e-12) and ours == (places or ours)
    said = "second moment: a half-life of 30 images, so beta2 is 0.757858 at a global batch of 12, 0.629961 at a "
    assert (whole / "log.txt").read_text().count(said) == 1
    code, output = train(parts, *options[:-4], "--optim.second_moment_half_life", "31 images", ranks=2)
    assert code == 2 and "--optim.second_moment_half_life '30 images', now '31 images': give the options it" in output


def test_images_that_grow_stopped_inside_a_phase_and_resumed_on_other_ranks(tmp_path):
    """Six steps of 40 images, from the third on of 64 px: first all on one rank, then four on three and two on two."""
    options = ["--schedule.image_sizes", "32@0,64@50 images", "--log.every", "1 image"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    reference = trained(whole, *options, ranks=1, launcher="python")
    trained(parts, *options, "--run.max_steps", "4", ranks=3)
    assert distance(reference, trained(parts, *options, ranks=2)) < 1e-4
    losses = [[float(row["loss"]) for row in rows(folder, "steps.csv")] for folder in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert (whole / "log.txt").read_text().count("from step 3 on, training images have 64 px") == 1
    assert distance(reference, trained(tmp_path / "one size", ranks=1, launcher="python")) > 1e-2
    code, output = train(parts, "--schedule.image_sizes", "32@0,64@90 images", ranks=2)
    assert code == 2 and "--schedule.image_sizes" in output and "Traceback" not in output, output


def test_muon_resumed_in_epochs_on_two_four_and_one_ranks_ends_with_the_bits_of_one(tmp_path):
    """The program rounds gradients, so that any ranks add them up to the same bits."""
    program, threads = ["-m", "tests.mpi.programs", "muon_goes_on"], {"OMP_NUM_THREADS": "1"}
    for folder, steps, ranks, launcher in (
        ("alone", 6, 1, "python"), ("shared", 2, 2, "mpirun"), ("shared", 4, 4, "torchrun"),
        ("shared", 5, 4, "mpirun"), ("shared", 6, 1, "python"),
    ):  # fmt: skip
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [*program, str(tmp_path / folder), str(steps)]
        code, output = launch(command, ranks=ranks, launcher=launcher, environment=threads)
        assert code == 0 and f"to {steps}\n" in output, output
    assert "steps 5 to 6" in output
    assert not different(weights(tmp_path / "alone"), weights(tmp_path / "shared"))
    alone, shared = (torch.load(tmp_path / name / "checkpoints/00000006/state.pt") for name in ("alone", "shared"))
    states = (list(content["optimizer"]["state"].values()) for content in (alone, shared))
    assert all(torch.equal(one[key], other[key]) for one, other in zip(*states, strict=True) for key in one)


def test_validation_from_the_command_line(uninterrupted, tmp_path):
    lines, answers = [], tmp_path / "predictions.csv"
    for ranks, options in ((1, []), (3, ["--predictions", str(answers)]), (2, ["--ema"])):
        code, output = launch([*VALIDATE, str(uninterrupted), *options], ranks=ranks)
        assert code == 0, output
        lines.append(re.search(r"top-1 (.*) %  top-5 .*  loss (.*)  images 360  .*/(.*)\)", output).groups())
    last = {column: float(cell) for column, cell in rows(uninterrupted, "epochs.csv")[-1].items() if cell}
    raw = (f"{last['top1']:.2f}", f"{last['eval_loss']:.4f}", "model.safetensors")
    averaged = (f"{last['ema_top1']:.2f}", f"{last['ema_loss']:.4f}", "model_ema.safetensors")
    assert lines == [raw, raw, averaged] and last["ema_loss"] != last["eval_loss"]
    told = rows(tmp_path, "predictions.csv")
    right, losses = [row["label"] == row["prediction"] for row in told], [float(row["loss"]) for row in told]
    assert [int(row["sample"]) for row in told] == [*range(360)], "each image once, in order"
    assert (f"{100 * sum(right) / 360:.2f}", f"{sum(losses) / 360:.4f}") == raw[:2]


@pytest.mark.parametrize("option", ["--predictions", "--csv"])
def test_a_table_that_cannot_be_written_is_known_before_the_evaluation(uninterrupted, tmp_path, option):
    code, output = launch([*VALIDATE, str(uninterrupted), option, str(tmp_path / "none/table.csv")], ranks=2)
    assert code == 2 and "top-1" not in output, output
    assert f"{tmp_path / 'none'} is no folder that this user can write to" in output, output


def test_every_checkpoint_of_a_run_into_a_table(tmp_path, interrupted, uninterrupted):
    """All of one run; then from another run's folder, as its newest weights."""
    table = ["--csv", str(tmp_path / "table.csv")]
    code, output = launch([*VALIDATE, str(uninterrupted), "--all", *table], ranks=2)
    assert code == 0, output
    geometry = ["--model", "vit_nano32", "--img-size", "64", "--run.precision", "fp32", "--data.eval_batch_size", "99"]
    other = ["-m", "tests.mpi.programs", "validates", *geometry, "--init-from", str(interrupted), *table]
    code, again = launch(other, ranks=1, launcher="python")
    assert code == 0 and again.count("searches True") == 1, again
    *every, last = rows(tmp_path, "table.csv")
    kept = sorted(path.name for path in (uninterrupted / "checkpoints").glob("[0-9]*"))
    assert [Path(row["weights"]).parent.name for row in every] == kept and len(kept) == 2
    (_, top1) = (float(row["top1"]) for row in rows(uninterrupted, "epochs.csv"))
    assert float(every[-1]["top1"]) == pytest.approx(top1, rel=1e-8)  # epochs.csv has nine digits
    assert output.count("images 360  (") == 2 and every[0]["loss"] != every[1]["loss"]
    assert (last["ranks"], last["eval_batch_size"], last["img_size"], last["crop_pct"]) == ("1", "99", "64", "0.875")
    assert "/interrupted/checkpoints/00000003/model.safetensors" in last["weights"]


def test_training_searches_for_garbage_among_new_objects_only(tmp_path):
    """What the start has left is found before."""
    code, output = train(tmp_path, ranks=1, launcher="python", fault="tells_of_searches")
    assert code == 0 and output.count("imports spared True") == 1, output
    assert output.count("searches True, all False, left False") == 1, output


@pytest.mark.needs_compiler
def test_every_lever_at_once_trains_the_same(tmp_path):
    """Recomputed, compiled and compressed, but for rounding; without dropout, whose draws a compiler changes."""
    levers = ["--model.grad_checkpointing", "true", "--run.compile", "true", "--run.compression", "fp16"]
    calm = ["--model.proj_drop_rate", "0", "--model.drop_path_rate", "0", "--run.max_steps", "3"]
    results = []
    for folder, options in ((tmp_path / "plain", calm), (tmp_path / "levers", calm + levers)):
        code, output = launch([*TRAIN, *SMALL, *BATCH, *LENGTH, "--run.folder", str(folder), *options], ranks=2)
        assert code == 0, output
        assert ("compiled: gradients are reduced after the backward pass" in output) == (options != calm)
        results.append((weights(folder), torch.load(folder / "checkpoints" / "00000003" / "state.pt")["scaler"]))
    (plain, no_scale), (pulled, scale) = results
    assert 0 < distance(plain, pulled) < 1e-2 and not no_scale and scale["scale"] > 1


@pytest.mark.needs_compiler
def test_without_a_compiler_on_one_rank_a_run_is_the_plain_one(tmp_path):
    """The rank that has one compiles nothing either: one warning, and every bit is that of --run.compile false."""
    found = []
    for wanted in ("false", "blocks"):
        folder, options = tmp_path / wanted, ["--optim.name", "adamw", "--run.max_steps", "2"]
        fault = "has_no_compiler_on_rank_1"
        code, output = train(folder, *options, "--run.compile", wanted, ranks=2, fault=fault)
        assert code == 0, output
        warned = output.count("--run.compile blocks is not used: rank 1 has no compiler for cpu: expected a C++")
        assert (output.count("is not used"), warned) == ((1, 1) if wanted == "blocks" else (0, 0))
        found.append(weights(folder))
    assert different(*found) == []


def test_a_refused_run_tells_its_reason_though_it_is_told_to_end(tmp_path):
    """As by a launcher, when another rank has ended a moment earlier."""
    code, output = train(tmp_path, "--data", "/no/such/folder", ranks=2, fault="is_told_to_end_when_done")
    assert code == 2 and output.count("There is no folder /no/such/folder") == 1, output
    assert "Traceback" not in output and "stopped before the first step" not in output, output


LONE = ["--model", "timm/resnet18", "--model.proj_drop_rate", "0", "--img-size", "32"]  # 1 x 1 pixels in its last norms


def test_a_run_whose_last_step_has_one_image_ends_when_the_advice_is_followed(tmp_path):
    code, output = train(tmp_path, *LONE, "--run.duration", "25 images", ranks=2)
    (advice,) = re.findall(r"set --run.duration '(.*)'", output)
    assert code == 2
    code, output = train(tmp_path, *LONE, "--run.duration", advice, ranks=2)
    assert code == 0 and "complete, step 1 of 1" in output, output


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--optim.lrr", "1"], "There is no option optim.lrr; did you mean --optim.lr?"),
        (
            ["--data.global_batch_size", "50"],
            "A global batch of 50 is not a whole number of passes of 2 ranks × micro-batch 4",
        ),
        (["--recipe", "vit_b32"], "Recipe vit_b32 has no images of its own: give --data FOLDER"),
        (["--data", "/no/such/folder", "--recipe", "quickstart"], "There is no folder /no/such/folder: expected"),
        (["--init-from", "nowhere.pt"], "--init-from is nowhere.pt: there is no such file or folder."),
        (["--model", "vit_b32", "--data", "/no/such/folder"], "There is no folder /no/such/folder: expected"),
        ([*LONE, "--run.duration", "25 images"], "timm/resnet18 at 32 px sees one value per channel"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code_and_leaves_nothing(tmp_path, options, sentence):
    """A recipe that follows from the data is not known yet, so nothing is said of its options."""
    folder = tmp_path / "new" / "run"
    code, output = train(folder, *options, ranks=2)
    assert code != 0 and "Traceback" not in output and "very slow" not in output
    assert output.count(sentence) == 1 and not folder.parent.exists(), output


@pytest.mark.parametrize("code, sentences", [(0, 0), (3, 1)])
def test_a_program_may_exit_inside_its_session(code, sentences):
    ended, output = launch(["-m", "tests.mpi.programs", "exits", str(code)], ranks=2)
    assert ended == code and "Traceback" not in output, output
    assert ("exits with code 3" in output) == bool(sentences), output


@pytest.mark.parametrize(
    "how, expected, launcher, sentence",
    [
        ("by Ctrl-C", 130, "python", "rank 0 of 1 on .*: ended by Ctrl-C"),
        ("inside", 1, "python", "largebatch: a session is open in this process: use its communicator"),
        ("after", 1, "mpirun", "largebatch: a session has ended in this process, and MPI cannot start again: put all"),
    ],
)
def test_a_session_that_cannot_go_on_says_so_in_one_sentence(how, expected, launcher, sentence):
    code, output = launch(["-m", "tests.mpi.programs", "ends", how], ranks=1, launcher=launcher)
    assert code == expected and re.search(sentence, output), output
    assert "Traceback" not in output and "two sessions" not in output


@pytest.mark.parametrize("ranks, launcher", [(1, "python"), (2, "mpirun"), (3, "mpirun")])
@pytest.mark.parametrize(
    "how, sentence",
    [
        ("third backward", "computed 3 times in a step of 2 passes: give comm.wrap passes=3, or add the losses"),
        ("one rank", "computed 3 times in a step of 2 passes: give comm.wrap passes=3, or add the losses"),
        ("zero_grad", "zero_grad\\(\\) before the step would race with the reduction: call it after the step"),
        ("rates", "largebatch: param group 0 has lr 0.05 on rank 1 and 0.1 on rank 0"),
    ],
)
def test_a_mistake_of_a_loop_is_one_sentence_with_its_line(how, sentence, ranks, launcher):
    if ranks == 1 and how == "rates":
        sentence = ""  # nothing can differ
    code, output = launch(["-m", "tests.mpi.programs", "mistaken", how], ranks=ranks, launcher=launcher)
    assert (code != 0) == bool(sentence) and "Traceback" not in output and "Assertion" not in output, output
    assert code in (0, 2) and len(re.findall(sentence, output)) == 1 or not sentence, output
    if sentence and how != "rates":
        odd = ranks - 1 if how == "one rank" else 0
        assert re.search(rf"largebatch: rank {odd} of {ranks} on .*programs.py, line \d+: ", output), output


def test_a_mistake_found_while_ranks_start_has_the_exit_code_of_a_mistake(tmp_path):
    code, output = train(tmp_path, "--parallel.pipeline", "2", ranks=1, launcher="python")
    assert code == 2 and output.count("start a multiple of 2, such as 2") == 1 and "Traceback" not in output, output


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo", "torchrun"])
def test_a_failing_rank_ends_the_run_and_is_named(tmp_path, launcher):
    """One rank alone loses its images in the middle of the run."""
    code, output = train(tmp_path, ranks=2, launcher=launcher, fault="fails_in_step_2")
    assert code != 0 and "rank 1 of 2" in output and "RuntimeError: planted" in output
