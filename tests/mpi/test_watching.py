"""The lines of a run: a live bar on a terminal; quiet lines with the time elsewhere."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import termios
import threading
from pathlib import Path

import pytest
from launch import ENVIRONMENT, ROOT, launch, with_python
from PIL import Image
from runs import SMALL, rows

from largebatch.report.history import read_starts

COLUMNS = 100
LIMIT_S = 240.0
TIMED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (rank \d+: )?\S")


def at_terminal(command: list[str], *, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a command at a terminal of its own, which it controls; its exit code and its output."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"TERM": "xterm"} | (environment or {}),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    stop = threading.Timer(LIMIT_S, lambda: os.killpg(process.pid, signal.SIGKILL))
    stop.start()
    pieces = []
    try:
        while piece := os.read(master, 2**16):
            pieces.append(piece)
    except OSError:  # nobody has the terminal open any more
        pass
    finally:
        stop.cancel()
        os.close(master)
    return process.wait(), b"".join(pieces).decode(errors="replace")


BATCH = ["--data.global_batch_size", "64", "--data.micro_batch_size"]
TRAIN = ["-m", "largebatch.train", *SMALL, "--run.duration", "3 steps", "--log.every", "1 steps", *BATCH]


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> tuple[Path, str]:
    """A run at a terminal, with matplotlib's fonts not yet known; its folder and what was seen."""
    folder = tmp_path_factory.mktemp("runs") / "watched"
    command = with_python(["python", *TRAIN, "64", "--run.folder", str(folder)], cold=True)
    environment = {"MPLCONFIGDIR": str(folder.parent / "matplotlib")}
    code, seen = at_terminal(command, environment=environment)
    assert code == 0, seen
    return folder, seen


def test_a_bar_is_seen(watched):
    _, seen = watched
    bars = re.findall(r"━[^\r\n]*step [123]/3", seen)
    assert len(bars) > 1, "it is drawn again"
    assert re.search(r"\r\x1b\[2K(\d\d:\d\d:\d\d )?", seen), "a line of the log takes the place of the bar"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen).splitlines()
    assert COLUMNS // 2 < max(len(line.rstrip()) for line in plain if "━" in line) <= COLUMNS


def test_no_foreign_lines_are_seen(watched):
    folder, seen = watched
    for text in (seen, (folder / "log.txt").read_text()):
        assert "fontManager" not in text
    assert re.search(r"^(\x1b\[2K)?\d\d:\d\d:\d\d .*global batch 64 = 1 rank × 64 micro-batch × 1 pass", seen, re.M)


def test_the_log_says_when_by_which_command_where_and_from_which_commit(watched):
    folder, _ = watched
    log = (folder / "log.txt").read_text()
    assert all(TIMED.match(line) for line in log.splitlines() if not line.startswith("    ")), log
    command = shlex.join(["python", *TRAIN, "64", "--run.folder", str(folder)])
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    told, *_ = re.findall(rf"{re.escape(command)}: 1 rank on (\S+), started by [^,\n]+(, commit (\w+).*)?$", log, re.M)
    assert told[0] == os.uname().nodename and (not commit or commit.startswith(told[2]))
    assert "\x1b" not in log and "━" not in log


def test_each_start_and_each_end_is_kept(watched):
    folder, _ = watched
    code, output = launch([*TRAIN, "64", "--run.folder", str(folder)], ranks=1)
    assert code == 0 and "This run is complete" in output
    (start,) = read_starts(folder)
    assert (start.step, start.last_step, start.ranks, start.reason) == (0, 3, 1, "")
    assert start.ended is not None and start.ended > start.time


def test_a_truncated_image_ends_a_run_with_one_sentence(tmp_path):
    """Found by DALI in the first step, on one of the ranks; DALI's decoder has a line of its own, and mpirun some."""
    for number in range(8):
        folder = tmp_path / "data" / ("val" if number > 5 else "train") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((64, 64), 50.0).convert("RGB").save(folder / f"{number}.jpg")
    bad = tmp_path / "data" / "train" / "a" / "2.jpg"
    bad.write_bytes(bad.read_bytes()[: bad.stat().st_size // 2])  # its header, which the index reads, is whole
    options = ["--data", str(tmp_path / "data"), "--model.num_classes", "2", "--data.global_batch_size", "4"]
    options += ["--recipe", "quickstart", "--data.micro_batch_size", "2", "--run.folder", str(tmp_path / "run")]
    code, output = launch(["-m", "largebatch.train", *SMALL, *options], ranks=2)
    said = [line for line in output.splitlines() if "largebatch: rank" in line]
    assert code != 0 and "Traceback" not in output and "operator" not in output, output
    check = f"to train without the bad images, list them by `python -m largebatch.pack check {tmp_path}/data`."
    assert len(said) == 1 and f"{bad}, record 0 (at byte 0) cannot be decoded (" in said[0] and check in said[0], output


@pytest.mark.parametrize("passes", [1, 2])
def test_a_slow_rank_is_named_in_the_log_and_in_the_table(tmp_path, passes):
    batch = ["--data.global_batch_size", str(12 * passes), "--data.micro_batch_size", "4"]
    options = [*SMALL, *batch, "--run.duration", "30 steps", "--log.every", "5 steps", "--run.folder", str(tmp_path)]
    code, output = launch(["-m", "tests.mpi.programs", "is_slow_on_rank_1", *options], ranks=3)
    log = (tmp_path / "log.txt").read_text()
    told = re.findall(r"rank (\d) on (\S+) is \d+ % slower than the median rank: its (.+) takes (\d+) ms a step", log)
    assert code == 0 and [one[:3] for one in told] == [("1", os.uname().nodename, "forward and backward")], output
    assert int(told[0][3]) >= 150
    assert [row["slow_rank"] for row in rows(tmp_path, "steps.csv")] == ["", "", "", "", "", "1"]


def test_a_start_that_was_killed_has_no_end(watched, tmp_path):
    """Its last line may be cut off; the next one is whole."""
    first = json.loads((watched[0] / "starts.jsonl").read_text().splitlines()[0])
    (tmp_path / "starts.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(first)[:40])
    from largebatch.report import history

    history.write_start(tmp_path, read_starts(watched[0])[0])
    history.write_end(tmp_path, step=7, reason="SIGTERM came")
    killed, stopped = read_starts(tmp_path)
    assert killed.ended is None and (stopped.last_step, stopped.reason) == (7, "SIGTERM came")


def test_lines_without_a_terminal_have_the_time_and_ranks_their_number(tmp_path):
    """Warnings of other ranks are named; nothing is said twice."""
    code, output = launch([*TRAIN, "32", "--run.folder", str(tmp_path)], ranks=2)
    assert code == 0, output
    lines = [line for line in output.splitlines() if "step " in line]
    assert lines and all(TIMED.match(line) for line in lines), output
    assert output.count("global batch 64 = 2 ranks × 32 micro-batch × 1 pass") == 1 and "━" not in output
