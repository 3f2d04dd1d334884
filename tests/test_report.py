"""What is found about two runs: the first option, version, image, step and tensor in which they differ."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from largebatch import checkpoint
from largebatch.config import TrainConfig, dump
from largebatch.engine import TrainState
from largebatch.optim import Lamb
from largebatch.report.__main__ import main
from largebatch.report.tables import STEP_COLUMNS, Table

VERSIONS = (
    "2026-11-23 10:00:00 Python 3.11.7, the sources of largebatch 0123abcd, torch 2.13.0+cpu, timm 1.0.31, "
    "DALI 2.4.0 (nvidia-dali-cuda120)\n"
)
SAME = {"options", "versions", "images", "steps", "evaluations", "tensors"}


def make_run(folder: Path) -> Path:
    """A run of three steps of 16 of 40 images, with checkpoints of the last two."""
    folder.mkdir()
    config = TrainConfig(recipe="quickstart")
    config = replace(config, data=replace(config.data, global_batch_size=16, micro_batch_size=8))
    config = replace(config, run=replace(config.run, duration="3 steps", folder=str(folder)))
    (folder / "config.yaml").write_text(dump(config))
    (folder / "log.txt").write_text(VERSIONS)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = Lamb(model.parameters(), lr=0.1, impl="eager")
    table = Table(folder / "steps.csv", STEP_COLUMNS)
    table.open(last_step=0)
    for step in (1, 2, 3):
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        row = {"step": step, "epoch": 16 * step / 40, "images": 16 * step, "loss": loss.item(), "lr": 0.1}
        table.append(row | {"images_per_s": torch.seed() % 1000})
        torch.manual_seed(step)
        snapshot = checkpoint.take_snapshot(
            model=model,
            optimizer=optimizer,
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            state=TrainState(step=step, images=16 * step),
            config_text=dump(config),
        )
        checkpoint.save(folder, snapshot)
    table.close()
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> list[Path]:
    return [make_run(tmp_path_factory.mktemp("made") / name) for name in ("one", "other")]


@pytest.fixture
def runs(tmp_path, made) -> tuple[Path, Path]:
    """Two copies, which a test may change."""
    one, other = (shutil.copytree(run, tmp_path / run.name) for run in made)
    return one, other


def found(runs: tuple[Path, Path], capsys) -> tuple[int, dict[str, str]]:
    """The exit code, and what is printed about each part that differs."""
    code = main(["diff", *map(str, runs)])
    lines = [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]
    assert {part for _, part, _ in lines} == SAME
    return code, {part: text for verdict, part, text in lines if verdict == "DIFFER"}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, text
    path.write_text(text.replace(old, new))


def test_a_repetition_is_the_same_but_for_its_times_and_its_folder(runs, capsys):
    assert found(runs, capsys) == (0, {})


def test_the_option_and_the_first_image_that_differ(runs, capsys):
    """Another seed: the options say so, and the order of the images is another from the beginning."""
    edit(runs[1] / "config.yaml", "seed: 0", "seed: 1")
    code, differing = found(runs, capsys)
    assert code == 1 and differing.keys() == {"options", "images"}
    assert differing["options"] == "--run.seed 0 and 1"
    assert differing["images"].startswith("first in step 1, place 0: image ")


def test_the_size_of_the_last_batch(runs, capsys):
    edit(runs[1] / "config.yaml", "duration: 3 steps", "duration: 47 images")
    code, differing = found(runs, capsys)
    assert differing["images"] == "first in step 3: 16 and 15 images"


def test_the_versions_of_the_last_start_count(runs, capsys):
    newer = VERSIONS.replace("1.0.31", "1.0.32").replace("cuda120", "cuda130")
    differing = "timm 1.0.32 and 1.0.31, DALI 2.4.0 (nvidia-dali-cuda130) and 2.4.0 (nvidia-dali-cuda120)"
    (runs[0] / "log.txt").write_text(newer + "step 1\n" + VERSIONS)
    assert found(runs, capsys) == (0, {})
    (runs[0] / "log.txt").write_text(VERSIONS + "step 1\n" + newer)
    assert found(runs, capsys) == (1, {"versions": differing})


def test_the_first_step_and_column(runs, capsys):
    """A difference in the last of the nine digits of a cell; empty cells are the same, and so are rows of one alone."""
    lines = (runs[1] / "steps.csv").read_text().splitlines()
    cells = lines[2].split(",")
    column = STEP_COLUMNS.index("loss")
    was = float(cells[column])
    cells[column] = f"{math.nextafter(float(torch.tensor(was)), 9.0) + 1e-7:.9g}"
    (runs[1] / "steps.csv").write_text("\n".join([*lines[:2], ",".join(cells), lines[3]]) + "\n")
    code, differing = found(runs, capsys)
    assert code == 1 and differing == {"steps": f"first in step 2: loss {was:.9g} and {cells[column]}"}
    (runs[1] / "steps.csv").write_text("\n".join([*lines[:2], lines[3]]) + "\n")
    assert found(runs, capsys) == (0, {})


@pytest.mark.parametrize("place", ["weight", "exp_avg of parameter 1", "the sign of a zero"])
def test_the_first_tensor_and_the_oldest_step(runs, capsys, place):
    """One number of step 2, and of step 3, whose checkpoint is newer."""
    for step in (3, 2):
        changed(runs[1], step, place)
        if place == "the sign of a zero":
            changed(runs[0], step, place, zero=0.0)
    code, differing = found(runs, capsys)
    what = {
        "weight": "weight in 1 of 18 numbers, by up to 0.5",
        "exp_avg of parameter 1": "exp_avg of parameter 1 in 1 of 3 numbers, by up to 0.5",
        "the sign of a zero": "weight in 0 of 18 numbers, by up to 0",
    }
    assert code == 1 and differing == {"tensors": f"first after step 2: {what[place]}"}


def changed(folder: Path, step: int, place: str, *, zero: float = -0.0) -> None:
    """Write the checkpoint of a step again, with one number changed."""
    path = checkpoint.checkpoints(folder)[3 - step]
    model = nn.Linear(6, 3)
    optimizer = Lamb(model.parameters(), lr=0.1, impl="eager")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = checkpoint.load(path, model=model, optimizer=optimizer, scaler=scaler)
    if place == "weight":
        model.weight.data[1, 2] += 0.5
    elif place == "the sign of a zero":
        model.weight.data[1, 2] = zero
    else:
        optimizer.state[model.bias]["exp_avg"][0] += 0.5
    shutil.rmtree(path)
    snapshot = checkpoint.take_snapshot(
        model=model, optimizer=optimizer, scaler=scaler, state=state, config_text="recipe: quickstart"
    )
    checkpoint.save(folder, snapshot)


def test_a_damaged_checkpoint_is_refused(runs, capsys):
    with open(checkpoint.checkpoints(runs[1])[0] / "model.safetensors", "r+b") as file:
        file.write(b"\xff")
    assert main(["diff", *map(str, runs)]) == 2
    assert "model.safetensors has changed since it was written; remove it" in capsys.readouterr().err


def test_a_folder_of_no_run_is_one_sentence(tmp_path, runs, capsys):
    assert main(["diff", str(runs[0]), str(tmp_path)]) == 2
    assert f"largebatch: {tmp_path} is not a run folder: expected a config.yaml in it" in capsys.readouterr().err


def test_what_cannot_be_compared_is_said(runs, capsys):
    """A run that was killed before its first checkpoint, and that shuffles in windows, whose sizes are not known."""
    shutil.rmtree(runs[1] / "checkpoints")
    edit(runs[1] / "config.yaml", "shuffle_window: 0", "shuffle_window: 2")
    (runs[1] / "steps.csv").unlink()
    assert main(["diff", *map(str, runs)]) == 1
    assert capsys.readouterr().out == (
        "DIFFER   options      --data.shuffle_window 0 and 2\n"
        "same     versions     5 packages\n"
        "unknown  images       a run has no row in steps.csv, or --data.shuffle_window or --augment.repeats is set\n"
        "unknown  steps        no row of the same step (3 and 0 rows)\n"
        "unknown  evaluations  no row of the same step (0 and 0 rows)\n"
        "unknown  tensors      no checkpoint of the same step ([2, 3] and [])\n"
    )


BAD = "\x1b]0;title\x07\x1b[2J\nsame     tensors      forged"
HISTORY = {"time": 1.0, "command": BAD, "launcher": BAD, "ranks": 2, "hosts": [BAD, BAD], "commit": BAD}
FOREIGN = {  # a file of somebody else's run, and what is added to it, or takes the place of a part of it
    "an option that is unknown": ("config.yaml", "recipe: quickstart", f"recipe: quickstart\n{json.dumps(BAD)}: 1"),
    "a value that is refused": ("config.yaml", "duration: 3 steps", f"duration: {json.dumps(BAD)}"),
    "a recipe": ("config.yaml", "recipe: quickstart", f"recipe: {json.dumps(BAD)}"),
    "the place of the images": ("config.yaml", "path: digits", f"path: {json.dumps(BAD)}"),
    "a version": ("log.txt", "timm 1.0.31", f"timm 2.{BAD.splitlines()[0]}"),
    "a column": ("steps.csv", "trust_min", '"' + BAD + '"'),
    "a start": ("starts.jsonl", "", json.dumps({"start": HISTORY}) + "\n"),
    "starts of other kinds": ("starts.jsonl", "", json.dumps({"start": HISTORY | {"hosts": 5, "time": 1e300}}) + "\n"),
    "predictions": ("predictions.csv", "", f'sample,{json.dumps(BAD)}\n1,2\n'),
    "a place that no run reaches": ("steps.csv", "", ",".join(["1e308"] * 17) + "\n"),
    "an epoch of more images than there can be": ("steps.csv", "", "9,1e-300,8" + ",1" * 14 + "\n"),
    "an epoch without images": ("steps.csv", "", "9,1e14,8" + ",1" * 14 + "\n"),
    "bytes that are no text, in the log": ("log.txt", "timm 1.0.31", "timm 1.0.31\udcff"),
    "bytes that are no text, in a table": ("steps.csv", "step,", "step,\udcff,"),
    "bytes that are no text, in the history": ("starts.jsonl", "", "\udcff\n"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_the_run_of_somebody_else_commands_no_terminal(runs, capsys, caplog, what):
    """Each text of a foreign folder: the page is written or refused, and nothing raw is printed or logged."""
    name, old, new = FOREIGN[what]
    file = runs[1] / name
    text = file.read_text() if file.exists() else ""
    file.write_bytes((text.replace(old, new, 1) if old else text + new).encode("utf-8", "surrogateescape"))
    assert file.read_bytes() != text.encode()
    for command in ([str(runs[1])], ["diff", *map(str, runs)]):
        assert main(command) in (0, 1, 2)
        told = capsys.readouterr()
        lines = (told.out + told.err + caplog.text).splitlines()
        begins = ("largebatch: ", "DIFFER  ", "same  ", "unknown  ", "    ", str(runs[1]))
        assert all(line.startswith(begins) and line.isprintable() for line in lines), lines
        assert not any(line.startswith("same") and "forged" in line for line in lines)


def test_a_folder_whose_name_commands_a_terminal(runs, tmp_path, capsys):
    odd = runs[1].rename(tmp_path / BAD)
    assert main([str(odd)]) == 0 and main([str(odd / "none")]) == 2
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err and "\\x1b]0;title" in told.out and "\\x1b]0;title" in told.err
