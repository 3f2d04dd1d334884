"""The launcher that started this process, and the rank that it gave to it.

Each launcher announces rank and size in its own variables, of which `LAUNCHERS` is the table. Horovod reads only some,
and would train alone on every rank if it missed the others. Launchers may be nested: in a Slurm allocation a step with
one task per node starts mpirun, mpiexec or torchrun.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from largebatch.launch.bind import counts

DOCTOR = "run `python -m largebatch.doctor`"
FIRST_RESERVED_STEP = 0xFFFFFFF0  # step ids from here up belong to Slurm itself (batch script, salloc's shell)


@dataclass(frozen=True)
class Launch:
    """The place of this process, as its launcher announced it; None for a number that is missing."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None


@dataclass(frozen=True)
class Variables:
    """The variables of one launcher. Rank and size are always set, the others may be missing."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


MPIRUN = Variables(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPIEXEC = Variables("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
HOROVODRUN = Variables(
    "horovodrun --gloo", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
)
# Slurm gives the local sizes of all hosts in one list.
SRUN = Variables("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
TORCHRUN = Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

LAUNCHERS = (MPIRUN, MPIEXEC, HOROVODRUN, SRUN, TORCHRUN)
MPI_LAUNCHERS = (MPIRUN, MPIEXEC)  # the launchers that belong to an MPI
GLOO_RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
GLOO_SLOT = tuple(
    "HOROVOD_" + name for name in "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME".split()
)


def recognise(environment: Mapping[str, str]) -> Launch:
    """Return the launch of which this process is a rank; its launcher is `python` if there was none.

    ValueError for variables that contradict each other or are incomplete, for Horovod's elastic mode, and for a program
    that was started once although Slurm was asked for several tasks.
    """
    _refuse_elastic(environment)
    claims = [claim for variables in _candidates(environment) if (claim := _claim(variables, environment))]
    several = [claim for claim in claims if claim.size > 1]
    for claim in several:
        others = [other for other in several if other is not claim]
        if all(_agree(claim, other, environment) or _carries(other, claim, environment) for other in others):
            return claim
    if several:
        raise ValueError(_ambiguous(several))
    if not claims:
        _refuse_forgotten(environment)
    return claims[0] if claims else Launch("python")


def is_rank_0(environment: Mapping[str, str]) -> bool:
    """Return whether no launcher says that this process is another rank. True if several contradict each other."""
    try:
        return recognise(environment).rank == 0
    except ValueError:
        return True


def mismatch(launch: Launch, *, rank: int, size: int, local_rank: int, local_size: int) -> str:
    """Return a sentence if Horovod sees another place of this process than its launcher announced; else empty."""
    seen = (rank, size, local_rank, local_size)
    announced = (launch.rank, launch.size, launch.local_rank, launch.local_size)
    if all(said in (None, found) for said, found in zip(announced, seen)):
        return ""
    if size == 1:
        return (
            f"{launch.launcher} announced rank {launch.rank} of {launch.size}, but Horovod sees 1 process: each would "
            f"train alone, as the launcher's MPI is not the one Horovod was built with; {DOCTOR}."
        )
    return (
        f"{launch.launcher} announced rank {launch.rank} of {launch.size}, local rank {launch.local_rank} of "
        f"{launch.local_size}, but Horovod sees rank {rank} of {size}, local rank {local_rank} of {local_size}: the "
        f"launcher's MPI is not the one Horovod was built with; {DOCTOR}."
    )


# -- reading variables -------------------------------------------------------------------------------------------


def read_number(environment: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable, None if it is not set; ValueError for another text."""
    text = environment.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text} should be a number, as a launcher sets it: unset it.") from None


def is_slurm_pmix(environment: Mapping[str, str]) -> bool:
    """Return whether srun --mpi=pmix started this process, and no mpirun after it."""
    return environment.get("PMIX_NAMESPACE", "").startswith("slurm.")


def _candidates(environment: Mapping[str, str]) -> list[Variables]:
    """Return the launchers that may have set variables, first those that announce the most."""
    candidates = [HOROVODRUN, MPIRUN]
    if "TORCHELASTIC_RUN_ID" in environment:
        candidates.insert(1, TORCHRUN)
    if "PMI_JOBID" not in environment or "SLURM_STEP_ID" not in environment:  # with both, srun has set PMI_*
        candidates.append(MPIEXEC)
    if _is_step(environment):
        candidates.append(SRUN)
    if TORCHRUN not in candidates and environment.get("WORLD_SIZE") != "1":
        candidates.append(TORCHRUN)  # a user or a scheduler may set the variables that torch.distributed reads
    return candidates


