"""Two jobs want one run folder: on one host, on two, with flock and without."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest

from largebatch.files import run_lock
from largebatch.files.run_lock import Holder, hold

HOLD = """
import sys, time
from largebatch.files import run_lock
run_lock.BEAT_S = 0.05
with run_lock.hold(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "PATIENCE_S", 2.0)
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.01)


@contextmanager
def another_job(folder):
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout.readline() == "held\n"
            yield job
        finally:
            job.kill()


@contextmanager
def without_flock(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        yield


def test_a_second_job_is_refused_and_told_who_holds_the_folder(tmp_path):
    with another_job(tmp_path) as job, pytest.raises(ValueError, match=f"by process {job.pid} on .*, since 20"):
        with hold(tmp_path):
            pass


def test_the_folder_is_free_when_its_holder_has_ended(tmp_path):
    with hold(tmp_path):
        pass
    assert (tmp_path / ".lock").read_bytes() == b""
    with hold(tmp_path):
        pass


def test_a_killed_holder_is_replaced_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_counts", lambda *_: pytest.fail("flock alone has to tell"))
    with another_job(tmp_path) as job:
        job.send_signal(signal.SIGKILL)
        job.wait()
    with hold(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_where_flock_is_missing_the_count_tells(tmp_path, monkeypatch):
    with without_flock(monkeypatch), another_job(tmp_path) as job:
        with pytest.raises(ValueError, match=f"process {job.pid}"):
            with hold(tmp_path):
                pass
        job.send_signal(signal.SIGKILL)
        job.wait()
        monkeypatch.setattr(run_lock, "PATIENCE_S", 0.3)
        with hold(tmp_path):
            pass


def test_a_holder_on_another_host_is_watched_although_flock_succeeds(tmp_path, monkeypatch):
    """Some network file systems lock within a host alone: another boot says that flock has shown nothing."""
    elsewhere = replace(Holder.this_process(), host="other", boot="another")
    (tmp_path / ".lock").write_text(json.dumps(asdict(elsewhere)))
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.3)
    with hold(tmp_path):
        pass
    (tmp_path / ".lock").write_text(json.dumps(asdict(elsewhere)))
    seen = iter([elsewhere, elsewhere, replace(elsewhere, count=1)])
    monkeypatch.setattr(run_lock, "_read", lambda _: next(seen))
    with pytest.raises(ValueError, match="on other"):
        with hold(tmp_path):
            pass


def test_a_holder_whose_folder_was_taken_over_ends(tmp_path):
    """It was stopped for longer than the others' patience, say, and goes on."""
    with another_job(tmp_path) as job:
        taken = replace(Holder.this_process(), host="other", boot="another")
        with open(tmp_path / ".lock", "r+b") as file:
            file.write(json.dumps(asdict(taken)).encode().ljust(512))
        assert job.wait(timeout=30) == 1


def test_of_two_that_start_together_without_flock_one_goes_on(tmp_path, monkeypatch):
    other = replace(Holder.this_process(), host="other", boot="another")
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: (tmp_path / ".lock").write_text(json.dumps(asdict(other))))
    with without_flock(monkeypatch), pytest.raises(ValueError, match="on other"):
        with hold(tmp_path):
            pass
    assert json.loads((tmp_path / ".lock").read_text())["host"] == "other"


def test_a_record_that_was_not_written_whole_holds_nothing(tmp_path):
    (tmp_path / ".lock").write_text('{"host": "h1", "pi')
    with hold(tmp_path):
        pass
