"""Bind a rank to the cores, the memory and the network adapter nearest its GPU, then become the given command.

    mpirun -np 8 --bind-to none mpi_scripts/bind.sh [--dry-run] python -m largebatch.train ...

A launcher binds ranks to cores by their number. A rank on the wrong socket reaches its GPU, its adapter and its images
through the link between the sockets. Each rank computes the plan for its host from the same files. If something cannot
be bound, the program says so; this is never an error.

Ranks on one NUMA node get separate parts of its cores, with both hyperthreads of a core in one part. UCX gets the
nearest adapter that no other rank has; NCCL finds its adapters itself. If each rank sees only its own GPU (Slurm's
--gpus-per-task=1), there is a part for every GPU of the host, used or not.
"""

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

QUERY = ["nvidia-smi", "--query-gpu=index,pci.bus_id,uuid", "--format=csv,noheader"]
QUERY_LIMIT_S = 60  # 20 s are normal if the driver is not kept loaded; a broken driver never answers
PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# The variable of each launcher with the local rank -> its variable with the number of ranks on this host. Copied from
# launcher.py, as this file is run by its path and imports nothing of the package; a test compares the two.
LOCAL_RANK = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALRANKID": "MPI_LOCALNRANKS",
    "HOROVOD_LOCAL_RANK": "HOROVOD_LOCAL_SIZE",
    "SLURM_LOCALID": "SLURM_STEP_TASKS_PER_NODE",
    "LOCAL_RANK": "LOCAL_WORLD_SIZE",
}


@dataclass(frozen=True)
class Machine:
    sysfs: Path
    allowed: frozenset[int]  # CPUs that this process may use
    gpus: tuple[str, ...] = ()  # PCI addresses in the order of local ranks; or that of the only GPU in sight

    def host_gpus(self) -> tuple[str, ...]:
        """Return the PCI addresses of all GPUs of the host, also those that this process may not use."""
        return tuple(sorted(path.name for path in (self.sysfs / "bus/pci/drivers/nvidia").glob("*:*:*.*")))

    def seat(self, rank: int, size: int) -> tuple["Machine", int, int]:
        """Return the machine with a GPU for each seat, the seat of a rank, and the number of seats.

        Seats are ranks. If the rank sees only its own GPU, they are all GPUs of the host, or if the host shows fewer
        GPUs than ranks, ranks whose GPUs are unknown.
        """
        if size == 1 or len(self.gpus) != 1:
            return self, rank, size
        all_gpus = self.host_gpus()
        if self.gpus[0] in all_gpus and len(all_gpus) >= size:
            return replace(self, gpus=all_gpus), all_gpus.index(self.gpus[0]), len(all_gpus)
        return replace(self, gpus=("",) * rank + self.gpus + ("",) * (size - rank - 1)), rank, size

    def node_of_gpu(self, local_rank: int) -> int:
        """Return the NUMA node of a rank's GPU; -1 if unknown."""
        if local_rank >= len(self.gpus):
            return -1
        return int(text_of(self.sysfs / "bus/pci/devices" / self.gpus[local_rank] / "numa_node", "-1"))

    def nodes(self) -> dict[int, frozenset[int]]:
        found = {}
        for folder in (self.sysfs / "devices/system/node").glob("node[0-9]*"):
            found[int(folder.name[4:])] = frozenset(numbers(text_of(folder / "cpulist"))) & self.allowed
        return found

    def cores(self, cpus: frozenset[int]) -> list[list[int]]:
        """Group CPUs by core, in order."""
        cores: dict[int, list[int]] = {}
        for cpu in sorted(cpus):
            topology = self.sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            cores.setdefault(min(numbers(text_of(topology, str(cpu)))), []).append(cpu)
        return [cores[first] for first in sorted(cores)]

    def nearest_adapters(self, local_rank: int) -> list[str]:
        """Return the working InfiniBand and RoCE adapters, as name:port, behind one PCI bridge with a rank's GPU.

        Nearest first. If there are none, those of the GPU's NUMA node; if there are none of these, all.
        """
        if local_rank >= len(self.gpus):
            return []
        gpu = (self.sysfs / "bus/pci/devices" / self.gpus[local_rank]).resolve()
        found: dict[str, tuple[int, int]] = {}
        for adapter in sorted((self.sysfs / "class/infiniband").glob("*"), key=_natural):
            active = [port for port in sorted(adapter.glob("ports/*")) if "ACTIVE" in text_of(port / "state")]
            if active:
                there = (adapter / "device").resolve()
                shared = Path(os.path.commonpath([gpu, there]))
                same_node = text_of(there / "numa_node", "-1") == text_of(gpu / "numa_node", "-1")
                kind = 2 if PCI_ADDRESS.fullmatch(shared.name) else int(same_node)
                found[f"{adapter.name}:{active[0].name}"] = (kind, len(shared.parts))
        best = max(found.values(), default=(0, 0))[0]
        return sorted((name for name in found if found[name][0] == best), key=lambda name: -found[name][1])


