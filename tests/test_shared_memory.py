"""What killed jobs leave in /dev/shm is removed, and nothing else."""

import mmap
import os
import socket
import time

from largebatch.process import shared_memory


def test_only_files_of_ours_that_nobody_has_mapped_are_removed(tmp_path, monkeypatch):
    host, user = socket.gethostname(), os.geteuid()
    left = f"vader_segment.{host}.{user}.30af0001.0"
    mapped = f"vader_segment.{host}.{user}.af90001.1"
    others = {
        mapped,
        f"vader_segment.{host}.{user + 1}.30af0001.0",
        f"vader_segment.other-{host}.{user}.30af0001.0",
        f"vader_segment.{host}.{user}.30af0001.link",
        "sem.mine",
    }
    for name in {left, *others}:
        (tmp_path / name).write_bytes(b"x" * 4096)
    (tmp_path / f"sm_segment.{host}.{user}.1.2").symlink_to(tmp_path / "sem.mine")
    assert shared_memory.remove_leftovers(tmp_path) == []  # too young to be sure
    with open(tmp_path / mapped, "r+b") as file, mmap.mmap(file.fileno(), 0):
        now = time.time() + 1.5 * shared_memory.MIN_AGE_S
        monkeypatch.setattr(time, "time", lambda: now)
        assert shared_memory.remove_leftovers(tmp_path) == [left]
    assert {path.name for path in tmp_path.iterdir()} == others | {f"sm_segment.{host}.{user}.1.2"}
