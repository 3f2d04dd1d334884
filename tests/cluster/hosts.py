"""Several real hosts on one machine, joined by a switch whose cables can be cut, slowed and mended.

Each host is a set of namespaces (network, host name, processes, shared memory, mounts) with an sshd on port 22, its
own /etc/hosts and one network card, eth0. So "ssh h2", "mpirun -H h1:2,h2:2" and "horovodrun -H h1:2,h2:2" work as on
a real cluster, without any option, and files are shared as on a cluster's file system. It needs root.

Namespaces are anonymous and die with their first process, which dies with the test run: nothing is left on the machine
(no name in /run/netns, no mount, no interface) even after SIGKILL, and two test runs do not see each other.
"""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = "ip tc unshare nsenter setpriv sshd ssh ssh-keygen".split()
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
DIE_WITH_US = ["setpriv", "--pdeathsig", "KILL"]

SSH_CONFIG = """
Host *
  IdentityFile {folder}/id
  UserKnownHostsFile {folder}/known_hosts
  BatchMode yes
  LogLevel ERROR
"""
SSHD_CONFIG = """
HostKey {folder}/{name}.key
AuthorizedKeysFile {folder}/id.pub
SetEnv TMPDIR={folder}/tmp
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 200
"""
# /sys shows the network cards of the namespace it was mounted in, and mounting it anew hides the control groups.
# ~/.ssh would beat our ssh_config; ~/.horovod is where horovodrun keeps for an hour what it found about "h2"; what a
# shell reads under sshd may take locks that a host, when it is killed, never gives back ("pyenv init" does).
BOOT = """
set -e
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mkdir {folder}/{name}.cgroup
mount --rbind /sys/fs/cgroup {folder}/{name}.cgroup
mount -t sysfs sysfs /sys
mount --rbind {folder}/{name}.cgroup /sys/fs/cgroup
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
mkdir -p ~/.horovod /run/sshd
mount -t tmpfs tmpfs ~/.horovod
[ ! -d ~/.ssh ] || mount -t tmpfs tmpfs ~/.ssh
for file in ~/.bashrc ~/.zshenv; do [ ! -f $file ] || mount --bind {folder}/empty $file; done
exec {sshd} -D -f {folder}/{name}.sshd_config -E {folder}/{name}.sshd.log
"""


def missing() -> str:
    """Why hosts cannot be made here, with the remedy; empty when they can."""
    if os.geteuid() != 0:
        return "several hosts on one machine need root: sudo env PATH=$PATH python -m pytest tests/cluster"
    tools = [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]
    if tools:
        return f"missing {', '.join(tools)}: run tests/cluster/install.sh as root"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True, timeout=10
    )
    return f"no namespaces here ({tried.stderr.strip()}): run it where root may unshare" if tried.returncode else ""


def wait_for(condition: Callable[[], object], what: str, timeout_s: float, *, every_s: float = 0.05) -> None:
    """Poll until the condition is true; an AssertionError that names it when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(every_s)


class Job:
    """A command that runs on a host; its output is in a file, so that no survivor can block the reader."""

    def __init__(self, hosts: "Hosts", command: list[str], process: subprocess.Popen, file: Path) -> None:
        self.hosts, self.command, self.process, self.file = hosts, command, process, file

    @property
    def output(self) -> str:
        """stdout and stderr so far."""
        return self.file.read_text(errors="replace")

    def wait_for_line(self, text: str, timeout_s: float) -> None:
        """Wait until the text was printed; fails when the command ends without it, or when the time is over."""

        def printed() -> bool:
            ended = self.process.poll() is not None
            if text in self.output:
                return True
            assert not ended, f"{shlex.join(self.command)} ended without {text!r}; its output:\n{self.output}"
            return False

        try:
            wait_for(printed, f"{text!r} of {shlex.join(self.command)}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; its output:\n{self.output}") from None

    def wait(self, timeout_s: float) -> tuple[int, str]:
        """(exit code, output). A command over its time limit is killed on all hosts, and fails."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.hosts.clear()
            self.process.kill()
            self.process.wait(10)
            message = f"{shlex.join(self.command)} was not done after {timeout_s} s; its output:\n{self.output}"
            raise AssertionError(message) from None
        return code, self.output


