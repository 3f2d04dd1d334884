"""What hooks write while a run goes on, stops, is resumed and goes wrong.

Run as a program, this file trains a small model with all hooks on a single rank; the tests
start it once and look at its report and its folders. The sinks, which need no communication, are tested directly.
"""

import contextlib
import csv
import hashlib
import io
import json
import logging
import math
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from torch.profiler import record_function

from largebatch import checkpoint, hooks, train
from largebatch.assembly.images import hint_at_weights
from largebatch.config import (
    AugmentConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    dump,
)
from largebatch.data.order import Plan
from largebatch.engine import Hook, Trainer, TrainState
from largebatch.files.run_folder import Row, read_rows
from largebatch.hooks import Guards, noise_ramp, noise_scale, sinks
from largebatch.hooks.checkpointing import Writer
from largebatch.hooks.profile import Profile
from largebatch.hooks.sinks import PLAIN_LINES
from largebatch.ranks import Stopped
from largebatch.report import draw, history, panels, tables
from largebatch.train import refuse_lost_checkpoints
from zoo import hub

ROOT = Path(__file__).parents[1]


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# -- whole runs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """The folder in which `python test_hooks.py FOLDER` ran, and its report."""
    folder = tmp_path_factory.mktemp("runs")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/mpi/ranks", "OMP_NUM_THREADS": "1"}
    command = [warm.python(), __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "report.json").read_text())


def test_a_run_writes_every_row_once(runs):
    folder, report = runs
    steps, epochs = read(folder / "whole" / "steps.csv"), read(folder / "whole" / "epochs.csv")
    assert [row["step"] for row in steps] == ["2", "4", "6", "8", "10", "12"]
    assert [row["step"] for row in epochs] == ["4", "8", "12"]
    assert tuple(steps[0]) == tables.STEP_COLUMNS and tuple(epochs[0]) == tables.EPOCH_COLUMNS
    for row in steps:
        step = int(row["step"])
        assert row["images"] == str(16 * step) and float(row["epoch"]) == pytest.approx(16 * step / 48)
        assert float(row["lr"]) == pytest.approx(0.01 / step)  # of the step that the row is about
        assert float(row["loss"]) == pytest.approx(report["losses"][step - 1], rel=1e-6)
        assert float(row["grad_norm"]) == pytest.approx(report["grad_norms"][step - 1], rel=1e-6)
        assert [float(row[name]) for name in tables.TRUST] == pytest.approx(report["trust"][step - 1], rel=1e-6)


def test_an_interrupted_run_leaves_the_same_rows(runs):
    folder, report = runs
    assert [row["step"] for row in report["rows when killed"]] == ["2", "4", "6"]
    assert report["resumed at"] == 4
    for name in ("steps.csv", "epochs.csv", "layers.csv"):
        whole, resumed = (read(folder / run / name) for run in ("whole", "resumed"))
        for row in (*whole, *resumed):
            for measured in tables.MEASURED:
                row.pop(measured, None)
        assert whole and whole == resumed


def test_a_trainer_that_fits_twice_leaves_the_rows_of_one_fit(runs):
    folder, _ = runs
    assert read(folder / "early" / "layers.csv") == read(folder / "whole" / "layers.csv")


def test_resuming_a_finished_run_changes_nothing(runs):
    folder, report = runs
    assert report["finished at"] == 12 and report["before"] == report["after"]


def test_checkpoints_come_when_due_and_at_the_end(runs):
    _, report = runs
    assert report["saved"] == [4, 8, 12]
    assert report["saved with max_steps"] == [4, 6]


def test_a_full_disk_is_a_warning_and_the_next_save_works(runs):
    _, report = runs
    assert report["full"] == {"step": 12, "saved": [12, 8]}
    assert "the checkpoint of step 4 failed: [Errno 28] No space left on device; older ones are kept" in report["log"]


def test_a_full_disk_at_the_end_is_no_success(runs):
    folder, report = runs
    assert report["full at the end"] == (
        "the last checkpoint, of step 12, could not be written ([Errno 28] No space left on device): older ones are "
        "kept; mend that, and the same command goes on from the newest."
    )
    assert [row["step"] for row in read(folder / "full_12" / "steps.csv")][-1] == "12"


def test_a_run_folder_that_is_removed_is_no_success_and_does_not_come_back(runs):
    folder, report = runs
    assert report["removed"] == (
        "the last checkpoint, of step 12, could not be written ([Errno 2] the run folder was removed while the run "
        f"went on: '{folder / 'removed'}'): nothing of this run is left; choose another --run.folder to train again."
    )
    assert not (folder / "removed").exists()


def test_checkpoints_by_time(runs):
    """Two and a half minutes have passed in the third step after each save; what was asked then is read in the next."""
    _, report = runs
    assert report["by time"] == [4, 8, 12]


def test_the_best_evaluation_is_saved_and_survives_rotation_and_resume(runs):
    """Of evaluations after steps 4, 8 and 12 the second is the best; the run is stopped after step 9."""
    _, report = runs
    best = {"link": "00000008", "state": ["top1", 70.0, 8]}
    assert report["best"] == [{"saved": [9, 8]} | best, {"saved": [12, 9, 8]} | best]


def test_a_run_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    config = TrainConfig(run=RunConfig(folder=str(tmp_path / "file" / "run")))
    alone = SimpleNamespace(rank=0, together=lambda phase: contextlib.nullcontext())
    with pytest.raises(ValueError, match="--run.folder is .*/file/run, which cannot be written .Not a directory.: cho"):
        with train.run_folder(config, alone):
            pass


def test_a_failing_sink_is_a_warning(runs):
    _, report = runs
    assert report["failing sink"] == 12
    assert "Failing failed at step 4: [Errno 28] full; later ones are not told" in report["log"]


def test_a_sink_that_cannot_open_stops_the_run(runs):
    _, report = runs
    assert report["closed sink"] == "TensorBoard is not here."


