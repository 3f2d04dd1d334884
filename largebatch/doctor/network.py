"""Checks of the messages between hosts: mpirun to each host, every pair in turn, sums over all ranks, Horovod's sum.

Each step tests something that the next one needs, has a time limit, and names the hosts that fail. The ranks run
exchange.py. Their lines are read as they come: the last step that began is the one that hangs.
"""

import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from largebatch.doctor import commands, launches
from largebatch.doctor.commands import Mpi
from largebatch.doctor.hosts import Host, Hosts, Network
from largebatch.doctor.result import Output, Result, kill, run, start

FAR_SLOWER = 4  # times slower than the faster pairs
NOTED_LATENCY_S = 0.005  # a difference below this is no note: a busy core alone can cost a millisecond
START_LIMIT_S, MESSAGE_LIMIT_S = 20, 10  # a healthy network needs about a second to start, and far less for a message
EXCHANGE = [sys.executable, "-m", "largebatch.doctor.exchange"]
STARTED = [sys.executable, "-c", "print('started')"]


@dataclass(frozen=True)
class Cluster:
    """The hosts of the ranks, and the MPI and network between them."""

    mpi: Mpi
    hosts: Hosts
    network: Network | None
    here: str  # where mpirun is started
    names: dict[str, str]  # the hosts' names as given by the user, by the hosts' own names

    @property
    def num_ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    def mpirun(self, hosts: Hosts, program: list[str]) -> list[str]:
        ranks = sum(host.slots for host in hosts)
        return commands.mpirun(self.mpi, hosts, ranks, program, network=self.network)


