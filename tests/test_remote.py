"""Data at an address: the images of local files to the bit, whatever the store does, and one sentence if it refuses."""

import http.server
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from store import KEY, SECRET, open_store
from test_shard_check import encoded
from test_tars import NAMES, sample, write

from largebatch import arguments, pack
from largebatch.config import TrainConfig, apply, byte_size
from largebatch.data import records, remote, sources
from largebatch.data.dali import TrainLoader
from largebatch.data.order import Plan
from largebatch.data.records import IMAGE, LABEL
from largebatch.files import Damaged, cache_folder
from largebatch.pack import token_labels
from zoo import create_model

COUNT, SHARDS = 1437, 4
COPY = """
import sys
from largebatch.data import sources
sources.open_source(sys.argv[1], split="train", cache=10**9)
"""


@pytest.fixture(scope="module")
def store():
    with open_store() as opened:
        yield opened


@pytest.fixture(autouse=True)
def as_a_new_process(store, tmp_path, monkeypatch):
    """An empty cache, and no waits of half a minute."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "WAITS_S", (0.01, 0.01))
    store.fault = lambda number, request: ""
    store.asked.clear()
    yield
    forget()


def forget():
    """What the end of a process does: its data are in use no longer."""
    while remote._held:
        os.close(remote._held.popitem()[1])


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The digits, in the cache of another user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("local")))
        return sources.find_folder("digits", split="train")


@pytest.fixture(scope="module")
def address(store, local):
    return store.put(local, "bucket/images/digits")


def whole(address, split="train"):
    """The shards that are whole, and the bytes of all that are in the cache."""
    folder = cache_folder() / "remote" / address.replace("://", "/")
    shards = [path for path in sorted(folder.glob(f"{split}-*")) if stat.S_IMODE(path.stat().st_mode) == 0o400]
    kept = [path for path in (cache_folder() / "remote").rglob("*-of-*") if stat.S_IMODE(path.stat().st_mode) == 0o400]
    return [path.name for path in shards], sum(path.stat().st_size for path in kept)


def stream(index, count=300):
    plan = Plan(len(index), 50, 25, count, seed=3)
    loader = TrainLoader(
        index, plan, shard=0, num_shards=1, img_size=32, mean=(0.5,) * 3, std=(0.2,) * 3, interpolation="bicubic",
        scale=(0.3, 1.0), hflip=0.5, num_threads=1, device=torch.device("cpu"),
    )  # fmt: skip
    with closing(loader):
        batches = list(loader)
    return torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])


def test_the_stream_is_that_of_local_files_to_the_bit(store, local, address):
    """With no cache, one that is too small, and all; and again, without a read of what is there."""
    sizes = [path.stat().st_size for path in sorted(local.glob("train-*"))]
    expected = sources.open_source(str(local), split="train").for_classes(10)
    images, labels = stream(expected)
    for cache, count in ((0, 0), (sizes[0] + sizes[1] + 10, 2), (10**9, SHARDS), (10**9, SHARDS)):
        store.asked.clear()
        index = sources.open_source(address, split="train", cache=cache).for_classes(10)
        found = stream(index)
        assert torch.equal(found[0], images) and torch.equal(found[1], labels)
        assert index.digest() == expected.digest() and sources.class_names(index) == tuple("0123456789")
        assert whole(address) == (sorted(path.name for path in local.glob("train-*"))[:count], sum(sizes[:count]))
        forget()
    assert not store.reads() and len(store.asked) < 5  # the list alone


def test_a_store_that_fails_now_and_then_loses_nothing(store, local, address):
    """Every third read of a shard is reset, refused for a moment or cut off; a read that is asked for again is not."""
    seen, kinds = set(), ("reset", "503", "cut", "500")

    def fault(number, request):
        if "bytes=" not in request or request in seen:
            return ""
        seen.add(request)
        return kinds[len(seen) // 3 % 4] if len(seen) % 3 == 0 else ""

    expected = sources.open_source(str(local), split="train").for_classes(10)
    images, labels = stream(expected)
    store.fault = fault
    index = sources.open_source(address, split="train", cache=0).for_classes(10)
    found = stream(index)
    assert len(seen) > 300 and len(store.reads()) > 1.3 * len(seen)
    assert torch.equal(found[0], images) and torch.equal(found[1], labels) and index.digest() == expected.digest()
    sources.open_source(address, split="train", cache=10**9)
    for path in sorted(local.glob("train-*")):
        assert (cache_folder() / "remote/s3/bucket/images/digits" / path.name).read_bytes() == path.read_bytes()


def test_what_is_not_copied_is_not_taken_for_zeros(store, local, address):
    index = sources.open_source(address, split="train")
    for path, name in zip(index.files, sorted(path.name for path in local.glob("train-*"))):
        assert Path(path).name == name and os.stat(path).st_blocks == 0
        with remote.open_file(path, block=1000) as file:
            assert file.read() == (local / name).read_bytes()
            assert file.seek(-10, os.SEEK_END) == os.stat(path).st_size - 10 and len(file.read()) == 10


def test_a_smaller_cache_and_other_data_make_room(store, local, address):
    sizes = [path.stat().st_size for path in sorted(local.glob("train-*"))]
    other = store.put(local, "bucket/other")
    sources.open_source(address, split="train", cache=10**9)
    sources.open_source(other, split="train", cache=sum(sizes))
    assert whole(address)[1] == sum(sizes) and len(whole(address)[0]) == SHARDS, "data that a job uses stay"
    forget()
    sources.open_source(other, split="train", cache=sum(sizes) + sizes[0])
    assert [len(whole(one)[0]) for one in (address, other)] == [1, SHARDS]
    sources.open_source(other, split="train", cache=sizes[0])
    assert [len(whole(one)[0]) for one in (address, other)] == [0, 1] and whole(other)[1] == sizes[0]


def test_a_full_disk_is_a_smaller_cache(store, local, address, monkeypatch, caplog):
    monkeypatch.setattr(remote, "SPARE", remote.shutil.disk_usage(cache_folder().anchor).free + 10**12)
    caplog.set_level(logging.INFO)
    index = sources.open_source(address, split="train", cache=10**9)
    assert whole(address) == ([], 0) and len(index) == COUNT
    assert "at s3://bucket/images/digits stay there" in caplog.text and "has 0 GB free" in caplog.text


def test_an_object_that_has_changed_or_gone_is_seen(store, local, tmp_path):
    address = store.put(local, "bucket/changing")
    before = sources.open_source(address, split="train", cache=10**9)
    path = sorted(local.glob("train-*"))[0]
    changed = path.read_bytes()[: (sizes := before.offset[9] + before.length[9])]
    store.call("PUT", f"bucket/changing/{path.name}", path.read_bytes() + path.read_bytes())
    index = sources.open_source(address, split="train", cache=10**9, allow_incomplete=True)
    assert len(index) == COUNT + before.shard_sizes[0] and changed == Path(index.files[0]).read_bytes()[:sizes]
    store.call("DELETE", f"bucket/changing/{path.name}")
    with pytest.raises(ValueError, match="lacks 1 of the 4 train shards .*train-00000-of-00004"):
        sources.open_source(address, split="train", cache=10**9)


@pytest.mark.parametrize(
    "address, said",
    {
        "s3://nobucket/x": "s3://nobucket/x is not there: check the address",
        "s3://bucket/nothing": "s3://bucket/nothing is not there: check the address",
        "s3://Two Words/x": "s3://Two Words/x cannot be read .*Invalid bucket name.*: check the address",
        "s3://": "s3:// is no folder of a store: give an address such as s3://bucket/imagenet.",
        "s3://bucket/../x": "s3://bucket/../x is no folder of a store",
        "nfs4://server/x": "cannot be read .Protocol not known: nfs4.: give s3://, gs://, hf:// or https://.",
        "oci://bucket/x": "needs a package that is not installed: Install ocifs to access",
        "s3://bucket/one/train-00000-of-00001": "is a file: give the address of the folder around it.",
        "s3://bucket/folders": "has no TFRecords, .* pack images with `python -m largebatch.pack FOLDER SHARDS`",
        "s3://bucket/cifar": "has no TFRecords, .* pack images with `python -m largebatch.pack FOLDER SHARDS`",
    }.items(),
)
def test_an_address_that_cannot_be_read_is_one_sentence(store, tmp_path, address, said):
    store.put(tmp_path, "bucket/empty")
    for name in ("one/train-00000-of-00001", "folders/train/a/1.jpg", "cifar/data_batch_1.bin", "cifar/test_batch.bin"):
        store.call("PUT", f"bucket/{name}", b"bytes")
    for call in (lambda: sources.open_source(address, split="train"), lambda: pack.run([address, str(tmp_path / "o")])):
        with pytest.raises(ValueError, match=said) as error:
            call()
        assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert not (tmp_path / "o").exists()


def test_no_held_out_shards_at_an_address_are_one_sentence(store, local, address):
    for path in local.glob("train-*"):
        store.call("PUT", f"bucket/training/{path.name}", path.read_bytes())
    with pytest.raises(ValueError, match="^s3://bucket/training has no .* validation split.* set --run.eval"):
        sources.open_source("s3://bucket/training", split="validation")


@pytest.mark.parametrize("fault, said", {"expired": "The provided token has expired", "403": "Access Denied"}.items())
def test_a_refusal_ends_at_once_with_the_address_and_no_secret(store, address, fault, said):
    index = sources.open_source(address, split="train", cache=0).for_classes(10)
    store.fault, count = lambda number, request: fault, len(store.asked)
    sentence = rf"{address}\S* may not be read \({said}\): renew or set the credentials, AWS_ACCESS_KEY_ID"
    with pytest.raises(Damaged, match=f"^{sentence}"):
        sources.open_source(address, split="train")
    assert len(store.asked) < count + 5
    with pytest.raises(Damaged, match=sentence) as error:
        stream(index)
    assert KEY not in str(error.value) and SECRET not in str(error.value)


def test_no_credentials_are_one_sentence(store, address, monkeypatch):
    monkeypatch.setattr(remote, "_store", remote._store.__wrapped__)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")  # another file system for fsspec
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    with pytest.raises(Damaged, match="may not be read .Unable to locate credentials.: .* FSSPEC_S3_ANON=true"):
        sources.open_source(address, split="train")
    S3FileSystem.clear_instance_cache()


def test_an_answer_that_is_short_is_asked_for_again(local, address, monkeypatch):
    """A proxy between may forget the length of what it cuts, so that no client notices."""
    from s3fs import S3FileSystem

    whole_answer, asked = S3FileSystem._cat_file, set()

    async def short(self, path, start, end):
        data = await whole_answer(self, path, start=start, end=end)
        first = (path, start) not in asked
        asked.add((path, start))
        return data[:-1] if first else data

    monkeypatch.setattr(S3FileSystem, "_cat_file", short)
    index, expected = sources.open_source(address, split="train"), sources.open_source(str(local), split="train")
    assert [index.read(k) for k in range(9)] == [expected.read(k) for k in range(9)] and len(asked) > 12


def test_a_refusal_does_not_make_a_sample_bad(store, tmp_path, monkeypatch):
    """While a tar is indexed, the bytes of a class are refused."""
    members = [sample(f"{k:03}", k % 3, k) for k in range(5)]
    write(tmp_path / "tars" / NAMES["train"].format(0), *sum(members, []))
    address = store.put(tmp_path / "tars", "bucket/refused")
    opened = remote.open_file
    monkeypatch.setattr(remote, "open_file", lambda path: opened(path, block=512))
    for number in range(3, 40, 4):
        store.fault = lambda _, request: "403" if "bytes=" in request and len(store.reads(".tar")) == number else ""
        store.asked.clear()
        with pytest.raises(Damaged, match="may not be read"):
            sources.open_source(address, split="train")
    store.fault = lambda number, request: ""
    assert len(sources.open_source(address, split="train")) == 5


def test_a_store_that_fails_for_good_ends_after_some_tries(store, address):
    index = sources.open_source(address, split="train", cache=0).for_classes(10)
    store.fault = lambda number, request: "cut" if "bytes=" in request else ""
    with pytest.raises(Damaged, match=rf"{address}/train-0000\d-of-00004 could not be read in 3 tries .*: check the"):
        stream(index)


def test_credentials_in_an_address_are_refused_and_not_shown(tmp_path):
    for given in ("s3://me:pw-one@bucket/x", "https://token-one@host/x", "https://host/x?X-Amz-Signature=sig-one"):
        calls = [
            lambda: apply(TrainConfig(), ["--data", given]),
            lambda: arguments.expanded(given),
            lambda: sources.open_source(given, split="train"),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="with a user, a password or a query") as error:
                call()
            assert "-one" not in str(error.value)
    account = "abfs://container@account.dfs.core.windows.net/x"
    assert apply(TrainConfig(), ["--data", account]).data.path == account


@pytest.mark.parametrize(
    "text, size",
    [
        *{"200 GB": 200e9, "1.5TiB": 1.5 * 2**40, "0": 0, "512": 512, "3 MB": 3e6, "2 KB": 2e3, "200gb": 200e9}.items(),
        *{"x": -1, "1 XB": -1, "-1": -1}.items(),
    ],
)
def test_a_size_has_units(text, size):
    assert byte_size(text) == size
    if size < 0:
        with pytest.raises(ValueError, match=f"--data.cache is {text}: expected a size, such as \"200 GB\"."):
            apply(TrainConfig(), [f"--data.cache={text}"])


def test_a_copy_that_is_killed_leaves_no_wrong_bytes(store, local, address, tmp_path):
    """Killed while the second shard is on its way."""
    stopped = threading.Event()

    def fault(number, request):
        if "train-00001" in request and "bytes=" in request:
            stopped.set()
            threading.Event().wait(60 if process.poll() is None else 0)
        return ""

    store.fault = fault
    process = subprocess.Popen([sys.executable, "-c", COPY, address], cwd=Path(__file__).parents[1])
    assert stopped.wait(100)
    process.send_signal(signal.SIGKILL)
    process.wait()
    store.fault = lambda number, request: ""
    folder = cache_folder() / "remote/s3/bucket/images/digits"
    assert whole(address)[0] == ["train-00000-of-00004"] and list(folder.glob(".train-00001*"))
    index = sources.open_source(address, split="train", cache=10**9)
    assert len(whole(address)[0]) == SHARDS and not list(folder.glob(".train-*"))
    assert index.digest() == sources.open_source(str(local), split="train").digest()
    assert [Path(path).read_bytes() for path in index.files] == [p.read_bytes() for p in sorted(local.glob("train-*"))]


def test_tars_and_packing_and_checking(store, local, address, tmp_path, capsys):
    for shard in range(2):
        members = [sample(f"s{shard}/{k:03}", (shard + k) % 3, 5 * shard + k) for k in range(5)]
        write(tmp_path / "tars" / NAMES["train"].format(shard), *sum(members, []))
    there = store.put(tmp_path / "tars", "bucket/tars")
    one, other = (sources.open_source(path, split="train") for path in (str(tmp_path / "tars"), there))
    assert one.digest() == other.digest() and [*map(one.read, range(10))] == [*map(other.read, range(10))]
    store.fault = lambda number, request: "403"
    with pytest.raises(Damaged, match="may not be read"):
        sources.open_source(there.replace("tars", "tars/train"), split="train")
    store.fault = lambda number, request: ""
    packed = []
    for name, source in (("one", str(local)), ("other", address)):
        assert pack.run([source, str(tmp_path / name), "--shards", "3", "--threads", "1"]) == 0
        packed.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.suffix != ".json"})
    assert packed[0] == packed[1] and len(packed[0]) == 4
    list_ = str(tmp_path / "bad.csv")
    assert pack.run(["check", there, "--out", list_]) == 0 and "train: 10 images, 0 bad" in capsys.readouterr().out
    store.fault = lambda number, request: "403" if "bytes=" in request else ""
    remote.keep(cache_folder() / "remote/s3/bucket/tars", [], 0)
    with pytest.raises(Damaged, match="may not be read"):
        pack.run(["check", there, "--out", list_])
    assert not Path(list_).exists()


def test_label_maps_are_added_to_shards_at_an_address(local, address, tmp_path):
    """And its held-out shards are copied as they are."""

    def maps(shard):
        for _ in range(len(shard)):
            yield np.full((2, 3, 3), 0.5, dtype=np.float32), np.ones((2, 3, 3), dtype=np.int64)

    for name, source in (("one", str(local)), ("other", address)):
        assert token_labels.add_maps(source, str(tmp_path / name), maps, made_by={"labels": "x"}) == COUNT
    files = sorted(path.name for path in (tmp_path / "one").glob("*-of-*"))
    assert len(files) == SHARDS + 1
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes() for name in files)


def test_the_list_of_bad_images_is_kept_elsewhere(store, tmp_path, capsys, monkeypatch):
    """The remedy of the training's message, to the letter. In the folder that stands for the address it would go."""
    image = encoded(90)
    payloads = [{IMAGE: [image if number else image[:40]], LABEL: [1 + number % 2]} for number in range(4)]
    (tmp_path / "bad").mkdir()
    records.write_records(tmp_path / "bad" / "train-00000-of-00001", map(records.encode_example, payloads))
    there = store.put(tmp_path / "bad", "bucket/bad")
    with pytest.raises(ValueError) as told:
        sources.open_source(there, split="train")
    found = re.search(r"list them by `python -m largebatch\.pack (.*)`, and give (.*)\.$", str(told.value))
    command, option = found.groups()
    assert command == f"check {there} --out bad.csv" and option == "--data.quarantine bad.csv"
    with pytest.raises(ValueError, match="No list stays at .*/bad: give --out FILE, and train with --data.quarantine"):
        pack.run(["check", there])
    monkeypatch.chdir(tmp_path)
    assert pack.run(command.split()) == 1 and "listed in bad.csv" in capsys.readouterr().out
    assert len(sources.open_source(there, split="train", listed="bad.csv")) == 3


