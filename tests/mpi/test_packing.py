"""Packing under MPI, and training on data with bad records: they are found, left out, or named if they slip through."""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import launch
from runs import SMALL

from largebatch import pack
from largebatch.data import records, sources

SHARDS = {"train": 5, "validation": 3}
COMMAND = ["-m", "largebatch.pack"]
OPTIONS = ["--shards", "5", "--validation-shards", "3", "--threads", "2"]
BATCH = ["--data.global_batch_size", "48", "--data.micro_batch_size", "12"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Some of the digits as image files: 96 for training, 24 held out."""
    folder = tmp_path_factory.mktemp("digits")
    for split, count in (("train", 96), ("validation", 24)):
        images = sources.digits(split)
        for k in range(len(images.labels) - count, len(images.labels)):  # the first ones lack some classes
            (folder / split / str(images.labels[k])).mkdir(parents=True, exist_ok=True)
            (folder / split / str(images.labels[k]) / f"{k:04d}.jpg").write_bytes(images.encoded(k))
    return folder


@pytest.fixture(scope="module")
def packed(digits) -> Path:
    """The same, packed by one process."""
    folder = digits.parent / "packed"
    pack.pack(str(digits), str(folder), num_shards=SHARDS, seed=0, threads=1)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_ranks_pack_what_one_would(tmp_path, digits, packed):
    """Also where they go on with what is there."""
    for missing in ([], ["train-00001-of-00005", "train-00002-of-00005"]):
        for name in missing:
            (tmp_path / "out" / name).unlink()
        code, output = launch([*COMMAND, str(digits), str(tmp_path / "out"), *OPTIONS], ranks=2)
        assert code == 0 and output.count("train: 96 images\nvalidation: 24 images") == 1, output
        assert contents(tmp_path / "out") == contents(packed)


def test_a_bad_image_on_one_rank_ends_them_all(tmp_path, packed):
    source, out = shutil.copytree(packed, tmp_path / "source"), tmp_path / "out"
    index = sources.open_source(str(source), split="train")
    spoil(index, 50)
    code, output = launch([*COMMAND, str(source), str(out), *OPTIONS], ranks=2, timeout_s=60)
    assert code != 0 and index.where(50) in output and " of 2: " in output and "Traceback" not in output, output


def test_a_launcher_of_another_mpi_is_refused(tmp_path, digits):
    """Each process would pack everything."""
    command = [*COMMAND, str(digits), str(tmp_path / "out")]
    code, output = launch(command, ranks=1, launcher="python", environment={"PMI_SIZE": "2"})
    assert code == 2 and "The launcher announced 2 processes, but mpi4py sees 1" in output, output


def test_a_rank_that_sees_other_images_is_refused(tmp_path, digits):
    """As on hosts with copies of their own, one of them stale. One shard of each split: rank 1 has none to write."""
    for rank in range(2):
        copy = shutil.copytree(digits, tmp_path / str(rank) / "images")
        sorted((copy / "train").rglob("*.jpg"))[rank].unlink()
    program = f"import os, sys; os.chdir('{tmp_path}/' + os.environ['OMPI_COMM_WORLD_RANK']); "
    program += "from largebatch.pack import main; raise SystemExit(main(sys.argv[1:]))"
    options = ["--shards", "1", "--validation-shards", "1"]
    code, output = launch(["-c", program, "images", str(tmp_path / "out"), *options], ranks=2, timeout_s=60)
    told = "rank 1 of 2: The images of this rank are not those of rank 0 (digest "
    assert code != 0 and told in output and "give all hosts the same images" in output, output
    shards = {"train": 1, "validation": 1}
    assert pack.pack(str(tmp_path / "0" / "images"), str(tmp_path / "out"), num_shards=shards, seed=0, threads=1)


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun --gloo"])
def test_a_launcher_without_mpi_is_refused(tmp_path, digits, launcher):
    code, output = launch([*COMMAND, str(digits), str(tmp_path / "out")], ranks=2, launcher=launcher)
    assert code != 0 and f"{launcher} started several processes, but pack shares its work by MPI" in output
    assert not (tmp_path / "out").exists()


def spoil(index: sources.Index, sample: int) -> None:
    """Give the second half of an image's bytes to zeros and keep the CRC; the file looks as old as before."""
    path, offset, length = index.files[index.file[sample]], int(index.offset[sample]), int(index.length[sample])
    status = os.stat(path)
    whole = b""
    for start, payload, _ in records.scan_records(path):
        at = offset - start
        if 0 <= at < len(payload):
            payload = payload[: at + length // 2] + bytes(length - length // 2) + payload[at + length :]
        whole += records.frame(payload)
    Path(path).write_bytes(whole)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def train(folder: Path, data: Path, *options: str) -> tuple[int, str]:
    """One epoch on two ranks."""
    arguments = [*SMALL, *BATCH, "--recipe", "quickstart", "--data", str(data), "--run.folder", str(folder)]
    length = ["--run.duration", "2 steps", "--run.eval_every", "2 steps"]
    return launch(["-m", "largebatch.train", *arguments, *length, *options], ranks=2, timeout_s=100)


def test_a_bad_record_that_slips_through_is_named(tmp_path, packed):
    data = shutil.copytree(packed, tmp_path / "data")
    index = sources.open_source(str(data), split="train")
    spoil(index, 50)
    code, output = train(tmp_path / "run", data)
    assert code != 0 and f"{index.where(50)} cannot be decoded" in output, output
    assert "rank 0 of 2" in output or "rank 1 of 2" in output


def test_three_bad_records_are_left_out_of_a_run(tmp_path, packed):
    data = shutil.copytree(packed, tmp_path / "data")
    index = sources.open_source(str(data), split="train")
    for sample in (10, 70):
        spoil(index, sample)
    path = Path(index.files[4])
    damaged = bytearray(path.read_bytes())
    damaged[index.offset[90] + 5] ^= 1
    path.write_bytes(damaged)
    code, output = launch([*COMMAND, "check", str(data)], ranks=1, launcher="python")
    assert code == 1 and "train: 96 images, 3 bad" in output and "validation: 24 images, 0 bad" in output, output

    code, output = train(tmp_path / "run", data, "--run.max_steps", "1")
    assert code == 0 and output.count("3 of 96 train images are left out") == 1, output
    assert "not those of" not in output

    shutil.rmtree(data)
    shutil.copytree(packed, data)
    code, output = train(tmp_path / "run", data)
    assert code == 0 and output.count("the training images are not those of") == 1 and "96 now" in output, output
    assert latest_data(tmp_path / "run") == digest_of(data)
    code, output = train(tmp_path / "run", data)
    assert code == 0 and "not those of" not in output, output


def latest_data(run: Path) -> str:
    """What the newest checkpoint of a run says about its training images."""
    newest = max((run / "checkpoints").glob("[0-9]*"))
    return torch.load(newest / "state.pt", weights_only=True)["state"]["data"]


def digest_of(data: Path) -> str:
    """Sixteen digits of the SHA-256 of file numbers, offsets, lengths and labels, found here by reading the records."""
    columns: list[list[int]] = [[], [], [], []]
    for number, path in enumerate(sorted(data.glob("train-*"))):
        content = path.read_bytes()
        for start, payload, _ in records.scan_records(str(path)):
            features = records.decode_example(payload)
            (image,), (label,) = features[records.IMAGE], features[records.LABEL]
            for column, value in zip(columns, (number, content.index(image, start), len(image), label - 1)):
                column.append(value)
    types = (np.int32, np.int64, np.int64, np.int64)
    joined = b"".join(np.array(column, dtype=kind).tobytes() for column, kind in zip(columns, types))
    return hashlib.sha256(joined).hexdigest()[:16]
