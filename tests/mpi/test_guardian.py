"""A test run that is killed by SIGKILL, in the middle of a launch, leaves nothing on the machine."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from launch import ROOT

SESSION = '''
import multiprocessing, os, subprocess, sys, tempfile, time
from multiprocessing.shared_memory import SharedMemory

def test_it():
    """Holds a segment, a semaphore and a folder of its own; so does each of the ranks that it starts."""
    multiprocessing.set_start_method("spawn")  # after a fork, a semaphore needs no name
    segment, semaphore, folder = SharedMemory(create=True, size=4096), multiprocessing.Semaphore(), tempfile.mkdtemp()
    ranks = ["mpirun", "-np", "2", sys.executable, "-m", "tests.mpi.programs", "holds_shared_memory"]
    held = f"/dev/shm/{segment.name} /dev/shm/sem.{semaphore._semlock.name[1:]} {folder}"
    print("held:", os.environ["LARGEBATCH_TESTS"], held, file=sys.__stderr__, flush=True)
    subprocess.run(ranks, stdout=sys.__stderr__, start_new_session=True)
'''
RANKS = 2
WAIT_S = 120


def named(folder: str) -> list[int]:
    """The processes whose environment names the folder of the session; its guardian is among them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"LARGEBATCH_TESTS={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.cluster
def test_a_run_that_is_killed_leaves_no_process_folder_segment_or_semaphore(tmp_path):
    (tmp_path / "test_killed.py").write_text(SESSION)
    ours = ("LARGEBATCH_TESTS", "TMPDIR", "OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    options = ["-s", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    session = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    printed = ""
    try:
        while printed.count("held:") < 1 + RANKS:
            assert (line := session.stderr.readline()), f"the run ended:\n{printed}"
            printed += line
        paths = [Path(path) for line in re.findall("held: (.*)", printed) for path in line.split()]
        folder = str(paths[0])
        assert all(path.exists() for path in paths), printed
        kinds = Counter(re.match("[a-z]+", path.name)[0] for path in set(paths))
        assert kinds["psm"] == kinds["sem"] == 1 + RANKS and kinds["vader"] + kinds["sm"] >= RANKS, printed
        assert len(named(folder)) >= 3 + RANKS, "pytest, the guardian, mpirun and the ranks"
    finally:
        session.kill()
        session.wait()
    limit = time.monotonic() + WAIT_S
    while left := [*named(folder), *(path for path in paths if path.exists())]:
        assert time.monotonic() < limit, f"still there: {left}\n{printed}"
        time.sleep(0.02)
    assert not Path("/dev/shm", Path(folder).name).exists()