class Launch:
    """A running command. Its lines are read as they come; on leaving `with`, it is ended with all its ranks."""

    def __init__(self, command: list[str]) -> None:
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        self.process = start(command, stdin=subprocess.DEVNULL, stderr=self.errors)
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.kept: list[dict] = []  # events that were read and not yet returned
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        """Send SIGTERM, which mpirun hands on to its daemons, then SIGKILL to the rest here."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        kill(self.process)
        self.process.wait()
        self.errors.close()

    def next_event(self, *, limit_s: float) -> dict:
        """Return the next event of a rank; TimeoutError without one, RuntimeError if the launch has ended."""
        while not self.kept:
            try:
                line = self.lines.get(timeout=max(0.0, limit_s))
            except queue.Empty:
                raise TimeoutError(f"no answer within {limit_s:.3g} s: {self.output().last_error}") from None
            if line is None:
                self.process.wait()
                output = self.output()
                raise RuntimeError(f"mpirun {output.how_it_ended}: {output.last_error}")
            if line.startswith("doctor "):
                self.kept.append(json.loads(line.removeprefix("doctor ")))
        return self.kept.pop(0)

    def output(self) -> Output:
        self.errors.seek(0)
        return Output(self.process.poll(), "", self.errors.read())


def check_messages(cluster: Cluster, *, device: str, limit_s: float) -> Iterator[Result]:
    """Yield the checks between the hosts, until one fails."""
    steps = (check_starts, check_pairs, check_sums)
    between = [step(cluster, limit_s=limit_s) for step in steps]
    for results in [*between, check_horovod(cluster, device, limit_s=limit_s)]:
        failed = False
        for result in results:
            failed |= not result.ok
            yield result
        if failed:
            return


def check_starts(cluster: Cluster, *, limit_s: float) -> Iterator[Result]:
    """Let mpirun start a process on each host alone, all at once, to find the hosts that it does not reach."""
    limit_s = min(START_LIMIT_S, limit_s)

    def start_on(host: Host) -> Result:
        command = cluster.mpirun((Host(host.name),), STARTED)
        # Open MPI 4 fails to start if at that moment another mpirun, which ends, removes the folder of all sessions.
        with tempfile.TemporaryDirectory(prefix="largebatch-", ignore_cleanup_errors=True) as own:
            output = run(command, limit_s=limit_s, environment=os.environ | {"TMPDIR": own})
        name = f"mpirun, {cluster.here} to {host.name}"
        if output.code == 0 and "started" in output.stdout:
            return Result(name, True, "it starts a process there")
        how = f"nothing started within {limit_s:g} s" if output.code is None else f"mpirun {output.how_it_ended}"
        cause = f"{cluster.here} and {host.name}: {how}: {explain_start(output)}"
        return Result(name, False, cause=cause, fix=shlex.join(command))

    with ThreadPoolExecutor(max_workers=min(len(cluster.hosts), 16)) as pool:
        yield from pool.map(start_on, cluster.hosts)


def explain_start(output: Output) -> str:
    for phrase, meaning in START_FAULTS:
        if phrase in output.stderr:
            return meaning
    if output.code is None and not output.stderr.strip():
        return NO_WAY_BACK
    return output.last_error


NO_WAY_BACK = "its daemon there cannot connect back, because of the chosen interface or a firewall"
START_FAULTS = (
    (": not found", "its own programs are not found there"),
    ("No such file", "its own programs are not found there"),
    ("Could not resolve hostname", "the name does not resolve"),
    ("create a connection back", NO_WAY_BACK),
)


def wait_until_ready(launch: Launch, cluster: Cluster, num_ranks: int, *, limit_s: float) -> dict[int, str]:
    """Wait until MPI runs on all ranks; return the hosts' names by rank. Errors name hosts that are missing."""
    started: list[str] = []
    early: list[dict] = []
    ready: dict[int, str] = {}
    deadline = time.monotonic() + limit_s
    try:
        while len(ready) < num_ranks:
            event = launch.next_event(limit_s=deadline - time.monotonic())
            if "started" in event:
                started.append(cluster.names.get(event["started"], event["started"]))
            elif "ready" not in event:
                early.append(event)  # rank 0 may begin before another rank's line has arrived
            elif event.get("size", num_ranks) != num_ranks:
                raise RuntimeError(f"{num_ranks} ranks were started, but one of them sees a size of {event['size']}")
            else:
                ready[event["ready"]] = cluster.names.get(event["host"], event["host"])
    except TimeoutError:
        missing = ", ".join(host.name for host in cluster.hosts if host.name not in started)
        if missing:
            raise TimeoutError(f"{cluster.here} and {missing}: no rank was started within {limit_s:g} s") from None
        waiting = ", ".join(sorted(set(started) - set(ready.values()))) or "some ranks"
        raise TimeoutError(f"MPI did not start on {waiting} within {limit_s:g} s") from None
    launch.kept = early + launch.kept
    return ready


def check_pairs(cluster: Cluster, *, limit_s: float) -> Iterator[Result]:
    """Start one rank per host, and let every two ranks exchange messages, one pair at a time."""
    alone = tuple(Host(host.name) for host in cluster.hosts)
    if len(alone) < 2:
        return
    message_s = min(MESSAGE_LIMIT_S, limit_s)
    command = cluster.mpirun(alone, [*EXCHANGE, "pairs", str(message_s)])
    found: dict[str, dict] = {}
    with Launch(command) as launch:
        pair = "all hosts"
        try:
            names = wait_until_ready(launch, cluster, len(alone), limit_s=limit_s)
            while True:
                event = launch.next_event(limit_s=5 * message_s + 10)
                if "done" in event:
                    left_out = ", ".join(names[rank] for rank in event["unreached"])
                    break
                pair = " and ".join(names[rank] for rank in event["pair"])
                if "found" in event:
                    yield judge_pair(pair, event["found"], message_s)
                    found |= {pair: event["found"]} if "error" not in event["found"] else {}
        except (TimeoutError, RuntimeError) as error:
            cause = f"{pair}: {error}" if pair != "all hosts" else str(error)
            yield Result(pair, False, cause=cause, fix=shlex.join(command))
            return
    if left_out:
        cause = f"{names[0]}, which leads the others, does not reach {left_out}; the other pairs with it were not tried"
        yield Result("other pairs", False, cause=cause, fix="apply the fix above first")
    yield from compare(found)


