"""Shards that are missing, empty, cut or doubled: refused with their name, or used with a warning if that is meant."""

import argparse
import contextlib
import io
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from test_pack import encoded

from largebatch import assembly, pack
from largebatch.benchmark import loader
from largebatch.config import DataConfig, TrainConfig
from largebatch.data import records, shard_check, sources
from largebatch.data.records import IMAGE, LABEL
from largebatch.pack import packing, token_labels

COUNTS = {"train": 18, "validation": 4}


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def packed(tmp_path):
    """Packed images: 4 training shards of 4, 5, 4 and 5 images, 2 held-out shards, and packing.json."""
    for split, count in COUNTS.items():
        for k in range(count):
            file = tmp_path / "images" / split / "ab"[k % 2] / f"{k}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(k))
    num_shards = {"train": 4, "validation": 2}
    pack.pack(str(tmp_path / "images"), str(tmp_path / "packed"), num_shards=num_shards, seed=0, threads=1)
    return tmp_path / "packed"


@pytest.fixture
def plain(packed):
    """The same without packing.json, as most shards are published."""
    (packed / "packing.json").unlink()
    return packed


def shard(folder: Path, number: int) -> Path:
    return folder / f"train-{number:05d}-of-00004"


def cut(path: Path, records_left: int) -> None:
    """Truncate a shard at the end of a record."""
    start, length = records.record_spans(str(path))[records_left - 1]
    path.write_bytes(path.read_bytes()[: start + length + 4])


def opened(folder, **options):
    return sources.open_source(str(folder), split="train", **options)


def missing(folder):
    shard(folder, 2).unlink()
    return "lacks 1 of the 4 train shards that their names announce .train-00002-of-00004.: copy what is missing", 14


def emptied(folder):
    shard(folder, 1).write_bytes(b"")
    return "has 1 of 4 train shards without a record .train-00001-of-00004.: copy what is empty again", 13


def emptied_of_a_known_size(folder):
    shard(folder, 1).write_bytes(b"")
    return "has 13 train images, and packing.json says 18 .train-00001-of-00004 has 0 of 5.: copy the shards", 13


def shortened(folder):
    cut(shard(folder, 3), 2)
    return "has 15 train images, and packing.json says 18 .train-00003-of-00004 has 2 of 5.: copy the shards again", 15


def lengthened(folder):
    with open(shard(folder, 0), "ab") as file:
        file.write(shard(folder, 2).read_bytes())
    return "has 22 train images, and packing.json says 18 .train-00000-of-00004 has 8 of 4.", 22


def doubled(folder):
    shutil.copy(shard(folder, 1), folder / "train-00001-of-00004 (copy)")
    return r"train-00001-of-00004 .copy. holds the same images as train-00001-of-00004: remove one of them", 23


def replaced(folder):
    shutil.copy(shard(folder, 1), shard(folder, 3))
    return "train-00003-of-00004 holds the same images as train-00001-of-00004: remove one of them", 18


def added(folder):
    payloads = [records.encode_example({IMAGE: [encoded(90)], LABEL: [1]})]
    records.write_records(folder / "train-00004-of-00004", payloads)
    return "has 5 train shards where their names announce 4 .train-00004-of-00004.: remove what does not", 19


def numbered_twice(folder):
    payloads = [records.encode_example({IMAGE: [encoded(90)], LABEL: [1]})]
    records.write_records(folder / "train-00002-of-00004.tfrecord", payloads)
    return "has 5 train shards where their names announce 4 .train-00002-of-00004.tfrecord.: remove", 19


BOTH = (missing, doubled, replaced, added, numbered_twice)
FAULTS = [(kind, fault) for kind in ("packed", "plain") for fault in BOTH]
FAULTS += [("plain", emptied), ("packed", emptied_of_a_known_size), ("packed", shortened), ("packed", lengthened)]


@pytest.mark.parametrize("kind, fault", FAULTS)
def test_data_that_are_not_whole_are_refused_unless_allowed(kind, fault, request, capsys, caplog):
    folder = request.getfixturevalue(kind)
    sentence, left = fault(folder)
    with pytest.raises(ValueError, match=f"{folder}.*{sentence}.*; to .*, set --data.allow_incomplete true"):
        opened(folder)
    assert len(sources.open_source(str(folder), split="validation")) == 4, "the other split is whole"
    assert pack.run(["check", str(folder)]) == 1
    assert f"train: {left} images, 0 bad" in (output := capsys.readouterr().out) and "quarantine" not in output
    with pytest.raises(ValueError, match=f"{sentence}.*; to train or validate "):  # a packed copy would look whole
        pack.run([str(folder), str(folder.parent / "again")])
    caplog.clear()
    index = opened(folder, allow_incomplete=True)
    assert len(index) == left and caplog.text.count(f"{left} train images that are there") == 1
    assert index.label.max() == 1 and caplog.records[-1].levelno == logging.WARNING


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_whole_folders_are_not_talked_about(kind, request, caplog, capsys):
    folder = request.getfixturevalue(kind)
    caplog.set_level(logging.WARNING)
    assert [len(sources.open_source(str(folder), split=split)) for split in COUNTS] == [18, 4] and not caplog.text
    assert pack.run(["check", str(folder)]) == 0
    assert capsys.readouterr().out == "train: 18 images, 0 bad\nvalidation: 4 images, 0 bad\n"


