"""Run a function on several gloo ranks, processes that stay for the next call; join parts.

A rank is forked, once, from a process that has imported torch. It begins every call as if it were new: with process
groups, seeds and settings of its own. After a failure all ranks end, and the next call forks others.
"""

import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.parallel.cuts import Cut
from largebatch.parallel.mesh import Mesh

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ("vit", "volo", "pipeline", "sequence", "sharded_lamb")
CONTEXT.set_forkserver_preload(["pytest", "torch._dynamo", *(f"largebatch.parallel.{name}" for name in PRELOADED)])
LIMIT_S = 180


class _Rank(NamedTuple):
    process: Any
    connection: Connection


_ranks: list[_Rank] = []  # a call takes the first ones
os.register_at_fork(after_in_child=_ranks.clear)  # they are the parent's


def on_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """What `function(*arguments)` of a test file returns on each of so many ranks; failures are raised.

    torch.distributed is started with gloo, and ended. What the function changes in place, such as a dict of a module,
    it must undo itself; see `_undone`.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    while len(_ranks) < size:
        _ranks.append(_start())
    try:
        job = [(rank, size, store.port, LIMIT_S, function, arguments) for rank in range(size)]
        found = _ask(_ranks[:size], _call, job)
        _ask(_ranks[:size], _clear, [()] * size)  # when nobody waits for another any more
    except BaseException:
        _end()
        raise
    return found


def _start() -> _Rank:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that a rank that dies closes the pipe
    return _Rank(process, ours)


def _end() -> None:
    for rank in _ranks:
        rank.process.kill()
    for rank in _ranks:
        rank.process.join()
        rank.connection.close()
    _ranks.clear()


def _ask(ranks: Sequence[_Rank], function: Callable[..., Any], arguments: Iterable[tuple]) -> list[Any]:
    for rank, own in zip(ranks, arguments):
        with suppress(BrokenPipeError):  # it died; the answer will say so
            rank.connection.send_bytes(pickle.dumps((function, own)))  # tensors by value
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        waiting = {rank.connection: number for number, rank in enumerate(ranks) if number not in answers}
        ready = wait(waiting, timeout=LIMIT_S)
        assert ready, f"ranks {sorted(waiting.values())} of {len(ranks)} were not done after {LIMIT_S} s"
        failures: dict[int, str] = {}
        while ready:
            for number in (waiting.pop(connection) for connection in ready):
                answers[number], failure = _answer(ranks[number])
                failures |= {number: f"rank {number} of {len(ranks)}:\n{failure}"} if failure else {}
            ready = wait(waiting, timeout=1.0) if failures and waiting else []  # others notice one that died
        assert not failures, "\n".join(failures[number] for number in sorted(failures))
    return [answers[number] for number in range(len(ranks))]


def _answer(rank: _Rank) -> tuple[Any, str]:
    """(value, failure)"""
    try:
        return pickle.loads(rank.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.process.join()
        return None, f"it ended with exit code {rank.process.exitcode}"


# -- in a rank ------------------------------------------------------------------------------------------------------


def _serve(connection: Connection) -> None:
    """Do what is asked until the asking process ends."""
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asking process gets it, too
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else each collection looks at all of torch
    while True:
        connection.send_bytes(_run(connection.recv_bytes()))


def _end_with(parent: Any) -> None:
    """However it ends, and also if this rank is busy or waits for others then."""
    parent.join()
    os._exit(1)


def _run(message: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(message)
        return pickle.dumps((function(*arguments), ""))
    except BaseException:
        return pickle.dumps((None, traceback.format_exc()))


def _call(rank: int, size: int, port: int, limit_s: float, function: Callable[..., Any], arguments: tuple) -> Any:
    limit = timedelta(seconds=limit_s)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    with _undone():
        return function(*arguments)


def _clear() -> None:
    """End all process groups, with their threads, and free memory."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.compiler.reset()
    gc.collect()


@contextmanager
def _undone() -> Iterator[None]:
    """Take back what is changed of the process: seeds, settings, attributes of modules and of their classes."""
    settings: tuple[tuple[Callable, Callable], ...] = (
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        (os.getcwd, os.chdir),
    )
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(mock.patch.dict(os.environ))
        for get, set_ in settings:
            stack.callback(set_, get())
        for owner in _owners():
            stack.callback(_restore, owner, dict(vars(owner)))
        yield


def _owners() -> Iterator[Any]:
    """What a test may patch: torch.distributed, our modules, those of tests, and their classes."""
    yield dist
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("largebatch", "zoo") or name.startswith("test_"):
            values = vars(module).values()
            yield from (module, *(value for value in values if isinstance(value, type) and value.__module__ == name))


def _restore(owner: Any, before: Mapping[str, Any]) -> None:
    now = dict(vars(owner))
    for name in before:
        if now.get(name) is not before[name]:
            setattr(owner, name, before[name])
    for name in now.keys() - before.keys():
        if not (name.startswith("__") or isinstance(now[name], ModuleType)):  # modules stay imported
            delattr(owner, name)


# -- parts ----------------------------------------------------------------------------------------------------------


def assemble(parts: Iterable[Tensor], places: Iterable[Mapping[str, int]], cut: Cut, whole: Tensor, mesh: Mesh) -> None:
    """Write the parts of the ranks at `places` into `whole`."""
    for part, place in zip(parts, places):
        view = cut.slice_(whole, mesh.shape.sizes, place)
        view.copy_(part.reshape(view.shape))
