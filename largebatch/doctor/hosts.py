"""Checks of several hosts before MPI is used: can each be reached, and do they agree on everything training needs?

The doctor asks all hosts at the same time, each over an ssh with a time limit. The script there needs only Python's
standard library. It announces each step, so that the cause can name the step that hangs.
"""

import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import mode
from typing import IO

from largebatch.doctor.result import INSTALL, Result, start
from largebatch.process.installer import install_command

MAX_SKEW_S = 1.0  # tolerated difference in the log lines of two hosts and in a checkpoint's age
NO_FOLDER, NO_INTERPRETER = 91, 92  # exit codes of the remote script
SSH_FAILED = 255
LIMIT_S = 30  # for all questions to one host
CLOCK_QUESTIONS = 8

# Interfaces of networks within a machine: others cannot reach them, or have their own at the same addresses.
WITHIN_A_MACHINE = re.compile(r"(lo|docker|br-|virbr|veth|cni|flannel|cali|podman|lxc|lxd|tun|tap|tailscale|zt)")

PROBE = r"""
import fcntl, importlib.metadata, importlib.util, json, os, pathlib, socket, struct, sys, time, zlib
print("ready", flush=True)
for line in sys.stdin:
    print(repr(time.time()), flush=True)
wanted, facts = json.loads(bytes.fromhex(sys.argv[1])), {}
def at(what): print("at " + what, flush=True)

at("its own name")
facts["hostname"] = socket.gethostname()
try:
    facts["address"] = socket.gethostbyname(socket.gethostname())
except OSError:
    facts["address"] = ""

at("its network interfaces")
def ask(interface, question):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, question, struct.pack("256s", interface.encode()[:15]))
def number(path):
    try:
        return int(pathlib.Path(path).read_text())
    except (OSError, ValueError):
        return 0
facts["interfaces"] = []
for _, interface in socket.if_nameindex():
    try:
        address, mask = (socket.inet_ntoa(ask(interface, question)[20:24]) for question in (0x8915, 0x891B))
        is_up = struct.unpack("H", ask(interface, 0x8913)[16:18])[0] & 1
    except OSError:
        continue
    if is_up:
        speed = number(f"/sys/class/net/{interface}/speed")
        facts["interfaces"].append([interface, f"{address}/{mask}", speed])

at("its packages")
facts["packages"] = {"Python": sys.version.split()[0]}
for name in wanted["packages"]:
    try:
        facts["packages"][name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        facts["packages"][name] = None

at("our sources")
facts["sources"] = {}
for package in ("largebatch", "zoo"):
    spec = importlib.util.find_spec(package)
    if spec and spec.origin:
        home = pathlib.Path(spec.origin).parent
        for path in sorted([*home.rglob("*.py"), *home.rglob("*.cpp")]):
            facts["sources"][f"{package}/{path.relative_to(home)}"] = zlib.crc32(path.read_bytes())

at("the launcher")
facts["launcher"] = os.access(wanted["launcher"], os.X_OK) if wanted["launcher"] else True

if wanted["data"]:
    at("the folder " + wanted["data"])
    try:
        names, sizes, times = sorted(os.listdir(wanted["data"])), [], []
        for name in names[:1000]:
            status = os.stat(os.path.join(wanted["data"], name))
            sizes.append(status.st_size if os.path.isfile(os.path.join(wanted["data"], name)) else -1)
            times.append(status.st_mtime_ns)
        crc = lambda value: zlib.crc32(json.dumps(value).encode())
        facts["data"] = {"count": len(names), "listing": crc([names, sizes]), "times": crc(times)}
    except OSError as error:
        facts["data"] = {"error": error.strerror}
print("facts " + json.dumps(facts), flush=True)
"""


@dataclass(frozen=True)
class Host:
    """A host by its name for ssh. slots: how many ranks may run there."""

    name: str
    slots: int = 1


Hosts = tuple[Host, ...]


@dataclass(frozen=True)
class Interface:
    name: str
    address: str
    network: ipaddress.IPv4Network
    speed_mbit: int = 0


