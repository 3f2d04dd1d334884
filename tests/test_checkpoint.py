"""Checkpoints: what goes in comes out, damage is found before anything is loaded, a kill or a full disk costs nothing.

Run as a program, this file saves in children that are killed after every change of the files, at every tenth of a
file, or that run out of space; the tests start it once each and look at what it reports.
"""

import copy
import errno
import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from torch import nn
from torch.optim import Optimizer

import zoo.weights
from largebatch import checkpoint
from largebatch.checkpoint import store
from largebatch.config import TrainConfig, dump
from largebatch.engine import TrainState
from largebatch.hooks import checkpointing
from largebatch.optim import Lamb, build_optimizer, init_state
from largebatch.predict.__main__ import why_unreadable
from zoo import hub

Parts = tuple[nn.Module, Optimizer, torch.amp.GradScaler]
CONFIG = TrainConfig(recipe="quickstart")
CONFIG_TEXT = dump(CONFIG)
DESCRIPTION = '{"architecture": "vit_tiny_patch16_224", "num_classes": 10}\n'
WRITES = (store.__file__, checkpointing.__file__)
resume = sys.modules["largebatch.checkpoint.resume"]  # the package has a function of this name
OPTIMIZERS = {"Lamb": lambda parameters: Lamb(parameters, lr=0.01, impl="eager"), "AdamW": torch.optim.AdamW}


def make_parts(*, seed: int = 0, steps: int = 3, optimizer: str = "Lamb", scaler_enabled: bool = True) -> Parts:
    """A small model, its optimizer after some steps, and a scaler that is not as new."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 10))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    ours = OPTIMIZERS[optimizer](model.parameters())
    init_state(ours)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        ours.step()
        ours.zero_grad()
    return model, ours, torch.amp.GradScaler("cpu", init_scale=512.0 + seed, enabled=scaler_enabled)


def save(folder: Path, step: int, *, parts: Parts | None = None, keep: int = 2, **options) -> Path:
    return checkpoint.save(folder, snapshot(step, parts or make_parts(seed=step), **options), keep=keep)


def snapshot(step: int, parts: Parts, **options) -> checkpoint.Snapshot:
    model, optimizer, scaler = parts
    state = TrainState(step=step, images=100 * step, skipped=2, data="their digest")
    options = {"config_text": CONFIG_TEXT, "memory": checkpoint.HostMemory(), "state": state} | options
    options.setdefault("description", DESCRIPTION)
    return checkpoint.take_snapshot(model=model, optimizer=optimizer, scaler=scaler, **options)


def load(path: Path, parts: Parts, **options) -> TrainState:
    return checkpoint.load(path, model=parts[0], optimizer=parts[1], scaler=parts[2], **options)


def valid_steps(folder: Path) -> list[int]:
    return [int(path.name) for path in checkpoint.checkpoints(folder) if checkpoint.why_invalid(path) is None]


def assert_equal(one: object, other: object) -> None:
    """Nested state dicts, to the last bit."""
    assert type(one) is type(other), (one, other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            assert_equal(left, right)
    else:
        assert one == other


# -- what goes in comes out --------------------------------------------------------------------------------------


def test_a_state_from_a_gpu_goes_on_here(tmp_path):
    """NAdam's counters are on the device that it trains on, and torch takes the saved option for that."""
    model, scaler = nn.Linear(3, 2), torch.amp.GradScaler("cpu", enabled=False)
    parts = model, build_optimizer(model, name="nadamw", lr=0.1, weight_decay=0.0), scaler
    model(torch.ones(1, 3)).sum().backward()
    parts[1].step()
    parts[1].param_groups[0]["capturable"] = True  # as on a GPU
    path = save(tmp_path, 7, parts=parts)
    parts[1].param_groups[0]["capturable"] = False
    load(path, parts)
    parts[1].step()
    assert [float(state["step"]) for state in parts[1].state.values()] == [2, 2]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scaler_enabled", [True, False])
def test_round_trip_is_exact(tmp_path, optimizer, scaler_enabled):
    parts = make_parts(seed=1, optimizer=optimizer, scaler_enabled=scaler_enabled)
    path = save(tmp_path, 7, parts=parts)
    fresh = make_parts(seed=2, steps=0, optimizer=optimizer, scaler_enabled=scaler_enabled)
    assert load(path, fresh, config=CONFIG) == TrainState(step=7, images=700, skipped=2, data="their digest")
    for one, other in zip(parts, fresh):
        assert_equal(one.state_dict(), other.state_dict())


def test_training_goes_on_as_if_never_interrupted(tmp_path):
    parts = make_parts(seed=1)
    path = save(tmp_path, 3, parts=parts)
    fresh = make_parts(seed=2, steps=0)
    load(path, fresh)
    for model, optimizer, _ in (parts, fresh):
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    assert_equal(parts[0].state_dict(), fresh[0].state_dict())


