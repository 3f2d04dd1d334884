"""Files appear whole or not at all, and the cache is where the user wants it."""

import ctypes
import fcntl
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from largebatch.data import quarantine
from largebatch.data.sources import open_source
from largebatch.files import (
    Damaged,
    atomic_file,
    cache_folder,
    distrust,
    locked,
    refuse_links_of_others,
    safe_cache,
    written_once,
)
from largebatch.files.names import Formatter, listed, printable
from largebatch.files.run_folder import RunFolder, read_rows
from largebatch.native.compile import compile_library, load_library
from largebatch.report import predictions
from largebatch.train import read, run_folder

ROOT = Path(__file__).parents[1]


def test_a_file_is_never_seen_half_written(tmp_path, monkeypatch):
    """Its name stands for the old bytes until those of the new file are on the disk."""
    path, old, new = tmp_path / "list", b"old" * 1000, b"new" * 1001
    path.write_bytes(old)
    synced, real = [], os.fsync

    def fsync(file):
        real(file)
        synced.append((os.fstat(file).st_ino, path.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    with open(path, "rb") as reader:
        with atomic_file(path) as file:
            file.write(new)
        assert reader.read() == old, "a process that has opened the old file reads it to its end"
    assert path.read_bytes() == new
    assert synced == [(path.stat().st_ino, old)]

    def fail(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        with atomic_file(path) as file:
            file.write(old)
    assert path.read_bytes() == new and os.listdir(tmp_path) == ["list"]


@pytest.mark.parametrize("locks", [True, False])
def test_many_may_start_at_once(tmp_path, monkeypatch, locks):
    started, barrier = [], threading.Barrier(4)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))

    def fill(folder, go_on):
        started.append(folder)
        (folder / "file").write_text("whole")
        if not locks and len(started) < 2:
            second.wait()  # until another thread has overtaken the first

    def run():
        barrier.wait()
        assert (written_once(tmp_path / "data", fill) / "file").read_text() == "whole"
        second.set()
        done.append(1)

    second, done = threading.Event(), []
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4 and (len(started) == 1 if locks else len(started) >= 1)
    assert sorted(os.listdir(tmp_path)) == [".data.lock", "data"]


def test_who_waits_for_a_lock_makes_progress_if_its_holder_does(tmp_path):
    seen, waiting, done = threading.Event(), threading.Event(), []

    def wait():
        waiting.set()
        with locked(tmp_path / "index", seen.set):
            done.append(1)

    with locked(tmp_path / "index") as go_on:
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        assert not seen.wait(0.5)
        for _ in range(1200):
            if seen.wait(0.05):
                break
            go_on()
        assert seen.is_set() and not done
    thread.join()
    assert done == [1]


@pytest.mark.parametrize("error", [OSError("no space left"), Damaged("no answer"), KeyboardInterrupt()])
def test_writing_goes_on_after_an_outage(tmp_path, error):
    def fill(folder, go_on):
        if not (folder / "half").exists():
            (folder / "half").write_text("whole")
            raise error

    with pytest.raises(type(error)):
        written_once(tmp_path / "data", fill)
    assert (written_once(tmp_path / "data", fill) / "half").read_text() == "whole"
    assert sorted(os.listdir(tmp_path)) == [".data.lock", "data"]


def test_bad_data_leaves_nothing(tmp_path):
    def fill(folder, go_on):
        (folder / "half").write_text("")
        raise ValueError("image 3 is none")

    with pytest.raises(ValueError, match="image 3"):
        written_once(tmp_path / "data", fill)
    assert os.listdir(tmp_path) == [".data.lock"]


def test_writing_goes_on_where_a_process_was_killed(tmp_path):
    """It finds what is there, and nothing is left behind."""
    program = "import os, sys; from pathlib import Path; from largebatch.files import written_once; written_once("
    program += "Path(sys.argv[1]), lambda folder, _: ((folder / 'half').write_text('whole'), os._exit(9)))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "data")])
    assert done.returncode == 9 and sorted(os.listdir(tmp_path)) == [".data.lock", ".data.unfinished"]

    def fill(folder, go_on):
        assert (folder / "half").read_text() == "whole"

    assert written_once(tmp_path / "data", fill) == tmp_path / "data"
    assert sorted(os.listdir(tmp_path)) == [".data.lock", "data"]


def test_who_waits_for_a_folder_makes_progress(tmp_path):
    """As a rank does while another one of its host converts the images."""
    waiting, seen = threading.Event(), threading.Event()

    def wait():
        waiting.set()
        written_once(tmp_path / "data", lambda folder, go_on: None, seen.set)

    thread = threading.Thread(target=wait)

    def fill(folder, go_on):
        thread.start()
        waiting.wait()
        for _ in range(1200):
            if seen.wait(0.05):
                break
            go_on()

    written_once(tmp_path / "data", fill)
    thread.join()
    assert seen.is_set()


def test_default_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "largebatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "largebatch"


# -- a cache that others may write to ---------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of this user alone, and another temporary folder in which the user's other one would be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "largebatch"


def give_away(path, monkeypatch):
    """Make the folder another user's: only root can, and for others it is as if they had become another."""
    if os.geteuid() == 0:
        os.chown(path, 4242, 4242, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)


def test_a_cache_is_made_for_this_user_alone(cache):
    umask = os.umask(0o002)  # as of users who have a group of their own
    try:
        assert safe_cache(cache, "native") == cache / "native"
    finally:
        os.umask(umask)
    assert [oct(path.stat().st_mode & 0o777) for path in (cache, cache / "native")] == ["0o700", "0o700"]
    assert distrust(cache) == ""


@pytest.mark.parametrize("part", ["", "native"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_cache_that_others_may_write_to_is_not_used(cache, caplog, part, mode):
    (cache / "native").mkdir(parents=True)
    (cache / part).chmod(mode)
    own = Path(tempfile.gettempdir()) / f"largebatch-{os.geteuid()}"
    assert safe_cache(cache, "native") == own / "native" and distrust(own / "native") == ""
    (said,) = caplog.messages
    assert f"the cache {cache} " in said and f"`chmod go-w {(cache / part)}`" in said and f"{own} is used inst" in said


def test_a_cache_of_another_user_is_not_used(cache, caplog, monkeypatch):
    cache.mkdir()
    give_away(cache, monkeypatch)
    assert safe_cache(cache, "native").parent.parent == Path(tempfile.gettempdir())
    assert f"the cache {cache} belongs to user " in caplog.text


def test_the_link_of_another_user_leads_to_no_cache(cache, caplog):
    """It might lead to any folder of ours."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a link to another user")
    cache.with_name("elsewhere").mkdir()
    cache.symlink_to(cache.with_name("elsewhere"))
    assert safe_cache(cache) == cache / "", "a link of one's own"
    safe_cache.cache_clear()
    os.chown(cache, 4242, 4242, follow_symlinks=False)
    assert safe_cache(cache).parent == Path(tempfile.gettempdir())
    assert f"the cache {cache} belongs to user 4242" in caplog.text


def test_there_is_no_cache_that_others_cannot_write_to(cache):
    instead = Path(tempfile.gettempdir()) / f"largebatch-{os.geteuid()}"
    for folder in (cache, instead):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    with pytest.raises(ValueError, match=f"^The cache {cache} may be .*, and {instead} may be .*: set XDG_CACHE_HOME"):
        safe_cache(cache)


@pytest.mark.needs_compiler
def test_a_host_compiles_into_its_own_cache(cache, tmp_path, monkeypatch):
    """A home folder that many hosts share gets no call, unless libraries cannot be loaded from the host's disk."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    own, home = Path(tempfile.gettempdir()) / f"largebatch-{os.geteuid()}", tmp_path / "home" / ".cache" / "largebatch"
    load_library.cache_clear()
    assert load_library(write_source(tmp_path)).answer() == 42
    assert len(list((own / "native").glob("*.so"))) == 1 and not (tmp_path / "home").exists()

    def forbidden(path, real=ctypes.CDLL):  # as on a disk that is mounted with noexec
        if path.startswith(str(own)):
            raise OSError("failed to map segment from shared object: Operation not permitted")
        return real(path)

    monkeypatch.setattr(ctypes, "CDLL", forbidden)
    load_library.cache_clear()
    assert load_library(write_source(tmp_path)).answer() == 42
    assert len(list((home / "native").glob("*.so"))) == 1
    load_library.cache_clear()


NAMELESS = """
import logging, os, sys
logging.basicConfig(level=logging.INFO)
os.umask(0o002)
from pathlib import Path
from largebatch.files import cache_folder, safe_cache
from largebatch.data.sources import open_source
from largebatch.files.names import Formatter, listed, printable
from largebatch.native.compile import load_library
print(safe_cache(cache_folder(), "native"))
print(len(open_source("digits", split="train")), load_library(Path(sys.argv[1])).answer())
"""
READS = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]  # also root's own Python
BECOME = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", *READS]


@pytest.mark.needs_compiler
@pytest.mark.parametrize("home", [None, "/", "/no/such/folder"])
def test_a_user_id_without_a_name_has_a_cache(tmp_path, home):
    """As in containers of Kubernetes and OpenShift, which give a number that no file of users knows."""
    if not shutil.which("setpriv") or subprocess.run([*BECOME, "true"], capture_output=True).returncode != 0:
        pytest.skip("only root can become a user without a name, by setpriv")
    source = write_source(tmp_path)
    temporary = tmp_path / "t"
    temporary.mkdir()
    temporary.chmod(0o1777)
    environment = {name: text for name, text in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "USER")}
    environment |= {"TMPDIR": str(temporary)} | ({} if home is None else {"HOME": home})
    command = [*BECOME, sys.executable, "-c", NAMELESS, str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.split() == [str(temporary / "largebatch-54321" / "native"), "1437", "42"], done.stderr
    if home:
        assert f"the cache {Path(home, '.cache/largebatch')} cannot be used (Permission denied)" in done.stderr


def test_an_index_that_others_may_have_written_is_not_read(cache, caplog, tmp_path, monkeypatch):
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))  # other tests write indices there, too
    assert len(open_source("digits", split="validation")) == 360
    ours = [path.name for path in (cache / "index").glob("*.npz")]
    assert ours and not caplog.messages
    (cache / "index").chmod(0o777)
    safe_cache.cache_clear()  # as in another process
    assert len(open_source("digits", split="validation")) == 360
    instead = Path(tempfile.gettempdir()) / f"largebatch-{os.geteuid()}"
    assert "has a folder index that may be written to by other users" in caplog.text
    assert [path.name for path in (instead / "index").glob("*.npz")] == ours


