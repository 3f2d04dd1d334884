"""The warm Python behaves as `python`: arguments, environment, descriptors, signals, its end, no leftovers."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).parents[1]


def start(*arguments: str, python: str = "", **options) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [python or warm.python(), *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options
    )


def both(*arguments: str, told: str = "", **options) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of the warm Python and of this one."""
    ends = []
    for python in (warm.python(), sys.executable):
        process = start(*arguments, python=python, **options)
        output, errors = process.communicate(told, timeout=60)
        ends.append((process.returncode, output, errors))
    return ends


SURROUNDINGS = """
import os, sys, threading
print(sys.argv, sys.path[0], __name__, os.getcwd(), os.umask(0), sys.stdin.read(), sorted(os.sched_getaffinity(0)))
print(sorted((name, value) for name, value in os.environ.items() if not name.startswith("OPAL")))
print(sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.encoding, threading.active_count())
print(sorted(os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")), os.getpgrp() == os.getpid())
print("and errors", file=sys.stderr)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_program_finds_the_same_surroundings(tmp_path, unbuffered):
    """A working folder, an environment and a mask of its own; descriptors 0, 1 and 2, and no other one."""
    environment = {"PATH": os.environ["PATH"], "ONLY": "this", "ODD": "\udcff", "PYTHONUNBUFFERED": unbuffered}
    options = {"cwd": tmp_path, "env": environment, "umask": 0o27, "start_new_session": True}
    ours, theirs = both("-c", SURROUNDINGS, "an argument", "", "é", told="told", **options)
    assert ours == theirs and ours[0] == 0 and "told" in ours[1] and "and errors" in ours[2]


def test_a_file_and_a_module(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "file.py").write_text("import sys, beside; print(beside.NAME, sys.argv, __file__, __name__, __spec__)")
    ours, theirs = both(str(tmp_path / "file.py"), "x", cwd="/")
    assert ours == theirs and ours[0] == 0, ours
    (tmp_path / "module.py").write_text("import sys, beside; print(beside.NAME, sys.argv, __name__, __spec__.name)")
    ours, theirs = both("-m", "module", "x", cwd=tmp_path)
    assert ours == theirs and ours[0] == 0, ours


@pytest.mark.parametrize(
    "end, code",
    [
        ("pass", 0),
        ("import sys; sys.exit(75)", 75),
        ("import sys; sys.exit('a sentence')", 1),
        ("import sys; sys.exit()", 0),
        ("import os; os._exit(9)", 9),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("import os; os.abort()", -6),
        ("raise KeyboardInterrupt", -2),
        ("import atexit; atexit.register(print, 'at the end', flush=True)", 0),
        ("import threading, time; threading.Timer(0.1, print, ['a thread']).start()", 0),
        ("print('not flushed yet', end='')", 0),
    ],
)
def test_every_end(end, code):
    ours, theirs = both("-c", end)
    assert ours[:2] == theirs[:2] and ours[0] == code
    assert ours[2].splitlines()[-1:] == theirs[2].splitlines()[-1:]


def test_an_exception_is_printed():
    ours, theirs = both("-c", "raise ValueError('planted')")
    assert ours[:2] == theirs[:2] == (1, "") and ours[2].endswith("ValueError: planted\n")


def test_options_of_the_interpreter_and_other_sources_are_for_the_real_one(tmp_path):
    (tmp_path / "largebatch.py").write_text("")
    where = "import sys, largebatch; print(largebatch.__file__, sys.flags.optimize, 'torch' in sys.modules)"
    ours, theirs = both("-O", "-c", where, cwd=ROOT)
    assert ours == theirs and ours[1].endswith("1 False\n")
    ours, theirs = both("-c", where, env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd="/")
    assert ours == theirs and ours[1].startswith(str(tmp_path))


def test_it_has_imported_what_takes_long():
    process = start("-c", "import sys; print('horovod.torch' in sys.modules, 'largebatch.assembly' in sys.modules)")
    assert process.communicate(timeout=60)[0] == "True True\n"


WAITING = """
import os, signal, sys, time
if sys.argv[1:]:
    signal.signal(signal.SIGUSR1, lambda *_: (os.write(1, b"heard\\n"), sys.exit(75)))
