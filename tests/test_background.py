"""Work in a thread: its result, its failure, and the end of a process whose work hangs."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from largebatch.process.background import in_background


def test_the_result_and_the_failure_reach_the_caller():
    assert in_background(lambda: 7, name="seven").result(60) == 7
    with pytest.raises(SystemExit):  # also what is no Exception
        in_background(sys.exit, name="ends").result(60)


def test_work_that_hangs_does_not_keep_the_process():
    program = "import threading\nfrom largebatch.process.background import in_background\n"
    program += "in_background(threading.Event().wait, name='hangs')\nprint('end')"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (output.returncode, output.stdout) == (0, "end\n"), output.stderr


def test_work_that_ends_soon_is_waited_for():
    """A thread in a library of C, such as one that draws, would crash the interpreter that ends."""
    program = "import sys, time\nfrom largebatch.process.background import in_background\n"
    program += "in_background(lambda: (time.sleep(0.3), print('drawn')), name='draws')\nsys.exit(2)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (output.returncode, output.stdout) == (2, "drawn\n"), output.stderr


def test_works_one_after_the_other_share_a_thread_and_those_at_once_do_not():
    """Libraries keep caches by thread, so a process with many threads in turn would grow."""
    one_by_one = {in_background(threading.get_ident, name="in turn").result(60) for _ in range(100)}
    together = threading.Barrier(3)
    at_once = [in_background(lambda: (together.wait(60), threading.get_ident())[1], name="in turn") for _ in range(3)]
    assert len(one_by_one) == 1 and len({work.result(60) for work in at_once}) == 3
    assert in_background(threading.get_ident, name="others").result(60) not in one_by_one


def test_a_thread_that_waits_keeps_nothing_of_its_last_work():
    """The work of a checkpoint holds a copy of the whole state."""

    class State:
        def write(self) -> None:
            raise OSError("full")

    state = State()
    gone = weakref.ref(state)
    with pytest.raises(OSError):
        in_background(state.write, name="writes").result(60)
    in_background(int, name="writes").result(60)
    del state
    gc.collect()
    assert gone() is None