@pytest.mark.parametrize("name", ["log.txt", "checkpoints", "checkpoints/00000100"])
def test_a_run_does_not_follow_the_links_of_others(tmp_path, monkeypatch, name):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (folder / name).parent.mkdir(parents=True)
    elsewhere.mkdir()
    (folder / name).symlink_to(elsewhere)
    refuse_links_of_others(folder)
    give_away(folder / name, monkeypatch)
    config = read(["--run.folder", str(folder)])
    comm = SimpleNamespace(rank=0, together=lambda what: nullcontext())
    with pytest.raises(ValueError, match=f"^{folder / name} is a link that user .* remove it, or choose another "):
        with run_folder(config, comm):
            pass


# -- libraries --------------------------------------------------------------------------------------------------------


def write_source(folder: Path, answer: int = 42) -> Path:
    source = folder / f"answer{answer}.cpp"
    source.write_text(f'extern "C" int answer() {{ return {answer}; }}')
    return source


def plant(source: Path, folder: Path) -> Path:
    """Compile `source` into a folder, and put a library that answers 13 in its place."""
    kept = compile_library(source, (), folder)
    other = compile_library(write_source(source.parent, 13), (), folder)
    return other.replace(kept)


@pytest.mark.needs_compiler
@pytest.mark.parametrize("how", ["nobody", "the folder", "the file", "another user's file"])
def test_no_library_is_loaded_that_others_may_have_written(cache, tmp_path, monkeypatch, how):
    source = write_source(tmp_path)
    kept = plant(source, safe_cache(cache, "native"))
    safe_cache.cache_clear()  # as in another process
    if how == "the folder":
        kept.parent.chmod(0o777)
    elif how == "the file":
        kept.chmod(0o775)
    elif how == "another user's file":
        give_away(kept, monkeypatch)
    assert load_library(source).answer() == (13 if how == "nobody" else 42)


