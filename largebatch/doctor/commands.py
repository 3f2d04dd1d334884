"""The commands that start ranks on several hosts. --print shows them and --hosts runs them.

The reason for each option:

    mapping      the ranks of a host are neighbours; mpi_scripts/bind.sh binds them, because mpirun would bind all
                 threads of a rank to one core
    interface    MPI, NCCL and Gloo often choose docker0 by themselves, and hang
    no transport MPI takes the transport of training: UCX where it has it, otherwise TCP and shared memory
    keepalives   Open MPI and ssh notice a lost host after 30 s, not after 8 minutes or never
    -x           only variables that the ranks need are handed on: others may hold secrets
    full path    mpirun finds its own programs on the other hosts, whatever their PATH is
"""

import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from largebatch.doctor.hosts import Hosts, Network, is_here
from largebatch.doctor.result import run

# The caller's variables that ranks on other hosts need, without those that tell a rank its own number.
TRAVELS = re.compile(
    r"HOROVOD_(?!RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|CONTROLLER|GLOO_RENDEZVOUS)|NCCL_|"
    r"(OMP_NUM_THREADS|LD_LIBRARY_PATH|PYTHONPATH|CUDA_VISIBLE_DEVICES)$"
)
# The same values as in mpi_scripts/install.sh, which explains the 30 s; here for an MPI that it did not install.
KEEPALIVES = {"oob_tcp_keepalive_time": "10", "oob_tcp_keepalive_intvl": "5", "oob_tcp_keepalive_probes": "4"}
SSH_OPTIONS = "-o ServerAliveInterval=10 -o ServerAliveCountMax=3"
EXCLUDED = "lo,docker0,virbr0"
BIND = Path(__file__).parents[2] / "mpi_scripts" / "bind.sh"


@dataclass(frozen=True)
class Mpi:
    """An MPI: its name, its major version and the full path of its mpirun."""

    name: str
    major: int
    launcher: str

    @property
    def is_open_mpi(self) -> bool:
        return self.name == "Open MPI"

    def __str__(self) -> str:
        return f"{self.name} {self.major}, {self.launcher}"


def detect_mpi(*, limit_s: float = 60) -> Mpi:
    """Return the MPI of the mpirun on PATH; ValueError if there is none or it is unknown."""
    launcher = shutil.which("mpirun")
    if launcher is None:
        raise ValueError("mpirun is not on PATH; activate the environment that install.sh made, with Horovod")
    output = run([launcher, "--version"], limit_s=limit_s)
    return Mpi(*recognise(output.stdout + output.stderr), os.path.abspath(launcher))


def recognise(text: str) -> tuple[str, int]:
    """Return name and major version from the output of mpirun --version; ValueError for an unknown MPI."""
    patterns = {
        "Open MPI": r"Open MPI\D*(\d+)\.",
        "Intel MPI": r"Intel\(R\) MPI Library\D*(\d+)",
        "MPICH": r"HYDRA build details:\s+Version:\s+(\d+)\.",
    }
    for name, pattern in patterns.items():
        if found := re.search(pattern, text):
            return name, int(found[1])
    first = (text.strip().splitlines() or ["nothing"])[0]
    raise ValueError(f"mpirun --version says {first!r}, which is not Open MPI, MPICH or Intel MPI; use one of them")


def variables(network: Network | None) -> dict[str, str | None]:
    """Return the variables of the ranks; None hands on the caller's value."""
    sockets = f"={','.join(network.names)}" if network else "^lo,docker,virbr"
    given: dict[str, str | None] = {"NCCL_SOCKET_IFNAME": sockets, "PYTHONUNBUFFERED": "1"}
    return given | {name: None for name in sorted(os.environ) if TRAVELS.match(name)}


def host_list(hosts: Hosts) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def options(prefix: str, values: dict[str, str]) -> list[str]:
    return [word for name, value in values.items() for word in (prefix, name, value)]


def interface_options(mpi: Mpi, network: Network | None) -> list[str]:
    """Return the options for Open MPI's interfaces: of the ranks' messages (btl), then of its daemons (oob)."""
    which, value = ("include", network.selector) if network else ("exclude", EXCLUDED)
    daemons = f"oob_tcp_if_{which}" if mpi.major < 5 else f"prte_if_{which}"
    return ["--mca", f"btl_tcp_if_{which}", value, "--mca" if mpi.major < 5 else "--prtemca", daemons, value]


def endurance_options(mpi: Mpi, *, ssh: bool = True) -> list[str]:
    """Return the options with which Open MPI's daemons soon notice that a host or a cable is lost."""
    of_daemons, agent = ("--mca", "plm_rsh_args") if mpi.major < 5 else ("--prtemca", "plm_ssh_args")
    return options(of_daemons, KEEPALIVES | ({agent: SSH_OPTIONS} if ssh else {}))


