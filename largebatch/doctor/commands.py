"""The commands that start ranks on several hosts, for the MPI that is found: what --print shows and --hosts runs.

Why each option is there:

    mapping      ranks of one host lie together, as the host list says; binding is left to mpi_scripts/bind.sh,
                 since mpirun by itself binds every rank to one core, threads and all
    interface    MPI, NCCL and Gloo each choose one by themselves, often docker0, and then hang
    keepalives   Open MPI notices a lost host after 8 minutes otherwise, ssh never; with these after 30 s
    -x           only the variables that the ranks need: the whole environment takes secrets and odd settings along
    whole path   with it, mpirun finds its own parts on the other hosts, whatever PATH is there
"""

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from largebatch.doctor.hosts import Host, Network
from largebatch.doctor.result import INSTALL, run

# Those of the caller's variables that ranks on other hosts need; not what tells a rank its own number.
TRAVELS = re.compile(
    r"HOROVOD_(?!RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|CONTROLLER|GLOO_RENDEZVOUS)|NCCL_|"
    r"(OMP_NUM_THREADS|LD_LIBRARY_PATH|PYTHONPATH|CUDA_VISIBLE_DEVICES)$"
)
# As in mpi_scripts/install.sh, which says why 30 s; an MPI that it did not set up is told here.
KEEPALIVES = {"oob_tcp_keepalive_time": "10", "oob_tcp_keepalive_intvl": "5", "oob_tcp_keepalive_probes": "4"}
SSH_OPTIONS = "-o ServerAliveInterval=10 -o ServerAliveCountMax=3"
EXCLUDED = "lo,docker0,virbr0"
BIND = Path(__file__).parents[2] / "mpi_scripts" / "bind.sh"


@dataclass(frozen=True)
class Mpi:
    """A launcher: which MPI, its major version and the whole path of its mpirun."""

    name: str
    major: int
    launcher: str

    @property
    def is_open_mpi(self) -> bool:
        return self.name == "Open MPI"

    @property
    def prefix(self) -> str:
        """The folder where it was installed."""
        return str(Path(self.launcher).parent.parent)

    def __str__(self) -> str:
        return f"{self.name} {self.major}, {self.launcher}"


def detect_mpi(*, limit_s: float = 60) -> Mpi:
    """The MPI of the mpirun on PATH. Raises ValueError where there is none, or none that is known."""
    launcher = shutil.which("mpirun")
    if launcher is None:
        raise ValueError(f"mpirun is not on PATH; activate the environment that {INSTALL} made")
    output = run([launcher, "--version"], limit_s=limit_s)
    return Mpi(*recognise(output.stdout + output.stderr), os.path.abspath(launcher))


def recognise(text: str) -> tuple[str, int]:
    """Name and major version, from what mpirun --version prints. Raises ValueError for an unknown MPI."""
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
    """What ranks get: a value that we recommend, or None to hand on the caller's own."""
    sockets = f"={','.join(network.names)}" if network else "^lo,docker,virbr"
    given: dict[str, str | None] = {"NCCL_SOCKET_IFNAME": sockets, "PYTHONUNBUFFERED": "1"}
    return given | {name: None for name in sorted(os.environ) if TRAVELS.match(name)}


