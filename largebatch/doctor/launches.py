"""The check that counts: two real processes under each launcher; if they fail, which variable is to blame."""

import os
import re
import shlex
import sys
import time
from collections.abc import Callable

from largebatch.doctor.result import INSTALL, REINSTALL, Output, Result, run

# Each rank runs this. Integers in float64 have an exact sum in any order. Three tensors at once go through Horovod's
# own kernels, which fail without an error on a GPU that they were not compiled for.
ALLREDUCE = """
import gc, sys
gc.disable()
print("process=started.", flush=True)
import torch
import horovod.torch as hvd
hvd.init()
print("process=initialised.", flush=True)
device = torch.device(sys.argv[1], hvd.local_rank()) if sys.argv[1] == "cuda" else torch.device("cpu")
mine = torch.arange(1000, dtype=torch.float64, device=device) + 1000 * hvd.rank()
group = hvd.grouped_allreduce(list(mine.split([500, 300, 200])), op=hvd.Sum, name="largebatch.doctor")
total = torch.cat(group).sum().item()
print(f"rank={hvd.rank()} size={hvd.size()} total={total:.0f}.", flush=True)
hvd.shutdown()
"""
# The same over torch.distributed, for torchrun.
TORCH_ALLREDUCE = """
import os, sys
print("process=started.", flush=True)
import torch
import torch.distributed as dist
device = f"cuda:{os.environ['LOCAL_RANK']}" if sys.argv[1] == "cuda" else "cpu"
dist.init_process_group("nccl" if sys.argv[1] == "cuda" else "gloo")
print("process=initialised.", flush=True)
sums = torch.arange(1000, dtype=torch.float64, device=device) + 1000 * dist.get_rank()
dist.all_reduce(sums)
print(f"rank={dist.get_rank()} size={dist.get_world_size()} total={sums.sum().item():.0f}.", flush=True)
dist.destroy_process_group()
"""
RANKS = 2
TORCHRUN = "torch.distributed.run --standalone --no-python --nproc-per-node"

LAUNCHES: dict[str, list[str]] = {
    "mpirun": ["mpirun", "-np", str(RANKS)],
    "horovodrun": ["horovodrun", "-np", str(RANKS)],
    "horovodrun --gloo": ["horovodrun", "--gloo", "-np", str(RANKS)],
    "torchrun": [sys.executable, "-m", *TORCHRUN.split(), str(RANKS)],
}

# OBEYED: variables that launchers, MPI, Gloo, NCCL, torch and Horovod read. WANTED: those of them, as name=value, that
# the installation sets or a site needs; they are never blamed.
OBEYED = re.compile(r"(HOROVOD|OMPI|OPAL|ORTE|PRTE|PMIX?|SLURM|UCX|FI|NCCL|GLOO|HYDRA|TORCH|PET)_|LD_PRELOAD$|TMPDIR$")
WANTED = re.compile(r"ALLOW_RUN_AS_ROOT|oversubscribe|_policy=|yield_when_idle|OPAL_PREFIX=|/largebatch-no-ssh$")


def check_allreduce(
    launch: str, launcher: list[str] | None = None, *, ranks: int = RANKS, device: str = "cpu", limit_s: float = 120
) -> Result:
    """Let real processes reduce a tensor; each must print the exact sum. launcher: a command instead of LAUNCHES'."""
    name = f"{ranks}-process allreduce, {launch}"
    launcher = launcher or LAUNCHES[launch]
    program = TORCH_ALLREDUCE if launch == "torchrun" else ALLREDUCE
    command = [*launcher, sys.executable, "-c", program, device]
    output = run(command, limit_s=limit_s)
    if summed(output, ranks):
        return Result(name, True, f"the sum is exactly {expected_total(ranks)} on {device}")
    cause, fix = explain(output, launch, launcher, ranks=ranks, limit_s=limit_s)
    finding, better_fix = blame(command, ranks=ranks, limit_s=limit_s)
    if finding:
        cause = f"{cause.rstrip('.')}; {finding}"
    return Result(name, False, cause=cause, fix=better_fix or fix)