def test_another_config_is_not_resumed(runs):
    _, report = runs
    assert "--optim.lr 0.001, now 0.5" in report["refused"]


def test_guards_count_what_is_skipped(runs):
    _, report = runs
    assert report["guard"]["steps"] == 5  # 2 bad, 1 good, then 3 bad in a row end it
    assert "Training stopped at step 6: 3 steps in a row" in report["guard"]["message"]
    assert "not finite on rank 0" in report["guard"]["message"]
    assert sum("skipped" in line for line in report["log"]) == 5
    trust = {row["step"]: row["trust_median"] for row in read(runs[0] / "guard" / "steps.csv")}
    assert trust == {"2": "", "4": ""}, "a step that was skipped has no ratios"


def test_throughput_is_that_of_training_alone(runs):
    """A clock on which a pass takes 1 s, the first 50 s, an evaluation 100 s and a hook 1000 s."""
    folder, _ = runs
    steps, epochs = read(folder / "clock" / "steps.csv"), read(folder / "clock" / "epochs.csv")
    assert [float(row["images_per_s"]) for row in steps] == [8.0] * 6  # 16 images in two passes
    assert [float(row["images_per_s"]) for row in epochs] == [8.0] * 3


# -- the program -----------------------------------------------------------------------------------------------


class At(Hook):
    """Calls something after a step."""

    def __init__(self, call: Callable[[Trainer], None]) -> None:
        self.call = call

    def after_step(self, trainer: Trainer) -> None:
        self.call(trainer)


