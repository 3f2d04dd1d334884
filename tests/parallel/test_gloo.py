"""The ranks of these tests: they stay, begin each call as if new, and end with a failure or with the process."""

import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import gloo
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from gloo import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from largebatch.parallel import collectives
from largebatch.parallel.mesh import Mesh

FOLDER = Path(__file__).parent


def _place():
    return os.getpid(), dist.get_rank(), dist.get_world_size()


def test_ranks_stay_and_any_number_of_them_can_be_asked():
    first = on_ranks(_place, 3)
    assert [place[1:] for place in first] == [(rank, 3) for rank in range(3)]
    assert on_ranks(_place, 3) == first
    fewer, more = on_ranks(_place, 2), on_ranks(_place, 4)
    assert [pid for pid, *_ in fewer] == [pid for pid, *_ in first[:2]] == [pid for pid, *_ in more[:2]]
    assert {place[1:] for place in more} == {(rank, 4) for rank in range(4)}


# -- failures -------------------------------------------------------------------------------------------------------


def _fails(how):
    if dist.get_rank() == 1:
        {"raise": _raise, "exit": lambda: os._exit(3), "hang": signal.pause}[how]()
    dist.barrier()  # where the other one waits


def _raise():
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    "how, sentence",
    [
        ("raise", r"(?s)rank 1 of 2:\nTraceback .* in _raise\n.*ValueError: no such thing"),
        ("exit", "rank 1 of 2:\nit ended with exit code 3"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_next_call_has_other_ones(how, sentence):
    before = on_ranks(_place, 2)
    with pytest.raises(AssertionError, match=sentence):
        on_ranks(_fails, 2, how)
    after = on_ranks(_place, 2)
    assert [place[1:] for place in after] == [(0, 2), (1, 2)]
    assert not {pid for pid, *_ in before} & {pid for pid, *_ in after}


def _hangs():
    if dist.get_rank() == 1:
        signal.pause()


def test_a_rank_that_is_not_done_in_time_is_named_and_ended(monkeypatch):
    before = on_ranks(_place, 2)
    with monkeypatch.context() as patch:
        patch.setattr(gloo, "LIMIT_S", 1)
        with pytest.raises(AssertionError, match=r"ranks \[1\] of 2 were not done after 1 s"):
            on_ranks(_hangs, 2)
    assert not any(psutil.pid_exists(pid) for pid, *_ in before)
    assert len(on_ranks(_place, 2)) == 2


def test_what_cannot_be_sent_back_is_a_failure():
    with pytest.raises(AssertionError, match="(?s)rank 0 of 1:.*pickle"):
        on_ranks(_unpicklable, 1)


def _unpicklable():
    return lambda: None


# -- nothing is left ------------------------------------------------------------------------------------------------


def _state():
    """What a test could leave to the next one."""
    parameter = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("once", UserWarning)
    return {
        "numbers": (random.random(), np.random.rand(), torch.rand(1).item()),
        "dtype": torch.ones(1).dtype,
        "threads": torch.get_num_threads(),
        "gradient": (2 * parameter).requires_grad,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "warnings": len(caught),
        "groups": list(dist.distributed_c10d._world.pg_names.values()),
        "patched": (collectives.BUCKET_BYTES, hasattr(collectives, "_added")),
        "patched deeper": (Mesh.close.__name__, dist.all_reduce.__name__),
    }


def _leave():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.environ["LARGEBATCH_LEFT"] = "1"
    os.environ.pop("PATH")
    os.chdir("/")
    warnings.simplefilter("ignore")
    dist.new_subgroups_by_enumeration([[0], [1]])
    init_device_mesh("cpu", (2,))
    dist.isend(torch.ones(3), 1 - dist.get_rank())  # that nobody receives
    collectives.BUCKET_BYTES, collectives._added, Mesh.close, dist.all_reduce = 1, 1, _state, _state


def test_a_call_finds_nothing_of_the_one_before():
    before = on_ranks(_state, 2), on_ranks(_place, 2)
    on_ranks(_leave, 2)
    assert (on_ranks(_state, 2), on_ranks(_place, 2)) == before


def _leave_memory():
    ring = [torch.ones(2**26)]
    ring.append(ring)  # that only the garbage collector frees


def test_between_calls_ranks_hold_neither_memory_nor_threads():
    """But for the thread that awaits the end of this process."""
    ranks = [psutil.Process(pid) for pid, *_ in on_ranks(_place, 2)]
    before = [rank.memory_info().rss for rank in ranks]
    on_ranks(_leave_memory, 2)
    for rank, used in zip(ranks, before):
        assert rank.memory_info().rss < used + 2**26 and rank.num_threads() == 2


# -- the end --------------------------------------------------------------------------------------------------------

PROGRAM = """
from gloo import on_ranks
from test_gloo import _place, _tell_and_hang
print(*(pid for pid, *_ in on_ranks(_place, 3)), flush=True)
on_ranks(_tell_and_hang, 1)
"""


def _tell_and_hang():
    print("busy", flush=True)
    signal.pause()


def test_no_rank_outlives_a_process_that_is_killed():
    """One is busy then, two are idle."""
    environment = os.environ | {"PYTHONPATH": f"{FOLDER}:{FOLDER.parents[1]}"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)
    ranks = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    server = ranks[0].parent()
    assert process.stdout.readline() == "busy\n"
    process.kill()
    process.communicate()
    assert len(ranks) == 3 and not psutil.wait_procs([*ranks, server], timeout=gloo.LIMIT_S)[1]
