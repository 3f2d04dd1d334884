"""TFRecords against protobuf's, TensorBoard's and DALI's own code; indexes against damage of every kind."""

import contextlib
import dataclasses
import io
import os
import random
import struct

import google_crc32c
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from PIL import Image

from largebatch.data import index_file, quarantine, records
from largebatch.data.index import Index, label_base
from largebatch.data.records import IMAGE, LABEL
from largebatch.data.scan import index_images, index_shards


def jpeg(width, height, *, value=128, orientation=1):
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (width, height), (value, 255 - value, 90)).save(file, "JPEG", exif=exif)
    return file.getvalue()


def of_size(side):
    """A JPEG whose header says so."""
    data = bytearray(jpeg(9, 9))
    at = data.index(b"\xff\xc0") + 5  # in its frame header, behind the length and the precision
    data[at : at + 4] = 2 * side.to_bytes(2)
    return bytes(data)


def make_shard(path, labels, *, extra=False):
    """A TFRecord file with one JPEG of size (10 + k, 20 + k) per label; the images."""
    images = [jpeg(10 + k, 20 + k, value=k) for k in range(len(labels))]
    payloads = []
    for image, label in zip(images, labels):
        features = {IMAGE: [image], LABEL: [label]}
        if extra:
            features |= {"image/filename": [b"n1.JPEG"], "image/object/bbox/xmin": [0.5, 0.25], "image/height": [20]}
        payloads.append(records.encode_example(features))
    assert records.write_records(path, payloads) == len(labels)
    return images