print(os.getpid(), flush=True)
while True:  # Python would hear of a signal that comes just before a long sleep only after it
    time.sleep(0.05)
"""


def waiting(*arguments: str) -> tuple[subprocess.Popen, int]:
    """A program that waits, and the number of its process; that of the client is another."""
    process = start("-c", WAITING, *arguments)
    return process, int(process.stdout.readline())


def gone(pid: int) -> bool:
    """Whether a process has ended; its server may not have fetched it yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def wait_until_gone(pid: int) -> None:
    limit = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < limit, f"process {pid} is still there"
        time.sleep(0.01)


def test_a_signal_reaches_the_program():
    process, pid = waiting("handler")
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=60)[0] == "heard\n" and process.returncode == 75
    process, pid = waiting()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM and gone(pid)


def test_a_killed_client_takes_its_program_along():
    process, pid = waiting()
    process.kill()
    wait_until_gone(pid)


def test_a_killed_program_ends_its_client():
    process, pid = waiting()
    os.kill(pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


def test_a_client_and_its_program_that_end_at_once_do_not_end_the_server():
    """The server sees both with one look, and attends to the program first."""
    ours, theirs = socket.socketpair()
    program = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    started = warm.Started(program.pid, ours)
    selector = selectors.DefaultSelector()
    client = selector.register(ours, selectors.EVENT_READ, started)
    ended = selector.register(os.pidfd_open(program.pid), selectors.EVENT_READ, started)
    theirs.close()
    limit = time.monotonic() + 20
    while len(selector.select(0.1)) < 2:
        assert time.monotonic() < limit
    warm._attend(selector, ended)
    warm._attend(selector, client)
    assert not selector.get_map()
    program.returncode = 0  # warm has fetched it
    selector.close()


def test_a_program_has_no_descriptors_of_another():
    one = start("-c", WAITING)
    one.stdout.readline()
    count = "import os; print(len(os.listdir('/proc/self/fd')))"
    ours, theirs = both("-c", count)
    one.kill()
    assert ours == theirs and one.wait(60) == -signal.SIGKILL


KILLED_SESSION = """
import os, subprocess, sys, time
import warm
def test_it():
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    environment = os.environ | {"PYTHONPATH": ""}
    process = subprocess.Popen([warm.python(), "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    asleep = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    child = int(process.stdout.readline())
    print(os.environ["LARGEBATCH_TESTS"], process.pid, child, asleep.pid, file=sys.__stderr__, flush=True)
    time.sleep(1000)
"""


def test_a_killed_session_leaves_nothing(tmp_path):
    """No process, no socket, no folder."""
    (tmp_path / "test_killed.py").write_text(KILLED_SESSION)
    environment = {name: value for name, value in os.environ.items() if name not in ("LARGEBATCH_TESTS", "TMPDIR")}
    command = ["-m", "pytest", "-s", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]
    environment["PYTHONPATH"] = str(ROOT / "tests")
    session = start(*command, python=sys.executable, env=environment, cwd=ROOT)
    try:
        while "lb-" not in (line := session.stderr.readline()):
            assert line, session.communicate()
        folder, *pids = line.split()
        assert Path(folder).is_dir()
    finally:
        session.kill()
        session.wait()
    for pid in pids:
        wait_until_gone(int(pid))
    limit = time.monotonic() + 20
    while Path(folder).exists():
        assert time.monotonic() < limit, os.listdir(folder)
        time.sleep(0.01)


def test_a_signal_for_a_program_that_has_just_ended(tmp_path):
    """Its number may be no process any more, although its end has not been told yet: this is no failure."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(Path(warm.python()).read_text())
    python.chmod(0o755)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        client = start("-c", "", python=str(python))
        connection, _ = server.accept()
        with connection:  # which holds the client's descriptors until it is closed
            connection.sendall(ended.pid.to_bytes(4, "little"))
            waits = sleeps(client)
            client.send_signal(signal.SIGTERM)
            while client.poll() is None and sleeps(client) <= waits:
                time.sleep(0.01)
            connection.sendall((3 << 8).to_bytes(4, "little"))
        output, errors = client.communicate(timeout=60)
    assert (client.returncode, output, errors) == (3, "", "")


def sleeps(process: subprocess.Popen) -> int:
    """How often the process has gone to sleep, to wait."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
