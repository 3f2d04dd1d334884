"""The ranks of a run: how they start, where they compute, what they exchange. Only this folder imports Horovod.

    background.py     work in a thread that keeps no process alive
    communicator.py   start, rank and size, collectives, failures and the end of all ranks together
    reduction.py      the reduction of gradients: Horovod's optimizer made safe
    replicas.py       the copies of a model: begun alike, kept alike, compared
    buckets.py        which gradients are handed over to Horovod together
    sending.py        gradients on their way to the other ranks, measured before if that is wanted
    fp16.py           gradients that are sent in fp16
    hvd.py            Horovod's module, imported when it is first used
    polling.py        waiting for collectives without occupying a core
    watchdog.py       the limits on waiting for other ranks, and on work without progress
    shared_memory.py  the shared memory that killed jobs left behind
    stop_points.py    the point of a step or an evaluation at which all ranks leave
    signals.py        the signals that tell a run to end
    parents.py        the launcher of this process, and whether it is gone; ends stopped ranks without it
    terminal.py       the terminal at which a person watches, also behind a launcher
    stopped.py        the exceptions that all ranks raise together
    launcher.py       the launcher that started this process; the one table of launchers' variables
    mistakes.py       a mistake of a program or on its command line, or an answer, said once for all ranks
    gloo_start.py     the start of ranks that MPI cannot bring together
    gloo_address.py   the addresses at which such ranks reach each other
    gloo_server.py    the servers where they meet; each listens at one address
    home.py           a home folder for MPI, if the user id has no name
    preflight.py      the checks that all ranks run the same program
    placement.py      the hosts, cores and GPUs of the ranks
    driver.py         NVIDIA's driver on this host
    bind.py           a program: bind a rank to the cores near its GPU, then become the command
    cores.py          the cores and the time that the system allows to a process

The names below are loaded when first used, so files that need only the standard library (the launcher, the cores) can
be imported without Horovod and torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from largebatch.comm.communicator import Communicator, session
    from largebatch.comm.stopped import Stopped, StoppedEarly

EXPORTS = {
    "Communicator": "largebatch.comm.communicator",
    "Stopped": "largebatch.comm.stopped",
    "StoppedEarly": "largebatch.comm.stopped",
    "session": "largebatch.comm.communicator",
}

__all__ = ["Communicator", "Stopped", "StoppedEarly", "session"]


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)
