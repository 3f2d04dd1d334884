"""The commands that start ranks on several hosts with the MPI that is found. --print shows them and --hosts runs them.

The reason for each option:

    mapping      the ranks of a host are neighbours, in the order of the host list; mpi_scripts/bind.sh does the
                 binding, because mpirun would bind every rank with all its threads to one core
    interface    MPI, NCCL and Gloo each choose an interface by themselves, often docker0, and then hang
    no transport MPI takes what it takes in training: UCX where it has it, otherwise TCP and shared memory
    keepalives   with them, Open MPI and ssh notice a lost host after 30 s, not after 8 minutes or never
    -x           hands on only the variables that the ranks need; the whole environment may hold secrets
    full path    with it, mpirun finds its own programs on the other hosts, whatever their PATH is
"""

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from largebatch.doctor.hosts import Host, Network, is_here
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
    """A launcher: the name of its MPI, the major version and the full path of mpirun."""

    name: str
    major: int
    launcher: str

    @property
    def is_open_mpi(self) -> bool:
        return self.name == "Open MPI"

    @property
    def prefix(self) -> str:
        """The folder where the MPI is installed."""
        return str(Path(self.launcher).parent.parent)

    def __str__(self) -> str:
        return f"{self.name} {self.major}, {self.launcher}"


def detect_mpi(*, limit_s: float = 60) -> Mpi:
    """Return the MPI of the mpirun on PATH. Raises ValueError if there is no mpirun or its MPI is unknown."""
    launcher = shutil.which("mpirun")
    if launcher is None:
        raise ValueError("mpirun is not on PATH; activate the environment that install.sh made")
    output = run([launcher, "--version"], limit_s=limit_s)
    return Mpi(*recognise(output.stdout + output.stderr), os.path.abspath(launcher))


def recognise(text: str) -> tuple[str, int]:
    """Return name and major version from the output of mpirun --version. Raises ValueError for an unknown MPI."""
    patterns = {
        "Open MPI": r"Open MPI\D*(\d+)\.",
        "Intel MPI": r"Intel\(R\) MPI Library\D*(\d+)",
        "MPICH": r"HYDRA build details:\s+Version:\s+(\d+)\.",
    }
    for name, pattern in patterns.items():
        found = re.search(pattern, text)
        if found:
            return name, int(found[1])
    first = (text.strip().splitlines() or ["nothing"])[0]
    raise ValueError(f"mpirun --version says {first!r}, which is not Open MPI, MPICH or Intel MPI; use one of them")


def variables(network: Network | None) -> dict[str, str | None]:
    """Return the variables of the ranks: a recommended value, or None to hand on the caller's value."""
    sockets = f"={','.join(network.names)}" if network else "^lo,docker,virbr"
    given: dict[str, str | None] = {"NCCL_SOCKET_IFNAME": sockets, "PYTHONUNBUFFERED": "1"}
    return given | {name: None for name in sorted(os.environ) if TRAVELS.match(name)}