def host_list(hosts: tuple[Host, ...]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def options(prefix: str, values: dict[str, str]) -> list[str]:
    """["--mca", "name", "value", ...]"""
    return [word for name, value in values.items() for word in (prefix, name, value)]


def interface_options(mpi: Mpi, network: Network | None) -> list[str]:
    """Which interface Open MPI uses: for the messages of ranks (btl), and for its daemons (oob), in that order."""
    which, value = ("include", network.selector) if network else ("exclude", EXCLUDED)
    daemons = f"oob_tcp_if_{which}" if mpi.major < 5 else f"prte_if_{which}"
    return ["--mca", f"btl_tcp_if_{which}", value, "--mca" if mpi.major < 5 else "--prtemca", daemons, value]


def endurance_options(mpi: Mpi, *, ssh: bool = True) -> list[str]:
    """What makes Open MPI's daemons notice, within seconds, that a host or a cable is gone."""
    of_daemons, agent = ("--mca", "plm_rsh_args") if mpi.major < 5 else ("--prtemca", "plm_ssh_args")
    return options(of_daemons, KEEPALIVES | ({agent: SSH_OPTIONS} if ssh else {}))


def transport_options(mpi: Mpi) -> list[str]:
    """TCP and shared memory, as horovodrun asks for: what is chosen by interface has no effect on other transports."""
    return ["--mca", "pml", "ob1", "--mca", "btl", "^openib,ofi" if mpi.major < 5 else "^ofi"]


def mpirun(
    mpi: Mpi, hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None, ssh: bool = True
) -> list[str]:
    """The whole command; without ssh it is for an allocation of Slurm's, which knows the hosts itself."""
    if not mpi.is_open_mpi:
        return mpiexec(mpi, hosts, ranks, program, network=network)
    passed = []
    for name, value in variables(network).items():
        passed += ["-x", name if value is None else f"{name}={value}"]
    where = ["-np", str(ranks), "-H", host_list(hosts)] if ssh else []
    placed = ["--map-by", "slot", "--bind-to", "none"]
    ours = [*transport_options(mpi), *interface_options(mpi, network), *endurance_options(mpi, ssh=ssh)]
    return [mpi.launcher, *where, *placed, *ours, *passed, *program]


def mpiexec(
    mpi: Mpi, hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None
) -> list[str]:
    """For MPICH and Intel MPI, whose launcher is Hydra: it takes ssh's options from a variable."""
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
    """Horovod's own launcher over mpirun. It asks for no binding itself, and hands on the whole environment."""
    command = ["horovodrun", "-np", str(ranks), "-H", host_list(hosts)]
    if network:
        command += ["--network-interfaces", ",".join(network.names)]
    if mpi.is_open_mpi:
        daemons = interface_options(mpi, network)[3:]
        extra = ["--prefix", mpi.prefix, *daemons, *endurance_options(mpi)]
        command += [f"--mpi-args={shlex.join(extra)}"]
    return [*command, *program]


def horovodrun_gloo(
    hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None
) -> list[str]:
    """Without MPI. The time limit ends the job when a host is lost."""
    command = ["horovodrun", "--gloo", "-np", str(ranks), "-H", host_list(hosts), "--gloo-timeout-seconds", "30"]
    if network:
        command += ["--network-interfaces", ",".join(network.names)]
    return [*command, *program]


def slurm_size(hosts: tuple[Host, ...], ranks: int) -> list[str]:
    """Nodes and ranks, and ranks per node where that is one number."""
    size = [f"--nodelist={','.join(host.name for host in hosts)}", f"--nodes={len(hosts)}", f"--ntasks={ranks}"]
    even = len({host.slots for host in hosts}) == 1 and ranks == sum(host.slots for host in hosts)
    return [*size, f"--ntasks-per-node={hosts[0].slots}"] if even else size


def srun(hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None) -> list[str]:
    """Slurm starts the ranks: for an MPI that was built with PMIx, and a Slurm that has it (srun --mpi=list)."""
    values = variables(network)
    kept = ["PATH", "HOME", *[name for name, value in values.items() if value is None]]
    own = ["env", *[f"{name}={value}" for name, value in values.items() if value is not None]]  # may hold commas
    launcher = ["srun", *slurm_size(hosts, ranks), "--mpi=pmix", "--cpu-bind=none", f"--export={','.join(kept)}"]
    return [*launcher, *own, *program]


def sbatch(
    mpi: Mpi, hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None
) -> list[str]:
    """A job in which mpirun starts the ranks: works with any Slurm."""
    inner = mpirun(mpi, hosts, ranks, program, network=network, ssh=not mpi.is_open_mpi)
    return ["sbatch", *slurm_size(hosts, ranks), "--exclusive", f"--wrap={shlex.join(inner)}"]


def default_program() -> list[str]:
    return [sys.executable, "-m", "largebatch.train", "--model", "vit_b32"]


def bound(program: list[str]) -> list[str]:
    """The program behind the script that binds each rank, where there is one."""
    return [str(BIND), *program] if BIND.exists() else program


def recommend(
    mpi: Mpi, hosts: tuple[Host, ...], ranks: int, program: list[str], *, network: Network | None
) -> dict[str, list[str]]:
    """Every command, by what it is called."""
    program = bound(program)
    return {
        "mpirun": mpirun(mpi, hosts, ranks, program, network=network),
        "horovodrun": horovodrun(mpi, hosts, ranks, program, network=network),
        "horovodrun --gloo": horovodrun_gloo(hosts, ranks, program, network=network),
        "srun": srun(hosts, ranks, program, network=network),
        "sbatch": sbatch(mpi, hosts, ranks, program, network=network),
    }