@dataclass
class Answer:
    """The answer of a host: its facts, and how far its clock is ahead of ours, give or take `bound_s`."""

    host: Host
    facts: dict = field(default_factory=dict)
    ahead_s: float = 0.0
    bound_s: float = 0.0
    took_s: float = 0.0
    cause: str = ""
    fix: str = ""

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def interfaces(self) -> list[Interface]:
        cards = ((name, ipaddress.IPv4Interface(address), speed) for name, address, speed in self.facts["interfaces"])
        return [Interface(name, str(card.ip), card.network, speed) for name, card, speed in cards]


@dataclass(frozen=True)
class Network:
    """A network that connects the hosts, and the interface of each host in it."""

    cidr: str
    interfaces: dict[str, str]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(self.interfaces.values()))

    @property
    def selector(self) -> str:
        """The value for MPI: the interface if it has one name on all hosts, otherwise the network."""
        return self.names[0] if len(self.names) == 1 else self.cidr


def parse_hosts(text: str) -> Hosts:
    """Parse "a:2,b:2"; a host without a number has one rank. ValueError for any other text."""
    hosts: list[Host] = []
    for part in text.split(","):
        found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::(\d+))?", part.strip())
        if not found:
            raise ValueError(f"--hosts {text}: {part.strip()!r} is not a host; write name:ranks, as in a:2,b:2")
        name, slots = found[1], int(found[2] or 1)
        if slots < 1:
            raise ValueError(f"--hosts {text}: {name} has no rank; leave it out or give it one, as in {name}:1")
        if name in [host.name for host in hosts]:
            raise ValueError(f"--hosts {text}: {name} is listed twice; list it once, with all its ranks")
        hosts.append(Host(name, slots))
    return tuple(hosts)


def is_here(name: str) -> bool:
    return name in (socket.gethostname(), socket.gethostname().partition(".")[0], "localhost", "127.0.0.1")


def check_ssh(hosts: Hosts) -> Result:
    """Check for an ssh client, which the doctor, mpirun and horovodrun need for other hosts."""
    others = [host.name for host in hosts if not is_here(host.name)]
    if others and shutil.which("ssh") is None:
        cause = f"there is no ssh client on this host to reach {', '.join(others)}"
        return Result("ssh client", False, cause=cause, fix="sudo apt-get install openssh-client")
    return Result("ssh client", True, "found, or not needed")


def ask_all(hosts: Hosts, data: str, launcher: str, packages: list[str], *, limit_s: float) -> list[Answer]:
    asked = {"packages": packages, "data": os.path.abspath(data) if data else "", "launcher": launcher}
    with ThreadPoolExecutor(max_workers=min(len(hosts), 64)) as pool:
        return list(pool.map(lambda host: ask(host, asked, limit_s=limit_s), hosts))


def ask(host: Host, wanted: dict, *, limit_s: float) -> Answer:
    here, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
    path = os.environ.get("PYTHONPATH")  # the ranks get it, too
    probe = "import sys; exec(bytes.fromhex(sys.argv.pop()))"
    script = (
        f"cd {here} 2>/dev/null || exit {NO_FOLDER}; [ -x {python} ] || exit {NO_INTERPRETER}; "
        f"{f'export PYTHONPATH={shlex.quote(path)}; ' if path else ''}"
        f"exec {python} -c {shlex.quote(probe)} {json.dumps(wanted).encode().hex()} {PROBE.encode().hex()}"
    )
    command = ["sh", "-c", script]
    if not is_here(host.name):
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(limit_s * 2 / 3))}"]
        # The login shell may be csh, which takes no line breaks inside of quotes.
        command = ["ssh", *options, host.name, shlex.join(["exec", *command])]
    answer, last, began = Answer(host), "", time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        last, code = converse(command, answer, errors, limit_s=limit_s)
        answer.took_s = time.monotonic() - began
        errors.seek(0)
        if not answer.facts:
            answer.cause, answer.fix = explain(host, code, errors.read(), last, limit_s=limit_s)
    return answer