class Record(Hook):
    """Keeps what every step gave out."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.trust: list[tuple[float, float, float]] = []

    def after_train_step(self, trainer: Trainer, output: Any) -> None:
        self.losses.append(float(output.loss_sum))
        self.grad_norms.append(float(output.grad_norm))
        optimizer = trainer.optimizer
        adapted = [p for group in optimizer.param_groups if group["adapt"] for p in group["params"]]
        ratios = [float(optimizer.trust_ratios[p]) for p in adapted]
        self.trust.append((min(ratios), statistics.median(ratios), max(ratios)))


class Failing(hooks.Sink):
    """Runs out of space at step 4."""

    def write_step(self, row: Row) -> None:
        if row["step"] == 4:
            raise OSError(28, "full")


class Closed(hooks.Sink):
    """Cannot start."""

    def open(self, trainer: Trainer) -> None:
        raise ValueError("TensorBoard is not here.")


def main(folder: Path) -> dict[str, Any]:
    from parts import small_trainer

    from largebatch.ranks import Stopped
    from largebatch.ranks.single import Single

    comm = Single()
    log = io.StringIO()
    logging.basicConfig(level=logging.INFO, stream=log, format="%(message)s")
    report: dict[str, Any] = {}

    def build(name: str, *extra: Hook, sinks: tuple[hooks.Sink, ...] = (), lr: float = 0.001) -> Trainer:
        config = TrainConfig(
            run=RunConfig(folder=str(folder / name)), optim=OptimConfig(lr=lr)
        )
        Path(config.folder).mkdir(exist_ok=True)
        plan = Plan(num_samples=48, global_batch_size=16, micro_batch_size=8, num_images=12 * 16, seed=1)
        trainer = small_trainer(comm, plan, passes=2)
        trainer.eval_images = 64
        all_sinks = [hooks.Progress(), hooks.Csv(config.folder), *sinks]
        trainer.hooks = [
            hooks.Guards(max_skipped_steps=3),
            hooks.Checkpoint(config.folder, every_images=64, keep=3, config_text=dump(config)),
            *extra,
            hooks.Log(all_sinks, every_images=32),
        ]
        checkpoint.resume(config, trainer)
        return trainer

    def saved(name: str) -> list[int]:
        return [int(path.name) for path in checkpoint.checkpoints(folder / name)]

    def whole() -> None:
        record = Record()
        trainer = build("whole", record, sinks=(hooks.Curves(folder / "whole", title="whole"),))
        trainer.fit()
        report.update(losses=record.losses, grad_norms=record.grad_norms, trust=record.trust)
        report["saved"] = saved("whole")[::-1]

    def resumed() -> None:
        def die(trainer: Trainer) -> None:
            if trainer.state.step == 7:
                raise KeyboardInterrupt

        trainer = build("resumed", At(die))
        try:
            trainer.fit()
        except KeyboardInterrupt:
            trainer.hooks[1].wait(comm)
            report["rows when killed"] = read(folder / "resumed" / "steps.csv")
        trainer = build("resumed")
        report["resumed at"] = trainer.state.step
        trainer.fit()

    def finished() -> None:
        files = [*(folder / "whole").glob("*.csv"), *(folder / "whole").rglob("manifest.json")]
        report["before"] = [file.read_text() for file in files]
        trainer = build("whole")
        report["finished at"] = trainer.state.step
        trainer.fit()
        report["after"] = [file.read_text() for file in files]

    def stopped_early() -> None:
        trainer = build("early")
        trainer.fit(max_steps=6)
        report["saved with max_steps"] = saved("early")[::-1]
        trainer.fit()

    def full_disk(step: int) -> Trainer:
        real = checkpoint.save

        def save(folder: Path, snapshot: checkpoint.Snapshot, **options: Any) -> Path:
            if snapshot.step == step:
                raise OSError(28, "No space left on device")
            return real(folder, snapshot, **options)

        checkpoint.save = save
        trainer = build(f"full_{step}")
        try:
            trainer.fit()
        finally:
            checkpoint.save = real
        return trainer

    def full_disks() -> None:
        report["full"] = {"step": full_disk(4).state.step, "saved": saved("full_4")}
        try:
            full_disk(12)
        except Stopped as error:
            report["full at the end"] = str(error)

    def removed() -> None:
        def remove(trainer: Trainer) -> None:
            if trainer.state.step == 6:
                trainer.hooks[1].wait(comm)
                shutil.rmtree(folder / "removed")

        try:
            build("removed", At(remove)).fit()
        except Stopped as error:
            report["removed"] = str(error)

    def by_time() -> None:
        trainer = build("by_time")
        trainer.hooks[1] = hooks.Checkpoint(folder / "by_time", every_s=150.0, keep=4, config_text="")
        hooks.checkpointing.time = SimpleNamespace(monotonic=lambda: 60.0 * trainer.state.step)
        trainer.fit()
        hooks.checkpointing.time = time
        report["by time"] = saved("by_time")[::-1]

    def best() -> None:
        top1 = {4: 50.0, 8: 70.0, 12: 60.0}
        for max_steps in (9, 0):
            trainer = build("best")
            options = {"keep": 2, "config_text": trainer.hooks[1].config_text, "best": "top1"}
            trainer.hooks[1] = hooks.Checkpoint(folder / "best", every_images=10**9, **options)
            evaluate = trainer.evaluate
            trainer.evaluate = lambda: evaluate() | {"top1": top1[trainer.state.step]}
            trainer.fit(max_steps=max_steps)
            link = os.readlink(folder / "best" / "checkpoints" / "best")
            report.setdefault("best", []).append({"saved": saved("best"), "link": link, "state": trainer.state.best})

    def sinks() -> None:
        trainer = build("failing", sinks=(Failing(),))
        trainer.fit()
        report["failing sink"] = trainer.state.step
        try:
            build("closed", sinks=(Closed(),)).fit()
        except Stopped as error:
            report["closed sink"] = str(error)

    def refused() -> None:
        try:
            build("whole", lr=0.5)
        except Stopped as error:
            report["refused"] = str(error)

    def guard() -> None:
        trainer = build("guard")
        healthy = trainer.objective
        trainer.objective = lambda model, batch: healthy(model, batch) * (1.0 if trainer.state.step == 2 else math.nan)
        try:
            trainer.fit()
        except Stopped as error:
            report["guard"] = {"steps": trainer.state.skipped, "message": str(error)}

    def clock() -> None:
        now = [0.0]
        hooks.log.time = SimpleNamespace(perf_counter=lambda: now[0])

        def take(seconds: float) -> None:
            now[0] += seconds

        trainer = build("clock", At(lambda trainer: take(1000.0)))
        objective, evaluate = trainer.objective, trainer.evaluate

        def slow_objective(model: Any, batch: Any) -> Any:
            take(50.0 if trainer.state.step == 0 else 1.0)
            return objective(model, batch)

        def slow_evaluate() -> dict[str, float]:
            take(100.0)
            return evaluate()

        trainer.objective, trainer.evaluate = slow_objective, slow_evaluate
        trainer.fit()

    saving = (finished, stopped_early, full_disks, removed, by_time, best)
    for part in (whole, resumed, *saving, sinks, refused, guard, clock):
        part()
    comm.shutdown()
    return report | {"log": log.getvalue().splitlines()}


# -- sinks -----------------------------------------------------------------------------------------------------


def trainer_at(step: int, *, num_steps: int = 100, last_step: int = 0) -> Any:
    """What sinks read of a trainer."""
    plan = Plan(num_samples=50, global_batch_size=10, micro_batch_size=10, num_images=num_steps * 10, seed=0)
    state = TrainState(step=step, images=10 * step)
    return SimpleNamespace(state=state, num_steps=num_steps, plan=plan, last_step=last_step or num_steps)


def step_row(step: int, **values: float) -> Row:
    row = {"step": step, "epoch": step / 5, "images": 10 * step, "lr": 1e-3 / step, "loss": 2 / step}
    return row | {"grad_norm": 1 / step, "images_per_s": 5.0, "skipped": 0} | values


def epoch_row(step: int, **values: float) -> Row:
    row = {"step": step, "epoch": step / 5, "images": 10 * step, "lr": 1e-3 / step, "train_loss": 2 / step}
    return row | {"eval_loss": 3 / step, "top1": 60.0, "top5": 90.0, "images_per_s": 5.0, "skipped": 0} | values


def test_a_number_comes_back_as_it_was(tmp_path):
    table = tables.Table(tmp_path / "t.csv", ("step", "images", "loss", "grad_norm", "epoch"))
    table.open(last_step=0)
    row = {"step": 1, "images": 4_300_000_001, "loss": 0.1234567806124687, "grad_norm": math.inf, "epoch": math.nan}
    table.append(row)
    text = (tmp_path / "t.csv").read_text()
    assert text.splitlines() == ["step,images,loss,grad_norm,epoch", "1,4300000001,0.123456781,inf,"]
    back = read_rows(tmp_path / "t.csv")[0]
    assert math.isnan(back.pop("epoch")) and back == {k: pytest.approx(row[k]) for k in back}


def test_rows_past_the_resumed_step_are_dropped(tmp_path):
    for first, last in ((1, 8), (6, 10)):
        sink = hooks.Csv(tmp_path)
        sink.open(trainer_at(first - 1))
        for step in range(first, last + 1):
            sink.write_step(step_row(step, loss=first))
            sink.write_epoch(epoch_row(step, train_loss=first))
    for file, column in (("steps.csv", "loss"), ("epochs.csv", "train_loss")):
        rows = read_rows(tmp_path / file)
        assert [(row["step"], row[column]) for row in rows] == [(s, 1 if s < 6 else 6) for s in range(1, 11)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epochs.csv", "steps.csv"]


@pytest.mark.parametrize("tail", ["3,0.", "3", "\0\0\0\0\n", "3,x,1\n", "3,1,2,9\n"])
def test_a_damaged_line_is_dropped(tmp_path, tail):
    (tmp_path / "t.csv").write_text("step,loss,lr\n1,2,3\n2,2,3\n" + tail)
    table = tables.Table(tmp_path / "t.csv", ("step", "loss", "lr"))
    table.open(last_step=9)
    table.append({"step": 3, "loss": 1.0, "lr": 0.5})
    assert (tmp_path / "t.csv").read_text().splitlines() == ["step,loss,lr", "1,2,3", "2,2,3", "3,1,0.5"]


def test_a_column_of_a_later_version(tmp_path):
    (tmp_path / "t.csv").write_text("step,loss,old\n1,2,3\n")
    table = tables.Table(tmp_path / "t.csv", ("step", "loss", "new"))
    table.open(last_step=9)
    table.append({"step": 2, "loss": 1.5, "new": 7})
    assert read(tmp_path / "t.csv") == [{"step": "1", "loss": "2", "new": ""}, {"step": "2", "loss": "1.5", "new": "7"}]


def test_tensorboard_neither_doubles_nor_loses_a_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((1, 8), (6, 10)):
        sink = hooks.TensorBoard(tmp_path)
        sink.open(trainer_at(first - 1))
        for step in range(first, last + 1):
            sink.write_step(step_row(step, loss=first, images_per_s=math.nan if step == 1 else 5.0))
        sink.write_epoch(epoch_row(last))
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(s, 1 if s < 6 else 6) for s in range(1, 11)]
    assert [event.step for event in events.Scalars("train/images_per_s")] == list(range(2, 11))
    assert [event.step for event in events.Scalars("epoch/top1")] == [10]


def test_no_tensorboard_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard.*--log.to none"):
        hooks.TensorBoard(tmp_path).open(trainer_at(0))


def wandb_records(data: bytes) -> list[bytes]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format, in blocks of 32 KiB."""
    found, at = [b""], 7
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # the rest of a block is too short for a header
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        found[-1] += data[at + 7 : at + 7 + length]
        found += [b""] if kind in (1, 4) else []  # whole, or the last part
        at += 7 + length
    return found[:-1]


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    """Steps that a resumed run writes again are kept, too; the entry is that of the folder."""
    pytest.importorskip("wandb", reason="wandb is not installed: python -m pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record as Entry

    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = hooks.WeightsAndBiases(tmp_path, {"optim.lr": 0.5})
    sink.open(trainer_at(0))
    for first, last in ((1, 8), (6, 10)):
        for step in range(first, last + 1):
            sink.write_step(step_row(step, images_per_s=math.nan if step == 1 else 5.0))
        sink.write_epoch(epoch_row(last))
    sink.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    runs, points = [], []
    for entry in map(Entry.FromString, wandb_records(file.read_bytes())):
        runs += [entry.run] if entry.HasField("run") else []
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in entry.history.item}
        points += [items] if "step" in items else []
    assert runs[0].display_name == tmp_path.name and runs[0].project == "largebatch"
    assert runs[0].run_id == hashlib.sha256(str(tmp_path.resolve()).encode()).hexdigest()[:16]
    assert {update.key: update.value_json for update in runs[0].config.update}["optim.lr"] == "0.5"
    losses = [(point["step"], point["train/loss"]) for point in points if "train/loss" in point]
    assert losses == [(step, 2 / step) for step in (*range(1, 9), *range(6, 11))]
    assert "train/images_per_s" not in points[0] and "train/images_per_s" in points[1]
    assert [point["step"] for point in points if "epoch/top1" in point] == [8, 10]