def _is_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process or a parent of it, not only sbatch or salloc."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < FIRST_RESERVED_STEP


def _claim(variables: Variables, environment: Mapping[str, str]) -> Launch | None:
    """Return the place that a launcher's variables announce; None if they are not set."""
    size = read_number(environment, variables.size)
    if size is None:
        return None
    rank = read_number(environment, variables.rank)
    missing = [variables.rank] if rank is None else []
    if variables is HOROVODRUN:
        missing = [name for name in GLOO_SLOT + GLOO_RENDEZVOUS if not environment.get(name)]
    if size > 1 and missing:
        raise ValueError(
            f"{variables.size}={size} is set without {', '.join(missing)}, so {variables.launcher} did not start this "
            f"process: use a launcher, or unset {variables.size}."
        )
    if rank is None or missing:
        return None
    if not 0 <= rank < size:
        raise ValueError(
            f"{variables.rank}={rank} is no rank of {variables.size}={size}: unset both, or use a launcher."
        )
    if variables is SRUN:
        local_size = _step_local_size(environment)
    else:
        local_size = read_number(environment, variables.local_size)
    return Launch(variables.launcher, rank, size, read_number(environment, variables.local_rank), local_size)


def _step_local_size(environment: Mapping[str, str]) -> int | None:
    sizes = counts(environment.get(SRUN.local_size, ""))
    node = read_number(environment, "SLURM_NODEID")
    return sizes[node] if node is not None and node < len(sizes) else None


# -- several launchers at once -----------------------------------------------------------------------------------


def _agree(one: Launch, other: Launch, environment: Mapping[str, str]) -> bool:
    """Return whether both announce the same rank, and neither started the other.

    All ranks inherit the variables of an outer launcher, so equal numbers would mean nothing.
    """
    launchers = {one.launcher, other.launcher}
    nested = "torchrun" in launchers and "TORCHELASTIC_RUN_ID" in environment
    if "srun" in launchers and not launchers.isdisjoint({"mpirun", "mpiexec"}):
        nested = not is_slurm_pmix(environment)  # with PMIx, Open MPI itself has set its variables in a parent process
    return not nested and (one.rank, one.size) == (other.rank, other.size)


def _carries(outer: Launch, inner: Launch, environment: Mapping[str, str]) -> bool:
    """Return whether the tasks of `outer` start the ranks of `inner` on each host."""
    if inner.launcher == "torchrun":
        return read_number(environment, "GROUP_WORLD_SIZE") == outer.size  # one agent per task
    spans_hosts = inner.local_size is not None and inner.local_size < inner.size
    return outer.launcher == "srun" and inner.launcher in ("mpirun", "mpiexec") and spans_hosts


def _seen(claim: Launch) -> tuple[str, str]:
    """Return the variables behind a claim, with their values and without."""
    variables = next(variables for variables in LAUNCHERS if variables.launcher == claim.launcher)
    return f"{variables.rank}={claim.rank} {variables.size}={claim.size}", f"{variables.rank} {variables.size}"


def _ambiguous(claims: Sequence[Launch]) -> str:
    said = " and ".join(f"{claim.launcher} ({_seen(claim)[0]})" for claim in claims)
    unset = ", ".join(f"`unset {_seen(claim)[1]}` if {claim.launcher} did not start it" for claim in claims)
    return f"Each of {said} claims to have started this process: use one launcher alone, or {unset}."


# -- starts that are refused -------------------------------------------------------------------------------------


def _refuse_elastic(environment: Mapping[str, str]) -> None:
    if environment.get("HOROVOD_ELASTIC", "0") not in ("", "0"):
        raise ValueError(
            "HOROVOD_ELASTIC is set: ranks that come and go would break the numbered batches of a run; start "
            "horovodrun without --host-discovery-script, --min-np and --max-np, and start the same command again "
            "after a loss, since a run resumes with any number of ranks."
        )


def _refuse_forgotten(environment: Mapping[str, str]) -> None:
    tasks = read_number(environment, "SLURM_NTASKS")
    if tasks is not None and tasks > 1:
        raise ValueError(
            f"SLURM_NTASKS={tasks} tasks were asked for, but this program was started as one process: write "
            f"`mpirun -np {tasks}` or `srun` before it, or unset SLURM_NTASKS to train alone."
        )