def converse(command: list[str], answer: Answer, errors: IO[str], *, limit_s: float) -> tuple[str, int | None]:
    """Fill in the answer; return the last step of the probe and its exit code, None if its time ran out."""
    last, over = "", threading.Event()
    with start(command, stderr=errors) as process:

        def end() -> None:
            over.set()
            os.killpg(process.pid, signal.SIGKILL)

        assert process.stdin and process.stdout
        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            for line in process.stdout:
                if line == "ready\n":  # lines before it come from the login shell
                    answer.ahead_s, answer.bound_s = compare_clocks(process.stdin, process.stdout)
                    process.stdin.close()
                elif line.startswith("at "):
                    last = line[3:].strip()
                elif line.startswith("facts "):
                    answer.facts = json.loads(line.removeprefix("facts "))
            process.wait()
        except (BrokenPipeError, ValueError):  # the probe ended in the middle of a question
            process.wait()
        finally:
            timer.cancel()
    return last, None if over.is_set() else process.returncode


def compare_clocks(questions: IO[str], answers: IO[str]) -> tuple[float, float]:
    """Return (seconds ahead, bound) of the other clock, from the quickest of several answers."""
    measured = []
    for _ in range(CLOCK_QUESTIONS):
        sent = time.time()
        print("time", file=questions, flush=True)
        theirs = float(answers.readline())
        measured.append(skew(sent, theirs, time.time()))
    return min(measured, key=lambda pair: pair[1])


def skew(sent: float, theirs: float, received: float) -> tuple[float, float]:
    """Return (seconds ahead, bound): the other host read its clock between our two readings."""
    return theirs - (sent + received) / 2, (received - sent) / 2


def explain(host: Host, code: int | None, errors: str, last: str, *, limit_s: float) -> tuple[str, str]:
    """Return cause and fix for a host that gave no facts."""
    name, by_hand = host.name, f"ssh -v {host.name} true"
    said = ([line.strip() for line in errors.splitlines() if line.strip()] or ["no message"])[-1]
    if code is None:
        what = f"it stopped at {last}" if last else "ssh has not connected, or the shell there does not start"
        return f"no answer within {limit_s:g} s: {what}", f"ssh {name} ls" if last else by_hand
    if code == NO_FOLDER:
        return f"there is no folder {os.getcwd()}", f"ssh {name} ls -d {shlex.quote(os.getcwd())}"
    if code == NO_INTERPRETER:
        fix = f"ssh {name} {shlex.quote(f'cd {shlex.quote(os.getcwd())} && {INSTALL}')}"
        return f"there is no {sys.executable}", fix
    if code != SSH_FAILED:
        return f"{sys.executable} ended with exit code {code}: {said}", f"ssh {name} {sys.executable} --version"
    for pattern, cause, fix in SSH_FAULTS:
        if re.search(pattern, errors):
            return cause.format(name=name, said=said), fix.format(name=name)
    return f"ssh fails: {said}", by_hand


# A pattern in the errors of ssh, the cause, and the fix.
SSH_FAULTS = (
    ("Could not resolve hostname", "the name {name} does not resolve", "getent hosts {name}"),
    ("Connection refused", "no sshd answers on {name} ({said})", "sudo systemctl start ssh  # on {name}"),
    ("timed out|No route to host|unreachable", "{name} cannot be reached ({said})", "ping -c 3 {name}"),
    ("Host key verification failed", "the key of {name} is not known", "ssh-keyscan {name} >> ~/.ssh/known_hosts"),
    ("Permission denied", "ssh to {name} asks for a password", "ssh-copy-id {name}"),
)


# -- checks of the answers -------------------------------------------------------------------------------------


def check_answers(answers: list[Answer], *, data: str = "") -> Iterator[Result]:
    """Yield a result for each host and, if all answered, whether they agree."""
    yield from map(check_host, answers)
    if not all(answer.facts for answer in answers):
        return
    yield check_clocks(answers)
    if data:
        yield check_data(answers, data)
    for check in (check_packages, check_sources, check_names, check_network):
        yield check(answers)