def test_weights_are_plain_whatever_the_model_is_wrapped_in(tmp_path):
    model, optimizer, scaler = make_parts()
    wrapped = torch.nn.parallel.DataParallel(torch.compile(model))
    path = save(tmp_path, 1, parts=(wrapped, optimizer, scaler))
    weights = zoo.weights.read_weights(path / "model.safetensors")
    assert list(wrapped.state_dict())[0].startswith("module._orig_mod.")
    plain = make_parts(seed=9)[0]
    plain.load_state_dict(weights, strict=True)
    assert_equal(dict(plain.state_dict()), dict(model.state_dict()))
    load(path, (torch.compile(plain), *make_parts()[1:]))


def test_the_zoo_reads_the_weights(tmp_path):
    model = zoo.create_model("vit_ti16", img_size=32, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(tmp_path, 1, parts=(model, optimizer, torch.amp.GradScaler("cpu", enabled=False)))
    weights = checkpoint.newest_weights(tmp_path)
    ours = zoo.create_model("vit_ti16", img_size=32, num_classes=10, weights=weights)
    assert_equal(dict(ours.state_dict()), dict(model.state_dict()))


def test_averaged_weights_are_a_part_like_the_others(tmp_path, caplog):
    """Read back to the last bit, by the zoo too, counted when space is, and refused when they are damaged."""
    models = [zoo.create_model("vit_ti16", img_size=32, num_classes=10) for _ in range(3)]
    parts = (models[0], torch.optim.SGD(models[0].parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False))
    save(tmp_path, 1, parts=parts)
    path = save(tmp_path, 2, parts=parts, average=models[1])
    load(path, parts, average=models[2])
    assert_equal(dict(models[2].state_dict()), dict(models[1].state_dict()))
    weights = checkpoint.newest_weights(tmp_path, average=True)
    assert weights == path / "model_ema.safetensors" and checkpoint.newest_weights(tmp_path) != weights
    ours = zoo.create_model("vit_ti16", img_size=32, num_classes=10, weights=weights)
    assert_equal(dict(ours.state_dict()), dict(models[1].state_dict()))
    content = weights.read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        weights.write_bytes(damaged)
        assert_falls_back(path, caplog, why="model_ema.safetensors")
    weights.unlink()
    assert_falls_back(path, caplog, why="model_ema.safetensors cannot be read")


def test_the_description_of_the_model_is_written_as_it_is_and_older_checkpoints_do_without(tmp_path):
    path = save(tmp_path, 1)
    assert (path / "config.json").read_text() == DESCRIPTION
    older = save(tmp_path, 2, description="")
    assert not (older / "config.json").exists() and valid_steps(tmp_path) == [2, 1]
    assert load(older, make_parts(seed=1)).step == 2


def test_newest_weights_of_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="no valid checkpoint"):
        checkpoint.newest_weights(tmp_path)


def test_weights_that_a_path_means(tmp_path, caplog):
    """A file is itself, a run folder its newest, and every one is oldest first, without what is damaged."""
    paths = [save(tmp_path, step, keep=4) for step in (9, 10, 100)]
    files = [path / "model.safetensors" for path in paths]
    assert checkpoint.find_weights(files[0]) == [files[0]]
    assert checkpoint.find_weights(tmp_path) == [files[2]]
    assert checkpoint.find_weights(tmp_path, every=True) == files
    files[1].write_bytes(b"")
    assert checkpoint.find_weights(str(tmp_path), every=True) == [files[0], files[2]]
    assert f"{paths[1]} is refused: model.safetensors has 0 of" in caplog.text
    others = tmp_path / "others"
    others.mkdir()
    for name in ("b.pth", "a.safetensors", "notes.txt"):
        (others / name).touch()
    assert [path.name for path in checkpoint.find_weights(others, every=True)] == ["a.safetensors", "b.pth"]
    with pytest.raises(ValueError, match="has nothing to validate: expected a run folder with a valid checkpoint, or"):
        checkpoint.find_weights(tmp_path / "nowhere", every=True)


def test_a_snapshot_is_not_changed_by_the_training_that_follows(tmp_path):
    """The memory is that of the snapshot before, whatever was in it."""
    memory, (model, optimizer, scaler) = checkpoint.HostMemory(), make_parts(seed=1)
    for step in (1, 2):
        taken = snapshot(step, (model, optimizer, scaler), memory=memory, average=model)
        expected = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scaler.state_dict()])
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scaler.load_state_dict(scaler.state_dict() | {"scale": 1.0})
        path = checkpoint.save(tmp_path, taken)
        ours = make_parts(seed=2, steps=0)
        load(path, ours, average=(average := make_parts(seed=3)[0]))
        assert_equal([part.state_dict() for part in ours], expected)
        assert_equal(dict(average.state_dict()), dict(expected[0]))