def test_no_weights_and_biases_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="--log.to has wandb, which is not installed .*pip install wandb"):
        hooks.WeightsAndBiases(tmp_path, {}).open(trainer_at(0))


@pytest.mark.parametrize("num_steps", [7, 100, 11730])
def test_plain_lines_are_few(caplog, num_steps):
    caplog.set_level(logging.INFO)
    sink = hooks.Progress()
    sink.open(trainer_at(0, num_steps=num_steps))
    for step in range(1, num_steps + 1):
        sink.advance(step)
        sink.write_step(step_row(step))
    sink.write_epoch(epoch_row(num_steps))
    sink.close()
    assert min(num_steps, PLAIN_LINES) <= len(caplog.messages) <= PLAIN_LINES + 2
    assert caplog.messages[0] == f"step 1/{num_steps}  epoch 0.20  loss 2.0000  lr 0.001  5 img/s", "no pace yet"
    assert caplog.messages[-2].startswith(f"step {num_steps}/{num_steps} ")
    assert caplog.messages[-2].endswith("0:00:00 left")
    assert caplog.messages[-1].startswith(f"epoch {num_steps / 5:.4g}/{num_steps / 5:.4g}  train loss ")
    assert "top-1 60.00 %" in caplog.messages[-1]


def test_the_first_step_is_not_the_pace_and_has_no_empty_column(caplog, monkeypatch):
    """It took 100 s, and each of the others one."""
    caplog.set_level(logging.INFO)
    now = [0.0]
    monkeypatch.setattr(sinks, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    sink = hooks.Progress()
    sink.open(trainer_at(0, num_steps=10))
    for step in range(1, 4):
        now[0] += 100.0 if step == 1 else 1.0
        sink.advance(step)
        sink.write_step(step_row(step, images_per_s=math.nan if step == 1 else 5.0))
    assert caplog.messages[0] == "step 1/10  epoch 0.20  loss 2.0000  lr 0.001"
    assert [line.partition(" img/s  ")[2] for line in caplog.messages[1:]] == ["0:00:08 left", "0:00:07 left"]


def test_the_time_left_is_that_to_max_steps(caplog):
    caplog.set_level(logging.INFO)
    sink = hooks.Progress()
    sink.open(trainer_at(10, last_step=20))
    sink.first = (10, time.perf_counter() - 1000.0)
    for step in (15, 20):
        sink.write_step(step_row(step))
    assert caplog.messages[0].startswith("step 15/100 ") and caplog.messages[0].endswith("0:16:40 left")
    assert caplog.messages[1].endswith("0:00:00 left")


class Terminal(io.StringIO):
    """A stderr that is one."""

    def isatty(self) -> bool:
        return True


def test_the_bar_and_the_log_share_a_terminal(monkeypatch, caplog):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [*logging.getLogger().handlers, handler])
    caplog.set_level(logging.INFO)
    sink = hooks.Progress()
    sink.open(trainer_at(3))
    assert handler.stream is sys.stderr is not terminal
    sink.advance(4)
    sink.write_step(step_row(4))
    sink.write_epoch(epoch_row(4))
    sink.close()
    assert handler.stream is sys.stderr is terminal
    assert "step 4/100" in terminal.getvalue() and "loss 0.5000" in terminal.getvalue()
    assert "\nepoch 0.8/20  train loss" in terminal.getvalue() or "Kepoch 0.8/20  train loss" in terminal.getvalue()
    assert len(caplog.messages) == 1, "steps are shown by the bar"