def check_host(answer: Answer) -> Result:
    if answer.cause:
        return Result(answer.name, False, cause=answer.cause, fix=answer.fix)
    if not answer.facts["launcher"]:
        return Result(answer.name, False, cause="the mpirun of this host is not there", fix=f"ssh {answer.name} ls")
    cards = ", ".join(f"{card.name} {card.address}" for card in answer.interfaces if usable(card))
    return Result(answer.name, True, f"answers within {answer.took_s:.1f} s; {cards or 'only loopback'}")


def check_clocks(answers: list[Answer]) -> Result:
    """Check that no clock surely differs from ours by more than a second."""
    worst = max(answers, key=lambda answer: abs(answer.ahead_s) - answer.bound_s)
    text = f"{abs(worst.ahead_s):.3g} s {'ahead of' if worst.ahead_s > 0 else 'behind'} this machine's"
    text = f"the clock of {worst.name} is {text}, give or take {worst.bound_s:.2g} s"
    if abs(worst.ahead_s) - worst.bound_s > MAX_SKEW_S:
        return Result("clocks", False, cause=text, fix=f"ssh {worst.name} sudo chronyc makestep")
    return Result("clocks", True, text)


def odd_ones(answers: list[Answer], values: list) -> tuple[Answer, list[Answer]]:
    """Return a host with the most common value (in a tie the first host's), and the hosts with other values."""
    keys = [json.dumps(value, sort_keys=True) for value in values]
    usual = mode(keys)
    odd = [answer for answer, key in zip(answers, keys) if key != usual]
    return answers[keys.index(usual)], odd


def check_data(answers: list[Answer], folder: str) -> Result:
    """Check that all hosts list the same files and sizes; a note if only their times differ."""
    name, seen = "data folder", {answer.name: answer.facts["data"] for answer in answers}
    for host, data in seen.items():
        if "error" in data:
            cause = f"{host} does not see {folder}: {data['error']}"
            return Result(name, False, cause=cause, fix=f"ssh {host} ls {shlex.quote(folder)}")
    for kind in ("listing", "times"):
        usual, odd = odd_ones(answers, [data[kind] for data in seen.values()])
        if odd:
            one, other = odd[0].name, usual.name
            counts = f"{one} {seen[one]['count']} entries, {other} {seen[other]['count']}"
            cause = f"{one} and {other} see different files in {folder}: {counts}"
            if kind == "times":
                cause = f"{folder} holds the same files on all hosts, but their times differ on {one}: is it a copy?"
            return Result(name, kind == "times", cause=cause, fix=f"ssh {one} df {shlex.quote(folder)}")
    return Result(name, True, f"{folder} is the same on all hosts, {seen[usual.name]['count']} entries")


def check_packages(answers: list[Answer]) -> Result:
    name, packages = "same packages", [answer.facts["packages"] for answer in answers]
    for package in packages[0]:
        usual, odd = odd_ones(answers, [installed[package] for installed in packages])
        if odd:
            versions = (one.facts["packages"][package] for one in (odd[0], usual))
            theirs, ours = (f"{package} {version}" if version else f"no {package}" for version in versions)
            cause = f"{odd[0].name} has {theirs}, but {usual.name} has {ours}"
            again = install_command("--force", settings="env -u PYTHONPATH")
            there = shlex.quote(f"cd {shlex.quote(os.getcwd())} && {again}")
            return Result(name, False, cause=cause, fix=f"ssh {odd[0].name} {there}")
    return Result(name, True, f"{len(packages[0])} versions are the same on all hosts")


def check_sources(answers: list[Answer]) -> Result:
    """Check that the files of this project are the same on all hosts."""
    usual, odd = odd_ones(answers, [answer.facts["sources"] for answer in answers])
    if not odd:
        return Result("same sources", True, f"{len(usual.facts['sources'])} files are the same on all hosts")
    ours, theirs = usual.facts["sources"], odd[0].facts["sources"]
    file = min(path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path))
    cause = f"{file} differs between {odd[0].name} and {usual.name}"
    fix = f"rsync -a --delete largebatch zoo {odd[0].name}:{shlex.quote(os.getcwd())}/"
    return Result("same sources", False, cause=cause, fix=fix)