def test_a_save_does_not_read_older_checkpoints_again(tmp_path, monkeypatch):
    read: list[str] = []
    real = store._sha256
    monkeypatch.setattr(store, "_sha256", lambda path: (read.append(f"{path.parent.name}/{path.name}"), real(path))[1])
    paths = [save(tmp_path, step) for step in range(1, 6)]
    names = ("model.safetensors", "config.json", "state.pt")
    assert read == [f"0000000{step}.tmp/{name}" for step in range(1, 6) for name in names]
    content = (paths[-1] / "state.pt").read_bytes()
    (paths[-1] / "state.pt").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(paths[-1] / "state.pt", ns=(0, 0))
    save(tmp_path, 6)
    assert "00000005/state.pt" in read and valid_steps(tmp_path) == [6, 4], "a change since then is seen"


def test_a_step_is_saved_once(tmp_path):
    path = save(tmp_path, 1)
    before = (path / "manifest.json").stat().st_mtime_ns
    save(tmp_path, 1, parts=make_parts(seed=8))
    assert (path / "manifest.json").stat().st_mtime_ns == before


# -- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A run folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("pristine")
    save(folder, 1)
    save(folder, 2)
    return folder


@pytest.fixture
def newest(pristine, tmp_path) -> Path:
    """The checkpoint of step 2 in a copy of `pristine`."""
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    return tmp_path / "checkpoints" / "00000002"


FILES = ["model.safetensors", "config.json", "state.pt", "manifest.json"]


def test_a_step_is_saved_again_once_its_evaluation_is_made(tmp_path):
    parts = make_parts()
    for train_loss in (0.5, 0.5, None):
        state = TrainState(step=5, images=500, train_loss=train_loss)
        path = checkpoint.save(tmp_path, snapshot(5, parts, state=state))
        assert load(path, make_parts(seed=1)) == state and valid_steps(tmp_path) == [5]


def assert_falls_back(newest: Path, caplog, *, why: str) -> None:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(newest.parent.parent) == newest.with_name("00000001")
    assert len(caplog.messages) == 1
    assert str(newest) in caplog.text and why in caplog.text


