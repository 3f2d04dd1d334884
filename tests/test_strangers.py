"""A stranger at every listening port of ranks over torch.distributed: they start, sum, and end all the same.

SECURITY.md says what a stranger can do who knows more: eight bytes with the number of a rank take that rank's place.
"""

import os
import random
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.cluster
RANK = """
import datetime, os, pathlib, socket, sys, time
import torch
import torch.distributed as dist
rank, limit, folder = int(os.environ["RANK"]), datetime.timedelta(seconds=120), pathlib.Path(sys.argv[1])
given = {}
if len(sys.argv) > 2:  # a store of ours, at 127.0.0.1 alone
    port = int(sys.argv[2])
    listener = socket.create_server(("127.0.0.1", port)).detach() if rank == 0 else None
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, limit, wait_for_workers=False, master_listen_fd=listener)
    given = {"store": store, "rank": rank, "world_size": 2}

def late(event):  # rank 0 goes on, and waits with an open port until the stranger has come, and rank 1 after it
    while rank == 1 and not (folder / event).exists():
        time.sleep(0.05)

def sums(group=None):
    for _ in range(200):
        ones = torch.full((10_000,), rank + 1.0)
        dist.all_reduce(ones, group=group)
        assert (ones == 3).all()

late("start")
dist.init_process_group("gloo", timeout=limit, **given)
sums()
late("group")
sums(dist.new_group([0, 1], timeout=limit))
dist.barrier()
dist.destroy_process_group()
print("done", rank, flush=True)
"""


def listening(pid: int) -> set[int]:
    """Return the ports at which a process and its descendants listen."""
    ports = set()
    with suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                ports |= {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return ports


def come(port: int, first: bytes, then: bytes, gone: threading.Event) -> None:
    """Connect to a port, send bytes, and others every 1.5 s, until the other side closes or the test ends."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(first)
        while not gone.wait(1.5):
            stranger.sendall(then)


@pytest.mark.parametrize("store", ["ours", "torchrun's"])
def test_idle_connections_single_bytes_and_garbage_do_no_harm(tmp_path, store):
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    commands = [["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, tmp_path]]
    if store == "ours":
        with socket.create_server(("127.0.0.1", 0)) as free:
            commands = [[program, tmp_path, str(free.getsockname()[1])]] * 2
    gone, garbage = threading.Event(), random.Random(1).randbytes(1024)
    with ExitStack() as stack, open(tmp_path / "out.txt", "w") as out:
        jobs = []
        for rank, command in enumerate(commands):
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": "2"}
            where = {"env": environment, "stdout": out, "stderr": out}
            jobs.append(stack.enter_context(subprocess.Popen([sys.executable, *command], **where)))
            stack.callback(jobs[-1].kill)
        stack.callback(gone.set)
        seen: set[int] = set()
        # the ports of the store (torchrun has two) and of Gloo: of rank 0; then of rank 1, and of rank 0's second group
        for event, expected in ("start", 2 if store == "ours" else 3), ("group", 4 if store == "ours" else 5):
            while len(seen) < expected:
                assert all(job.poll() is None for job in jobs), (tmp_path / "out.txt").read_text()
                for port in set().union(*(listening(job.pid) for job in jobs)) - seen:
                    seen.add(port)
                    for bytes_sent in ((b"", b""), (b"a", b"a"), (garbage, b"")):
                        threading.Thread(target=come, args=(port, *bytes_sent, gone), daemon=True).start()
            (tmp_path / event).touch()
        codes = [job.wait(120) for job in jobs]
    text = Path(tmp_path / "out.txt").read_text()
    assert not any(codes) and "done 0" in text and "done 1" in text, text