class Hosts:
    """Hosts h1 ... hN (10.77.0.1 ...) on one switch; use it as a context manager, or call `down` at the end."""

    def __init__(self, num_hosts: int = 3) -> None:
        self.names = [f"h{i + 1}" for i in range(num_hosts)]
        # short, since paths of Unix sockets, which hold a name of up to 107 characters, begin with it
        self.folder = Path(tempfile.mkdtemp(prefix="lb-"))
        self.num_jobs = 0
        self.init: dict[str, int] = {}              # the first process of each host, as this machine numbers it
        self.outer: dict[str, subprocess.Popen] = {}  # the unshare that holds it
        self.residents: set[int] = set()            # processes that `clear` leaves alone
        self.harmed: set[str] = set()               # hosts for `mend` to look after
        try:
            self._write_files()
            self.outer["switch"] = self._namespace("--net", "sleep", "infinity")
            switch = f"/proc/{self.outer['switch'].pid}/ns/net"
            wait_for(lambda: os.readlink(switch) != os.readlink("/proc/self/ns/net"), "the switch", 30)
            self._on_switch("ip", "link", "add", "br0", "type", "bridge")
            self._on_switch("ip", "link", "set", "br0", "up")
            for name in self.names:
                self.boot(name)
            for name in self.names:
                self.wait_until_up(name)
        except BaseException:
            self.down()
            raise

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # -- commands ----------------------------------------------------------------------------------------------------

    def start(self, host: str, command: list[str], *, environment: dict[str, str] | None = None) -> Job:
        """Start a command on a host, in the root of the repository, with our environment and these variables."""
        self.num_jobs += 1
        file = self.folder / f"job{self.num_jobs}.out"
        ours = {name: value for name, value in os.environ.items() if not name.endswith("_backing_directory")}
        enter = ["nsenter", "-t", str(self.init[host]), "--net", "--uts", "--ipc", "--pid", "--mount"]
        there = ["sh", "-c", f'cd {shlex.quote(str(ROOT))} && exec "$@"', "sh"]
        with open(file, "wb") as output:
            process = subprocess.Popen(
                [*DIE_WITH_US, *enter, *there, *command],
                # each host has a /dev/shm of its own, in which the folder of this session is not
                env=ours | {"PATH": PATH, "TMPDIR": str(self.folder / "tmp")} | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Job(self, command, process, file)

    def run(
        self, host: str, command: list[str], *, timeout_s: float = 120, environment: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """Run a command on a host; (exit code, stdout and stderr together).

        A command over its time limit fails, and is killed with all that it started on any host.
        """
        return self.start(host, command, environment=environment).wait(timeout_s)

    def processes(self, host: str) -> dict[int, str]:
        """Command lines of all processes of a host but its residents, by this machine's process numbers."""
        try:
            namespace = os.readlink(f"/proc/{self.init[host]}/ns/pid")
        except OSError:                             # a killed host
            return {}
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns/pid") == namespace and int(folder.name) not in self.residents:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line:                        # a zombie has none
                        found[int(folder.name)] = line
            except OSError:                         # ended, or none that we may look at
                continue
        return found

    def adopt(self) -> None:
        """Make residents, which `clear` and `processes` leave out, of everything that runs on the hosts now."""
        for name in self.names:
            self.residents |= self.processes(name).keys()

    def clear(self) -> None:
        """Kill everything on all hosts but the residents (sshd, Slurm's daemons), and wait until it is gone."""

        def gone() -> bool:
            left = [pid for name in self.names for pid in self.processes(name)]
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            return not left

        wait_for(gone, "processes of the hosts are gone", 30)

    # -- faults ------------------------------------------------------------------------------------------------------

    def cut(self, host: str) -> None:
        """Pull a host's cable at the switch: its own card stays up, and packets vanish (the hard case)."""
        self.harmed.add(host)
        self._on_switch("ip", "link", "set", self._port(host), "down")

    def join(self, host: str) -> None:
        """Put a cable that was cut back in."""
        self._on_switch("ip", "link", "set", self._port(host), "up")

    def limit(self, host: str, rate: str | None) -> None:
        """Slow a host's link down in both directions, e.g. to "100mbit"; None: full speed again."""
        self.harmed.add(host)
        shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"] if rate else ["pfifo_fast"]
        self._in_net(host, "tc", "qdisc", "replace", "dev", "eth0", "root", *shape)
        self._on_switch("tc", "qdisc", "replace", "dev", self._port(host), "root", *shape)

    def kill(self, host: str) -> None:
        """Kill a host with all its processes at once. Its peers still get told (connections are reset)."""
        self.harmed.add(host)
        os.kill(self.init[host], signal.SIGKILL)
        self.outer[host].wait(10)
        wait_for(lambda: not self._port_exists(host), f"the cable of {host} is gone", 30)

    def mend(self) -> None:
        """Kill what is left of earlier commands, boot killed hosts, put cables in, take limits away."""
        self.clear()
        for name in sorted(self.harmed):
            if self.outer[name].poll() is not None:
                self.boot(name)
            self.join(name)
            self.limit(name, None)
            self.wait_until_up(name)
        self.harmed.clear()

    # -- up and down -------------------------------------------------------------------------------------------------

    def boot(self, name: str) -> None:
        """Start a host: its namespaces, its cable to the switch, its sshd."""
        number = self.names.index(name) + 1
        folder = str(self.folder)
        script = self.folder / f"{name}.boot"
        script.write_text(BOOT.format(name=name, folder=folder, sshd=shutil.which("sshd", path=PATH)))
        shutil.rmtree(self.folder / f"{name}.cgroup", ignore_errors=True)
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        # the cable first: sshd needs the address
        wait = f"until ip addr show dev eth0 2>/dev/null | grep -q 10.77.0.{number}/; do sleep 0.05; done"
        self.outer[name] = self._namespace(*namespaces, "sh", "-c", f"{wait}; exec sh {script}")
        children = Path(f"/proc/{self.outer[name].pid}/task/{self.outer[name].pid}/children")
        wait_for(lambda: children.read_text().split(), f"the first process of {name}", 30)
        self.init[name] = int(children.read_text().split()[0])
        self.residents.add(self.init[name])
        port = self._port(name)
        # the card's own address stays the same after a boot, as on a real host: the others remember it
        card = ["eth0", "address", f"02:00:00:00:00:{number:02x}", "netns", str(self.init[name])]
        self._on_switch("ip", "link", "add", port, "type", "veth", "peer", *card)
        self._on_switch("ip", "link", "set", port, "master", "br0", "up")
        self._in_net(name, "ip", "link", "set", "lo", "up")
        self._in_net(name, "ip", "link", "set", "eth0", "up")
        self._in_net(name, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")

    def wait_until_up(self, name: str) -> None:
        """Wait until a host can be reached by ssh from the first host."""

        def reached() -> bool:
            assert self.outer[name].poll() is None, f"{name} did not start:\n{self._log(name)}"
            return self.run(self.names[0], ["ssh", "-o", "ConnectTimeout=5", name, "true"], timeout_s=60)[0] == 0

        try:
            wait_for(reached, f"ssh {name}", 60)
        except AssertionError as error:
            raise AssertionError(f"{error}; what {name} printed:\n{self._log(name)}") from None

    def down(self) -> None:
        """Kill all hosts and the switch; safe to call at any moment, and twice."""
        for name, process in self.outer.items():
            if name in self.init and process.poll() is None:
                os.kill(self.init[name], signal.SIGKILL)     # then unshare ends, and leaves no zombie behind
            else:
                process.kill()
            process.wait(10)
        wait_for(lambda: not any(map(self.processes, self.init)), "the processes of the hosts are gone", 30)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        folder = self.folder
        folder.chmod(0o755)                         # Slurm's daemons and sshd may give up root
        (folder / "tmp").mkdir(mode=0o1777)
        for name in self.names:                     # so that no mpirun or orted removes it while another one starts
            (folder / "tmp" / f"ompi.{name}.0" / "kept").mkdir(parents=True)
        (folder / "empty").touch()
        for key in ["id", *[f"{name}.key" for name in self.names]]:
            self._call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        addresses = {name: f"10.77.0.{i + 1}" for i, name in enumerate(self.names)}
        lines = ["127.0.0.1 localhost", *[f"{address} {name}" for name, address in addresses.items()]]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        known = []
        for name, address in addresses.items():
            kind, key = (folder / f"{name}.key.pub").read_text().split()[:2]
            known.append(f"{name},{address} {kind} {key}\n")
            (folder / f"{name}.sshd_config").write_text(SSHD_CONFIG.format(folder=folder, name=name))
        (folder / "known_hosts").write_text("".join(known))
        (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))

    def _namespace(self, *arguments: str) -> subprocess.Popen:
        with open(self.folder / "boot.log", "ab") as log:
            return subprocess.Popen(
                [*DIE_WITH_US, "unshare", *arguments],
                env=os.environ | {"PATH": PATH},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _log(self, name: str) -> str:
        files = [self.folder / "boot.log", self.folder / f"{name}.sshd.log"]
        return "\n".join(file.read_text(errors="replace") for file in files if file.exists())

    def _port(self, host: str) -> str:
        return f"port{self.names.index(host) + 1}"

    def _port_exists(self, host: str) -> bool:
        return Path(f"/proc/{self.outer['switch'].pid}/net/dev").read_text().find(f"{self._port(host)}:") >= 0

    def _on_switch(self, *command: str) -> None:
        self._call("nsenter", "-t", str(self.outer["switch"].pid), "--net", *command)

    def _in_net(self, host: str, *command: str) -> None:
        self._call("nsenter", "-t", str(self.init[host]), "--net", *command)

    def _call(self, *command: str) -> None:
        done = subprocess.run(command, env=os.environ | {"PATH": PATH}, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr or done.stdout}"