@dataclass
class Binding:
    cpus: list[int] = field(default_factory=list)  # empty: the rank keeps the CPUs that it has
    node: int = -1  # NUMA node whose memory the rank uses; -1: any
    gpu: str = ""  # the rank's GPU, in words
    adapter: str = ""  # adapter for UCX, as name:port
    num_cores: int = 0  # how many cores the CPUs belong to
    notes: list[str] = field(default_factory=list)  # sentences: what was not bound, and why


def plan(machine: Machine, rank: int, size: int) -> Binding:
    """Return the binding of one of the `size` ranks on this host."""
    binding = Binding()
    machine, seat, seats = machine.seat(rank, size)
    if seat < len(machine.gpus):
        binding.gpu = f"GPU {seat} at {machine.gpus[seat]}, NUMA node {machine.node_of_gpu(seat)}"
    nodes = machine.nodes()
    wanted = [machine.node_of_gpu(other) for other in range(seats)]
    enough = [len(machine.cores(nodes.get(node, frozenset()))) >= wanted.count(node) for node in wanted]
    all_cores = machine.cores(machine.allowed)
    if -1 not in wanted and all(enough):
        peers = [other for other in range(seats) if wanted[other] == wanted[seat]]
        binding.cpus = share(machine.cores(nodes[wanted[seat]]), peers.index(seat), len(peers))
    elif len(all_cores) >= size:
        binding.cpus = share(all_cores, rank, size)
        why = "too few cores near the GPUs" if -1 not in wanted else "no NUMA node known" if machine.gpus else "no GPU"
        binding.notes.append(f"{why}, so the ranks share all {len(all_cores)} cores")
    else:
        binding.notes.append(f"not bound: {len(all_cores)} cores for {size} ranks")
    binding.num_cores = len(machine.cores(frozenset(binding.cpus)))
    around = [node for node, cpus in nodes.items() if cpus.issuperset(binding.cpus)]
    if binding.cpus and len(around) == 1 and len(nodes) > 1:
        binding.node = around[0]
    _choose_adapters(binding, machine, seat, seats)
    return binding


def _choose_adapters(binding: Binding, machine: Machine, rank: int, size: int) -> None:
    nearest = [machine.nearest_adapters(other) for other in range(size)]
    used: Counter[str] = Counter()
    for candidates in nearest[: rank + 1]:  # ranks before this one choose first
        binding.adapter = min(candidates, key=lambda name: used[name], default="")
        used[binding.adapter] += 1