@pytest.mark.parametrize("file", FILES)
def test_truncation_at_each_tenth(newest, caplog, file):
    size = (newest / file).stat().st_size
    for tenth in reversed(range(10)):
        os.truncate(newest / file, size * tenth // 10)
        assert_falls_back(newest, caplog, why=file)


def flip(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8)[tensor.nbytes // 2] ^= 4


COPIES: dict[str, Callable[[checkpoint.Snapshot], torch.Tensor]] = {
    "weights": lambda copied: copied.weights["model.safetensors"]["0.weight"],
    "average": lambda copied: copied.weights["model_ema.safetensors"]["2.bias"],
    "moment": lambda copied: copied.state["optimizer"]["state"][1]["exp_avg_sq"],
}


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("what", COPIES)
def test_a_bit_that_flips_before_the_file_is_written_fails_the_save(tmp_path, what, copies):
    """The copy in host memory lives as long as a slow disk needs. The next save is a copy of its own."""
    parts, memory = make_parts(seed=1), checkpoint.HostMemory() if copies else None
    first = save(tmp_path, 1, parts=parts, average=parts[0], memory=memory)
    copied = snapshot(2, parts, average=parts[0], memory=memory)
    flip(COPIES[what](copied))
    with pytest.raises(OSError, match="holds other numbers than the training: a bit has flipped"):
        checkpoint.save(tmp_path, copied)
    assert checkpoint.latest(tmp_path) == first and [path.name for path in first.parent.iterdir()] == [first.name]
    second = save(tmp_path, 2, parts=make_parts(seed=1), average=parts[0], memory=memory)
    assert checkpoint.why_invalid(second) is None


@pytest.mark.parametrize("writer, name", [("write_weights", "model.safetensors"), ("torch.save", "state.pt")])
def test_a_file_with_other_bytes_than_were_given_fails_the_save(tmp_path, monkeypatch, writer, name):
    owner, function = (store, "write_weights") if writer == "write_weights" else (torch, "save")
    write = getattr(owner, function)

    def write_otherwise(content: object, path: Path) -> None:
        write(content, path)
        data = bytearray(path.read_bytes())
        place = data.find(make_parts(seed=5)[0][1].weight.detach().numpy().tobytes() if name != "state.pt" else moment)
        assert place > 0
        data[place + 5] ^= 1
        path.write_bytes(data)

    parts = make_parts(seed=5)
    moment = parts[1].state[parts[0][1].weight]["exp_avg"].numpy().tobytes()
    monkeypatch.setattr(owner, function, write_otherwise)
    with pytest.raises(OSError, match=f"{name} holds other numbers"):
        save(tmp_path, 5, parts=parts)
    assert checkpoint.checkpoints(tmp_path) == []


@pytest.mark.parametrize("what", ["model", "average", "moment"])
def test_a_bit_that_flips_while_a_checkpoint_is_loaded_is_told(tmp_path, monkeypatch, what):
    parts = make_parts(seed=1)
    path = save(tmp_path, 1, parts=parts, average=parts[0])
    read_state, load_weights = resume.read_state, resume.load_weights

    def read(path: Path) -> dict:
        content = read_state(path)
        if what == "moment":
            flip(content["optimizer"]["state"][1]["exp_avg"])
        return content

    def load_into(model: nn.Module, path: Path) -> None:
        load_weights(model, path)
        if path.name == {"model": "model.safetensors", "average": "model_ema.safetensors"}.get(what):
            flip(model[0].weight.detach())

    monkeypatch.setattr(resume, "read_state", read)
    monkeypatch.setattr(resume, "load_weights", load_into)
    with pytest.raises(ValueError, match=r"What was loaded from .* is not what was saved: a bit has flipped"):
        load(path, make_parts(seed=2, steps=0), average=make_parts(seed=3)[0])


def test_a_checkpoint_of_an_older_version_has_no_sums(tmp_path):
    parts = make_parts(seed=1)
    path = save(tmp_path, 1, parts=parts)
    recorded = json.loads((path / "manifest.json").read_text())["parts"]
    assert all(part.pop("sums") for name, part in recorded.items() if name != "config.json")
    (path / "manifest.json").write_text(store._manifest(recorded, step=1))
    assert checkpoint.why_invalid(path) is None
    fresh = make_parts(seed=2, steps=0)
    load(path, fresh)
    assert_equal(dict(parts[0].state_dict()), dict(fresh[0].state_dict()))


@pytest.mark.parametrize("file", FILES)
def test_flipped_bits(newest, caplog, file):
    content = (newest / file).read_bytes()
    places = range(len(content)) if file == "manifest.json" else range(0, len(content), len(content) // 40)
    for number, place in enumerate(places):
        flipped = bytearray(content)
        flipped[place] ^= 1 << number % 8
        (newest / file).write_bytes(flipped)
        assert_falls_back(newest, caplog, why=file if file != "manifest.json" else "")
    (newest / file).write_bytes(content)
    assert checkpoint.latest(newest.parent.parent) == newest


@pytest.mark.parametrize("file", FILES)
def test_a_deleted_part(newest, caplog, file):
    (newest / file).unlink()
    assert_falls_back(newest, caplog, why=f"{file} cannot be read")


@pytest.mark.parametrize("text", ["[]", "{}", "null", '"parts"', '{"parts": []}', '{"parts": {"state.pt": 1}}', "\xff"])
def test_a_manifest_that_is_none(newest, caplog, text):
    (newest / "manifest.json").write_text(text, encoding="latin-1")
    assert_falls_back(newest, caplog, why="manifest.json")


def test_a_checkpoint_under_another_step(newest, caplog):
    newest.rename(newest.with_name("00000005"))
    assert_falls_back(newest.with_name("00000005"), caplog, why="manifest.json")


def test_nothing_valid(newest):
    for path in newest.parent.iterdir():
        (path / "state.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="None of the 2 checkpoints .* is valid .*choose another --run.folder"):
        checkpoint.latest(newest.parent.parent)


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(newest):
    (newest / "state.pt").write_bytes(b"")
    save(newest.parent.parent, 2)
    assert valid_steps(newest.parent.parent) == [2, 1]


# -- the best ----------------------------------------------------------------------------------------------------


def state(step: int, best: int) -> TrainState:
    return TrainState(step=step, images=100 * step, skipped=2, data="their digest", best=("top1", 70.0 + best, best))


def test_the_best_is_kept_beside_the_newest_and_found_by_its_name(tmp_path):
    link = tmp_path / "checkpoints" / "best"
    for step in range(1, 7):
        save(tmp_path, step, state=state(step, best=min(step, 3)), average=make_parts(seed=step)[0])
        assert link.readlink() == Path(f"{min(step, 3):08d}")
    assert valid_steps(tmp_path) == [6, 5, 3]
    for average in (False, True):
        (found,) = checkpoint.find_weights(link, average=average)
        assert_equal(zoo.weights.read_weights(found), dict(make_parts(seed=3)[0].state_dict()))
    assert checkpoint.find_weights(tmp_path)[0].parent.name == "00000006", "a run folder stands for its newest"
    assert checkpoint.find_weights(link.with_name("00000005")) == checkpoint.find_weights(tmp_path, every=True)[1:2]
    assert load(checkpoint.latest(tmp_path), make_parts()).best == ("top1", 73.0, 3)
    save(tmp_path, 7, state=state(7, best=7))
    assert valid_steps(tmp_path) == [7, 6] and link.readlink() == Path("00000007")


def test_a_best_one_that_is_damaged_is_refused(tmp_path):
    path = save(tmp_path, 1, state=state(1, best=1))
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="best/model.safetensors has changed since it was written: restore it"):
        checkpoint.find_weights(tmp_path / "checkpoints" / "best")


def test_a_kill_before_the_link_is_healed_by_the_next_save(tmp_path, monkeypatch):
    save(tmp_path, 1, state=state(1, best=1))
    real = os.replace

    def die(old: Path, new: Path) -> None:
        if Path(new).name == "best":
            raise KeyboardInterrupt
        real(old, new)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", die)
        save(tmp_path, 2, state=state(2, best=2))
    assert (tmp_path / "checkpoints" / "best").readlink() == Path("00000001")
    for step in (3, 4, 5):
        save(tmp_path, step, state=state(step, best=2))
    names = ["00000002", "00000004", "00000005", "best"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names


def test_without_links_there_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Path, "symlink_to", lambda *paths: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    for step in (1, 2, 3):
        save(tmp_path, step, state=state(step, best=1))
    assert valid_steps(tmp_path) == [3, 2] and caplog.text.count("the best checkpoint is not kept") == 1


@pytest.mark.parametrize(
    "metric, values, best", [("top1", [50, 70, 70, 60], 2), ("loss", [3, 2, 1, 4], 3), ("none", [1, 2], None)]
)
def test_an_evaluation_that_is_better_than_all_before_is_the_best(tmp_path, metric, values, best):
    hook = checkpointing.Checkpoint(tmp_path, every_images=1, keep=2, config_text="", best=metric)
    trainer = SimpleNamespace(state=TrainState())
    for trainer.state.step, value in enumerate(values, start=1):
        hook.after_evaluate(trainer, {"top1": value, "loss": value})
    hook.after_evaluate(trainer, {"top1": float("nan"), "loss": float("nan")})
    assert trainer.state.best == (best and (metric, values[best - 1], best))


# -- how many are kept -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    for step in range(1, 6):
        save(tmp_path, step, keep=keep)
        assert valid_steps(tmp_path) == list(range(step, max(0, step - keep), -1))
    assert len(list((tmp_path / "checkpoints").iterdir())) == keep


def test_a_damaged_one_does_not_count_as_kept(newest):
    folder = newest.parent.parent
    (newest / "state.pt").write_bytes(b"")
    save(folder, 3)
    assert valid_steps(folder) == [3, 1]
    for path in checkpoint.checkpoints(folder):
        (path / "model.safetensors").write_bytes(b"")
    save(folder, 4)
    assert valid_steps(folder) == [4]
    save(folder, 5)
    assert [int(path.name) for path in checkpoint.checkpoints(folder)] == [5, 4]


def test_only_temporary_names_are_taken_apart(tmp_path, monkeypatch):
    removed: list[str] = []
    real = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path: (removed.append(path.name), real(path)))
    for step in range(1, 4):
        save(tmp_path, step)
    assert removed == ["00000001.removed.tmp"]


def test_steps_are_numbers_not_names(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    assert valid_steps(tmp_path) == [100_000_000, 99_999_999]


# -- in a thread -------------------------------------------------------------------------------------------------


def test_how_long_the_next_save_takes(tmp_path, monkeypatch):
    """The longest so far, and the rest of one under way, which counts as the longest when it is."""
    now, release = [100.0], threading.Event()
    monkeypatch.setattr(checkpointing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(checkpoint, "save", lambda *arguments, **options: release.wait(60))
    writer = checkpointing.Writer(tmp_path, keep=2)
    taken = []
    for seconds in (10.0, 4.0):
        writer.start(snapshot(1, make_parts()), began=now[0])
        now[0] += seconds
        taken.append(writer.next_takes_s())
        release.set()
        assert writer.wait(60)
        release.clear()
        taken.append(writer.next_takes_s())
    assert taken == [10.0, 10.0, 10.0 + 6.0, 10.0]


def test_what_is_no_oserror_is_not_swallowed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "save", lambda *arguments, **options: 1 / 0)
    writer = checkpointing.Writer(tmp_path, keep=2)
    writer.start(snapshot(1, make_parts()), began=0.0)
    with pytest.raises(ZeroDivisionError):
        writer.wait(60)


# -- what cannot be removed --------------------------------------------------------------------------------------


def test_leftovers_that_stay_do_not_stop_saving(tmp_path, monkeypatch, caplog):
    """As .nfs files of what somebody has open, and another user's: each is named once."""
    real, root = shutil.rmtree, tmp_path / "checkpoints"
    save(tmp_path, 1)
    for name in ("00000002.tmp", "00000002.1.tmp", "00000001.removed.tmp"):
        (root / name).mkdir()
    stuck = {*root.glob("*.tmp"), root / "00000001.removed.1.tmp"}

    def rmtree(path: Path, **options) -> None:
        if path in stuck:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    for step in (2, 3, 4):
        save(tmp_path, step)
    assert valid_steps(tmp_path) == [4, 3]
    assert {path.name for path in root.glob("*.tmp")} == {path.name for path in stuck}
    assert sorted(message.partition(" ")[0] for message in caplog.messages) == sorted(map(str, stuck))
    assert all("cannot be removed ([Errno 16] Device or resource busy" in message for message in caplog.messages)


def test_a_checkpoint_that_cannot_be_removed_stays(tmp_path, monkeypatch, caplog):
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "00000001":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    for step in range(1, 5):
        save(tmp_path, step)
    assert valid_steps(tmp_path) == [4, 3, 1] and len(caplog.messages) == 1


def test_a_folder_that_may_not_be_listed_is_not_empty(tmp_path, monkeypatch):
    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    save(tmp_path, 1)
    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    for read in (checkpoint.checkpoints, hub.find):
        with pytest.raises(OSError, match=r"Permission denied: '.*/checkpoints'"):
            read(tmp_path)
    assert why_unreadable(str(tmp_path)) == "it is a folder that may not be listed"


def test_a_run_folder_that_was_removed_is_not_made_again(tmp_path):
    with pytest.raises(OSError, match="the run folder was removed"):
        save(tmp_path / "run", 1)
    assert not (tmp_path / "run").exists()


# -- another run -------------------------------------------------------------------------------------------------


def changed(**sections) -> TrainConfig:
    """CONFIG with changes, as section={option: value}."""
    return replace(CONFIG, **{name: replace(getattr(CONFIG, name), **options) for name, options in sections.items()})


def test_another_run_is_refused_before_anything_is_loaded(tmp_path):
    path = save(tmp_path, 1)
    parts = make_parts(seed=5)
    before = {name: tensor.clone() for name, tensor in parts[0].state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load(path, parts, config=changed(optim={"lr": 0.5}, data={"global_batch_size": 64}, log={"every": "3 steps"}))
    message = str(caught.value)
    assert "--data.global_batch_size 32768, now 64" in message and "--optim.lr 0.001, now 0.5" in message
    assert "--log" not in message and "\n" not in message and "--run.folder" in message
    assert_equal(before, dict(parts[0].state_dict()))


def test_what_may_differ(tmp_path):
    path = save(tmp_path, 1)
    run = {"max_steps": 9, "folder": "elsewhere", "eval_every": "2 epochs", "device": "cpu", "ranks": "torch"}
    config = changed(
        run=run,
        horovod={"stall_limit_s": 64.0, "hang_limit_s": 5.0},
        model={"grad_checkpointing": True},
        data={"num_threads": 9, "eval_batch_size": 7},
        log={"to": None},
        checkpoint={"every": "2 epochs"},
    )
    load(path, make_parts(), config=config)


@pytest.mark.parametrize("rate, sentences", [(0.1, 1), (0.0, 0)])
def test_a_model_that_is_shared_otherwise_may_draw_other_masks(tmp_path, caplog, rate, sentences):
    whole = changed(model={"drop_path_rate": rate})
    shared = replace(whole, parallel=replace(whole.parallel, pipeline=2))
    path = save(tmp_path, 1, config_text=dump(whole))
    load(path, make_parts(), config=whole)
    assert not caplog.records
    load(path, make_parts(), config=shared)
    told = "--model.drop_path_rate 0.1: the model was whole and is now pipeline 2, "
    told += "so the run may go on with other masks"
    assert [record.getMessage() for record in caplog.records] == [told] * sentences


def test_a_ramp_by_noise_keeps_the_rows_at_which_it_decides(tmp_path):
    config = changed(schedule={"batch_ramp": "1024@0,noise"})
    path = save(tmp_path, 1, config_text=dump(config))
    load(path, make_parts(), config=replace(config, log=replace(config.log, to=None)))
    with pytest.raises(ValueError, match="--log.every '10 steps', now '5 steps': give the options it was made with"):
        load(path, make_parts(), config=replace(config, log=replace(config.log, every="5 steps")))


def test_data_that_were_moved(tmp_path):
    """Where they are does not matter if they are the same; model.weights, whatever it was, is in the checkpoint."""
    path = save(tmp_path, 1)
    config = changed(data={"path": "elsewhere"}, model={"weights": "other.safetensors"})
    load(path, make_parts(), config=config, images="their digest")
    with pytest.raises(ValueError, match="--data.path digits, now elsewhere: give"):
        load(path, make_parts(), config=config, images="another digest")
    load(path, make_parts(), config=CONFIG, images="another digest")  # `resume` warns


def test_a_config_of_another_version(tmp_path):
    path = save(tmp_path, 1, config_text="flux: {capacitor: 1}\n")
    with pytest.raises(ValueError, match="another version: .*flux"):
        load(path, make_parts(), config=CONFIG)


@pytest.mark.parametrize(
    "part, change",
    [
        ("state", {"step": "3"}),
        ("state", {"step": 10**9}),
        ("state", {"step": -1}),
        ("state", {"images": math.nan}),
        ("state", {"smoothed": ["a"]}),
        ("state", {"best": ("top1",)}),
        ("state", {"phases": [[1]]}),
        ("state", {"losses": 0.0}),
        ("state", {"of_a_later_version": 1}),
        ("state", None),
        ("optimizer", None),
        ("optimizer", {"param_groups": [1]}),
        ("optimizer", {"state": {0: "x"}}),
        ("scaler", 1),
        ("config", 5),
        (None, [1]),
    ],
)
def test_a_state_of_somebody_else_is_refused_in_one_sentence(tmp_path, part, change):
    path = save(tmp_path, 3)
    content = torch.load(path / "state.pt", weights_only=True)
    if part:
        content[part] = content[part] | change if isinstance(change, dict) else change
    forge(path, content if part else change)
    assert checkpoint.latest(tmp_path) == path
    with pytest.raises(ValueError, match="state.pt is not the state of a run at that step: remove .*/00000003, or"):
        load(path, make_parts(), config=CONFIG)


def forge(path: Path, content: object) -> None:
    """Put another content in the place of a state; the manifest is as it should be."""
    torch.save(content, path / "state.pt")
    recorded = json.loads((path / "manifest.json").read_text())["parts"]
    recorded["state.pt"] = {"bytes": (path / "state.pt").stat().st_size, "sha256": store._sha256(path / "state.pt")}
    (path / "manifest.json").write_text(store._manifest(recorded, step=3))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda state: state["param_groups"][0].update(betas=(2.0, 2.0)), r"group 0 has betas \(2.0, 2.0\), expected"),
        (lambda state: state["param_groups"][0].update(betas=(0.9, "x")), r"group 0 has betas \(0.9, 'x'\), expected"),
        (lambda state: state["param_groups"][0].update(betas=2), "group 0 has betas 2, expected"),
        (lambda state: state["state"].clear(), "it has no exp_avg of parameter 0"),
        (lambda state: state["state"].pop(5), "it has no exp_avg of parameter 5"),
        (lambda state: state["state"][1].pop("exp_avg_sq"), "it has no exp_avg_sq of parameter 1"),
        (lambda state: state["state"][1].update(exp_avg=3.0), "it has no exp_avg of parameter 1"),
        (
            lambda state: state["state"][1].update(exp_avg=torch.zeros(1)),
            r"exp_avg of parameter 1 has shape \(1,\), expected \(32,\)",
        ),
    ],
)
def test_a_state_without_moments_is_refused(tmp_path, optimizer, change, sentence):
    path = save(tmp_path, 3, parts=make_parts(optimizer=optimizer))
    content = torch.load(path / "state.pt", weights_only=True)
    change(content["optimizer"])
    forge(path, content)
    with pytest.raises(ValueError, match=f"optimizer's state in .*state.pt is not that of this run: {sentence}"):
        load(path, make_parts(optimizer=optimizer), config=CONFIG)


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors", "config.json", "state.pt"])
def test_a_pipe_in_place_of_a_part_is_not_waited_for(newest, caplog, file):
    (newest / file).unlink()
    os.mkfifo(newest / file)
    assert_falls_back(newest, caplog, why=file)
    found = hub._weights_of(newest.parent.parent, "model.safetensors").parent  # without a manifest nothing is checked
    assert found == (newest.with_name("00000001") if file in ("model.safetensors", "config.json") else newest)


# -- full disks and kills ----------------------------------------------------------------------------------------


def test_too_little_space_is_seen_before_writing(tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(store, "write_weights", lambda *arguments: pytest.fail("it began to write"))
    with pytest.raises(OSError, match="1e-06 GB free") as caught:
        save(tmp_path, 2)
    free = 2**20 + 3 * 5 * 1000  # enough for weights and moments, of 1,194 numbers each, but not for another model
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    with pytest.raises(OSError, match="GB free"):
        save(tmp_path, 2, average=make_parts()[0])
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000001"]


@pytest.mark.parametrize("largest", [100, 12_000], ids=["weights", "state"])
@pytest.mark.parametrize("free, said", [(10**9, "writing failed: "), (0, "writing failed, and the disk is full: ")])
def test_the_disk_is_called_full_only_if_it_is(tmp_path, monkeypatch, largest, free, said):
    """A limit of the size of a file fails the writes of safetensors, for the weights, and of torch, for the rest."""
    save(tmp_path, 1)
    usage, limits = shutil.disk_usage(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    left = iter([10**9, free])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=next(left)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == (errno.EIO if free else errno.ENOSPC)
    assert caught.value.strerror.startswith(said) and "\n" not in caught.value.strerror
    assert valid_steps(tmp_path) == [1]


@pytest.mark.parametrize("failing", range(6))
def test_a_failing_fsync(tmp_path, monkeypatch, failing):
    """The disk fills up where delayed writes show it; the fifth is the folder's, after the rename."""
    save(tmp_path, 1)
    calls = iter(range(100))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, 2)
    assert valid_steps(tmp_path) == ([2, 1] if failing == 5 else [1])
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
    save(tmp_path, 2)
    assert valid_steps(tmp_path) == [2, 1]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, list[dict]]:
    """What `python test_checkpoint.py FOLDER` says: one entry per child."""
    command = [warm.python(), __file__, str(tmp_path_factory.mktemp("children"))]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kill_after_any_change_leaves_valid_checkpoints(report):
    *killed, finished = report["lines"]
    for entry in killed:
        assert entry["exit"] == -signal.SIGKILL
        assert entry["valid"] in ([2, 1], [3, 2, 1], [3, 2]) and entry["best"] in entry["valid"], entry
    moments = [tuple(entry["valid"]) for entry in killed]
    assert len(moments) > 10 and set(moments) == {(2, 1), (3, 2, 1), (3, 2)}, "not every moment was met"
    names = ["00000002", "00000003", "best"]
    assert finished == {"exit": 0, "valid": [3, 2], "names": names, "best": 3}, "leftovers are not cleaned"


def test_a_kill_inside_a_file_leaves_the_earlier_ones(report):
    assert len(report["killed"]) == 10
    for entry in report["killed"]:
        assert entry["exit"] == -signal.SIGXFSZ and entry["valid"] == [2, 1], entry


def test_a_file_that_cannot_grow_is_an_oserror(report):
    assert len(report["full"]) == 10
    for entry in report["full"]:
        assert entry == {"exit": 7, "valid": [2, 1], "names": ["00000001", "00000002", "best"], "best": 1}


# -- the program -------------------------------------------------------------------------------------------------


def in_child(start: Path, parts: Parts, prepare: Callable[[], None]) -> dict:
    """Save step 3 into a copy of `start`, in a forked child that `prepare` made ready to die; what it left."""
    folder = start.with_name("copy")
    shutil.copytree(start, folder, symlinks=True)
    child = os.fork()
    if child == 0:
        try:
            writer, content = checkpointing.Writer(folder, keep=2), snapshot(3, parts, state=state(3, best=3))
            prepare()
            writer.start(content, began=0.0)
            assert writer.wait(60)
            os._exit(7 if writer.failure else 0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    best = int((folder / "checkpoints" / "best").readlink().name)
    report = {"exit": os.waitstatus_to_exitcode(status), "valid": valid_steps(folder), "names": names, "best": best}
    shutil.rmtree(folder)
    return report


def die_after_change(number: int, folder: Path) -> None:
    """SIGKILL this process at the first line, of those that write, after `number` changes of the files in `folder`.

    Between two changes a kill leaves the same files at any line.
    """
    seen, left = files_in(folder), iter(range(number))

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename not in WRITES:
            return None
        if event == "line" and (found := files_in(folder)) != seen:
            seen = found
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)  # the thread that writes; this one would look at files that vanish


def files_in(folder: Path) -> set[tuple]:
    entries = [entry for place, _, _ in os.walk(folder) for entry in os.scandir(place)]
    status = [(entry.path, entry.stat(follow_symlinks=False)) for entry in entries]
    return {(path, one.st_ino, one.st_size, one.st_mtime_ns) for path, one in status}


def limit_files(num_bytes: int, action: signal.Handlers) -> None:
    """No file may become larger: the write that tries is a signal, or an error if the signal is ignored."""
    signal.signal(signal.SIGXFSZ, action)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def main(folder: Path) -> dict[str, list[dict]]:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # slow, and no help against kills
    parts, start = make_parts(optimizer="AdamW"), folder / "start"
    start.mkdir()
    for step in (1, 2):
        path = save(start, step, parts=parts, state=state(step, best=1))
    for leftover in ("00000003.tmp", "00000000.removed.tmp"):
        shutil.copytree(path, path.with_name(leftover))
    lines: list[dict] = []
    while not lines or lines[-1]["exit"] != 0:
        lines.append(in_child(start, parts, lambda: die_after_change(len(lines), start.with_name("copy"))))
    largest = max(file.stat().st_size for file in path.iterdir())
    sizes = [largest * tenth // 10 for tenth in range(10)]
    killed = [in_child(start, parts, lambda: limit_files(size, signal.SIG_DFL)) for size in sizes]
    full = [in_child(start, parts, lambda: limit_files(size, signal.SIG_IGN)) for size in sizes]
    return {"lines": lines, "killed": killed, "full": full}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))))
