"""A real Slurm on the hosts of hosts.py: munged and slurmctld on the first, slurmd on each, 4 CPUs a node.

Two partitions hold the same nodes: "main", the default, and "urgent", whose jobs preempt and requeue those of main,
after their signal (sbatch --signal) and 30 s of grace. Ports need no choosing: the hosts have their own network.
"""

import re
import shutil
from pathlib import Path

from hosts import PATH, Hosts, Job, wait_for

TOOLS = "munged slurmctld slurmd srun sbatch scontrol scancel squeue".split()
CONFIG = """
ClusterName=test
SlurmctldHost=h1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job is held back (120 s by default)
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# sched_interval: a requeued job becomes eligible without an event, and is then looked for every 60 s by default
SchedulerParameters=sched_min_interval=100000,sched_interval=2,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
# two cores pose as four CPUs of each node
SlurmdParameters=config_overrides
# the nodes share /tmp, and Slurm's PMIx makes a folder of one name in it
TmpFS={folder}/tmp.%n
# where ranks take all cores, daemons answer late: a node that is silent for so long is lost
SlurmdTimeout=20
MessageTimeout=30
KillWait=5
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def missing() -> str:
    """Why there can be no Slurm here, with the remedy; empty when there can."""
    tools = [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]
    return f"missing {', '.join(tools)}: run tests/cluster/install.sh as root" if tools else ""


class Slurm:
    """The cluster of Slurm; `ready` starts what is not running and clears what an earlier test left."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "slurm"
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.daemons: dict[str, tuple[str, Job]] = {}       # name: (host, running command)
        for folder in ["", "state", "munge", *hosts.names, *[f"tmp.{name}" for name in hosts.names]]:
            (self.folder / folder).mkdir()
        nodes = [f"NodeName={name} NodeAddr={name} CPUs=4 RealMemory=4000 State=UNKNOWN" for name in hosts.names]
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, nodes="\n".join(nodes)))
        # proctrack/linuxproc needs no control groups, but slurmd looks for them all the same
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def ready(self, timeout_s: float = 120) -> None:
        """Start the daemons that do not run, cancel every job, and wait until all nodes are idle.

        Slurm may look only once a minute for a job whose processes were killed.
        """
        munge = self.folder / "munge"
        key = self.folder / "munge.key"
        if not key.exists():
            key.write_bytes(b"largebatch" * 100)    # a secret only by name: the network is our own
            key.chmod(0o400)
        files = {"key-file": key, "pid-file": munge / "pid", "log-file": munge / "log", "seed-file": munge / "seed"}
        options = [f"--{name}={file}" for name, file in files.items()]
        socket = f"--socket={self.folder}/munge.socket"
        self._daemon("munged", "h1", ["munged", "--foreground", "--force", socket, *options])
        wait_for((self.folder / "munge.socket").exists, "munged", 30)
        self._daemon("slurmctld", "h1", ["slurmctld", "-D"])
        for name in self.hosts.names:
            self._daemon(f"slurmd {name}", name, ["slurmd", "-D", "-N", name])
        try:
            wait_for(lambda: self._call("scancel", "--user=root") is not None, "slurmctld", timeout_s)
            wait_for(self._all_idle, f"{len(self.hosts.names)} idle nodes", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None
        self.hosts.adopt()

    def run(
        self, command: list[str], *, timeout_s: float = 120, environment: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """Run a command on h1, the login node, e.g. ["srun", "-N", "2", "hostname"]; (exit code, output)."""
        return self.hosts.run("h1", command, timeout_s=timeout_s, environment=self.environment | (environment or {}))

    def start(self, command: list[str], *, environment: dict[str, str] | None = None) -> Job:
        """Start a command on h1; see Hosts.start."""
        return self.hosts.start("h1", command, environment=self.environment | (environment or {}))

    def sbatch(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        """Submit a batch job with the arguments of sbatch, the script among them; its number."""
        code, output = self.run(["sbatch", "--parsable", *arguments], timeout_s=20, environment=environment)
        assert code == 0 and re.fullmatch(r"\d+", output.strip()), output
        return output.strip()

    def wait_for_state(self, job: str, *states: str, timeout_s: float = 60) -> dict[str, str]:
        """Wait until a job is in one of these states, e.g. RUNNING; what scontrol then knows of it, e.g. ExitCode.

        Where ranks take all cores, slurmctld may not answer in time: it is asked again.
        """
        seen: dict[str, str] = {}

        def reached() -> bool:
            seen.update(re.findall(r"(\S+?)=(\S*)", self._call("scontrol", "-o", "show", "job", job) or ""))
            return seen.get("JobState") in states

        try:
            wait_for(reached, f"job {job} {' or '.join(states)}", timeout_s, every_s=0.2)
        except AssertionError as error:
            output = Path(seen.get("StdOut", ""))
            printed = output.read_text(errors="replace") if output.is_file() else ""
            raise AssertionError(f"{error}; it is {seen}\n{self.logs()}\nIt printed:\n{printed}") from None
        return seen

    def wait(self, job: str, *, timeout_s: float = 120) -> tuple[str, int]:
        """Wait until a job has ended for good; (its state, e.g. COMPLETED, and its exit code)."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
        seen = self.wait_for_state(job, *ends, timeout_s=timeout_s)
        return seen["JobState"], int(seen["ExitCode"].split(":")[0])

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        files = [*self.folder.glob("*.log"), *[job.file for _, job in self.daemons.values()]]
        return "\n".join(f"-- {file.name}:\n{file.read_text(errors='replace')[-2000:]}" for file in files)

    def _daemon(self, name: str, host: str, command: list[str]) -> None:
        if name in self.daemons and self.daemons[name][1].process.poll() is None:
            return
        self.daemons[name] = host, self.hosts.start(host, command, environment=self.environment)

    def _call(self, *command: str) -> str | None:
        code, output = self.run(list(command), timeout_s=60)
        return output if code == 0 else None

    def _all_idle(self) -> bool:
        for name, (host, job) in self.daemons.items():
            assert job.process.poll() is None, f"{name} ended on {host}:\n{job.output}"
        nodes = self._call("scontrol", "-o", "show", "node") or ""
        states = dict(re.findall(r"NodeName=(\S+).*? State=(\S+)", nodes))
        for name, state in states.items():
            if "DRAIN" in state or "DOWN" in state:
                self._call("scontrol", "update", f"NodeName={name}", "State=RESUME")
        return [state for state in states.values()] == ["IDLE"] * len(self.hosts.names)
