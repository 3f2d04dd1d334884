"""Warm Python: programs under real launchers without the seconds that an import of torch, Horovod and DALI takes.

    launcher (real)  ->  client, named "python"  ->  server, imported everything, never started MPI  ->  fork

The client (warm_client.py) hands over argv, environment, working folder, umask, cores and the three standard
descriptors through a Unix socket. The server forks; the child takes the client's namespaces (a host of tests/cluster),
its environment and descriptors, and runs the program as `python` would, with the functions that Python calls at its
end. Signals go from the client to the child, the exit code or the deadly signal comes back, and whoever dies takes the
other along.

What a warm rank cannot show, and cold ones are there for: what happens at import and when libraries are unloaded, the
hash seed (all children of a server share it), /proc/PID/cmdline, how MPI waits (nap.cpp), and libraries that read the
environment when they are loaded. libgomp is one (the child sets torch's threads from OMP_NUM_THREADS instead),
Horovod's settings of autotune are another.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CLIENT = Path(__file__).with_name("warm_client.py")
NAP = Path(__file__).with_name("nap.cpp")
NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")  # mnt last: /proc of the server's is needed until then
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
LAUNCHERS = ("horovodrun", "torchrun")  # written in Python: to import what they need takes a core a second or two
# The threads of OpenBLAS, and of the allocator of pyarrow, which pandas imports, would be there when the server forks.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
IMPORTED = (  # zoo comes before timm, which it makes importable
    "zoo cloudpickle horovod.torch matplotlib.pyplot mpi4py nvidia.dali.fn "
    "nvidia.dali.plugin.pytorch psutil pytest rich.progress scipy.ndimage sklearn.datasets timm torch "
    "torch._dynamo torch.distributed torch.utils.tensorboard largebatch.benchmark.step largebatch.assembly "
    "largebatch.data.sources largebatch.parallel.replica largebatch.recipes "
    "largebatch.ranks.torch_distributed largebatch.train largebatch.validate"
).split()


# -- for tests -------------------------------------------------------------------------------------------------------


@functools.cache
def folder() -> Path:
    """Looks like a virtual environment: its bin/python is the client of a server that ends with this process."""
    place = Path(tempfile.mkdtemp(prefix="warm-"))
    (place / "bin").mkdir()
    python = place / "bin" / "python"
    python.write_text(f"#!{sys.executable} -IS\n" + CLIENT.read_text().replace('ROOT = ""', f"ROOT = {str(ROOT)!r}"))
    python.chmod(0o755)
    real = Path(sys.prefix) / "bin"
    for name in LAUNCHERS:  # these scripts themselves, run by the client
        script = place / "bin" / name
        script.write_text(f"#!{python}\n" + (real / name).read_text().partition("\n")[2])
        script.chmod(0o755)
    (place / "bin" / "activate").write_text(f'. "{real}/activate"\nPATH="{place}/bin:$PATH"\n')
    with open(place / "server.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, __file__, str(place / "socket")],
            cwd=ROOT,
            env=os.environ | ONE_THREAD | _napping(place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    atexit.register(server.kill)
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the warm Python did not start:\n{(place / 'server.log').read_text()}")
    return place


def _napping(place: Path) -> dict[str, str]:
    """The environment in which a program sleeps while MPI waits; without a C++ compiler nothing."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if not shutil.which(compiler[0]):
        return {}
    library = place / "nap.so"
    subprocess.run([*compiler, "-O2", "-shared", "-fPIC", "-o", library, NAP], check=True)
    return {"LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()}


def python() -> str:
    """The path of the warm Python; the first call starts its server, which takes the time of one cold start."""
    return str(folder() / "bin" / "python")


# -- the server ------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """What the client asks for: a program, as the arguments of `python`, and its surroundings."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    cores: list[int]


class Started(NamedTuple):
    """A child and the client that waits for it."""

    pid: int
    client: socket.socket


def serve(path: str) -> tuple[Request, list[int]]:
    """Fork for each request; returns in the children alone, with the request and its descriptors 0, 1 and 2."""
    _die_with_parent()
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    _draw()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # it is this process that tidies up what its packages have opened
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would copy one of them"
    gc.freeze()  # so that a child's collections copy no page of what the server has imported
    gc.enable()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                request, descriptors = _receive(client)
                if request is None:
                    continue
                pid, peer = os.fork(), _peer(client)
                if pid == 0:
                    _close(selector)
                    _become(client, peer, request)
                    return request, descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
                started = Started(pid, client)
                selector.register(client, selectors.EVENT_READ, started)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, started)
            else:
                _attend(selector, key)


def _draw() -> None:
    """Draw a first picture, for which matplotlib reads fonts; no formulas, since it never closes the fonts of these."""
    figure = importlib.import_module("matplotlib.figure").Figure()
    axes = figure.subplots()
    axes.plot([1, 10], [1, 10], label="a line")
    axes.set_title("a title")
    axes.legend()
    figure.savefig(io.BytesIO(), format="png")
    importlib.import_module("matplotlib.font_manager")._get_font.cache_clear()  # the fonts' files were open