# -- profile ---------------------------------------------------------------------------------------------------


def test_a_profile_is_of_its_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer = SimpleNamespace(device=torch.device("cpu"), comm=SimpleNamespace(rank=0))
    hook = Profile(2, 3, run="a run")
    hook.before_fit(trainer)
    for step in range(1, 6):
        with record_function(f"step {step}"):
            torch.ones(3).sum()
        hook.after_train_step(trainer, SimpleNamespace())
        with record_function("evaluation"):
            torch.ones(3).sum()
        hook.after_step(trainer)
    hook.after_fit(trainer)
    (trace,) = tmp_path.iterdir()
    assert trace.name == "largebatch-a run-rank0-steps-2-3.json"
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    assert [name for name in names if name.startswith(("step", "eval"))] == ["step 2", "evaluation", "step 3"]


# -- curves ----------------------------------------------------------------------------------------------------


def share_of(path: Path, colour: str) -> float:
    """The share of a picture's pixels that have about this colour."""
    wanted = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return float((abs(imread(path)[..., :3] - wanted).max(axis=-1) < 0.05).mean())


def pale(colour: str) -> str:
    """A thin line on white."""
    mixed = (draw.THIN * int(colour[place : place + 2], 16) + (1 - draw.THIN) * 255 for place in (1, 3, 5))
    return "#" + "".join(f"{round(value):02x}" for value in mixed)


TRAINING, HELD_OUT, AVERAGED = panels.COLOURS[:3]


def test_the_picture_shows_the_curves(tmp_path):
    sink = hooks.Csv(tmp_path)
    sink.open(trainer_at(0))
    for step in range(1, 30):
        sink.write_step(step_row(step, grad_norm=math.inf if step == 3 else 1 / step))
        if step % 5 == 0:
            sink.write_epoch(epoch_row(step, eval_loss=math.nan if step == 10 else 3 / step))
    sink = hooks.Curves(tmp_path, title="a run")
    sink.write_epoch(epoch_row(20))
    assert sink.drawing is None, "the run began a moment ago"
    sink.began = -math.inf
    sink.write_epoch(epoch_row(25))
    assert sink.drawing is not None
    sink.drawing.result()
    path = tmp_path / "curves.png"
    assert imread(path).shape[0] > 500 and imread(path).shape[1] > 800
    for colour in (TRAINING, HELD_OUT, pale(TRAINING)):
        assert share_of(path, colour) > 3e-4, colour
    assert 0.8 < share_of(path, "#ffffff") < 0.99
    drawn = path.stat().st_mtime_ns
    sink.write_epoch(epoch_row(30))
    assert path.stat().st_mtime_ns == drawn, "it was drawn a moment ago"
    sink.close()
    assert path.stat().st_mtime_ns > drawn


def test_the_run_goes_on_while_the_picture_is_drawn(tmp_path, monkeypatch):
    """An evaluation during a drawing begins no second one; a failure is told with the next; the end draws it all."""
    may_go_on, began = threading.Event(), []

    def draw(folder: Path, *, title: str) -> None:
        began.append(threading.current_thread())
        assert may_go_on.wait(60)
        if len(began) == 1:
            raise OSError("no space left")

    monkeypatch.setattr(sinks, "draw_curves", draw)
    monkeypatch.setattr(sinks, "REDRAW_S", -1.0)
    sink = hooks.Curves(tmp_path, title="a run")
    sink.write_epoch(epoch_row(1))
    sink.write_epoch(epoch_row(2))
    assert sink.drawing is not None and not sink.drawing.done()
    may_go_on.set()
    assert isinstance(sink.drawing.exception(60), OSError)
    with pytest.raises(OSError, match="no space left"):
        sink.write_epoch(epoch_row(3))
    sink.close()
    assert len(began) == 3 and threading.current_thread() not in began[:2] and began[2] is threading.current_thread()


def test_forty_drawings_hold_no_more_than_two(tmp_path, monkeypatch):
    """matplotlib keeps fonts, and their files, by thread."""
    monkeypatch.setattr(sinks, "REDRAW_S", -1.0)
    rows, sink, held = hooks.Csv(tmp_path), hooks.Curves(tmp_path, title="a run"), []
    rows.open(trainer_at(0))
    font_manager._get_font.cache_clear()  # those of other tests, of which the oldest would go
    for number in range(1, 43):
        rows.write_step(step_row(number))
        rows.write_epoch(epoch_row(number))
        sink.write_epoch(epoch_row(number))
        assert sink.drawing is not None
        sink.drawing.result(60)
        held.append((len(os.listdir("/proc/self/fd")), font_manager._get_font.cache_info().currsize))
    rows.close()
    assert held[1] == held[-1] and held[-1][1] > 0, held


