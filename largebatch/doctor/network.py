"""Messages between the hosts: mpirun to each of them, every pair in turn, sums over all ranks, Horovod's sum.

One step after the other, each of a kind that would hang in the next: daemons, a connection per pair, a collective.
Each has a time limit, and a failure names the two hosts. What the ranks run is in exchange.py; this file reads what
they say as they say it, since a launch that hangs must be ended, and the last thing it began is what hangs.
"""

import json
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from largebatch.doctor import commands, launches
from largebatch.doctor.commands import Mpi
from largebatch.doctor.hosts import Host, Network
from largebatch.doctor.result import Output, Result, kill, run

FAR_SLOWER = 4  # times
NOTED_LATENCY_S = 0.005  # a busy core alone can cost a millisecond
START_LIMIT_S, MESSAGE_LIMIT_S = 20, 10  # a sound network needs a second, and much less
EXCHANGE = [sys.executable, "-m", "largebatch.doctor.exchange"]
STARTED = [sys.executable, "-c", "print('started')"]


@dataclass(frozen=True)
class Cluster:
    """Where ranks are to run, and how they get there."""

    mpi: Mpi
    hosts: tuple[Host, ...]
    network: Network | None
    here: str  # where mpirun is started
    names: dict[str, str]  # as given to us, by the name that a host has for itself

    @property
    def num_ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    def mpirun(self, hosts: tuple[Host, ...], program: list[str]) -> list[str]:
        """The command that starts the program on all slots of these hosts."""
        ranks = sum(host.slots for host in hosts)
        return commands.mpirun(self.mpi, hosts, ranks, program, network=self.network)


class Launch:
    """A command whose lines are read as they come, and that is ended with all its ranks on leaving."""

    def __init__(self, command: list[str]) -> None:
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.kept: list[dict] = []  # said, and not yet asked for
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        """First a signal that mpirun hands on to its daemons, then one that nothing here outlives."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                pass
        kill(self.process)
        self.process.wait()
        self.errors.close()

    def next_event(self, *, limit_s: float) -> dict:
        """What a rank says next. Raises TimeoutError when that is nothing, RuntimeError when the launch has ended."""
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
        """Exit code, and what was said on stderr so far."""
        self.errors.seek(0)
        return Output(self.process.poll(), "", self.errors.read())


def check_messages(cluster: Cluster, *, device: str, limit_s: float) -> Iterator[Result]:
    """Everything that goes between the hosts; what needs what has failed is left out."""
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
    """mpirun starts a process on each host alone, at the same time: so it is known which host it does not reach."""
    limit_s = min(START_LIMIT_S, limit_s)

    def start(host: Host) -> Result:
        command = cluster.mpirun((Host(host.name),), STARTED)
        output = run(command, limit_s=limit_s)
        name = f"mpirun, {cluster.here} to {host.name}"
        if output.code == 0 and "started" in output.stdout:
            return Result(name, True, "it starts a process there")
        how = f"nothing started within {limit_s:g} s" if output.code is None else f"mpirun {output.how_it_ended}"
        cause = f"{cluster.here} and {host.name}: {how}: {explain_start(output)}"
        return Result(name, False, cause=cause, fix=shlex.join(command))

    with ThreadPoolExecutor(max_workers=min(len(cluster.hosts), 16)) as pool:
        yield from pool.map(start, cluster.hosts)


def explain_start(output: Output) -> str:
    """Why mpirun's daemon does not come up, by what was said."""
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
    """Names of hosts by rank, once MPI is up on all. Raises TimeoutError or RuntimeError with what is missing."""
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
                early.append(event)  # rank 0 may begin before another rank's word is here
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
    """One rank per host; every two of them exchange messages, one pair at a time."""
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
    """The result of two hosts that were measured."""
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
    """A note for each pair that is far slower than a quarter of the pairs are: with three hosts, one of them slow, the
    median pair would be a slow one."""
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
    """A small and a large allreduce over all ranks, exact on each."""
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
    """The result of a sum, as one rank has it."""
    if not event["exact"]:
        return Result(what, False, cause=f"rank {event['rank']} on {names[event['rank']]} has a wrong sum", fix="dmesg")
    rate = f", {event['bytes'] / event['took_s'] / 1e6:.0f} MB/s" if event["bytes"] > 4096 else ""
    return Result(what, True, f"exact, {event['took_s'] * 1e3:.3g} ms for {event['bytes']} bytes{rate}")


def check_horovod(cluster: Cluster, device: str, *, limit_s: float) -> Iterator[Result]:
    """The exact sum by Horovod over all ranks under each launcher, as the recommended commands start it."""
    hosts, ranks, network = cluster.hosts, cluster.num_ranks, cluster.network
    over_mpi = commands.horovodrun(cluster.mpi, hosts, ranks, [], network=network)
    over_gloo = commands.horovodrun_gloo(hosts, ranks, [], network=network)
    for launch, launcher in {
        "mpirun": cluster.mpirun(hosts, []),
        "horovodrun": [*over_mpi, "--disable-cache"],  # it remembers for an hour what it found about a name
        "horovodrun --gloo": [*over_gloo, "--disable-cache"],
    }.items():
        yield launches.check_allreduce(launch, launcher, ranks=ranks, device=device, limit_s=limit_s)