def _close(selector: selectors.BaseSelector) -> None:
    """In a child: what belongs to the server, and to other programs."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fd)
    selector.close()


def _receive(client: socket.socket) -> tuple[Any, list[int]]:
    """The request of a new client, and its three descriptors; None if it has gone already."""
    client.settimeout(10)
    head, descriptors, _, _ = socket.recv_fds(client, 8, 3)
    whole, size = b"", int.from_bytes(head, "little")
    while head and len(whole) < size and (more := client.recv(size - len(whole))):
        whole += more
    client.settimeout(None)
    if not head or len(whole) < size:
        for descriptor in descriptors:
            os.close(descriptor)
        client.close()
        return None, []
    return Request(**json.loads(whole.decode("utf-8", "surrogateescape"))), list(descriptors)


def _peer(client: socket.socket) -> int:
    """The client's process, as this process numbers it."""
    return int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little")


def _attend(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """A client is gone: kill its child, whose end then comes. Or a child has ended: tell its client."""
    started: Started = key.data
    if key.fileobj is started.client:
        if started.client.fileno() < 0:  # its child, whose end came with the same look at both, has been attended to
            return
        selector.unregister(started.client)
        _kill(started.pid)
        return
    descriptor = key.fd
    selector.unregister(descriptor)
    os.close(descriptor)
    _, status = os.waitpid(started.pid, 0)
    _kill(started.pid)  # what it has left in its process group
    try:
        selector.unregister(started.client)
        started.client.sendall(status.to_bytes(4, "little"))
    except (KeyError, OSError):  # the client is gone
        pass
    started.client.close()


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# -- the child -------------------------------------------------------------------------------------------------------


def _become(client: socket.socket, peer: int, request: Request) -> None:
    """Move a new child to where its client is, and tell the client its number there."""
    os.setpgid(0, 0)  # no session of its own: those share the cores among them, and a rank that yields would not
    _die_with_parent()
    if _enter_namespaces(peer):  # a child of this one is the first in the other namespace of processes
        pid = os.fork()
        if pid:
            client.close()
            _stand_for(pid)
        _die_with_parent()
    client.sendall(os.getpid().to_bytes(4, "little"))
    client.close()
    os.sched_setaffinity(0, request.cores)
    os.umask(request.umask)


def _enter_namespaces(peer: int) -> bool:
    """Take the namespaces of a process; whether that of the processes is another."""
    other = []
    for name in NAMESPACES:
        if os.readlink(f"/proc/{peer}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            other.append((name, os.open(f"/proc/{peer}/ns/{name}", os.O_RDONLY)))
    for name, descriptor in other:
        if LIBC.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(descriptor)
    return "pid" in dict(other)


def _stand_for(pid: int) -> None:
    """End as a child ends."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _take(request: Request, descriptors: list[int]) -> None:
    """Environment, folder and descriptors as the client's; the state of this process as that of a new one."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # a package may have asked for it
    importlib.reload(importlib.import_module("_largebatch_environment"))  # what site does in this environment
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = sys.__stdout__ = _text(1, "strict", line_buffering=os.isatty(1), write_through=unbuffered)
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace", line_buffering=True, write_through=unbuffered)
    import random

    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(request.cores)))


def _text(descriptor: int, errors: str, **buffering: bool) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, **buffering)


def _run(argv: list[str], search: list[str]) -> None:
    """What `python argv...` does, in a fresh __main__."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    kind, sys.argv = argv[0], argv[1:]
    first = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.realpath(kind)))
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*([] if os.environ.get("PYTHONSAFEPATH") else [first]), *paths, *search]
    if kind == "-c":
        program, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(program, "<string>", "exec"), vars(main))
    elif kind == "-m":
        name, sys.argv[0] = sys.argv[0], "-m"
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # runpy warns of a module that is there already
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` itself calls
    else:
        sys.argv = argv
        vars(main)["__file__"] = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), vars(main))


def _end(code: int) -> None:
    """End as the interpreter does, but take no module and no library apart: that takes a fifth of a second of a core.

    Threads and functions for the end come first. Then mpi4py ends MPI, as it would at the end of the interpreter.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream and not stream.closed:
                stream.flush()
        except OSError:
            code = 120  # as the interpreter's
    LIBC.fflush(None)  # what was printed by C
    os._exit(code)


def _main(argv: list[str], search: list[str]) -> int:
    """Run the program; its exit code."""
    try:
        _run(argv, search)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    SEARCH = [path for path in sys.path if path != os.path.dirname(__file__)]
    sys.path[:] = [str(ROOT), *SEARCH]
    wanted, standard = serve(sys.argv[1])
    _take(wanted, standard)
    _end(_main(wanted.argv, SEARCH))
