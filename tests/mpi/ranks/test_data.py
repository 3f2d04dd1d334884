"""The real loaders on any number of ranks: every image once, the same batches, the same counts."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parts import small_model

from largebatch import build
from largebatch.comm import Stopped
from largebatch.comm.preflight import agree_on
from largebatch.config import DataConfig, ModelConfig, TrainConfig
from largebatch.data.dali import EvalLoader, TrainLoader
from largebatch.data.order import Plan
from largebatch.data.sources import open_source
from largebatch.engine import evaluate

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


def test_ranks_with_other_images_stop_together(comm):
    index = open_source("digits", split="validation")
    agree_on(comm, index.digest(), name="images")
    if comm.size > 1:
        mine = index.without([3]) if comm.rank == 1 else index
        with pytest.raises(Stopped, match=f"rank 1 of {comm.size} has other images than rank 0"):
            agree_on(comm, mine.digest(), name="images")


def test_a_missing_shard_stops_all_ranks_unless_it_is_meant(comm, tmp_path, monkeypatch):
    """Training and validation open their images in the same way; here one rank alone sees the shard missing."""
    files = open_source("digits", split="train").files
    monkeypatch.chdir(tmp_path)  # a folder for each rank, under one name for all
    for path in files:
        shutil.copy(path, ".")
    if comm.rank == comm.size - 1:
        Path(Path(files[1]).name).unlink()
    data = DataConfig(path=".")
    config = TrainConfig(data=data, model=ModelConfig(num_classes=10))
    with pytest.raises(Stopped, match="lacks 1 of the 4 train shards .*train-00001-of-00004.*--data.allow_incomplete"):
        build.open_data(config, comm, "train")
    Path(Path(files[1]).name).unlink(missing_ok=True)
    allowed = replace(config, data=replace(data, allow_incomplete=True))
    assert len(build.open_data(allowed, comm, "train")) < 1437
