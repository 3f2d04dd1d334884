"""Files appear whole or not at all, and the cache is where the user wants it."""

import fcntl
import os
import threading

import pytest

from largebatch.files import atomic_file, cache_folder, written_once


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

    def fill(folder):
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


def test_failed_writing_leaves_nothing(tmp_path):
    def fill(folder):
        (folder / "half").write_text("")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        written_once(tmp_path / "data", fill)
    assert os.listdir(tmp_path) == [".data.lock"]


def test_default_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "largebatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "largebatch"
