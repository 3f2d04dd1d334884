"""Checks of this host and shell, whose faults would later look like faults of MPI or Horovod."""

import os
import resource
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from largebatch.doctor.result import Result, run
from largebatch.launch.home import has_name
from largebatch.launch.launcher import LAUNCHERS, SRUN
from largebatch.process.installer import install_command

# With more than 1 in one of these, a program without a launcher refuses to run. Slurm's has a check of its own below.
LAUNCHER_SIZES = tuple(launcher.size for launcher in LAUNCHERS if launcher is not SRUN)
MIB, GIB = 2**20, 2**30
NEEDED_SHM_BYTES = 64 * MIB  # for messages between the ranks of a host: Open MPI takes 4 MB per rank, NCCL more
NEEDED_DISK_BYTES = 2 * GIB  # two checkpoints of ViT-B/32 and a third that is being written
NEEDED_MEMORY_BYTES = 4 * GIB  # two ranks that train the quick start
NEEDED_FILES = 256  # Open MPI hangs or crashes below about 50; a loader takes a quarter of the limit


def check_launcher_variables() -> Result:
    name = "launcher variables"
    leftover = [name for name in LAUNCHER_SIZES if os.environ.get(name, "") not in ("", "1")]
    if "SLURM_JOB_ID" not in os.environ and os.environ.get("SLURM_NTASKS", "") not in ("", "1"):
        leftover.append("SLURM_NTASKS")
    if not leftover:
        return Result(name, True, "none is left over from a launch")
    seen = ", ".join(f"{name}={os.environ[name]}" for name in leftover)
    cause = f"{seen} is set, as in a rank of a launch, so a program started without a launcher would refuse to train"
    return Result(name, False, cause=cause, fix=f"unset {' '.join(leftover)}")


def check_hostname() -> Result:
    """Check that this machine can resolve its own name: Gloo crashes without an address, and hangs at a wrong one."""
    name, host = "host name", socket.gethostname()
    fix = f"echo '127.0.0.1 {host}' | sudo tee -a /etc/hosts"
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return Result(name, False, cause=f"the name of this machine, {host}, does not resolve", fix=fix)
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            cause = f"the name of this machine, {host}, resolves to {address}, an address of another machine"
            return Result(name, False, cause=cause, fix=f"sudo sed -i '/\\b{host}\\b/d' /etc/hosts; {fix}")
    return Result(name, True, f"{host} is {address}")


def check_home() -> Result:
    """Check the home folder, without which mpirun and horovodrun crash."""
    name, home = "home folder", os.environ.get("HOME", "")
    if has_name() or (os.path.isdir(home) and os.access(home, os.W_OK | os.X_OK)):
        return Result(name, True, home or "that of the user's name")
    where = f"HOME is {home}, where it cannot write" if home else "HOME is not set"
    cause = f"the user id {os.getuid()} has no name, and {where}: mpirun or horovodrun would crash"
    return Result(name, False, cause=cause, fix="export HOME=$(mktemp -d)")


def check_shared_memory(folder: str = "/dev/shm") -> Result:
    """Check the space in /dev/shm, through which the ranks of a host exchange messages."""
    name = "shared memory"
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        fix = f"sudo mkdir -p {folder} && sudo mount -t tmpfs -o mode=1777 tmpfs {folder}"
        return Result(name, False, cause=f"{folder} is not a folder where files can be created", fix=fix)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_SHM_BYTES:
        cause = f"{folder} has {free // MIB} MiB free, but needs {NEEDED_SHM_BYTES // MIB} (docker: --shm-size=1g)"
        return Result(name, False, cause=cause, fix=f"sudo mount -o remount,size=1g {folder}")
    return Result(name, True, f"{free / GIB:.1f} GiB free in {folder}")


def check_disk(folder: str = ".") -> Result:
    """Check that the working folder has room for checkpoints."""
    name, free = "disk", shutil.disk_usage(folder).free
    if free < NEEDED_DISK_BYTES:
        needed = NEEDED_DISK_BYTES // GIB
        cause = f"{free / GIB:.1f} GiB are free in {os.path.abspath(folder)}, but checkpoints need {needed} GiB"
        return Result(name, False, cause=cause, fix=f"df -h {os.path.abspath(folder)}")
    return Result(name, True, f"{free / GIB:.0f} GiB free")


