"""Work in a thread: its result, its failure, and the end of a process whose work hangs."""

import subprocess
import sys

import pytest

from largebatch.comm.background import in_background


def test_the_result_and_the_failure_reach_the_caller():
    assert in_background(lambda: 7, name="seven").result(60) == 7
    with pytest.raises(SystemExit):  # also what is no Exception
        in_background(sys.exit, name="ends").result(60)


def test_work_that_hangs_does_not_keep_the_process():
    program = "import threading\nfrom largebatch.comm.background import in_background\n"
    program += "in_background(threading.Event().wait, name='hangs')\nprint('end')"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (output.returncode, output.stdout) == (0, "end\n"), output.stderr


def test_work_that_ends_soon_is_waited_for():
    """A thread in a library of C, such as one that draws, would crash the interpreter that ends."""
    program = "import sys, time\nfrom largebatch.comm.background import in_background\n"
    program += "in_background(lambda: (time.sleep(0.3), print('drawn')), name='draws')\nsys.exit(2)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (output.returncode, output.stdout) == (2, "drawn\n"), output.stderr
