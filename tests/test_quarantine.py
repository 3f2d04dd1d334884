"""Bad images: found and listed by `pack check`, left out of the index alike everywhere, never without a word."""

import csv
import dataclasses
import io
import logging
import os
import re
import shlex
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from test_pack import encoded

from largebatch import pack
from largebatch.data import quarantine, records, sources
from largebatch.data.dali import EvalLoader, TrainLoader
from largebatch.data.order import Plan
from largebatch.data.records import IMAGE, LABEL

SPLITS = {"train": 12, "validation": 5}


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def shards(tmp_path):
    """Twelve training images in two files, five held out; labels 1, 2, 3, 1, ..."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for split, count in SPLITS.items():
        payloads = [records.encode_example({IMAGE: [encoded(k)], LABEL: [1 + k % 3]}) for k in range(count)]
        records.write_records(folder / f"{split}-00000-of-00002", payloads[: count // 2])
        records.write_records(folder / f"{split}-00001-of-00002", payloads[count // 2 :])
    return folder


def rewrite(path, changes, *, crc=True):
    """Change records of a shard: number -> function of the payload; without a new CRC if not `crc`."""
    whole = b""
    for number, (_, payload, _) in enumerate(records.scan_records(str(path))):
        frame = records.frame(payload)
        if number in changes:
            changed = changes[number](payload)
            frame = records.frame(changed) if crc else frame[:12] + changed + frame[-4:]
        whole += frame
    path.write_bytes(whole)


def with_image(change):
    """A function of a payload that changes the image in it."""

    def changed(payload):
        features = records.decode_example(payload)
        return records.encode_example(features | {IMAGE: [change(features[IMAGE][0])]})

    return changed


def truncated(data):
    """In the middle of its pixels."""
    return data[: (data.index(b"\xff\xda") + len(data)) // 2]


def garbage(data):
    """A valid header, and then anything."""
    start = data.index(b"\xff\xda") + 14
    return data[:start] + np.random.default_rng(0).bytes(len(data) - start)


def flipped(payload):
    return payload[:60] + bytes([payload[60] ^ 8]) + payload[61:]


def headless(data):
    return b"\0" * 20 + data[20:]


def plant_three(folder):
    """A truncated image, garbage behind a header, and a flipped bit: records 1 and 4 of one file, 3 of the other."""
    rewrite(folder / "train-00000-of-00002", {1: with_image(truncated), 4: with_image(garbage)})
    rewrite(folder / "train-00001-of-00002", {3: flipped}, crc=False)


def check(folder, *options):
    return pack.run(["check", str(folder), "--threads", "2", *map(str, options)])


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


GEOMETRY = {"img_size": 16, "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear", "num_threads": 1}


def epoch(index):
    """Samples and labels of one epoch of the training loader on two shards, everything decoded."""
    plan, seen = Plan(len(index), 4, 2, len(index), seed=1), []
    for shard in range(2):
        loader = TrainLoader(
            index, plan, shard=shard, num_shards=2, scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.5,
            device=torch.device("cpu"), **GEOMETRY,
        )  # fmt: skip
        seen += [pair for batch in loader for pair in zip(batch.samples.tolist(), batch.labels.tolist())]
    return sorted(seen)


# -- three bad records -----------------------------------------------------------------------------------------------


def test_three_planted_records_are_three(shards, capsys, caplog):
    caplog.set_level(logging.INFO)
    plant_three(shards)
    with pytest.raises(ValueError, match="train-00001-of-00002, record 3 .at byte .* has a wrong CRC.*pack check"):
        sources.open_source(str(shards), split="train")
    assert check(shards) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["train: 12 images, 3 bad", "validation: 5 images, 0 bad"]
    assert lines[-1] == f"listed in {shards}/quarantine.csv: training leaves them out" and len(lines) == 6
    listed = rows(shards / "quarantine.csv")
    assert [(row["split"], row["file"], row["record"]) for row in listed] == [
        ("train", "train-00000-of-00002", "1"),
        ("train", "train-00000-of-00002", "4"),
        ("train", "train-00001-of-00002", "3"),
    ]
    assert all(len(row["sha256"]) == 64 and row["reason"] for row in listed)
    caplog.clear()
    index = sources.open_source(str(shards), split="train").for_classes(3)
    assert caplog.text.count(f"3 of 12 train images are left out: {shards}/quarantine.csv") == 1
    kept = [k for k in range(12) if k not in (1, 4, 9)]
    assert index.label.tolist() == [k % 3 for k in kept] and index.shard_sizes == (4, 5)
    assert epoch(index) == [(sample, k % 3) for sample, k in enumerate(kept)]
    assert [index.record(sample) for sample in range(9)] == [k % 6 for k in kept]
    caplog.clear()
    assert len(sources.open_source(str(shards), split="validation").for_classes(3)) == 5 and not caplog.text
    assert pack.run([str(shards), str(shards.parent / "again"), "--shards", "2"]) == 0
    assert len(sources.open_source(str(shards.parent / "again"), split="train")) == 9


def test_every_record_that_has_no_image_can_be_left_out(shards, capsys):
    bad = {
        0: with_image(headless),
        1: lambda payload: records.encode_example({LABEL: [7]}),
        2: lambda payload: b"",
        3: with_image(lambda data: encoded(3, "GIF")),
        5: lambda payload: records.encode_example(records.decode_example(payload) | {LABEL: [1, 2]}),
    }
    rewrite(shards / "validation-00001-of-00002", {0: with_image(headless)})
    rewrite(shards / "train-00001-of-00002", bad)
    with pytest.raises(ValueError, match=r"train-00001-of-00002, record 0 .* is not a readable .*4 more cannot"):
        sources.open_source(str(shards), split="train")
    assert check(shards) == 1
    output = capsys.readouterr().out
    assert "train: 12 images, 5 bad\nvalidation: 5 images, 1 bad\n" in output and "is a GIF image" in output
    index = sources.open_source(str(shards), split="train").for_classes(3)
    assert index.shard_sizes == (6, 1) and index.record(6) == 4 and index.label[6] == 10 % 3
    assert len(epoch(index)) == 7
    held_out = sources.open_source(str(shards), split="validation").for_classes(3)
    loader = EvalLoader(
        held_out, shard=0, num_shards=1, batch_size=3, crop_pct=1.0, device=torch.device("cpu"), **GEOMETRY
    )
    assert sum((batch.labels.tolist() for batch in loader), []) == [0, 1, 0, 1]


def wrong_length(path, numbers):
    """Flip a bit in the length of records of a shard."""
    starts = [start - 12 for start, _, _ in records.scan_records(str(path))]
    data = bytearray(path.read_bytes())
    for number in numbers:
        data[starts[number] + 2] ^= 1
    path.write_bytes(data)
    return [starts[number] for number in numbers]


@pytest.mark.parametrize("bad", [[0], [3], [5], [0, 2, 5], [1, 2], [4, 5]])
def test_records_of_a_wrong_length_are_left_out(shards, capsys, bad):
    """The first, one in the middle, the last, several, and neighbours, which are one gap."""
    path = shards / "train-00000-of-00002"
    places = wrong_length(path, bad)
    gaps = [place for number, place in zip(bad, places) if number - 1 not in bad]
    with pytest.raises(ValueError, match=f"{path}, record {bad[0]} .at byte {places[0]}. has a wrong length CRC.*lost"):
        sources.open_source(str(shards), split="train")
    assert check(shards) == 1
    output = capsys.readouterr().out
    assert f"{path}, record {bad[0]} (at byte {places[0]}): has a wrong length CRC" in output
    listed = rows(shards / "quarantine.csv")
    assert [(row["file"], int(row["offset"])) for row in listed] == [(path.name, place) for place in gaps]
    index = sources.open_source(str(shards), split="train").for_classes(3)
    kept = [k for k in range(12) if k not in bad]
    assert epoch(index) == [(sample, k % 3) for sample, k in enumerate(kept)]
    images = [records.read_span(index.files[index.file[k]], index.offset[k], index.length[k]) for k in range(len(kept))]
    assert images == [encoded(k) for k in kept]
    assert pack.run([str(shards), str(shards.parent / "again"), "--shards", "2"]) == 0
    assert len(sources.open_source(str(shards.parent / "again"), split="train")) == len(kept)


def test_wrong_lengths_that_leave_no_trace_in_the_file_times(shards, monkeypatch):
    """An index from before has an image for each record, so one gap leaves out two of them; `check` needs a new one."""
    before = sources.open_source(str(shards), split="train")
    path = shards / "train-00001-of-00002"
    status = path.stat()
    wrong_length(path, [2, 3])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ValueError, match=f"{path} has other records than when it was indexed: touch the file"):
        check(shards)
    with monkeypatch.context() as later:
        later.setenv("XDG_CACHE_HOME", str(shards.parent / "new"))
        folder, index = sources.open_everything(str(shards), split="train")
    ((_, entries),) = [
        found for found in quarantine.find_bad(index, folder=folder, split="train", num_threads=1) if found[1]
    ]
    quarantine.save(shards / "quarantine.csv", entries)
    after = [sources.open_source(str(shards), split="train")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(shards.parent / "new"))
    after.append(sources.open_source(str(shards), split="train"))
    assert [len(index) for index in (before, *after)] == [12, 10, 10] and after[0].digest() == after[1].digest()


def test_what_cannot_be_skipped_is_said(shards):
    path = shards / "train-00000-of-00002"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=f"{path}: record .*cut off"):
        check(shards)
    assert not (shards / "quarantine.csv").exists()


def test_rot_that_leaves_no_trace_in_the_file_times(shards, monkeypatch):
    """An index from before knows where the image was, one from after only where the record is: both leave it out."""
    before = sources.open_source(str(shards), split="train")
    path = shards / "train-00001-of-00002"
    status = path.stat()
    rewrite(path, {2: flipped}, crc=False)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(before) == len(sources.open_source(str(shards), split="train")) == 12
    assert check(shards) == 1
    after = [sources.open_source(str(shards), split="train")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(shards.parent / "new"))
    after.append(sources.open_source(str(shards), split="train"))
    assert [len(index) for index in after] == [11] * 2 and after[0].digest() == after[1].digest()


# -- the list --------------------------------------------------------------------------------------------------------


def test_list_of_files_that_have_changed_is_refused(shards, capsys):
    original = shutil.copytree(shards, shards.parent / "original")
    plant_three(shards)
    assert check(shards) == 1
    shutil.copy(original / "train-00001-of-00002", shards)  # mended
    with pytest.raises(ValueError, match="quarantine.csv names record 3 of train-00001-of-00002, which has changed"):
        sources.open_source(str(shards), split="train")
    assert check(shards) == 1 and len(rows(shards / "quarantine.csv")) == 2
    assert len(sources.open_source(str(shards), split="train")) == 10
    shutil.copy(original / "train-00000-of-00002", shards)
    assert check(shards) == 0 and not (shards / "quarantine.csv").exists()
    assert len(sources.open_source(str(shards), split="train")) == 12
    capsys.readouterr()


def test_list_in_another_place(shards, capsys):
    plant_three(shards)
    away = shards.parent / "lists" / "bad.csv"
    with pytest.raises(ValueError, match="bad.csv cannot be written .*: give --out FILE, and train with --data.quar"):
        check(shards, "--out", away)
    away.parent.mkdir()
    assert check(shards, "--out", away) == 1
    assert f"{shards}/train-00000-of-00002, record 1 (at byte" in capsys.readouterr().out
    assert not (shards / "quarantine.csv").exists()
    assert len(sources.open_source(str(shards), split="train", listed=str(away))) == 9
    with pytest.raises(ValueError, match="There is no quarantine list /no/where: expected one .*--out"):
        sources.open_source(str(shards), split="train", listed="/no/where")


def test_list_comes_back_as_it_was_saved(tmp_path):
    entries = [
        quarantine.Entry("train", 'a,b/"c".jpg', 3, 2**40, 7, "0" * 64, 'it\'s, well: "bad"'),
        quarantine.Entry("train", os.fsdecode(b"n\xff.jpg"), 0, 0, 0, "", "no"),
    ]
    quarantine.save(tmp_path / "list.csv", entries[::-1])
    assert quarantine.load(tmp_path / "list.csv") == entries
    with open(tmp_path / "list.csv", "a") as file:
        file.write("train,x.jpg,one,0,0,,no\n")
    with pytest.raises(ValueError, match="list.csv: entry 3 is not as .* writes it .*'one'.*: run it again"):
        quarantine.load(tmp_path / "list.csv")
    (tmp_path / "list.csv").write_text("some,thing\nelse,1\n")
    with pytest.raises(ValueError, match="list.csv: entry 1 is not as"):
        quarantine.load(tmp_path / "list.csv")
    head = "split,file,record,offset,length,sha256,reason\n"
    for place in ("a,-1,0,1", "a,0,-5,1", "a,0,0,-10", f"a,0,0,{10**25}", "a\0,0,0,1"):
        (tmp_path / "list.csv").write_text(f"{head}train,{place},,no\n")
        with pytest.raises(ValueError, match="list.csv: entry 1 is not as .* has no place"):
            quarantine.load(tmp_path / "list.csv")


@pytest.mark.parametrize(
    "change, reason",
    [
        (with_image(truncated), "image file is truncated"),
        (with_image(headless), "is not a readable image: of no known format"),
        (lambda _: records.encode_example({"picture": [b"a"]}),
         "has the fields picture, expected image/encoded and image/class/label or image and label"),
    ],
)  # fmt: skip
def test_a_fault_of_all_images_is_told_once(shards, capsys, change, reason):
    """To list each of them would leave nothing."""
    for k in range(2):
        rewrite(shards / f"validation-0000{k}-of-00002", dict.fromkeys(range(3), change))
    assert check(shards) == 1 and not (shards / "quarantine.csv").exists()
    where = f"{shards}/validation-00000-of-00002, record 0 .at byte [0-9]*."
    _, counted, line = capsys.readouterr().out.splitlines()
    assert counted == "validation: 5 images, 5 bad"
    assert re.match(f"None of the validation images can be decoded, so none is listed. {where}: {reason}", line)
    if "truncated" not in reason:  # which is seen only when it is decoded
        sentence = f"^None of the 5 images can be read. The first is {where}: it {reason}[^`]*$"
        with pytest.raises(ValueError, match=sentence):
            sources.open_source(str(shards), split="validation")


def test_nothing_left(shards):
    for k in range(2):
        rewrite(shards / f"validation-0000{k}-of-00002", {number: with_image(truncated) for number in range(3)})
    assert check(shards) == 1 and not (shards / "quarantine.csv").exists()
    folder, index = sources.open_everything(str(shards), split="validation")
    found = quarantine.find_bad(index, folder=folder, split="validation", num_threads=1)
    quarantine.save(shards / "quarantine.csv", sum((bad for _, bad in found), []))
    with pytest.raises(ValueError, match="quarantine.csv names all 5 validation images: nothing is left"):
        sources.open_source(str(shards), split="validation")


# -- the checker and the decoder -------------------------------------------------------------------------------------


def png_chunk(data, kind, *, crc=0, content=None):
    """Change the CRC of the first chunk of a kind, or put another chunk of this kind before the pixels."""
    at = data.index(kind if content is None else b"IDAT") - 4
    if content is not None:
        chunk = kind + content
        chunk = struct.pack(">I", len(content)) + chunk + struct.pack(">I", zlib.crc32(chunk) ^ crc)
        return data[:at] + chunk + data[at:]
    end = at + 8 + struct.unpack(">I", data[at : at + 4])[0]
    return data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :]


def png_of_size(width, height):
    header = b"IHDR" + struct.pack(">II", width, height) + PNG[24:29]
    return PNG[:12] + header + struct.pack(">I", zlib.crc32(header)) + PNG[33:]


def saved(kind, image, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def oriented():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    return exif


PICTURE = Image.open(io.BytesIO(encoded(3))).convert("RGB")
JPEG, PNG, WEBP, BMP = (saved(kind, PICTURE) for kind in ("JPEG", "PNG", "WEBP", "BMP"))
GOOD = {
    "jpeg": JPEG,
    "progressive": saved("JPEG", PICTURE, progressive=True),
    "CMYK": saved("JPEG", PICTURE.convert("CMYK")),
    "oriented": saved("JPEG", PICTURE, exif=oriented()),
    "jpeg and more": JPEG + b"junk" * 99,
    "png": PNG,
    "16 bits": saved("PNG", Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)),
    "grey and alpha": saved("PNG", PICTURE.convert("LA")),
    "palette and alpha": saved("PNG", PICTURE.quantize(16), transparency=3),
    "png with a text": png_chunk(PNG, b"tEXt", content=b"a\0b"),
    "one pixel": saved("PNG", PICTURE.resize((1, 1))),
    "one pixel, jpeg": saved("JPEG", PICTURE.resize((1, 1))),
    "webp": WEBP,
    "bmp": BMP,
}
DAMAGED = {
    **{f"jpeg to {part}": JPEG[: int(len(JPEG) * part)] for part in (0.1, 0.7, 0.9)},
    "progressive": saved("JPEG", PICTURE, progressive=True)[:-30],
    **{f"png without {count}": PNG[:-count] for count in (4, 12, 16, 20, len(PNG) // 2)},
    "png with a wrong CRC": png_chunk(PNG, b"IDAT"),
    "png with a wrong CRC of a text": png_chunk(PNG, b"tEXt", content=b"a\0b", crc=1),
    "png of no size": png_of_size(0, 0),
    "png of 4,000 megapixels": png_of_size(2**16 - 1, 2**16 - 1),
    "webp": WEBP[:-30],
    "bmp": BMP[:-30],
    "empty": b"",
    "gif": saved("GIF", PICTURE),
    "tiff": saved("TIFF", PICTURE),
}


def trained_on(folder):
    """Return what training says of the images of a folder: "" or an error. Windows are whole images."""
    try:
        epoch(sources.open_source(str(folder), split="train").for_classes(0))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", GOOD)
def test_what_the_checker_takes_trains(image_folder, capsys, name):
    (image_folder / "train" / "dog" / "2.jpg").write_bytes(GOOD[name])
    assert check(image_folder) == 0 and trained_on(image_folder) == ""
    assert pack.run([str(image_folder), str(image_folder.parent / "out"), "--shards", "1"]) == 0
    assert trained_on(image_folder.parent / "out") == ""


@pytest.mark.parametrize("name", DAMAGED)
def test_what_the_checker_refuses_is_named_by_training_and_packing(image_folder, capsys, name):
    bad = image_folder / "train" / "dog" / "2.jpg"
    bad.write_bytes(DAMAGED[name])
    advice = f"python -m largebatch.pack check {image_folder}"
    said = trained_on(image_folder)
    assert f"{bad}, record 0" in said and advice in said
    with pytest.raises(ValueError, match=f"{bad} cannot be decoded .*{advice}"):
        pack.run([str(image_folder), str(image_folder.parent / "out"), "--shards", "1"])
    assert check(image_folder) == 1
    assert [row["file"] for row in rows(image_folder / "quarantine.csv")] == ["train/dog/2.jpg"]
    assert trained_on(image_folder) == ""


# -- image folders ---------------------------------------------------------------------------------------------------


@pytest.fixture
def image_folder(tmp_path):
    folder = tmp_path / "images"
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (folder / split / name).mkdir(parents=True)
            for k in range(4):
                (folder / split / name / f"{k}.jpg").write_bytes(encoded(10 * label + k))
    return folder


def test_image_folder_with_bad_files(image_folder, capsys):
    train = image_folder / "train"
    (train / "cat" / "1.jpg").write_bytes(b"")
    (train / "dog" / "0.jpg").write_bytes(truncated(encoded(10)))
    (train / "dog" / "2.jpg").write_bytes(headless(encoded(12)))
    with pytest.raises(ValueError, match=f"{train}/cat/1.jpg, record 0 .* is not a readable image: .*1 more"):
        sources.open_source(str(image_folder), split="train")
    assert check(image_folder) == 1
    assert capsys.readouterr().out.startswith("train: 8 images, 3 bad\nvalidation: 8 images, 0 bad\n")
    assert [row["file"] for row in rows(image_folder / "quarantine.csv")] == [
        "train/cat/1.jpg", "train/dog/0.jpg", "train/dog/2.jpg",
    ]  # fmt: skip
    index = sources.open_source(str(image_folder), split="train").for_classes(2)
    assert epoch(index) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)]
    assert index.where(3).startswith(f"{train}/dog/1.jpg, record 0")
    assert pack.run([str(image_folder), str(image_folder.parent / "out"), "--shards", "1"]) == 0
    packed = sources.open_source(str(image_folder.parent / "out"), split="train").for_classes(2)
    assert sorted(packed.label.tolist()) == [0, 0, 0, 1, 1]
    (train / "dog" / "0.jpg").write_bytes(encoded(10))
    with pytest.raises(ValueError, match="names record 0 of train/dog/0.jpg, which has changed since"):
        pack.run([str(image_folder), str(image_folder.parent / "other"), "--shards", "1"])
    (train / "dog" / "0.jpg").unlink()
    with pytest.raises(ValueError, match="names record 0 of train/dog/0.jpg, which has changed since"):
        sources.open_source(str(image_folder), split="train")


def test_a_list_elsewhere_is_written_again_by_the_command_that_is_named(image_folder, tmp_path, capsys):
    bad, path = tmp_path / "bad list.csv", image_folder / "train/dog/0.jpg"
    good = path.read_bytes()
    path.write_bytes(truncated(good))
    assert check(image_folder, "--out", str(bad)) == 1
    assert f"listed in {bad}: training with --data.quarantine '{bad}' leaves them out" in capsys.readouterr().out
    path.write_bytes(truncated(good)[:-1])
    with pytest.raises(ValueError, match="has changed since: run `python -m largebatch.pack check") as error:
        sources.open_source(str(image_folder), split="train", listed=str(bad))
    pack.run(shlex.split(str(error.value).split("`")[1])[3:])
    assert len(sources.open_source(str(image_folder), split="train", listed=str(bad))) == 7


def test_image_that_can_be_read_again(image_folder):
    """The disk failed while it was indexed; the file is what it always was."""
    path = image_folder / "train" / "cat" / "0.jpg"
    data, status = path.read_bytes(), path.stat()
    path.write_bytes(headless(data))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ValueError, match="0.jpg, record 0 .* is not a readable image"):
        sources.open_source(str(image_folder), split="train")
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ValueError, match="0.jpg, record 0 .* could not be read .*, and can be read now: touch"):
        sources.open_source(str(image_folder), split="train")
    path.touch()
    assert len(sources.open_source(str(image_folder), split="train")) == 8


def test_digest_tells_which_images_there_are(shards):
    index = sources.open_source(str(shards), split="train")
    moved = shutil.copytree(shards, shards.parent / "moved")
    assert sources.open_source(str(moved), split="train").digest() == index.digest()
    others = [index.without([1]), index.without([2]), index.without([1, 2]), index.without([1]).without([1])]
    assert len({one.digest() for one in (index, *others[:3])}) == 4 and others[2].digest() == others[3].digest()
    assert others[3].where(1) == index.where(3) == others[2].where(1)
    relabelled = dataclasses.replace(index, label=np.roll(index.label, 1))
    assert relabelled.digest() != index.digest(), "the same images with other labels are other data"