def check_names(answers: list[Answer]) -> Result:
    """Check that others can reach the address to which each host resolves its own name: Gloo needs it, MPI does not."""
    name = "own names"
    for answer in answers:
        own, address = answer.facts["hostname"], answer.facts["address"]
        right = next((card.address for card in answer.interfaces if usable(card)), "ADDRESS")
        on = f"# on {answer.name}"
        if not address:
            cause = f"{answer.name} cannot resolve its own name, {own}, so Horovod on Gloo crashes there"
            return Result(name, False, cause=cause, fix=f"echo '{right} {own}' | sudo tee -a /etc/hosts  {on}")
        if ipaddress.ip_address(address).is_loopback and len(answers) > 1 and not one_machine(answers):
            cause = f"{answer.name} resolves its own name, {own}, to {address}: horovodrun --gloo cannot connect to it"
            return Result(name, True, cause=cause, fix=f"sudo sed -i 's/^{address}.*/{right} {own}/' /etc/hosts  {on}")
    return Result(name, True, "each name resolves to an address that other hosts can reach")


def usable(card: Interface) -> bool:
    return not WITHIN_A_MACHINE.match(card.name)


def one_machine(answers: list[Answer]) -> bool:
    """Return whether the hosts are names of one machine."""
    return len({tuple(sorted(card.address for card in answer.interfaces)) for answer in answers}) == 1


def choose_network(answers: list[Answer]) -> Network | None:
    """Return the fastest network that all hosts share; in a tie that of the hosts' names, then the first."""
    together = one_machine(answers)

    def shared(wanted: bool) -> list[tuple[int, int, Network]]:
        found = []
        for candidate in dict.fromkeys(card.network for card in answers[0].interfaces if usable(card) == wanted):
            cards = [next((c for c in a.interfaces if c.network == candidate), None) for a in answers]
            inside = [card for card in cards if card is not None and usable(card) == wanted]
            if len(inside) < len(answers) or (len({card.address for card in inside}) < len(inside) and not together):
                continue
            named = sum(answer.facts["address"] == card.address for answer, card in zip(answers, inside))
            by_host = {answer.name: card.name for answer, card in zip(answers, inside)}
            found.append((min(card.speed_mbit for card in inside), named, Network(str(candidate), by_host)))
        return found

    found = shared(True) or (shared(False) if together else [])
    return max(found, key=lambda item: item[:2])[2] if found else None


def check_network(answers: list[Answer]) -> Result:
    """Check that all hosts share a network. Without one, MPI may work or hang."""
    network = choose_network(answers)
    if network:
        unused = sorted({card.name for answer in answers for card in answer.interfaces} - set(network.names))
        others = f"; not used: {', '.join(unused)}" if unused else ""
        return Result("network", True, f"{network.cidr}, {', '.join(network.names)} on all hosts{others}")
    first, *rest = [
        f"{answer.name} is in {', '.join(str(card.network) for card in answer.interfaces if usable(card)) or 'none'}"
        for answer in answers
    ]
    cause = f"the hosts share no network, so MPI has to guess which interface to use: {first}, {rest[-1]}"
    return Result("network", True, cause=cause, fix=f"ssh {answers[-1].name} ip -br addr")


def local_network(hosts: Hosts) -> Network | None:
    """Return the network of this machine that has the addresses of all hosts, without asking them."""
    try:
        addresses = [ipaddress.ip_address(socket.gethostbyname(host.name)) for host in hosts]
    except OSError:
        return None
    others = [address for address in addresses if not address.is_loopback]  # Debian resolves its own name to 127.0.1.1
    answer = ask(Host("localhost"), {"packages": [], "data": "", "launcher": ""}, limit_s=LIMIT_S)
    for card in answer.interfaces if answer.facts else []:
        if usable(card) and all(address in card.network for address in others):
            return Network(str(card.network), {host.name: card.name for host in hosts})
    return None