@pytest.fixture(scope="module")
def example_class():
    """tf.train.Example, declared here field by field from its published definition."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    repeated, optional = kinds.LABEL_REPEATED, kinds.LABEL_OPTIONAL

    def message(name, *fields):
        entry = file.message_type.add(name=name)
        for number, (field, label, kind) in enumerate(fields, start=1):
            reference = {"type": kinds.TYPE_MESSAGE, "type_name": kind} if isinstance(kind, str) else {"type": kind}
            entry.field.add(name=field, number=number, label=label, **reference)
        return entry

    message("BytesList", ("value", repeated, kinds.TYPE_BYTES))
    message("FloatList", ("value", repeated, kinds.TYPE_FLOAT))
    message("Int64List", ("value", repeated, kinds.TYPE_INT64))
    lists = [(f"{kind}_list", optional, f".t.{kind.capitalize()}List") for kind in ("bytes", "float", "int64")]
    message("Feature", *lists)
    features = message("Features", ("feature", repeated, ".t.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=optional, type=kinds.TYPE_STRING)
    entry.field.add(name="value", number=2, label=optional, type=kinds.TYPE_MESSAGE, type_name=".t.Feature")
    message("Example", ("features", optional, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def opened(path):
    """The index of one shard, as training gets it."""
    folder = path.parent
    index = index_shards([str(path)])
    return quarantine.leave_out(index, [], folder=folder, split="train", listed_in=folder / quarantine.NAME)


FEATURES = {
    "image/encoded": [b"\x00\xff" * 300],
    "image/class/label": [1000],
    "ints": [0, 1, -1, 127, 128, 2**63 - 1, -(2**63)],
    "floats": [0.5, -2.25, 1e30],
    "texts": [b"", b"a", "ü".encode()],
}


# -- records ---------------------------------------------------------------------------------------------------------


def test_crc_of_the_standard_text():
    assert google_crc32c.value(b"123456789") == 0xE3069283
    assert records.masked_crc(b"123456789") == (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) % 2**32


def test_file_equals_tensorboards(tmp_path):
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer", reason="needs tensorboard")
    payloads = [b"", b"x", bytes(range(256)) * 9]
    with open(tmp_path / "theirs", "wb") as file:
        writer = record_writer.RecordWriter(file)
        for payload in payloads:
            writer.write(payload)
        writer.flush()
    records.write_records(tmp_path / "ours", payloads)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    read = list(records.scan_records(str(tmp_path / "ours")))
    assert read == [(start, payload, "") for start, payload in zip((12, 28, 45), payloads)]


def test_example_equals_protobufs(example_class):
    theirs = example_class.FromString(records.encode_example(FEATURES)).features.feature
    assert set(theirs) == set(FEATURES)
    assert list(theirs["ints"].int64_list.value) == FEATURES["ints"]
    assert np.allclose(theirs["floats"].float_list.value, FEATURES["floats"], rtol=1e-7)
    assert list(theirs["texts"].bytes_list.value) == FEATURES["texts"]

    message = example_class()
    for name, values in FEATURES.items():
        kind = {bytes: "bytes_list", int: "int64_list", float: "float_list"}[type(values[0])]
        getattr(message.features.feature[name], kind).value.extend(values)
    decoded = records.decode_example(message.SerializeToString())
    assert decoded["floats"] == pytest.approx(FEATURES["floats"])
    assert {**decoded, "floats": 0} == {**FEATURES, "floats": 0}


def test_unpacked_numbers():
    """Old writers store each number as a field of its own; the two forms may even be mixed."""
    loose = b"".join(b"\x08" + records._encode_varint(value) for value in (7, -7 & 2**64 - 1))
    feature = records._field(3, loose) + records._field(3, records._field(1, b"\x05\x06"))
    assert records.int64_values(feature, (0, len(feature))) == [7, -7, 5, 6]
    floats = b"".join(b"\x0d" + struct.pack("<f", value) for value in (0.5, -4.0))
    feature = records._field(2, floats)
    assert records._float_values(feature, (0, len(feature))) == [0.5, -4.0]


def test_random_bytes_are_refused_politely():
    rng = random.Random(0)
    whole = records.encode_example(FEATURES)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = bytes(data[: rng.randint(0, len(data))])
        with contextlib.suppress(ValueError):  # UnicodeDecodeError is one; anything else fails the test
            records.decode_example(data)


def test_flipped_bit_names_file_and_record(tmp_path):
    path = tmp_path / "train-00000-of-00001"
    make_shard(path, [1, 2, 3])
    starts = [start for start, _, _ in records.scan_records(str(path))]
    data = bytearray(path.read_bytes())
    data[starts[1] + 28] ^= 4
    path.write_bytes(data)
    assert [fault for _, _, fault in records.scan_records(str(path))] == ["", records.WRONG_CRC, ""]
    with pytest.raises(ValueError, match=f"{path}.* record 1 .at byte {starts[1]}. has a wrong CRC"):
        opened(path)


@pytest.mark.parametrize("number", [0, 2, 4])  # the first, one in the middle, the last
@pytest.mark.parametrize("place", range(12))  # each byte of the length and of its CRC
def test_records_behind_a_wrong_length_are_found(tmp_path, number, place):
    path = tmp_path / "train-00000-of-00001"
    images = make_shard(path, [1, 2, 3, 1, 2])
    whole = list(records.scan_records(str(path)))
    begin = whole[number][0] - 12
    data = bytearray(path.read_bytes())
    data[begin + place] ^= 4
    path.write_bytes(data)
    found = list(records.scan_records(str(path)))
    stop = whole[number + 1][0] - 12 if number < 4 else len(data)
    assert found[:number] + found[number + 1 :] == whole[:number] + whole[number + 1 :]
    assert found[number][:2] == (begin, bytes(data[begin:stop]))
    assert f"has a wrong length CRC, and its {stop - begin} bytes" in found[number][2]
    assert records.record_spans(str(path)) == [(start, len(payload)) for start, payload, _ in found]
    index = index_shards([str(path)])
    kept = [k for k in range(5) if k != number]
    for k in kept:
        assert records.read_span(path, index.offset[k], index.length[k]) == images[k]
    assert [index.label[k] for k in kept] == [[1, 2, 3, 1, 2][k] for k in kept]
    with pytest.raises(ValueError, match=f"{path}, record {number} .at byte {begin}. has a wrong length CRC.*pack che"):
        opened(path)


def gaps(path):
    return [start for start, _, fault in records.scan_records(str(path)) if "wrong length CRC" in fault]


def test_search_for_the_next_record(tmp_path, monkeypatch):
    """Junk of any length between records, also where the search reads on, and numbers that only look like lengths."""
    monkeypatch.setattr(records, "SEARCH_BYTES", 64)
    path, frame = tmp_path / "shard", records.frame(b"abc")
    for junk in [b"x" * count for count in (1, 11, 12, 13, 63, 64, 65, 200)] + [bytes(300), struct.pack("<Q", 3) * 40]:
        path.write_bytes(frame + junk + frame)
        read = [(start, payload) for start, payload, _ in records.scan_records(str(path))]
        assert read == [(12, b"abc"), (19, junk), (31 + len(junk), b"abc")]
    far = records.frame(b"z" * 99)[:12]  # a right length, but not of a record in this file
    path.write_bytes(frame + b"x" * 20 + far + frame)
    assert [start for start, _, _ in records.scan_records(str(path))] == [12, 19, 19 + 20 + 12 + 12]


def test_file_without_records_is_refused_and_so_is_one_full_of_gaps(tmp_path):
    path, frame = tmp_path / "shard", records.frame(b"abc")
    path.write_bytes(b"no records, only text" * 10)
    with pytest.raises(ValueError, match="shard: record 0 .at byte 0. has .*, and no record can be found: .* no TFRec"):
        list(records.scan_records(str(path)))
    path.write_bytes((frame + b"x") * records.MOST_GAPS + frame)
    assert len(gaps(path)) == records.MOST_GAPS
    path.write_bytes((frame + b"x") * (records.MOST_GAPS + 1) + frame)
    with pytest.raises(ValueError, match="shard: record 201 .*, and so have 100 records before it"):
        list(records.scan_records(str(path)))


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "shard"
    records.write_records(path, [b"abc", b"defgh"])
    whole = path.read_bytes()
    for length in range(20, len(whole)):  # the first record is 19 bytes
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="shard: record 1 .at byte 19. is cut off"):
            list(records.scan_records(str(path)))


def test_failed_write_leaves_nothing(tmp_path):
    def payloads():
        yield b"one"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        records.write_records(tmp_path / "shard", payloads())
    assert os.listdir(tmp_path) == []


def test_dali_reads_our_files(tmp_path):
    import nvidia.dali.tfrecord as tfrec
    from nvidia.dali import Pipeline, fn

    path, idx = str(tmp_path / "shard"), str(tmp_path / "idx")
    images = make_shard(path, [1, 500, 1000])
    lines = [f"{start - 12} {len(payload) + 16}" for start, payload, _ in records.scan_records(path)]
    with open(idx, "w") as file:
        file.write("\n".join(lines) + "\n")
    features = {IMAGE: tfrec.FixedLenFeature((), tfrec.string, ""), LABEL: tfrec.FixedLenFeature([1], tfrec.int64, -1)}
    with Pipeline(batch_size=3, num_threads=1, device_id=None, prefetch_queue_depth=1) as pipe:
        read = fn.readers.tfrecord(path=[path], index_path=[idx], features=features)
        pipe.set_outputs(read[IMAGE], read[LABEL])
    encoded, labels = pipe.run()
    assert [np.asarray(encoded[k]).tobytes() for k in range(3)] == images
    assert [int(np.asarray(labels[k])[0]) for k in range(3)] == [1, 500, 1000]


# -- index -----------------------------------------------------------------------------------------------------------


def test_index_points_at_the_images(tmp_path):
    files = [str(tmp_path / f"train-{k:05d}-of-00003") for k in range(3)]
    images = make_shard(files[0], [1, 2, 3]) + make_shard(files[1], [3]) + make_shard(files[2], [2, 1], extra=True)
    index = index_shards(files).number_labels()
    assert len(index) == 6 and index.shard_sizes == (3, 1, 2) and index.num_classes == 3
    assert index.label.tolist() == [0, 1, 2, 2, 1, 0] and index.label_base == 1
    assert index.width.tolist() == [10, 11, 12, 10, 10, 11] and index.height.tolist() == [20, 21, 22, 20, 20, 21]
    for k, image in enumerate(images):
        with open(files[index.file[k]], "rb") as file:
            assert os.pread(file.fileno(), index.length[k], index.offset[k]) == image
    assert index.where(5).startswith(f"{files[2]}, record 1 (at byte")
    kinds = {field.name: getattr(index, field.name).dtype for field in dataclasses.fields(Index)[1:7]}
    assert kinds == dict(zip(kinds, map(np.dtype, ("i4", "i8", "i8", "i8", "i4", "i4"))))


def test_exif_orientation_is_not_applied(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg(30, 20, orientation=6))
    index = index_images([str(path)], [0], class_names=["a"])
    assert (index.width[0], index.height[0]) == (30, 20)
    assert (index.offset[0], index.length[0]) == (0, path.stat().st_size)


@pytest.mark.parametrize(
    "label_range, expected",
    [
        ((1, 1000), 1),
        ((0, 999), 0),
        ((0, 5), 0),  # zero-based beyond doubt, the last class just does not occur
        ((0, 1000), "label 1000 is too large"),
        ((1, 1001), "label 1001 is too large"),
        ((1, 999), "the first or the last class never occurs"),  # either base is possible
        ((2, 1000), "the first class never occurs"),
        ((-1, 5), "the first class never occurs"),
    ],
)
def test_label_base(label_range, expected):
    if isinstance(expected, int):
        assert label_base(*label_range, num_classes=1000, name="x", highest="y") == expected
        return
    with pytest.raises(ValueError, match=f"The labels of x run from .*{expected}"):
        label_base(*label_range, num_classes=1000, name="x", highest="y")


def test_index_for_a_models_classes(tmp_path):
    path = str(tmp_path / "train-0")
    make_shard(path, [1, 2, 4])
    index = index_shards([path]).number_labels()
    assert (index.num_classes, index.label.tolist()) == (4, [0, 1, 3])
    assert index.for_classes(4).label.tolist() == [0, 1, 3]
    with pytest.raises(ValueError, match="run from 1 to 4, expected 0 to 4 or 1 to 5 .* the first or the last class"):
        index.for_classes(5)
    with pytest.raises(ValueError, match="label 4 is too large"):
        index.for_classes(3)
    make_shard(path, [0, 2, 4])
    index = index_shards([path]).number_labels()
    assert (index.num_classes, index.for_classes(9).num_classes) == (5, 9)
    assert index.for_classes(9).label.tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="label 4 is too large"):
        index.for_classes(4)
    make_shard(path, [3, 4])
    index = index_shards([path])
    with pytest.raises(ValueError, match="the first class never occurs"):
        index.number_labels()


def test_held_out_split_is_numbered_like_training(tmp_path):
    train, held_out = (str(tmp_path / name) for name in ("train-0", "validation-0"))
    make_shard(held_out, [2, 3])
    for labels, expected in [([1, 2, 3, 4], [1, 2]), ([0, 2, 3, 4], [2, 3])]:
        make_shard(train, labels)
        like = index_shards([train])
        index = index_shards([held_out]).number_labels(like=like)
        assert index.label.tolist() == expected and index.num_classes == like.number_labels().num_classes
        assert index.for_classes(index.num_classes).label.tolist() == expected
    make_shard(train, [1, 2])
    with pytest.raises(ValueError, match="has labels that the training split has not, which run from 1 to 2"):
        index_shards([held_out]).number_labels(like=index_shards([train]))


def test_bad_records_are_named(tmp_path):
    path = tmp_path / "shard"
    good = {IMAGE: [jpeg(9, 9)], LABEL: [1]}
    gif = io.BytesIO()
    Image.new("L", (5, 5)).save(gif, "GIF")
    for bad, message in [
        ({LABEL: [1]}, f"has the fields {LABEL}, expected {IMAGE} and {LABEL} or image and label"),
        ({IMAGE: [b"a", b"b"], LABEL: [1]}, f"has 2 images in {IMAGE} and 1 numbers in {LABEL}, expected one"),
        ({IMAGE: [jpeg(9, 9)], LABEL: [b"1"]}, f"has 1 images in {IMAGE} and 0 numbers in {LABEL}, expected one each"),
        ({IMAGE: [b"no image"], LABEL: [1]}, "is not a readable image"),
        ({IMAGE: [jpeg(9, 9)[:20]], LABEL: [1]}, "is not a readable image"),
        ({IMAGE: [of_size(0xFFFF)], LABEL: [1]}, "is not a readable image: Image size .4294836225 pix.* exceeds"),
        ({IMAGE: [gif.getvalue()], LABEL: [1]}, "is a GIF image, expected JPEG"),
    ]:
        records.write_records(path, [records.encode_example(features) for features in (good, bad)])
        with pytest.raises(ValueError, match=f"{path}, record 1 .*{message}"):
            opened(path)
    records.write_records(path, [])
    with pytest.raises(ValueError, match="hold no records"):
        opened(path)


@pytest.fixture
def saved(tmp_path):
    (tmp_path / "data").mkdir()
    files = [str(tmp_path / "data" / f"train-0000{k}-of-00002") for k in range(2)]
    for file in files:
        make_shard(file, [1, 2, 3])
    index = index_shards(files)
    index_file.save(index, tmp_path / "index.npz")
    return index, tmp_path / "index.npz"


def test_save_and_load(saved, tmp_path):
    index, path = saved
    loaded = index_file.load(path)
    for field in dataclasses.fields(Index):
        ours, theirs = getattr(index, field.name), getattr(loaded, field.name)
        assert type(ours) is type(theirs) and np.array_equal(ours, theirs), field.name
        assert not isinstance(ours, np.ndarray) or ours.dtype == theirs.dtype
    assert index_file.why_stale(loaded, loaded.files) == ""
    named = dataclasses.replace(index, class_names=("cat", "ü"))
    index_file.save(named, path)
    assert index_file.load(path).class_names == ("cat", "ü")
    assert sorted(os.listdir(tmp_path)) == ["data", "index.npz"]


def test_truncated_index_is_an_error_naming_it(saved):
    _, path = saved
    whole = path.read_bytes()
    for length in [0, 1, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"The index {path} is damaged .*delete it"):
            index_file.load(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"offset": slice(None, None, -1)}, "offsets are not in order"),
        ({"length": slice(1, None)}, "different lengths"),
        ({"file": slice(None, None, -1)}, "file numbers are out of order"),
        ({"file_size": slice(1, None)}, "list of files is incomplete"),
    ],
)
def test_inconsistent_index_is_damaged(saved, change, message):
    index, path = saved
    arrays = {name: getattr(index, name)[part] for name, part in change.items()}
    index_file.save(dataclasses.replace(index, **arrays), path)
    with pytest.raises(ValueError, match=message):
        index_file.load(path)
    index_file.save(dataclasses.replace(index, length=index.length + 10**6), path)
    with pytest.raises(ValueError, match="outside its file"):
        index_file.load(path)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("label", lambda label: label + 0.5, "no whole numbers"),
        ("label", lambda label: label.reshape(-1, 1), "no whole numbers"),
        ("label", lambda label: label - 2, "labels are outside their range"),
        ("label", lambda label: label * 10**9, "labels are outside their range"),
        ("label_base", lambda base: base + 10**6, "labels are outside their range"),
        ("label_range", lambda span: (0, 0), "labels are outside their range"),
        ("length", lambda length: np.full_like(length, 2**63 - 1), "outside its file"),
        ("offset", lambda offset: np.full_like(offset, 2**63 - 1), "outside its file"),
        ("height", lambda height: -height, "has no size"),
        ("width", lambda width: -width, "has no size"),
    ],
)
def test_an_index_with_numbers_that_cannot_be_is_damaged(saved, name, change, message):
    index, path = saved
    index_file.save(dataclasses.replace(index, **{name: change(getattr(index, name))}), path)
    with pytest.raises(ValueError, match=f"The index {path} is damaged .*{message}"):
        index_file.load(path)


def test_changed_files_are_noticed(saved):
    index, _ = saved
    assert index_file.why_stale(index, index.files) == ""
    assert index_file.why_stale(index, index.files[:1]) == (
        f"of 2 files that it lists and 1 that are there, {index.files[1]} and none differ"
    )
    status = os.stat(index.files[1])
    os.utime(index.files[1], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert index_file.why_stale(index, index.files) == f"{index.files[1]} has changed"
    with open(index.files[0], "ab") as file:
        file.write(b"x")
    assert index_file.why_stale(index, index.files) == f"{index.files[0]} has changed"