def share(cores: Sequence[list[int]], part: int, parts: int) -> list[int]:
    """Return the CPUs of a part of whole cores; the parts differ by at most one core."""
    mine = cores[len(cores) * part // parts : len(cores) * (part + 1) // parts]
    return sorted(cpu for core in mine for cpu in core)


def local_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (local rank, ranks on this host); (0, 1) without a launcher."""
    # torchrun's ranks inherit the variables of the srun or mpirun that started it.
    names = ["LOCAL_RANK"] if "TORCHELASTIC_RUN_ID" in environment else [*LOCAL_RANK]
    for name in names:
        if name in environment:
            size = LOCAL_RANK[name]
            rank, sizes = int(environment[name]), counts(environment.get(size, ""))
            host = int(environment.get("SLURM_NODEID", 0)) if len(sizes) > 1 else 0
            return rank, max([rank + 1, *sizes[host : host + 1]])
    return 0, 1


def counts(text: str) -> list[int]:
    """Read Slurm's list of a number for each host: 4(x2),3 stands for 4, 4 and 3; 8 for 8."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found


def visible_gpus(answer: str, visible: str | None) -> tuple[str, ...]:
    """Return the PCI addresses in the answer to QUERY, chosen and ordered by CUDA_VISIBLE_DEVICES."""
    rows = [[column.strip() for column in line.split(",")] for line in answer.splitlines() if line.count(",") == 2]
    # PCI domains have 8 digits in nvidia-smi's answer, and 4 in sysfs.
    addresses = {index: bus[-12:].lower() for index, bus, _ in rows}
    if visible is None:
        return tuple(addresses.values())
    names = [name.strip() for name in visible.split(",") if name.strip()]
    by_uuid = {name: addresses[index] for name in names for index, _, uuid in rows if uuid.startswith(name)}
    return tuple(addresses.get(name) or by_uuid.get(name, "") for name in names)


def numbers(text: str) -> list[int]:
    """Read a list of CPUs: 0-2,8 stands for 0, 1, 2 and 8."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return found


def ranges(cpus: Iterable[int]) -> str:
    """Write a list of CPUs: 0, 1, 2 and 8 become 0-2,8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def this_machine(environment: Mapping[str, str]) -> Machine:
    """Read this machine, or another one from the records in SYSFS and GPUS."""
    if recorded := environment.get("SYSFS"):
        allowed = numbers((Path(recorded) / "devices/system/cpu/online").read_text())
    else:
        allowed = list(os.sched_getaffinity(0))
    recorded_gpus = environment.get("GPUS")
    answer = Path(recorded_gpus).read_text() if recorded_gpus else ask_gpus()
    gpus = visible_gpus(answer, environment.get("CUDA_VISIBLE_DEVICES"))
    return Machine(Path(recorded or "/sys"), frozenset(allowed), gpus)


def ask_gpus() -> str:
    """Return nvidia-smi's answer, empty if it is not there; exit if it does not answer in time."""
    if shutil.which(QUERY[0]) is None:
        return ""
    asked = subprocess.Popen(QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        return asked.communicate(timeout=QUERY_LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        asked.kill()  # do not wait for it: a process inside a broken driver cannot die
        sys.exit(
            f"bind.sh: nvidia-smi on {socket.gethostname()} gave no answer in {QUERY_LIMIT_S} s: "
            "look for NVRM and Xid in dmesg, and leave this host out of the job until it answers."
        )


def describe(binding: Binding, rank: int, size: int) -> str:
    parts = [binding.gpu] if binding.gpu else []
    if binding.cpus:
        parts.append(f"CPUs {ranges(binding.cpus)}")
    if binding.node >= 0:
        parts.append(f"memory of node {binding.node}")
    if binding.adapter:
        parts.append(f"adapter {binding.adapter}")
    return f"bind.sh: {socket.gethostname()} local rank {rank} of {size}: {'; '.join(parts + binding.notes)}"


def memory_command(binding: Binding) -> list[str]:
    """Return the words before a command that bind its memory, or note why that is impossible."""
    if binding.node < 0:
        return []
    command = ["numactl", f"--membind={binding.node}"]
    if shutil.which("numactl") is None:
        binding.notes.append("memory is not bound: there is no numactl")
    elif subprocess.run([*command, "true"], capture_output=True).returncode:  # containers often forbid it
        binding.notes.append(f"memory is not bound: {' '.join(command)} is refused here")
    else:
        return command
    binding.node = -1
    return []


def settings(binding: Binding, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set, apart from those of the user."""
    found = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # number GPUs as nvidia-smi does; CUDA by itself puts faster GPUs first
    if binding.adapter:
        found["UCX_NET_DEVICES"] = binding.adapter
    if binding.cpus:  # a thread that waits in MPI gives up its core only if the rank has no second one
        found["OMPI_MCA_mpi_yield_when_idle"] = str(int(binding.num_cores < 2))
    return {name: value for name, value in found.items() if name not in environment}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line; return only from a dry run."""
    parser = argparse.ArgumentParser(prog="bind.sh", description="Bind a rank near its GPU, then run a command.")
    parser.add_argument("--dry-run", action="store_true", help="print the binding, and run nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its options")
    options = parser.parse_args(argv)
    if not options.command and not options.dry_run:
        parser.error("no command was given: say what to run after the options")
    if "SYSFS" in os.environ and not options.dry_run:
        parser.error("SYSFS describes another machine: give --dry-run, or unset it")
    machine, (rank, size) = this_machine(os.environ), local_rank(os.environ)
    binding = plan(machine, rank, size)
    command = [*([] if "SYSFS" in os.environ else memory_command(binding)), *options.command]
    if options.dry_run:
        print(describe(binding, rank, size), flush=True)
        return
    if rank == 0:  # one line for each host: its other ranks are bound by the same plan
        print(describe(binding, rank, size), file=sys.stderr, flush=True)
    if binding.cpus:
        os.sched_setaffinity(0, binding.cpus)
    os.environ.update(settings(binding, os.environ))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"bind.sh: {command[0]}: {error.strerror}")


def text_of(path: Path, otherwise: str = "") -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return otherwise


def _natural(name: Path | str) -> tuple[str, int]:
    """Return a key that sorts mlx5_2 before mlx5_10."""
    text = str(name)
    digits = re.search(r"\d*$", text)
    number = digits.group() if digits else ""
    return text.removesuffix(number), int(number or 0)


if __name__ == "__main__":
    main()