def judge_pair(pair: str, found: dict, limit_s: float) -> Result:
    if "error" in found:
        first, second = pair.split(" and ")
        at_all = found["error"] == "no message"
        reason = "a firewall, or the wrong interface" if at_all else "another MTU, or a bad cable"
        ping = f"ssh {first} ping -c 3 {'' if at_all else '-M do -s 8972 '}{second}"
        return Result(pair, False, cause=f"{pair}: {found['error']} within {limit_s:g} s ({reason}?)", fix=ping)
    return Result(pair, True, figures(found))


def figures(found: dict) -> str:
    return f"{found['latency_s'] * 1e6:.0f} us, {found['bytes_per_s'] / 1e6:.0f} MB/s"


def compare(found: dict[str, dict]) -> Iterator[Result]:
    """Yield a note for each pair far slower than the fastest quarter. One slow host of three slows the median."""
    if len(found) < 2:
        return
    quarter = (len(found) - 1) // 4
    latency_s = sorted(pair["latency_s"] for pair in found.values())[quarter]
    bytes_per_s = sorted((pair["bytes_per_s"] for pair in found.values()), reverse=True)[quarter]
    usual = figures({"latency_s": latency_s, "bytes_per_s": bytes_per_s})
    for pair, figure in found.items():
        late = figure["latency_s"] > max(FAR_SLOWER * latency_s, latency_s + NOTED_LATENCY_S)
        if late or figure["bytes_per_s"] < bytes_per_s / FAR_SLOWER:
            cause = f"{pair} are far slower than other pairs: {figures(figure)}; the faster pairs: {usual}"
            first, second = pair.split(" and ")
            yield Result(pair, True, cause=cause, fix=f"ssh {second} ethtool eth0  # speed and errors; {first}, too")


def check_sums(cluster: Cluster, *, limit_s: float) -> Iterator[Result]:
    """Check a small and a large allreduce over all ranks; the sum must be exact on each."""
    command = cluster.mpirun(cluster.hosts, [*EXCHANGE, "sums"])
    what = f"allreduce over {cluster.num_ranks} ranks"
    with Launch(command) as launch:
        try:
            names = wait_until_ready(launch, cluster, cluster.num_ranks, limit_s=limit_s)
            while True:
                event = launch.next_event(limit_s=limit_s)
                if "done" in event:
                    return
                what = f"{event['sum']} allreduce over {cluster.num_ranks} ranks"
                if "took_s" in event:
                    yield judge_sum(what, event, names)
        except (TimeoutError, RuntimeError) as error:
            yield Result(what, False, cause=str(error), fix=shlex.join(command))


def judge_sum(what: str, event: dict, names: dict[int, str]) -> Result:
    if not event["exact"]:
        return Result(what, False, cause=f"rank {event['rank']} on {names[event['rank']]} has a wrong sum", fix="dmesg")
    rate = f", {event['bytes'] / event['took_s'] / 1e6:.0f} MB/s" if event["bytes"] > 4096 else ""
    return Result(what, True, f"exact, {event['took_s'] * 1e3:.3g} ms for {event['bytes']} bytes{rate}")


def check_horovod(cluster: Cluster, device: str, *, limit_s: float) -> Iterator[Result]:
    """Check that Horovod computes the exact sum over all ranks under each launcher, started as recommended."""
    hosts, ranks, network = cluster.hosts, cluster.num_ranks, cluster.network
    over_mpi = commands.horovodrun(cluster.mpi, hosts, ranks, [], network=network)
    over_gloo = commands.horovodrun_gloo(hosts, ranks, [], network=network)
    for launch, launcher in {
        "mpirun": cluster.mpirun(hosts, []),
        "horovodrun": [*over_mpi, "--disable-cache"],  # horovodrun would reuse its checks of a host for an hour
        "horovodrun --gloo": [*over_gloo, "--disable-cache"],
    }.items():
        yield launches.check_allreduce(launch, launcher, ranks=ranks, device=device, limit_s=limit_s)
