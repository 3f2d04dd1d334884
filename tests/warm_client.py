# What tests call "python" in place of the interpreter: it asks the server of warm.py, beside it at ../socket, to run
# the program, and ends as the program ends. It is started with -I and -S, and imports little: 20 ms, not 6 s.
# Options of the interpreter, a PYTHONPATH that is not the repository's root, or no program at all: the real one.
import json
import os
import select
import signal
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET, socket

ROOT = ""  # warm.py writes the root of the repository here
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def is_for_the_real_one(argv, environment, root):
    paths = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(":") if path]
    plain = bool(argv) and (argv[0] in ("-c", "-m") or not argv[0].startswith("-"))
    return not plain or any(path != root for path in paths) or "PYTHONWARNINGS" in environment


def ask(path, argv, environment):
    mask = os.umask(0)
    os.umask(mask)
    request = {
        "argv": argv,
        "environment": environment,
        "folder": os.getcwd(),
        "umask": mask,
        "cores": sorted(os.sched_getaffinity(0)),
    }
    whole = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogateescape")
    server = socket(AF_UNIX)
    server.connect(path)
    three = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    server.sendmsg([len(whole).to_bytes(8, "little")], [(SOL_SOCKET, SCM_RIGHTS, three)])
    server.sendall(whole)
    return server


def number_from(server):
    found = b""
    while len(found) < 4:
        more = server.recv(4 - len(found))
        if not more:
            sys.exit("warm python: the server ended")
        found += more
    return int.from_bytes(found, "little")


def main():
    argv, environment = sys.argv[1:], dict(os.environ)
    if is_for_the_real_one(argv, environment, ROOT):
        os.execv(sys.executable, [sys.executable, *argv])
    heard, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(told)  # a signal that comes just before this process waits would be missed otherwise
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: None)
    server = ask(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "socket"), argv, environment)
    child = number_from(server)
    waiting = select.poll()
    waiting.register(server.fileno(), select.POLLIN)
    waiting.register(heard, select.POLLIN)
    while dict(waiting.poll()).keys() == {heard}:
        for number in os.read(heard, 64):
            try:
                os.kill(child, number)
            except ProcessLookupError:  # it has just ended, and its status is on the way
                pass
    status = number_from(server)
    if os.WIFSIGNALED(status):
        deadly = os.WTERMSIG(status)
        if deadly != signal.SIGKILL:
            signal.signal(deadly, signal.SIG_DFL)
        os.kill(os.getpid(), deadly)
    os._exit(os.WEXITSTATUS(status))


main()
