"""Run a function on several gloo ranks, each a process forked from one that has imported torch already; join parts."""

import multiprocessing
import pickle
import traceback
from datetime import timedelta
from queue import Empty
from typing import Any, Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.parallel.mesh import Mesh
from largebatch.parallel.sharding import Cut

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ("vit", "pipeline", "sequence", "lamb")
CONTEXT.set_forkserver_preload(["torch._dynamo", *(f"largebatch.parallel.{name}" for name in PRELOADED)])
LIMIT_S = 180


def on_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """What `function(*arguments)` of a test file returns on each of so many ranks; the first failure is raised.

    torch.distributed is started with gloo. A rank that fails ends the others.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=LIMIT_S))
    results = CONTEXT.Queue()
    ranks = [
        CONTEXT.Process(target=_run, args=(rank, size, store.port, results, function, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < size:
            rank, value, failure = results.get(timeout=LIMIT_S)
            assert failure is None, f"rank {rank} of {size}:\n{failure}"
            found[rank] = pickle.loads(value)
    except Empty:
        raise AssertionError(f"ranks {sorted(set(range(size)) - set(found))} were not done after {LIMIT_S} s") from None
    finally:
        for process in ranks:
            process.join(timeout=10) if len(found) == size else process.kill()
    return [found[rank] for rank in range(size)]


def _run(rank: int, size: int, port: int, results: Any, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=LIMIT_S))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
        value = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, pickle.dumps(value), None))  # tensors by value: their sender ends
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def assemble(parts: Iterable[Tensor], places: Iterable[Mapping[str, int]], cut: Cut, whole: Tensor, mesh: Mesh) -> None:
    """Write the parts of the ranks at `places` into `whole`."""
    for part, place in zip(parts, places):
        view = cut.slice_(whole, mesh.shape.sizes, place)
        view.copy_(part.reshape(view.shape))