def expected_total(ranks: int) -> int:
    return sum(range(1000 * ranks))


def answers(output: Output) -> list[tuple[int, int, int]]:
    """Return (rank, size, total) as each process printed it."""
    found = re.findall(r"rank=(\d+) size=(\d+) total=(\d+)\.", output.stdout)
    return [(int(rank), int(size), int(total)) for rank, size, total in found]


def progress(output: Output) -> str:
    started, initialised = (output.stdout.count(f"process={stage}.") for stage in ("started", "initialised"))
    return f"{started} started, {initialised} met, {len(answers(output))} have the sum"


def summed(output: Output, ranks: int = RANKS) -> bool:
    exact = [(rank, ranks, expected_total(ranks)) for rank in range(ranks)]
    return output.code == 0 and sorted(answers(output)) == exact


def explain(output: Output, launch: str, launcher: list[str], *, ranks: int, limit_s: float) -> tuple[str, str]:
    log, start = "HOROVOD_LOG_LEVEL=debug", "import horovod.torch as hvd; hvd.init()"
    if launch == "torchrun":
        log, start = "TORCH_CPP_LOG_LEVEL=INFO", "import torch.distributed as dist; dist.init_process_group()"
    by_hand = shlex.join([*launcher, sys.executable, "-c", start])
    got = answers(output)
    if output.code is None:
        cause = f"{launch} did not end within {limit_s:.3g} s: of {ranks} processes, {progress(output)}"
        return cause, f"{log} {by_hand}"
    if {size for _, size, _ in got} == {1}:
        cause = f"{ranks} processes were started, but each sees a size of 1: another MPI than Horovod's started them"
        return cause, REINSTALL
    if "plm_rsh_agent" in output.stderr:
        return f"{launch} looks for an ssh client, which is not installed, although one host needs none", INSTALL
    if output.code != 0:
        return f"{launch} {output.how_it_ended}: {output.last_error}", by_hand
    if {rank for rank, _, _ in got} != set(range(ranks)):
        return f"{len(got)} of {ranks} processes answered", by_hand
    totals = ", ".join(str(total) for total in sorted({total for _, _, total in got}))
    return f"the sum should be {expected_total(ranks)}, but is {totals}", REINSTALL


def blame(command: list[str], *, ranks: int = RANKS, limit_s: float) -> tuple[str, str]:
    """Return the variable without which a failing launch works, in words, and the fix; empty if there is none.

    If it works without any, repeat it with all, because it may have failed by chance. Then bisect.
    """
    names = sorted(
        name for name, value in os.environ.items() if OBEYED.match(name) and not WANTED.search(f"{name}={value}")
    )

    def works(given: int, *, limit_s: float) -> bool:
        taken = names[given:]
        environment = {name: value for name, value in os.environ.items() if name not in taken}
        return summed(run(command, limit_s=limit_s, environment=environment), ranks)

    began = time.monotonic()
    if not works(0, limit_s=limit_s):
        return "", ""
    enough_s = min(limit_s, 2 + 3 * (time.monotonic() - began))
    if not names or works(len(names), limit_s=enough_s):
        return "the same command worked when it was repeated", ""
    culprit = names[last_working(lambda given: works(given, limit_s=enough_s), len(names))]
    return f"without {culprit}={os.environ[culprit]} it works", f"unset {culprit}"


def last_working(works: Callable[[int], bool], too_many: int) -> int:
    """Return the largest count that works; 0 does, `too_many` does not."""
    low, high = 0, too_many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def device_for_launches(facts: dict, device: str) -> str:
    """Return cuda if each rank can have its own GPU, as NCCL requires, otherwise cpu."""
    return "cuda" if device != "cpu" and facts["nccl"] and facts["gpus"] >= RANKS else "cpu"
