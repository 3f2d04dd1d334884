"""The real loaders on any number of ranks: every image once, the same batches, the same counts."""

import io
import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parts import small_model
from PIL import Image

from largebatch import assembly
from largebatch.config import DataConfig, ModelConfig, TrainConfig
from largebatch.data.dali import EvalLoader, TrainLoader
from largebatch.data.order import Plan
from largebatch.data.sources import open_source
from largebatch.engine import evaluate
from largebatch.ranks import Stopped, ranks

GEOMETRY = {"img_size": 8, "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear", "num_threads": 1}
CPU = torch.device("cpu")


def held_out(shard: int, num_shards: int, *, batch_size: int = 50) -> EvalLoader:
    index = open_source("digits", split="validation").for_classes(10)
    return EvalLoader(
        index, shard=shard, num_shards=num_shards, batch_size=batch_size, crop_pct=1.0, device=CPU, **GEOMETRY
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = small_model()
    model[-1] = torch.nn.Linear(32, 10)
    return model


@pytest.mark.parametrize("batch_size", [1000, 50, 7])  # all in one batch, a short last one, many
def test_validation_counts_each_image_once(comm, model, batch_size):
    ours = evaluate(
        model, held_out(comm.rank, comm.size, batch_size=batch_size), comm=comm, device=CPU, precision="fp32"
    )
    correct = images = 0
    for batch in held_out(0, 1, batch_size=batch_size):  # the whole set on this rank alone
        with torch.inference_mode():
            correct += int((model(batch.images).argmax(1) == batch.labels).sum())
        images += len(batch.labels)
    assert ours["images"] == images == 360
    assert ours["top1"] == 100 * correct / 360


def test_training_sees_each_image_once_per_epoch(comm):
    index = open_source("digits", split="train").for_classes(10)
    plan = Plan(num_samples=len(index), global_batch_size=192, micro_batch_size=8, num_images=2 * len(index), seed=5)
    loader = TrainLoader(
        index, plan, shard=comm.rank, num_shards=comm.size, scale=(0.5, 1.0), ratio=(1.0, 1.0), hflip=0.5,
        device=CPU, **GEOMETRY,
    )  # fmt: skip
    mine = [(batch.step, batch.number, batch.samples.tolist(), float(batch.images.sum())) for batch in loader]
    everything = sorted(sum(comm.allgather_object(mine, name="batches"), []))
    stream = np.concatenate([samples for _, _, samples, _ in everything])
    assert np.array_equal(stream, plan.samples(0, plan.num_images)[1])
    for epoch in (0, 1):
        assert np.array_equal(np.sort(stream[epoch * len(index) : (epoch + 1) * len(index)]), np.arange(len(index)))


# -- the index of rank 0 ---------------------------------------------------------------------------------------------

COUNTED = ("open", "os.listdir", "os.scandir")
calls: list[str] = []


@pytest.fixture(scope="module")
def audited():
    """Note in `calls` each folder that is listed and each file that is opened, from now on."""
    sys.addaudithook(lambda event, given: calls.append(f"{event} {given[0]}") if event in COUNTED else None)


@pytest.fixture
def noted_calls(audited, monkeypatch):
    """Files whose status is asked for, too, of which Python does not tell."""

    def noting(name, real):
        return lambda path, *rest, **options: calls.append(f"{name} {path}") or real(path, *rest, **options)

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    return calls


def image_folder(folder: Path, count: int) -> TrainConfig:
    """Write a folder of small images of two classes; return a config that trains on them."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    for k in range(count):
        place = folder / "train" / f"class{k % 2}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{k}.jpg").write_bytes(file.getvalue())
    return config_for(folder, num_classes=2)


def config_for(folder: Path, *, num_classes: int = 10) -> TrainConfig:
    return TrainConfig(data=DataConfig(path=str(folder)), model=ModelConfig(num_classes=num_classes))


def test_only_rank_0_looks_at_each_image(comm, tmp_path, noted_calls):
    """The others do not even look for the index that is kept."""
    folder = Path(comm.broadcast_object(str(tmp_path), name="folder"))
    found = []
    for count in (20, 20, 200):
        config = config_for(folder / str(count), num_classes=2)
        if comm.rank == 0:
            image_folder(folder / str(count), count)
        comm.barrier(name="written")
        for _ in ("built", "kept"):
            noted_calls.clear()
            index = assembly.open_data(config, comm, "train")
            found.append(list(noted_calls))
            assert len(index) == count
    _, _, *known, built, kept = found  # the first two also import
    if comm.rank == 0:
        assert min(len(built), len(kept)) > 200
    else:
        assert [len(noted) for noted in known] == [len(built)] * 2 == [len(kept)] * 2 and len(built) < 20, kept


def test_the_others_hear_that_rank_0_goes_on(comm, monkeypatch):
    heard, waits, real = threading.Event(), [], ranks.wait

    def wait(tasks, limit_s=None):
        waits.append(limit_s)
        if len(waits) == 5:
            heard.set()
        return real(tasks, limit_s and 0.001)

    def work():
        assert heard.wait(10)
        return {"rank": comm.rank, "numbers": np.arange(1000)}

    monkeypatch.setattr(ranks, "wait", wait)
    monkeypatch.setattr("largebatch.ranks.horovod.PIECE", 99)
    result = comm.from_rank_0(work, phase="working")
    assert result["rank"] == 0 and np.array_equal(result["numbers"], np.arange(1000))
    assert len(waits) >= 5 if comm.rank == 0 else not waits


def test_a_failure_of_rank_0_is_told_once(comm):
    def work():
        raise ValueError(f"rank {comm.rank} has found nothing")

    with pytest.raises(Stopped, match="^rank 0 has found nothing$"):
        comm.from_rank_0(work, phase="looking")


@pytest.fixture
def own_copy(comm, tmp_path, monkeypatch):
    """The digits in a folder of each rank, under one name for all; the last rank is on another host."""
    files = [Path(path) for path in open_source("digits", split="train").files]
    monkeypatch.chdir(tmp_path)
    for path in files:
        shutil.copy(path, ".")
    monkeypatch.setattr(comm, "local_rank", 0 if comm.rank in (0, comm.size - 1) else 1)
    return [path.name for path in files]


def test_a_missing_shard_stops_all_ranks_unless_it_is_meant(comm, own_copy):
    """Training and validation open their images in the same way."""
    Path(own_copy[1]).unlink()
    config = config_for(Path("."))
    with pytest.raises(Stopped, match="^[^,]* lacks 1 of the 4 train .*train-00001-of-.*--data.allow_incomplete"):
        assembly.open_data(config, comm, "train")
    allowed = replace(config, data=replace(config.data, allow_incomplete=True))
    assert len(assembly.open_data(allowed, comm, "train")) < 1437


@pytest.mark.parametrize("harm", ["missing", "longer"])
def test_a_host_with_other_files_stops_all_ranks(comm, own_copy, harm):
    config, path = config_for(Path(".")), Path(own_copy[1])
    if comm.rank == comm.size - 1 > 0:
        path.unlink() if harm == "missing" else path.write_bytes(path.read_bytes() + b"0")
    if comm.size == 1:
        assert len(assembly.open_data(config, comm, "train")) == 1437
        return
    reason = "cannot be read here: No such file" if harm == "missing" else "has [0-9,]+ bytes here, and [0-9,]+ on the "
    last = f"rank {comm.size - 1} of {comm.size}"
    with pytest.raises(Stopped, match=f"^{last}, .*{path}.* {reason}.*the data of all hosts"):
        assembly.open_data(config, comm, "train")


def test_a_host_with_a_copy_looks_at_its_files_alone(comm, tmp_path, noted_calls, monkeypatch):
    """If both hosts see one file system, some files are enough."""
    monkeypatch.setattr(comm, "local_rank", 0)
    shared = Path(comm.broadcast_object(str(tmp_path), name="folder"))
    image_folder(tmp_path / "copy", 300)  # written by rank 0 for all
    comm.barrier(name="written")
    monkeypatch.chdir(tmp_path)
    for folder, calls_for_each in ((shared / "copy", 0), (Path("copy"), 1)):
        noted_calls.clear()
        assert len(assembly.open_data(config_for(folder, num_classes=2), comm, "train")) == 300
        if comm.rank:
            assert calls_for_each <= len(noted_calls) / 300 < calls_for_each + 0.5