@pytest.mark.parametrize("place", ["log.txt", "checkpoints/x"])
def test_a_run_does_not_wait_for_a_pipe_in_its_folder(tmp_path, place):
    pipe = tmp_path / place
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match=f"{pipe} is neither a file nor a folder: remove it, or choose another"):
        refuse_links_of_others(tmp_path)
    pipe.unlink()
    (tmp_path / "best").symlink_to("nowhere")
    refuse_links_of_others(tmp_path)


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        with atomic_file(tmp_path / "none" / "x.json"):
            pass
    assert error.value.filename == str(tmp_path / "none" / "x.json")
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path / 'x.json'}'")):
        with atomic_file(tmp_path / "x.json"):
            raise OSError(28, "No space left on device")


# -- names that others have chosen ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, shown",
    [("café", "café"), ("\x1b[2J", "\\x1b[2J"), ("a\nb\tc", "a\\nb\\tc"), ("\udcff", "\\udcff"), ("\u202e", "\\u202e")],
)
def test_a_name_cannot_command_a_terminal(name, shown):
    assert printable(name) == shown and listed([name] * 5) == f"{shown}, {shown}, {shown} and 2 more"


def test_no_further_line_of_a_record_looks_like_a_record():
    record = logging.makeLogRecord({"msg": "left out: %s", "args": ("x\x1b[2J\n12:00:00 saved\n  indented",)})
    assert Formatter("12:00:00 %(message)s").format(record) == (
        "12:00:00 left out: x\\x1b[2J\n    12:00:00 saved\n  indented"
    )