def mpirun(
    mpi: Mpi, hosts: Hosts, ranks: int, program: list[str], *, network: Network | None, ssh: bool = True
) -> list[str]:
    """Return the mpirun command; ssh=False for a Slurm allocation, which knows its hosts."""
    if not mpi.is_open_mpi:
        return mpiexec(mpi, hosts, ranks, program, network=network)
    passed = []
    for name, value in variables(network).items():
        passed += ["-x", name if value is None else f"{name}={value}"]
    where = ["-np", str(ranks), "-H", host_list(hosts)] if ssh else []
    placed = ["--map-by", "slot", "--bind-to", "none"]
    ours = [*interface_options(mpi, network), *endurance_options(mpi, ssh=ssh)]
    return [mpi.launcher, *where, *placed, *ours, *passed, *program]


def mpiexec(mpi: Mpi, hosts: Hosts, ranks: int, program: list[str], *, network: Network | None) -> list[str]:
    """Return the command for MPICH and Intel MPI. Their launcher, Hydra, takes the options of ssh from a variable."""
    values = variables(network)
    own = [word for name, value in values.items() if value is not None for word in ("-genv", name, value)]
    kept = ["PATH", "HOME", *[name for name, value in values.items() if value is None]]
    interface = ["-iface", network.names[0]] if network and len(network.names) == 1 else []
    where = ["-n", str(ranks), "-hosts", host_list(hosts), "-bind-to", "none", *interface]
    launcher = [f"HYDRA_LAUNCHER_EXTRA_ARGS={SSH_OPTIONS}", mpi.launcher]
    return ["env", *launcher, *where, "-genvlist", ",".join(kept), *own, *program]


def horovodrun(mpi: Mpi, hosts: Hosts, ranks: int, program: list[str], *, network: Network | None) -> list[str]:
    """Return the command of Horovod's launcher over mpirun, which hands on the whole environment."""
    command = ["horovodrun", "-np", str(ranks), "-H", host_list(hosts), *horovod_interfaces(hosts, network)]
    if mpi.is_open_mpi:
        daemons = interface_options(mpi, network)[3:]
        extra = ["--prefix", str(Path(mpi.launcher).parent.parent), *daemons, *endurance_options(mpi)]
        command += [f"--mpi-args={shlex.join(extra)}"]
    return [*command, *program]


def horovodrun_gloo(hosts: Hosts, ranks: int, program: list[str], *, network: Network | None) -> list[str]:
    """Return the command of Horovod's launcher without MPI; its time limit ends the job if a host is lost."""
    command = ["horovodrun", "--gloo", "-np", str(ranks), "-H", host_list(hosts), "--gloo-timeout-seconds", "30"]
    return [*command, *horovod_interfaces(hosts, network), *program]


def horovod_interfaces(hosts: Hosts, network: Network | None) -> list[str]:
    """Return Horovod's option for the interfaces, which it refuses if all ranks are on this host."""
    if network is None or all(is_here(host.name) for host in hosts):
        return []
    return ["--network-interfaces", ",".join(network.names)]


def slurm_size(hosts: Hosts, ranks: int) -> list[str]:
    size = [f"--nodelist={','.join(host.name for host in hosts)}", f"--nodes={len(hosts)}", f"--ntasks={ranks}"]
    even = len({host.slots for host in hosts}) == 1 and ranks == sum(host.slots for host in hosts)
    return [*size, f"--ntasks-per-node={hosts[0].slots}"] if even else size


def srun(hosts: Hosts, ranks: int, program: list[str], *, network: Network | None) -> list[str]:
    """Return the srun command; MPI and Slurm must have PMIx (see srun --mpi=list)."""
    values = variables(network)
    kept = ["PATH", "HOME", "SLURM_PMIX_FENCE=tree", *[name for name, value in values.items() if value is None]]
    # train_slurm.sbatch says why tree and --wait. Values are not in --export, which would split them at commas.
    own = ["env", *[f"{name}={value}" for name, value in values.items() if value is not None]]
    options = ["--mpi=pmix", "--cpu-bind=none", "--wait=300", f"--export={','.join(kept)}"]
    return ["srun", *slurm_size(hosts, ranks), *options, *own, *program]


def sbatch(mpi: Mpi, hosts: Hosts, ranks: int, program: list[str], *, network: Network | None) -> list[str]:
    """Return the command for a job in which mpirun starts the ranks, with any Slurm."""
    inner = mpirun(mpi, hosts, ranks, program, network=network, ssh=not mpi.is_open_mpi)
    return ["sbatch", *slurm_size(hosts, ranks), "--exclusive", f"--wrap={shlex.join(inner)}"]


def recommend(
    mpi: Mpi, hosts: Hosts, ranks: int, program: list[str], *, network: Network | None
) -> dict[str, list[str]]:
    if BIND.exists():
        program = [str(BIND), *program]
    return {
        "mpirun": mpirun(mpi, hosts, ranks, program, network=network),
        "horovodrun": horovodrun(mpi, hosts, ranks, program, network=network),
        "horovodrun --gloo": horovodrun_gloo(hosts, ranks, program, network=network),
        "srun": srun(hosts, ranks, program, network=network),
        "sbatch": sbatch(mpi, hosts, ranks, program, network=network),
    }