def test_averaged_weights_are_shown_where_there_are_some(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for row, words, is_there in (
        (epoch_row(5), "", False),
        (epoch_row(5, ema_loss=0.25, ema_top1=72.5), "  averaged weights: loss 0.2500  top-1 72.50 %", True),
    ):
        csv, line = hooks.Csv(tmp_path), hooks.Progress()
        for sink in (csv, line):
            sink.open(trainer_at(0))
            sink.write_epoch(row)
        draw.draw_curves(tmp_path, title="a run")
        assert (share_of(tmp_path / "curves.png", AVERAGED) > 1e-4) is is_there
        assert f"top-5 90.00 %{words}  lr" in caplog.messages[-1]
        assert read(tmp_path / "epochs.csv")[0]["ema_top1"] == ("72.5" if is_there else "")


def test_the_picture_shows_trust_ratios_where_there_are_some(tmp_path):
    shares = []
    for values in ({}, {"trust_min": 0.01, "trust_median": 1.0, "trust_max": 50.0}):
        sink = hooks.Csv(tmp_path)
        sink.open(trainer_at(0))
        for step in range(1, 60):
            sink.write_step(step_row(step, loss=math.nan, grad_norm=math.nan, **values))
        draw.draw_curves(tmp_path, title="a run")
        shares.append(share_of(tmp_path / "curves.png", pale(TRAINING)))
    assert shares[1] > 2 * shares[0]  # smallest and largest, in the colour of single steps


def test_the_noise_scale_is_drawn_and_told_where_there_is_one(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    heights = []
    measured = {"grad_square": 0.5, "grad_variance": 1700.0, "noise_scale": 3400.0}
    for values, words in (({}, ""), (measured, "3,400 (an order of magnitude)")):
        sink, line = hooks.Csv(tmp_path), hooks.Progress()
        for each in (sink, line):
            each.open(trainer_at(0, num_steps=59))
            for step in range(1, 60):
                each.write_step(step_row(step, trust_median=1.0, **values))
        assert caplog.messages[-1].partition("  noise scale ")[2].partition("  ")[0] == words
        draw.draw_curves(tmp_path, title="a run")
        heights.append(imread(tmp_path / "curves.png").shape[0])
    assert heights[1] > 1.3 * heights[0] and share_of(tmp_path / "curves.png", HELD_OUT) > 2e-4
    assert read(tmp_path / "steps.csv")[0]["noise_scale"] == "3400"


def test_the_noise_scale_is_that_of_the_paper_averaged_by_a_plain_loop():
    """McCandlish et al. 2018, appendix A.1, of norms that drift: a mean of 30 rows, then a moving one."""
    draw, averages, seen, mean = random.Random(0), noise_scale.Averages(), [], [0.0, 0.0]
    for row in range(1, 201):
        small, big = 32, 1024
        g_small, g_big = (1 + row / 50) * draw.uniform(2.0, 3.0), (1 + row / 100) * draw.uniform(0.5, 1.0)
        g_2 = (big * g_big - small * g_small) / (big - small)
        s = (g_small - g_big) / (1 / small - 1 / big)
        seen.append((g_2, s))
        if row <= 30:
            mean = [math.fsum(pair[k] for pair in seen) / row for k in (0, 1)]
        else:
            mean = [29 / 30 * old + new / 30 for old, new in zip(mean, (g_2, s))]
        found = averages.add(*noise_scale.estimates(g_small, g_big, small=small, large=big))
        assert (found["grad_square"], found["grad_variance"]) == pytest.approx(tuple(mean), rel=1e-12)
        assert found["noise_scale"] == pytest.approx(mean[1] / mean[0], rel=1e-12)
    assert math.isnan(averages.add(-1e6, 1.0)["noise_scale"])  # |G|^2 cannot be told from noise


@pytest.mark.parametrize("scales, batches", (((1e9,) * 33, [(30, 16), (31, 32), (32, 40)]), ((7.0,) * 40, [])))
def test_a_batch_follows_the_noise_scale_from_the_thirtieth_row_on(scales, batches):
    """It doubles at each row while it is smaller, up to the largest batch."""
    state = SimpleNamespace(phases=((0, 8),), images=0, step=0)
    comm = SimpleNamespace(rank=1, broadcast_object=lambda value, name: value)
    plan = SimpleNamespace(global_batch_size=40, num_images=10**6)
    trainer = SimpleNamespace(state=state, comm=comm, plan=plan)
    trainer.change_phases = lambda phases: vars(state).update(phases=phases)
    averages = noise_scale.Averages()
    for row, scale in enumerate(scales, start=1):
        state.images = row
        averages.add(1.0, scale)
        noise_ramp.follow_noise(trainer, averages)
    assert list(state.phases[1:]) == batches


def test_the_batch_in_the_picture_grows_with_a_ramp_and_not_with_a_short_last_step():
    """Steps of 8, 8, 16, 16, 16 and 4 images, with rows of all but the first."""
    images = enumerate((8, 16, 32, 48, 64, 68), start=1)
    rows = [{"step": float(step), "epoch": step / 2, "images": float(seen)} for step, seen in images]
    assert [row["batch"] for row in panels.batches(rows[1:])] == [8, 16, 16, 16, 16]
    assert panels.whole_steps(rows[1:]) == rows[1:-1] and panels.whole_steps(rows[1:-1]) == rows[1:-1]
    assert panels.whole_steps(rows[:1]) == rows[:1]
    assert [row["epoch"] for row in panels.at_middles(rows[1::2])] == [0.5, 1.5, 2.5]


def test_no_text_of_the_picture_lies_on_another_or_outside(tmp_path_factory, monkeypatch):
    """The margins are fixed: all panels, small rates, long names, and numbers that need an exponent."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    names = ["patch_embed.proj.weight", *(f"stages.0.blocks.{block}.long_name.qkv.weight" for block in range(9))]
    for scale in (1.0, 1e-7):
        for with_noise in (False, True):
            sink = hooks.Csv(tmp_path_factory.mktemp("picture"))
            sink.open(trainer_at(0))
            for step in range(1, 60):
                values = {"trust_min": 1e-3 / step, "trust_median": 1.0, "trust_max": 50.0 * step}
                values |= {"noise_scale": 1e5 * step} if with_noise else {}
                sink.write_step(step_row(step, lr=scale * step, grad_norm=scale / step, **values))
                if step % 20 == 0:
                    sink.write_epoch(epoch_row(step, ema_loss=0.25, ema_top1=72.5))
                    sink.write_layers({"step": step, "epoch": step / 5} | dict.fromkeys(names, 0.1 * step))
            sink.close()
            draw.draw_curves(sink.run.path, title="a model of a long name, a recipe of a user")
    for figure in drawn:
        figure.draw_without_rendering()
        boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts(figure)]
        for number, (words, box) in enumerate(boxes):
            assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and 0 <= box.y0 and box.y1 <= figure.bbox.y1, words
            assert [other for other, theirs in boxes[:number] if box.overlaps(theirs)] == [], words


def texts(figure: Figure) -> list[Text]:
    """Those that are seen: matplotlib also has numbers beyond the ends of an axis, which are not drawn."""
    beyond = set()
    for axes in figure.axes:
        for text in axes.get_xticklabels(which="both"):
            beyond |= set() if axes.bbox.x0 - 1 <= centre(text)[0] <= axes.bbox.x1 + 1 else {text}
        for text in axes.get_yticklabels(which="both"):
            beyond |= set() if axes.bbox.y0 - 1 <= centre(text)[1] <= axes.bbox.y1 + 1 else {text}
    found = figure.findobj(Text, include_self=False)
    return [text for text in dict.fromkeys(found) if text.get_text() and text.get_visible() and text not in beyond]


def centre(text: Text) -> tuple[float, float]:
    box = text.get_window_extent()
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2


def test_rows_of_an_earlier_version(tmp_path):
    """Without the columns that came later: resumed and drawn."""
    steps = "step,epoch,images,lr,loss,grad_norm,images_per_s,skipped\n1,0.2,10,1,2,3,4,0\n"
    epochs = "step,epoch,images,lr,train_loss,eval_loss,top1,top5,images_per_s,skipped\n1,0.2,10,1,2,3,60,90,4,0\n"
    (tmp_path / "steps.csv").write_text(steps)
    (tmp_path / "epochs.csv").write_text(epochs)
    draw.draw_curves(tmp_path, title="an old run")
    sink = hooks.Csv(tmp_path)
    sink.open(trainer_at(1))
    sink.write_step(step_row(2, trust_median=0.5))
    sink.write_epoch(epoch_row(2))
    rows = read(tmp_path / "steps.csv")
    assert [(row["loss"], row["trust_median"]) for row in rows] == [("2", ""), ("1", "0.5")]
    draw.draw_curves(tmp_path, title="an old run, resumed")


def test_a_picture_of_nothing(tmp_path):
    draw.draw_curves(tmp_path, title="a run that has not begun")
    assert share_of(tmp_path / "curves.png", HELD_OUT) == 0


def test_a_run_without_evaluation_says_that_it_has_no_accuracy(tmp_path):
    shares = []
    for epochs in ([], [epoch_row(2)]):
        sink = hooks.Csv(tmp_path / str(len(epochs)))
        sink.run.path.mkdir()
        sink.open(trainer_at(1))
        sink.write_step(step_row(1))
        for row in epochs:
            sink.write_epoch(row)
        draw.draw_curves(sink.run.path, title="a run")
        picture = imread(sink.run.path / "curves.png")[..., :3]
        height, width, _ = picture.shape
        middle = picture[int(0.27 * height) : int(0.32 * height), int(0.74 * width) : int(0.82 * width)]
        shares.append(float((middle.max(axis=-1) < 0.6).mean()))
    assert shares[0] > 0.02 and shares[1] == 0, shares


if __name__ == "__main__":
    (Path(sys.argv[1]) / "report.json").write_text(json.dumps(main(Path(sys.argv[1]))))


HISTORIES = [  # lines of starts.jsonl, and the step that they call saved
    ([], 0),
    (['{"start": {"step": 0, "ranks": 2}}'], 0),  # killed before the first checkpoint
    (['{"start": {"step": 0}}', '{"end": {"ended": 2.0, "last_step": 0, "reason": "of a signal"}}'], 0),
    (['{"start": {"step": 0}}', '{"saved": 3}'], 3),  # killed later
    (['{"saved": 3}'], 3),  # a loop of one's own, which has no starts
    (['{"start": {"step": 0}}', '{"end": {"ended": 2.0, "last_step": 54, "reason": ""}}'], 54),  # of an older version
    (['{"start": {"step": 0}}', '{"start": {"step": 20}}', '{"start": {"step": 0}}'], 20),
    (['{"start": {"step": 0}}', '{"saved": 3', "[" * 20_000, "3", "[3]", '{"saved": "9"}', '{"start": 7}'], 0),
]


@pytest.mark.parametrize("lines, step", HISTORIES)
def test_lost_checkpoints_are_told_from_a_run_that_never_had_one(tmp_path, lines, step):
    (tmp_path / "starts.jsonl").write_text("\n".join(lines))
    saved = tmp_path / "checkpoints" / f"{step:08d}"
    for unfinished in (tmp_path / "checkpoints", tmp_path / "checkpoints" / "00000003.tmp"):  # a save that was killed
        unfinished.mkdir()
        if step:
            with pytest.raises(ValueError, match=f"but starts.jsonl says that step {step} was saved: restore one"):
                refuse_lost_checkpoints(tmp_path)
        else:
            refuse_lost_checkpoints(tmp_path)
    saved.mkdir()  # restored, or the first one
    refuse_lost_checkpoints(tmp_path)


def test_the_link_to_the_best_checkpoint_tells_of_lost_ones(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best").symlink_to("00000007")
    with pytest.raises(ValueError, match="has no checkpoint, but its link best names 00000007: restore one to resume"):
        refuse_lost_checkpoints(tmp_path)


def test_a_start_writes_down_its_first_checkpoint_and_a_failed_save_none(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(checkpoint, "save", lambda folder, snapshot, keep: written.append(snapshot.step))
    writer = Writer(tmp_path, keep=2)
    for step in (3, 4):
        writer.start(SimpleNamespace(step=step), began=0.0)
        while not writer.wait(1.0):
            pass
    assert written == [3, 4] and history.saved_step(tmp_path) == 3
    assert (tmp_path / "starts.jsonl").read_text() == '{"saved": 3}\n' and history.read_starts(tmp_path) == []

    def full(folder, snapshot, keep):
        raise OSError("no space")

    monkeypatch.setattr(checkpoint, "save", full)
    other = Writer(tmp_path / "other", keep=2)
    other.start(SimpleNamespace(step=3), began=0.0)
    while not other.wait(1.0):
        pass
    assert history.saved_step(tmp_path / "other") == 0


@pytest.mark.parametrize("most, told", [(1, [1]), (3, [1, 2, 3]), (25, [1, 2, 4, 8, 16, 25])])
def test_a_row_of_skipped_steps_is_told_less_and_less_often(caplog, most, told):
    guards = Guards(max_skipped_steps=most)
    guards.explain = lambda trainer, output: ("it overflowed", "lower it")
    trainer = SimpleNamespace(state=TrainState(), comm=SimpleNamespace(rank=0))
    output = SimpleNamespace(applied=False, grad_norm=math.inf)
    with pytest.raises(Stopped, match=f"Training stopped at step {most}: {most} steps in a row had a gradient"):
        for _ in range(99):
            trainer.state.advance(8, applied=False)
            guards.after_train_step(trainer, output)
    assert [int(message.split()[1]) for message in caplog.messages] == told
    trainer.state.advance(8, applied=True)
    assert trainer.state.in_a_row == 0


def test_a_full_disk_under_the_log_is_one_warning(tmp_path, capfd):
    """The lines go to the screen as before. /dev/full is a disk without room."""
    (tmp_path / "log.txt").symlink_to("/dev/full")
    config = TrainConfig(run=RunConfig(folder=str(tmp_path)))
    before = logging.getLogger().handlers[:]
    try:
        train.start_log(config, SimpleNamespace(rank=0))
        for number in range(5):
            train.logger.info("line %d", number)
    finally:
        for handler in logging.getLogger().handlers[:]:
            logging.getLogger().removeHandler(handler)
        logging.getLogger().handlers[:] = before
        for package in ("largebatch", "zoo"):
            logging.getLogger(package).setLevel(logging.NOTSET)
    said = capfd.readouterr().err
    assert said.count("No space left on device") == said.count("it will lack lines; the run goes on") == 1, said
    assert [said.count(f"line {number}\n") for number in range(5)] == [1] * 5 and "Traceback" not in said


def test_a_sink_that_fails_again_and_again_is_told_once(caplog):
    class Full(hooks.Sink):
        def write_step(self, row):
            raise OSError(28, "full")

    log = hooks.Log([Full(), Full()], every_images=1)
    trainer = SimpleNamespace(comm=SimpleNamespace(rank=0), state=TrainState(step=4))
    for _ in range(3):
        log.tell(trainer, lambda sink: sink.write_step({}))
    assert caplog.messages == ["Full failed at step 4: [Errno 28] full; later ones are not told"]


def test_a_config_yaml_that_was_changed_by_hand_is_told(tmp_path, caplog):
    config = TrainConfig(run=RunConfig(folder=str(tmp_path)), optim=OptimConfig(lr=0.5))
    file = tmp_path / "config.yaml"
    train.warn_of_other_file(config)  # there is none
    file.write_text(dump(replace(config, run=replace(config.run, max_steps=9, device="cpu"))))  # these may differ
    train.warn_of_other_file(config)
    assert caplog.messages == []
    file.write_text(dump(config).replace("lr: 0.5", "lr: 0.25"))
    train.warn_of_other_file(config)
    told = f"{file} is written anew, as the command line counts, not this file: "
    assert caplog.messages == [f"{told}--optim.lr 0.25, now 0.5"]
    file.write_text(dump(config).replace("lr: 0.5", "lr: abc"))
    train.warn_of_other_file(config)
    assert caplog.messages[1:] == [f"{told}{file}: optim.lr is 'abc': expected a number."]


@pytest.mark.parametrize(
    "name, weights, path, images, expected",
    [
        ("vit_b32", "", "/own", 600, "vit_base_patch32_224.augreg_in21k_ft_in1k"),
        ("timm/resnet18", "", "/own", 600, "resnet18.a1_in1k"),
        ("vit_nano32", "", "/own", 600, ""),  # nobody has published any
        ("vit_b32", "w.pt", "/own", 600, ""),
        ("vit_b32", "", "/own", 50_000, ""),
        ("vit_b32", "", "digits", 600, ""),
    ],
)
def test_few_images_and_random_weights_get_a_hint_that_names_weights(caplog, name, weights, path, images, expected):
    caplog.set_level(logging.INFO)
    config = TrainConfig(model=ModelConfig(name=name, weights=weights), data=DataConfig(path=path))
    hint_at_weights(config, images)
    assert len(caplog.messages) == bool(expected) and (not expected or f"--init-from {expected}," in caplog.text)
    assert not expected or hub.is_reference(expected)
    hint_at_weights(replace(config, augment=AugmentConfig(mixup_alpha=0.8)), images)
    assert caplog.messages[-1] == "mixup and cutmix mix the targets, so the training loss lies above the held-out loss"
    hint_at_weights(replace(config, loss=LossConfig(name="bce")), images)
    assert caplog.messages[-1] == "the training loss is a binary cross entropy, and the held-out loss a cross entropy"
