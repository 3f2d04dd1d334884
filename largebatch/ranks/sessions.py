"""The session of a program: its ranks start, draw the same random numbers, and end together."""

import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch

from largebatch.config.horovod import HorovodConfig
from largebatch.config.parallel import WHOLE, Shape
from largebatch.files import Damaged
from largebatch.files.names import on_screen
from largebatch.launch.cores import compiler_processes
from largebatch.launch.launcher import Launch, recognise
from largebatch.ranks.mistakes import WAIT_S, Mistake, report_mistakes
from largebatch.ranks.ranks import Ranks
from largebatch.ranks.single import Single
from largebatch.ranks.stopped import Stopped

if TYPE_CHECKING:
    from largebatch.config import TrainConfig

LIBRARIES = ("site-packages", "dist-packages")  # folders of programs that are not the user's own
UNSEEDED = 2**32  # torch begins with a seed of 53 random bits, a program gives a smaller one
OTHER_LAUNCHERS = ("PMIX_RANK", "PMI_FD", "PMI_PORT")  # variables of launchers that we do not know, but an MPI does
RanksKind = Literal["auto", "horovod", "torch"]
_state = ""  # of this process: "open" in its session, "ended" after it


def start(*, ranks: RanksKind = "auto", **options: Any) -> Ranks:
    """Start the ranks: see `kind_of_ranks`. RuntimeError for a second session in a process, unless it is the only rank.

    The ranks of a host share its cores, for torch's threads unless OMP_NUM_THREADS is set (torchrun sets 1 by itself,
    which does not count), and for torch's compiler unless TORCHINDUCTOR_COMPILE_THREADS is set.
    """
    global _state
    if _state == "open":
        raise RuntimeError("a session is open in this process: use its communicator for everything inside.")
    if _state == "ended":
        raise RuntimeError(
            "a session has ended in this process, and MPI cannot start again: put all work into one session(), or "
            "start another process."
        )
    comm = kind_of_ranks(recognise(os.environ), ranks)(**options)
    _state = "open"
    # torch of each rank would use all cores of the host, or, since torchrun sets the variable, one.
    if "OMP_NUM_THREADS" not in os.environ or comm.launcher == "torchrun" and os.environ["OMP_NUM_THREADS"] == "1":
        torch.set_num_threads(max(1, int(comm.num_cores)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compiler_processes(comm.num_cores)))
    return comm


def kind_of_ranks(launch: Launch, wanted: RanksKind) -> type[Ranks]:
    """Return the class of the ranks: a single one without a launcher, else what is wanted.

    auto: torch.distributed under torchrun, and under an srun that Horovod's MPI cannot ask for its ranks; else Horovod.
    ValueError if a launcher cannot start Horovod.
    """
    if launch.launcher == "python" and os.environ.keys().isdisjoint(OTHER_LAUNCHERS):
        return Single
    if launch.launcher == "python" and wanted == "torch":
        raise ValueError(
            "--run.ranks is torch, and the launcher of this process is not known, so each rank would train alone: use "
            "torchrun, mpirun or srun."
        )
    reason = "" if wanted == "torch" else _why_not_horovod(launch)
    if wanted == "torch" or wanted == "auto" and reason:
        from largebatch.ranks.torch_distributed import TorchRanks

        return TorchRanks
    if reason:
        raise ValueError(f"--run.ranks is horovod, and {reason}: leave it out, or use mpirun or horovodrun.")
    from largebatch.ranks.horovod import HorovodRanks

    return HorovodRanks


def _why_not_horovod(launch: Launch) -> str:
    if launch.launcher == "torchrun":
        return "torchrun does not start it"
    if launch.launcher != "srun":
        return ""
    if find_spec("horovod") is None:
        return "it is not installed"
    from largebatch.ranks.horovod import mpi_version, speaks

    return "" if speaks(os.environ, mpi_version()) else "its MPI cannot ask this srun for its rank"