def test_shards_of_other_names_are_whole(plain):
    for k in range(4):
        shard(plain, k).rename(plain / f"train-{k + 1}-of-4.tfrecord")  # some count from 1
    assert len(opened(plain)) == 18
    (plain / "train-3-of-4.tfrecord").unlink()
    with pytest.raises(ValueError, match="lacks 1 of the 4 train shards .* .train-3-of-4.tfrecord."):
        opened(plain)
    for k, name in enumerate(("1", "2", "4")):
        (plain / f"train-{name}-of-4.tfrecord").rename(plain / f"train-part{k}")
    assert len(opened(plain)) == 14, "names that announce nothing are believed"
    (plain / "train").mkdir()
    for k in range(3):
        (plain / f"train-part{k}").rename(plain / "train" / f"train-a-0000{k}-of-00003")
    for k in range(2):
        shutil.copy(plain / f"validation-0000{k}-of-00002", plain / "train" / f"train-b-0000{k}-of-00002")
    assert len(opened(plain)) == 18, "two sets"


def test_many_missing_shards_are_counted(plain):
    for k in range(1, 4):
        shard(plain, k).unlink()
    shard(plain, 0).rename(plain / "train-00005-of-01024")
    with pytest.raises(ValueError, match="lacks 1023 of .* .train-00000-of-01024, .*2-of-01024 and 1,020 more."):
        opened(plain)


def test_shards_in_quarantine_are_whole(packed):
    """Left out or lost behind a wrong length, and listed: that is known, and no loss."""
    data = bytearray(shard(packed, 0).read_bytes())
    start, length = records.record_spans(str(shard(packed, 0)))[2]
    data[start + length // 2] ^= 1
    shard(packed, 0).write_bytes(data)
    data = bytearray(shard(packed, 1).read_bytes())
    for start, _ in records.record_spans(str(shard(packed, 1)))[1:3]:
        data[start - 9] ^= 1
    shard(packed, 1).write_bytes(data)
    assert pack.run(["check", str(packed)]) == 1
    assert len(opened(packed)) == 15
    cut(shard(packed, 3), 4)
    with pytest.raises(ValueError, match="has 16 train .* says 18 .train-00003-of-00004 has 4 of 5.: copy the shards"):
        opened(packed)


def test_numbers_of_token_labels_are_read(plain):
    """An empty shard is whole there if the number of images is right: all of its images may have been in quarantine."""
    (plain / "token_labels.json").write_text(json.dumps({"teacher": "x", "images": 18, "digest": "0"}))
    assert len(opened(plain)) == 18
    cut(shard(plain, 3), 2)
    with pytest.raises(ValueError, match="has 15 train images, and token_labels.json says 18: copy the shards again"):
        opened(plain)
    cut(shard(plain, 0), 1)
    shard(plain, 1).write_bytes(b"")
    (plain / "token_labels.json").write_text(json.dumps({"images": 7}))
    assert opened(plain).shard_sizes == (1, 0, 4, 2)


@pytest.mark.parametrize("text", ["[]", "{}", '{"images": {}}', '{"images": "18"}', '{"images": {"train": 18}}', "17"])
def test_other_files_of_that_name_are_ignored(plain, text):
    (plain / "packing.json").write_text(text)
    assert len(opened(plain)) == 18


def test_a_damaged_packing_json_is_named(packed):
    (packed / "packing.json").write_bytes((packed / "packing.json").read_bytes()[:-9])
    with pytest.raises(ValueError, match=f"{packed}/packing.json is damaged .*: copy it again, or remove it"):
        opened(packed)
    assert shard_check.PLANS == (packing.PLAN, token_labels.PLAN)


def test_the_option_arrives_and_the_benchmark_only_warns(plain, caplog):
    missing(plain)
    comm = SimpleNamespace(
        rank=0,
        size=1,
        local_rank=0,
        from_rank_0=lambda work, phase: work(),
        together=lambda phase: contextlib.nullcontext(),
        progress=lambda: None,
    )
    data = DataConfig(path=str(plain), allow_incomplete=True)
    config = TrainConfig(data=data)
    config = replace(config, model=replace(config.model, num_classes=2))
    assert len(assembly.open_data(config, comm, "train")) == 14
    with pytest.raises(ValueError, match="set --data.allow_incomplete true"):
        assembly.open_data(replace(config, data=replace(data, allow_incomplete=False)), comm, "train")
    parser = argparse.ArgumentParser()
    loader.add_options(parser)
    caplog.clear()
    with pytest.raises(ValueError, match="--batch-size is 99, expected 1 to 14"):
        loader.run(parser.parse_args(["--data", str(plain), "--batch-size", "99", "--device", "cpu"]))
    assert "lacks 1 of the 4 train shards" in caplog.text


def test_equal_sizes_are_not_equal_shards(tmp_path):
    """Without compression, all images have the same length; these two differ in the middle."""
    pixels = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    for k in range(2):
        pixels[150] += k
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "BMP")
        payload = records.encode_example({IMAGE: [file.getvalue()], LABEL: [1]})
        records.write_records(tmp_path / f"train-0000{k}-of-00002", [payload])
    assert len(opened(tmp_path)) == 2
    shutil.copy(tmp_path / "train-00000-of-00002", tmp_path / "train-00001-of-00002")
    with pytest.raises(ValueError, match="train-00001-of-00002 holds the same images as train-00000-of-00002"):
        opened(tmp_path)