def check_open_files() -> Result:
    """Check the limit of open files: MPI opens pipes and sockets for each rank, the loader a file per shard."""
    name, (soft, hard) = "open files", resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < NEEDED_FILES:
        may_raise = hard < 0 or hard >= NEEDED_FILES
        fix = "ulimit -n $(ulimit -H -n)" if may_raise else f"sudo prlimit --pid $$ --nofile={2**16}"
        cause = f"a process may have {soft} files open, but {NEEDED_FILES} are needed"
        return Result(name, False, cause=cause, fix=fix)
    return Result(name, True, f"{soft} allowed per process")


def available_memory() -> int:
    """Return the bytes of memory that are available, at most those that the cgroup allows."""
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # another version of cgroups, or "max"
            available = min(available, int(Path(path).read_text()))
    return available


def check_memory() -> Result:
    """Check the memory for two ranks, and the limit of address space, of which torch reserves more than it uses."""
    name, limit = "memory", resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < NEEDED_MEMORY_BYTES:
        cause = f"the address space of a process is limited to {limit // MIB} MiB"
        return Result(name, False, cause=cause, fix="ulimit -v unlimited")
    available = available_memory()
    if available < NEEDED_MEMORY_BYTES:
        needed = NEEDED_MEMORY_BYTES // GIB
        cause = f"{available / GIB:.1f} GiB are available, but two ranks of the quick start need {needed} GiB"
        return Result(name, False, cause=cause, fix="ps aux --sort=-rss | head")
    return Result(name, True, f"{available / GIB:.0f} GiB available")


def check_threads() -> Result:
    """Check OMP_NUM_THREADS, which holds for each rank."""
    name, text, cores = "threads", os.environ.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))
    if not text:
        return Result(name, True, f"{cores} cores, shared by the ranks")
    first = text.split(",")[0]
    if not first.isdigit() or not int(first):
        cause = f"OMP_NUM_THREADS is {text!r}; expected a number of threads, at least 1"
        return Result(name, False, cause=cause, fix="unset OMP_NUM_THREADS")
    if int(first) > cores:
        cause = f"OMP_NUM_THREADS is {first} for each rank on {cores} cores: ranks will slow each other down"
        return Result(name, True, cause=cause, fix="unset OMP_NUM_THREADS")
    return Result(name, True, f"{first} per rank on {cores} cores")


def visible_gpus(*, limit_s: float = 60) -> int:
    """Return the number of GPUs that the driver shows: torch without CUDA sees none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    return sum(line.startswith("GPU ") for line in run([tool, "-L"], limit_s=limit_s).stdout.splitlines())


def check_gpu(facts: dict, device: str) -> Result:
    name = "GPU and NCCL"
    if device == "cpu":
        return Result(name, True, "not checked (--device cpu)")
    gpus = visible_gpus()
    if gpus == 0:
        if device == "cuda":
            cause = "--device cuda was given, but no GPU is visible"
            return Result(name, False, cause=cause, fix="nvidia-smi -L")
        return Result(name, True, "no GPU is visible, so training uses the CPU")
    if facts["cuda"] is None:
        cause = (
            f"{gpus} GPUs are visible, but torch {facts['torch']} was built without CUDA "
            "(pip's own settings may point to a CPU build)"
        )
        fix = install_command("--force", settings="PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS=")
        return Result(name, False, cause=cause, fix=fix)
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        cause = f"{gpus} GPUs are there, but CUDA_VISIBLE_DEVICES hides them all"
        return Result(name, False, cause=cause, fix="unset CUDA_VISIBLE_DEVICES")
    if facts["gpus"] == 0:
        cause = f"{gpus} GPUs are visible, but torch (CUDA {facts['cuda']}) sees none: the driver may be too old"
        return Result(name, False, cause=cause, fix="nvidia-smi")
    if not facts["nccl"]:
        cause = f"{gpus} GPUs are visible, but Horovod was built without NCCL"
        return Result(name, False, cause=cause, fix=install_command("--force", settings="OPERATIONS=nccl"))
    return Result(name, True, f"{facts['gpus']} GPUs, CUDA {facts['cuda']}, NCCL")


CHECKS = (
    check_launcher_variables,
    check_hostname,
    check_home,
    check_shared_memory,
    check_disk,
    check_open_files,
    check_memory,
    check_threads,
)