@contextmanager
def session(
    config: "TrainConfig | None" = None,
    *,
    deterministic: bool = False,
    horovod: HorovodConfig | None = None,
    shape: Shape = WHOLE,
    ranks: RanksKind = "auto",
) -> Iterator[Ranks]:
    """Start the ranks of one program. Any failure ends all ranks with its cause and a non-zero exit code.

    The code is 2 for `Stopped` (raised by all ranks) and `Mistake` (a wrong call of the program), 75 for
    `StoppedEarly`, 130 for Ctrl-C, 1 for a failure of this rank alone. The program may end by sys.exit(); with a code
    other than 0 it ends all ranks. Random numbers begin alike on all ranks.
    config: that of `build_trainer`; it decides instead of the other options. ranks: see `kind_of_ranks`. A process has
    one session, unless it is the only rank. At Python's prompt and in a notebook such a process goes on after an error.
    """
    if config is not None:
        deterministic, horovod, shape = config.run.deterministic, config.horovod, config.parallel.shape()
        ranks = config.run.ranks
    try:
        with report_mistakes():
            comm = start(ranks=ranks, deterministic=deterministic, horovod=horovod or HorovodConfig(), shape=shape)
    except RuntimeError as error:
        sys.exit(f"largebatch: {error}")
    if isinstance(comm, Single) and hasattr(sys, "ps1"):
        try:
            share_random_numbers(comm)
            yield comm
        finally:
            _end(comm)
        return
    try:
        share_random_numbers(comm)
        yield comm
    except Stopped as error:
        if comm.rank == 0:
            sys.stderr.write(f"largebatch: {on_screen(str(error))}\n")
        _end(comm)
        sys.exit(error.exit_code)
    except Mistake as mistake:
        if comm.rank:  # the program is the same on all ranks, so rank 0 says it for all, unless it is right there
            time.sleep(WAIT_S)
        where = _line_of_program(mistake)
        sys.stderr.write(f"largebatch: rank {comm.rank} of {comm.size} on {socket.gethostname()}, {where}: {mistake}\n")
        comm.abort(2)
    except SystemExit as error:
        if error.code:
            said = error.code if isinstance(error.code, str) else f"exits with code {error.code}"
            sys.stderr.write(f"largebatch: rank {comm.rank} of {comm.size} on {socket.gethostname()}: {said}\n")
            comm.abort(error.code if isinstance(error.code, int) else 1)
        _end(comm)
        raise
    except KeyboardInterrupt:
        sys.stderr.write(f"largebatch: rank {comm.rank} of {comm.size} on {socket.gethostname()}: ended by Ctrl-C\n")
        comm.abort(128 + signal.SIGINT)
    except BaseException as error:
        if isinstance(error, comm.failures):
            _stop_for_another(comm, error)
        cause = str(error) if isinstance(error, Damaged) else traceback.format_exc()
        sys.stderr.write(f"largebatch: rank {comm.rank} of {comm.size} on {socket.gethostname()}: {cause}\n")
        comm.abort(1)
    _end(comm)


def _end(comm: Ranks) -> None:
    global _state
    try:
        comm.shutdown()
    except comm.failures as error:
        _stop_for_another(comm, error)
    _state = "" if isinstance(comm, Single) else "ended"


def _stop_for_another(comm: Ranks, error: BaseException) -> None:
    why = f" ({error})" if comm.kind == "torch.distributed" else ""  # it has one error for all that may have happened
    who = f"rank {comm.rank} of {comm.size} on {socket.gethostname()}"
    sys.stderr.write(f"largebatch: {who}: stopped, because another rank failed{why}\n")
    comm.abort(1)


def share_random_numbers(comm: Ranks) -> None:
    """Let torch, numpy and Python draw as on rank 0 from here on, so that all ranks shuffle alike. A collective.

    If the program has not seeded torch, its seed is 0, for any number of ranks.
    """
    if torch.initial_seed() >= UNSEEDED:
        torch.manual_seed(0)
    import numpy as np  # at the top it would come before torch, whose absence says more

    mine = torch.get_rng_state(), np.random.get_state(), random.getstate()
    of_torch, of_numpy, of_python = comm.broadcast_object(mine, name="random numbers")
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def _line_of_program(error: BaseException) -> str:
    """Return the innermost line of the user's own program in a traceback, as "FILE, line N"."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is that of `session`
    libraries = (os.path.dirname(os.path.dirname(__file__)), *(f"{os.sep}{name}{os.sep}" for name in LIBRARIES))
    own = [frame for frame in frames if not any(folder in frame.filename for folder in libraries)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else "in a step"