HERE = "s3://b/x is an address, and a file or folder of this host is expected: only --data and --checkpoint.mirror"


@pytest.mark.parametrize(
    "program, said",
    {
        "largebatch.doctor --hosts a:1,b:1 --data s3://b/x": "and folders of hosts are compared: leave an address out",
        "largebatch.predict {weights} s3://b/x.jpg": "s3://b/x.jpg is left out: it is an address, and images are read",
        "largebatch.train --run.folder s3://b/x": HERE,
        "largebatch.export {weights} s3://b/x": HERE,
        "largebatch.pack digits s3://b/x": HERE,
        "largebatch.pack check digits --out s3://b/x": HERE,
        "largebatch.pack token-labels digits s3://b/x --labels y": HERE,
    }.items(),
)
def test_other_programs_refuse_an_address_in_one_sentence(tmp_path, program, said):
    """A program that writes there would make a folder s3: where nobody looks."""
    save_file(create_model("vit_nano32", img_size=32, num_classes=2).state_dict(), tmp_path / "w.safetensors")
    command = [sys.executable, "-m", *program.format(weights=tmp_path / "w.safetensors").split()]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Lists folders as links, and serves ranges of files."""

    def send_head(self):
        path = Path(self.translate_path(self.path))
        if path.is_dir() or "Range" not in self.headers:
            return super().send_head()
        start, stop = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data = path.read_bytes()[start : stop + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_files_of_a_web_server(local):
    def handler(*given):
        return Ranges(*given, directory=str(local.parent))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/{local.name}/"
        for cache in (0, 10**9):
            index = sources.open_source(address, split="train", cache=cache)
            assert index.digest() == sources.open_source(str(local), split="train").digest()
            assert sources.class_names(index) == tuple("0123456789")
        server.shutdown()