# -- the folder of a run --------------------------------------------------------------------------------------------


def test_a_checkpoint_and_its_files_belong_to_their_run(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoints" / "00000002").mkdir(parents=True)
    (run / "checkpoints" / "best").symlink_to("00000002")
    for place in (".", "checkpoints/00000002", "checkpoints/best", "checkpoints/best/model.safetensors"):
        assert RunFolder.of(run / place).path == run
    monkeypatch.chdir(run / "checkpoints" / "best")
    assert RunFolder.of("model.safetensors").path.samefile(run)
    alone = tmp_path / "checkpoints" / "alone"  # a run, whose folder only looks like a checkpoint
    alone.mkdir(parents=True)
    (alone / "config.yaml").touch()
    assert RunFolder.of(alone).path == alone
    for file in ("weights.pt", "checkpoints/weights.pt", "checkpoints/tiny/weights.pt"):  # of no run
        assert RunFolder.of(tmp_path / file).path == tmp_path / file


def test_a_config_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.write_config("recipe: quickstart\n")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        run.write_config("recipe: scratch\n")
    assert run.config.read_text() == "recipe: quickstart\n" and [*tmp_path.iterdir()] == [run.config]


def test_a_table_that_is_none_is_one_sentence(tmp_path):
    (tmp_path / "steps.csv").write_text("step,loss\n1," + "2" * 200_000)
    with pytest.raises(ValueError, match="steps.csv is not the table of a run: field larger than field limit"):
        read_rows(RunFolder(tmp_path).steps)


def test_a_row_at_a_place_that_no_run_reaches_is_left_out(tmp_path):
    (tmp_path / "steps.csv").write_text("step,epoch,loss\n1,,1e300\n2,1e16,1\ninf,1,1\n-1e16,1,1\n3,1,\n")
    assert [row["step"] for row in read_rows(RunFolder(tmp_path).steps)] == [1, 3]


def test_a_command_in_a_message_names_folders_as_a_shell_reads_them(tmp_path):
    folder = tmp_path / "it's mine"
    folder.mkdir()
    folder.chmod(0o777)
    assert f"`chmod go-w {shlex.quote(str(folder))}` after a look" in distrust(folder)
    entry = quarantine.Entry("train", "a.jpg", 0, 0, 1, "ab", "no")
    with pytest.raises(ValueError, match=re.escape(f"largebatch.pack check {shlex.quote(str(folder))}` again")):
        quarantine.listed_spans([entry], folder=folder, split="train", listed_in=folder / "quarantine.csv")
    (folder / "x").write_text("other\n")
    with pytest.raises(ValueError, match=re.escape(f"validate --predictions {shlex.quote(str(folder / 'x'))}.")):
        predictions.read(folder / "x")