def host_list(hosts: tuple[Host, ...]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def options(prefix: str, values: dict[str, str]) -> list[str]:
    """Return ["--mca", "name", "value", ...]."""
    return [word for name, value in values.items() for word in (prefix, name, value)]


def interface_options(mpi: Mpi, network: Network | None) -> list[str]:
    """Return the options for the interface of Open MPI: of the ranks' messages (btl), then of its daemons (oob)."""
    which, value = ("include", network.selector) if network else ("exclude", EXCLUDED)
    daemons = f"oob_tcp_if_{which}" if mpi.major < 5 else f"prte_if_{which}"
    return ["--mca", f"btl_tcp_if_{which}", value, "--mca" if mpi.major < 5 else "--prtemca", daemons, value]


def endurance_options(mpi: Mpi, *, ssh: bool = True) -> list[str]:
    """Return the options that let Open MPI's daemons notice within seconds that a host or a cable is lost."""
    of_daemons, agent = ("--mca", "plm_rsh_args") if mpi.major < 5 else ("--prtemca", "plm_ssh_args")
    return options(of_daemons, KEEPALIVES | ({agent: SSH_OPTIONS} if ssh else {}))


def mpirun(
    mpi: Mpi, hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None, ssh: bool = True
) -> list[str]:
    """Return the mpirun command. Without ssh it is for a Slurm allocation, which knows the hosts itself."""
    if not mpi.is_open_mpi:
        return mpiexec(mpi, hosts, ranks, program, network=network)
    passed = []
    for name, value in variables(network).items():
        passed += ["-x", name if value is None else f"{name}={value}"]
    where = ["-np", str(ranks), "-H", host_list(hosts)] if ssh else []
    placed = ["--map-by", "slot", "--bind-to", "none"]
    ours = [*interface_options(mpi, network), *endurance_options(mpi, ssh=ssh)]
    return [mpi.launcher, *where, *placed, *ours, *passed, *program]


def mpiexec(
    mpi: Mpi, hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None
) -> list[str]:
    """Return the command for MPICH and Intel MPI. Their launcher, Hydra, takes the options of ssh from a variable."""
    values = variables(network)
    own = [word for name, value in values.items() if value is not None for word in ("-genv", name, value)]
    kept = ["PATH", "HOME", *[name for name, value in values.items() if value is None]]
    interface = ["-iface", network.names[0]] if network and len(network.names) == 1 else []
    where = ["-n", str(ranks), "-hosts", host_list(hosts), "-bind-to", "none", *interface]
    launcher = [f"HYDRA_LAUNCHER_EXTRA_ARGS={SSH_OPTIONS}", mpi.launcher]
    return ["env", *launcher, *where, "-genvlist", ",".join(kept), *own, *program]


def horovodrun(
    mpi: Mpi, hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None
) -> list[str]:
    """Return the command of Horovod's launcher over mpirun. It binds no rank and hands on the whole environment."""
    command = ["horovodrun", "-np", str(ranks), "-H", host_list(hosts), *horovod_interfaces(hosts, network)]
    if mpi.is_open_mpi:
        daemons = interface_options(mpi, network)[3:]
        extra = ["--prefix", mpi.prefix, *daemons, *endurance_options(mpi)]
        command += [f"--mpi-args={shlex.join(extra)}"]
    return [*command, *program]


def horovodrun_gloo(
    hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None
) -> list[str]:
    """Return the command of Horovod's launcher without MPI. Its time limit ends the job if a host is lost."""
    command = ["horovodrun", "--gloo", "-np", str(ranks), "-H", host_list(hosts), "--gloo-timeout-seconds", "30"]
    return [*command, *horovod_interfaces(hosts, network), *program]


def horovod_interfaces(hosts: tuple[Host, ...], network: Network | None) -> list[str]:
    """Return Horovod's option for the interfaces. It refuses it where all ranks are on this host, over loopback."""
    if network is None or all(is_here(host.name) for host in hosts):
        return []
    return ["--network-interfaces", ",".join(network.names)]


def slurm_size(hosts: tuple[Host, ...], ranks: int) -> list[str]:
    """Return the options for nodes and ranks, and for ranks per node if all nodes have the same number."""
    size = [f"--nodelist={','.join(host.name for host in hosts)}", f"--nodes={len(hosts)}", f"--ntasks={ranks}"]
    even = len({host.slots for host in hosts}) == 1 and ranks == sum(host.slots for host in hosts)
    return [*size, f"--ntasks-per-node={hosts[0].slots}"] if even else size


def srun(hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None) -> list[str]:
    """Return the srun command. MPI must be built with PMIx, and Slurm must have it (see srun --mpi=list)."""
    values = variables(network)
    kept = ["PATH", "HOME", *[name for name, value in values.items() if value is None]]
    # Not in --export, which would split values at commas.
    own = ["env", *[f"{name}={value}" for name, value in values.items() if value is not None]]
    launcher = ["srun", *slurm_size(hosts, ranks), "--mpi=pmix", "--cpu-bind=none", f"--export={','.join(kept)}"]
    return [*launcher, *own, *program]


def sbatch(
    mpi: Mpi, hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None
) -> list[str]:
    """Return the command for a job in which mpirun starts the ranks. It works with any Slurm."""
    inner = mpirun(mpi, hosts, ranks, program, network=network, ssh=not mpi.is_open_mpi)
    return ["sbatch", *slurm_size(hosts, ranks), "--exclusive", f"--wrap={shlex.join(inner)}"]


def default_program() -> list[str]:
    return [sys.executable, "-m", "largebatch.train", "--model", "vit_b32"]


def bound(program: list[str]) -> list[str]:
    """Return the program behind bind.sh, the script that binds each rank, if that script exists."""
    return [str(BIND), *program] if BIND.exists() else program


def recommend(
    mpi: Mpi, hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None
) -> dict[str, list[str]]:
    """Return every command by its name."""
    program = bound(program)
    return {
        "mpirun": mpirun(mpi, hosts, ranks, program, network=network),
        "horovodrun": horovodrun(mpi, hosts, ranks, program, network=network),
        "horovodrun --gloo": horovodrun_gloo(hosts, ranks, program, network=network),
        "srun": srun(hosts, ranks, program, network=network),
        "sbatch": sbatch(mpi, hosts, ranks, program, network=network),
    }
